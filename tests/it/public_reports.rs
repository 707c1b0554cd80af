//! Kinds of bug reports about other lock libraries that no other test covers. The page docs/conformance.md lists all
//! kinds.

use std::process::exit;
use std::sync::mpsc::channel;

use leasehold::Client;
use leasehold_testbed::{Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, in_redis, is_held, secs, server};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Ends its process from the callback thread.
pub fn exit_in_on_lost(parent: &Parent) {
    let client = Client::builder(&parent.url).ttl(LONG_TTL).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    guard.on_lost(|_| exit(7));
    parent.tell("held");
    parent.wait_for_end();
}

#[test]
fn a_process_may_end_itself_when_its_lock_is_lost() {
    let server = server();
    let mut child = Child::start(exit_in_on_lost, &server.url());
    child.receive::<String>(6 * SOON);
    ask(&server, &["DEL", &in_redis("k")]);
    // `exit` waits for no thread of the library.
    assert_eq!(child.status(6 * SOON).code(), Some(7));
}

/// A guard that nobody receives is dropped with its channel.
#[test]
fn a_guard_in_a_dropped_channel_is_released() {
    let server = server();
    let client = client(&server);
    let (sender, receiver) = channel();
    sender.send(client.mutex("k").lock().unwrap()).unwrap();
    drop(receiver);
    let next = client.mutex("k").try_lock_for(secs(10)).unwrap();
    assert!(next.is_some());
    let (sender, receiver) = channel();
    drop(receiver);
    let returned = sender.send(next.unwrap()).unwrap_err();
    assert!(is_held(&server, "k"), "the error owns the guard");
    drop(returned);
    assert!(eventually(SOON, || !is_held(&server, "k")));
}
