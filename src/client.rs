//! The façade: what a service builds once and asks for locks. Wires the parts, does none of their
//! work.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, Moment};
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::event::Events;
use crate::id::HolderId;
use crate::key::Key;
use crate::lease::Courier;
use crate::mutex::Mutex;
use crate::process::Process;
use crate::store::{DelayHook, Endpoint, Node, Store, redacted};
use crate::thread::Crew;
use crate::wait::{DelayedReleases, Hearing, LocalQueues, Waits};
use crate::watchdog::{Agenda, Watchdog};

/// A client of one Redis: make one per process and clone it freely.
///
/// Cheap to clone, usable from all threads. It owns a few connections and a fixed number of
/// threads, however many locks are held or waited for. When the last clone (with the last
/// [`Mutex`] and guard) goes, releases still under way are written and confirmed first, for at most
/// about one command time-out.
///
/// A fork takes no client along: in the child each of its calls fails with
/// [`Forked`](ErrorKind::Forked), and dropping it does nothing. Fork first and then make clients, one
/// in each process.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let url = server.url();
/// use leasehold::Client;
///
/// let client = Client::open(&url)?;
/// let total = client.with_lock("invoice:42", || 40 + 2)?;
/// assert_eq!(total, 42);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct Client(Arc<Home>);

/// The handle and the process that made it, in which alone it is used and dropped.
struct Home {
    process: Process,
    /// Always there but while this is dropped.
    handle: Option<Handle>,
}

pub(crate) struct Handle {
    pub(crate) config: Config,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) courier: Arc<Courier>,
    pub(crate) waits: Waits,
    delayed: Arc<DelayedReleases>,
    holder: HolderId,
    crew: Crew,
}

impl Client {
    /// Connects to the Redis at `url`, with all defaults.
    ///
    /// URLs are those of redis-rs: `redis://[user][:password@]host[:port][/db]`,
    /// `unix:///path[?db=..&user=..&pass=..]`.
    ///
    /// # Errors
    /// `InvalidConfig` for a bad URL, `Unavailable` if nothing answers there within the connect
    /// time-out, `Denied` for a wrong password, `Protocol` if what answers is not Redis.
    pub fn open(url: &str) -> Result<Self, Error> {
        Self::builder(url).build()
    }

    /// A builder for a client of the Redis at `url`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let url = server.url();
    /// use std::time::Duration;
    ///
    /// let client = leasehold::Client::builder(&url)
    ///     .prefix("billing:")
    ///     .ttl(Duration::from_secs(10))
    ///     .build()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn builder(url: &str) -> Builder {
        Builder {
            url: url.to_owned(),
            config: Config::default(),
        }
    }

    /// The lock named `key`. Does no I/O; an invalid key is told by the first call that needs it.
    ///
    /// Keys are text of 1 to 1,024 bytes without control characters that does not begin with `~`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// guard.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn mutex(&self, key: &str) -> Mutex {
        Mutex::new(self.clone(), key)
    }

    /// Runs `work` while holding the lock named `key`: waits for it, runs, lets go.
    ///
    /// The lock is renewed while `work` runs, however long that takes, and let go when it returns
    /// or panics (the panic goes on).
    ///
    /// # Errors
    /// Those of [`Mutex::lock`]; and `LeaseLost` if the lock was lost before `work` returned: it may
    /// have run beside somebody else, and its value is dropped.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let online = client.with_lock("online", || 1 + 1)?;
    /// assert_eq!(online, 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn with_lock<T>(&self, key: &str, work: impl FnOnce() -> T) -> Result<T, Error> {
        self.mutex(key).with(|_| work())
    }

    /// Who this client is to others: it stands in the value of every lock it holds.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// println!("I am {}", client.holder_id());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn holder_id(&self) -> &HolderId {
        &self.handle().holder
    }

    /// Ends the client, for all its clones: waiters return with `Shutdown`, renewals stop, every
    /// guard still held is lost with [`LossReason::Shutdown`](crate::LossReason::Shutdown), and
    /// releases under way are confirmed.
    ///
    /// A lock that is held is never released by this; its key ends with its ttl, or when its guard
    /// is dropped. May be called again.
    ///
    /// # Errors
    /// `Timeout` or `Unavailable` if releases could not be confirmed, or callbacks were still
    /// running, after `timeout`. The client is shut down all the same; unless the error is `Forked`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::ErrorKind;
    ///
    /// client.shutdown(std::time::Duration::from_secs(2))?;
    /// assert_eq!(client.mutex("a").lock().unwrap_err().kind(), ErrorKind::Shutdown);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn shutdown(&self, timeout: Duration) -> Result<(), Error> {
        self.check_process()?;
        self.handle().shut_down(timeout)
    }

    fn new(handle: Handle) -> Self {
        Self(Arc::new(Home {
            process: Process::current(),
            handle: Some(handle),
        }))
    }

    /// In a forked child only for what is plain data there: settings, names.
    pub(crate) fn handle(&self) -> &Handle {
        let handle = self.0.handle.as_ref();
        handle.expect("it is taken out when the last client is dropped")
    }

    /// `Forked` in a process that was forked off the client's own.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        self.0.process.check()
    }

    /// Whether this process was forked off the client's own.
    pub(crate) fn is_forked(&self) -> bool {
        !self.0.process.is_current()
    }

    /// What time it is for this client.
    pub(crate) fn now(&self) -> Moment {
        self.handle().watchdog.now()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("holder", &self.handle().holder.as_str())
            .field("config", &self.handle().config)
            .finish()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if !self.process.is_current() {
            std::mem::forget(self.handle.take());
        }
    }
}

impl Handle {
    fn new(endpoint: Endpoint, config: Config) -> Result<Self, Error> {
        let holder = HolderId::of_this_process();
        let crew = Crew::new();
        let clock = Clock::default();
        let (agenda, inboxes) = Agenda::new(clock.clone());
        let bell = {
            let agenda = Arc::clone(&agenda);
            Box::new(move |chore| agenda.ring(chore))
        };
        let courier = Courier::start(&crew, config.events.clone())?;
        let delayed = Arc::new(DelayedReleases::new(Arc::clone(&courier)));
        let delays = config.events.is_some().then(|| {
            let delayed = Arc::clone(&delayed);
            Arc::new(move |key: &Key, token, delay| delayed.hear(key, token, delay)) as DelayHook
        });
        let node = Node::new(endpoint, &config, holder.clone(), bell, delays);
        let store: Arc<dyn Store> = Arc::new(node);
        let watchdog = Watchdog::new(
            agenda,
            Arc::clone(&store),
            Arc::clone(&courier),
            config.command_timeout,
        );
        watchdog
            .start(&crew, inboxes)
            .inspect_err(|_| courier.stop())?;
        let queues = Arc::new(LocalQueues::new(clock));
        let hearing = Hearing::new(
            Arc::clone(&store),
            Arc::clone(&watchdog),
            Arc::clone(&courier),
            Arc::clone(&queues),
            config.max_ttl,
        );
        store.listen(&crew, Arc::new(hearing)).inspect_err(|_| {
            watchdog.stop();
            courier.stop();
        })?;
        let waits = Waits::new(
            Arc::clone(&store),
            Arc::clone(&watchdog),
            Arc::clone(&courier),
            queues,
            config.command_timeout,
            config.patience,
            config.hand_offs,
        );
        Ok(Self {
            config,
            store,
            watchdog,
            courier,
            waits,
            delayed,
            holder,
            crew,
        })
    }

    fn shut_down(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Moment::now().after(timeout);
        // First, so that no lease is believed in whose place in line is then given back.
        self.watchdog.stop();
        self.waits.end();
        let flushed = self.store.flush(deadline);
        self.store.stop_listening();
        self.delayed.end();
        self.courier.stop();
        let ended = self.crew.has_ended_by(deadline);
        flushed?;
        if ended {
            return Ok(());
        }
        let message = format!("callbacks or connections were still busy after {timeout:?}");
        Err(Error::new(ErrorKind::Timeout, message))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody is left to be told; what cannot be released now ends with its ttl.
        let _ = self.shut_down(self.config.command_timeout);
    }
}

/// Settings of a client; each has a default, and [`build`](Builder::build) checks them all.
///
/// ```
/// use std::time::Duration;
/// use leasehold::Client;
///
/// let client = Client::builder("redis://127.0.0.1:6379")
///     .ttl(Duration::from_secs(10))
///     .patience(Duration::from_secs(1))
///     .build_lazy()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    url: String,
    config: Config,
}

/// Every setter can be seen in use in the example of [`Builder`]; they differ in what they set only.
impl Builder {
    /// What all keys in Redis begin with. Clients exclude each other under the same prefix only.
    /// At most 256 bytes. Defaults to `leasehold:`.
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.config.prefix = prefix.to_owned();
        self
    }

    /// For how long Redis keeps a lock that is not renewed: how long others wait after a crash.
    /// 10 ms to [`max_ttl`](Self::max_ttl). Defaults to 30 s.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.config.ttl = ttl;
        self
    }

    /// The longest ttl any lock of this client may ask for. 10 ms to 24 h. Defaults to 24 h.
    pub fn max_ttl(mut self, max_ttl: Duration) -> Self {
        self.config.max_ttl = max_ttl;
        self
    }

    /// When held locks are renewed, as a part of their ttl. 0.05 to 0.9. Defaults to a third.
    pub fn renew_ratio(mut self, ratio: f64) -> Self {
        self.config.renew_ratio = ratio;
        self
    }

    /// For how long a lock may be held at most, however often it is renewed: a stuck or forgotten
    /// holder loses it then. At least 10 ms. Defaults to no limit.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.max_hold = Some(max_hold);
        self
    }

    /// The longest key a caller may ask for, in bytes. 1 to 65,536. Defaults to 1,024.
    pub fn max_key_bytes(mut self, bytes: usize) -> Self {
        self.config.max_key_bytes = bytes;
        self
    }

    /// For how long to wait for a connection. 1 ms to 60 s. Defaults to 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// For how long to wait for an answer. Every deadline holds to within this (and within
    /// [`connect_timeout`](Self::connect_timeout), where a connection has to be made). Keep it well
    /// below the ttl: a renewal that hangs is given up after it and tried again. 1 ms to 60 s.
    /// Defaults to 1 s.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.config.command_timeout = timeout;
        self
    }

    /// For how long [`Mutex::lock`] rides out an outage of Redis before it fails. Waiting for
    /// somebody else to let go does not count. Defaults to 5 s.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.config.patience = patience;
        self
    }

    /// Over how many connections requests are spread (one more serves renewals, and one more wake-ups). 1 to 4. Defaults
    /// to 2.
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.config.lanes = lanes;
        self
    }

    /// How often a lock passes from one thread of this client to the next that waits for it, without
    /// asking Redis, before other clients may have it. Dropped guards pass it on; [`MutexGuard::unlock`](crate::MutexGuard::unlock) and
    /// `with_lock` do not. 0 to 1,023; 0 switches it off. Defaults to 256.
    pub fn hand_offs(mut self, count: u32) -> Self {
        self.config.hand_offs.count = count;
        self
    }

    /// For how long in all a lock may be passed on within this client, while others wait. Defaults to
    /// 5 ms.
    pub fn hand_off_time(mut self, time: Duration) -> Self {
        self.config.hand_offs.time = time;
        self
    }

    /// Who is told what happens. See [`Events`] for an example. Defaults to nobody.
    pub fn events<E: Events>(mut self, events: Arc<E>) -> Self {
        self.config.events = Some(events);
        self
    }

    /// Builds the client and connects once, so that what is wrong with the address shows here.
    ///
    /// # Errors
    /// Those of [`build_lazy`](Self::build_lazy) and of [`Client::open`].
    pub fn build(self) -> Result<Client, Error> {
        let (endpoint, config) = self.check()?;
        endpoint.open()?;
        Handle::new(endpoint, config).map(Client::new)
    }

    /// Builds the client without connecting: Redis may come up later.
    ///
    /// # Errors
    /// `InvalidConfig` names the field and the value.
    pub fn build_lazy(self) -> Result<Client, Error> {
        let (endpoint, config) = self.check()?;
        Handle::new(endpoint, config).map(Client::new)
    }

    fn check(self) -> Result<(Endpoint, Config), Error> {
        let config = self.config;
        config.validate()?;
        let endpoint = Endpoint::new(&self.url, config.connect_timeout, config.command_timeout)?;
        Ok((endpoint, config))
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("url", &redacted(&self.url))
            .field("config", &self.config)
            .finish()
    }
}
