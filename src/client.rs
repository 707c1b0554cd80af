//! The façade: what a service builds once and asks for locks. Wires the parts, does none of their
//! work.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, Moment};
use crate::config::Config;
use crate::error::{Error, ErrorKind};
use crate::event::Events;
use crate::fenced::FencedValue;
use crate::guard::MutexGuard;
use crate::held::HeldLock;
use crate::id::HolderId;
use crate::lease::{Courier, Lease, Ticket};
use crate::mutex::Mutex;
use crate::store::{Command, Endpoint, Node, Reply, Request, Store, redacted};
use crate::thread::Crew;
use crate::wait::{Hearing, LocalQueues, Waits};
use crate::watchdog::{Agenda, Watchdog};

/// A client of one Redis: make one per process and clone it freely.
///
/// Cheap to clone, usable from all threads. It owns a few connections and a fixed number of
/// threads, however many locks are held or waited for. When the last clone (with the last
/// [`Mutex`] and guard) goes, releases still under way are written and confirmed first, for at most
/// about one command time-out.
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
pub struct Client(Arc<Handle>);

pub(crate) struct Handle {
    pub(crate) config: Config,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) courier: Arc<Courier>,
    pub(crate) waits: Waits,
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

    /// The fenced value named `key`: it refuses writes under an old fencing token. Does no I/O; has
    /// nothing to do with a lock of the same name, unless you use that one's tokens.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let total = client.fenced_value("invoice:42");
    /// client.mutex("invoice:42").with(|guard| total.write(guard.fencing_token(), "17"))??;
    /// assert_eq!(total.read()?.as_deref(), Some(b"17".as_slice()));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fenced_value(&self, key: &str) -> FencedValue {
        FencedValue::new(self.clone(), key)
    }

    /// Goes on with a lock that another client has [handed over](crate::MutexGuard::hand_over), on its
    /// terms and under its fencing token. Nobody else can have had it in between.
    ///
    /// # Errors
    /// `NotHeld` if it was adopted before, or nobody did in time; `InvalidTicket` if this is no ticket,
    /// or is one for another prefix; `InvalidConfig` or `InvalidKey` if its ttl or its key is beyond this
    /// client's bounds. After `Timeout` or `Unavailable` it is unknown whether it was adopted: if so, it is let go in the
    /// background. If not, the ticket is still good.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # let url = server.url();
    /// use leasehold::{Client, ErrorKind};
    ///
    /// let guard = client.mutex("deploy").lock()?;
    /// let token = guard.fencing_token();
    /// let ticket = guard.hand_over()?; // send it: in a variable, a message, a file
    ///
    /// let other = Client::open(&url)?; // in another process
    /// let guard = other.adopt(&ticket)?;
    /// assert_eq!(guard.fencing_token(), token);
    /// assert_eq!(other.adopt(&ticket).unwrap_err().kind(), ErrorKind::NotHeld);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn adopt(&self, ticket: &str) -> Result<MutexGuard, Error> {
        let ticket = Ticket::read(ticket, &self.0.config)?;
        let key = ticket.key.clone();
        let adopted = self.0.waits.adopt(ticket);
        let lease = adopted.map_err(|error| error.with_key(key.name()))?;
        Ok(MutexGuard::new(lease, self.clone()))
    }

    /// The locks that this client holds now, the oldest first. Asks no server.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// let held = client.held_locks();
    /// assert_eq!(held.len(), 1);
    /// println!("{} for {:?}", held[0].key(), held[0].age());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn held_locks(&self) -> Vec<HeldLock> {
        let now = self.now();
        let held = |lease: Arc<Lease>| {
            let terms = lease.terms();
            Some(HeldLock {
                key: terms.key.name().to_owned(),
                token: terms.token,
                age: now.since(terms.since),
                remaining: lease.live_for(now)?,
            })
        };
        let leases = self.0.waits.holders();
        let mut all: Vec<HeldLock> = leases.into_iter().filter_map(held).collect();
        all.sort_by_key(|held| std::cmp::Reverse(held.age));
        all
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
        &self.0.holder
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
    /// running, after `timeout`. The client is shut down all the same.
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
        self.0.shut_down(timeout)
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    /// What time it is for this client.
    pub(crate) fn now(&self) -> Moment {
        self.0.watchdog.now()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("holder", &self.0.holder.as_str())
            .field("config", &self.0.config)
            .finish()
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
        let store: Arc<dyn Store> = Arc::new(Node::new(endpoint, &config, holder.clone(), bell));
        let courier = Courier::start(&crew, config.events.clone())?;
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
            holder,
            crew,
        })
    }

    /// Asks Redis one thing.
    pub(crate) fn ask(&self, command: Command) -> Result<Reply, Error> {
        self.waits.check_open()?;
        let deadline = self.watchdog.now().after(self.config.command_timeout);
        let mut request = [Request::new(command, deadline)];
        self.store.execute(&mut request);
        let [request] = request;
        request.into_outcome()
    }

    fn shut_down(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Moment::now().after(timeout);
        // First, so that no lease is believed in whose place in line is then given back.
        self.watchdog.stop();
        self.waits.end();
        let flushed = self.store.flush(deadline);
        self.store.stop_listening();
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
        Handle::new(endpoint, config).map(|handle| Client(Arc::new(handle)))
    }

    /// Builds the client without connecting: Redis may come up later.
    ///
    /// # Errors
    /// `InvalidConfig` names the field and the value.
    pub fn build_lazy(self) -> Result<Client, Error> {
        let (endpoint, config) = self.check()?;
        Handle::new(endpoint, config).map(|handle| Client(Arc::new(handle)))
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
