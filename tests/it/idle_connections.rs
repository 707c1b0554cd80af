//! Connections that were idle, and old connections. A proxy forgets idle ones as load balancers do: it swallows their
//! bytes, and closes neither end.

use std::time::{Duration, Instant};

use leasehold::{Client, ErrorKind, MutexGuard, Released};
use leasehold_testbed::{Cluster, Proxy, Server, eventually};
use redis::Commands;

use crate::quorum::nodes::{self, Nodes};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, connections, connections_made, is_held, lock,
    notification_connection, notified_clients, secs, server, wait_for_queue, within,
};

/// How long the clients of these tests use idle connections.
const MAX_IDLE: Duration = Duration::from_millis(500);
/// The time after which the proxies forget connections.
const SILENCE: Duration = Duration::from_secs(1);
/// A call that waits for a reply on a forgotten connection takes longer: its time-out is 8 s.
const AT_ONCE: Duration = Duration::from_secs(4);

/// A call on a client that holds the lock "k", and its outcome.
type Call = fn(&Client, MutexGuard) -> Result<(), leasehold::Error>;

const CALLS: [(&str, Call); 9] = [
    ("try_lock", |client, _guard| {
        let other = client.mutex("other").try_lock()?;
        assert!(other.is_some());
        Ok(())
    }),
    ("try_lock_for", |client, _guard| {
        let other = client.mutex("other").try_lock_for(AT_ONCE)?;
        assert!(other.is_some());
        Ok(())
    }),
    ("lock", |client, _guard| client.with_lock("other", || ())),
    ("extend", |_, guard| guard.extend(LONG_TTL)),
    ("write", |client, guard| {
        let value = client.fenced_value("v");
        value.write(guard.fencing_token(), "text")
    }),
    ("ping", |client, _guard| client.ping().map(drop)),
    ("transaction", |_, guard| {
        let done = guard.transaction(|_, pipe| {
            pipe.set("{transaction:k}data", 1);
            Ok(())
        });
        done.map(drop)
    }),
    ("unlock", |_, guard| {
        assert!(matches!(guard.unlock()?, Released::Confirmed));
        Ok(())
    }),
    ("drop", |_, guard| {
        drop(guard);
        Ok(())
    }),
];

/// Makes each of these calls on an idle client of its own, whose connections `forget` has let the network forget.
/// `other` is a client behind another network.
fn assert_idle_clients_work(
    calls: &[(&'static str, Call)],
    client: impl Fn(&str) -> Client,
    forget: impl FnOnce() -> usize,
    other: &Client,
) {
    let idle: Vec<_> = calls
        .iter()
        .map(|(name, call)| {
            let client = client(&format!("{name}:"));
            let guard = lock(&client, "k");
            // The idle connection of pings and transactions.
            client.ping().unwrap();
            (*name, *call, client, guard)
        })
        .collect();
    let forgotten = forget();
    assert!(forgotten >= calls.len(), "{forgotten} forgotten");
    for (name, call, client, guard) in idle {
        let started = Instant::now();
        let outcome = call(&client, guard);
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        let took = started.elapsed();
        assert!(took < AT_ONCE, "{name}: {took:?}");
    }
    let next = other.mutex("k").try_lock_for(AT_ONCE).unwrap();
    assert!(next.is_some(), "the drop delays the next client");
}

#[test]
fn calls_after_a_silence_succeed_at_once() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = |prefix: &str| {
        let builder = steady(&proxy.url()).ttl(LONG_TTL).prefix(prefix);
        builder
            .pipelines(1)
            .max_connection_idle(MAX_IDLE)
            .build()
            .unwrap()
    };
    // The locks of the client that drops its guard.
    let other = steady(&server.url()).prefix("drop:").build().unwrap();
    let forget = || proxy.forget_silent(SILENCE);
    assert_idle_clients_work(&CALLS, client, forget, &other);
}

#[test]
fn calls_to_a_cluster_after_a_silence_succeed_at_once() {
    let builder = Cluster::builder().without_replicas().without_hosts();
    let cluster = builder.start().unwrap();
    let (proxies, url) = cluster.proxies(77).unwrap();
    let client = |prefix: &str| {
        let builder = steady(&url).ttl(LONG_TTL).prefix(prefix);
        builder
            .pipelines(1)
            .max_connection_idle(MAX_IDLE)
            .build()
            .unwrap()
    };
    let other = steady(&cluster.url()).prefix("drop:").build().unwrap();
    let forget = || forget_all(&proxies);
    assert_idle_clients_work(&CALLS, client, forget, &other);
}

#[test]
fn calls_to_a_quorum_after_a_silence_succeed_at_once() {
    let nodes = Nodes::start(3);
    let prefixes = CALLS.map(|(name, _)| format!("{name}:"));
    let prefixes = prefixes.each_ref().map(String::as_str);
    let end_quarantine = |node| nodes::end_quarantine_of(node, &prefixes);
    nodes.0.iter().for_each(end_quarantine);
    let proxy = |node: &Server| Proxy::start(node.port()).unwrap();
    let proxies: Vec<Proxy> = nodes.0.iter().map(proxy).collect();
    let urls = || proxies.iter().map(Proxy::url).collect();
    let client = |prefix: &str| {
        let builder = nodes::builder(urls()).prefix(prefix);
        builder
            .pipelines(1)
            .max_connection_idle(MAX_IDLE)
            .build()
            .unwrap()
    };
    let other = nodes::builder(nodes.urls())
        .prefix("drop:")
        .build()
        .unwrap();
    let calls: Vec<(&str, Call)> = CALLS
        .into_iter()
        .filter(|(name, _)| !["transaction", "write"].contains(name))
        .collect();
    assert_idle_clients_work(&calls, client, || forget_all(&proxies), &other);
}

/// Lets all proxies forget their silent connections at the same time.
fn forget_all(proxies: &[Proxy]) -> usize {
    std::thread::scope(|scope| {
        let forget = |proxy| scope.spawn(move || Proxy::forget_silent(proxy, SILENCE));
        let tasks: Vec<_> = proxies.iter().map(forget).collect();
        tasks.into_iter().map(|task| task.join().unwrap()).sum()
    })
}

#[test]
fn a_waiter_after_a_silence_is_notified() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url()).max_connection_idle(MAX_IDLE);
    let client = client.ttl(LONG_TTL).build().unwrap();
    let guard = lock(&client, "held");
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let before = notification_connection(&server, &client);
    // Long enough that a PING comes in time although a thread stands still for a second.
    proxy.forget_silent(3 * SILENCE);
    let holder = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let held = lock(&holder, "k");
    let mutex = client.mutex("k");
    let waiter = Task::start(move || drop(mutex.lock().unwrap()));
    wait_for_queue(&server, "k", 1);
    // A PING in time has kept the network from forgetting the connection.
    assert_eq!(notification_connection(&server, &client), before);
    held.unlock().unwrap();
    waiter.within(SOON, "a waiter");
    drop(guard);
}

#[test]
fn a_transaction_notices_a_silence_in_its_closure() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url()).command_timeout(secs(1));
    let client = client.max_connection_idle(MAX_IDLE).ttl(LONG_TTL);
    let client = client.build().unwrap();
    let guard = lock(&client, "k");
    let set = |number: i32, forget: bool| {
        guard.transaction(|conn, pipe| {
            let before: Option<i32> = conn.get("data")?;
            if forget {
                proxy.forget_silent(SILENCE);
            } else {
                // A silence in a network that forgets nothing.
                std::thread::park_timeout(SILENCE);
            }
            pipe.set("data", number);
            Ok(before)
        })
    };
    assert_eq!(set(1, false).unwrap().value, None);
    let error = set(2, true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("nothing was written"), "{text}");
    assert_eq!(set(3, false).unwrap().value, Some(1));
}

#[test]
fn a_busy_connection_is_not_replaced() {
    let server = server();
    let client = steady(&server.url()).pipelines(1).build().unwrap();
    drop(lock(&client, "k"));
    let made = connections_made(&server, || {
        for _ in 0..200 {
            client.with_lock("k", || ()).unwrap();
        }
    });
    assert!(made <= 1, "{made} connections");
}

/// A client whose connections are old after a second.
fn aging(url: &str) -> leasehold::Builder {
    let builder = steady(url).ttl(LONG_TTL).pipelines(1);
    builder.max_connection_age(secs(1))
}

/// Locks over and over until `is_done`.
#[track_caller]
fn use_until(client: &Client, what: &str, is_done: impl Fn() -> bool) {
    let done = eventually(2 * SOON, || {
        match client.with_lock("k", || ()) {
            // The lock is on the old server, and its release has gone to the new one.
            Err(error) if error.kind() == ErrorKind::LeaseLost => {}
            outcome => outcome.unwrap(),
        }
        client.ping().unwrap();
        is_done()
    });
    assert!(done, "{what}");
}

/// A host's name leads to another server from now on. The old one still runs.
#[test]
fn old_connections_follow_a_moved_name() {
    let (old, new) = (server(), server());
    let proxy = Proxy::start(old.port()).unwrap();
    let client = aging(&proxy.url()).build().unwrap();
    let guard = lock(&client, "held");
    assert!(eventually(SOON, || notified_clients(&old) == 1));
    drop(guard);
    proxy.redirect(new.port());
    // Requests, pings and notifications.
    use_until(&client, "not all connections have moved", || {
        connections(&old) == 0 && notified_clients(&new) == 1
    });
}

#[test]
fn old_connections_are_used_while_no_other_one_can_be_opened() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = aging(&proxy.url()).build().unwrap();
    let guard = lock(&client, "held");
    client.ping().unwrap();
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let before = notification_connection(&server, &client);
    proxy.refuse(true);
    let refused_at = Instant::now();
    use_until(&client, "a failed attempt has ended requests", || {
        refused_at.elapsed() > secs(2)
    });
    assert_eq!(notification_connection(&server, &client), before);
    assert!(is_held(&server, "held"));
    proxy.refuse(false);
    use_until(&client, "the connections were not replaced", || {
        let list = ask(&server, &["CLIENT", "LIST"]);
        let is_old_open = list.as_text().unwrap().contains(&before);
        !is_old_open && notified_clients(&server) == 1
    });
    within(SOON, "unlocking", move || guard.unlock().unwrap());
}
