mod hand_off;
mod keeping;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::util::key::Key;
use crate::util::threads::ThreadGroup;

const SECOND: Duration = Duration::from_secs(1);

struct Fixture {
    lease: Lease,
    asked_at: MonotonicTime,
    callbacks: Arc<CallbackExecutor>,
    threads: ThreadGroup,
}

fn lease(change: impl FnOnce(&mut Grant)) -> Fixture {
    lease_with(None, change)
}

fn lease_with(check: Option<Check>, change: impl FnOnce(&mut Grant)) -> Fixture {
    let threads = ThreadGroup::new();
    let callbacks = CallbackExecutor::start(&threads, None).unwrap();
    // A whole multiple of every pause below, so that renewals fall on whole seconds.
    let asked_at = MonotonicTime::now()
        .after(1000 * SECOND)
        .rounded_down(10 * SECOND);
    let key = Key::new("p:", "k", 100).unwrap();
    // Not to be tracked while a test lasts.
    let granted_at = asked_at.after(3600 * SECOND);
    let mut grant = Grant {
        since: granted_at,
        ..Grant::usual(key, asked_at)
    };
    change(&mut grant);
    Fixture {
        lease: Lease::new(grant, Arc::clone(&callbacks), check),
        asked_at,
        callbacks,
        threads,
    }
}

fn limit(grant: &mut Grant, hold: Duration) {
    Arc::make_mut(&mut grant.options).max_hold = Some(hold);
}

fn nothing_before(next: MonotonicTime) -> Due {
    Due::Held {
        renew: false,
        watch: false,
        warn: false,
        next,
    }
}

fn renewal_and_look_at(next: MonotonicTime) -> Due {
    Due::Held {
        renew: true,
        watch: false,
        warn: false,
        next,
    }
}

impl Fixture {
    fn at(&self, seconds: u32) -> MonotonicTime {
        self.asked_at.after(seconds * SECOND)
    }

    /// Waits until the callbacks has run everything handed to it.
    fn finish(self) {
        self.callbacks.stop();
        assert!(
            self.threads
                .has_ended_by(MonotonicTime::now().after(60 * SECOND))
        );
    }
}

fn note(_: Option<TimerNote>, _: MonotonicTime) -> Option<TimerNote> {
    Some(TimerNote::nth(1))
}

#[test]
fn validity_is_shorter_than_the_ttl_and_counts_from_the_request() {
    let f = lease(|_| {});
    let remaining = f.lease.remaining(f.asked_at);
    assert!(remaining < 30 * SECOND && remaining > 29 * SECOND);
    assert!(validity(Duration::from_millis(10)) > Duration::from_millis(7));
}

#[test]
fn past_its_validity_a_lease_is_lost_whatever_comes_later() {
    let f = lease(|_| {});
    assert_eq!(f.lease.loss(f.at(29)), None);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
    f.lease.ttl_changed(f.at(30), f.at(29), 30 * SECOND);
    assert_eq!(f.lease.loss(f.at(29)), Some(LossReason::Expired));
    assert_eq!(f.lease.remaining(f.at(1)), Duration::ZERO);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    let (_, released) = f.lease.release(f.at(31));
    assert_eq!(released, Err(LossReason::Expired), "the first reason stays");
}

#[test]
fn a_loss_heard_of_after_the_end_of_validity_is_an_end_of_validity() {
    let f = lease(|_| {});
    f.lease.lose(f.at(30), LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
    let f = lease(|_| {});
    f.lease.lose(f.at(29), LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Deleted));
}

#[test]
fn a_renewal_that_comes_after_the_end_revives_nothing() {
    let f = lease(|_| {});
    f.lease.ttl_changed(f.at(30), f.at(10), 30 * SECOND);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
}

#[test]
fn a_released_lease_is_never_lost() {
    let f = lease(|_| {});
    let (sender, signal) = f.lease.signal(f.asked_at);
    assert_eq!(f.lease.release(f.at(1)).1, Ok(()));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(100)), None);
    assert!(signal.try_recv().is_err());
    drop(sender);
}

#[test]
fn a_loss_is_signalled_once_to_each_receiver_and_to_late_ones_at_once() {
    let f = lease(|_| {});
    let (_keep_one, one) = f.lease.signal(f.asked_at);
    let (_keep_two, two) = f.lease.signal(f.asked_at);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    f.lease.lose(f.asked_at, LossReason::Expired);
    let (_keep_late, late) = f.lease.signal(f.asked_at);
    for signal in [one, two, late] {
        assert_eq!(signal.try_recv(), Ok(LossReason::Deleted));
        assert!(signal.try_recv().is_err());
    }
}

#[test]
fn callbacks_run_after_the_signals_and_survive_each_others_panics() {
    let f = lease(|_| {});
    let (_keep, signal) = f.lease.signal(f.asked_at);
    let calls = Arc::new(AtomicUsize::new(0));
    f.lease
        .on_lost(f.asked_at, Box::new(|_| panic!("a callback's own")));
    let seen = Arc::clone(&calls);
    let check = move |reason| {
        assert_eq!(signal.try_recv(), Ok(LossReason::Deleted));
        assert_eq!(reason, LossReason::Deleted);
        seen.fetch_add(1, Ordering::SeqCst);
    };
    f.lease.on_lost(f.asked_at, Box::new(check));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    let late = Arc::clone(&calls);
    let count = move |_| {
        late.fetch_add(1, Ordering::SeqCst);
    };
    f.lease.on_lost(f.asked_at, Box::new(count));
    f.finish();
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[test]
fn renewal_is_due_by_its_pause_and_once_only() {
    let f = lease(|_| {});
    assert_eq!(f.lease.due(f.at(9), note), nothing_before(f.at(10)));
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(10), note), renewal_and_look_at(end));
    assert_eq!(
        f.lease.due(f.at(11), note),
        nothing_before(end),
        "one at a time"
    );
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
    f.lease.ttl_changed(f.at(11), f.at(10), 30 * SECOND);
    assert_eq!(f.lease.due(f.at(12), note), nothing_before(f.at(20)));
    assert_eq!(f.lease.remaining(f.at(10)), validity(30 * SECOND));
}

#[test]
fn a_failed_renewal_is_tried_again_when_it_was_said() {
    let f = lease(|_| {});
    f.lease.due(f.at(10), note);
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
    f.lease
        .ttl_unchanged(MonotonicTime::now(), 30 * SECOND, Some(f.at(11)));
    assert_eq!(f.lease.due(f.at(10), note), nothing_before(f.at(11)));
}

#[test]
fn changes_of_the_ttl_come_one_after_another() {
    let f = lease(|_| {});
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
    assert!(
        !f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now),
        "one is under way"
    );
    f.lease
        .ttl_unchanged(MonotonicTime::now(), 30 * SECOND, None);
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
}

#[test]
fn a_change_of_the_ttl_never_shortens_the_validity() {
    let f = lease(|_| {});
    f.lease.ttl_changed(f.at(1), f.at(1), 60 * SECOND);
    let longer = f.lease.remaining(f.at(1));
    f.lease.ttl_changed(f.at(2), f.at(2), 30 * SECOND);
    assert_eq!(f.lease.remaining(f.at(1)), longer);
}

#[test]
fn an_unrenewed_lease_is_looked_at_when_it_ends() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.due(f.at(29), note), nothing_before(end));
    assert_eq!(f.lease.due(end, note), Due::Over);
    assert_eq!(f.lease.loss(end), Some(LossReason::Expired));
}

#[test]
fn the_end_of_the_hold_bounds_everything() {
    let f = lease(|grant| limit(grant, 40 * SECOND));
    assert_eq!(f.lease.ttl_to_ask(f.at(10)), 30 * SECOND);
    assert_eq!(f.lease.ttl_to_ask(f.at(20)), 20 * SECOND);
    f.lease.ttl_changed(f.at(20), f.at(20), 20 * SECOND);
    f.lease.ttl_changed(f.at(21), f.at(21), 30 * SECOND);
    assert_eq!(f.lease.remaining(f.at(21)), 19 * SECOND);
    assert_eq!(
        f.lease.due(f.at(30), note),
        nothing_before(f.at(36)),
        "no more renewals, but a warning"
    );
    assert_eq!(f.lease.loss(f.at(40)), Some(LossReason::MaxHold));
}

#[test]
fn a_released_lease_cannot_be_armed() {
    let f = lease(|_| {});
    assert!(f.lease.reschedule(|old, at| {
        assert_eq!((old, at), (None, f.at(10)));
        Some(TimerNote::nth(3))
    }));
    assert_eq!(f.lease.release(f.at(1)).0.timer, Some(TimerNote::nth(3)));
    assert!(f.lease.reschedule(|_, _| unreachable!("it is released")));
    assert_eq!(f.lease.due(f.at(10), |_, _| unreachable!()), Due::Over);
    assert!(
        !f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
}

#[test]
fn a_renewal_that_was_never_answered_may_have_kept_the_key() {
    let f = lease(|_| {});
    let before = f.lease.key_until();
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
    f.lease
        .ttl_unchanged(f.lease.grant().since, 3600 * SECOND, None);
    assert_eq!(f.lease.key_until(), before.after(3600 * SECOND));
}

#[test]
fn signals_that_nobody_has_any_more_are_swept_out() {
    let f = lease(|_| {});
    let (_keep, kept) = f.lease.signal(f.asked_at);
    for _ in 0..10_000 {
        drop(f.lease.signal(f.asked_at));
    }
    let mut state = f.lease.state.lock();
    assert!(state.extras().listeners.signals.len() < 100);
    drop(state);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(kept.try_recv(), Ok(LossReason::Deleted));
}

/// What the next holder gets, if it may have the lease at `at`.
fn next_of(f: &Fixture, at: MonotonicTime) -> Option<Arc<Lease>> {
    let options = *f.lease.grant().options;
    f.lease.hand_off(at, options).map(|(next, _)| next)
}

#[test]
fn a_lease_handed_off_goes_on_under_a_token_of_its_own() {
    let f = lease(|_| {});
    f.lease.reschedule(|_, _| Some(TimerNote::nth(3)));
    let options = *f.lease.grant().options;
    let (next, ended) = f.lease.hand_off(f.at(1), options).unwrap();
    assert_eq!(ended.timer, Some(TimerNote::nth(3)));
    let (old, new) = (f.lease.grant(), next.grant());
    assert_eq!((old.id, old.token + 1), (new.id, new.token));
    assert_eq!(new.hand_offs(), old.hand_offs() + 1);
    let left = f.asked_at.after(validity(30 * SECOND)).since(f.at(1));
    assert_eq!(next.remaining(f.at(1)), left, "nothing is gained by it");
    assert_eq!(f.lease.remaining(f.at(1)), Duration::ZERO);
    let due = next.due(f.at(9), note);
    assert!(matches!(due, Due::Held { renew: false, next, .. } if next == f.at(10)));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(next.loss(f.at(1)), None, "what is over is not lost");
}

#[test]
fn a_lease_is_handed_off_once_and_only_while_it_is_held() {
    let f = lease(|_| {});
    assert!(next_of(&f, f.at(1)).is_some());
    assert!(next_of(&f, f.at(1)).is_none());
    let f = lease(|_| {});
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert!(next_of(&f, f.at(1)).is_none());
}

#[test]
fn a_lease_is_handed_off_only_as_long_as_two_thirds_of_its_validity_are_left() {
    let third = validity(30 * SECOND) / 3;
    let f = lease(|_| {});
    let too_late = f.asked_at.after(third + Duration::from_millis(1));
    assert!(next_of(&f, too_late).is_none());
    assert!(next_of(&f, f.asked_at.after(third)).is_some());
}

#[test]
fn a_lease_is_not_handed_off_on_other_terms_unrenewed_or_while_its_ttl_changes() {
    let f = lease(|_| {});
    let mut options = *f.lease.grant().options;
    options.ttl = 31 * SECOND;
    assert!(f.lease.hand_off(f.at(1), options).is_none(), "other grant");
    assert!(
        f.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    );
    assert!(next_of(&f, f.at(1)).is_none(), "its ttl changes");
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    assert!(next_of(&f, f.at(1)).is_none(), "a fixed ttl");
    let f = lease(|grant| limit(grant, 29 * SECOND));
    assert!(next_of(&f, f.at(1)).is_none(), "its hold is about to end");
}

#[test]
fn a_lease_bound_to_its_holder_is_not_handed_off_and_is_released_as_any_other() {
    let f = lease(|_| {});
    f.lease.forbid_hand_off();
    assert!(next_of(&f, f.at(1)).is_none());
    assert_eq!(f.lease.release(f.at(1)).1, Ok(()));
}

#[test]
fn a_renewal_that_was_due_is_due_for_the_next_holder() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = Some(5 * SECOND));
    let due = f.lease.due(f.at(5), note);
    assert!(matches!(due, Due::Held { renew: true, .. }));
    // Nobody has begun it.
    let next = next_of(&f, f.at(5)).unwrap();
    let due = next.due(f.at(5), note);
    assert!(matches!(due, Due::Held { renew: true, .. }), "{due:?}");
}

#[test]
fn a_lease_is_watched_once_it_was_held_for_a_moment() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACKED_AFTER);
    assert_eq!(f.lease.due(f.asked_at, note), nothing_before(moment));
    let due = f.lease.due(moment, note);
    assert!(
        matches!(
            due,
            Due::Held {
                watch: true,
                renew: false,
                ..
            }
        ),
        "{due:?}"
    );
    assert_eq!(f.lease.due(f.at(1), note), nothing_before(f.at(10)), "once");
    let mut listed = false;
    f.lease.watch(|| {
        listed = true;
        true
    });
    assert!(listed);
    assert!(f.lease.release(f.at(1)).0.tracked);
    f.lease.watch(|| unreachable!("it is released"));
}

#[test]
fn a_lease_watched_early_is_not_watched_again() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACKED_AFTER);
    assert_eq!(f.lease.due(f.asked_at, note), nothing_before(moment));
    // As at the start of a notification connection.
    f.lease.watch(|| true);
    assert_eq!(f.lease.due(moment, note), nothing_before(f.at(10)));
}

#[test]
fn a_lease_without_room_early_is_offered_later() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACKED_AFTER);
    f.lease.watch(|| false);
    let due = f.lease.due(moment, note);
    assert!(matches!(due, Due::Held { watch: true, .. }), "{due:?}");
}

#[test]
fn a_lease_for_which_there_was_no_room_among_the_watched_is_offered_with_each_renewal() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let is_offered = |at: MonotonicTime| match f.lease.due(at, note) {
        Due::Held { watch, .. } => watch,
        Due::Over => panic!("it is held"),
    };
    let renew = |at: MonotonicTime| {
        assert!(f.lease.begin_renewal(at).is_some());
        f.lease.ttl_changed(at, at, 30 * SECOND);
    };
    assert!(is_offered(f.asked_at.after(TRACKED_AFTER)));
    f.lease.watch(|| false);
    assert!(!is_offered(f.at(1)), "not all the time");
    assert!(is_offered(f.at(10)));
    renew(f.at(10));
    f.lease.watch(|| true);
    assert!(!is_offered(f.at(20)), "it is tracked");
    assert!(f.lease.release(f.at(20)).0.tracked);
}

#[test]
fn a_lease_is_small() {
    // A client may have a million of them; ARCHITECTURE.md tells what else each takes.
    let (lease, count) = (size_of::<Lease>(), 2 * size_of::<usize>());
    assert!(lease + count <= 176, "{lease} bytes");
}
