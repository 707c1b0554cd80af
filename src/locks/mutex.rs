//! The public type of a lock: its settings, and the calls that acquire a lock, inspect it, or take it away. This module
//! checks the settings; `acquire` waits, and the store sends the requests.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::acquire::{LockRequest, Until};
use crate::client::Client;
use crate::command::{Command, Reply};
use crate::config::{Replicas, check_max_hold};
use crate::lease::{Check, Options};
use crate::locks::guard::MutexGuard;
use crate::locks::held::LockInfo;
use crate::locks::reentrant::ReentrantMutex;
use crate::report::error::{Error, ErrorKind};
use crate::util::key::Key;
use crate::util::sync::park_timeout;

/// How long `force_unlock` waits at most until the holder's client is subscribed. If the value has a time that is more
/// than a second ago, the script does not ask for such a wait.
const NOTIFY_WITHIN: Duration = Duration::from_secs(1);
/// The pause between two requests of `force_unlock` during that wait.
const NOTIFY_PAUSE: Duration = Duration::from_millis(20);

/// The lock with a given key, and the settings to acquire it. From [`Client::mutex`].
///
/// Making or cloning a mutex does no I/O, and a clone is the same lock. A mutex holds no connection, and keeps its
/// client alive. A mutex is not reentrant: see [`reentrant`](Self::reentrant).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use std::time::Duration;
///
/// let mutex = client.mutex("invoice:42");
/// let guard = mutex.lock()?;
/// assert!(mutex.try_lock()?.is_none(), "this thread holds it, and it is not reentrant");
/// guard.unlock()?;
/// assert!(mutex.try_lock_for(Duration::from_millis(250))?.is_some());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a mutex does nothing until it is locked"]
pub struct Mutex {
    client: Client,
    key: Result<Key, Error>,
    ttl: Ttl,
    check: Option<Check>,
    max_hold: Option<Duration>,
    replicas: Option<Replicas>,
    cancel: Option<Receiver<()>>,
}

/// The ttl of a lock, and whether it is renewed.
#[derive(Clone, Copy, Debug)]
enum Ttl {
    /// The client's ttl, renewed.
    OfClient,
    Renewed(Duration),
    Fixed(Duration),
}

/// # How long a lock lasts
///
/// | call | ttl in Redis | renewed | ends by itself |
/// |---|---|---|---|
/// | none of these | [`Builder::ttl`](crate::Builder::ttl) | yes | never |
/// | [`ttl`](Self::ttl) | its argument | yes | never |
/// | [`fixed_ttl`](Self::fixed_ttl) | its argument | no | after the ttl |
/// | [`renew_while`](Self::renew_while) | as above | while the check returns true | one ttl after the last renewal |
/// | [`max_hold`](Self::max_hold) | as above, but at most `max_hold` | as above | after `max_hold` |
///
/// The last call of `ttl` or `fixed_ttl` counts. `fixed_ttl` together with `renew_while` is `InvalidConfig`; all other
/// settings can be combined. [`MutexGuard::extend`] makes any of these locks last longer, up to `max_hold`.
impl Mutex {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let config = &client.handle().config;
        Self {
            key: Key::new(&config.prefix, key, config.max_key_bytes),
            ttl: Ttl::OfClient,
            check: None,
            max_hold: config.max_hold,
            replicas: config.replicas,
            cancel: None,
            client,
        }
    }

    /// Sets the ttl of this lock. The client renews the lock while it is held, so the ttl is how long waiters wait at
    /// most after a crash of the holder. For a lock that ends by itself, use [`fixed_ttl`](Self::fixed_ttl) or
    /// [`max_hold`](Self::max_hold). 10 ms to [`Builder::max_ttl`](crate::Builder::max_ttl). Defaults to
    /// [`Builder::ttl`](crate::Builder::ttl).
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let guard = memory.client()?.mutex("k").ttl(Duration::from_secs(60)).lock()?;
    /// for _ in 0..10 {
    ///     memory.advance(Duration::from_secs(30));
    /// }
    /// guard.check()?; // after five minutes
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Ttl::Renewed(ttl);
        self
    }

    /// Sets a ttl after which the lock ends, since the client does not renew it. A holder that is still working then
    /// loses the lock with [`Expired`](crate::LossReason::Expired), unless it has [extended](MutexGuard::extend) the
    /// lock. 10 ms to [`Builder::max_ttl`](crate::Builder::max_ttl).
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let guard = memory.client()?.mutex("k").fixed_ttl(Duration::from_secs(60)).lock()?;
    /// memory.advance(Duration::from_secs(30));
    /// guard.check()?;
    /// memory.advance(Duration::from_secs(30));
    /// assert!(guard.is_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fixed_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Ttl::Fixed(ttl);
        self
    }

    /// Renews the lock only while `check` returns true. The client calls `check` before each renewal. Once it returns
    /// false or panics, the client stops renewing, and the lock is lost with
    /// [`NotRenewed`](crate::LossReason::NotRenewed) when its validity ends. So the lock of a stuck worker becomes
    /// free.
    ///
    /// One thread of the client runs all checks, one after another. If a check hangs, locks with a check are not
    /// renewed meanwhile and may expire; locks without a check are renewed as usual.
    /// [`shutdown`](crate::Client::shutdown) waits for the check. A lock with a check is never handed off to another
    /// thread of the client without a request to Redis.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    ///
    /// let done = Arc::new(AtomicU64::new(0));
    /// let (seen, before) = (Arc::clone(&done), AtomicU64::new(u64::MAX));
    /// // True if the worker has done something since the last renewal.
    /// let makes_progress = move || {
    ///     let now = seen.load(Ordering::Relaxed);
    ///     before.swap(now, Ordering::Relaxed) != now
    /// };
    /// let guard = client.mutex("k").renew_while(makes_progress).lock()?;
    /// for _ in 0..3 {
    ///     done.fetch_add(1, Ordering::Relaxed);
    /// }
    /// guard.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn renew_while(mut self, check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.check = Some(Check::new(check));
        self
    }

    /// Sets the longest time for which the lock may be held, however often it is renewed. After that time the holder
    /// loses the lock with [`MaxHold`](crate::LossReason::MaxHold). When the last tenth begins, the client calls
    /// [`EventHandler::max_hold_ending`](crate::EventHandler::max_hold_ending). At least 10 ms. Defaults to
    /// [`Builder::max_hold`](crate::Builder::max_hold).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let guard = client.mutex("k").max_hold(Duration::from_secs(600)).lock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.max_hold = Some(max_hold);
        self
    }

    /// Sets how many replicas have to acknowledge each grant, renewal and [extension](MutexGuard::extend) of this lock
    /// within `timeout`. With a `count` of 0, no acknowledgements are needed. Defaults to
    /// [`Builder::replicas`](crate::Builder::replicas), which explains this setting.
    ///
    /// ```
    /// # use leasehold::{Client, ErrorKind};
    /// # let server = leasehold_testbed::Server::start().unwrap(); // without replicas
    /// # let client = Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let mutex = client.mutex("k").replicas(1, Duration::from_millis(100));
    /// if let Err(error) = mutex.try_lock() {
    ///     assert_eq!(error.kind(), ErrorKind::Unavailable);
    ///     assert!(error.to_string().contains("0 of 1 replicas acknowledged"));
    /// }
    /// # assert!(mutex.try_lock().is_err());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Self {
        self.replicas = Replicas::new(count, timeout);
        self
    }

    /// Cancels waits when `cancel` gets a message or its senders are dropped. A waiting call then fails with
    /// [`Cancelled`](crate::ErrorKind::Cancelled): at once, or after the reply if a request is under way. A message
    /// cancels one wait; dropping the senders cancels all waits. [`try_lock`](Self::try_lock) does not wait, and
    /// ignores `cancel`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::{ErrorKind, crossbeam_channel::bounded};
    ///
    /// let held = client.mutex("k").lock()?;
    /// let (stop, stopped) = bounded(0);
    /// let waiting = std::thread::spawn({
    ///     let mutex = client.mutex("k").cancelled_by(stopped);
    ///     move || mutex.lock().map(drop)
    /// });
    /// drop(stop);
    /// let error = waiting.join().unwrap().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Cancelled);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn cancelled_by(mut self, cancel: Receiver<()>) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// The same lock with the same settings, as a lock that its holder's thread can lock again.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let mutex = client.mutex("k").max_hold(Duration::from_secs(60)).reentrant();
    /// let outer = mutex.lock()?;
    /// assert!(mutex.try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn reentrant(self) -> ReentrantMutex {
        ReentrantMutex::new(self)
    }

    /// The name of the lock, as it was given; empty if it is not a valid key.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// assert_eq!(client.mutex("k").key(), "k");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn key(&self) -> &str {
        self.key.as_ref().map_or("", Key::name)
    }

    /// Waits for the lock, for as long as other holders have it. The waiting threads of a client are served in the
    /// order in which they asked, and so are the waiting clients.
    ///
    /// A thread that waits for Redis parks ([`std::thread::park_timeout`]), and consumes an `unpark` that another
    /// thread sends meanwhile. If your code parks the same thread, check your own condition again after this call.
    ///
    /// # Errors
    /// `Unavailable` if Redis was away for the client's [`outage_timeout`](crate::Builder::outage_timeout); `Cancelled`
    /// if [`cancelled_by`](Self::cancelled_by) ends the wait; `Denied`, `Protocol`, `Shutdown`, `Forked`, `InvalidKey`,
    /// `InvalidConfig` at once. Contention is no error.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("k").lock()?;
    /// drop(guard);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lock(&self) -> Result<MutexGuard, Error> {
        let guard = self.acquire(Until::Forever)?;
        Ok(guard.expect("a wait without a deadline ends with a guard or an error"))
    }

    /// Acquires the lock if it is free now and no other thread of this client waits for it. Otherwise returns
    /// `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`lock`](Self::lock) except `Cancelled`. If Redis is away, the call fails with `Unavailable` or
    /// `Timeout` after one attempt; the `outage_timeout` does not apply. This call fails at once if nothing listens at
    /// an address that has never worked; see [`connect_timeout`](crate::Builder::connect_timeout).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// match client.mutex("k").try_lock()? {
    ///     Some(_guard) => println!("held until the end of this arm"),
    ///     None => println!("another holder has it"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock(&self) -> Result<Option<MutexGuard>, Error> {
        self.acquire(Until::Now)
    }

    /// Waits for the lock for at most `timeout`; returns `Ok(None)` if it was not free within that time. Each request
    /// ends with `timeout`, but it has at least 100 ms for its reply. If `timeout` is zero, the call makes one attempt,
    /// as [`try_lock`](Self::try_lock) does, and has the same limits.
    ///
    /// # Errors
    /// The errors of [`lock`](Self::lock). If Redis is away, the client tries again until `timeout` has passed; the
    /// `outage_timeout` does not apply. `Unavailable` also if no reply came in time, and no earlier reply said that
    /// another holder has the lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let guard = client.mutex("k").try_lock_for(Duration::from_millis(250))?;
    /// assert!(guard.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock_for(&self, timeout: Duration) -> Result<Option<MutexGuard>, Error> {
        self.acquire(Until::At(self.client.now().after(timeout)))
    }

    /// Waits for the lock until `deadline`, as [`try_lock_for`](Self::try_lock_for) does.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::{Duration, Instant};
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// let guard = client.mutex("k").try_lock_until(deadline)?;
    /// assert!(guard.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock_until(&self, deadline: Instant) -> Result<Option<MutexGuard>, Error> {
        self.try_lock_for(deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits for the lock, runs `work` with its guard, and releases the lock, as [`Client::with_lock`] does.
    ///
    /// # Errors
    /// The errors of [`lock`](Self::lock), and `LeaseLost` if the client finds that the lock was lost before `work`
    /// returned. `Forked` if `work` forks the process and returns in the child. A release that Redis does not confirm
    /// is no error, as for [`MutexGuard::unlock`].
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let token = client.mutex("k").with(|guard| guard.fencing_token())?;
    /// assert!(token > 0);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn with<T>(&self, work: impl FnOnce(&MutexGuard) -> T) -> Result<T, Error> {
        run_under(self.lock()?, work)
    }

    /// Runs `work` under the lock if [`try_lock`](Self::try_lock) acquires it. Otherwise drops `work` and returns
    /// `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`try_lock`](Self::try_lock) and of [`with`](Self::with).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.mutex("nightly-report");
    /// match mutex.try_with(|guard| format!("written under {}", guard.fencing_token()))? {
    ///     Some(report) => println!("{report}"),
    ///     None => println!("another process writes it"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with<T>(&self, work: impl FnOnce(&MutexGuard) -> T) -> Result<Option<T>, Error> {
        let guard = self.try_lock()?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    /// Waits for the lock for at most `timeout`, as [`try_lock_for`](Self::try_lock_for) does, and runs `work` under
    /// it. If the lock was not free within that time, drops `work` and returns `Ok(None)`. `timeout` does not limit
    /// `work`: [`max_hold`](Self::max_hold) does.
    ///
    /// # Errors
    /// The errors of [`try_lock_for`](Self::try_lock_for) and of [`with`](Self::with).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let mutex = client.mutex("k");
    /// assert_eq!(mutex.try_with_for(Duration::from_millis(250), |_| 42)?, Some(42));
    ///
    /// let held = client.mutex("k").lock()?;
    /// assert_eq!(mutex.try_with_for(Duration::from_millis(10), |_| 42)?, None);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_for<T>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&MutexGuard) -> T,
    ) -> Result<Option<T>, Error> {
        let guard = self.try_lock_for(timeout)?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    /// Waits for the lock until `deadline`, and runs `work` under it, as [`try_with_for`](Self::try_with_for) does.
    ///
    /// # Errors
    /// The errors of [`try_with_for`](Self::try_with_for).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::{Duration, Instant};
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// assert_eq!(client.mutex("k").try_with_until(deadline, |_| 42)?, Some(42));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_until<T>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&MutexGuard) -> T,
    ) -> Result<Option<T>, Error> {
        let guard = self.try_lock_until(deadline)?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    /// The holder of the lock according to Redis, and the number of waiting clients; `None` if the lock is free. For
    /// diagnosis only: the result may be out of date when you read it.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `Forked`, `InvalidKey`; `Protocol` if the value under the key is
    /// not a lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.mutex("k");
    /// assert!(mutex.inspect()?.is_none());
    /// let guard = mutex.lock()?;
    /// assert_eq!(mutex.inspect()?.unwrap().holder(), client.holder_id());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn inspect(&self) -> Result<Option<LockInfo>, Error> {
        let key = self.key.clone()?;
        match self.ask(Command::Inspect { key })? {
            Reply::Found { value, expires_in } => Ok(Some(LockInfo::new(*value, expires_in))),
            _ => Ok(None),
        }
    }

    /// Whether the lock has a holder, according to Redis. The result may be out of date when you read it: to acquire
    /// the lock if it is free, call [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// assert!(!client.mutex("k").is_locked()?);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn is_locked(&self) -> Result<bool, Error> {
        self.inspect().map(|found| found.is_some())
    }

    /// Takes the lock away from its holder, and returns that holder. The next waiter then gets the lock. Returns `None`
    /// if the lock was free, or was released at the same moment.
    ///
    /// For operators only: the holder may still be working, and continues until its client detects the loss. A client
    /// that is subscribed to notifications reports [`LossReason::ForceUnlocked`](crate::LossReason::ForceUnlocked)
    /// within milliseconds. A client subscribes when it has held a lock for 30 ms or has to wait for a lock. So if the
    /// grant may be less than a second old, `force_unlock` waits until the holder's client is subscribed, for a second
    /// at most. (Most locks that were free have no time in Redis, and count as new.) A client without notifications
    /// detects the loss at its next renewal at the latest, and reports `Deleted` or `TakenOver`. Fencing tokens refuse
    /// the late writes of the holder.
    ///
    /// Takes one more request than [`inspect`](Self::inspect). Takes up to a second longer if the
    /// holder's client is not subscribed, for example because its process has died, and the grant is new or has no
    /// time.
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect). After `Timeout` or `Unavailable` it is unknown whether the lock was
    /// taken away: call [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let stuck = client.mutex("k").lock()?;
    /// let operator = leasehold::Client::open(&server.url())?;
    /// let taken_from = operator.mutex("k").force_unlock()?.unwrap();
    /// assert_eq!(taken_from.holder(), client.holder_id());
    /// assert!(stuck.unlock().unwrap_err().is_lease_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn force_unlock(&self) -> Result<Option<LockInfo>, Error> {
        let Some(found) = self.inspect()? else {
            return Ok(None);
        };
        let (key, lease) = (self.key.clone()?, found.lease());
        let command_timeout = self.client.handle().config.command_timeout;
        let started = Instant::now();
        let mut released_by_some = false;
        loop {
            let elapsed = started.elapsed();
            let force = Command::ForceUnlock {
                key: key.clone(),
                lease,
                must_notify: elapsed < NOTIFY_WITHIN,
            };
            // A slow reply to the last request that waits for the holder's client leaves less time for the next one.
            let left = (command_timeout + NOTIFY_WITHIN).saturating_sub(elapsed);
            let outcome = self.client.ask_within(force, left.min(command_timeout));
            match outcome.map_err(|error| error.with_key(self.key()))? {
                Reply::Done => return Ok(Some(found)),
                Reply::NotListening { by_some } => {
                    released_by_some |= by_some;
                    park_timeout(NOTIFY_PAUSE);
                }
                // The nodes of a quorum have released it, one after the other.
                _ if released_by_some => return Ok(Some(found)),
                _ => return Ok(None),
            }
        }
    }

    fn ask(&self, command: Command) -> Result<Reply, Error> {
        let outcome = self.client.ask(command);
        outcome.map_err(|error| error.with_key(self.key()))
    }

    /// The number of the client, and the key: they identify the lock within this process.
    pub(crate) fn identity(&self) -> Result<(u64, Key), Error> {
        Ok((self.client.handle().number, self.key.clone()?))
    }

    fn acquire(&self, until: Until) -> Result<Option<MutexGuard>, Error> {
        let checked = self.client.check_process();
        checked.map_err(|error| error.with_key(self.key()))?;
        let wanted = self.wanted()?;
        if wanted.check.is_some() {
            let started = self.client.handle().start_checks();
            started.map_err(|error| error.with_key(wanted.key.name()))?;
        }
        let lease = self.client.handle().acquirer.acquire(&wanted, until)?;
        Ok(lease.map(|lease| MutexGuard::new(lease, self.client.clone())))
    }

    fn wanted(&self) -> Result<LockRequest, Error> {
        let config = &self.client.handle().config;
        let key = self.key.clone()?;
        let (setting, ttl, is_renewed) = match self.ttl {
            Ttl::OfClient => ("ttl", config.ttl, true),
            Ttl::Renewed(ttl) => ("ttl", ttl, true),
            Ttl::Fixed(ttl) => ("fixed_ttl", ttl, false),
        };
        let checked = config.check_ttl(setting, ttl);
        checked.map_err(|error| error.with_key(key.name()))?;
        if let Some(max_hold) = self.max_hold {
            check_max_hold(max_hold).map_err(|error| error.with_key(key.name()))?;
        }
        let checked = config.check_replicas(self.replicas);
        checked.map_err(|error| error.with_key(key.name()))?;
        if self.check.is_some() && !is_renewed {
            let message =
                "renew_while cannot be combined with fixed_ttl, which is never renewed: use ttl";
            let error = Error::new(ErrorKind::InvalidConfig, message);
            return Err(error.with_key(key.name()));
        }
        let options = Options {
            ttl,
            renew_every: is_renewed.then(|| ttl.mul_f64(config.renew_ratio)),
            max_hold: self.max_hold,
            checked: self.check.is_some(),
            replicas: self.replicas,
        };
        Ok(LockRequest {
            key,
            options,
            check: self.check.clone(),
            cancel: self.cancel.clone(),
        })
    }
}

// The comment at `Client` says why this is right. The panic of a check is caught, and the check is not called again.
impl UnwindSafe for Mutex {}
impl RefUnwindSafe for Mutex {}

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex")
            .field("key", &self.key())
            .field("ttl", &self.ttl)
            .field("renew_while", &self.check)
            .field("max_hold", &self.max_hold)
            .field("replicas", &self.replicas)
            .finish()
    }
}

/// Runs `work` under the lock of `guard`, then releases the lock and waits for Redis to confirm the release.
fn run_under<T>(guard: MutexGuard, work: impl FnOnce(&MutexGuard) -> T) -> Result<T, Error> {
    let value = guard.run(|| work(&guard));
    guard.finish().map(|()| value)
}
