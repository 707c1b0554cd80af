//! Why a lock can be lost.

use std::fmt;

use crate::id::HolderId;

/// Why a held lock is no longer held. More reasons may come.
///
/// ```
/// # use leasehold::LossReason;
/// assert_eq!(LossReason::Deleted.to_string(), "its key was deleted");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// Its validity ended: it was not renewed in time, or was never to be renewed.
    Expired,
    /// Another value stands under its key.
    TakenOver {
        /// The holder that is there now, where its value could be read.
        by: Option<HolderId>,
    },
    /// Its key was deleted, evicted or flushed, or Redis came back without it.
    Deleted,
    /// Another client let go of it with [`Mutex::force_unlock`](crate::Mutex::force_unlock).
    ForceUnlocked {
        /// The client that did.
        by: HolderId,
    },
    /// It was held for as long as `max_hold` allows.
    MaxHold,
    /// The client was shut down while it was held. The key stays in Redis until its ttl ends.
    Shutdown,
}

impl LossReason {
    /// Whether the key may still be there, ours and of no use to anybody.
    pub(crate) fn may_leave_its_key(&self) -> bool {
        // Who lets go by force tells before it does, and may then fail to.
        !matches!(self, Self::Deleted | Self::TakenOver { .. })
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("its validity ended"),
            Self::TakenOver { by: Some(holder) } => write!(f, "taken over by {holder}"),
            Self::TakenOver { by: None } => f.write_str("its key was overwritten"),
            Self::Deleted => f.write_str("its key was deleted"),
            Self::ForceUnlocked { by } => write!(f, "let go by force, by {by}"),
            Self::MaxHold => f.write_str("held for as long as max_hold allows"),
            Self::Shutdown => f.write_str("the client was shut down"),
        }
    }
}
