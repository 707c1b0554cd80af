//! The cost of waiting for the server: a handful of requests. A client that never waits has no notification connection.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, connections, lock_requests, millis, notification_connections, reads,
    reads_during, script_calls, secs, server, tracked, wait_for_queue, warm_up,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// The client waits once, so that it receives notifications from then on.
fn wait_once(server: &Server, client: &Client, holder: &Client) {
    let held = holder.mutex("first").lock().unwrap();
    let mutex = client.mutex("first");
    let waiter = Task::start(move || mutex.lock().unwrap().unlock().unwrap());
    wait_for_queue(server, "first", 1);
    held.unlock().unwrap();
    waiter.within(SOON, "entering");
}

#[test]
fn an_uncontended_lock_costs_two_calls() {
    const TIMES: u64 = 100;
    // Only short holds: after a longer hold, the client tracks the key.
    const SHORT: Duration = Duration::from_millis(20);
    for _ in 0..50 {
        let server = server();
        let client = client(&server);
        warm_up(&client);
        let before = lock_requests(&server);
        let mut longest = Duration::ZERO;
        for round in 0..TIMES {
            let start = Instant::now();
            let guard = client.mutex("k").lock().unwrap();
            if round % 2 == 0 {
                guard.unlock().unwrap();
            } else {
                drop(guard);
            }
            longest = longest.max(start.elapsed());
        }
        // The release of a dropped guard is in flight. The next acquire of the key comes behind it.
        client.with_lock("k", || ()).unwrap();
        let requests = lock_requests(&server) - before;
        assert_eq!(requests, 2 * (TIMES + 1));
        if longest < SHORT {
            assert_eq!(notification_connections(&server), 0);
            assert_eq!(tracked(&server), 0);
            return;
        }
    }
    panic!("this machine is too slow for so many holds in a row");
}

#[test]
fn try_lock_opens_no_notification_connection() {
    let server = server();
    let (holder, client) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    // Only the holder has a notification connection, since it holds the lock for long.
    assert!(eventually(SOON, || notification_connections(&server) == 1));
    for _ in 0..20 {
        assert!(client.mutex("k").try_lock().unwrap().is_none());
    }
    assert_eq!(notification_connections(&server), 1);
    held.unlock().unwrap();
}

#[test]
fn a_second_of_waiting_costs_a_handful_of_requests() {
    let server = server();
    let (holder, client) = (client(&server), client(&server));
    wait_once(&server, &client, &holder);
    let held = holder.mutex("k").lock().unwrap();
    assert!(
        eventually(SOON, || tracked(&server) > 0),
        "the lock is tracked"
    );
    let before = script_calls(&server);
    let looked = reads_during(&server, || {
        assert!(client.mutex("k").try_lock_for(secs(1)).unwrap().is_none());
        // The queue entry is removed behind the reply.
        wait_for_queue(&server, "k", 0);
    });
    let calls = script_calls(&server) - before;
    // One request asks, one or two ask again, and one leaves. Polling would take twenty times as many.
    assert!(calls <= 5, "{calls} script calls");
    // Both clients that track the key read it at each change.
    assert!(looked <= 8, "{looked} reads of the key");
    held.unlock().unwrap();
}

#[test]
fn a_grant_is_notified_without_polling() {
    const ROUNDS: usize = 9;
    let server = server();
    let (holder, client) = (client(&server), client(&server));
    wait_once(&server, &client, &holder);
    let mut costs: Vec<u64> = (0..ROUNDS)
        .map(|_| {
            let before = lock_requests(&server);
            let held = holder.mutex("k").lock().unwrap();
            let mutex = client.mutex("k");
            let waiter = Task::start(move || mutex.lock().unwrap());
            wait_for_queue(&server, "k", 1);
            held.unlock().unwrap();
            let guard = waiter.within(SOON, "entering");
            let cost = lock_requests(&server) - before;
            guard.unlock().unwrap();
            cost
        })
        .collect();
    costs.sort_unstable();
    // The holder sends two requests, and the waiter sends one. On a busy machine some clients ask again.
    assert_eq!(costs[ROUNDS / 2], 3, "{costs:?}");
}

#[test]
fn a_client_has_one_notification_connection() {
    let server = server();
    let (holder, client) = (client(&server), client(&server));
    let held: Vec<_> = (0..20)
        .map(|n| holder.mutex(format!("held-{n}")).lock().unwrap())
        .collect();
    let waiters: Vec<_> = (0..20)
        .map(|n| {
            let mutex = client.mutex(format!("held-{n}"));
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    for n in 0..20 {
        wait_for_queue(&server, &format!("held-{n}"), 1);
    }
    assert!(eventually(SOON, || notification_connections(&server) == 2));
    // The connections of each client: two pipelines, two for renewals, one for notifications.
    assert!(connections(&server) <= 10);
    drop(held);
    for waiter in waiters {
        waiter.within(SOON, "entering").unwrap();
    }
    assert_eq!(notification_connections(&server), 2);
    drop((holder, client));
    let closed = eventually(SOON, || connections(&server) == 0);
    assert!(closed, "{} connections are left", connections(&server));
}

#[test]
fn a_long_held_lock_is_read_once() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    assert!(eventually(SOON, || tracked(&server) > 0));
    let before = (reads(&server), script_calls(&server));
    assert!(guard.lost_signal().recv_timeout(millis(400)).is_err());
    assert_eq!((reads(&server), script_calls(&server)), before);
    guard.unlock().unwrap();
}
