//! What comes of a renewal, by the answer to it.

use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::bounded;

use super::*;
use crate::clock::Clock;
use crate::event::EventLock;
use crate::store::Scripted;

#[derive(Default)]
struct Told {
    lost: AtomicUsize,
    failed: AtomicUsize,
}

impl Events for Told {
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
    courier: Arc<Courier>,
    crew: Crew,
    dog: Arc<Watchdog>,
}

const EVERY: Duration = Duration::from_secs(2);

/// A watchdog without its threads, and a lease that is due in [`EVERY`].
fn fixture() -> Fixture {
    let (clock, crew) = (Clock::movable(), Crew::new());
    let (store, told) = (Arc::new(Scripted::default()), Arc::new(Told::default()));
    let events: Arc<dyn Events> = told.clone();
    let courier = Courier::start(&crew, Some(events)).unwrap();
    let (agenda, _) = Agenda::new(clock.clone());
    let dog = Watchdog::new(agenda, store.clone(), courier.clone(), EVERY);
    let options = Options {
        renew_every: Some(EVERY),
        ..Options::USUAL
    };
    let (key, now) = (Key::new("", "k", 16).unwrap(), clock.now());
    let terms = Terms {
        options: Arc::new(options),
        ..Terms::usual(key, now)
    };
    let lease = Lease::new(terms, courier.clone(), None);
    assert!(dog.watch(&Arc::new(lease)));
    Fixture {
        clock,
        store,
        told,
        courier,
        crew,
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
    f.courier.stop();
}

#[test]
fn a_renewal_that_finds_the_lock_lost_is_told_of_as_a_loss_and_not_as_a_failure() {
    let f = fixture();
    assert!(f.is_renewed_after(EVERY, Ok(Reply::Missing)));
    f.courier.stop();
    assert!(f.crew.has_ended_by(Moment::now().after(60 * EVERY)));
    assert_eq!(f.told.lost.load(Ordering::SeqCst), 1);
    assert_eq!(f.told.failed.load(Ordering::SeqCst), 0);
}

#[test]
fn more_are_renewed_at_a_time_once_they_are_late() {
    let f = fixture();
    let terms = Terms::usual(Key::new("", "k", 16).unwrap(), f.clock.now());
    let every = terms.options.renew_every.unwrap();
    let lease = Arc::new(Lease::new(terms, f.courier.clone(), None));
    let leases = std::slice::from_ref(&lease);
    f.clock.advance(every + LATE / 2);
    assert_eq!(f.dog.at_a_time(leases), MAX_BATCH);
    f.clock.advance(LATE);
    assert_eq!(f.dog.at_a_time(leases), MAX_RENEWALS);
}

#[test]
fn what_waits_behind_a_late_one_goes_along_with_it() {
    for (late_by, asked) in [(Duration::ZERO, MAX_BATCH), (2 * LATE, 2 * MAX_BATCH)] {
        let f = fixture();
        let terms = Terms::usual(Key::new("", "k", 16).unwrap(), f.clock.now());
        let due = terms.options.renew_every.unwrap() + Duration::from_millis(1);
        let lease = || {
            let lease = Arc::new(Lease::new(terms.clone(), f.courier.clone(), None));
            lease.due(f.clock.now(), |_, _| None);
            lease
        };
        f.clock.advance(due + late_by);
        let (jobs, inbox) = unbounded();
        for _ in 0..2 {
            let leases = (0..MAX_BATCH).map(|_| lease()).collect();
            jobs.send(Job::Renew(leases)).unwrap();
        }
        jobs.send(Job::Stop).unwrap();
        for _ in 0..2 * MAX_BATCH {
            f.store.answer(|_| Ok(Reply::Done));
        }
        f.dog.work(&inbox);
        assert_eq!(f.store.at_a_time.lock()[0], asked);
        f.courier.stop();
    }
}

#[test]
fn a_renewal_that_hangs_holds_up_no_other() {
    let (crew, store) = (Crew::new(), Arc::new(Scripted::default()));
    let courier = Courier::start(&crew, None).unwrap();
    let (agenda, inboxes) = Agenda::new(Clock::default());
    let dog = Watchdog::new(agenda, store.clone(), courier.clone(), EVERY);
    dog.start(&crew, inboxes).unwrap();
    let renew = |name: &str| {
        let now = Moment::now();
        let terms = Terms::usual(Key::new("", name, 16).unwrap(), now);
        let due_at = now.after(Options::USUAL.renew_every.unwrap());
        let lease = Arc::new(Lease::new(terms, courier.clone(), None));
        lease.due(due_at, |old, next| dog.reset(&lease, old, next));
        dog.agenda.give(Job::Renew(vec![lease]));
    };
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
    renew("first");
    hung.recv().unwrap();
    renew("second");
    let other = renewed.recv_timeout(Duration::from_secs(60));
    drop(end);
    dog.stop();
    courier.stop();
    assert!(crew.has_ended_by(Moment::now().after(Duration::from_secs(60))));
    assert_eq!(other, Ok(()));
}
