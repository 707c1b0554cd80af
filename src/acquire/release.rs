//! How a lock and a place in its queue are given up: passed on within the client, or given back to Redis.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::{Acquirer, LockRequest};
use crate::error::Error;
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::observe;
use crate::store::{Command, Held, Reply};
use crate::util::id::LeaseId;
use crate::util::key::Key;

impl Acquirer {
    /// A dropped lease: passes it on to the next of this client, or lets go of it in Redis. True if it
    /// was lost before.
    pub(crate) fn release(&self, lease: &Arc<Lease>) -> bool {
        if self.hand_off(lease) {
            return false;
        }
        let now = self.watchdog.now();
        let lost = self.watchdog.release(lease, now).err();
        // Also after a loss: the server that reported it may not be the primary.
        self.store.post(release_of(lease));
        // Only now: the next local waiter then asks behind the release.
        self.queues.remove_holder(lease);
        if lost.is_some() {
            self.forget_lost_entry(lease);
        }
        lost.is_some()
    }

    /// As [`release`](Self::release), but passes nothing on, and waits for Redis to confirm it.
    pub(crate) fn release_confirmed(&self, lease: &Lease) -> Result<(), Error> {
        let now = self.watchdog.now();
        let result = match self.watchdog.release(lease, now) {
            Err(reason) => Err(self.release_lost(lease, reason)),
            Ok(()) => {
                let deadline = now.after(self.command_timeout);
                match self.store.ask(release_of(lease), deadline) {
                    Ok(Reply::Missing) => Err(Error::lost(LossReason::Deleted)),
                    Ok(Reply::Taken { by }) => Err(Error::lost(LossReason::TakenOver { by })),
                    Ok(_) => Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        self.queues.remove_holder(lease);
        if result.as_ref().is_err_and(Error::is_lease_lost) {
            self.forget_lost_entry(lease);
        }
        result
    }

    /// Gives up the entry of a lost lease: if its grant was forged, it is still queued, and granted at its position.
    fn forget_lost_entry(&self, lease: &Lease) {
        self.queues
            .forget_entry(&lease.grant().key, lease.grant().id);
    }

    /// A lease that is lost may still have its key, whatever the reason.
    pub(super) fn release_lost(&self, lease: &Lease, reason: LossReason) -> Error {
        self.store.post(release_of(lease));
        Error::lost(reason)
    }

    fn hand_off(&self, lease: &Arc<Lease>) -> bool {
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
            observe::handed_off();
        }
        done
    }

    /// Leaves the queue without the lock, and gives back what came too late.
    pub(super) fn leave(&self, request: &LockRequest, place: WaiterGuard<'_>) {
        let (handed, abandoned) = place.leave();
        if let Some(lease) = handed {
            self.release(&lease);
        }
        if let Some(entry) = abandoned {
            self.release_unheld(request.key.clone(), entry.lease, entry.options.first_ttl());
        }
    }

    /// Releases a lease that is not held: its grant, or its place in the queue. Removes the entry first, so
    /// that no later request uses the id: this release would end its grant.
    pub(super) fn release_unheld(&self, key: Key, lease: LeaseId, ttl: Duration) {
        self.queues.forget_entry(&key, lease);
        let until = self.watchdog.now().after(ttl);
        self.store.post(Command::Release {
            key,
            lease,
            until,
            held: None,
            queued: Some(ttl),
        });
    }
}

/// The release of what `lease` has in Redis, or may have.
pub(super) fn release_of(lease: &Lease) -> Command {
    Command::Release {
        key: lease.grant().key.clone(),
        lease: lease.grant().id,
        until: lease.key_until(),
        held: Some(Held {
            token: lease.grant().token,
            others_queued: lease.has_others_queued(),
        }),
        queued: None,
    }
}
