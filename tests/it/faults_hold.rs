//! Redis fails while locks are held: what the holders learn, and when other clients get the lock.

use std::sync::Arc;

use leasehold::{Builder, Client, ErrorKind, LossReason, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    Counter, LONG_TTL, Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, builder,
    is_held, kill_connections, lock, lost_within, millis, secs, server, value_of, within,
};

/// A server, a client with these settings whose events are recorded, and a held lock of this client.
fn held(
    key: &str,
    settings: impl Fn(&str) -> Builder,
) -> (Server, Arc<Recorder>, Client, MutexGuard) {
    let server = server();
    let recorder = Recorder::new();
    // The lock is renewed early, so that there is time for several attempts.
    let client = settings(&server.url())
        .renew_ratio(0.1)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex(key).lock().unwrap();
    (server, recorder, client, guard)
}

#[test]
fn a_killed_server_loses_locks_only_after_validity() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    let ttl = millis(1_200);
    let guard = client.mutex("a").ttl(ttl).lock().unwrap();
    let signal = guard.lost_signal();
    server.kill();
    assert!(!guard.is_lost() || guard.remaining().is_zero());
    assert_eq!(lost_within(ttl + secs(2), &signal), LossReason::Expired);
    assert!(guard.remaining().is_zero());
    assert_eq!(guard.check().unwrap_err().kind(), ErrorKind::LeaseLost);

    server.restart().unwrap();
    let after = within(SOON, "locking after the restart", move || {
        drop(guard);
        client.mutex("a").lock().unwrap()
    });
    after.unlock().unwrap();
    assert!(!is_held(&server, "a"));
}

#[test]
fn the_next_renewal_finds_an_empty_restart() {
    let (mut server, _, client, guard) = held("a", steady);
    let (signal, before) = (guard.lost_signal(), guard.fencing_token());
    server.restart().unwrap();
    assert_eq!(lost_within(SOON, &signal), LossReason::Deleted);
    let after = within(SOON, "locking after the restart", move || {
        client.mutex("a").lock().unwrap()
    });
    assert!(after.fencing_token() > before, "the counter was lost");
    drop(guard);
    after
        .extend(secs(10))
        .expect("the old guard releases its own lease only");
    after.unlock().unwrap();
}

#[test]
fn a_server_stopped_for_less_than_the_ttl_costs_nothing() {
    let (server, recorder, _client, guard) = held("a", builder);
    let signal = guard.lost_signal();
    let value = value_of(&server, "a");
    server.stop();
    recorder.wait_for_more(1, What::RenewalFailed, "a");
    server.resume();
    recorder.wait_for_more(1, What::Renewed, "a");
    guard.check().unwrap();
    assert!(signal.try_recv().is_err());
    assert_eq!(value_of(&server, "a"), value);
    guard.unlock().unwrap();
    assert!(!is_held(&server, "a"));
}

/// Twenty holders, and a waiter of another process for each. The server is stopped until every lease has ended.
#[test]
fn holders_lose_the_lock_before_others_enter() {
    const LOCKS: usize = 20;
    let server = server();
    let holders = builder(&server.url()).build().unwrap();
    let waiters_events = Recorder::new();
    let waiters = builder(&server.url())
        .event_handler(Arc::clone(&waiters_events))
        .build()
        .unwrap();
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("lock-{n}")).collect();
    let ttl = secs(4);
    let guards: Vec<Arc<MutexGuard>> = keys
        .iter()
        .map(|key| Arc::new(holders.mutex(key).ttl(ttl).lock().unwrap()))
        .collect();
    let signals: Vec<_> = guards.iter().map(|guard| guard.lost_signal()).collect();
    let tasks: Vec<Task<(u64, bool)>> = keys
        .iter()
        .zip(&guards)
        .map(|(key, holder)| {
            // If one of these locks were leaked, it would stay in Redis for very long.
            let mutex = waiters.mutex(key).ttl(LONG_TTL);
            let holder = Arc::clone(holder);
            Task::start(move || {
                let guard = mutex.lock().unwrap();
                let lost = holder.is_lost();
                (guard.fencing_token(), lost)
            })
        })
        .collect();
    for key in &keys {
        waiters_events.wait_for(1, What::Contended, key);
    }

    server.stop();
    for signal in &signals {
        assert_eq!(lost_within(ttl + secs(2), signal), LossReason::Expired);
    }
    assert!(tasks.iter().all(|task| !task.is_done()), "Redis is stopped");
    server.resume();

    for (task, holder) in tasks.into_iter().zip(&guards) {
        let (token, lost) = task.within(SOON, "the grant after the outage");
        assert!(lost, "a grant while {holder:?} believed in its lock");
        assert!(token > holder.fencing_token());
    }
    drop(guards);
    assert_all_become_free(&server);
    // Both clients still work.
    for client in [holders, waiters] {
        let mutex = client.mutex("lock-0");
        let guard = within(SOON, "locking after the outage", move || {
            mutex.lock().unwrap()
        });
        guard.unlock().unwrap();
    }
    assert_all_become_free(&server);
}

#[test]
fn scripts_flushed_while_a_lock_is_held_cost_nothing() {
    let (server, recorder, client, guard) = held("a", steady);
    ask(&server, &["SCRIPT", "FLUSH"]);
    recorder.wait_for_more(1, What::Renewed, "a");
    assert_eq!(recorder.count(What::RenewalFailed, "a"), 0);
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert!(client.mutex("a").try_lock().unwrap().is_some());
}

#[test]
fn connections_killed_while_a_lock_is_held_cost_nothing() {
    let (server, recorder, client, guard) = held("a", steady);
    // The first renewal opens a connection that only renewals use.
    for _ in 0..2 {
        recorder.wait_for_more(1, What::Renewed, "a");
        kill_connections(&server);
    }
    recorder.wait_for_more(1, What::Renewed, "a");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert!(client.mutex("a").try_lock().unwrap().is_some());
}

#[test]
fn extend_survives_flushed_scripts_and_killed_connections() {
    let (server, _, _client, guard) = held("a", steady);
    guard.extend(secs(10)).unwrap();
    ask(&server, &["SCRIPT", "FLUSH"]);
    guard.extend(secs(20)).unwrap();
    kill_connections(&server);
    guard.extend(secs(40)).unwrap();
    assert!(guard.remaining() > secs(20));
    guard.unlock().unwrap();
}

#[test]
fn a_flush_ends_locks_and_admits_waiters() {
    let (server, _, client, guard) = held("a", steady);
    let others_events = Recorder::new();
    let other = steady(&server.url())
        .event_handler(Arc::clone(&others_events))
        .build()
        .unwrap();
    let waiter = Task::start(move || other.mutex("a").lock().unwrap());
    others_events.wait_for(1, What::Contended, "a");
    let signal = guard.lost_signal();
    ask(&server, &["FLUSHALL"]);

    let next = waiter.within(SOON, "the grant after the flush");
    assert!(next.fencing_token() > guard.fencing_token());
    let reason = lost_within(SOON, &signal);
    // The renewal finds no key, or the next holder's.
    assert!(
        matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. }),
        "{reason:?}"
    );
    assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::LeaseLost);
    next.extend(secs(10))
        .expect("the loser leaves the next holder alone");
    next.unlock().unwrap();
    client.mutex("a").lock().unwrap().unlock().unwrap();
}

#[test]
fn an_uncontended_flush_is_reported_as_deleted() {
    let (server, recorder, _client, guard) = held("a", steady);
    let signal = guard.lost_signal();
    ask(&server, &["FLUSHALL"]);
    assert_eq!(lost_within(SOON, &signal), LossReason::Deleted);
    recorder.wait_for(1, What::Lost, "a");
    assert_eq!(
        guard.check().unwrap_err().loss_reason(),
        Some(&LossReason::Deleted)
    );
    drop(guard);
    assert!(!is_held(&server, "a"));
}

#[test]
fn without_memory_redis_grants_nothing_but_renews_and_releases() {
    let (server, recorder, client, guard) = held("a", steady);
    let to_drop = client.mutex("to-drop").lock().unwrap();
    ask(&server, &["CONFIG", "SET", "maxmemory", "100000"]);
    let refused = client.mutex("b").try_lock().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("OOM"), "{refused}");
    assert_eq!(refused.key(), Some("b"));
    let long_waiter = {
        let mutex = client.mutex("c");
        Task::start(move || mutex.lock().unwrap())
    };
    recorder.wait_for_more(2, What::Unavailable, "c");

    // New connections behave the same, and load their scripts.
    kill_connections(&server);
    recorder.wait_for_more(2, What::Renewed, "a");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert!(!is_held(&server, "a"));
    drop(to_drop);
    assert!(eventually(SOON, || !is_held(&server, "to-drop")));
    assert!(!is_held(&server, "b"), "refused, and yet locked");
    assert!(!is_held(&server, "c"), "refused, and yet locked");

    ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    let granted = long_waiter.within(SOON, "locking once there is memory");
    granted.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn exclusion_holds_through_stops_flushed_scripts_and_killed_connections() {
    // The count is on a server without faults.
    let (server, safe) = (server(), server());
    let witness = Arc::new(Witness::default());
    let tasks: Vec<Task<usize>> = (0..2)
        .flat_map(|_| {
            let client = builder(&server.url()).build().unwrap();
            [client.clone(), client]
        })
        .map(|client| {
            let (witness, mut counter) = (Arc::clone(&witness), Counter::open(&safe, "n"));
            Task::start(move || {
                let mut raised = 0;
                while raised < 100 || witness.entries() < 600 {
                    let guard = client.mutex("a").lock().unwrap();
                    let inside = witness.enter(&guard);
                    counter.raise();
                    drop(inside);
                    raised += 1;
                    if raised % 3 == 0 {
                        // Whether the lock was lost or not, the outcome of the unlock may be unknown.
                        let _ = guard.unlock();
                    }
                }
                raised
            })
        })
        .collect();
    let mut fault = 0;
    while tasks.iter().any(|task| !task.is_done()) {
        let entries = witness.entries();
        match fault % 3 {
            0 => kill_connections(&server),
            1 => drop(ask(&server, &["SCRIPT", "FLUSH"])),
            _ => {
                server.stop();
                std::thread::sleep(millis(30));
                server.resume();
            }
        }
        fault += 1;
        let moved = eventually(SOON, || {
            witness.entries() > entries + 20 || tasks.iter().all(Task::is_done)
        });
        assert!(moved, "no grant after fault {fault}");
    }
    let raised: usize = tasks
        .into_iter()
        .map(|task| task.within(SOON, "raising the counter"))
        .sum();
    assert!(fault > 3, "only {fault} faults");
    assert_eq!(
        Counter::open(&safe, "n").read(),
        raised,
        "updates were lost"
    );
    assert_all_become_free(&server);
}

/// All connections to `server` are closed twice, those for notifications too, while a client holds a lock and another
/// one waits for it. `steady` makes the settings of a client. `is_queued` returns whether a waiter is in the queue in
/// Redis.
#[track_caller]
pub fn assert_closed_connections_end_no_hold_or_wait(
    server: &Server,
    steady: &dyn Fn() -> Builder,
    is_queued: &dyn Fn() -> bool,
) {
    let recorder = Recorder::new();
    let client = |recorder: &Arc<Recorder>| -> Client {
        let builder = steady().ttl(secs(4));
        builder.event_handler(Arc::clone(recorder)).build().unwrap()
    };
    let (holder, waiting) = (client(&recorder), client(&Recorder::new()));
    let witness = Witness::default();
    let guard = lock(&holder, "k");
    let inside = witness.enter(&guard);
    let waiter = Task::start(move || waiting.mutex("k").lock().map(drop));
    assert!(eventually(SOON, is_queued), "no waiter is queued");
    for _ in 0..2 {
        kill_connections(server);
        ask(server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
        recorder.wait_for_more(1, What::Renewed, "k");
    }
    guard.check().unwrap();
    drop(inside);
    guard.unlock().unwrap();
    waiter.within(SOON, "the grant").unwrap();
}
