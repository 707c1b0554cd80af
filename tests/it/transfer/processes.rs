//! Locks that pass from process to process.

use std::time::Duration;

use leasehold::Client;

use super::{adopt, client, lock};
use crate::child::{Child, Parent};
use crate::support::{LONG_TTL, SOON, ask, in_redis, is_held, secs, server};

/// The limit for starting a process on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Adopts the ticket under the key `ticket`, sends its token, and makes a ticket in its turn.
pub fn adopt_and_hand_over(parent: &Parent) {
    let client = Client::builder(&parent.url).ttl(LONG_TTL).build().unwrap();
    let ticket = client.fenced_value("ticket").read().unwrap().unwrap();
    let guard = adopt(&client, &String::from_utf8(ticket).unwrap());
    parent.tell(guard.fencing_token());
    parent.tell(client.holder_id().to_string());
    client
        .fenced_value("ticket")
        .write(guard.fencing_token(), guard.into_ticket().unwrap())
        .unwrap();
    parent.tell("done");
    parent.wait_for_end();
}

#[test]
fn a_token_rises_through_processes() {
    let server = server();
    let [client, third] = [(); 2].map(|()| client(&server));
    let guard = lock(&client, "k");
    let token = guard.fencing_token();
    let ticket = client.fenced_value("ticket");
    ticket.write(token, guard.into_ticket().unwrap()).unwrap();
    let mut last = String::new();
    let mut last_token = token;
    for _ in 0..3 {
        let child = Child::start(adopt_and_hand_over, &server.url());
        let token = child.receive::<u64>(START);
        assert!(token > last_token);
        last_token = token;
        let holder: String = child.receive(SOON);
        assert_ne!(holder, last, "each process is a holder of its own");
        last = holder;
        assert_eq!(child.receive::<String>(SOON), "done");
        assert!(third.mutex("k").try_lock().unwrap().is_none());
        child.finish(SOON);
        assert!(is_held(&server, "k"), "the ticket outlives its process");
    }
    let ticket = String::from_utf8(ticket.read().unwrap().unwrap()).unwrap();
    let guard = adopt(&client, &ticket);
    assert!(guard.fencing_token() > last_token);
    guard.unlock().unwrap();
    assert!(third.mutex("k").try_lock().unwrap().is_some());
}

/// Adopts, sends a message, and holds the lock until it is killed.
pub fn adopt_and_hold(parent: &Parent) {
    let client = Client::builder(&parent.url).build().unwrap();
    let ticket = client.fenced_value("ticket").read().unwrap().unwrap();
    let guard = adopt(&client, &String::from_utf8(ticket).unwrap());
    parent.tell(guard.fencing_token());
    parent.wait_for_end();
    drop(guard);
}

#[test]
fn a_killed_adopter_leaves_the_lock_its_ttl() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").ttl(secs(3)).lock().unwrap();
    let token = guard.fencing_token();
    let ticket = guard.into_ticket().unwrap();
    // A process may take longer than the ttl to start.
    ask(&server, &["PEXPIRE", &in_redis("k"), "120000"]);
    client.fenced_value("ticket").write(token, ticket).unwrap();
    let mut child = Child::start(adopt_and_hold, &server.url());
    assert!(child.receive::<u64>(START) > token);
    child.kill();
    assert!(is_held(&server, "k"));
    ask(&server, &["PEXPIRE", &in_redis("k"), "300"]);
    assert!(lock(&client, "k").fencing_token() > token);
}
