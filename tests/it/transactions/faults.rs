//! The network fails during a transaction: nothing is written, or the error says that the outcome is unknown.

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::redis::{Commands, RedisResult};
use leasehold::{Client, ErrorKind, MutexGuard};
use leasehold_testbed::{Proxy, Server, eventually};

use super::{DATA, assert_writes, client, data, write};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, builder, connections, in_redis, kill_connections, millis, server,
};

/// The command time-out of the clients. The proxy holds replies back for longer; a busy machine delays them for less.
const REPLIES_WITHIN: Duration = Duration::from_secs(3);

/// A server behind a proxy, and a client of that proxy.
fn behind_a_proxy() -> (Server, Proxy, Client) {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = builder(&proxy.url())
        .command_timeout(REPLIES_WITHIN)
        .ttl(LONG_TTL)
        .build()
        .unwrap();
    (server, proxy, client)
}

#[test]
fn dead_idle_connections_are_replaced() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let other = client.mutex("other").lock().unwrap();
    for _ in 0..3 {
        // The client has two connections, and both die.
        let nested = guard.transaction(|_, _| {
            assert_writes(&server, &other);
            Ok(())
        });
        nested.unwrap();
        kill_connections(&server);
    }
    assert_writes(&server, &other);
    guard.unlock().unwrap();
}

#[test]
fn a_disconnect_during_the_closure_writes_nothing() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let result = guard.transaction(|conn, pipe| {
        pipe.set(DATA, "x");
        kill_connections(&server);
        conn.get::<_, Option<String>>(DATA)
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.source().is_some());
    assert_eq!(data(&server), None);
    guard.check().unwrap();
    assert_writes(&server, &guard);
}

#[test]
fn a_disconnect_before_exec_leaves_the_outcome_unknown() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |_| kill_connections(&server));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!((runs, data(&server)), (1, None));
    guard.check().unwrap();
    assert_writes(&server, &guard);
    guard.unlock().unwrap();
}

#[test]
fn unanswered_writes_have_an_unknown_outcome() {
    let (server, proxy, client) = behind_a_proxy();
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |_| proxy.hold_replies(true));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert!(error.source().is_some());
    assert_eq!(runs, 1, "never repeated: it may have been done");
    assert_eq!(data(&server).as_deref(), Some("written in run 1"));
    proxy.hold_replies(false);
    // No later request reads the late reply.
    ask(&server, &["DEL", DATA]);
    assert_writes(&server, &guard);
}

#[test]
fn writes_after_a_loss_are_refused() {
    let (server, proxy, client) = behind_a_proxy();
    let guard = client.mutex("k").lock().unwrap();
    let (_, result) = write(&guard, |_| proxy.hold_requests(true));
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
    ask(&server, &["DEL", &in_redis("k")]);
    let held = proxy.held_bytes();
    assert!(held > 0, "the writes are still in flight");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    let written = eventually(millis(200), || data(&server).is_some());
    assert!(!written, "{:?}", data(&server));
}

#[test]
fn ignoring_a_broken_connection_writes_nothing() {
    let (server, proxy, client) = behind_a_proxy();
    let guard = client.mutex("k").lock().unwrap();
    let mut later = Vec::new();
    let result = guard.transaction(|conn, pipe| {
        pipe.set(DATA, "x");
        proxy.hold_replies(true);
        let read: RedisResult<Option<String>> = conn.get(DATA);
        assert!(read.unwrap_err().is_timeout());
        proxy.hold_replies(false);
        for _ in 0..3 {
            let read: RedisResult<Option<String>> = conn.get("other");
            later.push(read.is_err());
        }
        Ok(())
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(later, [true; 3]);
    assert_eq!(data(&server), None);
    assert_writes(&server, &guard);
}

#[test]
fn a_timed_out_read_is_no_unknown_outcome() {
    let (server, proxy, client) = behind_a_proxy();
    let guard = client.mutex("k").lock().unwrap();
    let result = guard.transaction(|conn, pipe| {
        pipe.set(DATA, "x");
        proxy.hold_replies(true);
        conn.get::<_, Option<String>>(DATA)
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    proxy.hold_replies(false);
    assert_eq!(data(&server), None);
    guard.check().unwrap();
}

#[test]
fn without_the_first_reply_the_closure_never_runs() {
    let (server, proxy, client) = behind_a_proxy();
    let guard = client.mutex("k").lock().unwrap();
    assert_writes(&server, &guard);
    proxy.hold_replies(true);
    let (runs, result) = write(&guard, |_| ());
    let error = result.unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::Unavailable,
        "after {REPLIES_WITHIN:?}: {error}"
    );
    assert_eq!(runs, 0);
    proxy.hold_replies(false);
    assert_writes(&server, &guard);
}

/// The writes may reach Redis at any time: before the key has changed, while no other client has the lock, or never.
#[test]
fn late_writes_change_nothing_after_a_local_grant() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = builder(&proxy.url()).command_timeout(REPLIES_WITHIN);
    let client = builder.ttl(LONG_TTL).hand_off_time(10 * SOON);
    let client = client.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    let (mutex, direct) = (
        client.mutex("k"),
        redis::Client::open(server.url()).unwrap(),
    );
    let waiter = Task::start_blocked(move || {
        let guard = mutex.lock().unwrap();
        let mut direct = direct.get_connection_with_timeout(SOON).unwrap();
        let seen: Option<String> = direct.get(DATA).unwrap();
        (guard, seen)
    });
    let (_, result) = write(&guard, |_| proxy.hold_requests(true));
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Timeout);
    drop(guard);
    let handed_off = eventually(millis(200), || waiter.is_done());
    assert!(!handed_off, "its key has not changed");
    proxy.hold_requests(false);
    let (guard, seen) = waiter.within(SOON, "the grant");
    assert!(guard.fencing_token() > token + 1023, "a grant by Redis");
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    let written = eventually(millis(200), || data(&server) != seen);
    assert!(!written, "{:?} after {seen:?}", data(&server));
    guard.check().unwrap();
}

/// One increment by a transaction under each lock, all in flight at the same time.
fn increment_all_at_once(guards: &[MutexGuard]) {
    // Not a barrier: if a transaction failed before its closure, the others would wait at a barrier for ever.
    let inside = AtomicUsize::new(0);
    let all = guards.len();
    thread::scope(|scope| {
        for guard in guards {
            let inside = &inside;
            scope.spawn(move || {
                let done = guard.transaction(|_, pipe| {
                    inside.fetch_add(1, Ordering::SeqCst);
                    let all_inside = eventually(SOON, || inside.load(Ordering::SeqCst) >= all);
                    assert!(all_inside, "{inside:?} of {all} at the same time");
                    pipe.incr("done", 1);
                    Ok(())
                });
                done.unwrap();
            });
        }
    });
}

/// The pool is limited, and a dead connection takes a slot until it is returned.
#[test]
fn dead_transaction_connections_free_their_slots() {
    for at_once in [1, 3] {
        let server = server();
        let proxy = Proxy::start(server.port()).unwrap();
        let builder = steady(&proxy.url()).ttl(LONG_TTL);
        let client = builder
            .pipelines(1)
            .max_transactions(at_once)
            .build()
            .unwrap();
        let guards = ["a", "b", "c"].map(|key| client.mutex(key).lock().unwrap());
        proxy.delay(millis(2));
        // The connections that are not for transactions: a pipeline, the notifications, and two for renewals. The
        // second one for renewals is made when two renewals are in flight.
        let all_others = eventually(SOON, || {
            thread::scope(|scope| {
                for guard in &guards {
                    scope.spawn(|| guard.extend(2 * LONG_TTL).unwrap());
                }
            });
            connections(&server) >= 4
        });
        assert!(all_others, "{}", connections(&server));
        let guards = &guards[..at_once];
        increment_all_at_once(guards);
        for _ in 0..2 {
            kill_idle_transactions(&server, at_once);
            increment_all_at_once(guards);
        }
        kill_idle_transactions(&server, at_once);
        for guard in guards {
            assert_writes(&server, guard);
        }
        let done = ask(&server, &["GET", "done"]);
        assert_eq!(done.as_text(), Some(&*(3 * at_once).to_string()));
    }
}

/// Closes the connections whose last command was a transaction's. The acquire of a free lock is one, too.
fn kill_idle_transactions(server: &Server, count: usize) {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().unwrap().lines();
    let idle = lines.filter(|line| line.contains(" cmd=exec "));
    let ids: Vec<&str> = idle
        .filter_map(|line| line.split(' ').next()?.strip_prefix("id="))
        .collect();
    assert!(ids.len() >= count, "{list:?}");
    for id in ids {
        ask(server, &["CLIENT", "KILL", "ID", id]);
    }
}
