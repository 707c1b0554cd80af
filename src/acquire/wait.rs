//! One caller's wait for a lock, as a state machine. Its inputs are the time, the caller's position, refusals and
//! wake-ups; its output is the caller's next step. The state machine does no I/O, does not sleep, and reads no clock:
//! `Caller::run` does all of this.

#[cfg(test)]
#[cfg(not(shuttle))]
pub mod tests;

use std::time::Duration;

use crate::acquire::outage::CurrentOutage;
use crate::acquire::queue::{QueuePosition, WakeReason};
use crate::command::QueuePlace;
use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

/// A waiter near the front of a queue asks again at least this often, in case a notification was lost.
pub const LONGEST_TRUST: Duration = Duration::from_secs(1);

/// The pauses of a caller that polls.
pub const FIRST_POLL: Duration = Duration::from_millis(1);
const LONGEST_POLL: Duration = Duration::from_millis(50);
pub const LONGEST_OUTAGE_POLL: Duration = Duration::from_millis(250);

/// If a caller may wait, each of its attempts has at least this time. So even a short wait does not end before a
/// healthy server replies.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// How long a caller waits while another holder has the lock.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// The caller does not wait.
    Now,
    At(MonotonicTime),
    Forever,
}

/// The time limits of one call.
#[derive(Clone, Copy)]
pub struct Call {
    pub until: Until,
    pub started: MonotonicTime,
    /// When the call ends; `None` if it has no limit. The attempts of a caller that does not wait share one command
    /// time-out: if another caller ends the first attempt early, the next attempt has only the rest.
    pub end: Option<MonotonicTime>,
    command_timeout: Duration,
    outage_timeout: Duration,
}

impl Call {
    pub fn new(
        until: Until,
        started: MonotonicTime,
        command_timeout: Duration,
        outage_timeout: Duration,
    ) -> Self {
        let end = match until {
            Until::Forever => None,
            Until::At(deadline) if deadline > started => Some(deadline),
            Until::At(_) | Until::Now => Some(started.after(command_timeout)),
        };
        Self {
            until,
            started,
            end,
            command_timeout,
            outage_timeout,
        }
    }

    /// Whether the caller waits while another holder has the lock.
    pub fn waits(&self) -> bool {
        !matches!(self.until, Until::Now)
    }

    /// Whether the call has not ended at `now`.
    pub fn has_time(&self, now: MonotonicTime) -> bool {
        self.end.is_none_or(|end| now < end)
    }

    /// The deadline of an attempt, if only the command time-out limits it.
    pub fn full_time(&self, asked_at: MonotonicTime) -> MonotonicTime {
        asked_at.after(self.command_timeout)
    }

    /// The deadline of an attempt.
    pub fn attempt_deadline(&self, asked_at: MonotonicTime) -> MonotonicTime {
        let full_time = self.full_time(asked_at);
        match (self.until, self.end) {
            (_, None) => full_time,
            (Until::At(at), Some(end)) if at > self.started => {
                full_time.min(end.max(asked_at.after(SHORTEST_ATTEMPT)))
            }
            (_, Some(end)) => full_time.min(end),
        }
    }

    /// The latest time at which a sleeping waiter wakes, to check the end of its call and the outage again.
    fn longest_sleep(&self, now: MonotonicTime, outage: Option<&CurrentOutage>) -> MonotonicTime {
        let timeout = self.outage_timeout.max(Duration::from_millis(10));
        let look_again = match outage {
            Some(outage) => outage.since.after(timeout).max(now.after(timeout / 10)),
            None => now.after(timeout.max(LONGEST_TRUST)),
        };
        self.end.map_or(look_again, |end| end.min(look_again))
    }

    /// Returns the result of a caller whose time is up, or `None` if the caller waits on.
    pub fn give_up(
        &self,
        now: MonotonicTime,
        outage: Option<&CurrentOutage>,
    ) -> Option<Result<(), Error>> {
        let give_up_at = match (self.until, outage) {
            (Until::Now, None) => return Some(Ok(())),
            (Until::Forever, None) => return None,
            (Until::Now, Some(outage)) if outage.error.is_lasting() => self.started,
            (Until::Now, Some(_)) => self.started.after(self.command_timeout),
            (Until::At(deadline), _) => deadline,
            (Until::Forever, Some(outage)) => {
                let since = outage.since.max(self.started);
                since.after(self.outage_timeout)
            }
        };
        if now < give_up_at {
            return None;
        }
        Some(outage.map_or(Ok(()), |outage| Err(self.error_of(outage, now))))
    }

    /// The error of a caller that could not get the lock because of an outage.
    fn error_of(&self, outage: &CurrentOutage, now: MonotonicTime) -> Error {
        if !self.waits() {
            return outage.error.clone();
        }
        let lasted = now.since(outage.since.max(self.started));
        let (kind, reason) = match outage.error.kind() {
            // The text of an error begins with its kind, and the new error has the same kind. So only the message is
            // copied.
            kind @ (ErrorKind::Unavailable | ErrorKind::NoQuorum) => {
                (kind, outage.error.message().to_owned())
            }
            _ => (ErrorKind::Unavailable, outage.error.to_string()),
        };
        let message = format!("for {:.1} s: {reason}", lasted.as_secs_f64());
        Error::new(kind, message).with_source_of(&outage.error)
    }
}

/// The next step of the caller.
#[derive(Debug)]
pub enum Step {
    /// Send an acquire and wait for its reply until `deadline`. Then report a refusal to [`Wait::refused`].
    Ask { deadline: MonotonicTime },
    /// Ask the servers to read the key and to report its changes. Then call [`Wait::tracked`].
    Track,
    /// Sleep until this time or a wake-up. Then call [`Wait::woken`].
    Sleep(MonotonicTime),
    /// Stop waiting, with an error during an outage.
    GiveUp(Result<(), Error>),
}

/// The result of an attempt that did not grant the lock.
#[derive(Debug)]
pub enum Refusal {
    /// Another lease holds the key, which expires after `expires_in` unless its holder renews it.
    Taken { expires_in: Duration, place: Place },
    /// No client got enough votes of a quorum. `may_be_taken`: a majority of the servers has refused, so another client
    /// may have the lock.
    SplitVote {
        expires_in: Duration,
        may_be_taken: bool,
    },
    /// The lease has lost its place in the queue in Redis.
    MissingEntry,
    /// Redis was unavailable.
    Unavailable(CurrentOutage),
    /// The caller's own deadline ended the attempt. Redis may only be slow, so this is no outage for other callers.
    Cut(CurrentOutage),
}

impl Refusal {
    /// The refusal of a key that the script has not tried to acquire, because another key of the set is taken.
    pub const NOT_ASKED: Self = Self::Taken {
        expires_in: Duration::ZERO,
        place: Place::None,
    };
}

/// The place of a refused caller in the queue in Redis.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// The caller is queued, and Redis will notify it of its grant.
    Notified(QueuePlace),
    /// The same as `Notified`, but shares hold the key or the caller asks for a share. Changes of such a key are not
    /// reported to the caller, since each renewal of a share is a change.
    Shared(QueuePlace),
    /// The caller is queued, but Redis will not notify it.
    Silent,
    /// The queue is full.
    Full,
    /// The caller did not ask for a place, or the store has no queues.
    None,
}

/// When the first waiter of a local queue asks Redis again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Retry {
    /// At once, because the waiter has not asked yet or was woken.
    Now,
    /// After a pause that doubles each time, because the waiter will not be notified.
    Poll,
    /// After [`Pace::wake_at`]. Before the pause, the servers read the key and begin to report its changes.
    Track,
    /// After [`Pace::wake_at`]. `owes_attempt`: the caller makes this attempt even if its time is up by then.
    Pause { owes_attempt: bool },
}

impl Retry {
    pub const PAUSE: Self = Self::Pause {
        owes_attempt: false,
    };
}

/// The policy that decides when a refused caller asks again: `Places` with queues in Redis, `Turns` without. It stores
/// the current pause.
pub trait Pace {
    /// Whether the caller leaves the next turn to other clients before it asks. If so, begins a pause.
    fn leave_turn(&mut self, _now: MonotonicTime) -> bool {
        false
    }

    /// Handles a refusal: another holder has the lock, for at least the time until `expires_at`.
    fn taken(&mut self, place: Place, expires_at: MonotonicTime, now: MonotonicTime) -> Retry;

    /// Handles a split vote of a quorum.
    fn split_vote(
        &mut self,
        may_be_taken: bool,
        expires_at: MonotonicTime,
        now: MonotonicTime,
    ) -> Retry;

    /// When the caller asks again if the servers cannot report changes of the key, because notifications are not
    /// connected.
    fn untracked(&self) -> Retry;

    /// The end of the current pause.
    fn wake_at(&self) -> MonotonicTime;

    /// Handles a wake-up of the waiter during the current pause.
    fn woken(&mut self, now: MonotonicTime) -> Retry;

    /// Handles a message that the waiter is now one of the first in the queue in Redis. Without queues, handles
    /// repeated changes of a key that stays taken.
    fn nudged(&mut self, _now: MonotonicTime) {}

    /// Handles the end of a sleep at `now`, which may be before the end of the current pause.
    fn slept(&mut self, now: MonotonicTime) -> Retry;
}

/// The pauses of a caller that polls. Each is twice as long as the one before.
#[derive(Clone, Copy)]
struct Polls {
    backoff: Backoff,
    longest: Duration,
    /// The longest pause, including its random part.
    bound: Duration,
}

impl Polls {
    fn new() -> Self {
        Self {
            backoff: Backoff::new(FIRST_POLL, LONGEST_POLL),
            longest: LONGEST_POLL,
            bound: Duration::MAX,
        }
    }

    /// Limits the pauses to the time until the lock expires, plus one millisecond.
    fn until_expiry(self, expires_in: Duration) -> Self {
        Self {
            longest: LONGEST_POLL,
            bound: expires_in + Duration::from_millis(1),
            ..self
        }
    }

    fn in_an_outage(self) -> Self {
        Self {
            longest: LONGEST_OUTAGE_POLL,
            bound: Duration::MAX,
            ..self
        }
    }

    fn next(&mut self) -> Duration {
        let pause = self.backoff.next_within(self.longest);
        jittered(pause).min(self.bound)
    }
}

/// The result of this caller's last attempt. While the caller may ask, this result counts instead of the outages that
/// other callers have found.
enum LastAttempt {
    None,
    Answered,
    Failed(CurrentOutage),
}

/// One caller's wait in the queue of its client.
pub struct Wait<P> {
    call: Call,
    pace: P,
    retry: Retry,
    polls: Polls,
    last_attempt: LastAttempt,
    /// Whether the caller makes one more attempt even if its time is up.
    is_attempt_owed: bool,
    /// Whether an outage was known at the last step.
    is_outage: bool,
}

impl<P: Pace> Wait<P> {
    /// A wait that begins at `joined_at`. The first waiter of a queue has one attempt, even if it has no time to wait.
    pub fn new(call: Call, pace: P, joined_at: MonotonicTime) -> Self {
        Self {
            call,
            pace,
            retry: Retry::Now,
            polls: Polls::new(),
            last_attempt: LastAttempt::None,
            is_attempt_owed: call.has_time(joined_at),
            is_outage: false,
        }
    }

    /// Handles the result of an attempt that the caller made before this wait.
    pub fn refused_before(&mut self, refusal: Refusal, now: MonotonicTime) {
        self.is_attempt_owed = false;
        self.refused(refusal, now);
    }

    /// Makes the next step an acquire, which confirms a grant that a message has reported.
    pub fn ask_now(&mut self) {
        self.retry = Retry::Now;
    }

    /// Chooses the next step of a caller at this position. `known` is the outage that callers of this client have
    /// found.
    pub fn next(
        &mut self,
        now: MonotonicTime,
        position: &QueuePosition,
        known: Option<CurrentOutage>,
    ) -> Step {
        if let Retry::Track = self.retry {
            return Step::Track;
        }
        let may_ask = match position {
            QueuePosition::Behind => false,
            // A caller that does not wait still asks: Redis may know that this client has lost the lock.
            QueuePosition::Held(_) => !self.call.waits(),
            QueuePosition::First | QueuePosition::Granted(..) => true,
        };
        // A waiter behind others is not owed an attempt.
        self.is_attempt_owed &= may_ask;
        // If the caller may ask and has asked before, its own last attempt decides. Otherwise the outages that other
        // callers have found decide.
        let outage = match &self.last_attempt {
            LastAttempt::Answered if may_ask => None,
            LastAttempt::Failed(outage) if may_ask => Some(outage.clone()),
            _ => known,
        };
        self.is_outage = outage.is_some();
        if !self.is_attempt_owed
            && let Some(given_up) = self.call.give_up(now, outage.as_ref())
        {
            return Step::GiveUp(given_up);
        }
        if may_ask && self.retry == Retry::Now {
            if !self.pace.leave_turn(now) {
                self.is_attempt_owed = false;
                let deadline = self.call.attempt_deadline(now);
                return Step::Ask { deadline };
            }
            self.retry = Retry::PAUSE;
        }
        let until = self.call.longest_sleep(now, outage.as_ref());
        Step::Sleep(until.min(match position {
            QueuePosition::Behind => until,
            QueuePosition::Held(remaining) => now.after(*remaining),
            QueuePosition::First | QueuePosition::Granted(..) => match self.retry {
                Retry::Now | Retry::Track => now,
                Retry::Poll => now.after(self.polls.next()),
                Retry::Pause { .. } => self.pace.wake_at(),
            },
        }))
    }

    /// Handles the result of an attempt that did not grant the lock.
    pub fn refused(&mut self, refusal: Refusal, now: MonotonicTime) {
        let expiry = |expires_in| now.after(expires_in + Duration::from_millis(1));
        let retry = match refusal {
            Refusal::Taken { expires_in, place } => {
                self.last_attempt = LastAttempt::Answered;
                self.polls = self.polls.until_expiry(expires_in);
                self.pace.taken(place, expiry(expires_in), now)
            }
            Refusal::SplitVote {
                expires_in,
                may_be_taken,
            } => {
                self.last_attempt = LastAttempt::Answered;
                if may_be_taken {
                    self.polls = self.polls.until_expiry(expires_in);
                }
                self.pace.split_vote(may_be_taken, expiry(expires_in), now)
            }
            Refusal::MissingEntry => {
                self.last_attempt = LastAttempt::Answered;
                Retry::Now
            }
            Refusal::Unavailable(mut outage) => {
                if let LastAttempt::Failed(before) = &self.last_attempt {
                    outage.since = outage.since.min(before.since);
                }
                self.last_attempt = LastAttempt::Failed(outage);
                self.polls = self.polls.in_an_outage();
                Retry::Poll
            }
            Refusal::Cut(outage) => {
                // If there was an earlier attempt, its result counts.
                if let LastAttempt::None = self.last_attempt {
                    self.last_attempt = LastAttempt::Failed(outage);
                }
                Retry::Poll
            }
        };
        self.set_retry(retry);
    }

    /// Handles the end of [`Step::Track`]. `is_tracked`: the servers now report changes of the key.
    pub fn tracked(&mut self, is_tracked: bool) {
        let retry = match is_tracked {
            true => Retry::PAUSE,
            false => self.pace.untracked(),
        };
        self.set_retry(retry);
    }

    /// Handles the end of a sleep.
    pub fn woken(&mut self, reason: WakeReason, now: MonotonicTime) {
        let is_pausing = matches!(self.retry, Retry::Pause { .. });
        if reason == WakeReason::Woken && !self.is_outage {
            self.polls = Polls::new();
        }
        let retry = match reason {
            WakeReason::Nudged if is_pausing => return self.pace.nudged(now),
            WakeReason::Nudged => return,
            WakeReason::Woken if is_pausing => self.pace.woken(now),
            WakeReason::TimedOut if is_pausing => self.pace.slept(now),
            WakeReason::Woken | WakeReason::TimedOut | WakeReason::Cancelled => Retry::Now,
        };
        self.set_retry(retry);
    }

    #[cfg(test)]
    pub fn pace(&self) -> &P {
        &self.pace
    }

    fn set_retry(&mut self, retry: Retry) {
        self.is_attempt_owed |= retry == Retry::Pause { owes_attempt: true };
        self.retry = retry;
    }
}
