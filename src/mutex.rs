//! A lock as users see it: its settings, the ways to take it, what Redis says of it. Checks what it is
//! given and leaves the rest to `wait` and the store. Thin: no I/O of its own.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::acquire::{LockRequest, Until};
use crate::client::Client;
use crate::config::check_max_hold;
use crate::error::{Error, ErrorKind};
use crate::guard::MutexGuard;
use crate::held::LockInfo;
use crate::lease::{Check, Options};
use crate::reentrant::ReentrantMutex;
use crate::store::{Command, Reply};
use crate::util::key::Key;
use crate::util::sync::park_timeout;

/// How long `force_unlock` waits until the holder's client listens, and the pause between two requests. The script
/// does not wait for a grant that is older than a second.
const NOTIFY_WITHIN: Duration = Duration::from_secs(1);
const NOTIFY_PAUSE: Duration = Duration::from_millis(20);

/// A lock of the name given to [`Client::mutex`], free or held by anyone.
///
/// Not reentrant: see [`reentrant`](Self::reentrant). Holds no connection and costs nothing; cloning it gives the same lock. It keeps its client alive.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use std::time::Duration;
///
/// let mutex = client.mutex("invoice:42");
/// let guard = mutex.lock()?;
/// assert!(mutex.try_lock()?.is_none(), "held, if only by ourselves: it is not reentrant");
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
    cancel: Option<Receiver<()>>,
}

/// How long a lock lasts.
#[derive(Clone, Copy, Debug)]
enum Ttl {
    /// Renewed, with the client's ttl.
    OfClient,
    Renewed(Duration),
    Fixed(Duration),
}

/// # How long a lock lasts
///
/// | call | ttl in Redis | renewed | ends by itself |
/// |---|---|---|---|
/// | none of these | [`Builder::ttl`](crate::Builder::ttl) | yes | never |
/// | [`ttl`](Self::ttl) | this one | yes | never |
/// | [`fixed_ttl`](Self::fixed_ttl) | this one | no | after the ttl |
/// | [`renew_while`](Self::renew_while) | as above | while the check allows it | one ttl after the last renewal |
/// | [`max_hold`](Self::max_hold) | as above, `max_hold` at most | as above | after `max_hold` |
///
/// The last of `ttl` and `fixed_ttl` counts. `fixed_ttl` together with `renew_while` is `InvalidConfig`; all other
/// settings can be combined. [`MutexGuard::extend`] prolongs any of them by hand, up to `max_hold`.
impl Mutex {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let config = &client.handle().config;
        Self {
            key: Key::new(&config.prefix, key, config.max_key_bytes),
            ttl: Ttl::OfClient,
            check: None,
            max_hold: config.max_hold,
            cancel: None,
            client,
        }
    }

    /// Sets the ttl of this lock, which is renewed while the lock is held: how long others wait after a crash of its
    /// holder. Defaults to that of the client, [`Builder::ttl`](crate::Builder::ttl). For a lock that ends by itself,
    /// use [`fixed_ttl`](Self::fixed_ttl) or [`max_hold`](Self::max_hold). 10 ms to
    /// [`Builder::max_ttl`](crate::Builder::max_ttl).
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

    /// Has the lock end `ttl` after it was granted: it is not renewed. A holder that is not done by then loses it with
    /// [`Expired`](crate::LossReason::Expired), unless it has [extended](MutexGuard::extend) it. 10 ms to
    /// [`Builder::max_ttl`](crate::Builder::max_ttl).
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

    /// Renews the lock only while `check` says so: it is asked before each renewal. Once it says false,
    /// or panics, the lock is not renewed any more, and is lost with
    /// [`NotRenewed`](crate::LossReason::NotRenewed) when its validity ends: so the lock of a worker
    /// that is stuck becomes free.
    ///
    /// All checks of a client are asked on one thread, one after another. One that hangs holds up no
    /// renewal of a lock without a check, but those with one behind it are not renewed meanwhile, and
    /// expire; a [`shutdown`](crate::Client::shutdown) waits for it. A lock with a check is never passed
    /// on to another thread of the client without asking Redis.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    ///
    /// let done = Arc::new(AtomicU64::new(0));
    /// let (seen, before) = (Arc::clone(&done), AtomicU64::new(u64::MAX));
    /// // Something must have been done since the last renewal.
    /// let goes_on = move || {
    ///     let now = seen.load(Ordering::Relaxed);
    ///     before.swap(now, Ordering::Relaxed) != now
    /// };
    /// let guard = client.mutex("k").renew_while(goes_on).lock()?;
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

    /// Ends the hold after `max_hold`, whatever its holder does. Defaults to the client's setting.
    /// When its last tenth begins, [`EventHandler::max_hold_near`](crate::EventHandler::max_hold_near) is told.
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

    /// Gives up waiting once `cancel` has a message or its senders are gone: every call that waits
    /// then fails with [`Cancelled`](crate::ErrorKind::Cancelled), at once, or once Redis has answered
    /// what it is being asked. One message ends one wait; drop the sender to end all.
    /// [`try_lock`](Self::try_lock) does not wait, and does not look at it.
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

    /// As a lock that the thread that has it can take again, with all these settings.
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

    /// The name of the lock, as it was given; empty if it was not a valid one.
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

    /// Waits for the lock, for as long as others hold it. Threads of one client that wait for the
    /// same lock are served in the order they came.
    ///
    /// Calls that wait for Redis do so by [`std::thread::park_timeout`], and use up an `unpark` that comes
    /// meanwhile. Whoever parks threads on its own account looks at what it waits for after such a call, too.
    ///
    /// # Errors
    /// `Unavailable` after Redis could not be asked for the client's `outage_timeout`; `Denied`,
    /// `Protocol`, `Shutdown`, `Forked`, `InvalidKey`, `InvalidConfig` at once. Never for contention.
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
        Ok(guard.expect("to wait without end ends with the lock or an error"))
    }

    /// Takes the lock if it is free and no other thread of this client waits for it: those come
    /// first.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but without an `outage_timeout`; `Timeout` if no answer came.
    /// Contention is `Ok(None)`.
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

    /// Waits for the lock for at most `timeout`, to within one command time-out whatever Redis does
    /// (and one connect time-out, where a connection has to be made).
    ///
    /// # Errors
    /// As [`lock`](Self::lock), with the time left as its `outage_timeout`. Contention is `Ok(None)`.
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

    /// Runs `work` while holding the lock; as [`Client::with_lock`], with the guard in hand.
    ///
    /// # Errors
    /// Those of [`lock`](Self::lock), and `LeaseLost` if the lock was lost before `work` returned
    /// (`Forked` in a child that `work` has forked off and returned in).
    /// A release that Redis does not confirm is no error, as for [`MutexGuard::unlock`].
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

    /// Runs `work` if the lock is free now, as [`try_lock`](Self::try_lock) says. `Ok(None)` if it is not; `work` is
    /// dropped then.
    ///
    /// # Errors
    /// Those of [`try_lock`](Self::try_lock) and of [`with`](Self::with).
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
    /// it. `Ok(None)` if others held the lock for all that time; `work` is dropped then. `timeout` does not limit
    /// `work`: see [`max_hold`](Self::max_hold).
    ///
    /// # Errors
    /// Those of [`try_lock_for`](Self::try_lock_for) and of [`with`](Self::with).
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

    /// As [`try_with_for`](Self::try_with_for), until `deadline`.
    ///
    /// # Errors
    /// Those of [`try_with_for`](Self::try_with_for).
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

    /// Who has the lock, as Redis says: for people who look into why something waits. What it says
    /// may be over when you read it, so base no decision on it.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `Forked`, `InvalidKey`; `Protocol` if something that
    /// is no lock stands under its key.
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

    /// Whether anybody has the lock. As [`inspect`](Self::inspect): not to be relied upon; to take
    /// it if it is free, [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
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

    /// Takes the lock away from its holder, and returns what was known of that hold; nothing if the lock was free,
    /// or released in just that moment. The next waiter then gets the lock.
    ///
    /// For operators only: the holder may be at work, and goes on until its client learns of the loss. A client that
    /// listens for notifications reports [`LossReason::ForceUnlocked`](crate::LossReason::ForceUnlocked) within
    /// milliseconds. A client starts to listen when it has held a lock for 30 ms or has to wait for one, so
    /// `force_unlock` waits for it if the grant is less than a second old. A client that cannot listen finds the loss
    /// at its next renewal at the latest, and reports `Deleted` or `TakenOver`. A fencing token keeps its late writes
    /// out.
    ///
    /// Takes one request more than [`inspect`](Self::inspect), and up to a second longer if the lock was granted just
    /// now to a client that does not listen, for example because its process has died.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect). After `Timeout` or `Unavailable` it is unknown whether it was
    /// done.
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
        let started = Instant::now();
        loop {
            let force = Command::ForceUnlock {
                key: key.clone(),
                lease,
                must_notify: started.elapsed() < NOTIFY_WITHIN,
            };
            match self.ask(force)? {
                Reply::Done => return Ok(Some(found)),
                Reply::NotListening => park_timeout(NOTIFY_PAUSE),
                _ => return Ok(None),
            }
        }
    }

    fn ask(&self, command: Command) -> Result<Reply, Error> {
        let outcome = self.client.ask(command);
        outcome.map_err(|error| error.with_key(self.key()))
    }

    /// Whose lock it is, and which.
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
        if self.check.is_some() && !is_renewed {
            let message = "renew_while renews the lock, and fixed_ttl forbids that: use ttl";
            let error = Error::new(ErrorKind::InvalidConfig, message);
            return Err(error.with_key(key.name()));
        }
        let options = Options {
            ttl,
            renew_every: is_renewed.then(|| ttl.mul_f64(config.renew_ratio)),
            max_hold: self.max_hold,
            checked: self.check.is_some(),
        };
        Ok(LockRequest {
            key,
            options,
            check: self.check.clone(),
            cancel: self.cancel.clone(),
        })
    }
}

// As a client. A check that panics is caught, and not asked again.
impl UnwindSafe for Mutex {}
impl RefUnwindSafe for Mutex {}

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex")
            .field("key", &self.key())
            .field("ttl", &self.ttl)
            .field("renew_while", &self.check)
            .field("max_hold", &self.max_hold)
            .finish()
    }
}

/// Runs `work` under the lock, and releases it.
fn run_under<T>(guard: MutexGuard, work: impl FnOnce(&MutexGuard) -> T) -> Result<T, Error> {
    let value = guard.run(|| work(&guard));
    guard.unlock().map(|_| value)
}
