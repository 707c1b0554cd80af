//! The waits of callers of a quorum, with the replies and the reports that a test sets.

use super::*;
use crate::acquire::contention::WaitSoFar;
use crate::util::sync::Mutex;

const MAJORITY: usize = 2;

/// A client of a quorum. Its nodes cannot notify, unless the test sets `on_track`.
fn quorum() -> Fixture {
    let mut store = Scripted::default();
    store.free_servers = Some(MAJORITY);
    let f = with_store(store);
    *f.store.queue_mode.lock() = Some(QueueMode::None);
    f
}

impl Fixture {
    fn contention(&self) -> &Contention {
        self.acquirer.contention.as_ref().unwrap()
    }

    fn answer_each(&self, replies: impl IntoIterator<Item = Reply>) {
        for reply in replies {
            self.answer(move |_| Ok(reply));
        }
    }

    fn last_wait(&self) -> WaitSoFar {
        self.contention().lock_record(&key()).last_wait
    }

    fn attempts(&self) -> usize {
        self.store.asked.lock().len()
    }

    /// Another client wants the key that this client has just released. Its attempts have taken 10 ms, so it leaves the
    /// next turn to the other client for 20 to 40 ms.
    fn release_a_wanted_key(&self) -> MonotonicTime {
        let (contention, now) = (self.contention(), self.clock.now());
        for _ in 0..10 {
            contention.note_attempt(&key(), Duration::from_millis(10));
        }
        contention.note_other_client(&key(), now);
        contention.note_release(&key(), now);
        now
    }
}

fn split(may_be_taken: bool) -> Reply {
    Reply::SplitVote {
        expires_in: Duration::from_millis(1),
        may_be_taken,
    }
}

fn taken() -> Reply {
    Reply::Contended {
        expires_in: Duration::from_millis(1),
        queued: None,
    }
}

#[test]
fn each_split_vote_is_a_missed_turn() {
    let f = quorum();
    f.answer_each([split(false), split(false), split(true), Reply::granted(7)]);
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let wait = f.last_wait();
    assert_eq!((wait.missed_turns, wait.split_votes), (3, 3));
    assert_eq!(f.tracked(), 1, "a key that may be taken is watched");
}

#[test]
fn attempts_set_the_unit_of_pauses() {
    let (f, slow) = (quorum(), Duration::from_millis(5));
    f.answer_after(slow, Ok(taken()));
    assert!(f.acquire(Until::Now).unwrap().is_none());
    assert!(f.contention().round_trip(&key()) >= slow);
    // A failed attempt does not count: it may end at once.
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Denied)));
    f.acquire(Until::Now).unwrap_err();
    assert!(f.contention().round_trip(&key()) >= slow);
}

#[test]
fn a_refusal_ends_a_series_of_split_votes() {
    let f = quorum();
    f.answer_each([split(false), split(false), taken(), split(false)]);
    f.answer_each([Reply::granted(7)]);
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    assert_eq!(f.last_wait().split_votes, 1);
}

#[test]
fn try_lock_asks_four_times() {
    let f = quorum();
    f.answer_each((0..10).map(|_| split(false)));
    assert!(f.acquire(Until::Now).unwrap().is_none());
    assert_eq!(f.attempts(), 4);
    let f = quorum();
    f.answer_each([split(false), split(true)]);
    assert!(f.acquire(Until::Now).unwrap().is_none());
    assert_eq!(f.attempts(), 2, "the lock may be taken");
    let f = quorum();
    f.answer_each([split(false), Reply::granted(7)]);
    assert!(f.acquire(Until::Now).unwrap().is_some());
}

/// A waiter that has missed fewer turns than others leaves an expired key to them, too.
#[test]
fn a_waiter_pauses_after_an_expiry() {
    let f = quorum();
    for n in 0..40 {
        f.contention().note_turn(&key(), turn(n), f.clock.now());
    }
    *f.store.on_track.lock() = Some(Box::new(|| true));
    let asked_at = Arc::new(Mutex::new(Vec::new()));
    for reply in [taken(), Reply::granted(7)] {
        let (asked_at, clock) = (Arc::clone(&asked_at), f.clock.clone());
        f.answer(move |_| {
            asked_at.lock().push(clock.now());
            Ok(reply)
        });
    }
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let asked_at = asked_at.lock();
    // It has missed one of 32 turns, and pauses for 0.5 ms for each other one.
    let between = asked_at[1].since(asked_at[0]);
    assert!(
        between >= Duration::from_micros(1_000 + 31 * 500),
        "{between:?}"
    );
}

/// The times between the attempts of a waiter, after it has noticed `releases` releases: `polls` attempts without one.
/// Each of these takes `long`. The n-th read finds the turn that `turn` returns for n.
fn between_polls(
    releases: usize,
    polls: usize,
    long: Duration,
    turn: impl Fn(usize) -> Turn + Send + 'static,
) -> Vec<Duration> {
    let f = quorum();
    let (queues, mut watches) = (Arc::clone(&f.queues), 0);
    *f.store.on_track.lock() = Some(Box::new(move || {
        watches += 1;
        queues.note_turn(&key(), turn(watches));
        let exists = if watches <= releases {
            &[true, false][..]
        } else {
            &[]
        };
        for exists in exists {
            for node in [0, 1] {
                queues.note_read(&key(), ServerId(node), *exists, MAJORITY);
            }
        }
        true
    }));
    let asked_at = Arc::new(Mutex::new(Vec::new()));
    let taken = (0..releases + polls).map(|_| contended(false));
    for (n, reply) in taken.chain([Reply::granted(7)]).enumerate() {
        let (asked_at, clock) = (Arc::clone(&asked_at), f.clock.clone());
        f.answer(move |_| {
            asked_at.lock().push(clock.now());
            if n >= releases {
                clock.advance(long);
            }
            Ok(reply)
        });
    }
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let asked_at = asked_at.lock();
    let polled = asked_at[releases..].windows(2);
    polled.map(|pair| pair[1].since(pair[0])).collect()
}

#[test]
fn a_starving_waiter_asks_often() {
    let polls = between_polls(12, 5, Duration::ZERO, |_| turn(0));
    assert_eq!(polls.len(), 5);
    // A busy machine may delay some of them. Others rely on notifications for half a second or more.
    let shortest = polls.iter().min().unwrap();
    assert!(*shortest < Duration::from_millis(250), "{polls:?}");
}

/// Renewals look like releases, but the reads find the same lease.
#[test]
fn a_waiter_behind_renewals_does_not_starve() {
    let long = turn(0);
    let polls = between_polls(12, 1, Duration::ZERO, move |_| long.clone());
    assert!(polls[0] >= Duration::from_millis(500), "{polls:?}");
}

/// A client has got the lock, and keeps it for long.
#[test]
fn a_starving_waiter_asks_less_often_in_long_turns() {
    let (long, three_s) = (turn(0), Duration::from_secs(3));
    let polls = between_polls(12, 3, three_s, move |watches| match watches {
        ..=12 => turn(0),
        _ => long.clone(),
    });
    // The second poll is the first one that knows of the turn, so the third one knows its age.
    let paused = polls[2] - three_s;
    assert!(paused >= Duration::from_millis(500), "{polls:?}");
}

/// A client whose attempts take 50 ms, and that has seen `rivals` others.
fn distant(rivals: usize) -> Fixture {
    let f = quorum();
    for n in 0..rivals {
        f.contention().note_turn(&key(), turn(n), f.clock.now());
    }
    for _ in 0..10 {
        f.contention().note_attempt(&key(), TRIP);
    }
    f
}

const TRIP: Duration = Duration::from_millis(50);

/// The pause takes 150 ms, and the attempt 50 ms. A read before the attempt would take another 50 ms.
#[test]
fn a_waiter_reads_nothing_just_before_its_deadline() {
    let f = distant(4);
    let queues = Arc::clone(&f.queues);
    *f.store.on_track.lock() = Some(Box::new(move || {
        for exists in [true, false] {
            for node in [0, 1] {
                queues.note_read(&key(), ServerId(node), exists, MAJORITY);
            }
        }
        true
    }));
    f.answer_after(TRIP, Ok(contended(false)));
    f.answer_after(TRIP, Ok(Reply::granted(7)));
    let deadline = f.clock.now().after(TRIP + Duration::from_millis(240));
    // On a busy machine, the deadline may come before the second attempt.
    let _ = f.acquire(Until::At(deadline)).unwrap();
    assert_eq!(f.tracked(), 1);
}

/// The waiter would leave the expired key to others for 250 ms.
#[test]
fn a_waiter_asks_for_an_expired_key_before_its_deadline() {
    let is_granted = || {
        let f = distant(32);
        *f.store.on_track.lock() = Some(Box::new(|| true));
        let expires_in = Duration::from_millis(100);
        let queued = None;
        f.answer_after(TRIP, Ok(Reply::Contended { expires_in, queued }));
        f.answer_after(TRIP, Ok(Reply::granted(7)));
        let deadline = f.clock.now().after(TRIP + Duration::from_millis(300));
        f.acquire(Until::At(deadline)).unwrap().is_some()
    };
    // A busy machine may delay some of them.
    assert!((0..20).any(|_| is_granted()));
}

#[test]
fn try_lock_leaves_no_turn() {
    let f = quorum();
    let released_at = f.release_a_wanted_key();
    f.answer_each([taken()]);
    assert!(f.acquire(Until::Now).unwrap().is_none());
    let left = f.contention().leave_turn(&key(), released_at);
    assert!(left.is_some(), "not used");
}

#[test]
fn a_left_turn_ends_before_the_deadline() {
    let asks_soon = || {
        let f = quorum();
        let released_at = f.release_a_wanted_key();
        f.answer_each([Reply::granted(7)]);
        // The attempt takes 10 ms.
        let deadline = released_at.after(Duration::from_millis(18));
        assert!(f.acquire(Until::At(deadline)).unwrap().is_some());
        f.clock.now().since(released_at) < Duration::from_millis(15)
    };
    // A busy machine may delay some of them.
    assert!((0..100).any(|_| asks_soon()));
}

#[test]
fn a_caller_behind_others_ends_at_its_deadline() {
    let (f, key) = (quorum(), key());
    let first = f.queues.join(&key, OPTIONS, None);
    f.answer_each([taken()]);
    let until = Until::At(f.clock.now().after(Duration::from_millis(1)));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| f.acquire(until));
        let started = std::time::Instant::now();
        while !second.is_finished() && started.elapsed() < COMMAND_TIMEOUT / 2 {
            std::thread::yield_now();
        }
        let has_ended = second.is_finished();
        drop(first);
        assert!(second.join().unwrap().unwrap().is_none());
        assert!(has_ended, "it waits for its own first attempt");
    });
}
