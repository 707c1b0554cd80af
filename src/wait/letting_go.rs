//! How a lock and a place in its queue are given up: passed on within the client, or given back to Redis.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::id::LeaseId;
use crate::key::Key;
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::observe;
use crate::store::{Command, Held, Reply};
use crate::wait::local::Place;
use crate::wait::{Waits, Wanted};

impl Waits {
    /// A dropped lease: passes it on to the next of this client, or lets go of it in Redis. True if it
    /// was lost before.
    pub(crate) fn let_go(&self, lease: &Arc<Lease>) -> bool {
        if self.hand_off(lease) {
            return false;
        }
        let now = self.watchdog.now();
        let lost = self.watchdog.release(lease, now).err();
        // Also after a loss: the server that reported it may not be the primary.
        self.store.post(release_of(lease));
        // Only now: the next local waiter then asks behind the release.
        self.queues.let_go(lease);
        if lost.is_some() {
            self.disclaim_lost(lease);
        }
        lost.is_some()
    }

    /// As [`let_go`](Self::let_go), but passes nothing on, and waits for Redis to confirm it.
    pub(crate) fn let_go_confirmed(&self, lease: &Lease) -> Result<(), Error> {
        let now = self.watchdog.now();
        let result = match self.watchdog.release(lease, now) {
            Err(reason) => Err(self.give_back_lost(lease, reason)),
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
        self.queues.let_go(lease);
        if result.as_ref().is_err_and(Error::is_lease_lost) {
            self.disclaim_lost(lease);
        }
        result
    }

    /// Gives up the claim of a lost lease: if its grant was forged, it is still queued, and granted at its turn.
    fn disclaim_lost(&self, lease: &Lease) {
        self.queues.disclaim(&lease.terms().key, lease.terms().id);
    }

    /// A lease that is lost may still have its key, whatever the reason.
    pub(super) fn give_back_lost(&self, lease: &Lease, reason: LossReason) -> Error {
        self.store.post(release_of(lease));
        Error::lost(reason)
    }

    fn hand_off(&self, lease: &Arc<Lease>) -> bool {
        let (terms, limits) = (lease.terms(), self.hand_offs);
        let mut handed = None;
        let done = self.queues.hand_off(lease, |options| {
            let now = self.watchdog.now();
            if terms.hand_offs() >= limits.count || now.since(terms.since) >= limits.time {
                return None;
            }
            let (next, ended) = lease.hand_off(now, options)?;
            handed = Some((Arc::clone(&next), ended));
            Some(next)
        });
        if let Some((next, ended)) = handed {
            self.watchdog.succeed(lease, &ended, &next);
            observe::handed_off();
        }
        done
    }

    /// Leaves the line without the lock, and gives back what came too late.
    pub(super) fn leave(&self, wanted: &Wanted, place: Place<'_>) {
        let (handed, abandoned) = place.leave();
        if let Some(lease) = handed {
            self.let_go(&lease);
        }
        if let Some(claim) = abandoned {
            self.give_back(wanted.key.clone(), claim.lease, claim.options.first_ttl());
        }
    }

    /// Releases a lease that is not held: its grant, or its place in the queue. Removes the claim first, so
    /// that no later request uses the id: this release would end its grant.
    pub(super) fn give_back(&self, key: Key, lease: LeaseId, ttl: Duration) {
        self.queues.disclaim(&key, lease);
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
        key: lease.terms().key.clone(),
        lease: lease.terms().id,
        until: lease.key_until(),
        held: Some(Held {
            token: lease.terms().token,
            others_queued: lease.has_others_queued(),
        }),
        queued: None,
    }
}
