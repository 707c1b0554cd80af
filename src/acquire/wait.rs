//! One caller's wait for a lock, as a state machine. It gets the time, the caller's position, refusals and wake-ups, and
//! returns the caller's next step. It does no I/O, does not sleep, and reads no clock: `Caller::run` drives it.

#[cfg(test)]
#[cfg(not(shuttle))]
pub mod tests;

use std::time::Duration;

use crate::acquire::outage::CurrentOutage;
use crate::acquire::queue::{QueuePosition, WakeReason};
use crate::command::Queued;
use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

/// The longest time for which a waiter relies on notifications before it asks again, if few waiters come first. This
/// bounds the delay after a lost notification.
pub const LONGEST_TRUST: Duration = Duration::from_secs(1);

/// The pauses of a caller that polls.
pub const FIRST_POLL: Duration = Duration::from_millis(1);
const LONGEST_POLL: Duration = Duration::from_millis(50);
pub const LONGEST_OUTAGE_POLL: Duration = Duration::from_millis(250);

/// An attempt has at least this time if its caller has time to wait, so that a short wait does not end before a healthy
/// server replies.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// How long to wait while another holder has the lock.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// Not at all.
    Now,
    At(MonotonicTime),
    Forever,
}

/// The time limits of one call.
#[derive(Clone, Copy)]
pub struct Call {
    pub until: Until,
    pub started: MonotonicTime,
    /// `None` if the call waits without a limit. A caller without time to wait has one command time-out for all of its
    /// attempts: another caller may end the first attempt early, and then a second one must not begin a new time-out.
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

    /// Whether the end of the call is after `now`.
    pub fn has_time(&self, now: MonotonicTime) -> bool {
        self.end.is_none_or(|end| now < end)
    }

    /// The deadline of an attempt that no other limit shortens.
    pub fn full_time(&self, asked_at: MonotonicTime) -> MonotonicTime {
        asked_at.after(self.command_timeout)
    }

    /// The deadline of an attempt.
    fn attempt_deadline(&self, asked_at: MonotonicTime) -> MonotonicTime {
        let full_time = self.full_time(asked_at);
        match (self.until, self.end) {
            (_, None) => full_time,
            (Until::At(at), Some(end)) if at > self.started => {
                full_time.min(end.max(asked_at.after(SHORTEST_ATTEMPT)))
            }
            (_, Some(end)) => full_time.min(end),
        }
    }

    /// The latest time at which a waiter checks the end of its call and the outage again.
    fn longest_sleep(&self, now: MonotonicTime, outage: Option<&CurrentOutage>) -> MonotonicTime {
        let timeout = self.outage_timeout.max(Duration::from_millis(10));
        let look_again = match outage {
            Some(outage) => outage.since.after(timeout).max(now.after(timeout / 10)),
            None => now.after(timeout.max(LONGEST_TRUST)),
        };
        self.end.map_or(look_again, |end| end.min(look_again))
    }

    /// Returns the result for a caller that has waited long enough, or `None` if the caller has to wait on.
    fn give_up(
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

    /// The error for a caller that an outage has kept from the lock.
    fn error_of(&self, outage: &CurrentOutage, now: MonotonicTime) -> Error {
        if !self.waits() {
            return outage.error.clone();
        }
        let lasted = now.since(outage.since.max(self.started));
        let (kind, reason) = match outage.error.kind() {
            // The new error has this kind, so its text would say it twice.
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
    /// Sends an acquire and waits for its reply until `deadline`, then reports a refusal to [`Wait::refused`].
    Ask { deadline: MonotonicTime },
    /// Asks the servers to read the key and to report its changes, then calls [`Wait::tracked`].
    Track,
    /// Sleeps until this time or a wake-up, then calls [`Wait::woken`].
    Sleep(MonotonicTime),
    /// Stops waiting: with an error during an outage, otherwise without one.
    GiveUp(Result<(), Error>),
}

/// Why an attempt did not grant the lock.
#[derive(Debug)]
pub enum Refusal {
    /// Another holder has the lock, for `expires_in` at least.
    Taken { expires_in: Duration, place: Place },
    /// No client got enough votes of a quorum. `may_be_taken`: the servers that have not voted can have granted the lock
    /// to another client.
    SplitVote {
        expires_in: Duration,
        may_be_taken: bool,
    },
    /// The lease was queued in Redis, and is missing there.
    MissingEntry,
    /// Redis was unavailable.
    Unavailable(CurrentOutage),
    /// The caller's own deadline ended the attempt. The reply may take longer, so this is an outage for this caller only.
    Cut(CurrentOutage),
}

/// The place of a refused caller in the queue in Redis.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// The caller is queued and will be notified of its grant.
    Notified(Queued),
    /// The caller is queued and will not be notified.
    Silent,
    /// The queue is full.
    Full,
    /// The caller did not ask for a place, or the store has no queues.
    None,
}

/// When the first waiter of a queue asks Redis again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Retry {
    /// At once: the waiter has not asked yet, or was woken.
    Now,
    /// After a pause that doubles: the waiter will not be notified.
    Poll,
    /// After [`Pace::wake_at`]. First the servers read the key and begin to report its changes.
    Track,
    /// After [`Pace::wake_at`]. `owes_attempt`: the caller has another attempt, even if its time is up by then.
    Pause { owes_attempt: bool },
}

impl Retry {
    pub const PAUSE: Self = Self::Pause {
        owes_attempt: false,
    };
}

/// The policy that decides when a refused caller asks again: `Places` on servers with queues, `Turns` on a quorum. It
/// remembers the pause that it has begun.
pub trait Pace {
    /// Whether the caller leaves the lock to others before it asks. If so, begins the pause.
    fn leave_turn(&mut self, _now: MonotonicTime) -> bool {
        false
    }

    /// Another holder has the lock, until `expires_at` at least.
    fn taken(&mut self, place: Place, expires_at: MonotonicTime, now: MonotonicTime) -> Retry;

    /// Votes were split. Happens on a quorum only.
    fn split_vote(
        &mut self,
        may_be_taken: bool,
        expires_at: MonotonicTime,
        now: MonotonicTime,
    ) -> Retry;

    /// Returns what a caller does that cannot track the key, as notifications are not connected.
    fn untracked(&self) -> Retry;

    /// The end of the current pause.
    fn wake_at(&self) -> MonotonicTime;

    /// The waiter was woken in the current pause.
    fn woken(&mut self, now: MonotonicTime) -> Retry;

    /// A message reported that the waiter is among the first in the queue in Redis.
    fn nudged(&mut self, _now: MonotonicTime) {}

    /// The waiter slept in the current pause until `now`, which may be before the end of the pause.
    fn slept(&mut self, now: MonotonicTime) -> Retry;
}

/// The pauses of a caller that polls.
#[derive(Clone, Copy)]
struct Polls {
    backoff: Backoff,
    longest: Duration,
    /// No pause is longer than this, in spite of jitter.
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

/// The result of this caller's own last attempt. It counts more than the outage that other callers have found.
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
    /// The caller does not give up before the next attempt, even if the time is up.
    is_attempt_owed: bool,
    /// The last step was chosen during an outage.
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

    /// The caller asks at once, since it has to confirm a grant that was reported to it.
    pub fn ask_now(&mut self) {
        self.retry = Retry::Now;
    }

    /// Chooses the next step of a caller at this position. `known` is the outage that callers of this client have found.
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
            // A caller that does not wait still asks Redis, which may know of a loss that this client does not know of
            // yet.
            QueuePosition::Held(_) => !self.call.waits(),
            QueuePosition::First | QueuePosition::Granted(..) => true,
        };
        // A waiter behind others is owed none.
        self.is_attempt_owed &= may_ask;
        // The own last attempt of a caller that may ask decides; otherwise the attempts of other callers do.
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
                // If an earlier attempt has found that the lock is taken, it is taken for this caller.
                if let LastAttempt::None = self.last_attempt {
                    self.last_attempt = LastAttempt::Failed(outage);
                }
                Retry::Poll
            }
        };
        self.set_retry(retry);
    }

    /// The servers report changes of the key from now on, or cannot do so.
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
