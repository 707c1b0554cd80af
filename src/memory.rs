//! A store without a server, as users see it. Thin.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crate::builder::Builder;
use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::store::MemoryServer;

/// A store without a server, for the tests of what uses locks: its clients exclude each other as they
/// would on a Redis, within this process. Locks and fenced values are as on a real one; a test of this library
/// compares them, command by command. Transactions need a real one.
///
/// A test can have it [`fail`](Self::fail) or [`hang`](Self::hang) until it [recovers](Self::recover), as a Redis that is
/// away, and lose [one key](Self::delete) or [all](Self::flush). Requests, waits, renewals, releases and events then take
/// the way that they take with a Redis.
///
/// Time goes on by itself, and can be moved: [`advance`](Self::advance). A URL names one, too:
/// `memory://` is a new one, `memory://orders` the one of that name in this process.
///
/// None goes along with a fork: in the child its clock and what it keeps are not to be moved any more, and
/// clients of it fail with [`Forked`](crate::ErrorKind::Forked). Make a new one there, and one without a
/// name: names are the parent's.
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
/// memory.advance(Duration::from_secs(31)); // as if everything had stood still for longer than the ttl
/// assert!(guard.is_lost());
/// assert!(two.mutex("invoice:42").try_lock()?.is_some());
/// assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::LeaseLost);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct MemoryStore(Arc<MemoryServer>);

impl MemoryStore {
    /// An empty one.
    ///
    /// ```
    /// let memory = leasehold::MemoryStore::new();
    /// # let _ = memory;
    /// ```
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self(MemoryServer::new())
    }

    /// A client of this one, with all defaults.
    ///
    /// # Errors
    /// `Unavailable` if its threads cannot be started; `Forked` in a child of the process that made it, or
    /// that had clients when it forked.
    ///
    /// ```
    /// let client = leasehold::MemoryStore::new().client()?;
    /// assert_eq!(client.with_lock("a", || 1)?, 1);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn client(&self) -> Result<Client, Error> {
        self.builder().build()
    }

    /// A builder for a client of this one. Settings of connections have no effect.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new();
    /// let client = memory.builder().ttl(Duration::from_secs(5)).build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn builder(&self) -> Builder {
        Builder::of_memory(Arc::clone(&self.0))
    }

    /// Moves the clock of this store and of all its clients ahead, by a year at most, as if the machine
    /// had slept for so long: what expires meanwhile is lost, and is lost when this returns; locks that are still held then
    /// and due for renewal have been renewed. To let more than a ttl pass and keep what is held, move
    /// in steps of less than two thirds of it. Callbacks and events run a little later, on the client's
    /// own thread; [`Client::shutdown`](crate::Client::shutdown) waits for them.
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
        if self.0.process().is_current() {
            self.0.advance(by);
        }
    }

    /// Forgets everything, as a Redis that restarts without its memory: whoever holds a lock loses it,
    /// and has lost it when this returns.
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
        if self.0.process().is_current() {
            self.0.flush();
        }
    }
}

// Its mutex is not poisoned, and no user code runs under it.
impl UnwindSafe for MemoryStore {}
impl RefUnwindSafe for MemoryStore {}

/// What a test of an outage needs. docs/testing.md shows it.
impl MemoryStore {
    /// From now on every request of every client fails at once with `kind`, and no client hears of changes, until
    /// [`recover`](Self::recover). `Unavailable` is a Redis that is away, `Denied` one with another password, `Protocol`
    /// another server. What was granted before stays, and expires when it is not renewed. Releases are repeated until
    /// they are done or their ttl has ended, and events report them.
    ///
    /// # Panics
    /// If a request to Redis cannot fail with `kind`. Possible are `Unavailable`, `Timeout`, `Denied` and `Protocol`.
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
    /// memory.advance(Duration::from_secs(15)); // no renewal succeeds
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
        if self.0.process().is_current() {
            self.0.fail(kind);
        }
    }

    /// From now on no request is answered until [`recover`](Self::recover), and no client hears of changes. A request
    /// that gets no answer within its client's [`command_timeout`](Builder::command_timeout) ends with `Timeout`, and is
    /// not carried out later, except releases. [`advance`](Self::advance) brings that moment nearer. `advance` waits
    /// for renewals that are due then, so it takes up to a `command_timeout` for each client with renewals due.
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
        if self.0.process().is_current() {
            self.0.hang();
        }
    }

    /// Ends what [`fail`](Self::fail) or [`hang`](Self::hang) began: requests that still wait are answered, releases that
    /// had to wait have been carried out when this returns, and every client has looked at the locks that it holds.
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
        if self.0.process().is_current() {
            self.0.recover();
        }
    }

    /// Deletes one key, as `DEL` with this name in Redis, prefix and all. True if it was there. The holder of a lock loses
    /// it, and has lost it when this returns, unless the store fails or hangs: then a holder hears of it after that, as
    /// from a Redis.
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
        self.0.process().is_current() && self.0.delete(key)
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}
