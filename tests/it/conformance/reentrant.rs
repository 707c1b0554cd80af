//! Reentrancy: a plain mutex refuses its own holder; a reentrant one admits the thread that holds it, and no
//! other.

use std::thread;

use crate::conformance::backend::Backend;
use crate::support::millis;

pub fn a_mutex_is_not_reentrant(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").lock().unwrap();
    assert!(client.mutex("k").try_lock().unwrap().is_none());
    let waited = client.mutex("k").try_lock_for(millis(20)).unwrap();
    assert!(waited.is_none());
    guard.unlock().unwrap();
}

pub fn threads_of_one_client_exclude_each_other(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").lock().unwrap();
    let other = client.clone();
    let entered = thread::spawn(move || other.mutex("k").try_lock().unwrap().is_some());
    assert!(!entered.join().unwrap());
    guard.unlock().unwrap();
}

pub fn reentrant_locks_are_free_after_the_last_release(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let mutex = one.reentrant_mutex("k");
    let mut guards: Vec<_> = (0..3).map(|_| mutex.lock().unwrap()).collect();
    assert_eq!(guards[0].depth(), 3);
    while let Some(guard) = guards.pop() {
        assert!(two.mutex("k").try_lock().unwrap().is_none());
        guard.unlock().unwrap();
    }
    assert!(two.mutex("k").try_lock().unwrap().is_some());
}

pub fn a_reentrant_lock_excludes_other_threads(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.reentrant_mutex("k").lock().unwrap();
    let other = client.clone();
    let entered = thread::spawn(move || {
        let reentrant = other.reentrant_mutex("k").try_lock().unwrap();
        reentrant.is_some() || other.mutex("k").try_lock().unwrap().is_some()
    });
    assert!(!entered.join().unwrap());
    guard.unlock().unwrap();
}
