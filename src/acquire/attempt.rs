//! One attempt of a caller to get the lock: chooses a lease id, sends the acquire, and handles the reply.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::outage::CurrentOutage;
use crate::acquire::queue::{EntryKind, QueueEntry};
use crate::acquire::wait::{Place, Refusal};
use crate::acquire::{Acquirer, Caller, LockRequest};
use crate::command::{
    Acquire, Command, GrantMessage, Link, Mode, Outcome, QueueMode, QueuePlace, Reply, joined_at,
};
use crate::config::MAX_TTL;
use crate::config::key::Key;
use crate::lease::{Check, Grant, Lease, Options};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// The result of an attempt.
pub enum Attempt {
    Granted(Arc<Lease>),
    Refused(Refusal),
}

/// An acquire that the caller has sent.
#[derive(Clone, Copy)]
pub struct SentAcquire {
    pub lease: LeaseId,
    queue_mode: QueueMode,
    pub asked_at: MonotonicTime,
    pub deadline: MonotonicTime,
    /// `Notifications::epoch` before the request.
    notification_epoch: u64,
}

impl SentAcquire {
    /// Whether an earlier request had added the lease to the queue in Redis.
    fn was_queued(&self) -> bool {
        matches!(self.queue_mode, QueueMode::Existing { .. })
    }
}

impl Caller<'_, '_> {
    /// Sends one acquire and waits for its reply, until `deadline` at the latest. Returns an error if another attempt
    /// could not succeed, either.
    pub fn attempt(
        &mut self,
        asked_at: MonotonicTime,
        deadline: MonotonicTime,
    ) -> Result<Attempt, Error> {
        let sent = self.choose(asked_at, deadline);
        // A caller that waits for its own key does not ask for the keys behind it.
        if !self.rest.is_empty() && (!sent.was_queued() || self.is_confirming) {
            return self.attempt_set(sent);
        }
        let command = self.command(sent, Link::Alone);
        let outcome = self.acquirer.store.execute_one(command, deadline);
        if let (Ok(_), Some(contention)) = (&outcome, &self.acquirer.contention) {
            let took = self.acquirer.watchdog.now().since(asked_at);
            contention.record_attempt(&self.request.key, took);
        }
        self.finish(sent, outcome)
    }

    /// Chooses a lease, and how to ask for it.
    pub fn choose(&self, asked_at: MonotonicTime, deadline: MonotonicTime) -> SentAcquire {
        let (lease, queue_mode) = self.choose_lease(asked_at);
        SentAcquire {
            lease,
            queue_mode,
            asked_at,
            deadline,
            notification_epoch: self.acquirer.notifications.epoch(&self.request.key),
        }
    }

    pub fn command(&self, sent: SentAcquire, link: Link) -> Command {
        let LockRequest { key, options, .. } = self.request;
        Command::Acquire(Acquire {
            key: key.clone(),
            lease: sent.lease,
            mode: options.mode,
            ttl: options.first_ttl(),
            queue_mode: sent.queue_mode,
            link,
            replicas: options.replicas,
        })
    }

    /// Handles the outcome of an acquire.
    pub fn finish(&mut self, sent: SentAcquire, outcome: Outcome) -> Result<Attempt, Error> {
        let (acquirer, lease) = (self.acquirer, sent.lease);
        let refusal = match outcome {
            Ok(Reply::Granted {
                token,
                is_token_in_value,
            }) => return self.granted(sent, token, is_token_in_value),
            Ok(Reply::Contended { queued: None, .. }) if sent.was_queued() => {
                self.remove_missing_entry(lease);
                Refusal::MissingEntry
            }
            Ok(Reply::Contended {
                queued,
                expires_in,
                shared,
            }) => self.contended(sent, queued, expires_in, shared),
            Ok(Reply::Foreign(found)) => {
                self.report_foreign(found);
                // A key without a ttl counts as taken for long. The waiter is notified once it is free.
                self.contended(sent, None, found.expires_in.unwrap_or(MAX_TTL), None)
            }
            Ok(Reply::Skipped) => {
                self.forget_unqueued(lease);
                Refusal::NOT_ASKED
            }
            Ok(Reply::SplitVote {
                expires_in,
                may_be_taken,
            }) => {
                self.forget_unqueued(lease);
                self.wait_for_notifications(expires_in);
                Refusal::SplitVote {
                    expires_in,
                    may_be_taken,
                }
            }
            Ok(other) => unreachable!("{other:?} in reply to an acquire"),
            Err(error) => return self.failed(sent, error).map(Attempt::Refused),
        };
        let outage = acquirer.outage_of(&self.request.options);
        outage.end(|| self.server());
        Ok(Attempt::Refused(refusal))
    }

    /// Chooses the lease id for the acquire, and whether the acquire joins the queue in Redis.
    fn choose_lease(&self, asked_at: MonotonicTime) -> (LeaseId, QueueMode) {
        let acquirer = self.acquirer;
        let key = &self.request.key;
        let fresh = acquirer.lease_pool(key).ids.next();
        if !self.call.waits() {
            return (fresh, QueueMode::None);
        }
        let (lease, entry_kind, replaced) = self.waiter.entry(fresh, asked_at);
        if let Some(replaced) = replaced {
            acquirer.release_unheld(key.clone(), replaced.lease, &replaced.options);
        }
        let entry_kind = match (entry_kind, self.place) {
            (EntryKind::New, Some(since)) => EntryKind::Rejoin { since },
            _ => entry_kind,
        };
        let queue_mode = match (entry_kind, acquirer.notifications.queue_mode(key)) {
            (EntryKind::Existing, mode) => QueueMode::Existing {
                notified: mode == QueueMode::Notified,
            },
            (EntryKind::Rejoin { since }, mode @ (QueueMode::Notified | QueueMode::Polling)) => {
                let polls = mode.polls();
                QueueMode::Rejoin { since, polls }
            }
            (_, mode) => mode,
        };
        (lease, queue_mode)
    }

    /// Makes the lease of a grant in the reply.
    fn granted(
        &mut self,
        sent: SentAcquire,
        token: u64,
        is_token_in_value: bool,
    ) -> Result<Attempt, Error> {
        let acquirer = self.acquirer;
        let LockRequest { key, options, .. } = self.request;
        acquirer.foreign_holders.forget(key);
        let grant = Grant {
            is_token_in_value,
            ..acquirer.new_grant(key, sent.lease, token, *options, sent.asked_at)
        };
        match acquirer.lease_of(grant, self.request.check.clone(), sent.was_queued()) {
            Ok(lease) => {
                acquirer.outage_of(options).end(|| self.server());
                Ok(Attempt::Granted(lease))
            }
            // The grant came after its validity. This counts as an outage that begins now: until this reply, Redis was
            // available.
            Err(late) if late.is_unavailable() => {
                let refusal = self.begin_outage(acquirer.watchdog.now(), late);
                Ok(Attempt::Refused(refusal))
            }
            Err(error) => Err(error),
        }
    }

    /// Handles a reply that another client holds the lock. `queued` is the place of the lease in the queue in Redis.
    /// `shared` is set if shares hold the key: it is the limit of the newest permit, or 0 for readers.
    fn contended(
        &mut self,
        sent: SentAcquire,
        queued: Option<QueuePlace>,
        expires_in: Duration,
        shared: Option<u32>,
    ) -> Refusal {
        let is_notified = queued.is_some_and(|queued| self.record_place(sent, queued));
        let notifications = &self.acquirer.notifications;
        if queued.is_none() {
            self.forget_unqueued(sent.lease);
        }
        self.wait_for_notifications(expires_in);
        let mode = self.request.options.mode;
        if let (Mode::Permits { limit, .. }, Some(other)) = (mode, shared)
            && limit != other
        {
            self.report_other_limit(limit, other);
        }
        let place = match queued {
            // Redis never notifies an entry that joined with `QueueMode::Polling`, even if this client has connected
            // for notifications since.
            Some(queued)
                if is_notified
                    && notifications.queue_mode(&self.request.key) == QueueMode::Notified =>
            {
                match shared.is_some() || !mode.is_exclusive() {
                    true => Place::Shared(queued),
                    false => Place::Notified(queued),
                }
            }
            Some(_) => Place::Silent,
            None if sent.queue_mode == QueueMode::None => Place::None,
            None => Place::Full,
        };
        Refusal::Taken { expires_in, place }
    }

    /// Reports the contention. If the caller waits, asks the background to connect for notifications.
    fn wait_for_notifications(&mut self, expires_in: Duration) {
        self.report_contended(expires_in);
        if self.call.waits() {
            self.acquirer.notifications.request(&self.request.key);
        }
    }

    /// Forgets a lease that is not queued in Redis. If the outcome of its acquire is unknown, the store releases it.
    fn forget_unqueued(&self, lease: LeaseId) {
        if self.call.waits() {
            let key = &self.request.key;
            let mode = self.request.options.mode;
            self.acquirer.queues.forget_entry(key, lease, mode);
        }
    }

    /// Records the lease's place in the queue in Redis. Returns whether Redis will notify the caller of its grant.
    fn record_place(&mut self, sent: SentAcquire, queued: QueuePlace) -> bool {
        // A late grant may have moved the lease to the front of this key's queue. In other queues, only the time at
        // which it joined counts.
        self.place = self.place.or(Some(joined_at(queued.since)));
        let SentAcquire {
            lease,
            queue_mode,
            notification_epoch,
            ..
        } = sent;
        let is_notified =
            self.waiter
                .record_queued(lease, queued.since, queue_mode, notification_epoch);
        is_notified.unwrap_or_else(|| {
            // The local queue has dropped this lease, for example because the client was shut down.
            let LockRequest { key, options, .. } = self.request;
            self.acquirer.release_unheld(key.clone(), lease, options);
            false
        })
    }

    /// Forgets `lease`, which has lost its place in the queue in Redis.
    fn remove_missing_entry(&self, lease: LeaseId) {
        let Acquirer {
            store,
            notifications,
            ..
        } = self.acquirer;
        let expected_notification = self.waiter.remove_missing_entry(lease);
        // Redis has lost the place, although this client's subscription was not interrupted and no flush was reported
        // (the epoch is unchanged). So the subscription may be on an old primary, and a release may have skipped this
        // client.
        let key = &self.request.key;
        let is_notified = notifications.queue_mode(key) == QueueMode::Notified;
        if is_notified && expected_notification == Some(notifications.epoch(key)) {
            store.suspect_connections(key);
        }
    }

    /// Handles an attempt that failed. Returns the error if another attempt could not succeed, either.
    fn failed(&self, sent: SentAcquire, error: Error) -> Result<Refusal, Error> {
        self.forget_unqueued(sent.lease);
        let (acquirer, asked_at) = (self.acquirer, sent.asked_at);
        let LockRequest { key, options, .. } = self.request;
        if sent.was_queued() {
            // This request failed, but an earlier request has added the lease to the queue in Redis.
            acquirer.release_unheld(key.clone(), sent.lease, options);
        }
        let now = acquirer.watchdog.now();
        let is_cut = sent.deadline < self.call.full_time(asked_at)
            && match error.kind() {
                ErrorKind::Timeout => true,
                ErrorKind::NoQuorum => now >= sent.deadline,
                _ => false,
            };
        match error {
            // This caller's own deadline ended the attempt, so the failure is no outage for other callers.
            _ if is_cut => Ok(Refusal::Cut(CurrentOutage::new(asked_at, now, error))),
            _ if error.is_unavailable() => Ok(self.begin_outage(asked_at, error)),
            _ => Err(error),
        }
    }

    /// Records an outage that began at `since`, after an attempt that failed because Redis was unavailable.
    fn begin_outage(&self, since: MonotonicTime, error: Error) -> Refusal {
        let acquirer = self.acquirer;
        let now = acquirer.watchdog.now();
        let known = acquirer.outage_of(&self.request.options);
        let (outage, is_news) = known.begin(self.server(), since, now, error);
        if is_news {
            // The `outage_timeout` of the other waiters begins now, so they compute their sleeps again.
            acquirer.queues.wake_all();
        }
        // The outage is recorded before this report: the event handler may ask the client whether Redis is available.
        acquirer.report_unavailable(&self.request.key, &outage.error);
        Refusal::Unavailable(outage)
    }

    /// Makes the lease of a grant that came as a message. Returns `None` if an acquire has to confirm the grant first,
    /// in these cases:
    ///
    /// - The message asks for a confirmation, its token is not plausible, or other users may know the lease id.
    /// - The queued lease has other options than this caller, the caller was promised the whole ttl, or replicas have
    ///   to acknowledge the grant.
    /// - More than a third of the ttl has passed since the first request for the lease. The validity counts from that
    ///   request, because the time of the grant is not known.
    pub fn accept(
        &self,
        entry: &QueueEntry,
        message: GrantMessage,
        now: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let options = self.request.options;
        let whole_ttl_promised = options.renew_every.is_none() || options.max_hold.is_some();
        let has_to_be_acknowledged = options.replicas.is_some();
        let is_short = message.to_confirm || now.since(entry.asked_at) > options.ttl / 3;
        let is_believed = entry.options == options && entry.is_plausible(message, now);
        if whole_ttl_promised || has_to_be_acknowledged || is_short || !is_believed {
            return Ok(None);
        }
        let (acquirer, key) = (self.acquirer, &self.request.key);
        let grant = acquirer.new_grant(key, entry.lease, message.token, options, entry.asked_at);
        match acquirer.lease_of(grant, self.request.check.clone(), true) {
            Ok(lease) => Ok(Some(lease)),
            Err(late) if late.is_unavailable() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Acquirer {
    /// Describes a grant of `key` to the lease `id`, with the token in the lock's value. `asked_at` is before the
    /// grant.
    pub fn new_grant(
        &self,
        key: &Key,
        id: LeaseId,
        token: u64,
        options: Options,
        asked_at: MonotonicTime,
    ) -> Grant {
        Grant {
            key: key.clone(),
            id,
            token,
            is_token_in_value: true,
            options: self.lease_pool(key).options.share(options),
            asked_at,
            since: self.watchdog.now(),
        }
    }

    /// Makes the lease of a grant, and schedules it with the watchdog. With `others_queued`, other clients may be
    /// queued in Redis for the key. If the grant came after its validity (`Timeout`) or after shutdown (`Shutdown`),
    /// releases it and returns an error.
    pub fn lease_of(
        &self,
        grant: Grant,
        check: Option<Check>,
        others_queued: bool,
    ) -> Result<Arc<Lease>, Error> {
        let (key, id, options) = (grant.key.clone(), grant.id, Arc::clone(&grant.options));
        let since = grant.since;
        let lease = Lease::new(grant, Arc::clone(&self.callbacks), check);
        let lease = Arc::new(lease.with_others_queued(others_queued));
        // This check comes first: otherwise the watchdog would report the loss of a lock that its caller never had.
        if lease.valid_for(since).is_none() {
            self.release_unheld(key, id, &options);
            let ttl = options.ttl;
            let message = format!(
                "the grant came after the validity of its ttl of {ttl:?} had ended; use a longer ttl, or check the \
                 load of the server and of this machine"
            );
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        if !self.watchdog.schedule(&lease) {
            self.release_unheld(key, id, &options);
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(lease)
    }
}
