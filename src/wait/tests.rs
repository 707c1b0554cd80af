//! One caller's wait, by a clock that tests move and on a store that answers what it is told to.

mod adopting;
mod granted;
mod outages;

use std::sync::atomic::Ordering;

use super::*;
use crate::clock::Clock;
use crate::id::LeaseId;
use crate::lease::Terms;
use crate::store::{Reply, Request, Scripted};
use crate::thread::Crew;
use crate::watchdog::Agenda;

const OPTIONS: Options = Options::USUAL;
/// Longer than any test lasts.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(600);

struct Fixture {
    clock: Clock,
    store: Arc<Scripted>,
    courier: Arc<Courier>,
    watchdog: Arc<Watchdog>,
    queues: Arc<LocalQueues>,
    waits: Arc<Waits>,
}

fn fixture() -> Fixture {
    let clock = Clock::movable();
    let store = Arc::new(Scripted::default());
    let courier = Courier::start(&Crew::new(), None).unwrap();
    courier.stop();
    // Without its threads: nothing is held for long enough to need them.
    let (agenda, _) = Agenda::new(clock.clone());
    let watchdog = Watchdog::new(agenda, store.clone(), courier.clone(), COMMAND_TIMEOUT);
    let queues = Arc::new(LocalQueues::new(clock.clone()));
    let hand_offs = HandOffs {
        count: 2,
        time: PATIENCE,
    };
    let waits = Waits::new(
        store.clone(),
        watchdog.clone(),
        courier.clone(),
        queues.clone(),
        COMMAND_TIMEOUT,
        PATIENCE,
        hand_offs,
    );
    Fixture {
        clock,
        store,
        courier,
        watchdog,
        queues,
        waits: Arc::new(waits),
    }
}

fn key() -> Key {
    Key::new("", "k", 16).unwrap()
}

fn error(kind: ErrorKind) -> Error {
    Error::new(kind, "")
}

fn contended(in_line: bool) -> Reply {
    Reply::Contended {
        expires_in: OPTIONS.ttl,
        in_line,
    }
}

fn wanted(options: Options) -> Wanted {
    Wanted {
        key: key(),
        options,
        check: None,
        cancel: None,
    }
}

impl Fixture {
    /// The answer to the next question.
    fn answer(&self, answer: impl FnOnce(&Request) -> Result<Reply, Error> + Send + 'static) {
        self.store.answer(answer);
    }

    /// The next question is answered after `later`.
    fn answer_after(&self, later: Duration, outcome: Result<Reply, Error>) {
        let clock = self.clock.clone();
        self.answer(move |_| {
            clock.advance(later);
            outcome
        });
    }

    /// The terms on which the lock was granted.
    fn acquire(&self, until: Until) -> Result<Option<Terms>, Error> {
        self.acquire_on(OPTIONS, until)
    }

    fn acquire_on(&self, options: Options, until: Until) -> Result<Option<Terms>, Error> {
        let lease = self.waits.acquire(&wanted(options), until)?;
        Ok(lease.map(|lease| lease.terms().clone()))
    }

    fn watched(&self) -> usize {
        self.store.watched.load(Ordering::SeqCst)
    }
}

#[test]
fn who_stands_in_line_for_a_moment_has_the_key_watched_and_who_does_not_polls() {
    for in_line in [true, false] {
        let f = fixture();
        f.answer_after(Duration::ZERO, Ok(contended(in_line)));
        f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
        assert!(f.acquire(Until::Forever).unwrap().is_some());
        assert_eq!(f.watched(), usize::from(in_line));
    }
}

#[test]
fn what_stands_in_line_is_given_back_when_the_client_ends() {
    let (f, key) = (fixture(), key());
    let place = f.queues.join(&key, OPTIONS, None);
    let (lease, ..) = place.claim(LeaseId::random(), f.clock.now());
    assert!(place.in_line(lease));
    f.waits.end();
    assert_eq!(*f.store.released.lock(), [lease]);
}
