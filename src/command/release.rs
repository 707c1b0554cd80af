//! Ends a lease's grant: in time by its holder, or by force by another client.

use std::time::Duration;

use crate::command::Reply;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Releases the key if the lease still holds it, and grants it to the first waiter. A lease that is queued leaves the
/// queue. Retries end at `until`, when the ttl has ended.
#[derive(Clone, Debug)]
pub struct Release {
    pub key: Key,
    pub lease: LeaseId,
    pub until: MonotonicTime,
    /// The grant, if a guard held it.
    pub held: Option<Held>,
    /// The ttl of the lease's acquire, if the lease may be in the queue.
    pub queued: Option<Duration>,
}

impl Release {
    /// The release of a lease that no guard held, and that is not queued.
    pub fn undo(key: &Key, lease: LeaseId, until: MonotonicTime) -> Self {
        Self {
            key: key.clone(),
            lease,
            until,
            held: None,
            queued: None,
        }
    }

    /// The key and the fencing token, if this is the release of a guard's lease.
    pub fn of_guard(&self) -> Option<(&Key, u64)> {
        self.held.map(|held| (&self.key, held.token))
    }

    /// Why the lock was lost, if this is the release of a guard's lease, and `reply`, received at `now`, shows that the
    /// lease had lost its key before the end of its validity.
    pub fn loss(&self, reply: &Reply, now: MonotonicTime) -> Option<LossReason> {
        let held = self.held?;
        (now < held.valid_until).then(|| reply.loss()).flatten()
    }

    /// The key, if the release may grant it to another client's waiter.
    pub fn key_for_next_waiter(&self) -> Option<&Key> {
        let may_grant = self.held.is_some_and(|held| held.others_queued);
        may_grant.then_some(&self.key)
    }
}

/// The part of a guard's grant that its release needs.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub token: u64,
    /// Whether the lock's value has the token.
    pub is_token_in_value: bool,
    /// Other clients may be queued for the key.
    pub others_queued: bool,
    /// If Redis replies before this time that another lease or none holds the key, the lock was lost while it was held.
    pub valid_until: MonotonicTime,
}

/// Releases the key in place of the holder of `lease`, and notifies that holder. The background does not retry this
/// command.
#[derive(Clone, Debug)]
pub struct ForceUnlock {
    pub key: Key,
    pub lease: LeaseId,
    /// If true, the command does nothing while the holder does not listen for notifications and the grant is less than a
    /// second old or has no time: the holder's client may still be connecting.
    pub must_notify: bool,
}
