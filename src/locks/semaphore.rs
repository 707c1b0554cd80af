//! The lock that a limited number of holders have at a time, and its guard.

use std::fmt;
use std::time::Duration;

use crate::acquire::Until;
use crate::client::Client;
use crate::command::Mode;
use crate::locks::guard::{Guard, guard};
use crate::locks::held::{HolderInfo, HolderKind, Holders};
use crate::locks::lock::{Lock, calls, settings};
use crate::report::error::Error;

/// A number of permits under one key, and the settings to acquire them. From [`Client::semaphore`].
///
/// Up to `permits` permits are held at a time, over all clients. Each permit has its own ttl and is renewed by its
/// client, so a crash frees exactly the permits of the crashed client, after their ttl. Waiters are served strictly in
/// the order in which they asked, whatever number of permits they want: many small requests do not starve a big one.
///
/// # The limit belongs to the caller
///
/// Redis stores no limit. Each request contains the caller's limit, and is granted if the held permits and the
/// requested ones together do not exceed this limit. So you do not have to set a limit first. To change the limit,
/// deploy programs with another number: until all of them have it, the greatest number in use bounds the permits. A
/// lower limit takes no permit away. The event [`limits_differ`](crate::EventHandler::limits_differ) and
/// [`inspect`](Self::inspect) show different limits.
///
/// # Where it works
///
/// On one server, with Sentinel, on a Cluster, and on a [`MemoryStore`](crate::MemoryStore). On a
/// [quorum](Client::quorum), the calls fail with `Unsupported`: a majority of the nodes would admit too many holders.
/// Use one mutex for each permit there, and [`try_lock`](crate::Mutex::try_lock) on one after the other. The calls are
/// also `Unsupported` beside [another library](crate::Builder::compatible_with).
///
/// A mutex with the same key excludes the permits, and waits until all of them are released.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let gpus = client.semaphore("gpu", 2);
/// let (first, second) = (gpus.acquire()?, gpus.acquire()?);
/// assert!(gpus.try_acquire()?.is_none());
/// drop(first);
/// let third = gpus.acquire()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a semaphore does nothing until a permit is acquired"]
pub struct Semaphore {
    lock: Lock,
}

settings!(
    Semaphore,
    client.semaphore("k", 1),
    acquire,
    SemaphorePermit::extend
);
calls! {
    impl Semaphore by permit -> SemaphorePermit, "the permits", client.semaphore("k", 1);
    acquire try_acquire try_acquire_for try_acquire_until
    with try_with try_with_for try_with_until
}

impl Semaphore {
    pub(crate) fn new(client: Client, key: &str, permits: u32) -> Self {
        let mode = Mode::Permits {
            weight: 1,
            limit: permits,
        };
        let lock = Lock::new(client, key);
        Self {
            lock: Lock { mode, ..lock },
        }
    }

    fn permit(&self, until: Until) -> Result<Option<SemaphorePermit>, Error> {
        let guard = self.lock.acquire(until)?;
        Ok(guard.map(|guard| SemaphorePermit { guard }))
    }

    /// The number of permits that a call acquires: all of them together or none. 1 to 1,000, and at most the limit of
    /// the semaphore. Defaults to 1.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let memory = client.semaphore("memory", 16);
    /// let big = memory.clone().weight(12).acquire()?;
    /// assert_eq!(big.weight(), 12);
    /// assert!(memory.clone().weight(5).try_acquire()?.is_none());
    /// assert!(memory.weight(4).try_acquire()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn weight(mut self, weight: u32) -> Self {
        if let Mode::Permits { limit, .. } = self.lock.mode {
            self.lock.mode = Mode::Permits { weight, limit };
        }
        self
    }

    /// Keeps each permit taken for at least `min_hold` from its grant, by the clock of Redis, even if its holder
    /// releases it earlier or crashes. So a semaphore grants at most its number of permits in each `min_hold`. Use it
    /// to limit how often work starts: callers that exceed the limit wait in order. 10 ms to
    /// [`Builder::max_ttl`](crate::Builder::max_ttl). The client never hands such permits off to another of its
    /// threads.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let client = memory.client()?;
    /// let calls = client.semaphore("calls", 2).min_hold(Duration::from_secs(1));
    /// for _ in 0..2 {
    ///     calls.with(|_| println!("one of two calls in this second"))?;
    /// }
    /// assert!(calls.try_acquire()?.is_none());
    /// memory.advance(Duration::from_secs(2));
    /// assert!(calls.try_acquire()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.lock.min_hold = min_hold;
        self
    }

    /// The permits that are held according to Redis, and the number of waiting clients. For diagnosis only: the result
    /// may be out of date when you read it. While a [`Mutex`](crate::Mutex) or readers of a [`RwLock`](crate::RwLock)
    /// hold the key, [`holders`](SemaphoreInfo::holders) lists them, and no permit is available.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `InvalidKey`; `Protocol` if the value under the key is not a
    /// lock; `Unsupported` on a quorum.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let gpus = client.semaphore("gpu", 8);
    /// assert_eq!(gpus.inspect()?.taken(), 0);
    /// let permit = gpus.acquire()?;
    /// assert_eq!(gpus.inspect()?.available(), 7);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn inspect(&self) -> Result<SemaphoreInfo, Error> {
        Ok(SemaphoreInfo {
            limit: self.lock.mode.limit(),
            holders: self.lock.inspect()?,
        })
    }

    /// Takes away the permits of one holder that [`inspect`](Self::inspect) has found. The next waiters then get them.
    /// Returns false if they were released before.
    ///
    /// For operators only: the holder may still be working, and continues until its client detects the loss. A client
    /// that is subscribed to notifications reports [`ForceUnlocked`](crate::LossReason::ForceUnlocked) within
    /// milliseconds. A client that is not subscribed detects the loss at its next renewal, and reports `Deleted`. If
    /// the holder's client is not subscribed, the call waits for up to a second.
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect). After `Timeout` or `Unavailable` it is unknown whether the permits
    /// were taken away: call [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let stuck = client.semaphore("gpu", 8).acquire()?;
    /// let operator = leasehold::Client::open(&server.url())?;
    /// let gpus = operator.semaphore("gpu", 8);
    /// for holder in gpus.inspect()?.holders() {
    ///     assert!(gpus.force_unlock(holder)?);
    /// }
    /// assert!(stuck.unlock().unwrap_err().is_lease_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn force_unlock(&self, holder: &HolderInfo) -> Result<bool, Error> {
        self.lock.force(holder)
    }
}

/// Held permits of a [`Semaphore`]. Their drop releases them: it writes the release to Redis, and does not wait for the
/// reply.
///
/// A permit has no lifetime, so it can be stored in a struct, and moved to and dropped on another thread. If the next
/// waiting thread of the same client asked with the same settings, the drop hands the permits off to it.
///
/// Permits have no fencing token: several holders work at the same time, so a storage could not recognize a late holder
/// by a number. A holder learns of a loss by [`check`](Self::check), [`lost_signal`](Self::lost_signal) or
/// [`on_lost`](Self::on_lost).
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let permit = client.semaphore("gpu", 8).acquire()?;
/// permit.check()?;
/// println!("{} permits of {}, as {}", permit.weight(), permit.key(), permit.id());
/// permit.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the permits are released as soon as their guard is dropped"]
pub struct SemaphorePermit {
    guard: Guard,
}

guard!(SemaphorePermit, client.semaphore("k", 1).acquire());

impl SemaphorePermit {
    /// The id of this grant, for logs: 32 hexadecimal digits, which [`inspect`](Semaphore::inspect) shows, too.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let permit = client.semaphore("gpu", 8).acquire()?;
    /// assert_eq!(permit.id().len(), 32);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn id(&self) -> String {
        self.guard.lease.grant().id.to_string()
    }

    /// The number of permits.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert_eq!(client.semaphore("gpu", 8).weight(3).acquire()?.weight(), 3);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn weight(&self) -> u32 {
        self.guard.lease.grant().options.mode.weight()
    }
}

impl fmt::Debug for SemaphorePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SemaphorePermit")
            .field("key", &self.key())
            .field("weight", &self.weight())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// The permits of a semaphore according to Redis, from [`Semaphore::inspect`].
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let gpus = client.semaphore("gpu", 8);
/// let permit = gpus.clone().weight(3).acquire()?;
/// let found = gpus.inspect()?;
/// assert_eq!((found.taken(), found.available(), found.clients_waiting()), (3, 5, 0));
/// assert_eq!(found.holders().len(), 1);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SemaphoreInfo {
    limit: u32,
    holders: Holders,
}

impl SemaphoreInfo {
    /// At most 100 holders: those whose leases end first if they are not renewed.
    pub fn holders(&self) -> &[HolderInfo] {
        &self.holders.listed
    }

    /// The number of permits that are held, or that [`min_hold`](Semaphore::min_hold) keeps taken. All of them while a
    /// mutex or readers hold the key.
    pub fn taken(&self) -> u32 {
        match self.holders.kind() {
            Some(HolderKind::Exclusive | HolderKind::Reader) => self.limit,
            _ => self.holders.taken,
        }
    }

    /// The number of permits that are left under the limit of this semaphore. Clients may be waiting for them.
    pub fn available(&self) -> u32 {
        self.limit.saturating_sub(self.taken())
    }

    /// The number of clients in the queue. Each client may have several waiting threads.
    pub fn clients_waiting(&self) -> usize {
        self.holders.queued
    }
}
