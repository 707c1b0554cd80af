//! What the next holder of a lease gets, and what is told to whom.

use super::*;
use crate::event::EventHandler;

#[test]
fn the_next_holder_has_a_max_hold_of_its_own() {
    let f = lease(|grant| {
        Arc::make_mut(&mut grant.options).max_hold = Some(100 * SECOND);
    });
    let next = next_of(&f, f.at(5)).unwrap();
    assert_eq!(next.grant().hold_until(), Some(f.at(105)));
}

#[test]
fn a_key_that_is_watched_is_not_watched_anew_for_the_next_holder() {
    for tracked in [false, true] {
        let f = lease(|_| {});
        if tracked {
            f.lease.watch(|| true);
        }
        let next = next_of(&f, f.at(1)).unwrap();
        let due = next.due(f.at(2), note);
        let watch = matches!(due, Due::Held { watch: true, .. });
        assert_eq!(watch, !tracked);
    }
}

#[test]
fn the_next_holder_knows_of_the_line_in_redis_as_the_first_did() {
    for others_queued in [false, true] {
        let mut f = lease(|_| {});
        f.lease = f.lease.with_others_queued(others_queued);
        let next = next_of(&f, f.at(1)).unwrap();
        assert_eq!(next.has_others_queued(), others_queued);
    }
}

#[test]
fn a_lease_is_not_handed_off_while_a_force_is_confirmed() {
    let f = lease(|_| {});
    let by = crate::util::id::HolderId::of_text("host/1/0");
    assert!(f.lease.note_force(by, f.at(1)));
    assert!(next_of(&f, f.at(1)).is_none());
    f.lease.note_force_answer(Some(f.at(1)));
    assert!(next_of(&f, f.at(1)).is_some());
}

#[test]
fn at_the_very_end_of_its_validity_a_lease_is_not_live() {
    let f = lease(|grant| {
        Arc::make_mut(&mut grant.options).max_hold = Some(20 * SECOND);
    });
    f.lease.ttl_changed(f.at(1), f.at(1), 30 * SECOND);
    assert_eq!(f.lease.valid_for(f.at(19)), Some(SECOND));
    assert_eq!(f.lease.valid_for(f.at(20)), None);
    assert_eq!(f.lease.hold_left(f.at(19)), Some(SECOND));
    assert_eq!(f.lease.hold_left(f.at(20)), None);
}

#[test]
fn what_redis_may_keep_is_counted_from_the_answer_with_an_allowance() {
    let f = lease(|_| {});
    // Later than what its grant allows.
    f.lease.ttl_changed(f.at(20), f.at(1), 5000 * SECOND);
    assert_eq!(f.lease.key_until(), f.at(20 + 5100));
    f.lease.key_lives(f.at(8000));
    assert_eq!(f.lease.key_until(), f.at(8000));
    f.lease.key_lives(f.at(1));
    assert_eq!(f.lease.key_until(), f.at(8000), "never less");
}

/// Panics when it goes.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("a test's own panic");
    }
}

#[test]
fn a_panic_in_what_a_callback_owns_does_not_reach_who_lets_go() {
    let f = lease(|_| {});
    let bomb = Bomb;
    f.lease.on_lost(f.at(1), Box::new(move |_| drop(bomb)));
    let (ended, released) = f.lease.release(f.at(1));
    assert_eq!(released, Ok(()));
    drop(ended);
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
fn events_are_told_at_once_or_later_and_a_panic_in_one_stays_there() {
    let threads = ThreadGroup::new();
    let count = Arc::new(Count::default());
    let events: Arc<dyn EventHandler> = Arc::clone(&count) as _;
    let callbacks = CallbackExecutor::start(&threads, Some(events)).unwrap();
    let key = "k";
    let lock = move || EventLock {
        key,
        fencing_token: 1,
    };
    callbacks.tell(|events| events.acquired(lock(), SECOND));
    assert_eq!(count.0.load(Ordering::SeqCst), 10);
    callbacks.queue_event(move |events| events.renewed(lock()));
    callbacks.stop();
    assert!(threads.has_ended_by(MonotonicTime::now().after(60 * SECOND)));
    assert_eq!(count.0.load(Ordering::SeqCst), 11);
}

#[test]
fn who_of_the_client_is_to_know_of_a_loss_is_told_of_each() {
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
