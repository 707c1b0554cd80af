//! The settings that all public lock types share, and the calls that acquire them.
//!
//! [`Lock`] holds the client, the key and the settings, and turns them into one request to `acquire`. A public type is
//! a struct around a `Lock`. Two macros, [`settings!`] and [`calls!`], give the type its methods. The type itself adds
//! an `acquire`, which wraps a [`Guard`] in the type's own guard, and the methods that other types do not have.
//!
//! With the macros, each type has a page with its own names and examples. Type aliases, such as
//! `type Mutex = Lock<Exclusive>`, would not suffice: signatures and errors would contain `Guard<Exclusive>`, links to
//! `Mutex::lock` would lead to the page of `Lock`, and a read-write lock could not name its calls `read` and `write`.

use std::fmt::DebugStruct;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::acquire::{LockRequest, Until};
use crate::client::{Client, Handle};
use crate::command::{Command, ForceUnlock, Inspect, Mode, Reply, redisson};
use crate::config::key::Key;
use crate::config::{Replicas, check_max_hold};
use crate::lease::{Check, Options};
use crate::locks::guard::Guard;
use crate::locks::held::{HolderInfo, Holders};
use crate::report::error::{Error, ErrorKind};
use crate::store::Feature;
use crate::util::sync::park_timeout;

/// A lock of a client: its key, and the settings to acquire it.
#[derive(Clone)]
pub struct Lock {
    pub client: Client,
    pub key: Result<Key, Error>,
    pub ttl: Ttl,
    pub check: Option<Check>,
    pub max_hold: Option<Duration>,
    pub replicas: Option<Replicas>,
    pub cancel: Option<Receiver<()>>,
    pub mode: Mode,
    /// Zero without this setting.
    pub min_hold: Duration,
}

/// For how long a forced release waits at most until the holder's client listens for notifications. It waits only if
/// the script finds that the grant is less than a second old, or that the lock's value contains no time.
const NOTIFY_WITHIN: Duration = Duration::from_secs(1);
/// The pause between two requests of a forced release during that wait.
const NOTIFY_PAUSE: Duration = Duration::from_millis(20);
/// A request asks for at most this many permits of a semaphore.
const MAX_WEIGHT: u32 = 1_000;
/// The greatest limit of a semaphore.
const MAX_PERMITS: u32 = 10_000;

/// The ttl of a lock, and whether it is renewed.
#[derive(Clone, Copy, Debug)]
pub enum Ttl {
    /// The client's ttl. The lock is renewed.
    OfClient,
    Renewed(Duration),
    Fixed(Duration),
}

impl Lock {
    pub fn new(client: Client, key: &str) -> Self {
        let config = client.config();
        Self {
            key: Key::new(&config.prefix, key, config.max_key_bytes),
            ttl: Ttl::OfClient,
            check: None,
            max_hold: config.max_hold,
            replicas: config.replicas,
            cancel: None,
            mode: Mode::Exclusive,
            min_hold: Duration::ZERO,
            client,
        }
    }

    /// The key as it was given; empty if it is not valid.
    pub fn name(&self) -> &str {
        self.key.as_ref().map_or("", Key::name)
    }

    /// Acquires the lock. Returns `None` if another holder had the lock until the time in `until`.
    pub fn acquire(&self, until: Until) -> Result<Option<Guard>, Error> {
        self.acquire_as(self.mode, until)
    }

    /// Acquires the lock in this mode.
    pub fn acquire_as(&self, mode: Mode, until: Until) -> Result<Option<Guard>, Error> {
        let (client, mut request) = self.prepare()?;
        request.options.mode = mode;
        let lease = client.acquirer.acquire(&request, until)?;
        Ok(lease.map(|lease| Guard::new(lease, self.client.clone())))
    }

    /// Checks the settings. Returns the parts of the client, and the request for this lock.
    pub fn prepare(&self) -> Result<(&Handle, LockRequest), Error> {
        let key = self.key.as_ref().map_err(Clone::clone)?;
        let named = |error: Error| error.with_key(key.name());
        let client = self.client.live().map_err(named)?;
        let request = self.request(key.clone()).map_err(named)?;
        self.check_mode(client).map_err(named)?;
        if !self.min_hold.is_zero() {
            client.check(Feature::MinHold).map_err(named)?;
        }
        if request.check.is_some() {
            client.start_checks().map_err(named)?;
        }
        Ok((client, request))
    }

    /// Returns an error if the client has no locks of this mode.
    fn check_mode(&self, client: &Handle) -> Result<(), Error> {
        match self.mode {
            Mode::Exclusive => Ok(()),
            Mode::Read => client.check(Feature::Readers),
            Mode::Permits { .. } => client.check(Feature::Permits),
        }
    }

    /// Returns an error that ends with `advice` if the client cannot claim the lock.
    pub fn check_claims(&self, advice: &str) -> Result<(), Error> {
        self.key.clone()?;
        let checked = self.client.live()?.check(Feature::Claims);
        checked.map_err(|error| error.followed_by(advice).with_key(self.name()))
    }

    /// Checks the settings, and makes a request of them.
    fn request(&self, key: Key) -> Result<LockRequest, Error> {
        let config = self.client.config();
        let (setting, ttl, is_renewed) = match self.ttl {
            Ttl::OfClient => ("ttl", config.ttl, true),
            Ttl::Renewed(ttl) => ("ttl", ttl, true),
            Ttl::Fixed(ttl) => ("fixed_ttl", ttl, false),
        };
        config.check_ttl(setting, ttl)?;
        self.max_hold.map_or(Ok(()), check_max_hold)?;
        config.check_replicas(self.replicas)?;
        if !self.min_hold.is_zero() {
            config.check_ttl("min_hold", self.min_hold)?;
        }
        check_permits(self.mode)?;
        redisson::check_key(config.other_library, config.layout, &key)?;
        if self.check.is_some() && !is_renewed {
            let message =
                "renew_while cannot be combined with fixed_ttl, which is never renewed: use ttl";
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        let options = Options {
            min_hold: self.min_hold,
            mode: self.mode,
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

    /// Reads the holders of the key.
    pub fn inspect(&self) -> Result<Holders, Error> {
        let key = self.key.clone()?;
        let named = |error: Error| error.with_key(self.name());
        let client = self.client.live().map_err(named)?;
        self.check_mode(client).map_err(named)?;
        let found = self.client.ask(Command::Inspect(Inspect { key }))?;
        Ok(Holders::new(found))
    }

    /// Takes the key from a holder by force. Returns false if the holder's lease has lost the key before.
    pub fn force(&self, holder: &HolderInfo) -> Result<bool, Error> {
        let (client, key) = (&self.client, self.key.clone()?);
        let Some(lease) = holder.lease() else {
            let message = "another library holds the lock, and its client would not learn of the loss: release the lock \
                           with that library, or delete the key";
            return Err(Error::new(ErrorKind::Unsupported, message).with_key(self.name()));
        };
        let share = holder.share();
        let command_timeout = client.config().command_timeout;
        let started = Instant::now();
        let mut released_by_some = false;
        loop {
            let elapsed = started.elapsed();
            let force = Command::ForceUnlock(ForceUnlock {
                share: share.clone(),
                key: key.clone(),
                lease,
                must_notify: elapsed < NOTIFY_WITHIN,
            });
            // All requests of this loop together take at most a command time-out plus `NOTIFY_WITHIN`.
            let left = (command_timeout + NOTIFY_WITHIN).saturating_sub(elapsed);
            match client.ask_within(force, left.min(command_timeout))? {
                Reply::Done => return Ok(true),
                Reply::NotListening { by_some } => {
                    released_by_some |= by_some;
                    park_timeout(NOTIFY_PAUSE);
                }
                // If earlier requests of this loop have released the lock on some nodes of a quorum, this request has
                // released it on the others.
                _ => return Ok(released_by_some),
            }
        }
    }

    /// Adds the settings to the debug output of a public type.
    pub fn debug_fields(&self, output: &mut DebugStruct<'_, '_>) {
        output
            .field("ttl", &self.ttl)
            .field("renew_while", &self.check)
            .field("max_hold", &self.max_hold)
            .field("replicas", &self.replicas);
        if !self.min_hold.is_zero() {
            output.field("min_hold", &self.min_hold);
        }
        if let Mode::Permits { weight, limit } = self.mode {
            output.field("permits", &limit).field("weight", &weight);
        }
    }
}

/// Checks the limit of a semaphore, and the number of permits that a request asks for.
fn check_permits(mode: Mode) -> Result<(), Error> {
    let Mode::Permits { weight, limit } = mode else {
        return Ok(());
    };
    if !(1..=MAX_PERMITS).contains(&limit) {
        let wanted = format!("1 to {MAX_PERMITS}");
        return Err(Error::invalid("permits", &wanted, limit));
    }
    let most = limit.min(MAX_WEIGHT);
    if !(1..=most).contains(&weight) {
        return Err(Error::invalid("weight", &format!("1 to {most}"), weight));
    }
    Ok(())
}

// The comment at `impl UnwindSafe for Client` says why this is sound. The client catches a panic of a check, and never
// calls that check again.
impl UnwindSafe for Lock {}
impl RefUnwindSafe for Lock {}

/// The methods of a guard that the calls with a closure use.
pub trait ClosureGuard: Sized {
    /// Runs `work` in the span of the hold.
    fn run<T>(&self, work: impl FnOnce() -> T) -> T;

    /// Ends the hold after the closure: hands the lock off to a waiting thread of this client, or releases it and waits
    /// for the reply.
    fn finish(self) -> Result<(), Error>;
}

/// Runs `work` with a guard, then ends the hold.
pub fn run_under<G: ClosureGuard, T>(guard: G, work: impl FnOnce(&G) -> T) -> Result<T, Error> {
    let value = guard.run(|| work(&guard));
    guard.finish().map(|()| value)
}

/// Implements the settings of a public type around a [`Lock`], its `key` and its debug output. With `settings of`
/// before the arguments, it implements the settings only.
///
/// `settings!(Mutex, client.mutex("k"), lock, MutexGuard::extend)` names the type, an expression that makes a lock for
/// the examples, the call that waits for the lock, and the method that extends it.
macro_rules! settings {
    ($Type:ident, $example:expr, $lock:ident, $Guard:ident::$extend:ident) => {
        $crate::locks::lock::settings!(settings of $Type, $example, $lock, $Guard::$extend);

        /// # Its name
        impl $Type {
            /// The name of the lock, as it was given; empty if it is not a valid key.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("assert_eq!(", stringify!($example), ".key(), \"k\");")]
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn key(&self) -> &str {
                self.lock.name()
            }
        }

        impl std::fmt::Debug for $Type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut output = f.debug_struct(stringify!($Type));
                output.field("key", &self.lock.name());
                self.lock.debug_fields(&mut output);
                output.finish()
            }
        }
    };
    (settings of $Type:ident, $example:expr, $lock:ident, $Guard:ident::$extend:ident) => {
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
        /// The last call of `ttl` or `fixed_ttl` counts. `fixed_ttl` together with `renew_while` is `InvalidConfig`;
        /// all other settings can be combined.
        #[doc = concat!("[`", stringify!($Guard), "::extend`](crate::", stringify!($Guard), "::extend)")]
        /// makes any of these locks last longer, up to `max_hold`.
        impl $Type {
            /// Sets the ttl of this lock. The client renews the lock while it is held, so the ttl is the longest time
            /// for which waiters wait after a crash of the holder. For a lock that ends by itself, use
            /// [`fixed_ttl`](Self::fixed_ttl) or [`max_hold`](Self::max_hold). 10 ms to
            /// [`Builder::max_ttl`](crate::Builder::max_ttl). Defaults to [`Builder::ttl`](crate::Builder::ttl).
            ///
            /// ```
            /// # use std::time::{Duration, Instant};
            /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
            /// let client = memory.client()?;
            #[doc = concat!("let lock = ", stringify!($example), ".ttl(Duration::from_secs(60));")]
            #[doc = concat!("let guard = lock.", stringify!($lock), "()?;")]
            /// for _ in 0..10 {
            ///     memory.advance(Duration::from_secs(30));
            /// }
            /// guard.check()?; // after five minutes
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.lock.ttl = $crate::locks::lock::Ttl::Renewed(ttl);
                self
            }

            /// Sets a ttl after which the lock ends, since the client does not renew it. A holder that is still working
            /// then loses the lock with [`Expired`](crate::LossReason::Expired), unless it has
            #[doc = concat!("[extended](crate::", stringify!($Guard), "::extend)")]
            /// the lock. 10 ms to [`Builder::max_ttl`](crate::Builder::max_ttl).
            ///
            /// ```
            /// # use std::time::{Duration, Instant};
            /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
            /// let client = memory.client()?;
            #[doc = concat!("let lock = ", stringify!($example), ".fixed_ttl(Duration::from_secs(60));")]
            #[doc = concat!("let guard = lock.", stringify!($lock), "()?;")]
            /// memory.advance(Duration::from_secs(30));
            /// guard.check()?;
            /// memory.advance(Duration::from_secs(30));
            /// assert!(guard.is_lost());
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn fixed_ttl(mut self, ttl: std::time::Duration) -> Self {
                self.lock.ttl = $crate::locks::lock::Ttl::Fixed(ttl);
                self
            }

            /// Renews the lock only while `check` returns true. The client calls `check` before each renewal. Once
            /// `check` returns false or panics, the client stops renewing, and the lock is lost with
            /// [`NotRenewed`](crate::LossReason::NotRenewed) when its validity ends. So the lock of a stuck worker
            /// becomes free.
            ///
            /// One thread of the client runs all checks, one after another. If a check hangs, the client cannot renew
            /// the other locks with a check, and they may expire; it renews locks without a check as usual.
            /// [`shutdown`](crate::Client::shutdown) waits for the check. The client never hands a lock with a check
            /// off to another of its threads.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
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
            #[doc = concat!("let lock = ", stringify!($example), ".renew_while(makes_progress);")]
            #[doc = concat!("let guard = lock.", stringify!($lock), "()?;")]
            /// for _ in 0..3 {
            ///     done.fetch_add(1, Ordering::Relaxed);
            /// }
            /// guard.unlock()?;
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn renew_while(mut self, check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
                self.lock.check = Some($crate::lease::Check::new(check));
                self
            }

            /// Sets the longest time for which the lock may be held, however often it is renewed. After that time the
            /// holder loses the lock with [`MaxHold`](crate::LossReason::MaxHold). When the last tenth begins, the
            /// client calls [`EventHandler::max_hold_ending`](crate::EventHandler::max_hold_ending). At least 10 ms.
            /// Defaults to [`Builder::max_hold`](crate::Builder::max_hold).
            ///
            /// ```
            /// # use std::time::{Duration, Instant};
            /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
            /// let client = memory.client()?;
            #[doc = concat!("let lock = ", stringify!($example), ".ttl(Duration::from_secs(60));")]
            /// let lock = lock.max_hold(Duration::from_secs(300));
            #[doc = concat!("let guard = lock.", stringify!($lock), "()?;")]
            /// for _ in 0..10 {
            ///     memory.advance(Duration::from_secs(30));
            /// }
            /// assert!(guard.is_lost(), "after five minutes, although it was renewed");
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn max_hold(mut self, max_hold: std::time::Duration) -> Self {
                self.lock.max_hold = Some(max_hold);
                self
            }

            /// Sets how many replicas have to acknowledge each grant, renewal and
            #[doc = concat!("[extension](crate::", stringify!($Guard), "::extend)")]
            /// of this lock within `timeout`. With a `count` of 0, acknowledgements are not needed. Defaults to
            /// [`Builder::replicas`](crate::Builder::replicas), which explains this setting.
            ///
            /// ```
            /// # use leasehold::{Client, ErrorKind};
            /// # use std::time::{Duration, Instant};
            /// # let server = leasehold_testbed::Server::start().unwrap(); // without replicas
            /// # let client = Client::builder(&server.url()).outage_timeout(Duration::ZERO).build()?;
            #[doc = concat!("let lock = ", stringify!($example), ".replicas(1, Duration::from_millis(100));")]
            #[doc = concat!("if let Err(error) = lock.", stringify!($lock), "() {")]
            ///     assert_eq!(error.kind(), ErrorKind::Unavailable);
            ///     assert!(error.to_string().contains("0 of 1 replicas acknowledged"));
            /// }
            #[doc = concat!("# assert!(lock.", stringify!($lock), "().is_err());")]
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn replicas(mut self, count: u32, timeout: std::time::Duration) -> Self {
                self.lock.replicas = $crate::config::Replicas::new(count, timeout);
                self
            }

            /// Cancels waits when `cancel` gets a message or its senders are dropped. A waiting call then fails with
            /// [`Cancelled`](crate::ErrorKind::Cancelled): at once, or after the reply if a request is under way. A
            /// message cancels one wait; dropping the senders cancels all waits. A call that does not wait ignores
            /// `cancel`.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// use leasehold::{ErrorKind, crossbeam_channel::bounded};
            ///
            #[doc = concat!("let held = ", stringify!($example), ".", stringify!($lock), "()?;")]
            /// let (stop, stopped) = bounded(0);
            #[doc = concat!("let lock = ", stringify!($example), ".cancelled_by(stopped);")]
            #[doc = concat!("let waiting = std::thread::spawn(move || lock.", stringify!($lock), "().map(drop));")]
            /// drop(stop);
            /// let error = waiting.join().unwrap().unwrap_err();
            /// assert_eq!(error.kind(), ErrorKind::Cancelled);
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn cancelled_by(mut self, cancel: $crate::crossbeam_channel::Receiver<()>) -> Self {
                self.lock.cancel = Some(cancel);
                self
            }
        }
    };
}
pub(crate) use settings;

/// Implements the eight calls that acquire a lock, for a public type around a [`Lock`]: four return a guard, and four
/// run a closure under it.
///
/// The arguments are the type, the function of the type that acquires until a given time, the guard, what a call
/// acquires (for the docs), an expression that makes a lock for the examples, and the names of the calls.
macro_rules! calls {
    (
        $(#[$doc:meta])*
        impl $Type:ident by $acquire:ident -> $Guard:ident, $what:literal, $example:expr;
        $lock:ident $try_lock:ident $try_lock_for:ident $try_lock_until:ident
        $with:ident $try_with:ident $try_with_for:ident $try_with_until:ident
    ) => {
        $(#[$doc])*
        impl $Type {
            #[doc = concat!("Waits for ", $what, ", for as long as other holders have it. The client serves its")]
            /// waiting threads in the order in which they asked, and Redis serves the waiting clients in that order.
            ///
            /// A thread that waits for Redis parks ([`std::thread::park_timeout`]), and consumes an `unpark` that
            /// another thread sends while it waits. If your code parks the same thread, check your own condition again
            /// after this call.
            ///
            /// # Errors
            /// `Unavailable` if Redis was away for the client's [`outage_timeout`](crate::Builder::outage_timeout);
            /// `Cancelled` if [`cancelled_by`](Self::cancelled_by) ends the wait; `Denied`, `Protocol`, `Shutdown`,
            /// `Forked`, `InvalidKey`, `InvalidConfig` at once. Contention is not an error.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), ".", stringify!($lock), "()?;")]
            /// drop(guard);
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $lock(&self) -> Result<$Guard, $crate::Error> {
                let guard = self.$acquire($crate::acquire::Until::Forever)?;
                Ok(guard.expect("a wait without a deadline ends with a guard or an error"))
            }

            #[doc = concat!("Acquires ", $what, " if no other holder has it now and no other thread of this client waits")]
            /// for it. Otherwise returns `Ok(None)`.
            ///
            /// # Errors
            #[doc = concat!("The errors of [`", stringify!($lock), "`](Self::", stringify!($lock), ") except")]
            /// `Cancelled`. If Redis is away, the call fails with `Unavailable` or `Timeout` within one
            /// [`command_timeout`](crate::Builder::command_timeout); the `outage_timeout` does not apply. If an address
            /// that has never worked refuses connections, this call fails at once: see
            /// [`connect_timeout`](crate::Builder::connect_timeout).
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("match ", stringify!($example), ".", stringify!($try_lock), "()? {")]
            ///     Some(_guard) => println!("held until the end of this arm"),
            ///     None => println!("another holder has it"),
            /// }
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_lock(&self) -> Result<Option<$Guard>, $crate::Error> {
                self.$acquire($crate::acquire::Until::Now)
            }

            #[doc = concat!("Waits for ", $what, " for at most `timeout`; returns `Ok(None)` if other holders had it until")]
            /// then. Each request ends after `timeout`, but has at least 100 ms for its reply. If `timeout` is zero,
            #[doc = concat!("this call does the same as [`", stringify!($try_lock), "`](Self::", stringify!($try_lock), ").")]
            ///
            /// # Errors
            #[doc = concat!("The errors of [`", stringify!($lock), "`](Self::", stringify!($lock), "). If Redis is")]
            /// away, the client tries again until `timeout` has passed; the `outage_timeout` does not apply.
            /// `Unavailable` also if `timeout` passes before Redis has replied at all.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// # use std::time::{Duration, Instant};
            #[doc = concat!("let lock = ", stringify!($example), ";")]
            #[doc = concat!("let guard = lock.", stringify!($try_lock_for), "(Duration::from_millis(250))?;")]
            /// assert!(guard.is_some());
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_lock_for(&self, timeout: std::time::Duration) -> Result<Option<$Guard>, $crate::Error> {
                self.$acquire($crate::acquire::Until::At(self.lock.client.now().after(timeout)))
            }

            #[doc = concat!("Waits for ", $what, " until `deadline`, and otherwise does the same as")]
            #[doc = concat!("[`", stringify!($try_lock_for), "`](Self::", stringify!($try_lock_for), ").")]
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// # use std::time::{Duration, Instant};
            /// let deadline = Instant::now() + Duration::from_millis(250);
            #[doc = concat!("let guard = ", stringify!($example), ".", stringify!($try_lock_until), "(deadline)?;")]
            /// assert!(guard.is_some());
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_lock_until(&self, deadline: std::time::Instant) -> Result<Option<$Guard>, $crate::Error> {
                self.$try_lock_for(deadline.saturating_duration_since(std::time::Instant::now()))
            }

            #[doc = concat!("Waits for ", $what, ", runs `work` with its guard, and releases it in the same way as")]
            /// [`Client::with_lock`](crate::Client::with_lock).
            ///
            /// # Errors
            #[doc = concat!("The errors of [`", stringify!($lock), "`](Self::", stringify!($lock), "), and `LeaseLost`")]
            /// if the client finds that the lock was lost before `work` returned. `Forked` if `work` forks the process
            /// and returns in the child. A release that Redis does not confirm is not an error.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let sum = ", stringify!($example), ".", stringify!($with), "(|guard| {")]
            ///     println!("held for at least {:?}", guard.remaining());
            ///     1 + 1
            /// })?;
            /// assert_eq!(sum, 2);
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $with<T>(&self, work: impl FnOnce(&$Guard) -> T) -> Result<T, $crate::Error> {
                $crate::locks::lock::run_under(self.$lock()?, work)
            }

            #[doc = concat!("Runs `work` with a guard if [`", stringify!($try_lock), "`](Self::", stringify!($try_lock), ")")]
            /// acquires one. Otherwise drops `work` and returns `Ok(None)`.
            ///
            /// # Errors
            #[doc = concat!("The errors of [`", stringify!($try_lock), "`](Self::", stringify!($try_lock), ") and of")]
            #[doc = concat!("[`", stringify!($with), "`](Self::", stringify!($with), ").")]
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("match ", stringify!($example), ".", stringify!($try_with), "(|guard| guard.remaining())? {")]
            ///     Some(left) => println!("{left:?} were left"),
            ///     None => println!("another holder has it"),
            /// }
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_with<T>(&self, work: impl FnOnce(&$Guard) -> T) -> Result<Option<T>, $crate::Error> {
                let guard = self.$try_lock()?;
                guard.map(|guard| $crate::locks::lock::run_under(guard, work)).transpose()
            }

            #[doc = concat!("Waits for ", $what, " for at most `timeout`, and runs `work` with its guard. If other holders")]
            /// had it until then, drops `work` and returns `Ok(None)`. `timeout` does not limit `work`:
            /// [`max_hold`](Self::max_hold) does.
            ///
            /// # Errors
            #[doc = concat!("The errors of [`", stringify!($try_lock_for), "`](Self::", stringify!($try_lock_for), ")")]
            #[doc = concat!("and of [`", stringify!($with), "`](Self::", stringify!($with), ").")]
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// # use std::time::{Duration, Instant};
            #[doc = concat!("let lock = ", stringify!($example), ";")]
            #[doc = concat!("let sum = lock.", stringify!($try_with_for), "(Duration::from_millis(250), |_| 1 + 1)?;")]
            /// assert_eq!(sum, Some(2));
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_with_for<T>(
                &self,
                timeout: std::time::Duration,
                work: impl FnOnce(&$Guard) -> T,
            ) -> Result<Option<T>, $crate::Error> {
                let guard = self.$try_lock_for(timeout)?;
                guard.map(|guard| $crate::locks::lock::run_under(guard, work)).transpose()
            }

            #[doc = concat!("Waits for ", $what, " until `deadline`, and otherwise does the same as")]
            #[doc = concat!("[`", stringify!($try_with_for), "`](Self::", stringify!($try_with_for), ").")]
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// # use std::time::{Duration, Instant};
            /// let deadline = Instant::now() + Duration::from_millis(250);
            #[doc = concat!("let lock = ", stringify!($example), ";")]
            #[doc = concat!("let sum = lock.", stringify!($try_with_until), "(deadline, |_| 1 + 1)?;")]
            /// assert_eq!(sum, Some(2));
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn $try_with_until<T>(
                &self,
                deadline: std::time::Instant,
                work: impl FnOnce(&$Guard) -> T,
            ) -> Result<Option<T>, $crate::Error> {
                self.$try_with_for(deadline.saturating_duration_since(std::time::Instant::now()), work)
            }
        }
    };
}
pub(crate) use calls;
