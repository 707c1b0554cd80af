//! A store without a server, as users see it. Thin.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crate::builder::Builder;
use crate::client::Client;
use crate::error::Error;
use crate::store::MemoryServer;

/// A store without a server, for the tests of what uses locks: its clients exclude each other as they
/// would on a Redis, within this process. Locks and fenced values are as on a real one; a test of this library
/// compares them, command by command. Transactions need a real one.
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
    /// own thread; [`Client::shutdown`](crate::Client::shutdown) acquirer for them.
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

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}
