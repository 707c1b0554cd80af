//! Tests of renewal: checks, stopped renewal, warnings before `max_hold`, lateness and spreading.

use std::collections::BTreeSet;

use super::*;
use crate::util::id::LeaseId;

fn checked(check: impl Fn() -> bool + Send + Sync + 'static) -> Fixture {
    lease_with(Some(Check::new(check)), |grant| {
        Arc::make_mut(&mut grant.options).checked = true
    })
}

fn warned(due: &DueActions) -> bool {
    matches!(due, DueActions::Held { warn: true, .. })
}

#[test]
fn stopped_renewal_gives_the_loss_reason() {
    let f = lease(|_| {});
    f.lease.take_due(f.at(10), set_timer);
    f.lease.stop_renewing(LossReason::NotRenewed);
    f.lease.stop_renewing(LossReason::Deleted);
    assert!(
        f.lease.begin_renewal(f.at(10)).is_none(),
        "due, but stopped"
    );
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.take_due(f.at(11), set_timer), no_action_before(end));
    assert!(hand_off(&f, f.at(1)).is_none(), "not handed off");
    assert_eq!(f.lease.loss(f.at(29)), None, "valid until its end");
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::NotRenewed));
}

#[test]
fn a_running_ttl_change_does_not_restart_renewal() {
    for confirmed in [true, false] {
        let f = lease(|_| {});
        f.lease.take_due(f.at(10), set_timer);
        assert!(f.lease.begin_renewal(f.at(10)).is_some());
        assert!(f.lease.begin_renewal(f.at(10)).is_none(), "one at a time");
        f.lease.stop_renewing(LossReason::NotRenewed);
        if confirmed {
            f.lease.finish_ttl_change(f.at(11), f.at(10), 30 * SECOND);
        } else {
            f.lease
                .fail_ttl_change(f.at(11), 30 * SECOND, Some(f.at(12)));
        }
        let end = validity(30 * SECOND);
        let end = f.at(if confirmed { 10 } else { 0 }).after(end);
        assert_eq!(f.lease.take_due(f.at(20), set_timer), no_action_before(end));
        assert_eq!(f.lease.loss(end), Some(LossReason::NotRenewed));
    }
}

#[test]
fn a_short_extension_does_not_postpone_the_renewal() {
    let f = lease(|_| {});
    for second in [3, 6, 9] {
        f.lease
            .finish_ttl_change(f.at(second), f.at(second), 5 * SECOND);
    }
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(
        f.lease.take_due(f.at(9), set_timer),
        no_action_before(f.at(10))
    );
    f.lease.finish_ttl_change(f.at(10), f.at(10), 5 * SECOND);
    assert_eq!(
        f.lease.take_due(f.at(10), set_timer),
        renewal_and_timer_at(end)
    );
    f.lease.finish_ttl_change(f.at(10), f.at(10), 40 * SECOND);
    assert_eq!(
        f.lease.take_due(f.at(11), set_timer),
        no_action_before(f.at(20))
    );
}

#[test]
fn max_hold_comes_before_other_loss_reasons() {
    let f = lease(|grant| limit(grant, 20 * SECOND));
    f.lease.stop_renewing(LossReason::NotRenewed);
    assert_eq!(f.lease.loss(f.at(20)), Some(LossReason::MaxHold));
}

#[test]
fn a_check_that_fails_once_stops_renewal() {
    let asked = AtomicUsize::new(0);
    let f = checked(move || asked.fetch_add(1, Ordering::SeqCst) != 1);
    f.lease.take_due(f.at(10), set_timer);
    assert!(f.lease.run_check().is_some());
    assert!(f.lease.begin_renewal(f.at(10)).is_some());
    f.lease.finish_ttl_change(f.at(10), f.at(10), 30 * SECOND);
    f.lease.take_due(f.at(20), set_timer);
    assert!(f.lease.run_check().is_none());
    assert!(
        f.lease.run_check().is_some(),
        "the check returns true again"
    );
    assert!(f.lease.begin_renewal(f.at(20)).is_none(), "too late");
    assert_eq!(f.lease.loss(f.at(40)), Some(LossReason::NotRenewed));
}

#[test]
fn a_running_check_is_not_queued_again() {
    let f = checked(|| true);
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(
        f.lease.take_due(f.at(10), set_timer),
        renewal_and_timer_at(end)
    );
    // The holder extends the lease while the check runs, which sets the next renewal.
    f.lease.finish_ttl_change(f.at(11), f.at(11), 30 * SECOND);
    let end = f.at(11).after(validity(30 * SECOND));
    assert_eq!(f.lease.take_due(f.at(21), set_timer), no_action_before(end));
    assert!(f.lease.run_check().is_some());
    f.lease.finish_ttl_change(f.at(22), f.at(22), 30 * SECOND);
    let due = f.lease.take_due(f.at(32), set_timer);
    assert!(
        matches!(due, DueActions::Held { renew: true, .. }),
        "{due:?}"
    );
}

/// Ends a conversion that Redis has confirmed at `now`.
fn converted(lease: &Lease, now: MonotonicTime) -> Arc<Lease> {
    let grant = Grant {
        id: LeaseId::random(),
        ..lease.grant().clone()
    };
    let converted = lease.convert(grant, now, now, lease.conversion_ttl(now));
    let (next, detached) = converted.expect("it is held");
    assert!(detached.check.is_none());
    next
}

#[test]
fn a_queued_check_decides_about_the_converted_lease() {
    let is_renewed = |due: &DueActions| matches!(due, DueActions::Held { renew: true, .. });
    for while_running in [true, false] {
        for may in [true, false] {
            let old: Arc<Mutex<Option<Arc<Lease>>>> = Arc::default();
            let next: Arc<Mutex<Option<Arc<Lease>>>> = Arc::default();
            let (to_convert, is_new) = (Arc::clone(&old), Arc::clone(&next));
            let convert = move |now| {
                let Some(old) = to_convert.lock().take() else {
                    return;
                };
                assert!(old.begin_conversion(now, || now));
                *is_new.lock() = Some(converted(&old, now));
            };
            let now = Arc::new(Mutex::new(None));
            let (at, run) = (Arc::clone(&now), convert.clone());
            let asked = Arc::new(AtomicUsize::new(0));
            let count = Arc::clone(&asked);
            let f = checked(move || {
                count.fetch_add(1, Ordering::SeqCst);
                if let Some(now) = *at.lock() {
                    run(now);
                }
                may
            });
            *old.lock() = Some(Arc::clone(&f.lease));
            assert!(is_renewed(&f.lease.take_due(f.at(10), set_timer)));
            match while_running {
                true => *now.lock() = Some(f.at(10)),
                false => convert(f.at(10)),
            }
            if let Some(next) = &*next.lock() {
                // The check is queued already.
                assert!(!is_renewed(&next.take_due(f.at(20), set_timer)));
            }
            let renewed = f.lease.run_check();
            let next = next.lock().take().unwrap();
            assert_eq!(asked.load(Ordering::SeqCst), 1);
            assert_eq!(renewed.is_some(), may);
            if let Some(renewed) = renewed {
                assert!(Arc::ptr_eq(&renewed, &next));
                assert_eq!(next.begin_renewal(f.at(20)).is_some(), !while_running);
                next.finish_ttl_change(f.at(20), f.at(20), 30 * SECOND);
                assert!(is_renewed(&next.take_due(f.at(30), set_timer)));
            } else {
                assert!(!is_renewed(&next.take_due(f.at(30), set_timer)));
                assert!(next.begin_renewal(f.at(30)).is_none());
                assert_eq!(next.loss(f.at(40)), Some(LossReason::NotRenewed));
            }
        }
    }
}

#[test]
fn a_converted_lease_keeps_its_limits() {
    let f = lease(|grant| limit(grant, 40 * SECOND));
    f.lease.finish_ttl_change(f.at(20), f.at(20), 20 * SECOND);
    let key_until = f.lease.key_until();
    assert!(f.lease.begin_conversion(f.at(21), || f.at(21)));
    let next = converted(&f.lease, f.at(21));
    assert!(next.key_until() >= key_until);
    assert!(warned(&next.take_due(f.at(36), set_timer)));
    assert_eq!(next.loss(f.at(40)), Some(LossReason::MaxHold));
    // Renewal was stopped while Redis converted the lease.
    let f = lease(|_| {});
    assert!(f.lease.begin_conversion(f.at(1), || f.at(1)));
    f.lease.stop_renewing(LossReason::NotRenewed);
    let next = converted(&f.lease, f.at(1));
    assert!(next.is_renewal_stopped());
    assert_eq!(next.loss(f.at(40)), Some(LossReason::NotRenewed));
}

#[test]
fn a_conversion_asks_for_the_rest_at_least() {
    let fixed = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    let extended = lease(|_| {});
    let at = extended.asked_at;
    extended.lease.finish_ttl_change(at, at, 60 * SECOND);
    for f in [fixed, extended] {
        let now = f.asked_at.after(Duration::from_nanos(1));
        let rest = f.lease.valid_until().since(now);
        let asked = f.lease.conversion_ttl(now);
        assert!(asked >= rest && asked < rest + Duration::from_millis(1));
        assert_eq!(
            asked.subsec_nanos() % 1_000_000,
            0,
            "requests have whole ms"
        );
        // Redis deletes a key whose ttl is 0.
        let late = f.lease.conversion_ttl(f.at(100));
        assert!(late >= Duration::from_millis(1));
    }
}

/// A renewal that became due during a refused conversion is due again, and an extension that waits continues.
#[test]
fn a_refused_conversion_restores_renewal() {
    let f = lease(|_| {});
    assert!(f.lease.begin_conversion(f.at(9), || f.at(9)));
    f.lease.take_due(f.at(10), set_timer);
    assert!(f.lease.begin_renewal(f.at(10)).is_none(), "it converts");
    assert!(!f.lease.end_conversion());
    let due = f.lease.take_due(f.at(10), set_timer);
    assert!(matches!(due, DueActions::Held { renew: true, .. }));
    assert!(f.lease.begin_renewal(f.at(10)).is_some());
}

/// An extension waits for a conversion. The old lease ends with it, so the extension fails at once.
#[test]
fn a_conversion_wakes_an_extension_that_waits() {
    let f = lease(|_| {});
    let (now, far) = (f.at(1), f.at(3600));
    assert!(f.lease.begin_conversion(far, || now));
    let lease = Arc::clone(&f.lease);
    let (ended, begun) = bounded(1);
    let extension = std::thread::spawn(move || {
        let begun = lease.begin_ttl_change(far, || now);
        let _ = ended.send(begun);
    });
    while !f.lease.is_ttl_change_awaited() {
        std::thread::yield_now();
    }
    converted(&f.lease, now);
    assert_eq!(begun.recv_timeout(60 * SECOND), Ok(false));
    extension.join().unwrap();
}

#[test]
fn leases_with_a_check_are_not_handed_off() {
    let f = checked(|| true);
    assert!(hand_off(&f, f.at(1)).is_none());
    let plain = lease(|_| {});
    let mut options = *plain.lease.grant().options;
    options.checked = true;
    assert!(plain.lease.hand_off(plain.at(1), options).is_none());
}

#[test]
fn a_check_is_dropped_when_its_lease_ends() {
    let ends: [fn(&Fixture); 2] = [
        |f| drop(f.lease.mark_released(f.at(1))),
        |f| f.lease.lose(f.asked_at, LossReason::Deleted),
    ];
    for end in ends {
        let owned = Arc::new(());
        let tracked = Arc::downgrade(&owned);
        let f = checked(move || Arc::strong_count(&owned) > 0);
        assert!(tracked.upgrade().is_some());
        end(&f);
        f.callbacks.stop();
        assert!(
            f.threads
                .wait_until_ended(MonotonicTime::now().after(60 * SECOND))
        );
        assert!(tracked.upgrade().is_none());
    }
}

#[test]
fn the_max_hold_warning_is_due_once() {
    let held = |hold| lease(move |grant| limit(grant, hold));
    let f = held(100 * SECOND);
    for second in (0..90).step_by(8) {
        let due = f.lease.take_due(f.at(second), set_timer);
        assert!(!warned(&due), "{due:?} at {second} s");
        f.lease
            .finish_ttl_change(f.at(second), f.at(second), 30 * SECOND);
    }
    let due = f.lease.take_due(f.at(89), set_timer);
    assert_eq!(due, no_action_before(f.at(90)), "the timer for the warning");
    assert_eq!(f.lease.hold_left(f.at(90)), Some(10 * SECOND));
    assert!(warned(&f.lease.take_due(f.at(90), set_timer)));
    assert!(!warned(&f.lease.take_due(f.at(91), set_timer)), "once");
    drop(f.lease.mark_released(f.at(92)));
    assert_eq!(f.lease.hold_left(f.at(92)), None, "the lease is released");

    let f = held(20 * SECOND);
    assert!(warned(&f.lease.take_due(f.at(18), set_timer)));
    let left = f.lease.hold_left(f.at(18)).unwrap();
    assert_eq!(
        left,
        f.lease.remaining(f.at(18)),
        "hold_left is at most the validity"
    );
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(f.lease.hold_left(f.at(18)), None);
}

#[test]
fn each_holder_gets_its_own_max_hold_warning() {
    let f = lease(|grant| limit(grant, 100 * SECOND));
    let next = hand_off(&f, f.at(5)).unwrap();
    for second in [25, 45, 65, 85] {
        next.finish_ttl_change(f.at(second), f.at(second), 30 * SECOND);
    }
    assert!(!warned(&next.take_due(f.at(94), set_timer)));
    assert!(warned(&next.take_due(f.at(95), set_timer)));
}

#[test]
fn no_max_hold_means_no_warning() {
    for hold in [None, Some(Duration::MAX)] {
        let f = lease(|grant| {
            if let Some(hold) = hold {
                limit(grant, hold);
            }
        });
        assert_eq!(
            f.lease.take_due(f.at(9), set_timer),
            no_action_before(f.at(10))
        );
    }
}

#[test]
fn waiting_for_a_renewal_ends_with_the_validity() {
    let f = lease(|_| {});
    // The renewal has begun and gets no reply.
    f.lease.take_due(f.at(10), set_timer);
    assert!(f.lease.begin_renewal(f.at(10)).is_some());
    let (_keep, lost) = f.lease.loss_channel(f.at(10), ONLY_GUARD);
    assert!(f.lease.wait_for_renewal(f.at(30), 60 * SECOND));
    assert_eq!(lost.try_recv(), Ok(LossReason::Expired));
}

#[test]
fn begin_renewal_returns_the_lateness() {
    let f = lease(|_| {});
    f.lease.take_due(f.at(11), set_timer);
    assert_eq!(f.lease.begin_renewal(f.at(12)), Some(2 * SECOND));
    f.lease
        .fail_ttl_change(f.at(12), 30 * SECOND, Some(f.at(13)));
    f.lease.take_due(f.at(13), set_timer);
    let again = f.lease.begin_renewal(f.at(13));
    assert_eq!(again, Some(3 * SECOND), "tried again");
}

#[test]
fn an_extension_cancels_the_renewal_that_was_due() {
    let f = lease(|_| {});
    f.lease.take_due(f.at(10), set_timer);
    f.lease.finish_ttl_change(f.at(11), f.at(11), 40 * SECOND);
    assert_eq!(f.lease.begin_renewal(f.at(12)), None);
    f.lease.take_due(f.at(21), set_timer);
    assert!(f.lease.begin_renewal(f.at(21)).is_some());
}

#[test]
fn an_early_timer_does_not_run_the_check() {
    let f = checked(|| true);
    let early = f.lease.take_due(f.at(5), set_timer);
    assert!(
        matches!(early, DueActions::Held { renew: false, .. }),
        "{early:?}"
    );
    let due = f.lease.take_due(f.at(10), set_timer);
    assert!(
        matches!(due, DueActions::Held { renew: true, .. }),
        "{due:?}"
    );
}

fn is_renewal_settled(f: &Fixture, now: MonotonicTime) -> bool {
    f.lease.wait_for_renewal(now, SECOND / 100)
}

#[test]
fn only_a_due_renewal_is_waited_for() {
    let waited_for = lease(|_| {});
    assert!(
        is_renewal_settled(&waited_for, waited_for.at(5)),
        "not due yet"
    );
    assert!(!is_renewal_settled(&waited_for, waited_for.at(10)), "due");
    let due = waited_for.lease.take_due(waited_for.at(10), set_timer);
    assert!(matches!(due, DueActions::Held { renew: true, .. }));
    assert!(
        !is_renewal_settled(&waited_for, waited_for.at(10)),
        "queued"
    );
    std::thread::scope(|scope| {
        let settling = scope.spawn(|| {
            waited_for
                .lease
                .wait_for_renewal(waited_for.at(10), 60 * SECOND)
        });
        let (now, asked_at) = (waited_for.at(10), waited_for.at(10));
        assert!(waited_for.lease.begin_renewal(now).is_some());
        waited_for
            .lease
            .finish_ttl_change(now, asked_at, 30 * SECOND);
        assert!(settling.join().unwrap());
    });

    let never_renewed = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    assert!(is_renewal_settled(&never_renewed, never_renewed.at(10)));
    let ending = lease(|_| {});
    ending.lease.stop_renewing(LossReason::NotRenewed);
    assert!(is_renewal_settled(&ending, ending.at(10)));
    let capped = lease(|grant| limit(grant, 25 * SECOND));
    capped
        .lease
        .finish_ttl_change(capped.at(1), capped.at(1), 30 * SECOND);
    assert!(is_renewal_settled(&capped, capped.at(10)));
    let released = lease(|_| {});
    drop(released.lease.mark_released(released.at(1)).0);
    assert!(is_renewal_settled(&released, released.at(10)));
}

#[test]
fn renewals_are_rounded_to_steps() {
    let ms = Duration::from_millis;
    for (every, together) in [(10 * SECOND, ms(10)), (ms(128 * 4), ms(4))] {
        let due_after = |after: u64| {
            let f = lease(|grant| {
                grant.asked_at = grant.asked_at.after(ms(after));
                Arc::make_mut(&mut grant.options).renew_every = Some(every);
            });
            let DueActions::Held { next, .. } = f.lease.take_due(f.asked_at, set_timer) else {
                panic!("the lease is held")
            };
            let (due, latest) = (next.since(f.asked_at), ms(after) + every);
            assert!(
                due <= latest && latest - due < together,
                "at most a step early"
            );
            due
        };
        let times: BTreeSet<Duration> = (0..100).map(due_after).collect();
        assert_eq!(times.len(), (100 / together.as_millis()) as usize);
    }
}

#[test]
fn renewals_due_together_spread_and_none_is_late() {
    let every = 10 * SECOND;
    let mut spread: Vec<Duration> = (0..200)
        .map(|_| {
            let f = lease(|_| {});
            f.lease
                .finish_ttl_change(f.asked_at, f.asked_at, 30 * SECOND);
            f.lease.spread_renewal(f.lease.grant().id.jitter());
            match f.lease.take_due(f.asked_at, set_timer) {
                DueActions::Held { next, .. } => next.since(f.asked_at),
                DueActions::Ended => panic!("the lease is held"),
            }
        })
        .collect();
    spread.sort();
    assert!(spread[0] >= every - every / 14 && spread[199] <= every);
    let widest = spread.windows(2).map(|two| two[1] - two[0]).max().unwrap();
    assert!(widest < every / 32, "a gap: {spread:?}");
    assert!(
        spread[199] - spread[0] > every / 32,
        "too close: {spread:?}"
    );
}

#[test]
fn spreading_does_not_renew_an_unrenewed_lease() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    f.lease.spread_renewal(f.lease.grant().id.jitter());
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(
        f.lease.take_due(f.asked_at, set_timer),
        no_action_before(end)
    );
}

#[test]
fn lateness_counts_from_the_first_due_time() {
    let f = lease(|_| {});
    f.lease
        .finish_ttl_change(f.asked_at, f.asked_at, 30 * SECOND);
    f.lease.take_due(f.at(12), set_timer);
    assert_eq!(f.lease.begin_renewal(f.at(12)), Some(2 * SECOND));
    f.lease
        .fail_ttl_change(f.at(12), 30 * SECOND, Some(f.at(13)));
    f.lease.take_due(f.at(14), set_timer);
    assert_eq!(f.lease.begin_renewal(f.at(14)), Some(4 * SECOND));
}
