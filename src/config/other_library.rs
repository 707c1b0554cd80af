//! The other libraries whose locks a client takes part in.

/// Another library, whose locks a client of this library excludes and waits for. For
/// [`Builder::compatible_with`](crate::Builder::compatible_with). The guide's page on
/// [other libraries](crate::guide::other_libraries) lists what is weaker.
///
/// ```
/// use leasehold::{Client, OtherLibrary};
///
/// let beside_redsync = Client::builder("redis://127.0.0.1:6379")
///     .prefix("") // the names of the locks are the keys
///     .compatible_with(OtherLibrary::PlainKeys)
///     .build_lazy()?;
/// let beside_python = Client::builder("redis://127.0.0.1:6379")
///     .compatible_with(OtherLibrary::PythonRedisLock) // the prefix is `lock:`
///     .build_lazy()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OtherLibrary {
    /// Each library whose lock is held as long as its key exists: redis-py, redsync, bsm/redislock, Redlock for
    /// Node.js, RedLock.net, Medallion, redlock-rb, pottery, Laravel, Spring, Symfony, rslock and others. Their waiters
    /// poll.
    PlainKeys,
    /// python-redis-lock. Each release also wakes a waiter of that library. `min_hold` is
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    PythonRedisLock,
    /// Redisson's `RLock`, `RFencedLock` and fair lock. Redisson fails on a lock of any other form, so this client
    /// writes Redisson's own. `min_hold`, tickets and transactions are
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let url = server.url();
    /// use leasehold::{Client, OtherLibrary};
    ///
    /// let client = Client::builder(&url)
    ///     .prefix("") // the names of the locks are the keys
    ///     .compatible_with(OtherLibrary::Redisson { fenced: true })
    ///     .build()?;
    /// let guard = client.mutex("invoice:42").lock()?; // getFencedLock("invoice:42").lockAndGetToken()
    /// assert_eq!(guard.fencing_token(), 1);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    Redisson {
        /// Whether the fencing tokens are the numbers of Redisson's counter, which `RFencedLock` uses. Set this if the
        /// processes of Redisson call `getFencedLock`. Otherwise the tokens rise from one grant of leasehold to the
        /// next, and cannot be compared with Redisson's. Choose this before your storage remembers the first token: the
        /// counter begins at 1, and all other tokens are near 10^18.
        fenced: bool,
    },
}

impl OtherLibrary {
    pub(crate) fn is_redisson(self) -> bool {
        matches!(self, Self::Redisson { .. })
    }
}

/// The start of the keys of python-redis-lock.
pub const PYTHON_PREFIX: &str = "lock:";

/// The parts of the name of the list that wakes a waiter of python-redis-lock, for the lock with this key in Redis.
pub fn python_signal(key: &str) -> [&str; 2] {
    [
        "lock-signal:",
        key.strip_prefix(PYTHON_PREFIX).unwrap_or(key),
    ]
}
