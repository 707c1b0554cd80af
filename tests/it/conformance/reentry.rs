//! Who may come in again: nobody, by a plain mutex, whichever thread of whichever client asks.

use std::thread;

use crate::conformance::ground::Ground;
use crate::support::millis;

pub fn a_mutex_is_not_reentrant(ground: &dyn Ground) {
    let client = ground.client();
    let guard = client.mutex("k").lock().unwrap();
    assert!(client.mutex("k").try_lock().unwrap().is_none());
    let waited = client.mutex("k").try_lock_for(millis(20)).unwrap();
    assert!(waited.is_none());
    guard.unlock().unwrap();
}

pub fn threads_of_one_client_do_not_enter_one_anothers_locks(ground: &dyn Ground) {
    let client = ground.client();
    let guard = client.mutex("k").lock().unwrap();
    let other = client.clone();
    let entered = thread::spawn(move || other.mutex("k").try_lock().unwrap().is_some());
    assert!(!entered.join().unwrap());
    guard.unlock().unwrap();
}
