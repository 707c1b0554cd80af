//! A loss is told when it happens, not at the next renewal; and nothing but a loss is told as one.

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

/// Renewal is due after a third of the ttl, twenty seconds: what is told within [`SOON`] was not
/// found by that.
fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// A lock, and what becomes of it when `theft` happens: at once, and when it has been held for a
/// while.
#[track_caller]
fn reasons(server: &Server, theft: impl Fn(&Server)) -> LossReason {
    let client = client(server);
    let mut told = Vec::new();
    for held_for_long in [false, true] {
        let guard = client.mutex("k").lock().unwrap();
        if held_for_long {
            assert!(eventually(SOON, || tracked(server) > 0));
        }
        let lost = guard.lost_signal();
        theft(server);
        told.push(lost_within(SOON, &lost));
        let error = guard.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LeaseLost);
        assert_eq!(guard.remaining(), Duration::ZERO);
        guard.unlock().unwrap_err();
        ask(server, &["DEL", &in_redis("k")]);
    }
    assert_eq!(told[0], told[1], "at once, and after a while");
    told.remove(0)
}

#[test]
fn a_deleted_key_is_told_long_before_the_next_renewal() {
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
        let reason = reasons(&server, |server| drop(ask(server, command)));
        assert_eq!(reason, LossReason::Deleted, "{command:?}");
    }
}

#[test]
fn a_lock_taken_over_is_told_with_its_new_holder() {
    let server = server();
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 thief/1/0";
    let waited_for = format!("{value} +");
    for value in [value, &waited_for] {
        let reason = reasons(&server, |server| {
            ask(server, &["SET", &in_redis("k"), value, "PX", "60000"]);
        });
        let LossReason::TakenOver { by: Some(by) } = reason else {
            panic!("{reason:?}");
        };
        assert_eq!(by.as_str(), "thief/1/0");
    }
}

#[test]
fn a_lock_granted_to_another_client_after_a_deletion_is_told() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    let held = one.mutex("k").lock().unwrap();
    let lost = held.lost_signal();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    ask(&server, &["DEL", &in_redis("k")]);
    let next = waiter.within(SOON, "entering");
    match lost_within(SOON, &lost) {
        // Which of the two it finds when it looks.
        LossReason::Deleted => {}
        LossReason::TakenOver { by } => assert_eq!(by.as_ref(), Some(two.holder_id())),
        reason => panic!("{reason:?}"),
    }
    next.check().unwrap();
}

#[test]
fn a_lock_granted_again_to_its_own_client_is_told() {
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
        // The loser leaves the one that came after it alone.
        drop(held);
        assert!(client.mutex("k").try_lock().unwrap().is_none());
        again.unlock().unwrap();
    }
}

#[test]
fn an_overwritten_key_is_told_as_nobodys() {
    let server = server();
    for value in [
        "",
        "lh1",
        "lh1 ",
        "lh2 of another version",
        "\u{7f}garbage\r\n",
    ] {
        let reason = reasons(&server, |server| {
            ask(server, &["SET", &in_redis("k"), value]);
        });
        assert_eq!(reason, LossReason::TakenOver { by: None }, "{value:?}");
    }
}

#[test]
fn a_key_of_another_type_is_told_as_a_loss() {
    let server = server();
    let reason = reasons(&server, |server| {
        let script = "redis.call('DEL', KEYS[1]); redis.call('LPUSH', KEYS[1], 'x')";
        server
            .command(&["EVAL", script, "1", &in_redis("k")])
            .unwrap();
    });
    assert_eq!(reason, LossReason::TakenOver { by: None });
}

#[test]
fn an_evicted_key_is_told_as_deleted() {
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
fn many_locks_lost_together_are_all_told() {
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
fn holding_and_letting_go_again_and_again_is_no_loss() {
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
                // About as long as it takes until it is watched.
                let lost = guard.lost_signal().recv_timeout(millis(28 + round % 8));
                assert!(lost.is_err(), "{lost:?}");
                if round % 2 == 0 {
                    guard.unlock().unwrap();
                }
            }
        })
    });
    for task in tasks {
        task.within(secs(60), "holding again and again");
    }
    assert_eq!(recorder.count(What::Lost, "k"), 0);
}

#[test]
fn waiters_that_come_and_go_cost_the_holder_one_read() {
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
        of_holder = notification_connection(&server);
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
                let error = task.within(SOON, "giving up").unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled);
            }
            wait_for_queue(&server, "k", 0);
        }
    });
    // One read tracks the key, and one follows the mark that the first waiter set. A slow machine may not have sent
    // the second one yet.
    let by_holder = reads.remove(&of_holder);
    assert!(matches!(by_holder, Some(1 | 2)), "{by_holder:?}");
    // A waiter has the key tracked, which reads it, after each request that finds it queued. It asks again after half a
    // second at the earliest, and once when its notification connection is open, if it was queued before that.
    let asked_again = 1 + (started.elapsed().as_millis() / 500) as usize;
    for (waiter, read) in reads {
        assert!(read <= 1 + asked_again, "{read} reads by {waiter}");
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
    // A tool may do the same.
    ask(&server, &["PEXPIRE", &in_redis("k"), "200000"]);
    ask(&server, &["PERSIST", &in_redis("k")]);
    let told = lost.recv_timeout(millis(150));
    assert!(told.is_err(), "{told:?}");
    // And a loss after all that is told as ever.
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
}

#[test]
fn who_lost_a_lock_leaves_the_next_holders_alone() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    type Leave = fn(MutexGuard);
    let leave: [Leave; 2] = [drop, |guard| drop(guard.unlock().unwrap_err())];
    for leave in leave {
        for before_it_is_told in [true, false] {
            let late = one.mutex("k").lock().unwrap();
            let lost = late.lost_signal();
            ask(&server, &["DEL", &in_redis("k")]);
            let next = two.mutex("k").lock().unwrap();
            let value = value_of(&server, "k");
            if !before_it_is_told {
                lost_within(SOON, &lost);
            }
            leave(late);
            // On the same connection as a late release, so behind it.
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
fn a_loss_is_told_early_by_callback_and_event_too() {
    let (server, recorder) = (server(), Recorder::new());
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (told, callback) = unbounded();
    guard.on_lost(move |reason| told.send(reason).unwrap());
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(callback.recv_timeout(SOON), Ok(LossReason::Deleted));
    recorder.wait_for(1, What::Lost, "k");
    assert_eq!(recorder.count(What::Renewed, "k"), 0);
}
