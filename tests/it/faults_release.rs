//! Redis fails while locks are released: no dropped release is lost, no caller is blocked, and nothing stays
//! locked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{Builder, Client, ErrorKind};
use leasehold_testbed::{Proxy, Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, assert_all_become_free, builder, held_keys,
    is_held, kill_connections, script_calls, secs, server, unconfirmed, wait_for_queue, within,
};

/// A client whose events are recorded, and whose locks have a ttl longer than any test.
fn client(url: &str) -> (Client, Arc<Recorder>) {
    recorded(builder(url))
}

/// As [`client`], with time-outs that a busy machine does not reach.
fn steady_client(url: &str) -> (Client, Arc<Recorder>) {
    recorded(steady(url))
}

fn recorded(settings: Builder) -> (Client, Arc<Recorder>) {
    let recorder = Recorder::new();
    let builder = settings.ttl(LONG_TTL);
    let client = builder.event_handler(Arc::clone(&recorder)).build();
    (client.unwrap(), recorder)
}

/// The number of connections, without that of this request.
fn connections(server: &Server) -> usize {
    let list = ask(server, &["CLIENT", "LIST", "TYPE", "normal"]);
    list.as_text().unwrap().lines().count() - 1
}

#[test]
fn a_drop_on_a_stopped_server_completes_later() {
    let server = server();
    let (client, _) = client(&server.url());
    let guards: Vec<_> = (0..100)
        .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
        .collect();
    server.stop();
    let started = Instant::now();
    within(SOON, "dropping", move || drop(guards));
    // One write time-out at most, not one for each guard.
    let took = started.elapsed();
    assert!(took < TIMEOUT + secs(2), "dropping took {took:?}");
    // Meanwhile the client stops waiting for the replies, and queues the releases again.
    std::thread::sleep(TIMEOUT * 2);
    server.resume();
    assert_all_become_free(&server);
    client.with_lock("lock-0", || ()).unwrap();
}

#[test]
fn drops_return_at_once_while_the_socket_is_full() {
    let server = Server::builder().unix_socket().start().unwrap();
    // A drop that waited for the server would wait for longer than this test.
    let client = builder(&server.unix_url().unwrap())
        .ttl(LONG_TTL)
        .command_timeout(secs(60))
        .build()
        .unwrap();
    let guards: Vec<_> = (0..300)
        .map(|n| {
            let key = format!("{n}{}", "x".repeat(1000));
            client.mutex(key).lock().unwrap()
        })
        .collect();
    server.stop();
    within(SOON, "dropping", move || drop(guards));
    server.resume();
    assert_all_become_free(&server);
}

#[test]
fn an_unlock_on_a_stopped_server_completes_later() {
    let server = server();
    let (client, _) = client(&server.url());
    let guard = client.mutex("a").lock().unwrap();
    server.stop();
    let started = Instant::now();
    let error = unconfirmed(within(SOON, "unlocking", move || guard.unlock()));
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(error.key(), Some("a"));
    assert!(started.elapsed() < 2 * TIMEOUT + secs(2));
    server.resume();
    assert_all_become_free(&server);
}

#[test]
fn releases_return_in_time_while_a_server_is_dead() {
    let mut server = server();
    let (client, _) = client(&server.url());
    let (dropped, unlocked) = (
        client.mutex("dropped").lock().unwrap(),
        client.mutex("unlocked").lock().unwrap(),
    );
    server.kill();
    let started = Instant::now();
    within(SOON, "dropping", move || drop(dropped));
    let error = unconfirmed(within(SOON, "unlocking", move || unlocked.unlock()));
    assert!(error.is_unavailable(), "{error}");
    assert!(started.elapsed() < 2 * TIMEOUT + secs(2));
    server.restart().unwrap();
    within(SOON, "locking after the restart", move || {
        for key in ["dropped", "unlocked"] {
            client.mutex(key).lock().unwrap().unlock().unwrap();
        }
    });
    assert_all_become_free(&server);
}

/// The server keeps its keys over a restart.
#[test]
fn an_unread_release_is_repeated_after_a_restart() {
    let mut server = Server::builder()
        .arg("appendonly", "yes")
        .arg("appendfsync", "always")
        .start()
        .unwrap();
    let (client, _) = client(&server.url());
    let guards: Vec<_> = (0..20)
        .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
        .collect();
    server.stop();
    drop(guards);
    server.restart().unwrap();
    let loaded = || server.command(&["PING"]).unwrap() == Reply::Status("PONG".to_owned());
    assert!(eventually(SOON, loaded));
    assert_all_become_free(&server);
    drop(client);
}

/// The snapshot has locks that Redis released later. A restart brings them back.
#[test]
fn confirmed_releases_are_repeated_after_a_restart_with_old_data() {
    const LOCKS: usize = 300;
    const TURNS: usize = 200;
    let mut server = server();
    let (client, _) = steady_client(&server.url());
    let lock = |n| client.mutex(format!("lock-{n}")).lock().unwrap();
    let guards: Vec<_> = (0..LOCKS).map(lock).collect();
    ask(&server, &["SAVE"]);
    drop(guards);
    assert_all_become_free(&server);
    // The snapshot has an earlier lease of this lock than the last one.
    for _ in 0..TURNS {
        lock(0).unlock().unwrap();
    }
    server.restart().unwrap();
    assert_eq!(held_keys(&server).len(), LOCKS);
    // The first request of a key brings the releases of the key along.
    let mut tried = None;
    let has_reply = eventually(SOON, || {
        tried = client.mutex("lock-7").try_lock().ok();
        tried.is_some()
    });
    assert!(has_reply && tried.flatten().is_some(), "lock-7 is taken");
    lock(0).unlock().unwrap();
    assert_all_become_free(&server);
    // Two pipelines write a few releases in each call.
    let calls = script_calls(&server);
    assert!(calls < 50, "{calls} calls for {} releases", LOCKS + TURNS);
}

/// The client repeats the releases of the last leases after each new connection, although the server is the same.
#[test]
fn repeated_releases_spare_later_leases() {
    let server = server();
    let settings = steady(&server.url()).ttl(LONG_TTL).pipelines(1);
    let client = settings.build().unwrap();
    for name in ["held", "transferred", "queued"] {
        for _ in 0..50 {
            client.mutex(name).lock().unwrap().unlock().unwrap();
        }
    }
    let guard = client.mutex("held").lock().unwrap();
    let transferred = client.mutex("transferred").lock().unwrap();
    let ticket = transferred.into_ticket().unwrap();
    let other = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let queued = client.mutex("queued").lock().unwrap();
    let waiter = {
        let mutex = other.mutex("queued");
        Task::start(move || mutex.lock().unwrap())
    };
    wait_for_queue(&server, "queued", 1);
    for _ in 0..2 {
        // Each call with several releases reads the keys by MGET. 150 releases take more than one batch.
        let calls = || server.calls("mget").unwrap();
        let before = calls();
        kill_connections(&server);
        client.mutex("next").lock().unwrap().unlock().unwrap();
        let are_repeated = eventually(SOON, || calls() > before + 1);
        assert!(are_repeated, "{} calls", calls() - before);
    }
    guard.check().unwrap();
    queued.check().unwrap();
    assert!(!waiter.is_done());
    assert!(is_held(&server, "held") && is_held(&server, "queued"));
    let adopted = other.adopt(&ticket).unwrap();
    adopted.unlock().unwrap();
    guard.unlock().unwrap();
    queued.unlock().unwrap();
    waiter.within(SOON, "the lock").unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn a_release_survives_flushed_scripts() {
    let server = server();
    let (client, recorder) = steady_client(&server.url());
    for round in 0..20 {
        let guard = client.mutex("a").try_lock().unwrap();
        let other = client.mutex("b").try_lock().unwrap();
        ask(&server, &["SCRIPT", "FLUSH"]);
        drop(guard.expect("nobody else wants the lock"));
        drop(other.expect("nobody else wants the lock"));
        if round % 2 == 0 {
            assert!(eventually(SOON, || !is_held(&server, "b")));
        }
        ask(&server, &["SCRIPT", "FLUSH"]);
    }
    assert_eq!(recorder.count(What::Contended, "a"), 0);
    assert_all_become_free(&server);
}

#[test]
fn a_repeated_release_precedes_its_threads_next_request() {
    let server = server();
    let (client, recorder) = steady_client(&server.url());
    let mutex = client.mutex("a");
    for round in 0..20 {
        let guard = mutex.try_lock().unwrap();
        let guard = guard.unwrap_or_else(|| panic!("found its own lock in round {round}"));
        kill_connections(&server);
        drop(guard);
    }
    assert_eq!(recorder.count(What::Contended, "a"), 0);
    assert_all_become_free(&server);
}

#[test]
fn releases_on_killed_connections_are_repeated_in_background() {
    let server = server();
    let (client, _) = client(&server.url());
    for n in [1, 10, 200] {
        let guards: Vec<_> = (0..n)
            .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
            .collect();
        kill_connections(&server);
        drop(guards);
        assert_all_become_free(&server);
    }
}

#[test]
fn a_connection_killed_with_unread_reply_is_harmless() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, recorder) = steady_client(&proxy.url());
    let mutex = client.mutex("a");
    let mut done = 0;
    for _ in 0..10 {
        let guard = mutex
            .try_lock()
            .unwrap()
            .expect("nobody else wants the lock");
        proxy.hold_replies(true);
        drop(guard);
        // If earlier work of the client has no reply yet, the release waits for it. This round does not count then.
        done += usize::from(eventually(TIMEOUT, || !is_held(&server, "a")));
        kill_connections(&server);
        proxy.hold_replies(false);
    }
    assert!(done > 0, "no release was done without its reply");
    assert_eq!(recorder.count(What::Contended, "a"), 0);
    assert_all_become_free(&server);
}

/// The release is done, its reply is lost, and another client has the lock: the repeated release must leave
/// that client's lock alone.
#[test]
fn a_repeated_release_spares_the_next_holder() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, _) = client(&proxy.url());
    let other = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let guard = client.mutex("a").lock().unwrap();
    proxy.hold_replies(true);
    drop(guard);
    let next = within(SOON, "the grant", move || other.mutex("a").lock().unwrap());
    proxy.cut_all();
    proxy.hold_replies(false);
    // All repeated releases have been carried out once this request is done.
    client.with_lock("b", || ()).unwrap();
    client.shutdown(secs(2)).unwrap();
    assert!(is_held(&server, "a"));
    next.unlock().unwrap();
}

#[test]
fn an_unlock_on_a_killed_connection_is_confirmed_on_another() {
    let server = server();
    let (client, _) = steady_client(&server.url());
    for _ in 0..10 {
        let guard = client.mutex("a").lock().unwrap();
        kill_connections(&server);
        assert!(guard.unlock().unwrap().is_confirmed());
        assert!(!is_held(&server, "a"), "confirmed, and yet locked");
    }
}

#[test]
fn closed_idle_connections_lose_no_release() {
    let server = server();
    let (client, recorder) = steady_client(&server.url());
    ask(&server, &["CONFIG", "SET", "timeout", "1"]);
    let (one, two) = (client.mutex("one"), client.mutex("two"));
    let guards = [&one, &two].map(|mutex| mutex.lock().unwrap());
    let closed = eventually(SOON, || connections(&server) == 0);
    assert!(closed, "{} connections are left", connections(&server));
    let [first, second] = guards;
    drop(first);
    let again = one.try_lock().unwrap();
    again.expect("found its own lock").unlock().unwrap();
    drop(second);
    assert_all_become_free(&server);
    assert_eq!(recorder.count(What::Contended, "one"), 0);
}

/// More releases than a connection may have in flight, so most are left to the background.
#[test]
fn many_drops_in_a_black_hole_complete_later() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, _) = client(&proxy.url());
    let guards: Vec<_> = (0..300)
        .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
        .collect();
    proxy.black_hole(true);
    let started = Instant::now();
    within(SOON, "dropping", move || drop(guards));
    let took = started.elapsed();
    assert!(took < TIMEOUT + secs(2), "dropping took {took:?}");
    assert_eq!(held_keys(&server).len(), 300);
    proxy.black_hole(false);
    assert_all_become_free(&server);
    client.shutdown(secs(2)).unwrap();
}

/// Without a connection a drop only queues the release, and the background must send it.
#[test]
fn a_drop_without_a_connection_completes_later() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    let client = builder(&proxy.url())
        .ttl(LONG_TTL)
        .pipelines(1)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("a").lock().unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    // The failed request shows the client that the connection is broken. The release of this request ends with its
    // short ttl.
    let short = client.mutex("b").fixed_ttl(Duration::from_millis(10));
    assert!(short.try_lock().unwrap_err().is_unavailable());
    std::thread::sleep(secs(1));
    drop(guard);
    proxy.refuse(false);
    assert_all_become_free(&server);
}

#[test]
fn a_refused_release_is_repeated() {
    let server = server();
    for shut_down in [false, true] {
        let (client, _) = steady_client(&server.url());
        let guard = client.mutex("a").lock().unwrap();
        ask(&server, &["ACL", "SETUSER", "default", "-del"]);
        drop(guard);
        // This request is behind the release on the same connection, so the client has read the reply to the release.
        assert!(client.mutex("a").try_lock().unwrap().is_none());
        ask(&server, &["ACL", "SETUSER", "default", "+del"]);
        if shut_down {
            drop(client);
            assert!(
                !is_held(&server, "a"),
                "the last handle leaves nothing unsent"
            );
        } else {
            assert_all_become_free(&server);
        }
    }
}
