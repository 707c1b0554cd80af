//! Validity: how long a holder may rely on its lock. It counts from before the request, and ends before the store's
//! ttl.

use std::time::{Duration, Instant};

use crate::conformance::backend::Backend;
use crate::support::{LONG_TTL, secs};

/// Redlock's allowance for the drift of two clocks.
fn less_drift(ttl: Duration) -> Duration {
    ttl - ttl / 100 - Duration::from_millis(2)
}

pub fn validity_is_ttl_minus_drift_and_request_time(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").lock().unwrap();
    assert!(guard.remaining() <= less_drift(LONG_TTL));
    let guard_of_its_own = client.mutex("own").fixed_ttl(secs(40)).lock().unwrap();
    assert!(guard_of_its_own.remaining() <= less_drift(secs(40)));
    assert!(guard_of_its_own.remaining() > secs(20));
}

pub fn validity_ends_before_the_lock_does(backend: &dyn Backend) {
    let client = backend.client();
    let mutex = client.mutex("k");
    for _ in 0..20 {
        let guard = mutex.lock().unwrap();
        // `remaining` is read first: until `expires_in` is read, the ttl becomes shorter.
        let (remaining, read) = (guard.remaining(), Instant::now());
        let expires_in = mutex.inspect().unwrap().unwrap().expires_in();
        assert!(Some(remaining.saturating_sub(read.elapsed())) < expires_in);
        guard.unlock().unwrap();
    }
}

pub fn renewals_and_extensions_prolong_validity(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").fixed_ttl(backend.ttl()).lock().unwrap();
    guard.extend(LONG_TTL).unwrap();
    let remaining = guard.remaining();
    assert!(remaining <= less_drift(LONG_TTL) && remaining > LONG_TTL / 2);
    guard.extend(backend.ttl()).unwrap();
    assert!(guard.remaining() > LONG_TTL / 2, "never shortened");
    let expires_in = client.mutex("k").inspect().unwrap().unwrap().expires_in();
    assert!(expires_in > Some(LONG_TTL / 2));
}

pub fn a_lock_past_validity_cannot_be_extended(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").fixed_ttl(backend.ttl()).lock().unwrap();
    backend.pass(backend.ttl());
    assert!(guard.extend(LONG_TTL).unwrap_err().is_lease_lost());
    assert!(guard.is_lost(), "not revived");
    assert!(guard.remaining().is_zero());
}

pub fn extending_beyond_max_hold_is_refused(backend: &dyn Backend) {
    let client = backend.client();
    let mutex = client.mutex("k").max_hold(LONG_TTL);
    let guard = mutex.lock().unwrap();
    let refused = guard.extend(2 * LONG_TTL).unwrap_err();
    assert_eq!(refused.kind(), leasehold::ErrorKind::InvalidConfig);
    guard.unlock().unwrap();
}
