//! The reports of servers about locks. Each report names its server.

use crate::command::GrantMessage;
use crate::command::value;
use crate::command::value::LockValue;
use crate::config::key::Key;
use crate::report::loss::LossReason;
use crate::util::id::{HolderId, LeaseId, LeaseStart};

/// One of the servers of a store, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub u8);

impl ServerId {
    /// The server of a store that has only one.
    pub const ONLY: Self = Self(0);
}

/// A key to read, and the lease that is expected to hold it.
#[derive(Clone, Debug)]
pub struct TrackedKey {
    pub key: Key,
    pub lease: Option<LeaseId>,
}

/// One client's hold of a lock, from its grant to its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub lease: LeaseId,
    pub holder: HolderId,
}

/// The state of a key, as one server reported it.
#[derive(Clone, Copy)]
pub enum KeyState<'a> {
    Missing,
    /// The key holds a string with these first bytes. A program other than this library may have written it.
    Text(&'a [u8]),
    /// This lease holds the key, which has the form of a lock of Redisson.
    HeldBy(LeaseId),
    /// The key holds a value that is no string, such as a fenced value, or that was not read.
    Other,
}

impl KeyState<'_> {
    pub fn is_present(self) -> bool {
        !matches!(self, Self::Missing)
    }

    /// Whether `lease` holds the key.
    pub fn is_held_by(self, lease: LeaseId) -> bool {
        match self {
            Self::Text(value) => value::is_held_by(value, lease),
            Self::HeldBy(holder) => holder == lease,
            Self::Missing | Self::Other => false,
        }
    }

    /// Whether a lease holds the key and other clients are queued for it.
    pub fn has_queue(self) -> bool {
        matches!(self, Self::Text(value) if value::has_queue(value))
    }

    /// The reason of the loss of a lease that does not hold the key.
    pub fn loss_reason(self) -> LossReason {
        match self {
            Self::Missing => LossReason::Deleted,
            Self::Text(value) => LossReason::TakenOver {
                by: value::holder_of(value),
            },
            Self::HeldBy(_) | Self::Other => LossReason::TakenOver { by: None },
        }
    }

    /// The turn of the client that holds the lock.
    pub fn turn(self) -> Option<Turn> {
        let Self::Text(value) = self else {
            return None;
        };
        let LockValue { lease, holder, .. } = LockValue::parse(value, 0)?;
        Some(Turn { lease, holder })
    }
}

/// Handles the reports of servers. The store calls these methods on one of its threads, so they must return quickly.
/// They may call [`Notifications::track`](crate::store::Notifications::track).
///
/// If [`Notifications::must_confirm_losses`](crate::store::Notifications::must_confirm_losses) returns true, a request
/// has to confirm a reported loss before the listener ends the lease: one server may have lost a lease that a majority
/// of the servers still has, for example.
pub trait Listener: Send + Sync {
    /// Redis has granted `key` to `lease`, which was queued.
    fn granted(&self, server: ServerId, key: &Key, lease: LeaseId, grant: GrantMessage);
    /// `lease` has come among the first waiters for `key`.
    fn near(&self, server: ServerId, key: &Key, lease: LeaseStart);
    /// The client has to send a request for `lease` at once. Otherwise `lease` loses its place in the queue for `key`.
    fn called(&self, server: ServerId, key: &Key, lease: LeaseStart);
    /// A message reports that the client `by` took `key` from `lease` by force. Each user with the right to publish can
    /// send such a message.
    fn forced(&self, server: ServerId, key: &Key, lease: LeaseStart, by: HolderId);
    /// `key` was changed. Returns the key, and the lease expected there, if the store should read and track it again.
    fn changed(&self, server: ServerId, key: &Key) -> Option<TrackedKey>;
    /// Any key of the server may have changed: the server was flushed, or notifications were missed. The listener
    /// tracks the keys again.
    fn all_changed(&self, server: ServerId);
    /// The keys for which `keys` returns true have moved to another server. The listener tracks them again.
    fn moved(&self, keys: &dyn Fn(&Key) -> bool);
    /// A tracked key was read.
    fn seen(&self, server: ServerId, tracked: &TrackedKey, state: KeyState<'_>);
    /// A test moved the client's clock ahead.
    fn clock_moved(&self);
}

/// Does nothing.
#[cfg(all(test, not(shuttle)))]
pub struct NoListener;

#[cfg(all(test, not(shuttle)))]
impl Listener for NoListener {
    fn granted(&self, _: ServerId, _: &Key, _: LeaseId, _: GrantMessage) {}
    fn near(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn called(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn forced(&self, _: ServerId, _: &Key, _: LeaseStart, _: HolderId) {}
    fn changed(&self, _: ServerId, _: &Key) -> Option<TrackedKey> {
        None
    }
    fn all_changed(&self, _: ServerId) {}
    fn moved(&self, _: &dyn Fn(&Key) -> bool) {}
    fn seen(&self, _: ServerId, _: &TrackedKey, _: KeyState<'_>) {}
    fn clock_moved(&self) {}
}
