//! Tests of hand-offs, of confirmed forced releases, and of callbacks and events.

use super::*;
use crate::report::event::EventHandler;

#[test]
fn max_hold_starts_anew_for_the_next_holder() {
    let f = lease(|grant| {
        Arc::make_mut(&mut grant.options).max_hold = Some(100 * SECOND);
    });
    let next = hand_off(&f, f.at(5)).unwrap();
    assert_eq!(next.grant().hold_until(), Some(f.at(105)));
}

#[test]
fn a_tracked_key_stays_tracked_after_hand_off() {
    for tracked in [false, true] {
        let f = lease(|_| {});
        if tracked {
            f.lease.track_if(|| true);
        }
        let next = hand_off(&f, f.at(1)).unwrap();
        let due = next.take_due(f.at(2), set_timer);
        let track = matches!(due, DueActions::Held { track: true, .. });
        assert_eq!(track, !tracked);
    }
}

#[test]
fn a_hand_off_keeps_whether_others_are_queued() {
    for others_queued in [false, true] {
        let mut f = lease(|_| {});
        let lease = Arc::into_inner(f.lease).unwrap();
        f.lease = Arc::new(lease.with_others_queued(others_queued));
        let next = hand_off(&f, f.at(1)).unwrap();
        assert_eq!(next.has_others_queued(), others_queued);
    }
}

#[test]
fn no_hand_off_while_a_force_is_confirmed() {
    let f = lease(|_| {});
    let by = crate::util::id::HolderId::of_text("host/1/0");
    assert!(f.lease.record_force_message(by, f.at(1)));
    assert!(hand_off(&f, f.at(1)).is_none());
    f.lease.record_force_answer(Some(f.at(1)));
    assert!(hand_off(&f, f.at(1)).is_some());
}

#[test]
fn a_lease_is_invalid_at_its_validity_end() {
    let f = lease(|grant| {
        Arc::make_mut(&mut grant.options).max_hold = Some(20 * SECOND);
    });
    f.lease.finish_ttl_change(f.at(1), f.at(1), 30 * SECOND);
    assert_eq!(f.lease.valid_for(f.at(19)), Some(SECOND));
    assert_eq!(f.lease.valid_for(f.at(20)), None);
    assert_eq!(f.lease.hold_left(f.at(19)), Some(SECOND));
    assert_eq!(f.lease.hold_left(f.at(20)), None);
}

#[test]
fn key_until_counts_from_the_reply_plus_drift() {
    let f = lease(|_| {});
    // The reply came late, so Redis may have set the ttl later than the request was sent.
    f.lease.finish_ttl_change(f.at(20), f.at(1), 5000 * SECOND);
    assert_eq!(f.lease.key_until(), f.at(20 + 5100));
    f.lease.extend_key_until(f.at(8000));
    assert_eq!(f.lease.key_until(), f.at(8000));
    f.lease.extend_key_until(f.at(1));
    assert_eq!(f.lease.key_until(), f.at(8000), "never less");
}

/// A value whose drop panics.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic!("a test's own panic");
    }
}

#[test]
fn a_panic_while_dropping_a_callback_is_caught() {
    let f = lease(|_| {});
    let owned = PanicsOnDrop;
    f.lease
        .on_lost(f.at(1), ONLY_GUARD, Box::new(move |_| drop(owned)));
    let (detached, released) = f.lease.mark_released(f.at(1));
    assert_eq!(released, Ok(()));
    drop(detached);
}

#[derive(Default)]
struct Count(AtomicUsize);

impl EventHandler for Count {
    fn renewed(&self, _: EventLock<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn acquired(&self, _: EventLock<'_>, _: Duration) {
        self.0.fetch_add(10, Ordering::SeqCst);
        panic!("a test's own panic");
    }
}

#[test]
fn event_handlers_run_and_their_panics_are_dropped() {
    let threads = ThreadGroup::new();
    let count = Arc::new(Count::default());
    let events: Arc<dyn EventHandler> = Arc::clone(&count) as _;
    let callbacks = CallbackExecutor::start(&threads, Some(events)).unwrap();
    let key = "k";
    let lock = move || EventLock {
        key,
        fencing_token: 1,
    };
    callbacks.call_handler(|events| events.acquired(lock(), SECOND));
    assert_eq!(count.0.load(Ordering::SeqCst), 10);
    callbacks.queue_event(move |events| events.renewed(lock()));
    callbacks.stop();
    assert!(threads.wait_until_ended(MonotonicTime::now().after(60 * SECOND)));
    assert_eq!(count.0.load(Ordering::SeqCst), 11);
}

#[test]
fn the_loss_hook_runs_once_per_loss() {
    let f = lease(|_| {});
    let lost = Arc::new(AtomicUsize::new(0));
    let hook = {
        let lost = Arc::clone(&lost);
        move |lease: &Lease| {
            assert_eq!(lease.grant().key.name(), "k");
            lost.fetch_add(1, Ordering::SeqCst);
        }
    };
    f.callbacks.set_loss_hook(hook);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    f.lease.lose(f.asked_at, LossReason::Deleted);
    assert_eq!(lost.load(Ordering::SeqCst), 1);
    f.finish();
}
