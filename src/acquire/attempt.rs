//! One attempt to be granted a lock: what is asked of Redis, and what its answer means.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::{EntryKind, QueueEntry};
use crate::acquire::{Acquirer, LockRequest, Until, Wait};
use crate::error::{Error, ErrorKind};
use crate::lease::{Check, Grant, Lease};
use crate::store::{Command, GrantMessage, QueueMode, Queued, Reply};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

pub(super) enum Attempt {
    Granted(Arc<Lease>),
    /// Somebody has it, for so long at least if they do not let go.
    Contended {
        expires_in: Duration,
        place: QueuePlace,
    },
    /// It was queued, and is no longer.
    NotQueued,
    /// The caller's own deadline came before an answer: nothing was learnt.
    OutOfTime,
    /// Worth another try: Redis could not be asked, or gave no answer, from then on.
    Failed {
        since: MonotonicTime,
        error: Error,
    },
}

/// Where a caller is in the queue of a lock that is taken.
pub(super) enum QueuePlace {
    Joined {
        queued: Queued,
        notified: bool,
    },
    /// It asked to join, and there was no room.
    Full,
    /// It did not ask to join.
    None,
}

impl Acquirer {
    /// Asks Redis once: for what is queued already, or under a new lease id.
    pub(super) fn attempt(
        &self,
        wait: &Wait<'_>,
        asked_at: MonotonicTime,
    ) -> Result<Attempt, Error> {
        let LockRequest { key, options, .. } = wait.request;
        let (lease, queue_mode) = self.queue_mode_for(wait, asked_at);
        let was_queued = matches!(queue_mode, QueueMode::Existing { .. });
        let ttl = options.first_ttl();
        let command = Command::Acquire {
            key: key.clone(),
            lease,
            ttl,
            queue_mode,
        };
        // An attempt has its full time, unless the caller knows already that somebody has the lock:
        // then it does not outlast the caller.
        let mut deadline = asked_at.after(self.command_timeout);
        if let (Until::At(at), Some(None)) = (wait.until, &wait.met) {
            deadline = deadline.min(at);
        }
        let notification_epoch = self.store.notification_epoch();
        let outcome = self.store.ask(command, deadline);
        let is_lost = was_queued && matches!(outcome, Ok(Reply::Contended { queued: None, .. }));
        let is_claimed = matches!(
            outcome,
            Ok(Reply::Granted { .. }
                | Reply::Contended {
                    queued: Some(_),
                    ..
                })
        );
        if !is_claimed && !is_lost && !matches!(wait.until, Until::Now) {
            // It is not queued; or that is unknown, and the store releases it.
            self.queues.forget_entry(key, lease);
        }
        match outcome {
            Ok(Reply::Granted { token }) => {
                let grant = self.grant(wait.request, lease, token, asked_at);
                self.enter_at_once(wait, grant, was_queued)
            }
            Ok(Reply::Contended { expires_in, queued }) => {
                let place = match queued {
                    Some(queued) => {
                        let notified = wait.place.note_queued(
                            lease,
                            queued.since,
                            queue_mode,
                            notification_epoch,
                        );
                        if notified.is_none() {
                            // The client was shut down meanwhile, or all waiters have left the queue.
                            self.release_unheld(key.clone(), lease, ttl);
                        }
                        QueuePlace::Joined {
                            queued,
                            notified: notified.unwrap_or(false),
                        }
                    }
                    None if was_queued => {
                        // A grant may have skipped it, because its subscription is on an old primary. Not if
                        // the subscription was away for a moment, or everything was flushed.
                        let relied_on = wait.place.remove_missing_entry(lease);
                        let is_told = self.store.queue_mode() == QueueMode::Notified;
                        if is_told && relied_on == Some(self.store.notification_epoch()) {
                            self.store.suspect_connections();
                        }
                        return Ok(Attempt::NotQueued);
                    }
                    None if queue_mode == QueueMode::None => QueuePlace::None,
                    None => QueuePlace::Full,
                };
                Ok(Attempt::Contended { expires_in, place })
            }
            Ok(_) => unreachable!("a release's answer to an acquire"),
            Err(error) => {
                if was_queued {
                    // A refusal leaves it in the queue.
                    self.release_unheld(key.clone(), lease, ttl);
                }
                match error.kind() {
                    // The caller's own deadline was shorter than an answer takes.
                    ErrorKind::Timeout if deadline < asked_at.after(self.command_timeout) => {
                        Ok(Attempt::OutOfTime)
                    }
                    ErrorKind::Timeout | ErrorKind::Unavailable => Ok(Attempt::Failed {
                        since: asked_at,
                        error,
                    }),
                    _ => Err(error),
                }
            }
        }
    }

    /// Under which lease id to ask, and how to join the queue with it.
    fn queue_mode_for(&self, wait: &Wait<'_>, asked_at: MonotonicTime) -> (LeaseId, QueueMode) {
        let fresh = self.lease_pools(&wait.request.key).ids.next();
        if let Until::Now = wait.until {
            return (fresh, QueueMode::None);
        }
        let (lease, entry_kind, other) = wait.place.entry(fresh, asked_at);
        if let Some(other) = other {
            let key = wait.request.key.clone();
            self.release_unheld(key, other.lease, other.options.first_ttl());
        }
        let queue_mode = match (entry_kind, self.store.queue_mode()) {
            (EntryKind::Existing, queue_mode) => QueueMode::Existing {
                notified: queue_mode == QueueMode::Notified,
            },
            (
                EntryKind::Rejoin { since },
                queue_mode @ (QueueMode::Notified | QueueMode::Polling),
            ) => {
                let polls = queue_mode.polls();
                QueueMode::Rejoin { since, polls }
            }
            (_, queue_mode) => queue_mode,
        };
        (lease, queue_mode)
    }

    /// Takes what Redis granted by its answer.
    fn enter_at_once(
        &self,
        wait: &Wait<'_>,
        grant: Grant,
        was_queued: bool,
    ) -> Result<Attempt, Error> {
        match self.granted(grant, wait.request.check.clone(), was_queued) {
            Ok(lease) => Ok(Attempt::Granted(lease)),
            // Redis did answer. However long that took, no outage is known of before now.
            Err(late) if late.is_unavailable() => Ok(Attempt::Failed {
                since: self.watchdog.now(),
                error: late,
            }),
            Err(error) => Err(error),
        }
    }

    /// The lease of a grant that came as a message. Nothing if an acquire has to confirm the grant first: the message
    /// says so, its token is not plausible, others may know the lease id, the whole ttl is promised, or too little
    /// validity is left. (Validity counts from the first request, since the time of the grant is not known.)
    pub(super) fn enter(
        &self,
        wait: &Wait<'_>,
        entry: &QueueEntry,
        grant: GrantMessage,
        now: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let options = wait.request.options;
        let whole_ttl_promised = options.renew_every.is_none() || options.max_hold.is_some();
        let spent = now.since(entry.asked_at);
        let is_short = grant.to_confirm || spent > options.ttl / 3;
        let is_believed = entry.is_plausible(grant, now);
        if whole_ttl_promised || entry.options != options || is_short || !is_believed {
            return Ok(None);
        }
        let grant = self.grant(wait.request, entry.lease, grant.token, entry.asked_at);
        match self.granted(grant, wait.request.check.clone(), true) {
            Ok(lease) => Ok(Some(lease)),
            Err(late) if late.is_unavailable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A lease on these grant, for whose key others may be queued in Redis. Given back if it came
    /// too late: `Timeout`; or if the client is shut down.
    pub(super) fn granted(
        &self,
        grant: Grant,
        check: Option<Check>,
        others_queued: bool,
    ) -> Result<Arc<Lease>, Error> {
        let (key, id, ttl) = (grant.key.clone(), grant.id, grant.ttl());
        let since = grant.since;
        let lease = Lease::new(grant, Arc::clone(&self.callbacks), check);
        let lease = Arc::new(lease.with_others_queued(others_queued));
        // Nobody is told of the loss of a lock that nobody had.
        if lease.valid_for(since).is_none() {
            self.release_unheld(key, id, ttl);
            let message = format!("the grant came later than its ttl of {ttl:?} allows");
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        if !self.watchdog.watch(&lease) {
            self.release_unheld(key, id, ttl);
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(lease)
    }

    /// The grant of a grant that was asked for at `asked_at` or later.
    fn grant(
        &self,
        request: &LockRequest,
        lease: LeaseId,
        token: u64,
        asked_at: MonotonicTime,
    ) -> Grant {
        let (key, now) = (request.key.clone(), self.watchdog.now());
        let options = self.lease_pools(&key).options.share(request.options);
        Grant {
            key,
            id: lease,
            token,
            options,
            asked_at,
            since: now,
        }
    }
}
