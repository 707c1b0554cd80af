//! One caller's wait, by a clock that tests move and on a store that answers what it is told to.

mod adopting;
mod granted;
mod outages;

use std::sync::atomic::Ordering;

use super::local::GrantOf;
use super::*;
use crate::clock::Clock;
use crate::id::LeaseId;
use crate::lease::Terms;
use crate::store::{Command, Grant, Reply, Request, Scripted, in_front};
use crate::thread::Crew;
use crate::watchdog::Agenda;

const OPTIONS: Options = Options::USUAL;
/// The place of a waiter.
const SINCE: u64 = 1_800_000_000_000_005;
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

/// In the queue there, or not.
fn contended(is_queued: bool) -> Reply {
    let expires_in = OPTIONS.ttl;
    match is_queued {
        true => contended_behind(0),
        false => Reply::Contended {
            expires_in,
            queued: None,
        },
    }
}

/// Behind so many other waiters.
fn contended_behind(ahead: u64) -> Reply {
    Reply::Contended {
        expires_in: OPTIONS.ttl,
        queued: Some(Queued {
            ahead,
            since: SINCE,
        }),
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
fn a_queued_waiter_watches_its_key() {
    for in_line in [true, false] {
        let f = fixture();
        f.answer_after(Duration::ZERO, Ok(contended(in_line)));
        f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
        assert!(f.acquire(Until::Forever).unwrap().is_some());
        assert_eq!(f.watched(), usize::from(in_line));
    }
}

/// When a waiter at this place in the queue of a lock that expires after `ttl` asks again.
fn asks_after(ahead: u64, ttl: Duration) -> Duration {
    let now = Moment::now();
    let queued = Queued {
        ahead,
        since: SINCE,
    };
    match Rest::queued(queued, now.after(ttl), now) {
        Rest::Queued { ask_at, .. } => ask_at.since(now),
        _ => unreachable!("it is queued"),
    }
}

#[test]
fn a_thousand_waiters_send_few_requests() {
    for (ttl, at_most) in [(30, 120.0), (1, 250.0)] {
        let ttl = Duration::from_secs(ttl);
        let a_second = (0..1000).map(|ahead| 1.0 / asks_after(ahead, ttl).as_secs_f64());
        let requests: f64 = a_second.sum();
        assert!(requests < at_most, "{requests} a second, ttl {ttl:?}");
        // Before the queue ends, which outlives its lock by ten seconds or more.
        let latest = (0..20_000).map(|ahead| asks_after(ahead, ttl)).max();
        assert!(latest.unwrap() <= ttl + Duration::from_secs(5));
    }
}

#[test]
fn only_the_first_two_waiters_watch_the_key() {
    for ahead in 0..4 {
        let f = fixture();
        f.answer_after(Duration::ZERO, Ok(contended_behind(ahead)));
        f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
        assert!(f.acquire(Until::Forever).unwrap().is_some());
        assert_eq!(f.watched(), usize::from(ahead < 2), "{ahead} before it");
    }
}

#[test]
fn a_waiter_that_joined_to_poll_is_notified_once_it_can_be() {
    let f = fixture();
    *f.store.standing.lock() = Some(Standing::Polling);
    for to_come in [Some(Standing::Polling), None] {
        let store = Arc::clone(&f.store);
        f.answer(move |_| {
            *store.standing.lock() = to_come;
            Ok(contended(true))
        });
    }
    f.answer_after(Duration::ZERO, Ok(contended(true)));
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let kept = [false, true, true].map(|notified| Standing::Kept { notified });
    let asked = [&[Standing::Polling][..], &kept].concat();
    assert_eq!(*f.store.asked.lock(), asked);
    assert_eq!(f.watched(), 1, "only once it is notified");
}

#[test]
fn a_place_lost_while_notifications_were_away_raises_no_suspicion() {
    let f = fixture();
    f.answer_after(OPTIONS.ttl, Ok(contended(true)));
    let store = Arc::clone(&f.store);
    f.answer(move |_| {
        store.hearing.fetch_add(1, Ordering::SeqCst);
        Ok(contended(false))
    });
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = Standing::Again {
        since: SINCE,
        polls: false,
    };
    let kept = Standing::Kept { notified: true };
    assert_eq!(*f.store.asked.lock(), [Standing::Told, kept, again]);
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 0);
}

/// The grant ended before its confirmation came. The message comes before that is sent, or after it.
#[test]
fn a_waiter_that_confirms_too_late_joins_in_front() {
    for is_early in [true, false] {
        let f = fixture();
        let grant = Grant {
            to_confirm: true,
            ..Grant::USUAL
        };
        for (is_queued, is_told) in [(true, is_early), (false, !is_early)] {
            let queues = Arc::clone(&f.queues);
            let clock = f.clock.clone();
            f.answer(move |request| {
                let Command::Acquire { key, lease, .. } = &request.command else {
                    panic!("{request:?}");
                };
                if is_told {
                    assert_eq!(queues.granted(key, *lease, grant), GrantOf::Waiter);
                }
                clock.advance(OPTIONS.ttl);
                Ok(contended(is_queued))
            });
        }
        f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 8 }));
        let terms = f.acquire(Until::Forever).unwrap().unwrap();
        assert_eq!(terms.token, 8);
        let again = Standing::Again {
            since: in_front(SINCE),
            polls: false,
        };
        let kept = Standing::Kept { notified: true };
        let first = f.store.asked.lock()[0];
        assert_eq!(*f.store.asked.lock(), [first, kept, again]);
        let suspected = f.store.suspected.load(Ordering::SeqCst);
        assert_eq!(suspected, 0, "it was notified");
    }
}

#[test]
fn a_waiter_that_polls_too_late_joins_in_front() {
    let f = fixture();
    *f.store.standing.lock() = Some(Standing::Polling);
    f.answer_after(Duration::ZERO, Ok(contended(true)));
    f.answer_after(Duration::ZERO, Ok(contended(false)));
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 8 }));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = Standing::Again {
        since: in_front(SINCE),
        polls: true,
    };
    assert_eq!(f.store.asked.lock().last(), Some(&again));
}

#[test]
fn a_waiter_that_comes_to_the_front_asks_before_long() {
    let f = fixture();
    let queues = Arc::clone(&f.queues);
    f.answer(move |request| {
        let Command::Acquire { key, lease, .. } = &request.command else {
            panic!("{request:?}");
        };
        queues.near(key, lease.start());
        Ok(contended_behind(1000))
    });
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
    let started = std::time::Instant::now();
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    // Otherwise after more than half a minute.
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_waiter_that_lost_its_place_joins_again_at_it() {
    let f = fixture();
    for is_queued in [true, false] {
        f.answer_after(OPTIONS.ttl, Ok(contended(is_queued)));
    }
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 7 }));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = Standing::Again {
        since: SINCE,
        polls: true,
    };
    let asked = [Standing::Told, Standing::Kept { notified: true }, again];
    assert_eq!(*f.store.asked.lock(), asked);
    // Another wait begins at the end of the queue.
    f.queues.holders().iter().for_each(|lease| {
        f.waits.let_go(lease);
    });
    f.answer_after(Duration::ZERO, Ok(Reply::Granted { token: 8 }));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    assert_eq!(f.store.asked.lock().last(), Some(&Standing::Polling));
}

#[test]
fn shutdown_gives_queued_claims_back() {
    let (f, key) = (fixture(), key());
    let place = f.queues.join(&key, OPTIONS, None);
    let (lease, ..) = place.claim(LeaseId::random(), f.clock.now());
    assert!(place.note_queued(lease, 1, Standing::Told, 0).is_some());
    f.waits.end();
    assert_eq!(*f.store.released.lock(), [lease]);
}
