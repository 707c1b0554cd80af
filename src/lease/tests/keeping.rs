//! How long a lease is kept: renewed while a check says so, let expire, warned of its end.

use std::collections::BTreeSet;

use super::*;

fn checked(check: impl Fn() -> bool + Send + Sync + 'static) -> Fixture {
    lease_with(Some(Check::new(check)), |grant| {
        Arc::make_mut(&mut grant.options).checked = true
    })
}

fn warned(due: &Due) -> bool {
    matches!(due, Due::Held { warn: true, .. })
}

#[test]
fn a_lease_let_expire_is_renewed_no_more_and_lost_for_that_reason() {
    let f = lease(|_| {});
    f.lease.due(f.at(10), note);
    f.lease.let_expire(LossReason::NotRenewed);
    f.lease.let_expire(LossReason::Deleted);
    assert!(
        f.lease.begin_renewal(f.at(10)).is_none(),
        "one that was due"
    );
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(11), note), nothing_before(end));
    assert!(next_of(&f, f.at(1)).is_none(), "it is handed to nobody");
    assert_eq!(f.lease.loss(f.at(29)), None, "not before its end");
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::NotRenewed));
}

#[test]
fn changes_of_the_ttl_under_way_bring_back_no_renewal() {
    for confirmed in [true, false] {
        let f = lease(|_| {});
        f.lease.due(f.at(10), note);
        assert!(f.lease.begin_renewal(f.at(10)).is_some());
        assert!(f.lease.begin_renewal(f.at(10)).is_none(), "one at a time");
        f.lease.let_expire(LossReason::NotRenewed);
        if confirmed {
            f.lease.ttl_changed(f.at(11), f.at(10), 30 * SECOND);
        } else {
            f.lease.ttl_unchanged(f.at(11), 30 * SECOND, Some(f.at(12)));
        }
        let end = validity(30 * SECOND);
        let end = f.at(if confirmed { 10 } else { 0 }).after(end);
        assert_eq!(f.lease.due(f.at(20), note), nothing_before(end));
        assert_eq!(f.lease.loss(end), Some(LossReason::NotRenewed));
    }
}

#[test]
fn extending_by_little_puts_no_renewal_off() {
    let f = lease(|_| {});
    for second in [3, 6, 9] {
        f.lease.ttl_changed(f.at(second), f.at(second), 5 * SECOND);
    }
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(9), note), nothing_before(f.at(10)));
    f.lease.ttl_changed(f.at(10), f.at(10), 5 * SECOND);
    assert_eq!(f.lease.due(f.at(10), note), renewal_and_look_at(end));
    f.lease.ttl_changed(f.at(10), f.at(10), 40 * SECOND);
    assert_eq!(f.lease.due(f.at(11), note), nothing_before(f.at(20)));
}

#[test]
fn the_end_of_the_hold_comes_before_other_reasons() {
    let f = lease(|grant| limit(grant, 20 * SECOND));
    f.lease.let_expire(LossReason::NotRenewed);
    assert_eq!(f.lease.loss(f.at(20)), Some(LossReason::MaxHold));
}

#[test]
fn a_check_that_says_no_once_ends_renewal_for_good() {
    let asked = AtomicUsize::new(0);
    let f = checked(move || asked.fetch_add(1, Ordering::SeqCst) != 1);
    f.lease.due(f.at(10), note);
    assert!(f.lease.may_be_renewed());
    assert!(f.lease.begin_renewal(f.at(10)).is_some());
    f.lease.ttl_changed(f.at(10), f.at(10), 30 * SECOND);
    f.lease.due(f.at(20), note);
    assert!(!f.lease.may_be_renewed());
    assert!(f.lease.may_be_renewed(), "it has changed its mind");
    assert!(f.lease.begin_renewal(f.at(20)).is_none(), "too late");
    assert_eq!(f.lease.loss(f.at(40)), Some(LossReason::NotRenewed));
}

#[test]
fn a_check_that_has_not_answered_is_not_asked_again() {
    let f = checked(|| true);
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(10), note), renewal_and_look_at(end));
    // Its owner extends it meanwhile, and so sets the next renewal.
    f.lease.ttl_changed(f.at(11), f.at(11), 30 * SECOND);
    let end = f.at(11).after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(21), note), nothing_before(end));
    assert!(f.lease.may_be_renewed());
    f.lease.ttl_changed(f.at(22), f.at(22), 30 * SECOND);
    let due = f.lease.due(f.at(32), note);
    assert!(matches!(due, Due::Held { renew: true, .. }), "{due:?}");
}

#[test]
fn a_lease_with_a_check_is_handed_to_nobody_and_taken_from_nobody() {
    let f = checked(|| true);
    assert!(next_of(&f, f.at(1)).is_none());
    let plain = lease(|_| {});
    let mut options = *plain.lease.grant().options;
    options.checked = true;
    assert!(plain.lease.hand_off(plain.at(1), options).is_none());
}

#[test]
fn a_check_goes_when_its_lease_ends() {
    let ends: [fn(&Fixture); 2] = [
        |f| drop(f.lease.release(f.at(1))),
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
                .has_ended_by(MonotonicTime::now().after(60 * SECOND))
        );
        assert!(tracked.upgrade().is_none());
    }
}

#[test]
fn the_end_of_the_hold_is_warned_of_once_when_its_last_tenth_begins() {
    let held = |hold| lease(move |grant| limit(grant, hold));
    let f = held(100 * SECOND);
    for second in (0..90).step_by(8) {
        let due = f.lease.due(f.at(second), note);
        assert!(!warned(&due), "{due:?} at {second} s");
        f.lease.ttl_changed(f.at(second), f.at(second), 30 * SECOND);
    }
    let due = f.lease.due(f.at(89), note);
    assert_eq!(due, nothing_before(f.at(90)), "looked at for that");
    assert_eq!(f.lease.hold_left(f.at(90)), Some(10 * SECOND));
    assert!(warned(&f.lease.due(f.at(90), note)));
    assert!(!warned(&f.lease.due(f.at(91), note)), "once");
    drop(f.lease.release(f.at(92)));
    assert_eq!(f.lease.hold_left(f.at(92)), None, "it is let go");

    let f = held(20 * SECOND);
    assert!(warned(&f.lease.due(f.at(18), note)));
    let left = f.lease.hold_left(f.at(18)).unwrap();
    assert_eq!(left, f.lease.remaining(f.at(18)), "what is left indeed");
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(f.lease.hold_left(f.at(18)), None);
}

#[test]
fn each_holder_of_a_lease_handed_off_is_warned_of_its_own_hold() {
    let f = lease(|grant| limit(grant, 100 * SECOND));
    let next = next_of(&f, f.at(5)).unwrap();
    for second in [25, 45, 65, 85] {
        next.ttl_changed(f.at(second), f.at(second), 30 * SECOND);
    }
    assert!(!warned(&next.due(f.at(94), note)));
    assert!(warned(&next.due(f.at(95), note)));
}

#[test]
fn a_hold_without_an_end_is_not_warned_of() {
    for hold in [None, Some(Duration::MAX)] {
        let f = lease(|grant| {
            if let Some(hold) = hold {
                limit(grant, hold);
            }
        });
        assert_eq!(f.lease.due(f.at(9), note), nothing_before(f.at(10)));
    }
}

#[test]
fn a_lease_whose_validity_has_ended_is_lost_once_it_has_settled_and_is_not_waited_for() {
    let f = lease(|_| {});
    // Its renewal is in hand, and hangs.
    f.lease.due(f.at(10), note);
    assert!(f.lease.begin_renewal(f.at(10)).is_some());
    let (_keep, lost) = f.lease.signal(f.at(10));
    assert!(f.lease.wait_for_renewal(f.at(30), 60 * SECOND));
    assert_eq!(lost.try_recv(), Ok(LossReason::Expired));
}

#[test]
fn a_renewal_knows_for_how_long_it_has_been_due() {
    let f = lease(|_| {});
    f.lease.due(f.at(11), note);
    assert_eq!(f.lease.begin_renewal(f.at(12)), Some(2 * SECOND));
    f.lease.ttl_unchanged(f.at(12), 30 * SECOND, Some(f.at(13)));
    f.lease.due(f.at(13), note);
    let again = f.lease.begin_renewal(f.at(13));
    assert_eq!(again, Some(3 * SECOND), "tried again");
}

#[test]
fn a_renewal_that_an_extension_came_before_is_left_out_until_it_is_due_again() {
    let f = lease(|_| {});
    f.lease.due(f.at(10), note);
    f.lease.ttl_changed(f.at(11), f.at(11), 40 * SECOND);
    assert_eq!(f.lease.begin_renewal(f.at(12)), None);
    f.lease.due(f.at(21), note);
    assert!(f.lease.begin_renewal(f.at(21)).is_some());
}

#[test]
fn a_checked_lease_that_is_looked_at_before_it_is_due_is_asked_when_it_is() {
    let f = checked(|| true);
    let early = f.lease.due(f.at(5), note);
    assert!(matches!(early, Due::Held { renew: false, .. }), "{early:?}");
    let due = f.lease.due(f.at(10), note);
    assert!(matches!(due, Due::Held { renew: true, .. }), "{due:?}");
}

fn is_settled(f: &Fixture, now: MonotonicTime) -> bool {
    f.lease.wait_for_renewal(now, SECOND / 100)
}

#[test]
fn only_a_renewal_that_is_due_is_waited_for() {
    let waited_for = lease(|_| {});
    assert!(is_settled(&waited_for, waited_for.at(5)), "not due yet");
    assert!(!is_settled(&waited_for, waited_for.at(10)), "due");
    let due = waited_for.lease.due(waited_for.at(10), note);
    assert!(matches!(due, Due::Held { renew: true, .. }));
    assert!(!is_settled(&waited_for, waited_for.at(10)), "in hand");
    std::thread::scope(|scope| {
        let settling = scope.spawn(|| {
            waited_for
                .lease
                .wait_for_renewal(waited_for.at(10), 60 * SECOND)
        });
        let (now, asked_at) = (waited_for.at(10), waited_for.at(10));
        assert!(waited_for.lease.begin_renewal(now).is_some());
        waited_for.lease.ttl_changed(now, asked_at, 30 * SECOND);
        assert!(settling.join().unwrap());
    });

    let never_renewed = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    assert!(is_settled(&never_renewed, never_renewed.at(10)));
    let ending = lease(|_| {});
    ending.lease.let_expire(LossReason::NotRenewed);
    assert!(is_settled(&ending, ending.at(10)));
    let capped = lease(|grant| limit(grant, 25 * SECOND));
    capped
        .lease
        .ttl_changed(capped.at(1), capped.at(1), 30 * SECOND);
    assert!(is_settled(&capped, capped.at(10)));
    let released = lease(|_| {});
    drop(released.lease.release(released.at(1)).0);
    assert!(is_settled(&released, released.at(10)));
}

#[test]
fn renewals_of_leases_granted_one_after_another_fall_together_and_are_no_heap() {
    let ms = Duration::from_millis;
    for (every, together) in [(10 * SECOND, ms(10)), (ms(128 * 4), ms(4))] {
        let due_after = |after: u64| {
            let f = lease(|grant| {
                grant.asked_at = grant.asked_at.after(ms(after));
                Arc::make_mut(&mut grant.options).renew_every = Some(every);
            });
            let Due::Held { next, .. } = f.lease.due(f.asked_at, note) else {
                panic!("it is held")
            };
            let (due, latest) = (next.since(f.asked_at), ms(after) + every);
            assert!(due <= latest && latest - due < together, "a little early");
            due
        };
        let times: BTreeSet<Duration> = (0..100).map(due_after).collect();
        assert_eq!(times.len(), (100 / together.as_millis()) as usize);
    }
}

#[test]
fn renewals_of_a_crowd_drift_apart_and_none_comes_late() {
    let every = 10 * SECOND;
    let mut spread: Vec<Duration> = (0..200)
        .map(|_| {
            let f = lease(|_| {});
            f.lease.ttl_changed(f.asked_at, f.asked_at, 30 * SECOND);
            f.lease.spread_renewal();
            match f.lease.due(f.asked_at, note) {
                Due::Held { next, .. } => next.since(f.asked_at),
                Due::Over => panic!("it is held"),
            }
        })
        .collect();
    spread.sort();
    assert!(spread[0] >= every - every / 14 && spread[199] <= every);
    let widest = spread.windows(2).map(|two| two[1] - two[0]).max().unwrap();
    assert!(widest < every / 32, "two heaps: {spread:?}");
    assert!(spread[199] - spread[0] > every / 32, "a heap: {spread:?}");
}

#[test]
fn a_lease_never_leaves_the_crowd_to_be_renewed_again() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    f.lease.spread_renewal();
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.asked_at, note), nothing_before(end));
}

#[test]
fn lateness_counts_from_when_a_renewal_was_first_due() {
    let f = lease(|_| {});
    f.lease.ttl_changed(f.asked_at, f.asked_at, 30 * SECOND);
    f.lease.due(f.at(12), note);
    assert_eq!(f.lease.begin_renewal(f.at(12)), Some(2 * SECOND));
    f.lease.ttl_unchanged(f.at(12), 30 * SECOND, Some(f.at(13)));
    f.lease.due(f.at(14), note);
    assert_eq!(f.lease.begin_renewal(f.at(14)), Some(4 * SECOND));
}
