//! Many clients with one thread each wait for one key: closed notification connections cost few new ones, and
//! a waiter near the front asks soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use leasehold::Client;
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, connections_made, in_redis, millis, notified_clients, queue,
    script_calls, secs, server, wait_for_queue,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Clients that reconnect know why they lost their queue entry, so they suspect no other connection.
#[test]
fn closed_notification_connections_alone_are_replaced() {
    const CLIENTS: usize = 30;
    let server = server();
    let (stop, grants) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mutex = client(&server).mutex("k");
            let (stop, grants) = (Arc::clone(&stop), Arc::clone(&grants));
            Task::start(move || {
                while !stop.load(Ordering::SeqCst) {
                    let guard = mutex.lock().unwrap();
                    grants.fetch_add(1, Ordering::SeqCst);
                    thread::sleep(millis(5));
                    drop(guard);
                }
            })
        })
        .collect();
    let so_many_more = |more: usize| {
        let wanted = grants.load(Ordering::SeqCst) + more;
        let enough = || grants.load(Ordering::SeqCst) >= wanted;
        assert!(eventually(secs(60), enough));
    };
    assert!(eventually(SOON, || notified_clients(&server) == CLIENTS));
    so_many_more(3 * CLIENTS);
    let made = connections_made(&server, || {
        ask(&server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
        so_many_more(5 * CLIENTS);
    });
    // Each client makes one new notification connection. A client whose request came just when its connection was
    // closed may suspect its other connections, and replace them, too.
    assert!(made <= 3 * CLIENTS as u64 / 2, "{made}");
    stop.store(true, Ordering::SeqCst);
    for task in tasks {
        task.within(secs(60), "its last grant");
    }
}

/// Without the message, the waiter behind hundreds of others would not ask for half a minute.
#[test]
fn a_waiter_notified_as_near_asks_soon() {
    let server = server();
    let [holder, waiting] = [(); 2].map(|()| client(&server));
    let held = [holder.mutex("warm"), holder.mutex("k")].map(|mutex| mutex.lock().unwrap());
    let warm = waiting.mutex("warm");
    assert!(warm.try_lock_for(secs(2)).unwrap().is_none());
    assert!(eventually(SOON, || notified_clients(&server) == 2));
    let fill = "for n = 1, 400 do \
        redis.call('ZADD', KEYS[1], n, string.format('%032x,60000,gone/%d/0', n, n)) end \
        redis.call('PEXPIRE', KEYS[1], 60000)";
    ask(&server, &["EVAL", fill, "1", &in_redis("~queue:k")]);
    let mutex = waiting.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 401);
    let own = queue(&server, "k").pop().unwrap();
    let mut words = own.split(',');
    let (lease, address) = (words.next().unwrap(), words.next_back().unwrap());
    let before = script_calls(&server);
    let message = format!("{} ~ {}", &lease[..16], in_redis("k"));
    ask(
        &server,
        &["PUBLISH", &in_redis(&format!("~to:{address}")), &message],
    );
    assert!(eventually(SOON, || script_calls(&server) > before));
    drop(held);
    drop(waiter.within(SOON, "the grant, past the dead waiters"));
}
