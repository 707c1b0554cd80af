//! Hands locks off within the client, releases them in Redis, and removes waiters from their queues.
//!
//! A dropped guard, or a closure that ends, hands the lock off to the next waiter of this client without a request, if
//! all of these hold:
//!
//! - the next waiter has the same options;
//! - the lease is renewed, and has no check (`renew_while`);
//! - two thirds of the validity are left, and the lease was not extended beyond its ttl;
//! - no thread is changing the ttl or confirming a forced release;
//! - the settings for hand-offs allow it.
//!
//! The next holder gets a `Lease` of its own, with the same lease id and the next token. The client reports a later
//! loss to the next holder only.
//!
//! The lease of a reader is not handed off: other readers join it while it is held, and its last guard releases it.
//!
//! Without a hand-off, `unlock` and closures wait for the reply. The thread that drops a guard writes the release
//! itself if the pipeline is idle and connected. Otherwise the pipeline's leader or the background writes it.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::{Acquirer, LockRequest};
use crate::command::{Command, Held, Mode, Outcome, Release, Request};
use crate::config::key::Key;
use crate::lease::{GuardNumber, Lease, LeaseRemains, ONLY_GUARD, Options};
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::report::observe;
use crate::report::released::Released;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// The fate of a lease whose guard was dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DropOutcome {
    /// The lock was handed off to another thread of this client.
    HandedOff,
    /// Other guards of this client share the lease.
    Shared,
    /// The release was sent or queued.
    Sent,
    /// The lease had been lost.
    Lost,
}

impl DropOutcome {
    /// Whether a release has to be sent.
    fn is_released(self) -> bool {
        matches!(self, Self::Sent | Self::Lost)
    }

    /// The name for metrics and spans.
    pub fn name(self) -> &'static str {
        match self {
            Self::HandedOff => "handed_off",
            Self::Shared => "shared",
            Self::Sent => "dropped",
            Self::Lost => "lost",
        }
    }
}

impl Acquirer {
    /// Ends the lease of a dropped guard without waiting for Redis: hands the lock off to the next waiter of this
    /// client, or sends the release. If a reply before the end of the validity reports that the lease does not hold the
    /// key, the store reports the loss.
    ///
    /// `guard` identifies the signals and callbacks of the guard, which end with it.
    pub fn release(&self, lease: &Arc<Lease>, guard: GuardNumber) -> DropOutcome {
        match self.leave_share(lease, guard) {
            Some(Ok(())) => return DropOutcome::Shared,
            Some(Err(_)) => return DropOutcome::Lost,
            None => {}
        }
        let (outcome, release) = self.end_or_hand_off(lease);
        if let Some(release) = release {
            self.store.send_release(release);
            self.remove_holder(lease, outcome);
        }
        outcome
    }

    /// Ends the leases of a dropped guard of several keys, as [`release`](Self::release) does for one key.
    pub fn release_all(&self, leases: &[Arc<Lease>]) -> Vec<DropOutcome> {
        let (releases, outcomes) = self.end_all(leases);
        self.store.send_releases(releases);
        self.remove_holders(leases, &outcomes);
        outcomes
    }

    /// Hands the locks off or ends the leases. Returns the releases to send. Afterwards the caller calls
    /// [`remove_holders`](Self::remove_holders).
    pub fn end_all(&self, leases: &[Arc<Lease>]) -> (Vec<Release>, Vec<DropOutcome>) {
        let ended = leases.iter().map(|lease| self.end_or_hand_off(lease));
        let (outcomes, releases): (Vec<_>, Vec<_>) = ended.unzip();
        (releases.into_iter().flatten().collect(), outcomes)
    }

    pub fn remove_holders(&self, leases: &[Arc<Lease>], outcomes: &[DropOutcome]) {
        for (lease, outcome) in leases.iter().zip(outcomes) {
            if outcome.is_released() {
                self.remove_holder(lease, *outcome);
            }
        }
    }

    /// Hands the lock off, or ends the lease and returns the release to send.
    fn end_or_hand_off(&self, lease: &Arc<Lease>) -> (DropOutcome, Option<Release>) {
        if self.hand_off(lease) {
            return (DropOutcome::HandedOff, None);
        }
        let now = self.watchdog.now();
        self.record_turn_end(lease, now);
        // A lost lease is released, too: the server that reported the loss may not be the primary.
        let (outcome, valid_until) = match self.watchdog.end_lease(lease, now).map(drop) {
            Ok(()) => (DropOutcome::Sent, lease.valid_until()),
            Err(_) => (DropOutcome::Lost, now),
        };
        (outcome, Some(release_of(lease, valid_until)))
    }

    /// Removes a holder after its release was sent, so that Redis gets the release before the next waiter's request.
    fn remove_holder(&self, lease: &Lease, outcome: DropOutcome) {
        self.queues.remove_holder(lease);
        if outcome == DropOutcome::Lost {
            self.forget_lost_entry(lease);
        }
    }

    /// Releases the lease in Redis, without a hand-off, and waits for the reply. Returns an error only if the lease was
    /// lost. Sends nothing if other guards share the lease.
    pub fn release_confirmed(&self, lease: &Lease, guard: GuardNumber) -> Result<Released, Error> {
        match self.leave_share(lease, guard) {
            Some(Ok(())) => return Ok(Released::Shared),
            Some(Err(reason)) => return Err(Error::lost(reason)),
            None => {}
        }
        let now = self.watchdog.now();
        self.record_turn_end(lease, now);
        let result = match self.watchdog.end_lease(lease, now) {
            Err(reason) => Err(self.release_lost(lease, reason, now)),
            Ok(detached) => {
                let deadline = now.after(self.command_timeout);
                let release = release_of(lease, lease.valid_until());
                let outcome = self.store.execute_one(Command::Release(release), deadline);
                self.released(lease, detached, outcome)
            }
        };
        self.finish_release(lease, result)
    }

    /// Releases several leases in Redis, without a hand-off, and waits for the replies. Each lease has the result of
    /// [`release_confirmed`](Self::release_confirmed).
    pub fn release_all_confirmed(&self, leases: &[Arc<Lease>]) -> Vec<Result<Released, Error>> {
        let now = self.watchdog.now();
        let ended = leases.iter().map(|lease| {
            self.record_turn_end(lease, now);
            self.watchdog.end_lease(lease, now)
        });
        let ended: Vec<_> = ended.collect();
        let deadline = now.after(self.command_timeout);
        let mut requests: Vec<Request> = Vec::with_capacity(leases.len());
        for (lease, ended) in leases.iter().zip(&ended) {
            let until = ended.as_ref().map_or(now, |_| lease.valid_until());
            let release = Command::Release(release_of(lease, until));
            requests.push(Request::new(release, deadline));
        }
        self.store.execute(&mut requests);
        let results = leases.iter().zip(ended).zip(requests);
        let results = results.map(|((lease, ended), request)| {
            let result = match ended {
                Err(reason) => Err(Error::lost(reason)),
                Ok(detached) => self.released(lease, detached, request.into_outcome()),
            };
            self.finish_release(lease, result)
        });
        results.collect()
    }

    /// The result of a release with this outcome.
    fn released(
        &self,
        lease: &Lease,
        detached: LeaseRemains,
        outcome: Outcome,
    ) -> Result<Released, Error> {
        match outcome {
            Ok(reply) => match reply.loss() {
                Some(reason) => self.not_there(lease, detached, reason),
                None => Ok(Released::Confirmed),
            },
            // If a later reply shows a loss, the store reports it, as after the drop of a guard.
            Err(error) => Ok(Released::Unconfirmed(error)),
        }
    }

    /// Removes the holder after its release.
    fn finish_release(
        &self,
        lease: &Lease,
        result: Result<Released, Error>,
    ) -> Result<Released, Error> {
        self.queues.remove_holder(lease);
        if result.as_ref().is_err_and(Error::is_lease_lost) {
            self.forget_lost_entry(lease);
        }
        result
    }

    /// Adds another guard to a reader's lease.
    pub fn add_guard(&self, lease: &Lease) {
        self.queues.add_guard(lease);
    }

    /// Ends one guard of a reader's lease if others remain. Returns `None` if the caller has to release the lease: the
    /// guard was the last one, or the lease is not a reader's. Returns the reason as an error if the lease was lost
    /// before.
    pub fn leave_share(&self, lease: &Lease, guard: GuardNumber) -> Option<Result<(), LossReason>> {
        let is_shared = lease.grant().options.mode == Mode::Read;
        if !is_shared || self.queues.remove_guard(lease) {
            return None;
        }
        let now = self.watchdog.now();
        lease.remove_listeners(now, guard);
        Some(lease.loss(now).map_or(Ok(()), Err))
    }

    fn record_turn_end(&self, lease: &Lease, now: MonotonicTime) {
        if let Some(contention) = &self.contention {
            contention.record_release(&lease.grant().key, now);
        }
    }

    /// The result of a release whose reply reports that the lease does not hold the key. Within the validity, this is a
    /// loss, and the lock's listeners are notified. After the validity, it is not a loss: the key may have expired
    /// while the request was on its way.
    fn not_there(
        &self,
        lease: &Lease,
        detached: LeaseRemains,
        reason: LossReason,
    ) -> Result<Released, Error> {
        if self.watchdog.now() < lease.valid_until() {
            return Err(Error::lost(lease.lose_released(detached, reason)));
        }
        self.forget_lost_entry(lease);
        let message = "the ttl ended before Redis answered";
        let error = Error::new(ErrorKind::Timeout, message);
        Ok(Released::Unconfirmed(error))
    }

    /// Removes a lost lease from its local queue. If the message of its grant was forged, Redis may still grant the
    /// lease, and the client then releases it.
    pub fn forget_lost_entry(&self, lease: &Lease) {
        let grant = lease.grant();
        self.queues
            .forget_entry(&grant.key, grant.id, grant.options.mode);
    }

    /// Sends the release of a lease that was lost before `now`: its key may still exist. Returns the error that reports
    /// the loss.
    pub fn release_lost(&self, lease: &Lease, reason: LossReason, now: MonotonicTime) -> Error {
        self.send_late_release(lease, now);
        Error::lost(reason)
    }

    /// Sends the release of a lease that has ended at `now`. The reply reports no loss.
    pub fn send_late_release(&self, lease: &Lease, now: MonotonicTime) {
        self.store.send_release(release_of(lease, now));
    }

    /// Hands the lock off to the next waiting thread of this client, if the rules for hand-offs allow it.
    pub fn hand_off(&self, lease: &Arc<Lease>) -> bool {
        let (grant, limits) = (lease.grant(), self.hand_offs);
        let mut handed = None;
        let done = self.queues.hand_off(lease, |options| {
            let now = self.watchdog.now();
            if grant.hand_offs() >= limits.count || now.since(grant.since) >= limits.time {
                return None;
            }
            let (next, ended) = lease.hand_off(now, options)?;
            handed = Some((Arc::clone(&next), ended));
            Some(next)
        });
        if let Some((next, ended)) = handed {
            self.watchdog.replace_lease(lease, &ended, &next);
            observe::count_hand_off();
        }
        done
    }

    /// Leaves the local queue without a grant. Releases a lease that another thread has handed off to this waiter. If
    /// no other thread waits, also releases the lease that the queue has asked Redis for.
    pub fn leave_queue(&self, request: &LockRequest, waiter: WaiterGuard<'_>) {
        if let Some(release) = self.leave(request, waiter) {
            self.store.send_release(release);
        }
    }

    /// Leaves the local queue as [`leave_queue`](Self::leave_queue) does, but returns the release of the lease that the
    /// queue has asked Redis for.
    pub fn leave(&self, request: &LockRequest, waiter: WaiterGuard<'_>) -> Option<Release> {
        let (handed_off, abandoned) = waiter.leave();
        if let Some(lease) = handed_off {
            self.release(&lease, ONLY_GUARD);
        }
        abandoned.map(|entry| self.unheld(request.key.clone(), entry.lease, &entry.options))
    }

    /// Leaves the local queue with `lease`, which Redis has granted.
    pub fn leave_queue_with(&self, waiter: WaiterGuard<'_>, lease: &Arc<Lease>) {
        let (handed_off, forced_by) = waiter.leave_with(lease, self.hand_offs);
        if let Some(other) = handed_off {
            self.release(&other, ONLY_GUARD);
        }
        if let Some(by) = forced_by {
            self.watchdog.handle_force_message(Arc::clone(lease), by);
        }
    }

    /// Sends the release of a lease that no guard holds, but that Redis may have granted or queued. First removes the
    /// lease from the local queue: a later request must not use its id, since this release would end the grant of that
    /// request.
    pub fn release_unheld(&self, key: Key, lease: LeaseId, options: &Options) {
        self.store.send_release(self.unheld(key, lease, options));
    }

    /// Removes the lease from the local queue, as [`release_unheld`](Self::release_unheld) does, and returns the
    /// release.
    pub fn unheld(&self, key: Key, lease: LeaseId, options: &Options) -> Release {
        self.queues.forget_entry(&key, lease, options.mode);
        let ttl = options.first_ttl();
        Release {
            min_hold: Duration::ZERO,
            mode: options.mode,
            key,
            lease,
            until: self.watchdog.now().after(ttl),
            held: None,
            queued: Some(ttl),
        }
    }
}

/// The release of `lease`. A reply before `valid_until` may report a loss. For a lease that is already lost, callers
/// pass the current time, so that the reply does not report the loss again.
fn release_of(lease: &Lease, valid_until: MonotonicTime) -> Release {
    Release {
        key: lease.grant().key.clone(),
        lease: lease.grant().id,
        mode: lease.grant().options.mode,
        min_hold: lease.grant().options.min_hold,
        until: lease.key_until(),
        held: Some(Held {
            token: lease.grant().token,
            is_token_in_value: lease.grant().is_token_in_value,
            others_queued: lease.has_others_queued(),
            valid_until,
        }),
        queued: None,
    }
}
