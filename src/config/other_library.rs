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
    /// Each library whose lock is held as long as its key exists: redis-py, redsync, bsm/redislock, Redlock for Node.js,
    /// RedLock.net, Medallion, redlock-rb, pottery, Laravel, Spring, Symfony, rslock and others. Their waiters poll.
    PlainKeys,
    /// python-redis-lock. Each release also wakes a waiter of that library. `min_hold` is
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    PythonRedisLock,
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
