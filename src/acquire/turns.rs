//! The policy without queues, on a quorum and beside another library: when a waiter asks again. Waiters watch the key
//! and take turns. Each waiter counts the turns that it has missed, and pauses according to the client's records of the
//! [contention](self::contention).

pub mod contention;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::wait::{Call, LONGEST_TRUST, Pace, Place, Retry, Until};
use crate::config::key::Key;
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

use contention::{Contention, WaitSoFar};

/// The pause of a starving waiter while the current turn is young. As a turn gets older, the pause grows to half of the
/// turn's age. The pauses are random, so some attempts find the key free before other clients are notified.
const STARVING_POLL: Duration = Duration::from_millis(10);

/// The pauses before a waiter beside another library reads a key again that changes often, but stays taken. They double
/// until the waiter asks.
const FIRST_REREAD: Duration = Duration::from_millis(10);
const LONGEST_REREAD: Duration = Duration::from_millis(100);

/// A caller that does not wait stops after this many split votes.
const MAX_SPLIT_VOTES: u32 = 4;

/// The policy without queues.
pub struct Turns<'a> {
    call: Call,
    key: &'a Key,
    waiter: &'a WaiterGuard<'a>,
    contention: &'a Contention,
    phase: Phase,
    so_far: WaitSoFar,
    /// Whether `so_far` includes the current turn of another client. The turn ends once the key is free.
    is_turn_counted: bool,
    /// How many turns of other clients this wait has read.
    turns_read: usize,
    /// When this wait first read the current turn.
    turn_since: MonotonicTime,
    /// The pauses of [`Pace::nudged`].
    rereads: Backoff,
}

/// How a waiter spends the time between two attempts.
#[derive(Clone, Copy)]
enum Phase {
    /// The waiter watches the key until a majority of the servers has reported a release, or until this time.
    Watching(MonotonicTime),
    /// The waiter pauses until `until`, even if it is woken. With `reads_first`, it then watches the key.
    Pausing {
        until: MonotonicTime,
        reads_first: bool,
    },
}

impl<'a> Turns<'a> {
    pub fn new(
        call: Call,
        key: &'a Key,
        waiter: &'a WaiterGuard<'a>,
        contention: &'a Contention,
    ) -> Self {
        Self {
            call,
            key,
            waiter,
            contention,
            phase: Phase::Watching(call.started),
            so_far: WaitSoFar::default(),
            is_turn_counted: false,
            turns_read: 0,
            turn_since: call.started,
            rereads: Backoff::new(FIRST_REREAD, LONGEST_REREAD),
        }
    }

    /// Counts the current turn of another client as missed, once.
    fn count_turn(&mut self) {
        if !std::mem::replace(&mut self.is_turn_counted, true) {
            self.so_far.missed_turns += 1;
        }
    }

    /// Records the turn that the current watch has found. Called before the next watch, which forgets the turn.
    fn record_turn(&mut self, now: MonotonicTime) {
        let Some(turn) = self.waiter.take_turn() else {
            return;
        };
        if self.contention.record_turn(self.key, turn, now) {
            self.turns_read += 1;
            self.turn_since = now;
        }
    }

    /// The latest time at which an attempt can start and end before the deadline. `None` without a deadline.
    fn latest_attempt(&self) -> Option<MonotonicTime> {
        let Until::At(deadline) = self.call.until else {
            return None;
        };
        Some(deadline.before(self.contention.round_trip(self.key)))
    }

    /// Begins the pause before the next attempt. If the deadline is near, the pause ends one round trip before it, and
    /// the caller then makes this last attempt even after the deadline. If less than a round trip is left, the caller
    /// asks at once.
    fn start_pause(&mut self, now: MonotonicTime) -> Retry {
        self.record_turn(now);
        let pause = self.contention.choose_pause(self.key, self.so_far, now);
        let until = now.after(pause.time);
        let latest = self.latest_attempt();
        // If the caller reads the key first, the read takes another round trip.
        let read_until = until.after(self.contention.round_trip(self.key));
        self.phase = Phase::Pausing {
            until: latest.map_or(until, |latest| until.min(latest)),
            reads_first: pause.reads_first && latest.is_none_or(|latest| read_until <= latest),
        };
        Retry::Pause {
            owes_attempt: latest.is_some_and(|latest| until > latest && now < latest),
        }
    }

    /// Begins to watch the key on all servers. If the key is free, the first read wakes this waiter. `expires_at` is
    /// the time at which the lock of another client expires, or `None` if the key may be free.
    fn start_watching(&mut self, expires_at: Option<MonotonicTime>, now: MonotonicTime) -> Retry {
        self.record_turn(now);
        let poll = match self.contention.starves(self.key, self.turns_read, now) {
            true => STARVING_POLL
                .max(now.since(self.turn_since) / 2)
                .min(LONGEST_TRUST),
            false => LONGEST_TRUST,
        };
        let mut ask_at = now.after(jittered(poll));
        if let Some(expiry) = expires_at {
            // The waiters of an expired lock ask one after another, each before its deadline.
            let pause = self.contention.choose_pause(self.key, self.so_far, now);
            let in_turn = expiry.after(pause.time);
            let latest = self.latest_attempt();
            ask_at = ask_at.min(latest.map_or(in_turn, |at| in_turn.min(at.max(expiry))));
        }
        self.waiter.watch(expires_at.is_some());
        self.phase = Phase::Watching(ask_at);
        Retry::Track
    }
}

impl Pace for Turns<'_> {
    /// Whether the caller leaves the next turn to others, because this client has just released the key.
    fn leave_turn(&mut self, now: MonotonicTime) -> bool {
        if !self.call.waits() {
            return false;
        }
        let Some(until) = self.contention.leave_turn(self.key, now) else {
            return false;
        };
        let latest = self.latest_attempt();
        self.phase = Phase::Pausing {
            until: latest.map_or(until, |latest| until.min(latest)),
            reads_first: false,
        };
        true
    }

    fn taken(&mut self, _: Place, expires_at: MonotonicTime, now: MonotonicTime) -> Retry {
        self.contention.record_other_client(self.key, now);
        self.so_far.split_votes = 0;
        self.rereads.reset();
        self.count_turn();
        match self.call.waits() {
            true => self.start_watching(Some(expires_at), now),
            false => Retry::Poll,
        }
    }

    /// A caller that does not wait asks again after a split vote, [`MAX_SPLIT_VOTES`] times in all. If another client
    /// may have got the lock, it stops.
    fn split_vote(
        &mut self,
        may_be_taken: bool,
        expires_at: MonotonicTime,
        now: MonotonicTime,
    ) -> Retry {
        self.so_far.split_votes += 1;
        // The split vote is a missed turn. The turn of the client that now gets the key does not count again.
        self.so_far.missed_turns += 1;
        self.is_turn_counted = true;
        self.contention.record_other_client(self.key, now);
        if self.call.waits() {
            return match may_be_taken {
                true => self.start_watching(Some(expires_at), now),
                false => self.start_pause(now),
            };
        }
        let votes = self.so_far.split_votes;
        let pause = self.contention.choose_random_pause(self.key, votes, now);
        self.phase = Phase::Pausing {
            until: now.after(pause),
            reads_first: false,
        };
        let owes_attempt = self.call.has_time(now) && !may_be_taken && votes < MAX_SPLIT_VOTES;
        Retry::Pause { owes_attempt }
    }

    /// Too few servers can notify this client, so the caller polls.
    fn untracked(&self) -> Retry {
        Retry::Poll
    }

    fn wake_at(&self) -> MonotonicTime {
        match self.phase {
            Phase::Watching(until) | Phase::Pausing { until, .. } => until,
        }
    }

    fn woken(&mut self, now: MonotonicTime) -> Retry {
        match self.phase {
            Phase::Pausing { .. } => Retry::PAUSE,
            Phase::Watching(_) if self.waiter.was_released() => {
                // The turn of another client has ended, so the next turn counts again.
                self.count_turn();
                self.is_turn_counted = false;
                self.start_pause(now)
            }
            Phase::Watching(_) => Retry::Now,
        }
    }

    /// The key changes often, but stays taken. The waiter reads it again after a pause.
    fn nudged(&mut self, now: MonotonicTime) {
        if let Phase::Watching(ask_at) = self.phase {
            let until = now.after(jittered(self.rereads.next()));
            self.phase = Phase::Pausing {
                until: until.min(ask_at),
                reads_first: true,
            };
        }
    }

    fn slept(&mut self, now: MonotonicTime) -> Retry {
        match self.phase {
            _ if now < self.wake_at() => Retry::PAUSE,
            Phase::Pausing {
                reads_first: true, ..
            } => self.start_watching(None, now),
            _ => Retry::Now,
        }
    }
}
