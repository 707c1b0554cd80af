//! Descriptions of locks, as plain data: the holder of a lock according to Redis, and the locks that this client holds.

use std::time::Duration;

use crate::command::value::LockValue;
use crate::util::id::{HolderId, LeaseId};

/// The holder of a lock according to Redis, from [`Mutex::inspect`](crate::Mutex::inspect).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let found = client.mutex("k").inspect()?.unwrap();
/// println!("{} has had it for a while: {found:?}", found.holder());
/// assert_eq!(found.lease_id().len(), 32);
/// assert_eq!(found.holder(), client.holder_id());
/// if let Some(token) = found.fencing_token() {
///     assert_eq!(token, guard.fencing_token());
/// }
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

/// The example of [`LockInfo`] uses every method.
impl LockInfo {
    pub(crate) fn new(value: LockValue, expires_in: Option<Duration>) -> Self {
        Self { value, expires_in }
    }

    /// The client that holds the lock: `host/pid/random`.
    pub fn holder(&self) -> &HolderId {
        &self.value.holder
    }

    /// The lease id in Redis: 32 hexadecimal digits that identify the grant. Keep it out of logs: it is enough to make
    /// a ticket for [`Client::adopt`](crate::Client::adopt). `Debug` shows its first eight digits.
    pub fn lease_id(&self) -> String {
        self.value.lease.to_string()
    }

    pub(crate) fn lease(&self) -> LeaseId {
        self.value.lease
    }

    /// The fencing token of the grant. The token of the guard is greater by the number of hand-offs within its client
    /// since the grant: Redis does not know of hand-offs.
    ///
    /// `None` if the lock was acquired by plain commands instead of a script: then only its holder knows the token.
    pub fn fencing_token(&self) -> Option<u64> {
        self.value.token
    }

    /// The time until the key expires if it is not renewed. `None` if another program has removed the ttl; the next
    /// request for the lock sets a ttl again.
    pub fn expires_in(&self) -> Option<Duration> {
        self.expires_in
    }

    /// The number of clients in the queue of the lock. Each client may have several waiting threads.
    pub fn clients_waiting(&self) -> usize {
        self.value.queued
    }
}

/// A lock that this client holds, from [`Client::held_locks`](crate::Client::held_locks).
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

/// The example of [`HeldLock`] uses every method.
impl HeldLock {
    /// The name of the lock.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The fencing token of the lock's guard.
    pub fn fencing_token(&self) -> u64 {
        self.token
    }

    /// For how long this client has held the lock. A hand-off between its threads does not restart this time.
    pub fn age(&self) -> Duration {
        self.age
    }

    /// The rest of the validity: for how long the lock is held if all further renewals fail.
    pub fn remaining(&self) -> Duration {
        self.remaining
    }
}
