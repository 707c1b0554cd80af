//! The turns of one waiter of a quorum of three servers. The tests set each time, reply and report.

use super::*;
use crate::acquire::queue::{LocalQueues, WakeReason};
use crate::acquire::tests::turn;
use crate::acquire::wait::Refusal;
use crate::acquire::wait::tests::{Machine, call, ms, taken};
use crate::lease::Options;
use crate::store::{ServerId, Turn};
use crate::util::clock::Clock;

const MAJORITY: usize = 2;
/// The shortest unit of pauses.
const UNIT: Duration = Duration::from_micros(500);
const SECOND: Duration = Duration::from_secs(1);

/// A client whose attempts take 0.5 ms or less, except in tests that set another time.
struct Client {
    queues: LocalQueues,
    key: Key,
    contention: Contention,
    start: MonotonicTime,
}

impl Client {
    /// A client that has seen `rivals` other clients.
    fn new(rivals: usize) -> Self {
        let client = Self {
            queues: LocalQueues::new(Clock::default()),
            key: Key::new("", "k", 16).unwrap(),
            contention: Contention::default(),
            start: MonotonicTime::now(),
        };
        for n in 0..rivals {
            client
                .contention
                .record_turn(&client.key, turn(n), client.start);
        }
        client
    }

    /// A client whose attempts take `round_trip`.
    fn distant(rivals: usize, round_trip: Duration) -> Self {
        let client = Self::new(rivals);
        for _ in 0..10 {
            client.contention.record_attempt(&client.key, round_trip);
        }
        client
    }

    /// Runs `test` with the client's first waiter.
    fn wait(&self, until: Until, test: impl FnOnce(Machine<Turns<'_>>)) {
        let waiter = self.queues.join(&self.key, Options::USUAL, None);
        let call = call(until, self.start);
        let turns = Turns::new(call, &self.key, &waiter, &self.contention);
        test(Machine::new(call, turns));
    }

    fn read(&self, exists: bool) {
        for server in [ServerId(0), ServerId(1)] {
            self.queues.record_read(&self.key, server, exists, MAJORITY);
        }
    }

    /// A majority of the servers reports that `turn` holds the key, and then that the key is free.
    fn end_turn(&self, it: &mut Machine<Turns<'_>>, turn: Turn) {
        self.queues.record_turn(&self.key, turn);
        self.read(true);
        self.read(false);
        it.wake(WakeReason::Woken);
    }
}

fn refused() -> Refusal {
    taken(30 * SECOND, Place::None)
}

fn split(may_be_taken: bool) -> Refusal {
    Refusal::SplitVote {
        expires_in: ms(1),
        may_be_taken,
    }
}

fn so_far(it: &Machine<Turns<'_>>) -> (u32, u32) {
    let WaitSoFar {
        missed_turns,
        split_votes,
    } = it.wait.pace().so_far;
    (missed_turns, split_votes)
}

#[test]
fn each_turn_of_others_is_missed_once() {
    let client = Client::new(4);
    client.wait(Until::Forever, |mut it| {
        for _ in 0..3 {
            it.refuse(refused());
            it.track(true);
            it.wake(WakeReason::Woken);
        }
        it.refuse(refused());
        it.track(true);
        client.end_turn(&mut it, turn(9));
        assert_eq!(so_far(&it), (1, 0));
        let rivals = client.contention.lock_record(&client.key).rivals(it.now);
        assert_eq!(rivals, 4 + 1, "the reads have named the holder");
        let pause = it.sleeps_for();
        assert!(pause >= 4 * UNIT && pause <= 5 * UNIT, "{pause:?}");
        it.now = it.now.after(pause);
        it.wake(WakeReason::TimedOut);
        it.track(true);
        client.end_turn(&mut it, turn(0));
        assert_eq!(so_far(&it), (2, 0));
    });
}

#[test]
fn each_split_vote_is_a_missed_turn() {
    let client = Client::new(0);
    client.wait(Until::Forever, |mut it| {
        for _ in 0..2 {
            it.refuse(split(false));
            assert!(it.sleep() <= 2 * ms(1));
        }
        it.refuse(split(true));
        it.track(true);
        assert_eq!(so_far(&it), (3, 3));
        it.wake(WakeReason::Woken);
        it.refuse(refused());
        assert_eq!(so_far(&it), (3, 0), "a refusal ends the series");
    });
}

#[test]
fn try_lock_asks_four_times() {
    let client = Client::new(0);
    client.wait(Until::Now, |mut it| {
        for _ in 0..4 {
            it.refuse(split(false));
            it.sleep();
        }
        assert!(it.gives_up());
    });
    client.wait(Until::Now, |mut it| {
        it.refuse(split(false));
        it.sleep();
        it.refuse(split(true));
        assert!(it.gives_up(), "the lock may be taken");
    });
    client.wait(Until::Now, |mut it| {
        it.refuse(refused());
        assert!(it.gives_up());
    });
}

#[test]
fn a_waiter_polls_if_it_cannot_watch() {
    let client = Client::new(0);
    client.wait(Until::Forever, |mut it| {
        it.refuse(refused());
        it.track(false);
        assert!(it.sleep() <= ms(1));
        it.refuse(refused());
    });
}

/// The waiter pauses for 32 units of 0.5 ms.
#[test]
fn a_waiter_with_a_long_pause_reads_first() {
    let client = Client::new(32);
    client.wait(Until::Forever, |mut it| {
        it.refuse(refused());
        it.track(true);
        client.end_turn(&mut it, turn(0));
        it.now = it.now.after(ms(1));
        it.wake(WakeReason::Woken);
        assert!(it.sleep() >= 28 * UNIT, "a wake-up does not shorten it");
        it.track(true);
        client.read(false);
        it.wake(WakeReason::Woken);
        it.refuse(refused());
    });
}

#[test]
fn a_waiter_asks_a_last_time_before_its_deadline() {
    let client = Client::new(32);
    let until = Until::At(client.start.after(ms(10)));
    client.wait(until, |mut it| {
        it.refuse(refused());
        it.track(true);
        client.end_turn(&mut it, turn(0));
        assert_eq!(it.sleeps_for(), ms(10) - UNIT);
        it.now = client.start.after(ms(11));
        it.wake(WakeReason::TimedOut);
        it.refuse(refused());
        it.track(true);
        assert!(it.gives_up());
    });
}

/// A read would take a round trip, and then the attempt would come too late.
#[test]
fn a_waiter_reads_nothing_just_before_its_deadline() {
    let client = Client::distant(4, ms(50));
    let until = Until::At(client.start.after(ms(240)));
    client.wait(until, |mut it| {
        it.refuse(refused());
        it.track(true);
        client.end_turn(&mut it, turn(0));
        assert!(it.sleep() >= ms(150));
        it.refuse(refused());
    });
}

/// Waiters that have missed more turns ask first for an expired key.
#[test]
fn a_waiter_pauses_after_an_expiry() {
    let client = Client::new(40);
    client.wait(Until::Forever, |mut it| {
        it.refuse(taken(ms(1), Place::None));
        it.track(true);
        // The waiter has missed one of 32 turns.
        let slept = it.sleep();
        assert!(
            (31 * UNIT..=33 * UNIT).contains(&(slept - ms(2))),
            "{slept:?}"
        );
    });
}

/// Without a deadline, the waiter leaves the expired key to others for 250 ms.
#[test]
fn a_waiter_asks_for_an_expired_key_before_its_deadline() {
    let client = Client::distant(32, ms(50));
    let until = Until::At(client.start.after(ms(300)));
    client.wait(until, |mut it| {
        it.refuse(taken(ms(100), Place::None));
        it.track(true);
        assert_eq!(it.sleep(), ms(250));
        it.refuse(refused());
    });
}

/// The lengths of three watches of a waiter that has read twelve turns. The n-th read finds the n-th of `turns`; the
/// watches are 3 s apart.
fn polls_after(turns: impl Fn(usize) -> Turn) -> [Duration; 3] {
    let client = Client::new(0);
    let mut polls = [Duration::ZERO; 3];
    client.wait(Until::Forever, |mut it| {
        for n in 0..12 {
            it.refuse(refused());
            it.track(true);
            client.end_turn(&mut it, turns(n));
            it.sleep();
        }
        for (n, poll) in polls.iter_mut().enumerate() {
            it.refuse(refused());
            it.track(true);
            client.queues.record_turn(&client.key, turns(12 + n));
            *poll = it.sleep();
            it.now = it.now.after(3 * SECOND);
        }
    });
    polls
}

#[test]
fn a_starving_waiter_asks_often() {
    for poll in polls_after(|_| turn(0)) {
        assert!(poll <= ms(10), "{poll:?}");
    }
}

/// A renewal looks like a release, but the read finds the same lease.
#[test]
fn a_waiter_behind_renewals_does_not_starve() {
    let long = turn(0);
    for poll in polls_after(|_| long.clone()) {
        assert!(poll >= ms(500), "{poll:?}");
    }
}

/// Another client holds the lock for a long time.
#[test]
fn a_starving_waiter_asks_less_often_in_long_turns() {
    let long = turn(0);
    let polls = polls_after(|n| if n < 12 { turn(0) } else { long.clone() });
    // The second watch is the first to read this turn, so the third one knows the turn's age.
    assert!(polls[1] <= ms(10), "{polls:?}");
    assert!(polls[2] >= ms(500), "{polls:?}");
}

/// Another client wants the key that this client has just released. So this client pauses for 20 to 40 ms.
#[test]
fn a_waiter_leaves_a_turn_before_it_asks() {
    for (deadline, longest) in [(None, 40), (Some(18), 8)] {
        let client = Client::distant(0, ms(10));
        client
            .contention
            .record_other_client(&client.key, client.start);
        client.contention.record_release(&client.key, client.start);
        client.wait(Until::Now, |mut it| it.refuse(refused()));
        let until = deadline.map_or(Until::Forever, |at| Until::At(client.start.after(ms(at))));
        client.wait(until, |mut it| {
            let left = it.sleep();
            assert!((ms(8)..=ms(longest)).contains(&left), "{left:?}");
            it.refuse(refused());
        });
    }
}

/// Beside another library, the key changes often, but stays taken.
#[test]
fn a_waiter_pauses_before_it_reads_a_busy_key_again() {
    let client = Client::new(0);
    client.wait(Until::Forever, |mut it| {
        for _ in 0..2 {
            it.refuse(refused());
            for longest in [10, 20, 40, 80, 100, 100] {
                it.track(true);
                it.wake(WakeReason::Nudged);
                let pause = it.sleep();
                assert!(
                    (ms(longest / 2)..=ms(longest)).contains(&pause),
                    "{pause:?}"
                );
            }
            it.track(true);
            client.read(false);
            // The waiter asks at once.
            it.wake(WakeReason::Woken);
        }
    });
}
