//! Releases: by the owner only, once, and with a result.

use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::SOON;

pub fn a_released_lock_is_free_at_once(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    one.mutex("k").lock().unwrap().unlock().unwrap();
    assert!(!two.mutex("k").is_locked().unwrap());
    assert!(two.mutex("k").try_lock().unwrap().is_some());
}

pub fn a_dropped_lock_is_free_soon(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    drop(one.mutex("k").lock().unwrap());
    let free = eventually(SOON, || !two.mutex("k").is_locked().unwrap());
    assert!(free);
}

pub fn a_late_release_leaves_the_next_holders_lock_alone(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let late = one.mutex("k").fixed_ttl(ttl).lock().unwrap();
    let later = one.mutex("l").fixed_ttl(ttl).lock().unwrap();
    backend.pass(ttl + ttl / 10);
    let next = [
        two.mutex("k").lock().unwrap(),
        two.mutex("l").lock().unwrap(),
    ];
    assert!(late.unlock().unwrap_err().is_lease_lost());
    drop(later);
    // The late release, if one was written, has been carried out before this request.
    assert!(one.mutex("l").try_lock().unwrap().is_none());
    for guard in next {
        let found = one.mutex(guard.key()).inspect().unwrap().unwrap();
        assert_eq!(found.holder(), two.holder_id());
        guard.unlock().unwrap();
    }
}

pub fn unlock_of_an_expired_lock_is_an_error(backend: &dyn Backend) {
    let client = backend.client();
    let ttl = backend.ttl();
    let (noticed, silent) = (
        client.mutex("noticed").fixed_ttl(ttl).lock().unwrap(),
        client.mutex("silent").fixed_ttl(ttl).lock().unwrap(),
    );
    backend.pass(ttl);
    let error = noticed.unlock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost);
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
    assert_eq!(error.key(), Some("noticed"));
    drop(silent);
    assert!(client.mutex("silent").try_lock().unwrap().is_some());
}

pub fn unlock_of_a_deleted_lock_fails(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").lock().unwrap();
    backend.forget();
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
}

pub fn closures_whose_lock_was_lost_return_no_value(backend: &dyn Backend) {
    let client = backend.client();
    let ttl = backend.ttl();
    let outcome = client.mutex("k").fixed_ttl(ttl).with(|_| backend.pass(ttl));
    assert!(outcome.unwrap_err().is_lease_lost());
}

pub fn a_closure_never_runs_without_the_lock(backend: &dyn Backend) {
    let client = backend.client();
    client.shutdown(SOON).unwrap();
    let mut done = false;
    let refused = client.with_lock("k", || done = true).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Shutdown);
    assert!(!done);
}

pub fn a_panicking_closure_releases_the_lock(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let work = std::panic::AssertUnwindSafe(|| one.with_lock("k", || panic!("as it should")));
    assert!(std::panic::catch_unwind(work).is_err());
    let free = eventually(SOON, || !two.mutex("k").is_locked().unwrap());
    assert!(free);
}

pub fn releasing_twice_is_harmless(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let guard = one.mutex("k").lock().unwrap();
    assert!(two.mutex("k").force_unlock().unwrap().is_some());
    assert!(two.mutex("k").force_unlock().unwrap().is_none());
    let next = two.mutex("k").lock().unwrap();
    assert!(guard.unlock().is_err());
    assert!(two.mutex("k").is_locked().unwrap());
    next.unlock().unwrap();
}

pub fn a_lock_can_be_released_on_any_thread(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let guard = one.mutex("k").lock().unwrap();
    let unlocked = std::thread::spawn(move || guard.unlock()).join();
    unlocked.unwrap().unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_some());
}
