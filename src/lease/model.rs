//! Models of a lease: its ends and the changes of its ttl, under schedules of shuttle.

use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::config::key::Key;
use crate::util::sync::Ordering;
use crate::util::sync::model::{chance, check, pass, step};

const RUNS: usize = 1000;
const SECOND: Duration = Duration::from_secs(1);
const OPTIONS: Options = Options::USUAL;

fn lease() -> (Lease, impl Fn()) {
    let (lease, deliver, _) = counted_lease();
    (lease, deliver)
}

/// Returns a held lease, a function that runs the queued callbacks, and the number of reported losses.
fn counted_lease() -> (Lease, impl Fn(), Arc<AtomicU32>) {
    let (callbacks, deliver) = CallbackExecutor::for_model();
    let reported = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&reported);
    callbacks.set_loss_hook(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let (key, now) = (Key::new("", "k", 16).unwrap(), MonotonicTime::now());
    let grant = Grant::usual(key, now);
    (Lease::new(grant, callbacks, None), deliver, reported)
}

/// How the lease ended, as its holder saw it.
#[derive(Debug, PartialEq)]
enum End {
    Released,
    HandedOff,
    Lost(LossReason),
}

#[test]
fn model_a_lease_ends_once_and_reports_losses_only() {
    check(RUNS, || {
        let (lease, deliver) = lease();
        let called = Arc::new(AtomicU32::new(0));
        let (_keep, early) = lease.loss_channel(MonotonicTime::now(), ONLY_GUARD);
        let (end, late) = thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let now = MonotonicTime::now();
                if chance(2) && lease.hand_off(now, OPTIONS).is_some() {
                    return End::HandedOff;
                }
                match lease.mark_released(now).1 {
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
                    ONLY_GUARD,
                    Box::new(move |_| {
                        called.fetch_add(1, Ordering::SeqCst);
                    }),
                );
                lease.loss_channel(MonotonicTime::now(), ONLY_GUARD)
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
            assert!(signal.try_recv().is_err(), "two messages");
        }
        assert_eq!(called.load(Ordering::SeqCst), u32::from(lost.is_some()));
    });
}

/// The watchdog, the clock and an unlock find the same loss.
#[test]
fn model_a_loss_is_reported_once_whoever_finds_it() {
    check(RUNS, || {
        let (lease, deliver, reported) = counted_lease();
        let called = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&called);
        let (_keep, signal) = lease.loss_channel(MonotonicTime::now(), ONLY_GUARD);
        let callback = move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
        };
        lease.on_lost(MonotonicTime::now(), ONLY_GUARD, Box::new(callback));
        let seen = thread::scope(|scope| {
            scope.spawn(|| lease.lose(MonotonicTime::now(), LossReason::Deleted));
            scope.spawn(|| {
                pass(60 * SECOND);
                lease.loss(MonotonicTime::now())
            });
            let owner = scope.spawn(|| match lease.mark_released(MonotonicTime::now()) {
                (detached, Ok(())) => {
                    // Redis replies that another lease holds the key.
                    step();
                    lease.lose_released(detached, LossReason::TakenOver { by: None })
                }
                (_, Err(reason)) => reason,
            });
            owner.join().unwrap()
        });
        deliver();
        assert_eq!(reported.load(Ordering::SeqCst), 1);
        assert_eq!(called.load(Ordering::SeqCst), 1);
        assert_eq!(signal.try_recv(), Ok(seen.clone()));
        assert!(signal.try_recv().is_err(), "two messages");
        assert_eq!(lease.loss(MonotonicTime::now()), Some(seen));
    });
}

#[test]
fn model_changes_of_a_ttl_are_serialised() {
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
                true => lease.finish_ttl_change(now, now, 20 * SECOND),
                false => lease.fail_ttl_change(MonotonicTime::now(), 20 * SECOND, None),
            }
            assert!(lease.remaining(now) >= before, "the validity was shortened");
            true
        };
        let far = MonotonicTime::now().after(3600 * SECOND);
        thread::scope(|scope| {
            // Time stands still, so each waiting thread has to be notified.
            let extensions = [(); 3].map(|()| scope.spawn(|| change(far)));
            scope.spawn(|| change(MonotonicTime::now()));
            for extension in extensions {
                assert!(extension.join().unwrap(), "the deadline is far");
            }
        });
        assert!(change(MonotonicTime::now()), "no change is under way");
    });
}

#[test]
fn model_stopped_renewal_is_never_due_again() {
    check(RUNS, || {
        let (lease, _deliver) = lease();
        let start = MonotonicTime::now();
        let change = |begun: bool| {
            if begun {
                step();
                match chance(2) {
                    true => lease.finish_ttl_change(start, start, 40 * SECOND),
                    false => lease.fail_ttl_change(start, 40 * SECOND, Some(start)),
                }
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| lease.stop_renewing(LossReason::NotRenewed));
            scope.spawn(|| change(lease.begin_renewal(start).is_some()));
            scope.spawn(|| change(lease.begin_ttl_change(start, || start)));
        });
        assert!(lease.begin_renewal(start).is_none());
        let later = start.after(20 * SECOND);
        let due = lease.take_due(later, |_, _| Some(TimerHandle::nth(1)));
        assert!(
            matches!(due, DueActions::Held { renew: false, .. }),
            "{due:?}"
        );
        let reason = lease.loss(start.after(60 * SECOND));
        assert_eq!(reason, Some(LossReason::NotRenewed));
    });
}

#[test]
fn model_ttl_changes_end_with_the_lease() {
    check(RUNS, || {
        let (lease, _deliver) = lease();
        let far = MonotonicTime::now().after(3600 * SECOND);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    if lease.begin_ttl_change(far, MonotonicTime::now) {
                        step();
                        let now = MonotonicTime::now();
                        lease.finish_ttl_change(now, now, 30 * SECOND);
                    }
                });
            }
            scope.spawn(|| lease.mark_released(MonotonicTime::now()).1.is_ok());
        });
        assert!(!lease.begin_ttl_change(far, MonotonicTime::now));
        assert_eq!(lease.loss(MonotonicTime::now()), None);
    });
}
