//! When a waiter asks a quorum again. A quorum has no queue, so the waiters watch the key and take turns: each one counts
//! the turns that it has missed, and pauses according to the client's records of the [contention](self::contention).

pub mod contention;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::wait::{Call, LONGEST_TRUST, Pace, Place, Retry, Until};
use crate::config::key::Key;
use crate::util::backoff::jittered;
use crate::util::clock::MonotonicTime;

use contention::{Contention, WaitSoFar};

/// The pause of a waiter that starves before it asks again, if the current turn began a short time ago. During long
/// turns it has half of their age so far. The attempts come at random times, so some of them find the key free before
/// the clients that are notified sooner.
const STARVING_POLL: Duration = Duration::from_millis(10);

/// A caller that does not wait gives up after so many split votes.
const MAX_SPLIT_VOTES: u32 = 4;

/// The pauses of a waiter that takes turns with other clients of a quorum.
pub struct Turns<'a> {
    call: Call,
    key: &'a Key,
    waiter: &'a WaiterGuard<'a>,
    contention: &'a Contention,
    phase: Phase,
    so_far: WaitSoFar,
    /// `so_far` counts the current turn of another client as missed. The turn ends once the key is free.
    is_turn_counted: bool,
    /// How many new turns of others were read in this wait.
    turns_read: usize,
    /// When the last of them was read for the first time.
    turn_since: MonotonicTime,
}

/// How a waiter waits between two attempts.
#[derive(Clone, Copy)]
enum Phase {
    /// Until a majority of the servers has reported a release, or until this time.
    Watching(MonotonicTime),
    /// Until `until`; a wake-up does not shorten the pause. With `reads_first`, the waiter then watches the key.
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
        }
    }

    /// Counts the current turn of another client as missed, unless it is counted already.
    fn count_turn(&mut self) {
        if !std::mem::replace(&mut self.is_turn_counted, true) {
            self.so_far.missed_turns += 1;
        }
    }

    /// Records the turn that the reads of the current watch have found. Comes before the next watch, which forgets it.
    fn record_turn(&mut self, now: MonotonicTime) {
        let Some(turn) = self.waiter.take_turn() else {
            return;
        };
        if self.contention.note_turn(self.key, turn, now) {
            self.turns_read += 1;
            self.turn_since = now;
        }
    }

    /// The latest time for an attempt that ends before the deadline. `None` without a deadline.
    fn latest_attempt(&self) -> Option<MonotonicTime> {
        let Until::At(deadline) = self.call.until else {
            return None;
        };
        Some(deadline.before(self.contention.round_trip(self.key)))
    }

    /// Begins the pause before the next attempt. If it would end too late for an attempt before the deadline, it ends
    /// one round trip before the deadline, and the caller is owed this last attempt. If less than a round trip is left,
    /// the caller asks at once.
    fn start_pause(&mut self, now: MonotonicTime) -> Retry {
        self.record_turn(now);
        let pause = self.contention.choose_pause(self.key, self.so_far, now);
        let until = now.after(pause.time);
        let latest = self.latest_attempt();
        // A read takes a round trip, too.
        let read_until = until.after(self.contention.round_trip(self.key));
        self.phase = Phase::Pausing {
            until: latest.map_or(until, |latest| until.min(latest)),
            reads_first: pause.reads_first && latest.is_none_or(|latest| read_until <= latest),
        };
        Retry::Pause {
            owes_attempt: latest.is_some_and(|latest| until > latest && now < latest),
        }
    }

    /// Begins to watch the key on all servers. `expires_at`: when the lock of another client expires, or `None` if the
    /// key may be free. If the key is free, the read wakes this waiter.
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
            // The waiters of an expired lock ask one after another, but before their deadlines.
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
    /// True if this client has just released the key, and the caller waits.
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
        self.contention.note_other_client(self.key, now);
        self.so_far.split_votes = 0;
        self.count_turn();
        match self.call.waits() {
            true => self.start_watching(Some(expires_at), now),
            false => Retry::Poll,
        }
    }

    /// A caller that does not wait asks again, [`MAX_SPLIT_VOTES`] times in all, unless the lock may be taken.
    fn split_vote(
        &mut self,
        may_be_taken: bool,
        expires_at: MonotonicTime,
        now: MonotonicTime,
    ) -> Retry {
        self.so_far.split_votes += 1;
        // The turn of the client that gets the key now does not count again.
        self.so_far.missed_turns += 1;
        self.is_turn_counted = true;
        self.contention.note_other_client(self.key, now);
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

    /// Too few servers can notify, so the caller polls.
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
                // The turn of another client has ended. The next one counts again.
                self.count_turn();
                self.is_turn_counted = false;
                self.start_pause(now)
            }
            Phase::Watching(_) => Retry::Now,
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
