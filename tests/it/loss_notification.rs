//! A holder is notified of a loss as soon as it happens, before the next renewal. No other change is reported as a
//! loss.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::crossbeam_channel::unbounded;
use leasehold::{Client, ErrorKind, LossReason, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, expires_in, in_redis, is_held, lost_within, millis,
    notification_connection, reads_by_connection, secs, server, tracked, value_of, wait_for_queue,
};

/// A client whose first renewal is due after 20 s, a third of the ttl: no renewal finds a loss that is reported within
/// [`SOON`].
fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Acquires a lock, runs `change`, and returns the reason of the loss. Does so twice: right after the acquire, and when
/// the key is tracked. Fails if the reasons differ.
#[track_caller]
fn reason_of(server: &Server, change: impl Fn(&Server)) -> LossReason {
    let client = client(server);
    let mut reasons = Vec::new();
    for is_tracked in [false, true] {
        let guard = client.mutex("k").lock().unwrap();
        if is_tracked {
            assert!(eventually(SOON, || tracked(server) > 0));
        }
        let lost = guard.lost_signal();
        change(server);
        reasons.push(lost_within(SOON, &lost));
        let error = guard.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LeaseLost);
        assert_eq!(guard.remaining(), Duration::ZERO);
        guard.unlock().unwrap_err();
        ask(server, &["DEL", &in_redis("k")]);
    }
    assert_eq!(reasons[0], reasons[1], "before and after tracking");
    reasons.remove(0)
}

#[test]
fn a_deleted_key_is_reported_before_the_renewal() {
    let server = server();
    let key = in_redis("k");
    for command in [
        &["DEL", &key][..],
        &["UNLINK", &key],
        &["RENAME", &key, "elsewhere"],
        &["PEXPIRE", &key, "1"],
        &["FLUSHALL"],
        &["FLUSHDB", "ASYNC"],
    ] {
        let reason = reason_of(&server, |server| drop(ask(server, command)));
        assert_eq!(reason, LossReason::Deleted, "{command:?}");
    }
}

#[test]
fn a_taken_over_lock_names_its_new_holder() {
    let server = server();
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 other/1/0";
    let with_queue = format!("{value} +");
    for value in [value, &with_queue] {
        let reason = reason_of(&server, |server| {
            ask(server, &["SET", &in_redis("k"), value, "PX", "60000"]);
        });
        let LossReason::TakenOver { by: Some(by) } = reason else {
            panic!("{reason:?}");
        };
        assert_eq!(by.as_str(), "other/1/0");
    }
}

#[test]
fn a_grant_to_another_client_is_a_loss() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    let held = one.mutex("k").lock().unwrap();
    let lost = held.lost_signal();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    ask(&server, &["DEL", &in_redis("k")]);
    let next = waiter.within(SOON, "the grant");
    match lost_within(SOON, &lost) {
        // The key may be missing, or already be granted to the other client, when it is read.
        LossReason::Deleted => {}
        LossReason::TakenOver { by } => assert_eq!(by.as_ref(), Some(two.holder_id())),
        reason => panic!("{reason:?}"),
    }
    next.check().unwrap();
}

#[test]
fn a_new_grant_ends_the_old_one() {
    let server = server();
    let client = client(&server);
    for _ in 0..10 {
        let held = client.mutex("k").lock().unwrap();
        let lost = held.lost_signal();
        ask(&server, &["DEL", &in_redis("k")]);
        let again = client.mutex("k").try_lock().unwrap().expect("it is free");
        match lost_within(SOON, &lost) {
            LossReason::Deleted => {}
            LossReason::TakenOver { by } => assert_eq!(by.as_ref(), Some(client.holder_id())),
            reason => panic!("{reason:?}"),
        }
        // The release of the lost lease does not release the new one.
        drop(held);
        assert!(client.mutex("k").try_lock().unwrap().is_none());
        again.unlock().unwrap();
    }
}

#[test]
fn an_overwritten_key_names_no_new_holder() {
    let server = server();
    for value in [
        "",
        "lh1",
        "lh1 ",
        "lh2 of another version",
        "\u{7f}garbage\r\n",
    ] {
        let reason = reason_of(&server, |server| {
            ask(server, &["SET", &in_redis("k"), value]);
        });
        assert_eq!(reason, LossReason::TakenOver { by: None }, "{value:?}");
    }
}

#[test]
fn a_key_of_another_type_is_a_loss() {
    let server = server();
    let reason = reason_of(&server, |server| {
        let script = "redis.call('DEL', KEYS[1]); redis.call('LPUSH', KEYS[1], 'x')";
        server
            .command(&["EVAL", script, "1", &in_redis("k")])
            .unwrap();
    });
    assert_eq!(reason, LossReason::TakenOver { by: None });
}

#[test]
fn an_evicted_key_is_reported_as_deleted() {
    let server = server();
    ask(
        &server,
        &["CONFIG", "SET", "maxmemory-policy", "allkeys-random"],
    );
    let guard = client(&server).mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    assert!(eventually(SOON, || tracked(&server) > 0));
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
}

#[test]
fn all_losses_of_a_flush_are_reported() {
    let server = server();
    let client = client(&server);
    let guards: Vec<MutexGuard> = (0..600)
        .map(|n| client.mutex(format!("k{n}")).lock().unwrap())
        .collect();
    ask(&server, &["FLUSHALL"]);
    for guard in &guards {
        let reason = lost_within(SOON, &guard.lost_signal());
        assert_eq!(reason, LossReason::Deleted, "{guard:?}");
    }
}

#[test]
fn hundreds_of_renewals_are_no_loss() {
    const LOCKS: usize = 20;
    let (server, recorder) = (server(), Recorder::new());
    let builder = steady(&server.url()).ttl(secs(2)).renew_ratio(0.05);
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("k{n}")).collect();
    let lock = |key: &String| client.mutex(key).lock().unwrap();
    let guards: Vec<MutexGuard> = keys.iter().map(lock).collect();
    for key in &keys {
        recorder.wait_for(20, What::Renewed, key);
    }
    for (key, guard) in keys.iter().zip(guards) {
        assert_eq!(recorder.count(What::Lost, key), 0);
        guard.unlock().unwrap();
    }
}

#[test]
fn repeated_holds_and_releases_are_no_loss() {
    let (server, recorder) = (server(), Recorder::new());
    let tasks = [(); 2].map(|()| {
        let builder = steady(&server.url()).ttl(LONG_TTL);
        let client = builder
            .event_handler(Arc::clone(&recorder))
            .build()
            .unwrap();
        Task::start(move || {
            for round in 0..25 {
                let guard = client.mutex("k").lock().unwrap();
                // The hold lasts about as long as it takes until the key is tracked.
                let lost = guard.lost_signal().recv_timeout(millis(28 + round % 8));
                assert!(lost.is_err(), "{lost:?}");
                if round % 2 == 0 {
                    guard.unlock().unwrap();
                }
            }
        })
    });
    for task in tasks {
        task.within(secs(60), "repeated holds");
    }
    assert_eq!(recorder.count(What::Lost, "k"), 0);
}

#[test]
fn passing_waiters_cost_the_holder_one_read() {
    let (server, recorder) = (server(), Recorder::new());
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let holder = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let started = Instant::now();
    let (mut held, mut of_holder) = (None, String::new());
    let mut reads = reads_by_connection(&server, || {
        held = Some(holder.mutex("k").lock().unwrap());
        assert!(eventually(SOON, || tracked(&server) > 0));
        of_holder = notification_connection(&server, &holder);
        for clients in [1, 4] {
            let (stop, stopped) = unbounded();
            let tasks: Vec<_> = (1..=clients)
                .map(|n| {
                    let mutex = client(&server).mutex("k").cancelled_by(stopped.clone());
                    let task = Task::start(move || mutex.lock().map(drop));
                    wait_for_queue(&server, "k", n);
                    task
                })
                .collect();
            drop(stop);
            for task in tasks {
                let error = task.within(SOON, "the cancelled wait").unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled);
            }
            wait_for_queue(&server, "k", 0);
        }
    });
    // One read tracks the key. Another one follows when the first waiter has marked the value. A slow machine may not
    // have sent the second read yet.
    let by_holder = reads.remove(&of_holder);
    assert!(matches!(by_holder, Some(1 | 2)), "{by_holder:?}");
    // A waiter's client reads and tracks the key after each request that leaves the waiter queued. A waiter repeats its
    // request after half a second at the earliest, and once when its notification connection is open, if it was queued
    // before that.
    let repeated = 1 + (started.elapsed().as_millis() / 500) as usize;
    for (waiter, reads) in reads {
        assert!(reads <= 1 + repeated, "{reads} reads by {waiter}");
    }
    let guard = held.unwrap();
    let lost = guard.lost_signal().recv_timeout(millis(150));
    assert!(lost.is_err(), "{lost:?}");
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    guard.unlock().unwrap();
}

#[test]
fn extending_is_no_loss() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    assert!(eventually(SOON, || tracked(&server) > 0));
    for n in 1..=50 {
        guard.extend(LONG_TTL + secs(n)).unwrap();
    }
    // Another program may change the ttl, too.
    ask(&server, &["PEXPIRE", &in_redis("k"), "200000"]);
    ask(&server, &["PERSIST", &in_redis("k")]);
    let reported = lost.recv_timeout(millis(150));
    assert!(reported.is_err(), "{reported:?}");
    // A loss after all these changes is still reported.
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
}

#[test]
fn a_late_release_keeps_the_next_holders_lock() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    type Leave = fn(MutexGuard);
    let leave: [Leave; 2] = [drop, |guard| drop(guard.unlock().unwrap_err())];
    for leave in leave {
        for before_the_report in [true, false] {
            let late = one.mutex("k").lock().unwrap();
            let lost = late.lost_signal();
            ask(&server, &["DEL", &in_redis("k")]);
            let next = two.mutex("k").lock().unwrap();
            let value = value_of(&server, "k");
            if !before_the_report {
                lost_within(SOON, &lost);
            }
            leave(late);
            // If the guard had written a release, this request would follow it on the same connection. So Redis would
            // have carried out the release before.
            assert!(one.mutex("k").try_lock().unwrap().is_none());
            assert_eq!(value_of(&server, "k"), value);
            assert!(expires_in(&server, "k") > Some(LONG_TTL / 2));
            next.check().unwrap();
            next.unlock().unwrap();
            assert!(!is_held(&server, "k"));
        }
    }
}

#[test]
fn callbacks_and_events_report_a_loss_early() {
    let (server, recorder) = (server(), Recorder::new());
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (report, reported) = unbounded();
    guard.on_lost(move |reason| report.send(reason).unwrap());
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(reported.recv_timeout(SOON), Ok(LossReason::Deleted));
    recorder.wait_for(1, What::Lost, "k");
    assert_eq!(recorder.count(What::Renewed, "k"), 0);
}
