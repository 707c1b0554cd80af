//! Nothing is left behind: no keys in Redis, no connections, no threads.

use std::time::Duration;

use leasehold_testbed::{Reply, Server, eventually};

use crate::child::{self, Child, Parent};
use crate::cluster::pool::PooledCluster;
use crate::fakes::{Fake, Manner, closed_port};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, builder, connections, in_redis, millis, secs, server,
};

/// All keys in the first database: the server is the test's own.
fn all_keys(server: &Server) -> Vec<String> {
    let Reply::Array(keys) = ask(server, &["KEYS", "*"]) else {
        panic!("KEYS answers with an array");
    };
    let mut keys: Vec<String> = keys
        .iter()
        .filter_map(|key| key.as_text().map(str::to_owned))
        .collect();
    keys.sort();
    keys
}

/// Locks in all states: held, contended, waited for, given up, lost, released by a panic.
fn use_everything(url: &str) {
    let client = steady(url).ttl(secs(5)).build().unwrap();
    let held = client.mutex("held").lock().unwrap();
    assert!(client.mutex("held").try_lock().unwrap().is_none());
    assert!(
        client
            .mutex("held")
            .try_lock_for(millis(30))
            .unwrap()
            .is_none()
    );
    let waiting = client.mutex("held");
    let waiter = Task::start(move || waiting.lock().map(drop));
    held.extend(secs(9)).unwrap();
    client.with_lock("with", || ()).unwrap();
    drop(client.mutex("checked").renew_while(|| true).lock().unwrap());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        client.with_lock("panic", || panic!("a test's own panic"))
    }));
    assert!(panicked.is_err());
    let short = client.mutex("short").fixed_ttl(millis(60)).lock().unwrap();
    short.lost_signal().recv_timeout(SOON).unwrap();
    drop(short);
    let guards: Vec<_> = (0..300)
        .map(|n| client.mutex(format!("many-{n}")).lock().unwrap())
        .collect();
    drop(guards);
    drop(held);
    waiter.within(SOON, "the waiter's grant").unwrap();
}

#[test]
fn only_the_fence_counter_is_left_in_redis() {
    let server = server();
    use_everything(&server.url());
    assert_eq!(all_keys(&server), [in_redis("~fence")]);
    let ttl = ask(&server, &["PTTL", &in_redis("~fence")]);
    assert_eq!(ttl, Reply::Int(-1), "the counter stays");
}

#[test]
fn each_prefix_has_one_fence_counter() {
    let server = server();
    for prefix in ["one:", "two:"] {
        let client = steady(&server.url()).prefix(prefix).build().unwrap();
        for n in 0..50 {
            client.with_lock(format!("k{n}"), || ()).unwrap();
        }
    }
    assert_eq!(all_keys(&server), ["one:~fence", "two:~fence"]);
}

#[test]
fn a_client_closes_its_bounded_connections() {
    let server = server();
    let client = steady(&server.url())
        .pipelines(4)
        .ttl(secs(3))
        .renew_ratio(0.05);
    let client = client.build().unwrap();
    // The connection of `build` is closed by now.
    assert!(eventually(SOON, || connections(&server) == 0));
    let tasks: Vec<_> = (0..24)
        .map(|n| {
            let mutex = client.mutex(format!("k{n}"));
            Task::start(move || {
                let guard = mutex.lock().unwrap();
                // The hold is long enough for a renewal.
                let lost = guard.lost_signal().recv_timeout(millis(500));
                assert!(lost.is_err(), "{lost:?}");
            })
        })
        .collect();
    // Four pipelines, two connections for renewals, and one for notifications.
    let most = (0..200)
        .map(|_| {
            std::thread::sleep(millis(2));
            connections(&server)
        })
        .max();
    for task in tasks {
        task.within(SOON, "holding for a moment");
    }
    assert!(most <= Some(7), "{most:?} connections");
    drop(client);
    let closed = eventually(SOON, || connections(&server) == 0);
    assert!(closed, "{} connections are left", connections(&server));
    assert_eq!(all_keys(&server), [in_redis("~fence")]);
}

#[test]
fn a_dropped_client_leaves_no_thread() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    let child = Child::start(count_threads, &server.url());
    child.finish(secs(120));
}

pub fn count_threads(parent: &Parent) {
    let before = child::threads().unwrap();
    let back_to_before = |what: &str, limit: Duration| {
        let gone = eventually(limit, || child::threads().unwrap() == before);
        let now = child::threads().unwrap();
        assert!(gone, "{what}: {now} threads, {before} before");
    };
    for _ in 0..5 {
        use_everything(&parent.url);
    }
    back_to_before("after all was done", SOON);

    let client = steady(&parent.url).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    client.shutdown(secs(5)).unwrap();
    drop(client);
    back_to_before("after a shutdown", SOON);

    let nowhere = format!("redis://127.0.0.1:{}", closed_port());
    drop(builder(&nowhere).build_lazy().unwrap());
    back_to_before("after a client that never connected", SOON);
    assert!(builder(&nowhere).build().is_err());
    back_to_before("after a client that could not be built", SOON);
    let client = builder(&nowhere).build_lazy().unwrap();
    assert!(client.mutex("k").try_lock().is_err());
    drop(client);
    back_to_before("after a client that could not connect", SOON);

    let fake = Fake::start(Manner::BacklogOnly);
    let client = builder(&fake.url()).build_lazy().unwrap();
    assert!(client.mutex("k").try_lock().is_err());
    drop(client);
    back_to_before("after a client that got no reply", SOON);

    // Several attempts to connect are under way.
    let clients = [(); 6].map(|()| builder(&fake.url()).build_lazy().unwrap());
    let tries: Vec<_> = (0..4 * clients.len())
        .map(|n| {
            let mutex = clients[n % clients.len()].mutex(format!("k{n}"));
            Task::start(move || mutex.try_lock().is_err())
        })
        .collect();
    for task in tries {
        assert!(task.within(SOON, "trying"));
    }
    drop(clients);
    back_to_before("after clients with many attempts to connect", SOON);
}

#[test]
fn a_dropped_cluster_client_leaves_nothing() {
    if child::threads().is_none() {
        return;
    }
    let cluster = PooledCluster::take();
    let child = Child::start(use_a_cluster, &cluster.get().url());
    for _ in 0..2 {
        let () = child.receive(12 * SOON);
        // The child still runs, so the client has closed these connections, not the end of the process.
        for node in cluster.get().nodes() {
            let list = || ask(node, &["CLIENT", "LIST"]).as_text().unwrap().to_owned();
            // A holder's id has the number of its process. Other tests have used this Cluster before.
            let own = format!("/{}/", child.id());
            let are_closed = eventually(SOON, || !list().contains(&own));
            assert!(are_closed, "{}", list());
        }
    }
    child.finish(12 * SOON);
}

/// Drops clients that have used all nodes, with a waiter and without, after a shutdown and without one.
pub fn use_a_cluster(parent: &Parent) {
    let before = child::threads().unwrap();
    for is_shut_down in [false, true] {
        for _ in 0..3 {
            let client = steady(&parent.url).ttl(LONG_TTL).build().unwrap();
            for n in 0..30 {
                let name = format!("k{n}");
                let held = client.mutex(&name).lock().unwrap();
                let waiting = client.mutex(&name);
                let waiter = Task::start(move || waiting.lock().map(drop));
                drop(held);
                waiter.within(SOON, "the waiter's grant").unwrap();
            }
            if is_shut_down {
                client.shutdown(SOON).unwrap();
            }
        }
        let gone = eventually(SOON, || child::threads().unwrap() == before);
        let now = child::threads().unwrap();
        assert!(gone, "{now} threads, {before} before");
        parent.tell(());
    }
    parent.wait_for_end();
}
