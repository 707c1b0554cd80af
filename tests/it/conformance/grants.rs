//! Grants: to one holder at a time, with a ttl from the first moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::conformance::backend::Backend;
use crate::support::{LONG_TTL, SOON, Task, Witness};

/// Runs `work` on threads of several clients.
fn by_many(backend: &dyn Backend, work: impl Fn(&leasehold::Client) + Send + Sync + 'static) {
    let work = Arc::new(work);
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let tasks: Vec<_> = clients
        .iter()
        .cycle()
        .take(9)
        .map(|client| {
            let (client, work) = (client.clone(), Arc::clone(&work));
            Task::start(move || work(&client))
        })
        .collect();
    for task in tasks {
        task.within(4 * SOON, "a thread's part");
    }
}

pub fn clients_and_threads_lose_no_update(backend: &dyn Backend) {
    let count = Arc::new(AtomicUsize::new(0));
    let online = Arc::clone(&count);
    by_many(backend, move |client| {
        for _ in 0..10 {
            let raise = || {
                let seen = online.load(Ordering::Relaxed);
                thread::yield_now();
                online.store(seen + 1, Ordering::Relaxed);
            };
            client.with_lock("online", raise).unwrap();
        }
    });
    assert_eq!(count.load(Ordering::Relaxed), 90);
}

pub fn holders_exclude_each_other(backend: &dyn Backend) {
    let witness = Arc::new(Witness::default());
    let seen = Arc::clone(&witness);
    by_many(backend, move |client| {
        for _ in 0..10 {
            let guard = client.mutex("k").lock().unwrap();
            let inside = seen.enter(&guard);
            thread::yield_now();
            drop(inside);
        }
    });
    assert_eq!(witness.entries(), 90);
}

pub fn locks_of_other_names_are_independent(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let item = one.mutex("market:item:1").lock().unwrap();
    let other = two.mutex("market:item:2").try_lock().unwrap();
    assert!(other.is_some());
    assert!(two.mutex("market:item:1").try_lock().unwrap().is_none());
    item.unlock().unwrap();
}

pub fn clients_of_other_prefixes_are_independent(backend: &dyn Backend) {
    let billing = backend.builder().prefix("billing:").build().unwrap();
    let _held = billing.mutex("k").lock().unwrap();
    assert!(backend.client().mutex("k").try_lock().unwrap().is_some());
}

pub fn contention_is_no_error(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    for client in [&one, &two] {
        assert!(client.mutex("k").try_lock().unwrap().is_none());
    }
    held.unlock().unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_some());
}

pub fn each_grant_has_its_own_id(backend: &dyn Backend) {
    let client = backend.client();
    let grant = || {
        let guard = client.mutex("k").lock().unwrap();
        let found = client.mutex("k").inspect().unwrap().unwrap();
        guard.unlock().unwrap();
        found.lease_id()
    };
    let (one, two) = (grant(), grant());
    assert_ne!(one, two);
    assert_eq!(one.len(), 32);
}

pub fn a_grant_has_its_ttl_at_once(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let mutex = two.mutex("k");
    for _ in 0..20 {
        let guard = one.mutex("k").lock().unwrap();
        let expires_in = mutex.inspect().unwrap().unwrap().expires_in();
        assert!(expires_in.is_some_and(|left| left <= LONG_TTL));
        assert!(guard.remaining() > LONG_TTL / 2);
        guard.unlock().unwrap();
    }
}

pub fn a_failed_attempt_does_not_prolong_the_lock(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let guard = one.mutex("k").fixed_ttl(ttl).lock().unwrap();
    for _ in 0..4 {
        assert!(two.mutex("k").fixed_ttl(ttl).try_lock().unwrap().is_none());
        backend.pass(ttl / 8);
    }
    let found = two.mutex("k").inspect().unwrap().unwrap();
    assert!(found.expires_in() <= Some(ttl / 2 + ttl / 8), "{found:?}");
    drop(guard);
}

pub fn a_crashed_holder_blocks_for_its_ttl_only(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let guard = one.mutex("k").lock().unwrap();
    // For the store this is a crash: no renewal and no release.
    std::mem::forget(guard);
    one.shutdown(SOON).unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    backend.pass(ttl + ttl / 10);
    let next = two.mutex("k").try_lock_for(SOON).unwrap();
    assert!(next.is_some());
}
