//! Models of a lease: the ways it can end, and changes of its ttl, in every order that shuttle comes
//! upon.

use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::util::key::Key;
use crate::util::sync::Ordering;
use crate::util::sync::model::{chance, check, pass, step};

const RUNS: usize = 1000;
const SECOND: Duration = Duration::from_secs(1);
const OPTIONS: Options = Options::USUAL;

fn lease() -> (Lease, impl Fn()) {
    let (callbacks, deliver) = CallbackExecutor::of_a_model();
    let (key, now) = (Key::new("", "k", 16).unwrap(), MonotonicTime::now());
    let grant = Grant::usual(key, now);
    (Lease::new(grant, callbacks, None), deliver)
}

/// How it ended, as its owner was told.
#[derive(Debug, PartialEq)]
enum End {
    Released,
    HandedOff,
    Lost(LossReason),
}

#[test]
fn model_a_lease_ends_in_one_way_and_tells_of_a_loss_only() {
    check(RUNS, || {
        let (lease, deliver) = lease();
        let called = Arc::new(AtomicU32::new(0));
        let (_keep, early) = lease.signal(MonotonicTime::now());
        let (end, late) = thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let now = MonotonicTime::now();
                if chance(2) && lease.hand_off(now, OPTIONS).is_some() {
                    return End::HandedOff;
                }
                match lease.release(now).1 {
                    Ok(()) => End::Released,
                    Err(reason) => End::Lost(reason),
                }
            });
            scope.spawn(|| lease.lose(MonotonicTime::now(), LossReason::Deleted));
            scope.spawn(|| {
                let before = MonotonicTime::now();
                pass(60 * SECOND);
                if lease.loss(MonotonicTime::now()).is_none() {
                    assert_eq!(lease.valid_for(before), None, "held past its validity");
                }
            });
            let listener = scope.spawn(|| {
                let called = Arc::clone(&called);
                lease.on_lost(
                    MonotonicTime::now(),
                    Box::new(move |_| {
                        called.fetch_add(1, Ordering::SeqCst);
                    }),
                );
                lease.signal(MonotonicTime::now())
            });
            (owner.join().unwrap(), listener.join().unwrap())
        });
        deliver();
        let lost = match &end {
            End::Lost(reason) => Some(reason.clone()),
            _ => None,
        };
        assert_eq!(lease.loss(MonotonicTime::now()), lost, "{end:?}");
        for signal in [early, late.1] {
            assert_eq!(signal.try_recv().ok(), lost, "{end:?}");
            assert!(signal.try_recv().is_err(), "told twice");
        }
        assert_eq!(called.load(Ordering::SeqCst), u32::from(lost.is_some()));
    });
}

#[test]
fn model_changes_of_a_ttl_come_one_after_another_and_none_is_forgotten() {
    check(RUNS, || {
        let (lease, _deliver) = lease();
        let changing = AtomicU32::new(0);
        let change = |deadline: MonotonicTime| {
            if !lease.begin_ttl_change(deadline, MonotonicTime::now) {
                return false;
            }
            assert_eq!(changing.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
            let before = lease.remaining(MonotonicTime::now());
            step();
            changing.fetch_sub(1, Ordering::SeqCst);
            let now = MonotonicTime::now();
            match chance(2) {
                true => lease.ttl_changed(now, now, 20 * SECOND),
                false => lease.ttl_unchanged(MonotonicTime::now(), 20 * SECOND, None),
            }
            assert!(lease.remaining(now) >= before, "it was shortened");
            true
        };
        let far = MonotonicTime::now().after(3600 * SECOND);
        thread::scope(|scope| {
            // Time stands still: who waits for its turn has to be woken.
            let extensions = [(); 3].map(|()| scope.spawn(|| change(far)));
            scope.spawn(|| change(MonotonicTime::now()));
            for extension in extensions {
                assert!(extension.join().unwrap(), "it had all the time");
            }
        });
        assert!(change(MonotonicTime::now()), "none is under way");
    });
}

#[test]
fn model_a_lease_let_expire_is_never_due_for_renewal_again() {
    check(RUNS, || {
        let (lease, _deliver) = lease();
        let start = MonotonicTime::now();
        let change = |begun: bool| {
            if begun {
                step();
                match chance(2) {
                    true => lease.ttl_changed(start, start, 40 * SECOND),
                    false => lease.ttl_unchanged(start, 40 * SECOND, Some(start)),
                }
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| lease.let_expire(LossReason::NotRenewed));
            scope.spawn(|| change(lease.begin_renewal(start).is_some()));
            scope.spawn(|| change(lease.begin_ttl_change(start, || start)));
        });
        assert!(lease.begin_renewal(start).is_none());
        let later = start.after(20 * SECOND);
        let due = lease.due(later, |_, _| Some(TimerNote::nth(1)));
        assert!(matches!(due, Due::Held { renew: false, .. }), "{due:?}");
        let reason = lease.loss(start.after(60 * SECOND));
        assert_eq!(reason, Some(LossReason::NotRenewed));
    });
}

#[test]
fn model_whoever_waits_to_change_the_ttl_learns_that_the_lease_is_over() {
    check(RUNS, || {
        let (lease, _deliver) = lease();
        let far = MonotonicTime::now().after(3600 * SECOND);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    if lease.begin_ttl_change(far, MonotonicTime::now) {
                        step();
                        let now = MonotonicTime::now();
                        lease.ttl_changed(now, now, 30 * SECOND);
                    }
                });
            }
            scope.spawn(|| lease.release(MonotonicTime::now()).1.is_ok());
        });
        assert!(!lease.begin_ttl_change(far, MonotonicTime::now));
        assert_eq!(lease.loss(MonotonicTime::now()), None);
    });
}
