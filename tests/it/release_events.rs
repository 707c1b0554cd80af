//! Events of releases that could not be done at once. Each delay is reported once.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use leasehold::{
    Builder, Client, Error, ErrorKind, EventHandler, EventLock, MemoryQuorum, MutexGuard,
    NodeHealth,
};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::quorum::nodes::{Nodes, impatient};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, TIMEOUT, Task, ask, assert_all_become_free, builder, kill_connections, millis,
    queued, secs, server, unconfirmed, wait_for_queue, within,
};

/// The key and the token of a delayed release, and the kind of the error.
type Received = (String, u64, ErrorKind);

struct Listener(Mutex<Sender<Received>>);

impl EventHandler for Listener {
    fn release_delayed(&self, lock: EventLock<'_>, error: &Error) {
        assert_eq!(thread::current().name(), Some("leasehold-callbacks"));
        // Nobody receives any more once the test is over.
        let received = (lock.key.to_owned(), lock.fencing_token, error.kind());
        let _ = self.0.lock().unwrap().send(received);
    }
}

fn listening(builder: Builder) -> (Client, Receiver<Received>) {
    let (sender, received) = channel();
    let listener = Arc::new(Listener(Mutex::new(sender)));
    (builder.event_handler(listener).build().unwrap(), received)
}

/// A client whose locks have a ttl longer than any test.
fn client(url: &str) -> (Client, Receiver<Received>) {
    listening(builder(url).ttl(LONG_TTL))
}

fn lock(client: &Client, key: &str) -> (MutexGuard, u64) {
    let guard = client.mutex(key).lock().unwrap();
    let token = guard.fencing_token();
    (guard, token)
}

#[track_caller]
fn next(received: &Receiver<Received>) -> Received {
    received.recv_timeout(SOON).expect("an event")
}

#[track_caller]
fn assert_delayed(received: &Receiver<Received>, key: &str, token: u64) -> ErrorKind {
    let (of, its, kind) = next(received);
    assert_eq!((of.as_str(), its), (key, token));
    kind
}

/// Ends the client, which first sends all its events. Fails if there was a further event.
#[track_caller]
fn assert_nothing_more(client: Client, received: &Receiver<Received>) {
    client.shutdown(SOON).unwrap();
    drop(client);
    assert_eq!(rest(received), []);
}

/// All events until the client ended.
#[track_caller]
fn rest(received: &Receiver<Received>) -> Vec<Received> {
    let mut rest = Vec::new();
    loop {
        match received.recv_timeout(SOON) {
            Ok(event) => rest.push(event),
            Err(RecvTimeoutError::Disconnected) => return rest,
            Err(RecvTimeoutError::Timeout) => panic!("some part of the client is still alive"),
        }
    }
}

#[test]
fn a_delayed_release_is_done_when_redis_resumes() {
    let server = server();
    let (client, received) = client(&server.url());
    let (guard, token) = lock(&client, "a");
    server.stop();
    drop(guard);
    let kind = assert_delayed(&received, "a", token);
    assert_eq!(kind, ErrorKind::Timeout);
    server.resume();
    assert_all_become_free(&server);
    assert_nothing_more(client, &received);
}

#[test]
fn an_empty_restart_ends_a_delayed_release() {
    let mut server = server();
    let (client, received) = client(&server.url());
    let (guard, token) = lock(&client, "a");
    server.kill();
    drop(guard);
    let kind = assert_delayed(&received, "a", token);
    assert_eq!(kind, ErrorKind::Unavailable);
    server.restart().unwrap();
    assert_nothing_more(client, &received);
}

#[test]
fn unlock_of_a_dead_server_is_delayed() {
    let mut server = server();
    let (client, received) = listening(builder(&server.url()).ttl(secs(3)));
    let (guard, token) = lock(&client, "a");
    server.kill();
    let started = Instant::now();
    let error = unconfirmed(within(SOON, "unlocking", move || guard.unlock()));
    assert!(error.is_unavailable(), "{error}");
    // An unlock may take one command time-out and one connect time-out (four times as long).
    assert!(started.elapsed() < 5 * TIMEOUT + secs(2));
    assert_delayed(&received, "a", token);
    drop(client);
    assert_eq!(rest(&received), []);
}

#[test]
fn with_returns_its_value_though_the_release_waits() {
    let mut server = server();
    let (client, received) = client(&server.url());
    let mut token = 0;
    let value = client.mutex("a").with(|guard| {
        token = guard.fencing_token();
        server.kill();
        42
    });
    assert_eq!(value.unwrap(), 42);
    assert_delayed(&received, "a", token);
    server.restart().unwrap();
    assert_nothing_more(client, &received);
}

#[test]
fn a_refused_release_is_delayed_until_accepted() {
    let server = server();
    let (client, received) = client(&server.url());
    let (dropped, dropped_token) = lock(&client, "dropped");
    let (unlocked, unlocked_token) = lock(&client, "unlocked");
    // The server becomes a replica without a primary: it keeps its keys and refuses writes.
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    drop(dropped);
    assert_eq!(
        assert_delayed(&received, "dropped", dropped_token),
        ErrorKind::Unavailable
    );
    let error = unconfirmed(unlocked.unlock());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_delayed(&received, "unlocked", unlocked_token);
    ask(&server, &["REPLICAOF", "NO", "ONE"]);
    assert_all_become_free(&server);
    assert_nothing_more(client, &received);
}

/// Sends the texts of `release_delayed`.
struct Texts(Mutex<Sender<String>>);

impl EventHandler for Texts {
    fn release_delayed(&self, _: EventLock<'_>, error: &Error) {
        let _ = self.0.lock().unwrap().send(error.to_string());
    }
}

#[test]
fn a_refused_release_names_its_server() {
    let server = server();
    let (sender, texts) = channel();
    let handler = Arc::new(Texts(Mutex::new(sender)));
    let builder = steady(&server.url()).ttl(LONG_TTL).event_handler(handler);
    let client = builder.build().unwrap();
    let (dropped, _) = lock(&client, "dropped");
    let (unlocked, _) = lock(&client, "unlocked");
    ask(&server, &["ACL", "SETUSER", "default", "-@scripting"]);
    ask(&server, &["ACL", "SETUSER", "default", "-del", "-unlink"]);
    let delayed = || texts.recv_timeout(SOON).expect("an event");
    drop(dropped);
    let of_drop = delayed();
    let error = unconfirmed(unlocked.unlock());
    for text in [of_drop, error.to_string(), delayed()] {
        let named = format!(
            "127.0.0.1:{}: the script Release is refused: NOPERM",
            server.port()
        );
        assert_eq!(text.matches(&named).count(), 1, "{text}");
    }
    ask(&server, &["ACL", "SETUSER", "default", "+@all"]);
    assert_all_become_free(&server);
}

#[test]
fn repeated_disconnects_report_one_delay_per_lock() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, received) = client(&proxy.url());
    let mut owed: Vec<(String, u64)> = Vec::new();
    let guards: Vec<MutexGuard> = (0..20)
        .map(|n| {
            let (guard, token) = lock(&client, &format!("lock-{n}"));
            owed.push((guard.key().to_owned(), token));
            guard
        })
        .collect();
    proxy.hold_replies(true);
    drop(guards);
    let mut events: Vec<Received> = Vec::new();
    // The proxy cuts each attempt before its reply comes: until all releases were reported as delayed, and for a second
    // more.
    let have_all_come = eventually(SOON, || {
        proxy.cut_all();
        events.extend(received.try_iter());
        events.len() >= owed.len()
    });
    assert!(have_all_come, "only {events:?}");
    for _ in 0..20 {
        proxy.cut_all();
        thread::sleep(millis(50));
    }
    proxy.hold_replies(false);
    proxy.cut_all();
    assert_all_become_free(&server);
    client.shutdown(SOON).unwrap();
    drop(client);
    events.extend(rest(&received));
    let delayed = events.into_iter().map(|(key, token, _)| (key, token));
    let mut delayed: Vec<(String, u64)> = delayed.collect();
    delayed.sort();
    owed.sort();
    assert_eq!(delayed, owed);
}

#[test]
fn shutdown_reports_a_delayed_release_no_more() {
    for shut_down in [true, false] {
        let mut server = server();
        let (client, received) = client(&server.url());
        let (guard, token) = lock(&client, "a");
        server.kill();
        drop(guard);
        assert_delayed(&received, "a", token);
        if shut_down {
            let error = client.shutdown(millis(200)).unwrap_err();
            assert!(error.is_unavailable(), "{error}");
        }
        within(SOON, "dropping the client", move || drop(client));
        assert_eq!(rest(&received), []);
    }
}

#[test]
fn prompt_releases_report_no_delay() {
    let server = server();
    let (client, received) = listening(steady(&server.url()).ttl(LONG_TTL));
    for n in 0..50 {
        let (guard, _) = lock(&client, "a");
        if n % 10 == 0 {
            // Another connection sends the release at once.
            kill_connections(&server);
        }
        match n % 2 {
            0 => drop(guard),
            _ => assert!(guard.unlock().unwrap().is_confirmed()),
        }
    }
    assert_all_become_free(&server);
    assert_nothing_more(client, &received);
}

/// The client abandons an acquire without a reply and a queue entry while Redis is down. No guard ever held these
/// leases.
#[test]
fn abandoned_grants_are_released_without_events() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, received) = client(&proxy.url());
    let other = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let held = other.mutex("line").lock().unwrap();
    let waiting = {
        let mutex = client.mutex("line");
        Task::start(move || mutex.try_lock_for(secs(2)))
    };
    wait_for_queue(&server, "line", 1);
    proxy.black_hole(true);
    let error = client.mutex("ghost").try_lock().unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    // The wait is over and its queue entry removed; whether the client noticed the outage does not matter.
    let _ = waiting.within(SOON, "the end of the wait");
    thread::sleep(2 * TIMEOUT);
    proxy.black_hole(false);
    let gone = eventually(SOON, || queued(&server, "line") == 0);
    assert!(gone, "the queue entry was not removed");
    held.unlock().unwrap();
    assert_all_become_free(&server);
    assert_nothing_more(client, &received);
}

/// A client of a quorum whose calls wait for 2 s for nodes that do not reply.
fn client_of_quorum(nodes: &Nodes) -> (Client, Receiver<Received>) {
    listening(impatient(nodes.urls(), secs(2)))
}

#[test]
fn a_release_without_a_majority_is_delayed_until_the_nodes_resume() {
    let nodes = Nodes::start(3);
    let (client, received) = client_of_quorum(&nodes);
    let other = nodes.client();
    let (dropped, dropped_token) = lock(&client, "dropped");
    let (unlocked, unlocked_token) = lock(&client, "unlocked");
    nodes.0[1..].iter().for_each(Server::stop);
    let error = unconfirmed(unlocked.unlock());
    assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
    let kind = assert_delayed(&received, "unlocked", unlocked_token);
    assert_eq!(kind, ErrorKind::NoQuorum);
    drop(dropped);
    let kind = assert_delayed(&received, "dropped", dropped_token);
    assert_eq!(kind, ErrorKind::NoQuorum);
    // With one of these nodes, the release has a majority.
    nodes.0[1].resume();
    let is_free = |key: &str| {
        other
            .mutex(key)
            .is_locked()
            .is_ok_and(|is_locked| !is_locked)
    };
    assert!(eventually(SOON, || is_free("dropped") && is_free("unlocked")));
    nodes.0[2].resume();
    nodes.assert_all_become_free();
    assert_nothing_more(client, &received);
}

#[test]
fn an_absent_node_of_a_quorum_delays_no_release() {
    for is_killed in [false, true] {
        let mut nodes = Nodes::start(3);
        let (client, received) = client_of_quorum(&nodes);
        let (dropped, _) = lock(&client, "dropped");
        let (unlocked, _) = lock(&client, "unlocked");
        let absent = &mut nodes.0[2];
        if is_killed {
            absent.kill();
        } else {
            absent.stop();
        }
        drop(dropped);
        assert!(unlocked.unlock().unwrap().is_confirmed());
        // The client notices that the node is away, and reports its releases as late.
        let health = || client.nodes().unwrap()[2].health().clone();
        let is_failing = || matches!(health(), NodeHealth::Failing { .. });
        assert!(eventually(SOON, is_failing));
        let absent = &mut nodes.0[2];
        if is_killed {
            absent.restart().unwrap();
        } else {
            absent.resume();
        }
        nodes.assert_all_become_free();
        assert_nothing_more(client, &received);
    }
}

#[test]
fn the_end_of_a_quorums_client_reports_no_delay_again() {
    for shut_down in [true, false] {
        let mut nodes = Nodes::start(3);
        let (client, received) = client_of_quorum(&nodes);
        let (guard, token) = lock(&client, "a");
        nodes.0[1..].iter_mut().for_each(Server::kill);
        drop(guard);
        assert_delayed(&received, "a", token);
        if shut_down {
            let error = client.shutdown(millis(200)).unwrap_err();
            assert!(error.is_unavailable(), "{error}");
        }
        within(SOON, "dropping the client", move || drop(client));
        assert_eq!(rest(&received), []);
    }
}

#[test]
fn late_releases_of_a_quorum_in_memory_are_reported() {
    let quorum = MemoryQuorum::new(3);
    let (client, received) = listening(quorum.builder());
    let (dropped, dropped_token) = lock(&client, "dropped");
    let (unlocked, _) = lock(&client, "unlocked");
    quorum.fail(1, ErrorKind::Unavailable);
    assert!(unlocked.unlock().unwrap().is_confirmed());
    quorum.fail(2, ErrorKind::Unavailable);
    drop(dropped);
    let kind = assert_delayed(&received, "dropped", dropped_token);
    assert_eq!(kind, ErrorKind::NoQuorum);
    quorum.recover(1);
    quorum.recover(2);
    // A release that the nodes do not reply to ends with the ttl.
    let (dropped, token) = lock(&client, "dropped");
    quorum.hang(0);
    quorum.hang(1);
    drop(dropped);
    assert_delayed(&received, "dropped", token);
    quorum.advance(secs(60));
    quorum.recover(0);
    quorum.recover(1);
    assert_nothing_more(client, &received);
}

/// Many releases of guards, prompt and late ones, of which some are confirmed and some given up.
#[test]
fn each_late_release_of_a_quorum_has_one_delay() {
    let nodes = Nodes::start(3);
    // `build` must bear a pause of the machine; requests must not.
    let builder = impatient(nodes.urls(), millis(150))
        .connect_timeout(secs(8))
        .ttl(secs(1));
    let (client, received) = listening(builder);
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for key in ["a", "b", "c", "d"] {
            let (client, has_ended) = (&client, &has_ended);
            scope.spawn(move || {
                let mutex = client.mutex(key);
                while !has_ended.load(Ordering::Relaxed) {
                    // While no majority replies, calls fail.
                    if let Ok(guard) = mutex.lock() {
                        thread::sleep(millis(3));
                        drop(guard);
                    }
                    if let Ok(guard) = mutex.lock() {
                        thread::sleep(millis(3));
                        let _ = guard.unlock();
                    }
                }
            });
        }
        for round in 0..12 {
            let away = &nodes.0[..1 + round % 3];
            away.iter().for_each(Server::stop);
            // Some of the releases are given up at the end of the ttl.
            thread::sleep(millis(if round % 6 == 5 { 1500 } else { 300 }));
            away.iter().for_each(Server::resume);
            thread::sleep(millis(100));
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    nodes.assert_all_become_free();
    client.shutdown(SOON).unwrap();
    drop(client);
    let mut delayed: HashSet<(String, u64)> = HashSet::new();
    for (key, token, kind) in rest(&received) {
        assert_eq!(kind, ErrorKind::NoQuorum);
        assert!(delayed.insert((key, token)), "a second delay");
    }
    assert!(!delayed.is_empty());
}
