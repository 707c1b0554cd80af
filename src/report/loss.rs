//! The reasons for which a lock is lost.

use std::fmt;

use crate::util::id::HolderId;
use crate::util::text::printable;

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

/// The first key of a set that was lost, and the reason. From [`MutexesGuard`](crate::MutexesGuard).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let both = client.mutexes(["account:1", "account:2"]).lock()?;
/// client.mutex("account:2").force_unlock()?;
/// let lost = both.lost_signal().recv().unwrap();
/// assert_eq!(lost.key, "account:2");
/// println!("{lost}"); // account:2: unlocked by force by ..
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LostKey {
    /// The name of the key.
    pub key: String,
    /// Why the key was lost.
    pub reason: LossReason,
}

impl fmt::Display for LostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", printable(&self.key, usize::MAX), self.reason)
    }
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
