//! Which renewals go together, and what comes of each by the answer to it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::bounded;

use super::*;
use crate::event::EventLock;
use crate::lease::{Grant, Options};
use crate::store::{MAX_RENEWALS, Scripted};
use crate::util::clock::Clock;

#[derive(Default)]
struct Told {
    lost: AtomicUsize,
    failed: AtomicUsize,
}

impl EventHandler for Told {
    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }

    fn renewal_failed(&self, _: EventLock<'_>, _: &Error) {
        self.failed.fetch_add(1, Ordering::SeqCst);
    }
}

struct Fixture {
    clock: Clock,
    store: Arc<Scripted>,
    told: Arc<Told>,
    callbacks: Arc<CallbackExecutor>,
    threads: ThreadGroup,
    dog: Arc<Watchdog>,
}

const EVERY: Duration = Duration::from_secs(2);

/// A watchdog without its threads, and a lease that is due in [`EVERY`].
fn fixture() -> Fixture {
    let (clock, threads) = (Clock::movable(), ThreadGroup::new());
    let (store, told) = (Arc::new(Scripted::default()), Arc::new(Told::default()));
    let events: Arc<dyn EventHandler> = told.clone();
    let callbacks = CallbackExecutor::start(&threads, Some(events)).unwrap();
    let (scheduler, _) = Scheduler::new(clock.clone());
    let dog = Watchdog::new(scheduler, store.clone(), callbacks.clone(), EVERY);
    let options = Options {
        renew_every: Some(EVERY),
        ..Options::USUAL
    };
    let (key, now) = (Key::new("", "k", 16).unwrap(), clock.now());
    let grant = Grant {
        options: Arc::new(options),
        ..Grant::usual(key, now)
    };
    let lease = Lease::new(grant, callbacks.clone(), None);
    assert!(dog.watch(&Arc::new(lease)));
    Fixture {
        clock,
        store,
        told,
        callbacks,
        threads,
        dog,
    }
}

impl Fixture {
    /// Lets time pass; what is due by then has this answer. False if nothing was.
    fn is_renewed_after(&self, pause: Duration, answer: Result<Reply, Error>) -> bool {
        self.store.answer(move |_| answer);
        self.clock.advance(pause);
        self.dog.catch_up(&[]);
        !self.store.unasked()
    }
}

#[test]
fn a_renewal_that_fails_is_tried_again_after_a_quarter_of_its_pause() {
    let f = fixture();
    let failed = Err(Error::new(ErrorKind::Unavailable, ""));
    assert!(f.is_renewed_after(EVERY, failed));
    // A timer is a millisecond late at most.
    let retry = EVERY / 4 + Duration::from_millis(1);
    assert!(f.is_renewed_after(retry, Ok(Reply::Done)));
    f.callbacks.stop();
}

#[test]
fn a_renewal_that_finds_the_lock_lost_is_told_of_as_a_loss_and_not_as_a_failure() {
    let f = fixture();
    assert!(f.is_renewed_after(EVERY, Ok(Reply::Missing)));
    f.callbacks.stop();
    assert!(
        f.threads
            .has_ended_by(MonotonicTime::now().after(60 * EVERY))
    );
    assert_eq!(f.told.lost.load(Ordering::SeqCst), 1);
    assert_eq!(f.told.failed.load(Ordering::SeqCst), 0);
}

/// A lease that seems to be lost, and has not to be renewed for now.
fn doubted(f: &Fixture) -> Arc<Lease> {
    let grant = Grant::usual(Key::new("", "doubted", 16).unwrap(), f.clock.now());
    let lease = Arc::new(Lease::new(grant, Arc::clone(&f.callbacks), None));
    assert!(f.dog.watch(&lease));
    lease
}

#[test]
fn a_loss_that_a_lane_denies_puts_all_connections_under_suspicion() {
    let f = fixture();
    let lease = doubted(&f);
    f.store.answer(|_| Ok(Reply::Done));
    f.dog.confirm_all(vec![&lease], Doubt::Seen);
    assert!(lease.loss(f.clock.now()).is_none());
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 1);
    f.store.answer(|_| Ok(Reply::Missing));
    f.dog.confirm_all(vec![&lease], Doubt::Seen);
    assert_eq!(lease.loss(f.clock.now()), Some(LossReason::Deleted));
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 1);
    // One that is over is not asked about.
    f.dog.confirm_all(vec![&lease], Doubt::Seen);
    f.callbacks.stop();
}

/// Anybody may publish such a message.
#[test]
fn a_force_that_a_lane_denies_suspects_no_connection() {
    let f = fixture();
    let lease = doubted(&f);
    let by = || HolderId::of_text("host/1/0");
    assert!(lease.record_force_message(by(), f.clock.now()));
    assert!(
        !lease.record_force_message(by(), f.clock.now()),
        "one at a time"
    );
    f.store.answer(|_| Ok(Reply::Done));
    f.dog.confirm_all(vec![&lease], Doubt::Force);
    assert!(lease.loss(f.clock.now()).is_none());
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 0);
    assert!(
        !lease.record_force_message(by(), f.clock.now()),
        "denied just now"
    );
    // Its key is looked at again.
    let tracked = f.store.tracked.load(Ordering::SeqCst);
    f.clock.advance(LONGEST_RETRY + Duration::from_millis(2));
    f.dog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked + 1);
    assert!(lease.record_force_message(by(), f.clock.now()));
    f.store
        .answer(|_| Err(Error::new(ErrorKind::Unavailable, "")));
    f.dog.confirm_all(vec![&lease], Doubt::Force);
    assert!(
        lease.record_force_message(by(), f.clock.now()),
        "not answered"
    );
    f.store.answer(|_| Ok(Reply::Taken { by: None }));
    f.dog.confirm_all(vec![&lease], Doubt::Force);
    let reason = LossReason::ForceUnlocked { by: by() };
    assert_eq!(lease.loss(f.clock.now()), Some(reason));
    f.callbacks.stop();
}

#[test]
fn a_denied_force_is_no_reason_of_a_later_loss() {
    let f = fixture();
    let lease = doubted(&f);
    assert!(lease.record_force_message(HolderId::of_text("host/1/0"), f.clock.now()));
    f.store.answer(|_| Ok(Reply::Done));
    f.dog.confirm_all(vec![&lease], Doubt::Force);
    f.store.answer(|_| Ok(Reply::Missing));
    f.dog.confirm_all(vec![&lease], Doubt::Seen);
    assert_eq!(lease.loss(f.clock.now()), Some(LossReason::Deleted));
    f.callbacks.stop();
}

#[test]
fn a_loss_that_no_lane_can_confirm_is_looked_at_again() {
    let f = fixture();
    let lease = doubted(&f);
    // Past the moment from which it is tracked.
    f.clock.advance(Duration::from_millis(50));
    f.dog.catch_up(&[]);
    let tracked = f.store.tracked.load(Ordering::SeqCst);
    f.store
        .answer(|_| Err(Error::new(ErrorKind::Unavailable, "")));
    f.dog.confirm_all(vec![&lease], Doubt::Seen);
    assert!(lease.loss(f.clock.now()).is_none());
    f.clock.advance(LONGEST_RETRY / 2);
    f.dog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked);
    f.clock
        .advance(LONGEST_RETRY / 2 + Duration::from_millis(2));
    f.dog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked + 1);
    f.callbacks.stop();
}

/// Leases that are due, of which the watchdog has set the next timers.
fn due(count: usize, dog: &Watchdog, callbacks: &Arc<CallbackExecutor>) -> Vec<Arc<Lease>> {
    let now = dog.now();
    let due_at = now.after(Options::USUAL.renew_every.unwrap());
    let lease = |_| {
        let grant = Grant::usual(Key::new("", "k", 16).unwrap(), now);
        let lease = Arc::new(Lease::new(grant, Arc::clone(callbacks), None));
        lease.take_due(due_at, |old, next| dog.reset(&lease, old, next));
        lease
    };
    (0..count).map(lease).collect()
}

#[test]
fn all_that_waits_is_renewed_and_not_all_at_a_time() {
    let (f, count) = (fixture(), MAX_RENEWALS + 1);
    f.dog.scheduler.renew(due(count, &f.dog, &f.callbacks));
    for _ in 1..count {
        f.store.answer(|_| Ok(Reply::Done));
    }
    let dog = Arc::clone(&f.dog);
    f.store.answer(move |_| {
        dog.stop();
        Ok(Reply::Done)
    });
    f.dog.run_renewals();
    let at_a_time = f.store.at_a_time.lock().clone();
    assert_eq!(at_a_time.iter().sum::<usize>(), count);
    assert_eq!(at_a_time[0], AT_A_TIME);
    f.callbacks.stop();
}

#[test]
fn a_crowd_is_taken_apart_and_a_few_are_not() {
    for (count, is_crowd) in [(AT_A_TIME - 1, false), (AT_A_TIME, true)] {
        let f = fixture();
        let leases = due(count, &f.dog, &f.callbacks);
        for _ in 0..count {
            f.store.answer(|_| Ok(Reply::Done));
        }
        f.dog.renew(&leases);
        // Past the moment from which they are tracked.
        let later = f.dog.now().after(Duration::from_secs(1));
        let next = |lease: &Arc<Lease>| match lease.take_due(later, |_, _| None) {
            DueActions::Held { next, .. } => next,
            DueActions::Ended => panic!("it was renewed"),
        };
        let renewed_at: BTreeSet<MonotonicTime> = leases.iter().map(next).collect();
        assert_eq!(renewed_at.len() > 1, is_crowd);
        f.callbacks.stop();
    }
}

#[test]
fn a_renewal_that_hangs_holds_up_no_other() {
    let (threads, store) = (ThreadGroup::new(), Arc::new(Scripted::default()));
    let callbacks = CallbackExecutor::start(&threads, None).unwrap();
    let (scheduler, inboxes) = Scheduler::new(Clock::default());
    let dog = Watchdog::new(scheduler, store.clone(), callbacks.clone(), EVERY);
    dog.start(&threads, inboxes).unwrap();
    let (hangs, hung) = bounded(1);
    let (end, ended) = bounded::<()>(0);
    store.answer(move |_| {
        hangs.send(()).unwrap();
        let _ = ended.recv();
        Ok(Reply::Done)
    });
    let (renews, renewed) = bounded(1);
    store.answer(move |_| {
        renews.send(()).unwrap();
        Ok(Reply::Done)
    });
    for _ in 1..MAX_RENEWALS {
        store.answer(|_| Ok(Reply::Done));
    }
    dog.scheduler.renew(due(MAX_RENEWALS + 1, &dog, &callbacks));
    let long = Duration::from_secs(60);
    let seen = [hung.recv_timeout(long), renewed.recv_timeout(long)];
    drop(end);
    dog.stop();
    callbacks.stop();
    assert!(threads.has_ended_by(MonotonicTime::now().after(long)));
    assert_eq!(seen, [Ok(()); 2]);
}

#[test]
fn no_more_leases_wait_to_be_watched_than_there_is_room_for() {
    let f = fixture();
    let room = f.dog.tracked.room();
    let queued = |round: usize| {
        for n in 0..room {
            let key = Key::new("", &format!("{round}/{n}"), 16).unwrap();
            let lease = Lease::new(Grant::usual(key, f.clock.now()), f.callbacks.clone(), None);
            assert!(f.dog.watch(&Arc::new(lease)));
        }
        f.clock.advance(Duration::from_millis(100));
        let (_, is_tracked) = f.dog.process_due(f.dog.scheduler.due());
        let count = is_tracked.len();
        f.dog.track_later(is_tracked);
        count
    };
    assert_eq!([queued(0), queued(1)], [room, 0]);
    f.dog.stop();
    f.callbacks.stop();
}
