//! Why a lock can be lost.

use std::fmt;

use crate::util::id::HolderId;

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
    /// Its key was deleted, evicted or flushed, or Redis came back without it. Also if another client took it with
    /// [`Mutex::force_unlock`](crate::Mutex::force_unlock) while this client did not listen: a client listens once a
    /// lock of its own was held for 30 ms, or a thread has waited.
    Deleted,
    /// Another client let go of it with [`Mutex::force_unlock`](crate::Mutex::force_unlock), and this client heard of
    /// that.
    ForceUnlocked {
        /// The client that did.
        by: HolderId,
    },
    /// It was held for as long as `max_hold` allows.
    MaxHold,
    /// What [`Mutex::renew_while`](crate::Mutex::renew_while) asks said no, so it was not renewed.
    NotRenewed,
    /// The thread that held a [`ReentrantMutex`](crate::ReentrantMutex) ended without letting go.
    ThreadEnded,
    /// The client was shut down while it was held. The key stays in Redis until its ttl ends.
    Shutdown,
    /// It is the parent's, and this is a child that was forked off while it was held.
    Forked,
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
            Self::NotRenewed => f.write_str("renew_while said no"),
            Self::ThreadEnded => f.write_str("the thread that held it has ended"),
            Self::Shutdown => f.write_str("the client was shut down"),
            Self::Forked => f.write_str("it is held by the process that this one was forked off"),
        }
    }
}
