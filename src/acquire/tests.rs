//! Tests of one caller's wait, with a clock that the tests move and a store whose replies they set.

pub mod claim;
pub mod convert;
pub mod granted;
pub mod outages;
pub mod polling;
pub mod quorum;
pub mod release;
pub mod set;
pub mod transfer;

use std::sync::atomic::Ordering;

use super::places;
use super::queue::GrantOf;
use super::*;
use crate::command::{
    Acquire, Command, GrantMessage, QueueMode, QueuePlace, Reply, Request, front_place,
};
use crate::lease::Grant;
use crate::process::threads::ThreadGroup;
use crate::report::error::ErrorKind;
use crate::store::{Backend, Scripted, ServerId, Turn};
use crate::util::clock::Clock;
use crate::util::id::{HolderId, LeaseId};
use crate::watchdog::Scheduler;

const OPTIONS: Options = Options::USUAL;
/// The place of a waiter in the queue in Redis.
const SINCE: u64 = 1_800_000_000_000_005;
/// Longer than any test.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);

struct Fixture {
    clock: Clock,
    store: Arc<Scripted>,
    watchdog: Arc<Watchdog>,
    queues: Arc<LocalQueues>,
    acquirer: Arc<Acquirer>,
}

fn fixture() -> Fixture {
    with_store(Scripted::default())
}

fn with_store(store: Scripted) -> Fixture {
    let clock = Clock::movable();
    let store = Arc::new(store);
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    // The watchdog's threads do not run: tests hold no lock until its renewal.
    let scheduler = Scheduler::new(clock.clone());
    let backend = Backend::new(store.clone());
    let watchdog = Watchdog::new(scheduler, &backend, callbacks.clone(), COMMAND_TIMEOUT);
    let queues = Arc::new(LocalQueues::new(clock.clone()));
    let hand_offs = HandOffs {
        count: 2,
        time: OUTAGE_TIMEOUT,
    };
    let acquirer = Acquirer::new(
        &backend,
        watchdog.clone(),
        callbacks,
        queues.clone(),
        COMMAND_TIMEOUT,
        OUTAGE_TIMEOUT,
        hand_offs,
    );
    Fixture {
        clock,
        store,
        watchdog,
        queues,
        acquirer: Arc::new(acquirer),
    }
}

fn key() -> Key {
    Key::new("", "k", 16).unwrap()
}

fn error(kind: ErrorKind) -> Error {
    Error::new(kind, "")
}

/// The reply that another holder has the lock. `is_queued`: the caller's lease is in the queue in Redis.
fn contended(is_queued: bool) -> Reply {
    let expires_in = OPTIONS.ttl;
    match is_queued {
        true => contended_behind(0),
        false => Reply::Contended {
            expires_in,
            queued: None,
            shared: None,
        },
    }
}

/// The reply that another holder has the lock, and that `ahead` waiters are queued before the caller.
fn contended_behind(ahead: u64) -> Reply {
    Reply::Contended {
        expires_in: OPTIONS.ttl,
        queued: Some(QueuePlace {
            ahead,
            since: SINCE,
        }),
        shared: None,
    }
}

/// A turn of the client with this number.
pub fn turn(n: usize) -> Turn {
    Turn {
        lease: LeaseId::random(),
        holder: HolderId::of_text(&format!("host/{n}/0")),
    }
}

fn request(options: Options) -> LockRequest {
    LockRequest {
        key: key(),
        options,
        check: None,
        cancel: None,
    }
}

impl Fixture {
    /// Sets the reply to the next request.
    fn answer(&self, answer: impl FnOnce(&Request) -> Result<Reply, Error> + Send + 'static) {
        self.store.answer(answer);
    }

    /// Sets the outcome of the next request. It arrives after the time `later`.
    fn answer_after(&self, later: Duration, outcome: Result<Reply, Error>) {
        let clock = self.clock.clone();
        self.answer(move |_| {
            clock.advance(later);
            outcome
        });
    }

    /// Acquires the lock. Returns its grant.
    fn acquire(&self, until: Until) -> Result<Option<Grant>, Error> {
        self.acquire_on(OPTIONS, until)
    }

    fn acquire_on(&self, options: Options, until: Until) -> Result<Option<Grant>, Error> {
        let lease = self.acquirer.acquire(&request(options), until)?;
        Ok(lease.map(|lease| lease.grant().clone()))
    }

    fn tracked(&self) -> usize {
        self.store.tracked.load(Ordering::SeqCst)
    }
}

#[test]
fn queued_waiter_has_its_key_tracked() {
    for is_queued in [true, false] {
        let f = fixture();
        f.answer_after(Duration::ZERO, Ok(contended(is_queued)));
        f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
        assert!(f.acquire(Until::Forever).unwrap().is_some());
        assert_eq!(f.tracked(), usize::from(is_queued));
    }
}

/// The time until a waiter asks again, if `ahead` waiters are in front of it and the lock expires after `ttl`.
fn asks_after(ahead: u64, ttl: Duration) -> Duration {
    let now = MonotonicTime::now();
    let queued = QueuePlace {
        ahead,
        since: SINCE,
    };
    places::ask_at(queued, now.after(ttl), now).since(now)
}

#[test]
fn a_thousand_waiters_send_few_requests() {
    for (ttl, at_most) in [(30, 260.0), (1, 350.0)] {
        let ttl = Duration::from_secs(ttl);
        let a_second = (0..1000).map(|ahead| 1.0 / asks_after(ahead, ttl).as_secs_f64());
        let requests: f64 = a_second.sum();
        assert!(requests < at_most, "{requests} a second, ttl {ttl:?}");
        // A queue's ttl exceeds the lock's by at least ten seconds. Even the last waiter asks before the queue expires.
        let latest = (0..20_000).map(|ahead| asks_after(ahead, ttl)).max();
        assert!(latest.unwrap() <= ttl + Duration::from_secs(5));
    }
}

#[test]
fn polling_waiter_is_notified_once_possible() {
    let f = fixture();
    *f.store.queue_mode.lock() = Some(QueueMode::Polling);
    for to_come in [Some(QueueMode::Polling), None] {
        let store = Arc::clone(&f.store);
        f.answer(move |_| {
            *store.queue_mode.lock() = to_come;
            Ok(contended(true))
        });
    }
    f.answer_after(Duration::ZERO, Ok(contended(true)));
    f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let kept = [false, true, true].map(|notified| QueueMode::Existing { notified });
    let asked = [&[QueueMode::Polling][..], &kept].concat();
    assert_eq!(*f.store.asked.lock(), asked);
    assert_eq!(f.tracked(), 1, "only once it is notified");
}

#[test]
fn entry_lost_without_notifications_raises_no_suspicion() {
    let f = fixture();
    f.answer_after(OPTIONS.ttl, Ok(contended(true)));
    let store = Arc::clone(&f.store);
    f.answer(move |_| {
        store.notification_epoch.fetch_add(1, Ordering::SeqCst);
        Ok(contended(false))
    });
    f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    let kept = QueueMode::Existing { notified: true };
    assert_eq!(*f.store.asked.lock(), [QueueMode::Notified, kept, again]);
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 0);
}

/// The grant expires before an acquire confirms it. The message of the grant comes before the waiter sends this
/// acquire, or after.
#[test]
fn waiter_that_confirms_late_rejoins_in_front() {
    for is_early in [true, false] {
        let f = fixture();
        let grant = GrantMessage {
            to_confirm: true,
            ..GrantMessage::USUAL
        };
        for (is_queued, is_reported) in [(true, is_early), (false, !is_early)] {
            let queues = Arc::clone(&f.queues);
            let clock = f.clock.clone();
            f.answer(move |request| {
                let Command::Acquire(Acquire { key, lease, .. }) = &request.command else {
                    panic!("{request:?}");
                };
                if is_reported {
                    assert_eq!(queues.granted(key, *lease, grant), GrantOf::Waiter);
                }
                clock.advance(OPTIONS.ttl);
                Ok(contended(is_queued))
            });
        }
        f.answer_after(Duration::ZERO, Ok(Reply::granted(8)));
        let grant = f.acquire(Until::Forever).unwrap().unwrap();
        assert_eq!(grant.token, 8);
        let again = QueueMode::Rejoin {
            since: front_place(SINCE),
            polls: false,
        };
        let kept = QueueMode::Existing { notified: true };
        let first = f.store.asked.lock()[0];
        assert_eq!(*f.store.asked.lock(), [first, kept, again]);
        let suspected = f.store.suspected.load(Ordering::SeqCst);
        assert_eq!(suspected, 0, "it was notified");
    }
}

#[test]
fn waiter_that_polls_late_rejoins_in_front() {
    let f = fixture();
    *f.store.queue_mode.lock() = Some(QueueMode::Polling);
    f.answer_after(Duration::ZERO, Ok(contended(true)));
    f.answer_after(Duration::ZERO, Ok(contended(false)));
    f.answer_after(Duration::ZERO, Ok(Reply::granted(8)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = QueueMode::Rejoin {
        since: front_place(SINCE),
        polls: true,
    };
    assert_eq!(f.store.asked.lock().last(), Some(&again));
}

/// After a roll call, Redis has removed the waiter from the queue before its request arrived.
#[test]
fn called_waiter_asks_at_once_and_keeps_its_place() {
    let f = fixture();
    for reply in [contended_behind(1000), contended(false)] {
        let queues = Arc::clone(&f.queues);
        f.answer(move |request| {
            let Command::Acquire(Acquire { key, lease, .. }) = &request.command else {
                panic!("{request:?}");
            };
            queues.called(key, lease.start());
            Ok(reply)
        });
    }
    f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
    let started = std::time::Instant::now();
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    assert!(started.elapsed() < Duration::from_secs(9));
    let again = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    let kept = QueueMode::Existing { notified: true };
    assert_eq!(*f.store.asked.lock(), [QueueMode::Notified, kept, again]);
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 0);
}

#[test]
fn waiter_rejoins_at_its_lost_place() {
    let f = fixture();
    for is_queued in [true, false] {
        f.answer_after(OPTIONS.ttl, Ok(contended(is_queued)));
    }
    f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let again = QueueMode::Rejoin {
        since: SINCE,
        polls: true,
    };
    let asked = [
        QueueMode::Notified,
        QueueMode::Existing { notified: true },
        again,
    ];
    assert_eq!(*f.store.asked.lock(), asked);
    // The next wait begins at the end of the queue.
    f.queues.holders().iter().for_each(|lease| {
        f.acquirer.release(lease, ONLY_GUARD);
    });
    f.answer_after(Duration::ZERO, Ok(Reply::granted(8)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    assert_eq!(f.store.asked.lock().last(), Some(&QueueMode::Polling));
}

#[test]
fn shutdown_releases_queued_entries() {
    let (f, key) = (fixture(), key());
    let place = f.queues.join(&key, OPTIONS, None);
    let (lease, ..) = place.entry(LeaseId::random(), f.clock.now());
    assert!(
        place
            .record_queued(lease, 1, QueueMode::Notified, 0)
            .is_some()
    );
    f.acquirer.end();
    assert_eq!(*f.store.released.lock(), [lease]);
}
