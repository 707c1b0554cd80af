pub mod hand_off;
pub mod renewal;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::config::key::Key;
use crate::process::threads::ThreadGroup;

const SECOND: Duration = Duration::from_secs(1);

struct Fixture {
    lease: Arc<Lease>,
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
    // A multiple of all times between renewals in these tests, so that renewals are due at whole seconds.
    let asked_at = MonotonicTime::now()
        .after(1000 * SECOND)
        .rounded_down(10 * SECOND);
    let key = Key::new("p:", "k", 100).unwrap();
    // Later than any time in these tests, so the key is not tracked.
    let granted_at = asked_at.after(3600 * SECOND);
    let mut grant = Grant {
        since: granted_at,
        ..Grant::usual(key, asked_at)
    };
    change(&mut grant);
    Fixture {
        lease: Arc::new(Lease::new(grant, Arc::clone(&callbacks), check)),
        asked_at,
        callbacks,
        threads,
    }
}

fn limit(grant: &mut Grant, hold: Duration) {
    Arc::make_mut(&mut grant.options).max_hold = Some(hold);
}

fn no_action_before(next: MonotonicTime) -> DueActions {
    DueActions::Held {
        renew: false,
        track: false,
        warn: false,
        next,
    }
}

fn renewal_and_timer_at(next: MonotonicTime) -> DueActions {
    DueActions::Held {
        renew: true,
        track: false,
        warn: false,
        next,
    }
}

impl Fixture {
    fn at(&self, seconds: u32) -> MonotonicTime {
        self.asked_at.after(seconds * SECOND)
    }

    fn begin_ttl_change(&self) -> bool {
        self.lease
            .begin_ttl_change(MonotonicTime::now(), MonotonicTime::now)
    }

    /// Waits until the callback thread has run everything in its queue.
    fn finish(self) {
        self.callbacks.stop();
        assert!(
            self.threads
                .wait_until_ended(MonotonicTime::now().after(60 * SECOND))
        );
    }
}

fn set_timer(_: Option<TimerHandle>, _: MonotonicTime) -> Option<TimerHandle> {
    Some(TimerHandle::nth(1))
}

#[test]
fn validity_starts_at_the_request_below_the_ttl() {
    let f = lease(|_| {});
    let remaining = f.lease.remaining(f.asked_at);
    assert!(remaining < 30 * SECOND && remaining > 29 * SECOND);
    assert!(validity(Duration::from_millis(10)) > Duration::from_millis(7));
}

#[test]
fn a_lease_past_its_validity_stays_lost() {
    let f = lease(|_| {});
    assert_eq!(f.lease.loss(f.at(29)), None);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
    f.lease.finish_ttl_change(f.at(30), f.at(29), 30 * SECOND);
    assert_eq!(f.lease.loss(f.at(29)), Some(LossReason::Expired));
    assert_eq!(f.lease.remaining(f.at(1)), Duration::ZERO);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    let (_, released) = f.lease.mark_released(f.at(31));
    assert_eq!(released, Err(LossReason::Expired), "the first reason stays");
}

#[test]
fn a_loss_reported_after_expiry_counts_as_expiry() {
    let f = lease(|_| {});
    f.lease.lose(f.at(30), LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
    let f = lease(|_| {});
    f.lease.lose(f.at(29), LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Deleted));
}

#[test]
fn a_late_renewal_does_not_revive_a_lease() {
    let f = lease(|_| {});
    f.lease.finish_ttl_change(f.at(30), f.at(10), 30 * SECOND);
    assert_eq!(f.lease.loss(f.at(30)), Some(LossReason::Expired));
}

#[test]
fn a_released_lease_is_never_lost() {
    let f = lease(|_| {});
    let (sender, signal) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    assert_eq!(f.lease.mark_released(f.at(1)).1, Ok(()));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(f.lease.loss(f.at(100)), None);
    assert!(signal.try_recv().is_err());
    drop(sender);
}

#[test]
fn each_loss_channel_gets_the_reason_once() {
    let f = lease(|_| {});
    let (_keep_one, one) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    let (_keep_two, two) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    f.lease.lose(f.asked_at, LossReason::Expired);
    let (_keep_late, late) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    for signal in [one, two, late] {
        assert_eq!(signal.try_recv(), Ok(LossReason::Deleted));
        assert!(signal.try_recv().is_err());
    }
}

#[test]
fn callbacks_run_after_channels_and_survive_panics() {
    let f = lease(|_| {});
    let (_keep, signal) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    let calls = Arc::new(AtomicUsize::new(0));
    f.lease.on_lost(
        f.asked_at,
        ONLY_GUARD,
        Box::new(|_| panic!("a callback's own")),
    );
    let seen = Arc::clone(&calls);
    let check = move |reason| {
        assert_eq!(signal.try_recv(), Ok(LossReason::Deleted));
        assert_eq!(reason, LossReason::Deleted);
        seen.fetch_add(1, Ordering::SeqCst);
    };
    f.lease.on_lost(f.asked_at, ONLY_GUARD, Box::new(check));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    let late = Arc::clone(&calls);
    let count = move |_| {
        late.fetch_add(1, Ordering::SeqCst);
    };
    f.lease.on_lost(f.asked_at, ONLY_GUARD, Box::new(count));
    f.finish();
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[test]
fn a_renewal_is_due_once() {
    let f = lease(|_| {});
    assert_eq!(
        f.lease.take_due(f.at(9), set_timer),
        no_action_before(f.at(10))
    );
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(
        f.lease.take_due(f.at(10), set_timer),
        renewal_and_timer_at(end)
    );
    assert_eq!(
        f.lease.take_due(f.at(11), set_timer),
        no_action_before(end),
        "one at a time"
    );
    assert!(f.begin_ttl_change());
    f.lease.finish_ttl_change(f.at(11), f.at(10), 30 * SECOND);
    assert_eq!(
        f.lease.take_due(f.at(12), set_timer),
        no_action_before(f.at(20))
    );
    assert_eq!(f.lease.remaining(f.at(10)), validity(30 * SECOND));
}

#[test]
fn a_failed_renewal_is_due_at_its_retry() {
    let f = lease(|_| {});
    f.lease.take_due(f.at(10), set_timer);
    assert!(f.begin_ttl_change());
    f.lease
        .fail_ttl_change(MonotonicTime::now(), 30 * SECOND, Some(f.at(11)));
    assert_eq!(
        f.lease.take_due(f.at(10), set_timer),
        no_action_before(f.at(11))
    );
}

#[test]
fn changes_of_the_ttl_are_serialised() {
    let f = lease(|_| {});
    assert!(f.begin_ttl_change());
    assert!(!f.begin_ttl_change(), "a change is under way");
    f.lease
        .fail_ttl_change(MonotonicTime::now(), 30 * SECOND, None);
    assert!(f.begin_ttl_change());
}

#[test]
fn a_change_of_the_ttl_never_shortens_the_validity() {
    let f = lease(|_| {});
    f.lease.finish_ttl_change(f.at(1), f.at(1), 60 * SECOND);
    let longer = f.lease.remaining(f.at(1));
    f.lease.finish_ttl_change(f.at(2), f.at(2), 30 * SECOND);
    assert_eq!(f.lease.remaining(f.at(1)), longer);
}

#[test]
fn an_unrenewed_lease_has_a_timer_for_expiry() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    let end = f.asked_at.after(validity(30 * SECOND));
    assert_eq!(f.lease.take_due(f.at(29), set_timer), no_action_before(end));
    assert_eq!(f.lease.take_due(end, set_timer), DueActions::Ended);
    assert_eq!(f.lease.loss(end), Some(LossReason::Expired));
}

#[test]
fn max_hold_limits_ttl_validity_and_renewals() {
    let f = lease(|grant| limit(grant, 40 * SECOND));
    assert_eq!(f.lease.renewal_ttl(f.at(10)), 30 * SECOND);
    assert_eq!(f.lease.renewal_ttl(f.at(20)), 20 * SECOND);
    f.lease.finish_ttl_change(f.at(20), f.at(20), 20 * SECOND);
    f.lease.finish_ttl_change(f.at(21), f.at(21), 30 * SECOND);
    assert_eq!(f.lease.remaining(f.at(21)), 19 * SECOND);
    assert_eq!(
        f.lease.take_due(f.at(30), set_timer),
        no_action_before(f.at(36)),
        "no more renewals, but a warning"
    );
    assert_eq!(f.lease.loss(f.at(40)), Some(LossReason::MaxHold));
}

#[test]
fn a_released_lease_sets_no_timer() {
    let f = lease(|_| {});
    assert!(f.lease.reschedule(|old, at| {
        assert_eq!((old, at), (None, f.at(10)));
        Some(TimerHandle::nth(3))
    }));
    assert_eq!(
        f.lease.mark_released(f.at(1)).0.timer,
        Some(TimerHandle::nth(3))
    );
    assert!(
        f.lease
            .reschedule(|_, _| unreachable!("the lease is released"))
    );
    assert_eq!(
        f.lease.take_due(f.at(10), |_, _| unreachable!()),
        DueActions::Ended
    );
    assert!(!f.begin_ttl_change());
}

#[test]
fn an_unanswered_renewal_moves_key_until() {
    let f = lease(|_| {});
    let before = f.lease.key_until();
    assert!(f.begin_ttl_change());
    f.lease
        .fail_ttl_change(f.lease.grant().since, 3600 * SECOND, None);
    assert_eq!(f.lease.key_until(), before.after(3600 * SECOND));
}

#[test]
fn loss_channels_without_receiver_are_removed() {
    let f = lease(|_| {});
    let (_keep, kept) = f.lease.loss_channel(f.asked_at, ONLY_GUARD);
    for _ in 0..10_000 {
        drop(f.lease.loss_channel(f.asked_at, ONLY_GUARD));
    }
    let mut state = f.lease.state.lock();
    assert!(state.extras().listeners.channels.len() < 100);
    drop(state);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(kept.try_recv(), Ok(LossReason::Deleted));
}

/// Hands the lease off at `at` to a waiter with equal options.
fn hand_off(f: &Fixture, at: MonotonicTime) -> Option<Arc<Lease>> {
    let options = *f.lease.grant().options;
    f.lease.hand_off(at, options).map(|(next, _)| next)
}

#[test]
fn a_handed_off_lease_has_the_next_token() {
    let f = lease(|_| {});
    f.lease.reschedule(|_, _| Some(TimerHandle::nth(3)));
    let options = *f.lease.grant().options;
    let (next, detached) = f.lease.hand_off(f.at(1), options).unwrap();
    assert_eq!(detached.timer, Some(TimerHandle::nth(3)));
    let (old, new) = (f.lease.grant(), next.grant());
    assert_eq!((old.id, old.token + 1), (new.id, new.token));
    assert_eq!(new.hand_offs(), old.hand_offs() + 1);
    let left = f.asked_at.after(validity(30 * SECOND)).since(f.at(1));
    assert_eq!(next.remaining(f.at(1)), left, "the validity is the same");
    assert_eq!(f.lease.remaining(f.at(1)), Duration::ZERO);
    let due = next.take_due(f.at(9), set_timer);
    assert!(matches!(due, DueActions::Held { renew: false, next, .. } if next == f.at(10)));
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(next.loss(f.at(1)), None, "a released lease is not lost");
}

#[test]
fn only_a_held_lease_is_handed_off() {
    let f = lease(|_| {});
    assert!(hand_off(&f, f.at(1)).is_some());
    assert!(hand_off(&f, f.at(1)).is_none());
    let f = lease(|_| {});
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert!(hand_off(&f, f.at(1)).is_none());
}

#[test]
fn hand_off_needs_two_thirds_of_the_validity() {
    let third = validity(30 * SECOND) / 3;
    let f = lease(|_| {});
    let too_late = f.asked_at.after(third + Duration::from_millis(1));
    assert!(hand_off(&f, too_late).is_none());
    assert!(hand_off(&f, f.asked_at.after(third)).is_some());
}

#[test]
fn hand_off_needs_equal_options_and_steady_ttl() {
    let f = lease(|_| {});
    let mut options = *f.lease.grant().options;
    options.ttl = 31 * SECOND;
    assert!(
        f.lease.hand_off(f.at(1), options).is_none(),
        "other options"
    );
    assert!(f.begin_ttl_change());
    assert!(hand_off(&f, f.at(1)).is_none(), "the ttl is being changed");
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = None);
    assert!(hand_off(&f, f.at(1)).is_none(), "a fixed ttl");
    let f = lease(|grant| limit(grant, 29 * SECOND));
    assert!(
        hand_off(&f, f.at(1)).is_none(),
        "max_hold ends before the validity"
    );
}

#[test]
fn forbid_hand_off_still_allows_release() {
    let f = lease(|_| {});
    f.lease.forbid_hand_off();
    assert!(hand_off(&f, f.at(1)).is_none());
    assert_eq!(f.lease.mark_released(f.at(1)).1, Ok(()));
}

#[test]
fn a_due_renewal_passes_to_the_next_holder() {
    let f = lease(|grant| Arc::make_mut(&mut grant.options).renew_every = Some(5 * SECOND));
    let due = f.lease.take_due(f.at(5), set_timer);
    assert!(matches!(due, DueActions::Held { renew: true, .. }));
    // The renewal has not begun.
    let next = hand_off(&f, f.at(5)).unwrap();
    let due = next.take_due(f.at(5), set_timer);
    assert!(
        matches!(due, DueActions::Held { renew: true, .. }),
        "{due:?}"
    );
}

#[test]
fn a_key_is_tracked_after_track_after() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACK_AFTER);
    assert_eq!(
        f.lease.take_due(f.asked_at, set_timer),
        no_action_before(moment)
    );
    let due = f.lease.take_due(moment, set_timer);
    assert!(
        matches!(
            due,
            DueActions::Held {
                track: true,
                renew: false,
                ..
            }
        ),
        "{due:?}"
    );
    assert_eq!(
        f.lease.take_due(f.at(1), set_timer),
        no_action_before(f.at(10)),
        "once"
    );
    let mut listed = false;
    f.lease.track_if(|| {
        listed = true;
        true
    });
    assert!(listed);
    assert!(f.lease.mark_released(f.at(1)).0.tracked);
    f.lease.track_if(|| unreachable!("the lease is released"));
}

#[test]
fn a_key_tracked_early_is_not_tracked_again() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACK_AFTER);
    assert_eq!(
        f.lease.take_due(f.asked_at, set_timer),
        no_action_before(moment)
    );
    // A new notification connection tracks all held keys.
    f.lease.track_if(|| true);
    assert_eq!(
        f.lease.take_due(moment, set_timer),
        no_action_before(f.at(10))
    );
}

#[test]
fn a_key_without_room_early_is_tracked_later() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let moment = f.asked_at.after(TRACK_AFTER);
    f.lease.track_if(|| false);
    let due = f.lease.take_due(moment, set_timer);
    assert!(
        matches!(due, DueActions::Held { track: true, .. }),
        "{due:?}"
    );
}

#[test]
fn a_key_without_room_is_offered_at_renewals() {
    let f = lease(|grant| grant.since = grant.asked_at);
    let is_offered = |at: MonotonicTime| match f.lease.take_due(at, set_timer) {
        DueActions::Held { track, .. } => track,
        DueActions::Ended => panic!("the lease is held"),
    };
    let renew = |at: MonotonicTime| {
        assert!(f.lease.begin_renewal(at).is_some());
        f.lease.finish_ttl_change(at, at, 30 * SECOND);
    };
    assert!(is_offered(f.asked_at.after(TRACK_AFTER)));
    f.lease.track_if(|| false);
    assert!(!is_offered(f.at(1)), "only at renewals");
    assert!(is_offered(f.at(10)));
    renew(f.at(10));
    f.lease.track_if(|| true);
    assert!(!is_offered(f.at(20)), "the key is tracked");
    assert!(f.lease.mark_released(f.at(20)).0.tracked);
}

#[test]
fn a_lease_takes_at_most_176_bytes() {
    // The first lines of src/lease/mod.rs list what else a held lock takes.
    let (lease, count) = (size_of::<Lease>(), 2 * size_of::<usize>());
    assert!(lease + count <= 176, "{lease} bytes");
}
