//! Renewal: the ttl of a held lock is set to its full length again and again, until the holder releases the lock.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Client, LossReason, MutexGuard};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{Recorder, SOON, What, lost_within};

/// A client whose locks have the backend's ttl, and the recorder of its events.
fn recorded(backend: &dyn Backend) -> (Client, Arc<Recorder>) {
    let recorder = Recorder::new();
    let builder = backend.builder().ttl(backend.ttl());
    let client = builder.event_handler(Arc::clone(&recorder)).build();
    (client.unwrap(), recorder)
}

/// A ttl for locks whose loss would be no failure of the library: a machine with many tests and programs may delay their
/// renewals by some seconds.
pub fn long_ttl(backend: &dyn Backend) -> Duration {
    2 * backend.ttl()
}

/// Fails unless these new locks with a [`long_ttl`] are renewed before they end.
pub fn assert_renewed(backend: &dyn Backend, guards: &[MutexGuard]) {
    let ttl = long_ttl(backend);
    backend.pass(ttl / 2);
    let is_renewed = |guard: &MutexGuard| guard.remaining() > ttl * 6 / 10;
    assert!(eventually(SOON, || guards.iter().all(is_renewed)));
}

pub fn a_held_lock_outlives_its_ttl(backend: &dyn Backend) {
    let (ttl, two) = (backend.ttl(), backend.client());
    let (one, recorder) = recorded(backend);
    let guard = one.mutex("k").lock().unwrap();
    backend.pass(ttl * 5 / 3);
    guard.check().unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    recorder.wait_for(2, What::Renewed, "k");
    guard.unlock().unwrap();
}

pub fn renewal_resets_the_ttl_and_adds_nothing(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (client, recorder) = recorded(backend);
    let guard = client.mutex("k").lock().unwrap();
    for renewals in 1..4 {
        backend.pass(ttl / 3);
        recorder.wait_for(renewals, What::Renewed, "k");
        let found = client.mutex("k").inspect().unwrap().unwrap();
        assert!(found.expires_in() <= Some(ttl), "{found:?}");
        assert!(guard.remaining() < ttl);
    }
    guard.unlock().unwrap();
}

pub fn a_ttl_is_renewed_unless_fixed(backend: &dyn Backend) {
    let (ttl, client) = (backend.ttl(), backend.client());
    let fixed = client.mutex("fixed").fixed_ttl(ttl).lock().unwrap();
    let renewed = client.mutex("renewed").ttl(ttl).lock();
    let renewed = renewed.unwrap();
    backend.pass(ttl * 4 / 3);
    let lost = fixed.check().unwrap_err();
    assert_eq!(lost.loss_reason(), Some(&LossReason::Expired));
    renewed.unlock().unwrap();
}

pub fn renewal_stops_at_the_release(backend: &dyn Backend) {
    let (ttl, two) = (backend.ttl(), backend.client());
    let (one, recorder) = recorded(backend);
    let guard = one.mutex("k").lock().unwrap();
    backend.pass(ttl / 2);
    recorder.wait_for(1, What::Renewed, "k");
    guard.unlock().unwrap();
    let next = two.mutex("k").fixed_ttl(ttl).lock().unwrap();
    // Events are reported in order, so all renewals before the release are counted now.
    recorder.wait_for(1, What::Released, "k");
    let renewed = recorder.count(What::Renewed, "k");
    backend.pass(ttl + ttl / 10);
    assert!(recorder.count(What::Renewed, "k") <= renewed + 1);
    assert!(next.is_lost(), "the next holder's lock was renewed");
    assert!(!one.mutex("k").is_locked().unwrap());
}

pub fn a_holder_renews_no_lock_but_its_own(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let mine = one.mutex("k").lock().unwrap();
    let lost = mine.lost_signal();
    backend.forget();
    let next = two.mutex("k").fixed_ttl(ttl).lock().unwrap();
    backend.pass(ttl / 2);
    let reason = lost_within(SOON, &lost);
    let taken = matches!(reason, LossReason::TakenOver { .. } | LossReason::Deleted);
    assert!(taken, "{reason:?}");
    backend.pass(ttl * 6 / 10);
    assert!(next.is_lost());
    assert!(
        !two.mutex("k").is_locked().unwrap(),
        "the lock outlived its ttl"
    );
}

pub fn max_hold_ends_a_renewed_hold(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let guard = one.mutex("k").max_hold(ttl * 3 / 2).lock().unwrap();
    let lost = guard.lost_signal();
    // The guard is never dropped, as in a thread that hangs.
    std::mem::forget(guard);
    backend.pass(ttl * 8 / 5);
    assert_eq!(lost_within(SOON, &lost), LossReason::MaxHold);
    assert!(two.mutex("k").try_lock_for(SOON).unwrap().is_some());
}

pub fn many_locks_are_renewed_at_once(backend: &dyn Backend) {
    let ttl = long_ttl(backend);
    let client = backend.builder().ttl(ttl).build().unwrap();
    let take = |n| client.mutex(format!("k{n}")).lock().unwrap();
    let guards: Vec<_> = (0..200).map(take).collect();
    assert_renewed(backend, &guards);
    assert_eq!(client.held_locks().len(), guards.len());
    for guard in guards {
        guard.unlock().unwrap();
    }
}
