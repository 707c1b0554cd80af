//! A command on its way: who waits for it, how often it was tried, what is owed if it goes wrong.

use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::id::LeaseId;
use crate::key::Key;
use crate::store::call::{Outcome, Ticket};
use crate::store::command::{Command, Held, Reply};
use crate::store::delay::{DelayHook, Follower};

/// Half of the pause after the first failed attempt; doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// How often the pause doubles before it has reached [`LONGEST_PAUSE`].
pub(crate) const MOST_DOUBLINGS: u32 = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub(crate) struct Pending {
    pub(crate) command: Command,
    pub(crate) ticket: Option<Ticket>,
    /// How often it was tried in vain.
    pub(crate) attempts: u32,
    /// It undoes an acquire that may still arrive: repeated until found or until its ttl has passed.
    ghost: bool,
    /// Tells if a guard's release is late.
    follower: Option<Box<Follower>>,
}

/// What becomes of a command after its outcome.
pub(crate) enum Next {
    Finished,
    /// To be asked again as soon as there is a connection.
    Again(Pending),
    /// A release to be written again after a pause: Redis has refused it, or an acquire may arrive late.
    Later(Pending),
}

/// A release that waits to be written, and for which no caller waits.
pub(crate) struct Release {
    pub(crate) key: Key,
    pub(crate) lease: LeaseId,
    pub(crate) until: Moment,
    /// When to write it again, if it is a repeat.
    pub(crate) due: Moment,
    pub(crate) held: Option<Held>,
    /// The ttl with which it may be queued, in whole ms; nothing if a guard held it.
    pub(crate) queued: Option<Duration>,
    pub(crate) attempts: u32,
    pub(crate) is_ghost: bool,
    /// It was reported as late.
    pub(crate) began: bool,
}

impl Release {
    /// False for one that was tried and whose ttl has ended.
    pub(crate) fn is_wanted(&self, now: Moment) -> bool {
        self.attempts == 0 || now < self.until
    }

    /// The request to write now. `hook` is told what becomes of it.
    pub(crate) fn into_pending(self, hook: Option<&DelayHook>) -> Pending {
        let followed = hook.zip(self.held);
        let follower = followed.map(|(hook, held)| {
            Box::new(Follower::taken_up(hook, &self.key, held.token, self.began))
        });
        Pending {
            command: Command::Release {
                key: self.key,
                lease: self.lease,
                until: self.until,
                held: self.held,
                queued: self.queued,
            },
            ticket: None,
            attempts: self.attempts,
            ghost: self.is_ghost,
            follower,
        }
    }
}

impl Pending {
    pub(crate) fn new(command: Command, ticket: Option<Ticket>) -> Self {
        Self {
            command,
            ticket,
            attempts: 0,
            ghost: false,
            follower: None,
        }
    }

    /// Tells `hook` if this is the release of what a guard held, and it is late.
    pub(crate) fn followed(mut self, hook: Option<&DelayHook>) -> Self {
        if let (Some(hook), Command::Release { key, held, .. }) = (hook, &self.command) {
            self.follower = held.map(|held| Box::new(Follower::new(hook, key, held.token)));
        }
        self
    }

    /// False for what need not be written any more: its caller has left and nothing is owed.
    pub(crate) fn is_wanted(&self) -> bool {
        let waited_for = self.ticket.as_ref().is_some_and(Ticket::is_waited_for);
        match self.command {
            // Once at least: it costs little, and nobody can be sure about a ttl.
            Command::Release { until, .. } => {
                waited_for || self.attempts == 0 || Moment::now() < until
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
    pub(crate) fn into_release(self, due: Option<Moment>) -> Option<Release> {
        let Self {
            command,
            attempts,
            ghost,
            follower,
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
            is_ghost: ghost,
            began: follower.is_some_and(|follower| follower.lay_down()),
        })
    }

    pub(crate) fn is_flush(&self) -> bool {
        matches!(self.command, Command::Flush { .. })
    }

    /// Redis has answered.
    pub(crate) fn answered(mut self, outcome: Outcome) -> Next {
        let outcome = match (&self.command, outcome) {
            // Written before, on a connection that then broke: that first one may well have done
            // it. Either way the key is no longer this lease's.
            (
                Command::Release { .. } | Command::ForceUnlock { .. },
                Ok(Reply::Missing | Reply::Taken { .. }),
            ) if self.attempts > 0 && !self.ghost => Ok(Reply::Done),
            (_, outcome) => outcome,
        };
        match (&self.command, &outcome) {
            (Command::Release { until, .. }, Err(_)) if Moment::now() < *until => {
                self.deliver(outcome);
                self.attempts += 1;
                Next::Later(self)
            }
            (Command::Release { until, .. }, Ok(Reply::Missing | Reply::Taken { .. }))
                if self.ghost && Moment::now() < *until =>
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
                let undo = self.command.undo(Moment::now());
                undo.map_or(Next::Finished, |undo| Next::Again(Self::new(undo, None)))
            }
            _ => {
                let is_done = outcome.is_ok();
                self.deliver(outcome);
                if is_done && let Some(follower) = self.follower.take() {
                    follower.confirm();
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
                let undo = self.command.undo(Moment::now());
                self.deliver(Err(error.clone()));
                undo.map_or(Next::Finished, |undo| {
                    let mut ghost = Self::new(undo, None);
                    ghost.ghost = true;
                    Next::Again(ghost)
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
            Command::Release { until, .. } if Moment::now() < until => Next::Again(self),
            _ => Next::Finished,
        }
    }

    /// Hands the outcome to the caller; false if none waits. A release that fails, or is answered after its caller
    /// has left, is late.
    fn deliver(&mut self, outcome: Outcome) -> bool {
        let failed = match &self.follower {
            Some(_) => outcome.as_ref().err().cloned(),
            None => None,
        };
        let completed = self.ticket.take().map(|ticket| ticket.complete(outcome));
        let left = || Error::new(ErrorKind::Timeout, "no answer in time");
        if let Some(follower) = &mut self.follower {
            let late = failed.or_else(|| matches!(completed, Some(Err(_))).then(left));
            if let Some(error) = late {
                follower.delay(&error);
            }
        }
        matches!(completed, Some(Ok(())))
    }
}
