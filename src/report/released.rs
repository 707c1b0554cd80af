//! The result of a release, which `unlock` returns.

use crate::report::error::Error;

/// How [`MutexGuard::unlock`](crate::MutexGuard::unlock) ended. In all cases, the lock was held until that call.
///
/// Most callers do not need this value: `guard.unlock()?` continues in all cases.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::Released;
///
/// let guard = client.mutex("invoice:42").lock()?;
/// match guard.unlock()? {
///     Released::Confirmed => println!("done"),
///     Released::Shared => println!("another guard of this client still has it"), // readers only
///     Released::Unconfirmed(error) => eprintln!("done; others may have to wait for the ttl: {error}"),
/// }
/// assert!(client.mutex("invoice:42").lock()?.unlock()?.is_confirmed());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub enum Released {
    /// Redis has released the lock: the next waiter has the lock, or it is free.
    Confirmed,
    /// Redis did not confirm the release. The error contains the reason: Redis is away, did not reply in time, or
    /// refuses. A thread of the client repeats the release until Redis confirms it or the ttl has ended, and reports
    /// this by [`EventHandler::release_delayed`]. Other callers wait for the ttl at most.
    ///
    /// [`EventHandler::release_delayed`]: crate::EventHandler::release_delayed
    Unconfirmed(Error),
    /// Other guards of readers still share the lease. The last of them releases it.
    Shared,
}

impl Released {
    /// Whether Redis has confirmed the release.
    pub fn is_confirmed(&self) -> bool {
        matches!(self, Self::Confirmed)
    }
}
