//! Sets of keys that are locked together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind, LossReason, MutexesGuard};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task, secs};

const KEYS: [&str; 3] = ["a", "b", "c"];

/// Waits until each of the keys is free.
#[track_caller]
fn assert_free(client: &Client, keys: &[&str]) {
    for key in keys {
        let mutex = client.mutex(key);
        let is_free = || mutex.try_lock().unwrap().is_some();
        assert!(eventually(SOON, is_free), "{key} stays taken");
    }
}

/// Locks the keys on another thread.
fn wait_for(client: &Client, keys: &[&str]) -> Task<MutexesGuard> {
    let set = client.mutexes(keys);
    Task::start(move || set.lock().unwrap())
}

/// Waits until the set has the key for which it does not wait.
#[track_caller]
fn wait_until_taken(client: &Client, key: &str) {
    let mutex = client.mutex(key);
    assert!(eventually(SOON, || mutex.is_locked().unwrap()), "{key}");
}

pub fn a_set_has_all_keys_or_none(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    for taken in KEYS {
        let held = two.mutex(taken).lock().unwrap();
        assert!(one.mutexes(KEYS).try_lock().unwrap().is_none());
        let others: Vec<&str> = KEYS.into_iter().filter(|key| *key != taken).collect();
        assert_free(&two, &others);
        held.unlock().unwrap();
    }
    let before = one.mutex("b").lock().unwrap().fencing_token();
    assert_free(&two, &["b"]);
    let all = one.mutexes(KEYS).try_lock().unwrap().unwrap();
    for key in KEYS {
        assert!(two.mutex(key).try_lock().unwrap().is_none(), "{key}");
    }
    assert!(all.token("b").unwrap() > before);
    assert_eq!(all.token("d"), None);
    all.check().unwrap();
    assert!(all.unlock().unwrap().is_confirmed());
    assert_free(&two, &KEYS);
    drop(one.mutexes(KEYS).lock().unwrap());
    assert_free(&two, &KEYS);
}

pub fn a_set_needs_different_keys(backend: &dyn Backend) {
    let client = backend.client();
    let twice = client.mutexes(["a", "b", "a"]).lock().unwrap_err();
    assert_eq!(
        (twice.kind(), twice.key()),
        (ErrorKind::InvalidKey, Some("a"))
    );
    let bad = client.mutexes(["a", "~b"]).lock().unwrap_err();
    assert_eq!((bad.kind(), bad.key()), (ErrorKind::InvalidKey, Some("~b")));
    for n in [0, 129] {
        let keys = (0..n).map(|n| n.to_string());
        let error = client.mutexes(keys).try_lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    }
    let most = client.mutexes((0..128).map(|n| n.to_string()));
    assert_eq!(most.lock().unwrap().keys().count(), 128);
}

pub fn sets_in_opposite_order_finish(backend: &dyn Backend) {
    const TURNS: usize = 20;
    let clients = [backend.client(), backend.client()];
    let orders = [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]];
    let entered = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = orders
        .iter()
        .flat_map(|order| clients.iter().map(move |client| client.mutexes(order)))
        .map(|set| {
            let entered = Arc::clone(&entered);
            Task::start(move || {
                for turn in 0..TURNS {
                    let guard = set.lock().unwrap();
                    // Only the holder of the set changes the number.
                    let before = entered.load(Ordering::SeqCst);
                    std::thread::yield_now();
                    entered.store(before + 1, Ordering::SeqCst);
                    match turn % 2 {
                        0 => drop(guard),
                        _ => drop(guard.unlock().unwrap()),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(6 * SOON, "its turns");
    }
    assert_eq!(entered.load(Ordering::SeqCst), 6 * TURNS);
    assert_free(&clients[0], &KEYS);
}

pub fn a_waiting_set_holds_the_keys_before(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let set = one.mutexes(KEYS);
    let order: Vec<String> = set.keys().map(str::to_owned).collect();
    let held = two.mutex(&order[1]).lock().unwrap();
    let waiting = wait_for(&one, &KEYS);
    wait_until_taken(&two, &order[0]);
    // The set does not hold the keys behind the taken one.
    assert_free(&two, &[&order[2]]);
    held.unlock().unwrap();
    let all = waiting.within(SOON, "the last keys");
    all.check().unwrap();
    assert!(two.mutex(&order[2]).try_lock().unwrap().is_none());
    all.unlock().unwrap();
    assert_free(&two, &KEYS);
}

pub fn a_set_that_gives_up_leaves_nothing(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let order: Vec<String> = one.mutexes(KEYS).keys().map(str::to_owned).collect();
    // Connects both clients. A short wait might end before that.
    for client in [&one, &two] {
        client.mutexes(KEYS).lock().unwrap().unlock().unwrap();
    }
    for last in [&order[1], &order[2]] {
        let held = two.mutex(last).lock().unwrap();
        // The wait ends at its time limit.
        let set = one.mutexes(KEYS);
        assert!(set.try_lock_for(secs(2)).unwrap().is_none());
        // The keys are free when the call returns.
        assert!(two.mutex(&order[0]).try_lock().unwrap().is_some());
        assert_free(&two, &[&order[0]]);
        // The wait is cancelled.
        let (cancel, cancelled) = bounded(1);
        let set = one.mutexes(KEYS).cancelled_by(cancelled);
        let waiting = Task::start(move || set.lock().map(drop));
        wait_until_taken(&two, &order[0]);
        cancel.send(()).unwrap();
        let error = waiting.within(SOON, "the cancellation").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(two.mutex(&order[0]).try_lock().unwrap().is_some());
        held.unlock().unwrap();
        assert_free(&two, &KEYS);
    }
}

pub fn one_of_ten_gets_the_set(backend: &dyn Backend) {
    let clients: Vec<_> = (0..10).map(|_| backend.client()).collect();
    let (begin, begun) = bounded::<()>(0);
    let tasks: Vec<_> = clients
        .iter()
        .map(|client| {
            let (set, begun) = (client.mutexes(KEYS), begun.clone());
            Task::start(move || {
                let _ = begun.recv();
                set.try_lock().unwrap()
            })
        })
        .collect();
    drop(begin);
    let tried: Vec<_> = tasks
        .into_iter()
        .map(|task| task.within(2 * SOON, "a try"))
        .collect();
    assert_eq!(tried.iter().flatten().count(), 1);
}

pub fn sets_and_single_locks_exclude_each_other(backend: &dyn Backend) {
    const TURNS: usize = 10;
    let clients = [backend.client(), backend.client()];
    let inside: Arc<[AtomicUsize; 3]> = Arc::default();
    let mut tasks = Vec::new();
    for client in &clients {
        let (set, entered) = (client.mutexes(KEYS), Arc::clone(&inside));
        tasks.push(Task::start(move || {
            for _ in 0..TURNS {
                set.with(|_| {
                    for key in &*entered {
                        assert_eq!(key.fetch_add(1, Ordering::SeqCst), 0);
                    }
                    for key in &*entered {
                        key.fetch_sub(1, Ordering::SeqCst);
                    }
                })
                .unwrap();
            }
        }));
        for (place, key) in KEYS.into_iter().enumerate() {
            let (mutex, entered) = (client.mutex(key), Arc::clone(&inside));
            tasks.push(Task::start(move || {
                for _ in 0..TURNS {
                    let guard = mutex.lock().unwrap();
                    assert_eq!(entered[place].fetch_add(1, Ordering::SeqCst), 0);
                    entered[place].fetch_sub(1, Ordering::SeqCst);
                    drop(guard);
                }
            }));
        }
    }
    for task in tasks {
        task.within(6 * SOON, "its turns");
    }
    assert_free(&clients[0], &KEYS);
}

pub fn a_fixed_ttl_counts_from_the_last_grant(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let order: Vec<String> = one.mutexes(KEYS).keys().map(str::to_owned).collect();
    let held = two.mutex(&order[2]).lock().unwrap();
    let set = one.mutexes(KEYS).fixed_ttl(ttl);
    let waiting = Task::start(move || set.lock().unwrap());
    wait_until_taken(&two, &order[0]);
    wait_until_taken(&two, &order[1]);
    // The first keys are renewed during the wait.
    backend.pass(ttl + ttl / 2);
    held.unlock().unwrap();
    let all = waiting.within(2 * SOON, "the last key");
    all.check().unwrap();
    assert!(
        all.remaining() > ttl / 2,
        "{:?} of {ttl:?}",
        all.remaining()
    );
    // From now on, the client does not renew the keys.
    backend.pass(ttl);
    assert!(all.is_lost());
    assert_free(&two, &KEYS);
    drop(all);
}

pub fn a_limit_of_a_hold_counts_from_the_last_grant(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let order: Vec<String> = one.mutexes(KEYS).keys().map(str::to_owned).collect();
    let held = two.mutex(&order[1]).lock().unwrap();
    let set = one.mutexes(KEYS).ttl(ttl).max_hold(ttl);
    let waiting = Task::start(move || set.lock().unwrap());
    wait_until_taken(&two, &order[0]);
    backend.pass(ttl);
    held.unlock().unwrap();
    let all = waiting.within(2 * SOON, "the last keys");
    assert!(
        all.remaining() > ttl / 2,
        "{:?} of {ttl:?}",
        all.remaining()
    );
    backend.pass(ttl);
    let lost = all.lost_signal().recv_timeout(SOON).unwrap();
    assert_eq!(lost.reason, LossReason::MaxHold);
}

pub fn a_lost_key_is_named(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let all = one.mutexes(KEYS).lock().unwrap();
    let lost = all.lost_signal();
    let (say, said) = bounded(1);
    all.on_lost(move |lost| say.send(lost).unwrap());
    two.mutex("b").force_unlock().unwrap().unwrap();
    let first = lost.recv_timeout(SOON).unwrap();
    assert_eq!(first.key, "b");
    assert!(matches!(first.reason, LossReason::ForceUnlocked { .. }));
    assert_eq!(said.recv_timeout(SOON).unwrap(), first);
    let error = all.check().unwrap_err();
    assert_eq!(
        (error.kind(), error.key()),
        (ErrorKind::LeaseLost, Some("b"))
    );
    assert!(all.is_lost() && all.remaining().is_zero());
    // The other keys stay held until the drop.
    for key in ["a", "c"] {
        assert!(two.mutex(key).try_lock().unwrap().is_none(), "{key}");
    }
    let error = all.unlock().unwrap_err();
    assert_eq!(
        (error.kind(), error.key()),
        (ErrorKind::LeaseLost, Some("b"))
    );
    assert_free(&two, &KEYS);
}

pub fn a_set_is_renewed_and_extended(backend: &dyn Backend) {
    let client = backend.builder().ttl(backend.ttl()).build().unwrap();
    let other = backend.client();
    let all = client.mutexes(KEYS).lock().unwrap();
    backend.pass(backend.ttl() + backend.ttl() / 2);
    all.check().unwrap();
    all.extend(backend.ttl() + secs(10)).unwrap();
    assert!(all.remaining() > backend.ttl() + secs(5));
    drop(all);
    assert_free(&other, &KEYS);
}
