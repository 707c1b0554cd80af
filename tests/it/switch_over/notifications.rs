//! The notification connection follows the primary, so that a client stays in the queues of its keys.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use leasehold::Client;
use leasehold_testbed::{Server, eventually};

use super::{Servers, assert_listens_on_the_new, listen_on_the_old, listening};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, channel_of, lock, millis, script_calls, secs, wait_for_queue,
};

#[test]
fn one_refused_request_replaces_the_notification_connection() {
    let servers = Servers::start();
    // One pipeline: the request has to use a connection to the old primary, whatever its key.
    let builder = steady(&servers.proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.build().unwrap();
    let _held = listen_on_the_old(&servers, &client);
    assert_eq!(listening(&servers.old, &client), 1);
    servers.switch_over();
    let before = script_calls(&servers.old) + script_calls(&servers.new);
    lock(&client, "other").unlock().unwrap();
    assert_listens_on_the_new(&servers, &client);
    let requests = script_calls(&servers.old) + script_calls(&servers.new) - before;
    // The client repeats the request while its connections are younger than a second; half of the attempts
    // reach each server.
    assert!(requests < 100, "{requests} requests");
}

#[test]
fn a_skipped_waiter_replaces_the_notification_connection() {
    let servers = Servers::start();
    let client = servers.client();
    let _held = listen_on_the_old(&servers, &client);
    servers.switch_over();
    // From now on, pipelines lead to the new primary, and no request is refused.
    servers.close_pipelines();
    let other = servers.client();
    let held = lock(&other, "k");
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&servers.new, "k", 1);
    assert_eq!(listening(&servers.new, &client), 0);
    held.unlock().unwrap();
    // The release skipped the waiter, whose client is subscribed on the old primary.
    let next = lock(&other, "k");
    wait_for_queue(&servers.new, "k", 1);
    assert_listens_on_the_new(&servers, &client);
    next.unlock().unwrap();
    let guard = waiter.within(SOON, "the grant");
    guard.check().unwrap();
}

#[test]
fn a_client_from_before_the_switch_competes_fairly() {
    const NEW_CLIENTS: usize = 4;
    const GRANTS: u64 = 800;
    let servers = Servers::start();
    let client = servers.client();
    let _held = listen_on_the_old(&servers, &client);
    lock(&client, "k").unlock().unwrap();
    servers.switch_over();
    let clients: Vec<Client> = (0..NEW_CLIENTS).map(|_| servers.client()).collect();
    let all = clients.into_iter().chain([client]);
    let (begin, total) = (Arc::new(Barrier::new(NEW_CLIENTS + 1)), Arc::default());
    let tasks: Vec<_> = all
        .map(|client| {
            let (begin, total) = (Arc::clone(&begin), Arc::clone(&total));
            let total: Arc<AtomicU64> = total;
            Task::start(move || {
                let (mutex, mut grants) = (client.mutex("k"), 0);
                begin.wait();
                while total.fetch_add(1, Ordering::SeqCst) < GRANTS {
                    let guard = mutex.lock().unwrap();
                    std::thread::sleep(millis(5));
                    guard.unlock().unwrap();
                    grants += 1;
                }
                grants
            })
        })
        .collect();
    let grants = tasks
        .into_iter()
        .map(|task| task.within(secs(60), "its share"));
    let grants: Vec<u64> = grants.collect();
    // A fifth of the grants would be fair. The client loses a second, until its connections are old enough to be
    // replaced.
    assert!(grants[NEW_CLIENTS] > GRANTS / 20, "{grants:?}");
}

/// Scripts find the client subscribed at any time, even while its connection is replaced.
#[test]
fn a_replaced_notification_connection_misses_nothing() {
    let servers = Servers::start();
    let server = &servers.old;
    let client = servers.client();
    let _held = listen_on_the_old(&servers, &client);
    let before = id_of_notifications(server);
    let direct = redis::Client::open(server.url()).unwrap();
    let mut direct = direct.get_connection_with_timeout(SOON).unwrap();
    let channel = channel_of(&client);
    ask(server, &["REPLICAOF", "127.0.0.1", "1"]);
    let mutex = client.mutex("other");
    let task = Task::start(move || mutex.lock().unwrap());
    let mut fewest = u64::MAX;
    let replaced = eventually(SOON, || {
        for _ in 0..100 {
            let mut count = redis::cmd("PUBSUB");
            count.arg("NUMSUB").arg(&channel);
            let (_, listening): (String, u64) = count.query(&mut direct).unwrap();
            fewest = fewest.min(listening);
        }
        listening(server, &client) == 1 && id_of_notifications(server) != before
    });
    assert!(replaced);
    assert_eq!(fewest, 1);
    ask(server, &["REPLICAOF", "NO", "ONE"]);
    drop(task.within(SOON, "the lock"));
}

/// The id of the newest notification connection.
fn id_of_notifications(server: &Server) -> String {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().unwrap().lines();
    let mut lines = lines.filter(|line| line.contains(" name=leasehold-notifications:"));
    let last = lines.next_back().unwrap_or_default();
    last.split(' ').next().unwrap_or_default().to_owned()
}
