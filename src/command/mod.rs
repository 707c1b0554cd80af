//! The commands and replies of a store, as plain data.

pub mod value;

use std::sync::Arc;
use std::time::Duration;

use crate::command::value::LockValue;
use crate::config::Replicas;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::Key;

/// An operation on one key.
#[derive(Clone, Debug)]
pub enum Command {
    /// Grants the key to the lease if the key is free, or if the lease is the first in its queue.
    Acquire {
        key: Key,
        lease: LeaseId,
        ttl: Duration,
        queue_mode: QueueMode,
        /// The replicas that have to acknowledge the grant. Otherwise the outcome is `Unavailable`, and the store
        /// undoes the grant.
        replicas: Option<Replicas>,
    },
    /// Grants a key to the lease on one node of a quorum: a free key, or with `from` a key of that lease. The token is
    /// the proposal if the node has granted no greater one.
    Propose {
        key: Key,
        lease: LeaseId,
        /// With `from`, a ttl is never shortened.
        ttl: Duration,
        /// The µs part of the proposed token.
        micros: u64,
        /// After this time of its clock, in µs, the node replies `TooLate`: the client has given the proposal up.
        until: u64,
        from: Option<TicketLease>,
    },
    /// Makes one node of a quorum hold the key for the lease, with the full ttl and at least this token, unless another
    /// lease holds the key.
    Hold {
        key: Key,
        lease: LeaseId,
        ttl: Duration,
        /// The µs part of the token.
        micros: u64,
        /// The node sets a missing key until its clock shows these µs, and then replies
        /// [`TooLate`](Reply::TooLate). After this time, the reply is `TooLate`.
        /// `None`: a missing key is not set, and the reply is `Missing`.
        sets_missing: Option<u64>,
    },
    /// Releases the key if the lease still holds it, and grants it to the first waiter. A lease that is queued leaves
    /// the queue. Retries end at `until`, when the ttl has ended.
    Release {
        key: Key,
        lease: LeaseId,
        until: MonotonicTime,
        /// The grant, if a guard held it.
        held: Option<Held>,
        /// The ttl of the lease's acquire, if the lease may be in the queue.
        queued: Option<Duration>,
    },
    /// Sets the ttl back to its full length, if the lease still holds the key.
    Renew {
        key: Key,
        lease: LeaseId,
        /// The token of the grant, for a quorum.
        token: u64,
        ttl: Duration,
        /// The replicas that have to acknowledge the ttl. Otherwise the outcome is `Unavailable`.
        replicas: Option<Replicas>,
    },
    /// Releases the key in place of the holder of `lease`, and notifies that holder. The background does not retry this
    /// command.
    ForceUnlock {
        key: Key,
        lease: LeaseId,
        /// If true, the command does nothing while the holder does not listen for notifications and the grant is less
        /// than a second old or has no time: the holder's client may still be connecting.
        must_notify: bool,
    },
    /// Moves the grant of another lease to `lease`.
    Adopt {
        key: Key,
        lease: LeaseId,
        grant: Box<Adoption>,
    },
    /// Reads the lock's value and ttl, and the length of its queue.
    Inspect { key: Key },
    /// Writes or deletes a fenced value, unless it was changed under a greater token. The token stays.
    Write {
        key: Key,
        token: u64,
        /// `None` deletes the value.
        value: Option<Arc<[u8]>>,
        /// For how long Redis keeps value and token from now on. `None` leaves the ttl as it is.
        ttl: Option<Duration>,
    },
    /// Reads a fenced value.
    Read { key: Key },
    /// Reads the clock of one node of a quorum.
    Probe {
        /// The key of the node's mark.
        mark: Key,
    },
    /// Does nothing. Its outcome comes after the outcomes of all earlier requests of its pipeline. Code above the store
    /// calls `Store::flush`.
    Flush,
}

/// The grant that a ticket stands for, and its ttl after the adoption.
#[derive(Clone, Debug)]
pub struct Adoption {
    pub from: LeaseId,
    pub token: u64,
    /// The key's new ttl with `renew`. Without `renew`, the key keeps the rest of its ttl.
    pub ttl: Duration,
    /// An upper bound for the key's ttl after the adoption.
    pub longest: Duration,
    pub renew: bool,
    /// As for [`Command::Acquire`].
    pub replicas: Option<Replicas>,
}

/// The lease whose key an adoption takes over on a node of a quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketLease {
    pub lease: LeaseId,
    /// The µs part of the ticket's token. A node refuses a time that neither its clock nor its fence counter has
    /// reached, since it has granted no such token.
    pub micros: u64,
}

impl Command {
    /// The key; `None` for a flush.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Acquire { key, .. }
            | Self::Propose { key, .. }
            | Self::Hold { key, .. }
            | Self::Release { key, .. }
            | Self::Renew { key, .. }
            | Self::ForceUnlock { key, .. }
            | Self::Adopt { key, .. }
            | Self::Inspect { key }
            | Self::Write { key, .. }
            | Self::Read { key }
            | Self::Probe { mark: key } => Some(key),
            Self::Flush => None,
        }
    }

    /// The key and the fencing token, if this is the release of a guard's lease.
    pub fn guard_release(&self) -> Option<(&Key, u64)> {
        match self {
            Self::Release {
                key,
                held: Some(held),
                ..
            } => Some((key, held.token)),
            _ => None,
        }
    }

    /// Why the lock was lost, if this is the release of a guard's lease, and `reply`, received at `now`, shows that the
    /// lease had lost its key before the end of its validity.
    pub fn loss_at_release(&self, reply: &Reply, now: MonotonicTime) -> Option<LossReason> {
        match self {
            Self::Release {
                held: Some(held), ..
            } if now < held.valid_until => reply.loss(),
            _ => None,
        }
    }

    /// The replicas that have to acknowledge this command.
    pub fn replicas(&self) -> Option<Replicas> {
        match self {
            Self::Acquire { replicas, .. } | Self::Renew { replicas, .. } => *replicas,
            Self::Adopt { grant, .. } => grant.replicas,
            _ => None,
        }
    }

    /// Whether this acquire may queue its lease, or its lease may be queued already.
    pub fn may_queue(&self) -> bool {
        matches!(self, Self::Acquire { queue_mode, .. } if *queue_mode != QueueMode::None)
    }

    /// The key of a release that may grant the key to another client's waiter.
    pub fn key_for_next_waiter(&self) -> Option<&Key> {
        match self {
            Self::Release {
                key,
                held: Some(held),
                ..
            } if held.others_queued => Some(key),
            _ => None,
        }
    }

    /// The release that undoes this acquire or adoption. Redis may have carried the command out, or may do so later.
    pub fn undo(&self, now: MonotonicTime) -> Option<Self> {
        let (key, lease, ttl, queued) = match self {
            Self::Acquire {
                key,
                lease,
                ttl,
                queue_mode,
                ..
            } => (key, lease, ttl, *queue_mode != QueueMode::None),
            Self::Adopt { key, lease, grant } => (key, lease, &grant.longest, false),
            _ => return None,
        };
        Some(Self::Release {
            key: key.clone(),
            lease: *lease,
            until: now.after(*ttl),
            held: None,
            queued: queued.then_some(*ttl),
        })
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

/// How an acquire that finds the key taken joins the key's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueMode {
    /// Does not join: a single attempt.
    None,
    /// Joins and polls, since the client cannot be notified. When the waiter's turn comes, Redis grants it the key with
    /// a short ttl, and the waiter finds the grant when it polls.
    Polling,
    /// Joins. When the waiter's turn comes, it is granted the key and notified.
    Notified,
    /// Joins as `Polling` or `Notified`, at the place `since` of an earlier lease of this client, which is no longer
    /// queued. [`front_place`] makes a place in front of the queue.
    Rejoin { since: u64, polls: bool },
    /// Does not join, since the lease joined before and may still be queued. With `notified`, an entry that joined to
    /// poll is notified from now on.
    Existing { notified: bool },
}

/// The smallest place, in µs, of a waiter that has not had its turn. Waiters that were too late for an earlier turn
/// have smaller places.
pub const FIRST_USUAL_PLACE: u64 = 1_000_000_000_000_000;

/// The place in front of the queue for a waiter that joined at `since` and was too late when its turn came. Several
/// such waiters keep their order.
pub fn front_place(since: u64) -> u64 {
    since.checked_sub(FIRST_USUAL_PLACE).unwrap_or(since)
}

impl QueueMode {
    /// Whether the waiter polls instead of being notified.
    pub fn polls(self) -> bool {
        matches!(self, Self::Polling | Self::Rejoin { polls: true, .. })
    }
}

/// The reply to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The caller's lease holds the key.
    Granted {
        /// The fencing token.
        token: u64,
        /// Whether the lock's value has the token.
        is_token_in_value: bool,
    },
    /// Another lease holds the key. It expires after `expires_in` unless its holder renews it.
    Contended {
        expires_in: Duration,
        queued: Option<Queued>,
    },
    /// No majority of a quorum's nodes granted the key, since several leases have asked for it at the same time.
    SplitVote {
        /// As for `Contended`.
        expires_in: Duration,
        /// So many nodes have refused that another lease may hold the key.
        may_be_taken: bool,
    },
    /// Released, renewed, written, flushed.
    Done,
    /// The key does not exist.
    Missing,
    /// The key was not released by force, since its holder would not be notified.
    NotListening {
        /// Nodes of a quorum have released it, but no majority.
        by_some: bool,
    },
    /// A node of a quorum may have lost data, and does not vote for this time. After a release, the lease has no key on
    /// the node.
    Abstained { for_another: Duration },
    /// The clock of a node of a quorum that votes, in µs.
    Clock { micros: u64 },
    /// A node of a quorum has got the request after the client has given it up, by the node's clock, which shows
    /// `micros`. Nothing was done.
    TooLate { micros: u64 },
    /// A node of a quorum refuses the token, which is later than its clock and its fence counter by more than a
    /// quarantine. Nothing was done.
    TooFarAhead,
    /// Another lease holds the key.
    Taken { by: Option<HolderId> },
    /// The caller's lease has the grant now.
    Adopted {
        expires_in: Duration,
        /// The token, which is greater than the ticket's token.
        token: u64,
    },
    /// The lock's value and its ttl; `None` for a key without a ttl.
    Found {
        value: Box<LockValue>,
        expires_in: Option<Duration>,
    },
    /// Nothing was written, since the value was written under this greater token before.
    Stale { token: u64 },
    /// A fenced value.
    Value(Vec<u8>),
}

impl Reply {
    /// A grant whose token the lock's value has.
    pub fn granted(token: u64) -> Self {
        Self::Granted {
            token,
            is_token_in_value: true,
        }
    }

    /// Why the lease is lost, if the reply to its release or renewal reports that another lease or none holds the key.
    pub fn loss(&self) -> Option<LossReason> {
        match self {
            Self::Missing => Some(LossReason::Deleted),
            Self::Taken { by } => Some(LossReason::TakenOver { by: by.clone() }),
            _ => None,
        }
    }

    /// Whether the command has given the caller's lease the key, or a ttl.
    pub fn is_success(&self) -> bool {
        matches!(
            self,
            Self::Granted { .. } | Self::Adopted { .. } | Self::Done
        )
    }
}

/// The message that grants a key to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMessage {
    pub token: u64,
    /// The key has a short ttl until the waiter confirms the grant with an acquire.
    pub to_confirm: bool,
}

#[cfg(test)]
impl GrantMessage {
    /// The grant that tests and models use by default.
    pub const USUAL: Self = Self {
        token: 7,
        to_confirm: false,
    };
}

/// The place of a waiter in the queue of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// How many waiters are before this waiter.
    pub ahead: u64,
    /// When the waiter joined, in µs by the clock of Redis. The queue is sorted by this.
    pub since: u64,
}

/// A command with its deadline and, once executed, its outcome.
#[derive(Debug)]
pub struct Request {
    pub command: Command,
    pub deadline: MonotonicTime,
    pub outcome: Option<Result<Reply, Error>>,
}

impl Request {
    pub fn new(command: Command, deadline: MonotonicTime) -> Self {
        Self {
            command,
            deadline,
            outcome: None,
        }
    }

    /// The outcome; every executed request has one.
    pub fn into_outcome(self) -> Result<Reply, Error> {
        self.outcome.expect("the store sets every outcome")
    }
}
