//! What the store can be asked and what it answers: plain data. How it is carried out is not here.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::store::value::LockValue;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::Key;

/// One thing to do to one key.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// GrantMessage the key if it is free, or if the lease's turn has come.
    Acquire {
        key: Key,
        lease: LeaseId,
        ttl: Duration,
        queue_mode: QueueMode,
    },
    /// Release the key if it is still this lease's: the first waiter has it then. A lease that is
    /// queued itself leaves the queue. Not worth a try after `until`: its ttl has ended.
    Release {
        key: Key,
        lease: LeaseId,
        until: MonotonicTime,
        /// What a guard held of it; nothing if no guard ever had it.
        held: Option<Held>,
        /// The ttl of its acquire, if it may be in the queue.
        queued: Option<Duration>,
    },
    /// Put the ttl back to its full length, if the key is still this lease's.
    Renew {
        key: Key,
        lease: LeaseId,
        ttl: Duration,
    },
    /// As a release, against the will of `lease`, whose holder is told. Done once: it is not seen
    /// through in the background.
    ForceUnlock { key: Key, lease: LeaseId },
    /// Go on with the grant that is another lease's, under a lease of one's own.
    Adopt {
        key: Key,
        lease: LeaseId,
        grant: Box<Adoption>,
    },
    /// Say who has the key.
    Inspect { key: Key },
    /// Write or delete a fenced value, unless it was changed under a greater token. The token stays.
    Write {
        key: Key,
        token: u64,
        /// Nothing to delete it.
        value: Option<Arc<[u8]>>,
        /// For how long Redis keeps value and token from now on; without it, the ttl is left as it is.
        ttl: Option<Duration>,
    },
    /// Read a fenced value.
    Read { key: Key },
    /// Nothing: answered once everything that was asked on the pipeline before it has been.
    Flush { pipeline: usize },
}

/// Which grant goes on, and for how long.
#[derive(Clone, Debug)]
pub(crate) struct Adoption {
    pub(crate) from: LeaseId,
    pub(crate) token: u64,
    /// If it is renewed the key gets its full ttl, otherwise it keeps what is left.
    pub(crate) ttl: Duration,
    /// For how long Redis may have the key then.
    pub(crate) longest: Duration,
    pub(crate) renew: bool,
}

impl Command {
    /// What it is about; nothing for a flush.
    pub(crate) fn key(&self) -> Option<&Key> {
        match self {
            Self::Acquire { key, .. }
            | Self::Release { key, .. }
            | Self::Renew { key, .. }
            | Self::ForceUnlock { key, .. }
            | Self::Adopt { key, .. }
            | Self::Inspect { key }
            | Self::Write { key, .. }
            | Self::Read { key } => Some(key),
            Self::Flush { .. } => None,
        }
    }

    /// The key that this may pass on to a client that waits for it in Redis, and that is notified then.
    pub(crate) fn passes_on(&self) -> Option<&Key> {
        match self {
            Self::Release {
                key,
                held: Some(held),
                ..
            } if held.others_queued => Some(key),
            _ => None,
        }
    }

    /// The release of what this may have taken by now or may take yet.
    pub(crate) fn undo(&self, now: MonotonicTime) -> Option<Self> {
        let (key, lease, ttl, queued) = match self {
            Self::Acquire {
                key,
                lease,
                ttl,
                queue_mode,
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

/// What a guard held, as far as its release goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) token: u64,
    /// Others may be queued for its key in Redis.
    pub(crate) others_queued: bool,
}

/// Whether an acquire that finds the key taken joins its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueMode {
    /// It does not: this was only a try.
    None,
    /// It joins, and polls, since it cannot be notified. When its turn comes, the key is kept for a moment.
    Polling,
    /// It joins. When its turn comes, it is granted the key and notified.
    Notified,
    /// As `Polling` or `Told`, at the place of a lease that joined at `since` and is no longer queued, or in
    /// front: see [`in_front`].
    Rejoin { since: u64, polls: bool },
    /// It joined before, and may still be queued. It does not join again. If it joined to poll, it is
    /// notified from now on where that is possible.
    Existing { notified: bool },
}

/// Places before this one, in µs, are for waiters whose turn has come before, and whose answer came too late.
pub(crate) const FIRST_USUAL_PLACE: u64 = 1_000_000_000_000_000;

/// The place at which a waiter joins again that joined at `since` and answered too late when its turn came. The
/// order among such waiters stays.
pub(crate) fn in_front(since: u64) -> u64 {
    since.checked_sub(FIRST_USUAL_PLACE).unwrap_or(since)
}

impl QueueMode {
    /// Whether it joins to poll.
    pub(crate) fn polls(self) -> bool {
        matches!(self, Self::Polling | Self::Rejoin { polls: true, .. })
    }
}

/// What Redis said to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The key is the caller's, with this fencing token.
    Granted { token: u64 },
    /// Somebody has it, for so long at most unless they renew.
    Contended {
        expires_in: Duration,
        queued: Option<Queued>,
    },
    /// Released, renewed, written, flushed.
    Done,
    /// There is no such key.
    Missing,
    /// The key is another's.
    Taken { by: Option<HolderId> },
    /// The grant goes on under the caller's lease; its key lives for so long.
    Adopted { expires_in: Duration },
    /// What stands under the key, and for how long; without a bound, if it has no ttl.
    Found {
        value: Box<LockValue>,
        expires_in: Option<Duration>,
    },
    /// Nothing was written: the value was written under this greater token.
    Stale { token: u64 },
    /// A fenced value.
    Value(Vec<u8>),
}

/// A grant to a waiter, as read from its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantMessage {
    pub(crate) token: u64,
    /// The key has a short ttl until the waiter confirms the grant with an acquire.
    pub(crate) to_confirm: bool,
}

#[cfg(test)]
impl GrantMessage {
    /// The grant that tests and models use by default.
    pub(crate) const USUAL: Self = Self {
        token: 7,
        to_confirm: false,
    };
}

/// The place of a waiter in the queue of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queued {
    /// How many waiters come before it.
    pub(crate) ahead: u64,
    /// When it joined, in µs by the clock of Redis; orders the queue.
    pub(crate) since: u64,
}

/// A command with its own deadline, and the place where its outcome is put.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) command: Command,
    pub(crate) deadline: MonotonicTime,
    pub(crate) outcome: Option<Result<Reply, Error>>,
}

impl Request {
    pub(crate) fn new(command: Command, deadline: MonotonicTime) -> Self {
        Self {
            command,
            deadline,
            outcome: None,
        }
    }

    /// The outcome; every executed request has one.
    pub(crate) fn into_outcome(self) -> Result<Reply, Error> {
        self.outcome.expect("the store answers every request")
    }
}
