//! The lock that many readers or one writer have at a time, and its guards. A writer holds the key as a mutex does.

use std::fmt;
use std::ops::Deref;

use crate::acquire::Until;
use crate::client::Client;
use crate::command::Mode;
use crate::locks::guard::{Guard, guard};
use crate::locks::held::{HolderInfo, HolderKind, Holders};
use crate::locks::lock::{ClosureGuard, Lock, calls, settings};
use crate::locks::mutex::MutexGuard;
use crate::report::error::Error;
use crate::report::released::Released;

/// A lock that many readers or one writer hold at a time, over all clients. From [`Client::rw_lock`].
///
/// # Order
///
/// Readers and writers wait in one queue, in the order in which they asked. A reader that comes while a writer waits
/// waits behind it, so readers do not starve a writer. Readers that are next in the queue enter together.
///
/// The reading threads of one client share a lease. While one of them reads, another thread enters without a request,
/// unless a thread of this client waits. At most [`max_hand_offs`](crate::Builder::max_hand_offs) readers enter in this
/// way, within [`hand_off_time`](crate::Builder::hand_off_time).
///
/// A thread that reads must not call [`read`](Self::read) again: if a writer waits in between, the second call waits
/// for the writer, and the writer waits for the first guard. [Clone](RwLockReadGuard) the guard instead. A thread that
/// reads must not call [`write`](Self::write) either: it would wait for its own guard. If it is the only reader, it can
/// [become the writer](RwLockReadGuard::try_upgrade).
///
/// # Where it works
///
/// On one server, with Sentinel, on a Cluster, and on a [`MemoryStore`](crate::MemoryStore). On a
/// [quorum](Client::quorum), the calls fail with `Unsupported`: without a queue, a writer would starve. Use a mutex
/// there. The calls are also `Unsupported` beside [another library](crate::Builder::compatible_with).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let catalog = client.rw_lock("catalog");
/// {
///     let (one, two) = (catalog.read()?, catalog.try_read()?.unwrap());
///     assert!(catalog.try_write()?.is_none());
/// }
/// catalog.with_write(|guard| println!("alone, under token {}", guard.fencing_token()))?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct RwLock {
    lock: Lock,
}

settings!(RwLock, client.rw_lock("k"), write, MutexGuard::extend);
calls! {
    /// Calls that read.
    impl RwLock by read_guard -> RwLockReadGuard, "the lock to read", client.rw_lock("k");
    read try_read try_read_for try_read_until
    with_read try_with_read try_with_read_for try_with_read_until
}
calls! {
    /// Calls that write.
    impl RwLock by write_guard -> RwLockWriteGuard, "the lock to write", client.rw_lock("k");
    write try_write try_write_for try_write_until
    with_write try_with_write try_with_write_for try_with_write_until
}

impl RwLock {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let lock = Lock::new(client, key);
        let mode = Mode::Read;
        Self {
            lock: Lock { mode, ..lock },
        }
    }

    fn read_guard(&self, until: Until) -> Result<Option<RwLockReadGuard>, Error> {
        let guard = self.lock.acquire(until)?;
        Ok(guard.map(|guard| RwLockReadGuard { guard }))
    }

    fn write_guard(&self, until: Until) -> Result<Option<RwLockWriteGuard>, Error> {
        let guard = self.lock.acquire_as(Mode::Exclusive, until)?;
        Ok(guard.map(|guard| RwLockWriteGuard {
            guard: MutexGuard::new(guard),
        }))
    }

    /// The writer or the readers according to Redis, and the number of waiting clients. For diagnosis only: the result
    /// may be out of date when you read it. Threads of one client that share a lease count as one reader.
    ///
    /// If the key holds permits of a [`Semaphore`](crate::Semaphore), [`holders`](RwLockInfo::holders) lists them, and
    /// there are neither readers nor a writer.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `InvalidKey`; `Protocol` if the value under the key is not a
    /// lock; `Unsupported` on a quorum.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let catalog = client.rw_lock("catalog");
    /// let writer = catalog.write()?;
    /// assert_eq!(catalog.inspect()?.writer().unwrap().holder(), client.holder_id());
    /// drop(writer);
    ///
    /// let reader = catalog.read()?;
    /// assert_eq!(catalog.inspect()?.readers()[0].id(), reader.id());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn inspect(&self) -> Result<RwLockInfo, Error> {
        self.lock.inspect().map(RwLockInfo)
    }

    /// Takes the lock away from one holder that [`inspect`](Self::inspect) has found: a reader or the writer. Returns
    /// false if the holder's lease had already ended.
    ///
    /// For operators only: the threads of the holder's client may still be working, and continue until their client
    /// detects the loss, as after [`Semaphore::force_unlock`](crate::Semaphore::force_unlock).
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect). After `Timeout` or `Unavailable` it is unknown whether the lock was
    /// taken away: call [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let stuck = client.rw_lock("catalog").read()?;
    /// let operator = leasehold::Client::open(&server.url())?;
    /// let catalog = operator.rw_lock("catalog");
    /// for reader in catalog.inspect()?.readers() {
    ///     assert!(catalog.force_unlock(reader)?);
    /// }
    /// assert!(stuck.unlock().unwrap_err().is_lease_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn force_unlock(&self, holder: &HolderInfo) -> Result<bool, Error> {
        self.lock.force(holder)
    }
}

/// A lock held by a reader. The drop of the last guard that shares the lease writes the release to Redis, and does not
/// wait for the reply.
///
/// A guard has no lifetime, so it can be stored in a struct, and moved to and dropped on another thread. A loss of the
/// lease is reported by each of its guards: [`check`](Self::check), [`lost_signal`](Self::lost_signal),
/// [`on_lost`](Self::on_lost).
///
/// A clone is a further guard of the same lease. It sends no request, and never waits, even if a writer waits:
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::Released;
///
/// let guard = client.rw_lock("catalog").read()?;
/// let for_a_thread = guard.clone();
/// assert!(matches!(guard.unlock()?, Released::Shared));
/// std::thread::spawn(move || for_a_thread.check()).join().unwrap()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the lock is released as soon as its guard is dropped"]
pub struct RwLockReadGuard {
    guard: Guard,
}

guard!(RwLockReadGuard, client.rw_lock("k").read());

impl RwLockReadGuard {
    /// The fencing token of the lease: smaller than that of every later writer, and greater than that of every earlier
    /// one. A storage refuses a late write of a reader that lost the lock, such as the fill of a cache, once the next
    /// writer has written. Guards that share a lease have the same token.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let catalog = client.rw_lock("catalog");
    /// let read = catalog.with_read(|guard| guard.fencing_token())?;
    /// let write = catalog.with_write(|guard| guard.fencing_token())?;
    /// assert!(read < write);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fencing_token(&self) -> u64 {
        self.guard.lease.grant().token
    }

    /// Becomes the writer, without a gap in which another client could write. Returns the guard of the writer if this
    /// guard is the only reader of the key over all clients. If a clone, another guard of this client, or another
    /// client reads, too, returns this guard as `Ok(Err(guard))`. Sends one request at most.
    ///
    /// Never waits for other holders, so two readers that upgrade at the same time do not deadlock: at most one of them
    /// becomes the writer. A refused reader may try again later. But if two readers hold their guards and try until
    /// they succeed, neither of them succeeds. So after a few refusals, drop the guard and call [`RwLock::write`].
    ///
    /// Clients that wait for the lock keep their places. A writer that waits for this reader now waits until the new
    /// writer releases the lock.
    ///
    /// The writer has a new token, greater than that of every reader. It has the settings of the reader and is renewed
    /// as before; a [`fixed_ttl`](RwLock::fixed_ttl) and a [`max_hold`](RwLock::max_hold) count from the grant to the
    /// reader. The signals and callbacks of this guard end with it, so ask the new guard for its own.
    ///
    /// # Errors
    /// After an error, the lock is not held: this guard has ended.
    ///
    /// - `LeaseLost` if the lock was lost before.
    /// - `Timeout`, `Unavailable`, `Denied`, and the other errors of [`RwLock::try_write`]. Redis may have carried out
    ///   the request, so the client releases the lock. If the release fails, the lock is free when its ttl has ended.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let catalog = client.rw_lock("catalog");
    /// let (one, two) = (catalog.read()?, catalog.read()?);
    /// let Err(one) = one.try_upgrade()? else { panic!("there are two readers") };
    /// drop(two);
    ///
    /// let token = one.fencing_token();
    /// match one.try_upgrade()? {
    ///     Ok(writer) => assert!(writer.fencing_token() > token),
    ///     Err(reader) => drop(reader), // then `catalog.write()?`, and read again
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_upgrade(self) -> Result<Result<RwLockWriteGuard, Self>, Error> {
        let converted = self.guard.convert(Mode::Exclusive)?;
        let writer = |guard| RwLockWriteGuard {
            guard: MutexGuard::new(guard),
        };
        Ok(converted.map(writer).map_err(|guard| Self { guard }))
    }

    /// The id of the lease, for logs: 32 hexadecimal digits, which [`inspect`](RwLock::inspect) shows, too.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.rw_lock("catalog").read()?;
    /// assert_eq!(guard.id(), guard.clone().id());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn id(&self) -> String {
        self.guard.lease.grant().id.to_string()
    }
}

impl Clone for RwLockReadGuard {
    fn clone(&self) -> Self {
        Self {
            guard: self.guard.share(),
        }
    }
}

impl fmt::Debug for RwLockReadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RwLockReadGuard")
            .field("key", &self.key())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// A lock held by a writer. Its drop releases the lock in the same way as the drop of a [`MutexGuard`].
///
/// A `RwLockWriteGuard` dereferences to a [`MutexGuard`], so it has the same methods:
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let guard = client.rw_lock("catalog").write()?;
/// guard.check()?;
/// assert!(guard.fencing_token() > 0);
/// guard.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the lock is released as soon as its guard is dropped"]
pub struct RwLockWriteGuard {
    guard: MutexGuard,
}

impl RwLockWriteGuard {
    /// Releases the lock and waits for Redis to confirm it, as [`MutexGuard::unlock`] does.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before: another holder may have run at the same time.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.rw_lock("catalog").write()?;
    /// assert!(guard.unlock()?.is_confirmed());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn unlock(self) -> Result<Released, Error> {
        self.guard.unlock()
    }

    /// Becomes a reader, without a gap in which another client could write. Readers at the head of the queue enter at
    /// the same time. A writer at the head of the queue waits for the new reader, and later readers wait behind it.
    /// The next waiting readers of this client join the new reader, up to
    /// [`max_hand_offs`](crate::Builder::max_hand_offs) of them. Sends one request.
    ///
    /// The reader has a new token, greater than that of this writer. It has the settings of the writer and is renewed
    /// as before; a [`fixed_ttl`](RwLock::fixed_ttl) and a [`max_hold`](RwLock::max_hold) count from the grant to the
    /// writer. The signals and callbacks of this guard end with it, so ask the new guard for its own.
    ///
    /// # Errors
    /// The errors of [`try_upgrade`](RwLockReadGuard::try_upgrade). After an error, the lock is not held.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let catalog = client.rw_lock("catalog");
    /// let writer = catalog.write()?;
    /// // .. writes, and then publishes what it has written, while other clients cannot change it:
    /// let reader = writer.downgrade()?;
    /// assert!(catalog.try_read()?.is_some());
    /// assert!(catalog.try_write()?.is_none());
    /// # drop(reader);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn downgrade(self) -> Result<RwLockReadGuard, Error> {
        match self.guard.into_guard().convert(Mode::Read)? {
            Ok(guard) => Ok(RwLockReadGuard { guard }),
            Err(_) => unreachable!("only an upgrade is refused"),
        }
    }

    /// Turns this guard into the guard of a mutex, for example to make a [ticket](MutexGuard::into_ticket).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let ticket = client.rw_lock("catalog").write()?.into_mutex_guard().into_ticket()?;
    /// let guard = client.adopt(&ticket)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn into_mutex_guard(self) -> MutexGuard {
        self.guard
    }
}

impl Deref for RwLockWriteGuard {
    type Target = MutexGuard;

    fn deref(&self) -> &MutexGuard {
        &self.guard
    }
}

impl ClosureGuard for RwLockWriteGuard {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.guard.run(work)
    }

    fn finish(self) -> Result<(), Error> {
        self.guard.finish()
    }
}

/// Shows the key of the lock, as a [`MutexGuard`] does.
impl fmt::Display for RwLockWriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.guard, f)
    }
}

impl fmt::Debug for RwLockWriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RwLockWriteGuard")
            .field(&self.guard)
            .finish()
    }
}

/// The holders of a read-write lock according to Redis, from [`RwLock::inspect`].
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let catalog = client.rw_lock("catalog");
/// let reader = catalog.read()?;
/// let found = catalog.inspect()?;
/// assert!(found.writer().is_none());
/// assert_eq!(found.holders(), found.readers());
/// assert_eq!((found.readers().len(), found.readers_in_total(), found.clients_waiting()), (1, 1, 0));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RwLockInfo(Holders);

impl RwLockInfo {
    /// The holders, at most 100: the readers whose leases end first, or the writer. Permits of a semaphore, if they
    /// hold the key.
    pub fn holders(&self) -> &[HolderInfo] {
        &self.0.listed
    }

    /// The writer, if there is one.
    pub fn writer(&self) -> Option<&HolderInfo> {
        let is_writer = self.0.kind() == Some(HolderKind::Exclusive);
        self.0.listed.first().filter(|_| is_writer)
    }

    /// At most 100 readers: those whose leases end first if they are not renewed.
    pub fn readers(&self) -> &[HolderInfo] {
        match self.0.kind() {
            Some(HolderKind::Reader) => &self.0.listed,
            _ => &[],
        }
    }

    /// The number of all readers.
    pub fn readers_in_total(&self) -> u32 {
        match self.0.kind() {
            Some(HolderKind::Reader) => self.0.taken,
            _ => 0,
        }
    }

    /// The number of clients in the queue. Each client may have several waiting threads.
    pub fn clients_waiting(&self) -> usize {
        self.0.queued
    }
}
