//! The reasons for which a lock is lost.

use std::fmt;

use crate::util::id::HolderId;

/// Why a held lock was lost. More reasons may be added.
///
/// ```
/// # use leasehold::LossReason;
/// assert_eq!(LossReason::Deleted.to_string(), "its key was deleted");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum LossReason {
    /// The validity of the lock ended: it was not renewed in time, or it has a fixed ttl.
    Expired,
    /// The key of the lock has another value.
    TakenOver {
        /// The new holder, if the value could be read.
        by: Option<HolderId>,
    },
    /// The key of the lock was deleted, evicted or flushed, or Redis came back without the key. Also reported if
    /// another client took the lock away with [`Mutex::force_unlock`](crate::Mutex::force_unlock) while this client
    /// could not get notifications.
    Deleted,
    /// Another client released the lock with [`Mutex::force_unlock`](crate::Mutex::force_unlock), and this client got
    /// the notification.
    ForceUnlocked {
        /// The client that called `force_unlock`.
        by: HolderId,
    },
    /// The lock was held for as long as `max_hold` allows.
    MaxHold,
    /// The check of [`Mutex::renew_while`](crate::Mutex::renew_while) returned false or panicked, so the lock was not
    /// renewed.
    NotRenewed,
    /// The thread that held a [`ReentrantMutex`](crate::ReentrantMutex) ended without a release.
    ThreadEnded,
    /// The client was shut down while the lock was held. The key stays in Redis until its ttl ends.
    Shutdown,
    /// This process is a fork, and its parent holds the lock.
    Forked,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("its validity ended"),
            Self::TakenOver { by: Some(holder) } => write!(f, "taken over by {holder}"),
            Self::TakenOver { by: None } => f.write_str("its key was overwritten"),
            Self::Deleted => f.write_str("its key was deleted"),
            Self::ForceUnlocked { by } => write!(f, "unlocked by force by {by}"),
            Self::MaxHold => f.write_str("held for as long as max_hold allows"),
            Self::NotRenewed => f.write_str("its renew_while check returned false or panicked"),
            Self::ThreadEnded => f.write_str("the thread that held it has ended"),
            Self::Shutdown => f.write_str("the client was shut down"),
            Self::Forked => f.write_str("the process that forked this one holds it"),
        }
    }
}
