//! The public types of the stores without a server, for tests of programs that use locks.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crate::client::Client;
use crate::client::builder::Builder;
use crate::memory::MemoryServer;
use crate::report::error::{Error, ErrorKind};

/// A store without a server, for tests of code that uses locks. Its clients exclude each other within this process.
///
/// Locks and fenced values behave as in Redis: a test of this library compares both stores command by command.
/// Transactions need a Redis server.
///
/// A test can move the clock ([`advance`](Self::advance)), let the store [`fail`](Self::fail) or [`hang`](Self::hang)
/// until it [recovers](Self::recover), and delete [one key](Self::delete) or [all keys](Self::flush). Requests, waits,
/// renewals, releases and events then behave as with a Redis server in that state.
///
/// URLs name stores, too: `memory://` is a new store, and `memory://orders` is the store with that name in this
/// process.
///
/// A child made by `fork` cannot use a store of its parent: there, the store's methods have no effect, and its clients
/// fail with [`Forked`](crate::ErrorKind::Forked). Make a new store in the child, without a name, since the named
/// stores belong to the parent.
///
/// ```
/// use std::time::Duration;
/// use leasehold::{ErrorKind, MemoryStore};
///
/// let memory = MemoryStore::new();
/// let (one, two) = (memory.client()?, memory.client()?);
/// let guard = one.mutex("invoice:42").lock()?;
/// assert!(two.mutex("invoice:42").try_lock()?.is_none());
///
/// memory.advance(Duration::from_secs(31)); // as if the machine had slept for longer than the ttl
/// assert!(guard.is_lost());
/// assert!(two.mutex("invoice:42").try_lock()?.is_some());
/// assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::LeaseLost);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<MemoryServer>);

impl MemoryStore {
    /// An empty store.
    ///
    /// ```
    /// let memory = leasehold::MemoryStore::new();
    /// # let _ = memory;
    /// ```
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self(MemoryServer::new())
    }

    /// A client of this store, with default settings.
    ///
    /// # Errors
    /// `Unavailable` if the client's threads cannot be started; `Forked` in a child of the process that made the store,
    /// or of a process that had clients when it forked.
    ///
    /// ```
    /// let client = leasehold::MemoryStore::new().client()?;
    /// assert_eq!(client.with_lock("a", || 1)?, 1);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn client(&self) -> Result<Client, Error> {
        self.builder().build()
    }

    /// A builder for a client of this store. Settings of connections have no effect.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new();
    /// let client = memory.builder().ttl(Duration::from_secs(5)).build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn builder(&self) -> Builder {
        Builder::with_memory(Arc::clone(&self.0))
    }

    /// Moves the clock of this store and of all its clients ahead, by a year at most, as if the machine had slept for
    /// `by`.
    ///
    /// When this returns, locks that expired in that time are lost, and locks that are due for renewal have been
    /// renewed. To let more time pass than the ttl and keep the locks, advance in steps of less than two thirds of the
    /// ttl. Callbacks and events run a little later, on the client's callback thread;
    /// [`Client::shutdown`](crate::Client::shutdown) waits for them.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new();
    /// let guard = memory.client()?.mutex("k").lock()?; // ttl 30 s, renewed after 10
    /// for _ in 0..10 {
    ///     memory.advance(Duration::from_secs(15));
    /// }
    /// guard.check()?;
    /// memory.advance(Duration::from_secs(30));
    /// assert!(guard.is_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn advance(&self, by: Duration) {
        if let Ok(server) = self.0.live() {
            server.advance(by);
        }
    }

    /// Deletes all keys, like a Redis server that restarts without its data. When this returns, every holder has lost
    /// its lock; while the store fails or hangs, holders detect the loss later.
    ///
    /// ```
    /// let memory = leasehold::MemoryStore::new();
    /// let client = memory.client()?;
    /// let guard = client.mutex("k").lock()?;
    /// memory.flush();
    /// assert!(guard.is_lost());
    /// assert!(!client.mutex("k").is_locked()?);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn flush(&self) {
        if let Ok(server) = self.0.live() {
            server.flush();
        }
    }
}

// The store's mutex is not poisoned, and user code does not run while it is locked.
impl UnwindSafe for MemoryStore {}
impl RefUnwindSafe for MemoryStore {}

/// Simulated outages, for tests. The page on [testing](crate::guide::testing) shows how to use them.
impl MemoryStore {
    /// Makes every request of every client fail at once with `kind`, until [`recover`](Self::recover). Clients get no
    /// notifications until then. `Unavailable` simulates a Redis server that is down, `Denied` a changed password,
    /// `Protocol` another kind of server.
    ///
    /// Held locks stay held until their validity ends, since they cannot be renewed. Clients repeat releases until they
    /// succeed or the ttl of the lock has ended, and report them by events.
    ///
    /// # Panics
    /// If `kind` is not `Unavailable`, `Timeout`, `Denied` or `Protocol`: requests to Redis fail with these kinds only.
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold::{ErrorKind, MemoryStore};
    ///
    /// let memory = MemoryStore::new();
    /// let client = memory.client()?;
    /// let guard = client.mutex("k").lock()?;
    ///
    /// memory.fail(ErrorKind::Unavailable);
    /// assert!(client.mutex("other").try_lock().unwrap_err().is_unavailable());
    /// memory.advance(Duration::from_secs(15)); // renewals fail
    /// assert!(!guard.is_lost());
    /// memory.advance(Duration::from_secs(15)); // the ttl has ended
    /// assert!(guard.is_lost());
    ///
    /// memory.recover();
    /// assert!(client.mutex("other").try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fail(&self, kind: ErrorKind) {
        use ErrorKind::{Denied, Protocol, Timeout, Unavailable};
        assert!(
            matches!(kind, Denied | Protocol | Timeout | Unavailable),
            "no request to Redis fails with {kind:?}"
        );
        if let Ok(server) = self.0.live() {
            server.fail(kind);
        }
    }

    /// Leaves all requests without a reply until [`recover`](Self::recover). Clients get no notifications until then.
    ///
    /// After its client's [`command_timeout`](Builder::command_timeout), a request fails with `Timeout`. The store
    /// carries such a request out later only if it is a release. [`advance`](Self::advance) also shortens the wait for
    /// this time-out. While the store hangs, `advance` waits for renewals that become due: up to one `command_timeout`
    /// for each client with such renewals.
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold::{ErrorKind, MemoryStore};
    ///
    /// let memory = MemoryStore::new();
    /// let client = memory.builder().command_timeout(Duration::from_millis(5)).build()?;
    /// memory.hang();
    /// let error = client.mutex("k").try_lock().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Timeout);
    /// memory.recover();
    /// assert!(client.mutex("k").try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn hang(&self) {
        if let Ok(server) = self.0.live() {
            server.hang();
        }
    }

    /// Ends the outage that [`fail`](Self::fail) or [`hang`](Self::hang) began. When this returns, waiting requests
    /// have their replies, delayed releases have been carried out, and every client has checked the locks that it
    /// holds.
    ///
    /// ```
    /// # use leasehold::{ErrorKind, MemoryStore};
    /// let memory = MemoryStore::new();
    /// let client = memory.client()?;
    /// let guard = client.mutex("k").lock()?;
    /// memory.fail(ErrorKind::Unavailable);
    /// drop(guard);
    /// memory.recover();
    /// assert!(!client.mutex("k").is_locked()?);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn recover(&self) {
        if let Ok(server) = self.0.live() {
            server.recover();
        }
    }

    /// Deletes one key, as `DEL` does in Redis; returns whether it existed. `key` is the full name in Redis, with the
    /// prefix. When this returns, the holder has lost the lock; while the store fails or hangs, the holder detects the
    /// loss later.
    ///
    /// ```
    /// let memory = leasehold::MemoryStore::new();
    /// let client = memory.client()?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// assert!(memory.delete("leasehold:invoice:42"));
    /// assert!(guard.is_lost());
    /// assert!(!memory.delete("leasehold:invoice:42"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn delete(&self, key: &str) -> bool {
        self.0.live().is_ok_and(|server| server.delete(key))
    }

    /// Sets one key, as another library does when it acquires a lock. `expires_in` is the ttl; `None` is no ttl. `key`
    /// is the full name in Redis, with the prefix. A client with [`Builder::compatible_with`] then finds its lock taken
    /// by a hash, and waits until the key expires or a test [deletes](Self::delete) it. For other clients, the key is
    /// an error (`Protocol`). A holder of the key loses its lock.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use leasehold::{MemoryStore, OtherLibrary};
    ///
    /// let memory = MemoryStore::new();
    /// let builder = memory.builder().prefix("");
    /// let client = builder.compatible_with(OtherLibrary::PlainKeys).build()?;
    /// memory.set_foreign("invoice:42", Some(Duration::from_secs(8)));
    /// let mutex = client.mutex("invoice:42");
    /// assert!(mutex.try_lock()?.is_none());
    /// let waiter = std::thread::spawn(move || mutex.lock());
    /// memory.advance(Duration::from_secs(9));
    /// waiter.join().unwrap()?.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn set_foreign(&self, key: &str, expires_in: Option<Duration>) {
        if let Ok(server) = self.0.live() {
            server.set_foreign(key, expires_in);
        }
    }

    /// Restarts the server with its data.
    fn restart(&self) {
        if let Ok(server) = self.0.live() {
            server.restart();
        }
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

/// Servers in memory that are the nodes of a quorum, for tests of code that uses a quorum. The clients of the quorum
/// exclude each other within this process, while a majority of the nodes works.
///
/// A test can let each node [`fail`](Self::fail) or [`hang`](Self::hang) until it [recovers](Self::recover), and
/// restart it [with](Self::restart) and [without](Self::flush) its data. Nodes are named by their number, from 0. They
/// share one clock, which a test can move ([`advance`](Self::advance)).
///
/// The nodes begin with data that is older than `max_ttl`, so the first lock is granted at once.
///
/// # Panics
/// The methods that take the number of a node panic if there is no such node.
///
/// ```
/// use std::time::Duration;
/// use leasehold::{ErrorKind, MemoryQuorum};
///
/// let quorum = MemoryQuorum::new(3);
/// let (one, two) = (quorum.client()?, quorum.client()?);
/// let guard = one.mutex("invoice:42").lock()?;
/// quorum.fail(0, ErrorKind::Unavailable); // a minority
/// assert!(two.mutex("invoice:42").try_lock()?.is_none());
/// quorum.advance(Duration::from_secs(15)); // the other nodes renew the lock
/// guard.check()?;
///
/// quorum.fail(1, ErrorKind::Unavailable); // a majority is away
/// assert!(two.mutex("other").try_lock().is_err());
/// quorum.recover(1);
/// guard.unlock()?;
/// assert!(two.mutex("invoice:42").try_lock()?.is_some());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct MemoryQuorum(Arc<[Arc<MemoryServer>]>);

impl MemoryQuorum {
    /// A quorum of empty nodes.
    ///
    /// # Panics
    /// If `nodes` is not 1 to 9.
    ///
    /// ```
    /// let quorum = leasehold::MemoryQuorum::new(5);
    /// # let _ = quorum;
    /// ```
    pub fn new(nodes: usize) -> Self {
        assert!((1..=9).contains(&nodes), "a quorum has 1 to 9 nodes");
        Self(MemoryServer::nodes(nodes).into())
    }

    /// A client of this quorum, with default settings.
    ///
    /// # Errors
    /// The errors of [`MemoryStore::client`], and an error with the answer of each node if a majority of the nodes
    /// fails.
    ///
    /// ```
    /// let client = leasehold::MemoryQuorum::new(3).client()?;
    /// assert_eq!(client.with_lock("a", || 1)?, 1);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn client(&self) -> Result<Client, Error> {
        self.builder().build()
    }

    /// A builder for a client of this quorum. Settings of connections have no effect. All clients need the same
    /// [`max_ttl`](Builder::max_ttl): a restarted node does not vote for that time. It defaults to 30 s.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let builder = quorum.builder().ttl(Duration::from_secs(5)).max_ttl(Duration::from_secs(10));
    /// let client = builder.build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn builder(&self) -> Builder {
        Builder::with_memory_quorum(self.0.to_vec())
    }

    /// Does the same as [`MemoryStore::advance`], for all nodes and their clients.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let guard = quorum.client()?.mutex("k").lock()?;
    /// quorum.advance(Duration::from_secs(31));
    /// assert!(guard.is_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn advance(&self, by: Duration) {
        if self.0[0].live().is_ok() {
            MemoryServer::advance_all(&self.0, by);
        }
    }

    /// Makes every request to this node fail at once with `kind`, until [`recover`](Self::recover). See
    /// [`MemoryStore::fail`], also for its panic. The first example of [`MemoryQuorum`] uses it.
    pub fn fail(&self, node: usize, kind: ErrorKind) {
        self.node(node).fail(kind);
    }

    /// Leaves all requests to this node without a reply until [`recover`](Self::recover), as `SIGSTOP` does with a
    /// server. See [`MemoryStore::hang`]. A hanging minority does not delay callers. A caller without a majority waits
    /// for its [`command_timeout`](Builder::command_timeout), in real time.
    ///
    /// ```
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let client = quorum.client()?;
    /// quorum.hang(2);
    /// let guard = client.mutex("k").lock()?;
    /// quorum.recover(2);
    /// guard.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn hang(&self, node: usize) {
        self.node(node).hang();
    }

    /// Ends the outage of this node. See [`MemoryStore::recover`].
    pub fn recover(&self, node: usize) {
        self.node(node).recover();
    }

    /// Restarts this node with its data, which may be old: the node does not vote for one `max_ttl`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let client = quorum.client()?;
    /// quorum.restart(0);
    /// quorum.restart(1);
    /// assert!(client.mutex("k").try_lock().is_err()); // one vote of three
    /// quorum.advance(Duration::from_secs(30));
    /// assert!(client.mutex("k").try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn restart(&self, node: usize) {
        self.node(node).restart();
    }

    /// Deletes all keys of this node, like a restart without data: the node does not vote for one `max_ttl`.
    ///
    /// ```
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let client = quorum.client()?;
    /// let guard = client.mutex("k").lock()?;
    /// quorum.flush(0);
    /// guard.check()?; // a majority has the lock
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn flush(&self, node: usize) {
        self.node(node).flush();
    }

    /// Sets how far this node's clock is ahead of the clock that all nodes share. A time of more than a year counts as
    /// a year. The node uses its clock for fencing tokens and [`Client::nodes`]; its keys expire according to the
    /// common clock.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// quorum.set_clock_ahead(2, Duration::from_secs(60));
    /// let client = quorum.client()?;
    /// let first = client.mutex("k").lock()?.fencing_token();
    /// assert!(client.mutex("k").lock()?.fencing_token() > first);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn set_clock_ahead(&self, node: usize, by: Duration) {
        if let Ok(server) = self.0[node].live() {
            server.set_ahead(by);
        }
    }

    /// Deletes one key on this node; returns whether it existed there. See [`MemoryStore::delete`]. The next renewal
    /// sets the key again if a majority has it.
    ///
    /// ```
    /// let quorum = leasehold::MemoryQuorum::new(3);
    /// let client = quorum.client()?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// assert!(quorum.delete(0, "leasehold:invoice:42"));
    /// guard.check()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn delete(&self, node: usize, key: &str) -> bool {
        self.node(node).delete(key)
    }

    fn node(&self, node: usize) -> MemoryStore {
        MemoryStore(Arc::clone(&self.0[node]))
    }
}

// The same as for `MemoryStore`.
impl UnwindSafe for MemoryQuorum {}
impl RefUnwindSafe for MemoryQuorum {}

impl fmt::Debug for MemoryQuorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryQuorum")
            .field("nodes", &self.0.len())
            .finish_non_exhaustive()
    }
}
