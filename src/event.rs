//! What a client tells about its work: a trait with no-op defaults. The library prints nothing.

use std::time::Duration;

use crate::error::Error;
use crate::loss::LossReason;

/// A lock that an event is about. More may be told later.
///
/// ```
/// use leasehold::{EventLock, EventHandler, LossReason};
///
/// struct Alarms;
/// impl EventHandler for Alarms {
///     fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {
///         eprintln!("lost {}, granted under token {}: {reason}", lock.key, lock.fencing_token);
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct EventLock<'a> {
    /// The key, as its caller gave it.
    pub key: &'a str,
    /// The fencing token of the grant; 0 where there is no grant yet.
    pub fencing_token: u64,
}

/// Receives what happens in a client; every method does nothing unless you write it.
///
/// `acquired`, `contended`, `unavailable` and `released` are called on the thread that asked, the
/// others on the client's callback thread, never under a lock of the library. A panic in one is caught and
/// dropped. Keep them short: a slow one delays its caller or the callbacks after it, never a
/// renewal. If too many wait, some are [dropped](Self::events_missed).
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use leasehold::{Client, EventLock, EventHandler};
///
/// #[derive(Default)]
/// struct Count(AtomicUsize);
/// impl EventHandler for Count {
///     fn acquired(&self, _: EventLock<'_>, _waited: std::time::Duration) {
///         self.0.fetch_add(1, Ordering::Relaxed);
///     }
/// }
///
/// # let server = leasehold_testbed::Server::start().unwrap();
/// let count = Arc::new(Count::default());
/// let client = Client::builder(&server.url()).event_handler(Arc::clone(&count)).build()?;
/// client.with_lock("a", || ())?;
/// assert_eq!(count.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[allow(unused_variables)]
pub trait EventHandler: Send + Sync + 'static {
    /// A lock was granted, or [adopted](crate::Client::adopt), after waiting for so long.
    fn acquired(&self, lock: EventLock<'_>, waited: Duration) {}
    /// A lock was found taken; `expires_in` is its ttl in Redis, or what is left of
    /// its validity if a thread of this client has it. Once per call that acquirer.
    fn contended(&self, lock: EventLock<'_>, expires_in: Duration) {}
    /// A guard was let go after so long. `confirmed` if Redis has confirmed the release of a lock
    /// that was held until then, or if the lock was handed over to another client; otherwise it was lost
    /// before, or its release is under way.
    fn released(&self, lock: EventLock<'_>, held: Duration, confirmed: bool) {}
    /// The release of a lock that a guard held could not be done at once, whether it was dropped or
    /// unlocked: Redis is away, or refuses. It is repeated in the background for as long as Redis may
    /// keep the key. Once per lock, and followed by one [`release_ended`](Self::release_ended).
    fn release_delayed(&self, lock: EventLock<'_>, error: &Error) {}
    /// How a delayed release ended. `confirmed` if Redis has answered after all: the key is not this
    /// lock's any more, or gone. Otherwise it was given up: its ttl has ended, and with that the key;
    /// or the client was shut down (or dropped) first, and the key ends with its ttl. Nothing is told of
    /// releases after that.
    fn release_ended(&self, lock: EventLock<'_>, confirmed: bool) {}
    /// A held lock was renewed.
    fn renewed(&self, lock: EventLock<'_>) {}
    /// A held lock could not be renewed; it will be tried again until its validity ends.
    fn renewal_failed(&self, lock: EventLock<'_>, error: &Error) {}
    /// A held lock will be lost to its `max_hold` in so long: the last tenth of that has begun. Told
    /// once per hold.
    fn max_hold_near(&self, lock: EventLock<'_>, left: Duration) {}
    /// A held lock was lost.
    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {}
    /// An attempt to take or to adopt a lock could not be made or was not answered. Called on the thread that
    /// asked, at every attempt.
    fn unavailable(&self, lock: EventLock<'_>, error: &Error) {}
    /// `count` events were dropped since the last call, because 65,536 others were waiting for the callback
    /// thread. Called on that thread, before the events that still wait. [`lost`](Self::lost),
    /// [`on_lost`](crate::MutexGuard::on_lost) callbacks and events on the thread that asked are never dropped.
    fn events_missed(&self, count: u64) {}
    /// Redis does not offer notifications to this client (too old, an ACL, a proxy): waiters poll, and
    /// losses show at renewals. Told once per outage of them; tried again now and then.
    fn notifications_refused(&self, error: &Error) {}
}
