//! Which renewals go together, and what comes of each by the answer to it.

use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::bounded;

use super::*;
use crate::clock::Clock;
use crate::event::EventLock;
use crate::lease::{Options, Terms};
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

/// Leases whose renewals are due after a third of that ttl.
fn leases(
    taken_at: Moment,
    ttl: Duration,
    count: usize,
    courier: &Arc<Courier>,
) -> Vec<Arc<Lease>> {
    let options = Options {
        ttl,
        renew_every: Some(ttl / 3),
        ..Options::USUAL
    };
    let terms = Terms {
        options: Arc::new(options),
        ..Terms::usual(Key::new("", "k", 16).unwrap(), taken_at)
    };
    let lease = |_| Arc::new(Lease::new(terms.clone(), Arc::clone(courier), None));
    (0..count).map(lease).collect()
}

/// How many of these batches are renewed together, one time after the other.
fn gathered(batches: impl IntoIterator<Item = Vec<Arc<Lease>>>, now: Moment) -> Vec<usize> {
    let due = Renewals::default();
    batches.into_iter().for_each(|batch| due.add(batch));
    let mut counts = Vec::new();
    while let Some(mut leases) = due.try_next() {
        gather(&mut leases, &due, now);
        counts.push(leases.len());
    }
    counts
}

#[test]
fn renewals_that_wait_are_gathered_into_batches_and_none_is_forgotten() {
    let (f, now) = (fixture(), Moment::now());
    let counts = [1, 1, MAX_BATCH - 3, 1, 1, MAX_BATCH, 1];
    let batches = counts.map(|count| leases(now, EVERY, count, &f.courier));
    assert_eq!(gathered(batches, now), [MAX_BATCH, MAX_BATCH + 1, 1]);
    f.courier.stop();
}

#[test]
fn more_are_renewed_at_a_time_once_some_are_late() {
    let (f, start) = (fixture(), Moment::now());
    let full = |_| leases(start, 9 * EVERY, MAX_BATCH, &f.courier);
    let due_at = start.after(3 * EVERY);
    assert_eq!(
        gathered((0..9).map(full), due_at.after(LATE / 2)),
        [MAX_BATCH; 9]
    );
    let late = due_at.after(2 * LATE);
    assert_eq!(gathered((0..9).map(full), late), [MAX_RENEWALS, MAX_BATCH]);
    // It goes first, since it ends first, and is not late.
    let short = leases(due_at, EVERY, 1, &f.courier);
    let behind_it = gathered((0..9).map(full).chain([short]), late);
    assert_eq!(behind_it, [MAX_RENEWALS + 1, MAX_BATCH]);
    f.courier.stop();
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
        dog.agenda.renew(vec![lease]);
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
