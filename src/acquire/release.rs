//! How a lock is handed off within the client or released in Redis, and how a waiter leaves its queue.
//!
//! A dropped guard or a closure that ends hands the lease off to the next waiter of this client, without a request, if
//! all of these hold:
//!
//! - the next waiter has the same options;
//! - the lease is renewed, and has no check (`renew_while`);
//! - two thirds of the validity are left, and the lease was not extended beyond its ttl;
//! - no change of the ttl and no confirmation of a forced release is under way;
//! - the settings for hand-offs allow it.
//!
//! The next holder gets a `Lease` of its own, with the same lease id and the next token. A later loss is reported to
//! it.
//!
//! Without a hand-off, `unlock` and closures wait for the reply. The release of a dropped guard is written by the
//! dropping thread if its pipeline is idle and connected, otherwise by the leader of the pipeline or in the background.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::{Acquirer, LockRequest};
use crate::command::{Command, Held, Release};
use crate::config::key::Key;
use crate::lease::{Lease, LeaseRemains};
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::report::observe;
use crate::report::released::Released;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// How the lease of a dropped guard ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    /// Another thread of this client has the lock now.
    HandedOff,
    /// The release was written or queued.
    Sent,
    /// The lease was lost before.
    Lost,
}

impl Acquirer {
    /// Releases the lease of a dropped guard: hands it off to the next waiter of this client, or tells Redis to release
    /// it. Does not wait for Redis. If Redis replies within the validity that another lease or none holds the key, the
    /// store reports the loss.
    pub fn release(&self, lease: &Arc<Lease>) -> Dropped {
        if self.hand_off(lease) {
            return Dropped::HandedOff;
        }
        let now = self.watchdog.now();
        self.note_turn_ends(lease, now);
        let ended = self.watchdog.end_lease(lease, now).map(drop);
        // The release is sent even after a loss, since the server that reported the loss may not be the primary.
        let valid_until = if ended.is_ok() {
            lease.valid_until()
        } else {
            now
        };
        self.store.send_release(release_of(lease, valid_until));
        // Remove the holder after the send: Redis must get the release before the request of the next waiter.
        self.queues.remove_holder(lease);
        if ended.is_ok() {
            return Dropped::Sent;
        }
        self.forget_lost_entry(lease);
        Dropped::Lost
    }

    /// Releases the lease in Redis, without a hand-off, and waits for the reply. Fails only if the lease was lost.
    pub fn release_confirmed(&self, lease: &Lease) -> Result<Released, Error> {
        let now = self.watchdog.now();
        self.note_turn_ends(lease, now);
        let result = match self.watchdog.end_lease(lease, now) {
            Err(reason) => Err(self.release_lost(lease, reason, now)),
            Ok(detached) => {
                let deadline = now.after(self.command_timeout);
                let release = release_of(lease, lease.valid_until());
                match self.store.execute_one(release, deadline) {
                    Ok(reply) => match reply.loss() {
                        Some(reason) => self.not_there(lease, detached, reason),
                        None => Ok(Released::Confirmed),
                    },
                    // If a later reply shows a loss, the store reports it, as for a dropped guard.
                    Err(error) => Ok(Released::Unconfirmed(error)),
                }
            }
        };
        self.queues.remove_holder(lease);
        if result.as_ref().is_err_and(Error::is_lease_lost) {
            self.forget_lost_entry(lease);
        }
        result
    }

    fn note_turn_ends(&self, lease: &Lease, now: MonotonicTime) {
        if let Some(contention) = &self.contention {
            contention.note_release(&lease.grant().key, now);
        }
    }

    /// The result of a release that did not find the lease in Redis. Within the validity, the lock was lost, and its
    /// listeners are notified. After the validity, the key may have expired only after the caller had asked for the
    /// release, so this is no loss.
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

    /// Forgets the entry of a lost lease. If the lease's grant was forged, Redis may still grant the lease later, and
    /// the client releases that grant.
    fn forget_lost_entry(&self, lease: &Lease) {
        self.queues
            .forget_entry(&lease.grant().key, lease.grant().id);
    }

    /// Tells Redis to release a lease that was lost before `now`, since the lease's key may still exist there. Returns
    /// the error that reports the loss.
    pub fn release_lost(&self, lease: &Lease, reason: LossReason, now: MonotonicTime) -> Error {
        self.store.send_release(release_of(lease, now));
        Error::lost(reason)
    }

    /// Hands the lease off to the next waiting thread of this client, if the limits of hand-offs allow it.
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

    /// Leaves the local queue without a grant of Redis. Releases a lease that was handed off to this waiter meanwhile.
    /// If no waiter is left, also releases the queue's entry.
    pub fn leave_queue(&self, request: &LockRequest, waiter: WaiterGuard<'_>) {
        let (handed_off, abandoned) = waiter.leave();
        if let Some(lease) = handed_off {
            self.release(&lease);
        }
        if let Some(entry) = abandoned {
            let ttl = entry.options.first_ttl();
            self.release_unheld(request.key.clone(), entry.lease, ttl);
        }
    }

    /// Leaves the local queue with `lease`, which Redis has granted.
    pub fn leave_queue_with(&self, waiter: WaiterGuard<'_>, lease: &Arc<Lease>) {
        let (handed_off, forced_by) = waiter.leave_with(lease);
        if let Some(other) = handed_off {
            self.release(&other);
        }
        if let Some(by) = forced_by {
            self.watchdog.handle_force_message(Arc::clone(lease), by);
        }
    }

    /// Tells Redis to release a lease that no guard holds: its grant, or its entry in the queue. First forgets the
    /// entry, so that no later request uses the lease id: this release would end a later grant.
    pub fn release_unheld(&self, key: Key, lease: LeaseId, ttl: Duration) {
        self.queues.forget_entry(&key, lease);
        let until = self.watchdog.now().after(ttl);
        self.store.send_release(Command::Release(Release {
            key,
            lease,
            until,
            held: None,
            queued: Some(ttl),
        }));
    }
}

/// The release of `lease`. A reply before `valid_until` may show that the lock was lost. For a lease that is known to be
/// lost, the callers pass the current time, so that the reply does not report the loss again.
fn release_of(lease: &Lease, valid_until: MonotonicTime) -> Command {
    Command::Release(Release {
        key: lease.grant().key.clone(),
        lease: lease.grant().id,
        until: lease.key_until(),
        held: Some(Held {
            token: lease.grant().token,
            is_token_in_value: lease.grant().is_token_in_value,
            others_queued: lease.has_others_queued(),
            valid_until,
        }),
        queued: None,
    })
}
