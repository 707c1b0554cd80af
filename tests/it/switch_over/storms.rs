//! A client of a server that refuses everything for long does not open a connection for each request.

use std::time::Instant;

use leasehold::{Client, ErrorKind};
use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{
    SOON, TIMEOUT, Task, ask, connections_accepted, lock, notified_clients, script_calls, secs,
    server,
};

/// Connections that a client uses here: two pipelines, and one for notifications.
const USED: u64 = 3;

#[test]
fn a_read_only_server_costs_a_connection_per_second() {
    const CLIENTS: usize = 10;
    const THREADS: usize = 16;
    let server = server();
    let clients: Vec<Client> = (0..CLIENTS)
        .map(|_| {
            steady(&server.url())
                .outage_timeout(TIMEOUT)
                .build()
                .unwrap()
        })
        .collect();
    // Each client holds a lock for long enough that it has a notification connection.
    let held: Vec<_> = (0..CLIENTS)
        .map(|n| lock(&clients[n], &format!("held{n}")))
        .collect();
    let all_notified = eventually(SOON, || notified_clients(&server) == CLIENTS);
    assert!(all_notified);
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    let (before, started) = (
        (connections_accepted(&server), script_calls(&server)),
        Instant::now(),
    );
    let tasks: Vec<_> = (0..CLIENTS * THREADS)
        .map(|n| {
            let mutex = clients[n % CLIENTS].mutex(format!("k{n}"));
            Task::start(move || {
                while started.elapsed() < secs(3) {
                    let error = mutex.try_lock().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(secs(60), "the refusal");
    }
    let seconds = started.elapsed().as_secs() + 1;
    let refused = script_calls(&server) - before.1;
    // Two of the connections are the test's own.
    let made = connections_accepted(&server) - before.0 - 2;
    let bound = CLIENTS as u64 * USED * (seconds + 1);
    println!("{made} connections for {refused} requests in {seconds} s");
    assert!(made <= bound, "{made} of {bound} connections");
    assert!(made >= CLIENTS as u64, "{made} connections");
    assert!(refused > 2 * bound, "too few to show anything: {refused}");
    ask(&server, &["REPLICAOF", "NO", "ONE"]);
    drop(held);
}
