//! What can be told about a lock: who has it in Redis, and which locks this client holds. Plain data.

use std::time::Duration;

use crate::store::LockValue;
use crate::util::id::{HolderId, LeaseId};

/// Who has a lock, as Redis says: see [`Mutex::inspect`](crate::Mutex::inspect).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let found = client.mutex("k").inspect()?.unwrap();
/// println!("{} has had it for a while: {found:?}", found.holder());
/// assert_eq!(found.lease_id().len(), 32);
/// assert_eq!(found.holder(), client.holder_id());
/// assert_eq!(found.fencing_token(), guard.fencing_token());
/// assert!(found.expires_in() <= Some(std::time::Duration::from_secs(30)));
/// assert_eq!(found.clients_waiting(), 0);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    value: LockValue,
    expires_in: Option<Duration>,
}

/// Every method can be seen in use in the example of [`LockInfo`].
impl LockInfo {
    pub(crate) fn new(value: LockValue, expires_in: Option<Duration>) -> Self {
        Self { value, expires_in }
    }

    /// The client that has it: `host/pid/random`.
    pub fn holder(&self) -> &HolderId {
        &self.value.holder
    }

    /// The id of the grant, as it stands in Redis: 32 hexadecimal digits. Keep it out of logs: with the fencing
    /// token, it makes a ticket for [`Client::adopt`](crate::Client::adopt). `Debug` shows its first eight digits.
    pub fn lease_id(&self) -> String {
        self.value.lease.to_string()
    }

    pub(crate) fn lease(&self) -> LeaseId {
        self.value.lease
    }

    /// The fencing token of the grant. The holder's own is greater by the number of times that the
    /// lock was passed on within its client since, which Redis does not know.
    pub fn fencing_token(&self) -> u64 {
        self.value.token
    }

    /// When it ends if it is not renewed; nothing if something has taken its ttl away (whoever asks
    /// for the lock next gives it one).
    pub fn expires_in(&self) -> Option<Duration> {
        self.expires_in
    }

    /// How many clients are in its queue; each may have many threads that wait.
    pub fn clients_waiting(&self) -> usize {
        self.value.queued
    }
}

/// A lock that this client holds: see [`Client::held_locks`](crate::Client::held_locks).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// for held in client.held_locks() {
///     println!("{} since {:?}", held.key(), held.age());
///     assert_eq!(held.fencing_token(), guard.fencing_token());
///     assert!(held.remaining() > held.age());
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldLock {
    pub(crate) key: String,
    pub(crate) token: u64,
    pub(crate) age: Duration,
    pub(crate) remaining: Duration,
}

/// Every method can be seen in use in the example of [`HeldLock`].
impl HeldLock {
    /// The name of the lock.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The fencing token of its guard.
    pub fn fencing_token(&self) -> u64 {
        self.token
    }

    /// For how long this client has had it, however often its threads have passed it on since.
    pub fn age(&self) -> Duration {
        self.age
    }

    /// For how long it is sure to be held if it were not renewed.
    pub fn remaining(&self) -> Duration {
        self.remaining
    }
}
