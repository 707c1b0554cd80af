//! Events of a client: a trait that users implement. The library does not print.

use std::time::Duration;

use crate::report::environment::EnvironmentFinding;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::report::node_state::NodeState;

/// The lock of an event, or the fenced value of a refused write. More fields may be added.
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
    /// The key, as the caller gave it.
    pub key: &'a str,
    /// The fencing token of the grant; 0 if there is no grant yet. For a refused write: the token of the write.
    pub fencing_token: u64,
}

/// Receives the events of a client. By default, every method ignores its event.
///
/// `acquired`, `contended`, `limits_differ`, `foreign_holder`, `unavailable`, `released` and `write_refused` run on the
/// thread that has called the library. The other methods run on the client's callback thread. During the call, the
/// library holds none of its own mutexes. It catches and ignores the panics of methods. Keep the methods short: a slow
/// method delays its caller, or later callbacks, but never a renewal. If too many events are queued, some events are
/// [dropped](Self::events_missed).
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
    /// A lock was granted, or [adopted](crate::Client::adopt), after a wait of `waited`.
    fn acquired(&self, lock: EventLock<'_>, waited: Duration) {}
    /// A lock has another holder. `expires_in` is the lock's ttl in Redis (24 h if its key has none), or the rest of
    /// the validity if a thread of this client holds the lock. Called once per call that waits.
    fn contended(&self, lock: EventLock<'_>, expires_in: Duration) {}
    /// The permits of a semaphore were granted under another limit than that of this call. `limit` is the limit of the
    /// call, and `other` is the limit of the newest permit. So several programs use this semaphore with different
    /// limits: see [`Semaphore`](crate::Semaphore). Called at most once per call, if the call has to wait or is
    /// refused.
    ///
    /// ```
    /// # use std::sync::Mutex;
    /// use std::sync::Arc;
    /// use leasehold::{EventHandler, EventLock, MemoryStore};
    ///
    /// #[derive(Default)]
    /// struct Alarms(Mutex<Vec<String>>);
    /// impl EventHandler for Alarms {
    ///     fn limits_differ(&self, lock: EventLock<'_>, limit: u32, other: u32) {
    ///         self.0.lock().unwrap().push(format!("{}: {limit} here, {other} elsewhere", lock.key));
    ///     }
    /// }
    ///
    /// let alarms = Arc::new(Alarms::default());
    /// let client = MemoryStore::new().builder().event_handler(Arc::clone(&alarms)).build()?;
    /// let _permit = client.semaphore("gpu", 8).acquire()?;
    /// assert!(client.semaphore("gpu", 1).try_acquire()?.is_none());
    /// assert_eq!(*alarms.0.lock().unwrap(), ["gpu: 1 here, 8 elsewhere"]);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    fn limits_differ(&self, lock: EventLock<'_>, limit: u32, other: u32) {}
    /// Another library holds a lock that this client asked for. The client has this event only with
    /// [`Builder::compatible_with`](crate::Builder::compatible_with). `redis_type` is the type of the lock's key as
    /// `TYPE` names it, and `expires_in` is the key's ttl, if it has one. Called once for each holder, even if several
    /// calls wait for the lock. The client can distinguish two holders if their keys are strings or locks of Redisson;
    /// otherwise, two holders with keys of one type look the same. The event never contains the key's value, which is
    /// the holder's secret.
    ///
    /// A key counts as a lock, whatever its value is. So if this event names a key that contains data, and the data
    /// stays, a program has given a lock the name of that key by mistake.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # use std::sync::Mutex;
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use leasehold::{Client, EventHandler, EventLock, OtherLibrary};
    ///
    /// #[derive(Default)]
    /// struct Alarms(Mutex<Vec<String>>);
    /// impl EventHandler for Alarms {
    ///     fn foreign_holder(&self, lock: EventLock<'_>, redis_type: &str, expires_in: Option<Duration>) {
    ///         let line = format!("{} is a {redis_type}, {expires_in:?}", lock.key);
    ///         self.0.lock().unwrap().push(line);
    ///     }
    /// }
    ///
    /// let alarms = Arc::new(Alarms::default());
    /// let client = Client::builder(&server.url())
    ///     .prefix("")
    ///     .compatible_with(OtherLibrary::PlainKeys)
    ///     .event_handler(Arc::clone(&alarms))
    ///     .build()?;
    /// # leasehold::redis::cmd("SET").arg("stock").arg("17").exec(
    /// #     &mut leasehold::redis::Client::open(server.url()).unwrap().get_connection().unwrap()).unwrap();
    /// assert!(client.mutex("stock").try_lock()?.is_none()); // SET stock 17
    /// assert_eq!(*alarms.0.lock().unwrap(), ["stock is a string, None"]);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    fn foreign_holder(&self, lock: EventLock<'_>, redis_type: &str, expires_in: Option<Duration>) {}
    /// A guard ended after it was held for `held`. `confirmed` is true if Redis has confirmed the release, or if the
    /// lock was transferred to another client. It is false if the lock had been lost, if it was handed off to another
    /// thread of this client, or if the release is still under way.
    fn released(&self, lock: EventLock<'_>, held: Duration, confirmed: bool) {}
    /// The release of a lock failed at first, because Redis is unavailable or refuses it. The client retries it in the
    /// background as long as Redis may have the key, but not after the client was shut down or dropped. Called once per
    /// lock. The gauge `leasehold_release_retries` counts the releases that the client still retries. On a
    /// [quorum](crate::Client::quorum), called if too few nodes are left for a majority that confirms the release. The
    /// error is `NoQuorum`, or a lasting one such as `Denied`.
    fn release_delayed(&self, lock: EventLock<'_>, error: &Error) {}
    /// A held lock was renewed.
    fn renewed(&self, lock: EventLock<'_>) {}
    /// The renewal of a held lock failed. The client retries it until the validity ends. If the validity ends first,
    /// the failure is reported after [`lost`](Self::lost).
    fn renewal_failed(&self, lock: EventLock<'_>, error: &Error) {}
    /// The last tenth of a lock's `max_hold` has begun: the lock will be lost in `left`. Called once per hold.
    fn max_hold_ending(&self, lock: EventLock<'_>, left: Duration) {}
    /// A held lock was lost. Called once for each lost lock, whichever call or thread of the client finds the loss.
    ///
    /// This includes a loss that calls do not report as `LeaseLost`: after a drop of the guard, or after an `unlock`
    /// that returned [`Unconfirmed`](crate::Released::Unconfirmed), the reply to the release may report that the key
    /// was gone before the end of the validity. The reply to a repeated release is ignored, because Redis may have
    /// carried out the first attempt.
    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {}
    /// Redis refused a write or a deletion of a fenced value (`StaleToken`): its token is `value.fencing_token`, but a
    /// holder with the greater token `last_token` wrote before. So the earlier holder went on after it had lost its
    /// lock. Without fencing, it would have overwritten the data of the later holder.
    ///
    /// ```
    /// # use std::sync::Mutex;
    /// use std::sync::Arc;
    /// use leasehold::{EventHandler, EventLock, MemoryStore};
    ///
    /// #[derive(Default)]
    /// struct Alarms(Mutex<Vec<String>>);
    /// impl EventHandler for Alarms {
    ///     fn write_refused(&self, value: EventLock<'_>, last_token: u64) {
    ///         let line = format!("{}: {} came after {last_token}", value.key, value.fencing_token);
    ///         self.0.lock().unwrap().push(line);
    ///     }
    /// }
    ///
    /// let alarms = Arc::new(Alarms::default());
    /// let client = MemoryStore::new().builder().event_handler(Arc::clone(&alarms)).build()?;
    /// let total = client.fenced_value("invoice:42");
    /// total.write(9, "17")?;
    /// total.write(7, "0").unwrap_err();
    /// assert_eq!(*alarms.0.lock().unwrap(), ["invoice:42: 7 came after 9"]);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    fn write_refused(&self, value: EventLock<'_>, last_token: u64) {}
    /// A request to acquire or adopt a lock could not be sent, or got no reply. Called for every such request.
    fn unavailable(&self, lock: EventLock<'_>, error: &Error) {}
    /// `count` events were dropped since the last call, because 65,536 events were queued for the callback thread.
    /// Called before the events that are still queued. The client never drops [`lost`](Self::lost),
    /// [`on_lost`](crate::MutexGuard::on_lost) callbacks and events on the caller's thread.
    fn events_missed(&self, count: u64) {}
    /// Redis refuses notifications to this client, or a part of them, because of an ACL or a proxy. The error names the
    /// refused command, what is missing, and the next step. Without notifications, waiters poll, and the client finds
    /// losses at the next renewal. If only `CLIENT TRACKING` is refused, waiters are notified, but the client still
    /// finds losses at the next renewal. The client tries again with its next connection, or after at most 30 s if
    /// waiters poll. It calls this method again only if all notifications have worked in between.
    fn notifications_refused(&self, error: &Error) {}
    /// The sentinels do not name the primary, for the reason in `error`. So the client made a connection to the last
    /// primary that it knows. It may miss a fail-over: check the sentinels. Called again only after a sentinel has
    /// named the primary.
    fn sentinels_unavailable(&self, error: &Error) {}
    /// A server does not allow the commands that acquire free locks without a script, because of an ACL or a proxy. For
    /// ten minutes, the client acquires all locks of this server by a script, which costs Redis more time. After that,
    /// it tries the commands again. Called once per client, at the first refusal.
    fn plain_acquires_refused(&self, error: &Error) {}
    /// The health of a quorum's node has changed: the node is failing, in quarantine, or up again. Also called when the
    /// node's clock begins or ceases to differ too much from those of the other nodes
    /// ([`NodeClock`](crate::NodeClock)). The first vote of a node causes no event. See
    /// [`Client::nodes`](crate::Client::nodes).
    fn node_changed(&self, node: &NodeState) {}
    /// The environment check has found a setting, of Redis or of the client, under which locks can be lost; or a part
    /// of the check was refused. The client checks once, soon after its first connection, and calls this for each
    /// finding: [`Builder::environment_check`](crate::Builder::environment_check).
    fn environment_warning(&self, finding: &EnvironmentFinding) {}
}
