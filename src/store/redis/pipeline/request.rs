//! A command on its way: who waits for it, how often it was tried, what is unanswered if it goes wrong.

use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::store::command::{Command, Held, Reply};
use crate::store::late_release::{LateReleaseHook, ReleaseTracker};
use crate::store::redis::pipeline::caller::{Completion, Outcome};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Half of the pause after the first failed attempt; doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// How often the pause doubles before it has reached [`LONGEST_PAUSE`].
pub(crate) const MOST_DOUBLINGS: u32 = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub(crate) struct PendingRequest {
    pub(crate) command: Command,
    pub(crate) completion: Option<Completion>,
    /// How often it was tried in vain.
    pub(crate) attempts: u32,
    /// It undoes an acquire that may still arrive: repeated until found or until its ttl has passed.
    is_undo: bool,
    /// Tells if a guard's release is late.
    tracker: Option<Box<ReleaseTracker>>,
}

/// What becomes of a command after its outcome.
pub(crate) enum Next {
    Finished,
    /// To be asked again as soon as there is a connection.
    Again(PendingRequest),
    /// A release to be written again after a pause: Redis has refused it, or an acquire may arrive late.
    Later(PendingRequest),
}

/// A release that waits to be written, and for which no caller waits.
pub(crate) struct Release {
    pub(crate) key: Key,
    pub(crate) lease: LeaseId,
    pub(crate) until: MonotonicTime,
    /// When to write it again, if it is a repeat.
    pub(crate) due: MonotonicTime,
    pub(crate) held: Option<Held>,
    /// The ttl with which it may be queued, in whole ms; nothing if a guard held it.
    pub(crate) queued: Option<Duration>,
    pub(crate) attempts: u32,
    pub(crate) is_undo: bool,
    /// It was reported as late.
    pub(crate) began: bool,
}

impl Release {
    /// False for one that was tried and whose ttl has ended.
    pub(crate) fn is_wanted(&self, now: MonotonicTime) -> bool {
        self.attempts == 0 || now < self.until
    }

    /// The request to write now. `hook` is told what becomes of it.
    pub(crate) fn into_request(self, hook: Option<&LateReleaseHook>) -> PendingRequest {
        let tracked = hook.zip(self.held);
        let tracker = tracked.map(|(hook, held)| {
            Box::new(ReleaseTracker::resume(
                hook, &self.key, held.token, self.began,
            ))
        });
        PendingRequest {
            command: Command::Release {
                key: self.key,
                lease: self.lease,
                until: self.until,
                held: self.held,
                queued: self.queued,
            },
            completion: None,
            attempts: self.attempts,
            is_undo: self.is_undo,
            tracker,
        }
    }
}

impl PendingRequest {
    pub(crate) fn new(command: Command, completion: Option<Completion>) -> Self {
        Self {
            command,
            completion,
            attempts: 0,
            is_undo: false,
            tracker: None,
        }
    }

    /// Tells `hook` if this is the release of what a guard held, and it is late.
    pub(crate) fn tracked(mut self, hook: Option<&LateReleaseHook>) -> Self {
        if let (Some(hook), Command::Release { key, held, .. }) = (hook, &self.command) {
            self.tracker = held.map(|held| Box::new(ReleaseTracker::new(hook, key, held.token)));
        }
        self
    }

    /// False for what need not be written any more: its caller has left and nothing is unanswered.
    pub(crate) fn is_wanted(&self) -> bool {
        let waited_for = self
            .completion
            .as_ref()
            .is_some_and(Completion::is_waited_for);
        match self.command {
            // Once at least: it costs little, and nobody can be sure about a ttl.
            Command::Release { until, .. } => {
                waited_for || self.attempts == 0 || MonotonicTime::now() < until
            }
            _ => waited_for,
        }
    }

    /// How long to wait before it is tried again.
    pub(crate) fn pause(&self) -> Duration {
        let factor = 1 << self.attempts.min(MOST_DOUBLINGS);
        (FIRST_PAUSE * factor).min(LONGEST_PAUSE)
    }

    /// The release to write once no caller waits for it; nothing for other commands. `due`: when to write it again,
    /// if it is a repeat.
    pub(crate) fn into_release(self, due: Option<MonotonicTime>) -> Option<Release> {
        let Self {
            command,
            attempts,
            is_undo,
            tracker,
            ..
        } = self;
        let Command::Release {
            key,
            lease,
            until,
            held,
            queued,
        } = command
        else {
            return None;
        };
        Some(Release {
            key,
            lease,
            until,
            due: due.map_or(until, |due| due.min(until)),
            held,
            queued,
            attempts,
            is_undo,
            began: tracker.is_some_and(|tracker| tracker.suspend()),
        })
    }

    pub(crate) fn is_flush(&self) -> bool {
        matches!(self.command, Command::Flush { .. })
    }

    /// Redis has answered.
    pub(crate) fn answered(mut self, outcome: Outcome) -> Next {
        let outcome = match (&self.command, outcome) {
            // TransactionOutcome before, on a connection that then broke: that first one may well have done
            // it. Either way the key is no longer this lease's.
            (
                Command::Release { .. } | Command::ForceUnlock { .. },
                Ok(Reply::Missing | Reply::Taken { .. }),
            ) if self.attempts > 0 && !self.is_undo => Ok(Reply::Done),
            (_, outcome) => outcome,
        };
        match (&self.command, &outcome) {
            (Command::Release { until, .. }, Err(_)) if MonotonicTime::now() < *until => {
                self.deliver(outcome);
                self.attempts += 1;
                Next::Later(self)
            }
            (Command::Release { until, .. }, Ok(Reply::Missing | Reply::Taken { .. }))
                if self.is_undo && MonotonicTime::now() < *until =>
            {
                self.attempts += 1;
                Next::Later(self)
            }
            (
                Command::Acquire { .. } | Command::Adopt { .. },
                Ok(
                    Reply::Granted { .. }
                    | Reply::Adopted { .. }
                    | Reply::Contended {
                        queued: Some(_), ..
                    },
                ),
            ) => {
                if self.deliver(outcome) {
                    return Next::Finished;
                }
                // Granted, or queued, for a caller that has left.
                let undo = self.command.undo(MonotonicTime::now());
                undo.map_or(Next::Finished, |undo| Next::Again(Self::new(undo, None)))
            }
            _ => {
                let is_done = outcome.is_ok();
                self.deliver(outcome);
                if is_done && let Some(tracker) = self.tracker.take() {
                    tracker.confirm();
                }
                Next::Finished
            }
        }
    }

    /// It was written, and the connection broke before its answer came. `again` says that another
    /// connection may be tried at once.
    pub(crate) fn unanswered(mut self, error: &Error, again: bool) -> Next {
        let again = again && self.attempts == 0;
        self.attempts += 1;
        match &self.command {
            // The outcome is unknown: never repeated under its lease id.
            Command::Acquire { .. } | Command::Adopt { .. } => {
                let undo = self.command.undo(MonotonicTime::now());
                self.deliver(Err(error.clone()));
                undo.map_or(Next::Finished, |undo| {
                    let mut is_undo = Self::new(undo, None);
                    is_undo.is_undo = true;
                    Next::Again(is_undo)
                })
            }
            // Should the first one arrive after all, it must not undo what was written meanwhile.
            Command::Write { .. } => self.unsent(error),
            _ if again && self.is_wanted() => Next::Again(self),
            _ => self.unsent(error),
        }
    }

    /// It was not written, and will not be while its caller waits.
    pub(crate) fn unsent(mut self, error: &Error) -> Next {
        self.deliver(Err(error.clone()));
        self.attempts += 1;
        match self.command {
            Command::Release { until, .. } if MonotonicTime::now() < until => Next::Again(self),
            _ => Next::Finished,
        }
    }

    /// Hands the outcome to the caller; false if none waits. A release that fails, or is answered after its caller
    /// has left, is late.
    fn deliver(&mut self, outcome: Outcome) -> bool {
        let failed = match &self.tracker {
            Some(_) => outcome.as_ref().err().cloned(),
            None => None,
        };
        let completed = self
            .completion
            .take()
            .map(|completion| completion.complete(outcome));
        let left = || Error::new(ErrorKind::Timeout, "no answer in time");
        if let Some(tracker) = &mut self.tracker {
            let late = failed.or_else(|| matches!(completed, Some(Err(_))).then(left));
            if let Some(error) = late {
                tracker.report_late(&error);
            }
        }
        matches!(completed, Some(Ok(())))
    }
}
