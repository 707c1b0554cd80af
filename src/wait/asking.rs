//! One attempt to be granted a lock: what is asked of Redis, and what its answer means.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::id::LeaseId;
use crate::lease::{Check, Lease, Terms};
use crate::store::{Command, Grant, Queued, Reply, Standing};
use crate::wait::local::{Claim, Claimed};
use crate::wait::{Until, Wait, Waits, Wanted};

pub(super) enum Attempt {
    Granted(Arc<Lease>),
    /// Somebody has it, for so long at least if they do not let go.
    Contended {
        expires_in: Duration,
        place: QueuePlace,
    },
    /// It was queued, and is no longer.
    FellOut,
    /// The caller's own deadline came before an answer: nothing was learnt.
    OutOfTime,
    /// Worth another try: Redis could not be asked, or gave no answer, from then on.
    Failed {
        since: Moment,
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

impl Waits {
    /// Asks Redis once: for what is queued already, or under a new lease id.
    pub(super) fn attempt(&self, wait: &Wait<'_>, asked_at: Moment) -> Result<Attempt, Error> {
        let Wanted { key, options, .. } = wait.wanted;
        let (lease, standing) = self.stand(wait, asked_at);
        let stood = matches!(standing, Standing::Kept { .. });
        let ttl = options.first_ttl();
        let command = Command::Acquire {
            key: key.clone(),
            lease,
            ttl,
            standing,
        };
        // An attempt has its full time, unless the caller knows already that somebody has the lock:
        // then it does not outlast the caller.
        let mut deadline = asked_at.after(self.command_timeout);
        if let (Until::At(at), Some(None)) = (wait.until, &wait.met) {
            deadline = deadline.min(at);
        }
        let hearing = self.store.hearing();
        let outcome = self.store.ask(command, deadline);
        let is_lost = stood && matches!(outcome, Ok(Reply::Contended { queued: None, .. }));
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
            self.queues.disclaim(key, lease);
        }
        match outcome {
            Ok(Reply::Granted { token }) => {
                let terms = self.terms(wait.wanted, lease, token, asked_at);
                self.enter_at_once(wait, terms, stood)
            }
            Ok(Reply::Contended { expires_in, queued }) => {
                let place = match queued {
                    Some(queued) => {
                        let notified =
                            wait.place
                                .note_queued(lease, queued.since, standing, hearing);
                        if notified.is_none() {
                            // The client was shut down meanwhile, or all waiters have left the line.
                            self.give_back(key.clone(), lease, ttl);
                        }
                        QueuePlace::Joined {
                            queued,
                            notified: notified.unwrap_or(false),
                        }
                    }
                    None if stood => {
                        // A grant may have skipped it, because its subscription is on an old primary. Not if
                        // the subscription was away for a moment, or everything was flushed.
                        let relied_on = wait.place.fell_out(lease);
                        let is_told = self.store.standing() == Standing::Told;
                        if is_told && relied_on == Some(self.store.hearing()) {
                            self.store.suspect_connections();
                        }
                        return Ok(Attempt::FellOut);
                    }
                    None if standing == Standing::None => QueuePlace::None,
                    None => QueuePlace::Full,
                };
                Ok(Attempt::Contended { expires_in, place })
            }
            Ok(_) => unreachable!("a release's answer to an acquire"),
            Err(error) => {
                if stood {
                    // A refusal leaves it in the queue.
                    self.give_back(key.clone(), lease, ttl);
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
    fn stand(&self, wait: &Wait<'_>, asked_at: Moment) -> (LeaseId, Standing) {
        let fresh = self.supplies(&wait.wanted.key).ids.draw();
        if let Until::Now = wait.until {
            return (fresh, Standing::None);
        }
        let (lease, claimed, other) = wait.place.claim(fresh, asked_at);
        if let Some(other) = other {
            let key = wait.wanted.key.clone();
            self.give_back(key, other.lease, other.options.first_ttl());
        }
        let standing = match (claimed, self.store.standing()) {
            (Claimed::Kept, standing) => Standing::Kept {
                notified: standing == Standing::Told,
            },
            (Claimed::Again { since }, standing @ (Standing::Told | Standing::Polling)) => {
                let polls = standing.polls();
                Standing::Again { since, polls }
            }
            (_, standing) => standing,
        };
        (lease, standing)
    }

    /// Takes what Redis granted by its answer.
    fn enter_at_once(&self, wait: &Wait<'_>, terms: Terms, stood: bool) -> Result<Attempt, Error> {
        match self.granted(terms, wait.wanted.check.clone(), stood) {
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
        claim: &Claim,
        grant: Grant,
        now: Moment,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let options = wait.wanted.options;
        let whole_ttl_promised = options.renew_every.is_none() || options.max_hold.is_some();
        let spent = now.since(claim.asked_at);
        let is_short = grant.to_confirm || spent > options.ttl / 3;
        let is_believed = claim.is_plausible(grant, now);
        if whole_ttl_promised || claim.options != options || is_short || !is_believed {
            return Ok(None);
        }
        let terms = self.terms(wait.wanted, claim.lease, grant.token, claim.asked_at);
        match self.granted(terms, wait.wanted.check.clone(), true) {
            Ok(lease) => Ok(Some(lease)),
            Err(late) if late.is_unavailable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A lease on these terms, for whose key others may be queued in Redis. Given back if it came
    /// too late: `Timeout`; or if the client is shut down.
    pub(super) fn granted(
        &self,
        terms: Terms,
        check: Option<Check>,
        others_queued: bool,
    ) -> Result<Arc<Lease>, Error> {
        let (key, id, ttl) = (terms.key.clone(), terms.id, terms.ttl());
        let since = terms.since;
        let lease = Lease::new(terms, Arc::clone(&self.courier), check);
        let lease = Arc::new(lease.with_others_queued(others_queued));
        // Nobody is told of the loss of a lock that nobody had.
        if lease.live_for(since).is_none() {
            self.give_back(key, id, ttl);
            let message = format!("the grant came later than its ttl of {ttl:?} allows");
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        if !self.watchdog.watch(&lease) {
            self.give_back(key, id, ttl);
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(lease)
    }

    /// The terms of a grant that was asked for at `asked_at` or later.
    fn terms(&self, wanted: &Wanted, lease: LeaseId, token: u64, asked_at: Moment) -> Terms {
        let (key, now) = (wanted.key.clone(), self.watchdog.now());
        let options = self.supplies(&key).options.share(wanted.options);
        Terms {
            key,
            id: lease,
            token,
            options,
            asked_at,
            since: now,
        }
    }
}
