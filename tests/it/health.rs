//! `Client::ping`, and the names of connections.

use std::time::Instant;

use leasehold::ErrorKind;
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, builder, kill_connections, lock, millis, notified_clients, secs,
    server, within,
};

/// The names of all named connections. The connections of the test have no names.
fn names(server: &Server) -> Vec<String> {
    let list = ask(server, &["CLIENT", "LIST"]);
    let entries = list.as_text().unwrap().lines();
    let names = entries.filter_map(|entry| entry.split(" name=").nth(1)?.split(' ').next());
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_ping_returns_the_round_trip_time() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let before = server.calls("ping").unwrap();
    let took = client.ping().unwrap();
    assert!(!took.is_zero() && took < SOON, "{took:?}");
    assert!(server.calls("ping").unwrap() > before);
}

#[test]
fn pings_of_stopped_or_killed_servers_fail() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    assert!(eventually(SOON, || client.ping().is_ok()));
    server.stop();
    let stopped = client.clone();
    let error = within(SOON, "a ping", move || stopped.ping().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    server.resume();
    server.kill();
    let killed = client.clone();
    let error = within(SOON, "a ping", move || killed.ping().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    server.restart().unwrap();
    assert!(eventually(SOON, || client.ping().is_ok()));
}

#[test]
fn a_ping_replaces_a_closed_connection() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for _ in 0..3 {
        client.ping().unwrap();
        kill_connections(&server);
    }
    client.ping().unwrap();
}

/// How many connections for requests, renewals, transactions and pings the only client has.
fn named_leasehold(server: &Server) -> usize {
    let names = names(server);
    let of_pool = names.iter().filter(|name| name.starts_with("leasehold:"));
    of_pool.count()
}

#[test]
fn a_ping_does_not_wait_for_transactions() {
    let server = server();
    let client = steady(&server.url()).pipelines(1).max_transactions(1);
    let client = client.ttl(LONG_TTL).build().unwrap();
    let guard = lock(&client, "k");
    let done = guard.transaction(|_, _| {
        assert_eq!(named_leasehold(&server), 2, "{:?}", names(&server));
        let (client, other) = (client.clone(), client.clone());
        let pings = [client, other].map(|client| Task::start(move || client.ping()));
        for ping in pings {
            ping.within(SOON, "a ping").unwrap();
        }
        assert_eq!(named_leasehold(&server), 3, "one serves all pings");
        Ok(())
    });
    done.unwrap();
}

/// The second ping waits for the first, which waits for a connection until its time-out.
#[test]
fn a_ping_has_one_deadline_for_all_its_steps() {
    let server = server();
    let client = builder(&server.url()).connect_timeout(secs(4));
    let client = client.command_timeout(millis(300)).build_lazy().unwrap();
    server.stop();
    let pings = [client.clone(), client].map(|client| {
        Task::start(move || {
            let started = Instant::now();
            let error = client.ping().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            started.elapsed()
        })
    });
    let took = pings.map(|ping| ping.within(2 * SOON, "a ping"));
    server.resume();
    assert!(took.iter().all(|it| *it < secs(7)), "{took:?}");
}

#[test]
fn a_ping_after_a_shutdown_fails() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    client.shutdown(SOON).unwrap();
    assert_eq!(client.ping().unwrap_err().kind(), ErrorKind::Shutdown);
}

#[test]
fn pings_of_a_memory_store_fail_in_outages() {
    let store = leasehold::MemoryStore::new();
    let client = store.client().unwrap();
    client.ping().unwrap();
    store.fail(ErrorKind::Unavailable);
    assert_eq!(client.ping().unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn a_ping_without_permission_is_denied() {
    let server = server();
    let command = ["ACL", "SETUSER", "me", "on", ">secret", "~*", "&*", "+@all"];
    ask(&server, &[&command[..], &["-ping"]].concat());
    let url = format!("redis://me:secret@127.0.0.1:{}", server.port());
    let client = steady(&url).build().unwrap();
    let error = client.ping().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("127.0.0.1:"), "{error}");
}

#[test]
fn connections_have_the_name_of_the_holder() {
    let server = server();
    for protocol in ["", "?protocol=resp3"] {
        let client = steady(&format!("{}{protocol}", server.url()));
        let client = client.build().unwrap();
        // The client tracks the key of a held lock, which opens the notification connection.
        let _guard = lock(&client, "k");
        assert!(eventually(SOON, || notified_clients(&server) > 0));
        let holder = client.holder_id();
        let wanted = ["leasehold", "leasehold-notifications"].map(|it| format!("{it}:{holder}"));
        let named = eventually(SOON, || {
            let names = names(&server);
            wanted.iter().all(|name| names.contains(name))
        });
        assert!(named, "{:?} lacks {wanted:?}", names(&server));
    }
}

#[test]
fn a_user_without_client_setname_can_lock() {
    let server = server();
    // Redis 6.2 cannot forbid CLIENT SETNAME alone.
    let command = ["ACL", "SETUSER", "me", "on", ">secret", "~*", "&*", "+@all"];
    ask(&server, &[&command[..], &["-client"]].concat());
    let url = format!("redis://me:secret@127.0.0.1:{}", server.port());
    let client = steady(&url).build().unwrap();
    let guard = lock(&client, "k");
    assert!(
        names(&server)
            .iter()
            .all(|name| !name.starts_with("leasehold:"))
    );
    let second = client.mutex("k").try_lock_for(millis(50));
    assert!(second.unwrap().is_none());
    guard.unlock().unwrap();
}
