//! The settings of a client before it is built. Thin: the bounds are in config, the wiring in client.

use std::sync::Arc;
use std::time::Duration;

use redis::ConnectionInfo;

use crate::client::{Client, Server};
use crate::config::Config;
use crate::error::Error;
use crate::event::EventHandler;
use crate::store::{Endpoint, MemoryServer, redacted, redacted_info};
use crate::util::fork::ForkGuard;

/// Settings of a client; each has a default, and [`build`](Builder::build) checks them all.
///
/// ```
/// use std::time::Duration;
/// use leasehold::Client;
///
/// let client = Client::builder("redis://127.0.0.1:6379")
///     .ttl(Duration::from_secs(10))
///     .outage_timeout(Duration::from_secs(1))
///     .build_lazy()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// Every setting, with its default where it has one:
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let url = server.url();
/// use std::sync::Arc;
/// use std::time::Duration;
/// use leasehold::{Client, EventHandler};
///
/// struct Silent;
/// impl EventHandler for Silent {}
///
/// let client = Client::builder(&url)
///     .prefix("leasehold:")
///     .ttl(Duration::from_secs(30))
///     .max_ttl(Duration::from_secs(24 * 60 * 60))
///     .renew_ratio(1.0 / 3.0)
///     .max_hold(Duration::from_secs(600)) // none, without this
///     .max_key_bytes(1024)
///     .max_reply_bytes(4 * 1024 * 1024)
///     .connect_timeout(Duration::from_secs(1))
///     .command_timeout(Duration::from_secs(1))
///     .outage_timeout(Duration::from_secs(5))
///     .pipelines(2)
///     .max_transactions(4)
///     .hand_offs(256)
///     .hand_off_time(Duration::from_millis(5))
///     .event_handler(Arc::new(Silent))
///     .build()?; // connects once
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    place: Address,
    config: Config,
}

/// The address of a Redis: what [`Client::open`] and [`Client::builder`] accept. Made from a URL, from a
/// [`redis::ConnectionInfo`], or from a [`redis::Client`], whose address and login are used.
///
/// A URL is checked more strictly than redis-rs does it: unknown options are refused. Of a `ConnectionInfo`, the address,
/// user, password, database and protocol are used. TCP settings and the library name are not: a client has its own. TLS
/// is `InvalidConfig` when the client is built, and so is a host with a `%`, `@` or `/`, which is a password that was not
/// percent-encoded. `Debug` shows neither user nor password.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let url = server.url();
/// use leasehold::Client;
/// use leasehold::redis::{self, IntoConnectionInfo};
///
/// let redis = redis::Client::open(url.as_str())?;
/// let client = Client::open(&redis)?;
/// assert_eq!(client.with_lock("k", || 1)?, 1);
///
/// // An address with the parts of a login that need no encoding:
/// let info = url.as_str().into_connection_info()?;
/// let settings = info.redis_settings().clone().set_db(1);
/// let client = Client::builder(info.set_redis_settings(settings)).prefix("billing:").build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ServerAddress(Address);

#[derive(Clone)]
enum Address {
    Url(String),
    Info(Box<ConnectionInfo>),
    Memory(Arc<MemoryServer>),
}

impl From<&str> for ServerAddress {
    fn from(url: &str) -> Self {
        Self(Address::Url(url.to_owned()))
    }
}

impl From<&String> for ServerAddress {
    fn from(url: &String) -> Self {
        Self(Address::Url(url.clone()))
    }
}

impl From<String> for ServerAddress {
    fn from(url: String) -> Self {
        Self(Address::Url(url))
    }
}

impl From<ConnectionInfo> for ServerAddress {
    fn from(info: ConnectionInfo) -> Self {
        Self(Address::Info(Box::new(info)))
    }
}

impl From<&redis::Client> for ServerAddress {
    fn from(client: &redis::Client) -> Self {
        client.get_connection_info().clone().into()
    }
}

impl From<redis::Client> for ServerAddress {
    fn from(client: redis::Client) -> Self {
        Self::from(&client)
    }
}

impl std::fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ServerAddress")
            .field(&self.0.redacted())
            .finish()
    }
}

impl Address {
    /// Without user, password and options.
    fn redacted(&self) -> String {
        match self {
            Self::Url(url) => redacted(url),
            Self::Info(info) => redacted_info(info),
            Self::Memory(_) => "memory://".to_owned(),
        }
    }
}

/// Every method can be seen in use in the examples of [`Builder`].
impl Builder {
    pub(crate) fn of_address(address: ServerAddress) -> Self {
        Self::of(address.0)
    }

    pub(crate) fn of_memory(server: Arc<MemoryServer>) -> Self {
        Self::of(Address::Memory(server))
    }

    fn of(place: Address) -> Self {
        Self {
            place,
            config: Config::default(),
        }
    }

    /// What all keys in Redis begin with. Clients exclude each other under the same prefix only.
    /// At most 256 bytes, without control characters and `~`. Defaults to `leasehold:`.
    ///
    /// On one Redis database, no prefix may be the beginning of another one. `a:` and `a:b:` share locks: `b:x`
    /// under the first is `x` under the second. But each prefix has its own counter of fencing tokens and its own
    /// queues. So a lock that is taken under both may get a token smaller than an earlier one if the clock of Redis
    /// is set back, and its waiters are not served in order. Clients cannot detect this. End every prefix with the
    /// same character (`t1` is the beginning of `t10`, `t1:` is not the beginning of `t10:`). The empty prefix is
    /// the beginning of every other one.
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
    /// holder loses it then; see also [`EventHandler::max_hold_near`]. At least 10 ms. Defaults to no limit.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.max_hold = Some(max_hold);
        self
    }

    /// The longest key a caller may ask for, in bytes. 1 to 65,536. Defaults to 1,024.
    pub fn max_key_bytes(mut self, bytes: usize) -> Self {
        self.config.max_key_bytes = bytes;
        self
    }

    /// The largest reply to a command of a transaction, to its `EXEC`, or to the read of a fenced value. A reply counts
    /// with its bytes, and 56 more for each element of an array; the replies to a pipeline count as one. Reading a
    /// reply takes at most twice as much memory, so no server can fill it.
    ///
    /// A larger reply is [`TooLarge`](crate::ErrorKind::TooLarge); in a closure it is an error with the code
    /// `TOOLARGE`. If it is a string, the connection stays; any other reply that is too large ends the
    /// connection. 256 KiB to 512 MiB. Defaults to 4 MiB.
    pub fn max_reply_bytes(mut self, bytes: usize) -> Self {
        self.config.max_reply_bytes = bytes;
        self
    }

    /// How long connecting, logging in and loading the scripts may take together. 1 ms to 60 s. Defaults to 1 s.
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

    /// For how long [`Mutex::lock`](crate::Mutex::lock) rides out an outage of Redis before it fails. Waiting for
    /// somebody else to let go does not count. Defaults to 5 s.
    pub fn outage_timeout(mut self, outage_timeout: Duration) -> Self {
        self.config.outage_timeout = outage_timeout;
        self
    }

    /// Over how many connections requests are spread (one or two more serve renewals, and one more
    /// notifications). 1 to 4. Defaults to 2.
    pub fn pipelines(mut self, pipelines: usize) -> Self {
        self.config.pipelines = pipelines;
        self
    }

    /// How many transactions ([`MutexGuard::transaction`](crate::MutexGuard::transaction)) may be under
    /// way at a time, each with a connection of its own. Others wait for one to end, for as long as for
    /// a connection. 1 to 64. Defaults to 4.
    pub fn max_transactions(mut self, max_transactions: usize) -> Self {
        self.config.max_transactions = max_transactions;
        self
    }

    /// How often a lock passes from one thread of this client to the next that waits for it, without
    /// asking Redis, before other clients may have it. Dropped guards pass it on;
    /// [`MutexGuard::unlock`](crate::MutexGuard::unlock) and `with_lock` do not. 0 to 1,023; 0 switches it off.
    /// Defaults to 256.
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

    /// Who is told what happens. See [`EventHandler`] for an example. Defaults to nobody.
    pub fn event_handler<E: EventHandler>(mut self, event_handler: Arc<E>) -> Self {
        self.config.event_handler = Some(event_handler);
        self
    }

    /// Builds the client and connects once, so that what is wrong with the address shows here.
    ///
    /// # Errors
    /// Those of [`build_lazy`](Self::build_lazy) and of [`Client::open`].
    pub fn build(self) -> Result<Client, Error> {
        let fork_guard = ForkGuard::enter()?;
        let (server, config) = self.check()?;
        match &server {
            Server::Redis(endpoint) => drop(endpoint.open()?),
            Server::Memory(memory) => memory.check_reachable()?,
        }
        Client::start(server, config, fork_guard)
    }

    /// Builds the client without connecting: Redis may come up later.
    ///
    /// # Errors
    /// `InvalidConfig` names the field and the value. `Forked` in a process that was forked off
    /// while its parent had clients, or if it is for a [`MemoryStore`](crate::MemoryStore) that another process made.
    pub fn build_lazy(self) -> Result<Client, Error> {
        let fork_guard = ForkGuard::enter()?;
        let (server, config) = self.check()?;
        Client::start(server, config, fork_guard)
    }

    fn check(self) -> Result<(Server, Config), Error> {
        let config = self.config;
        config.validate()?;
        let (connect_timeout, max_reply) = (config.connect_timeout, config.max_reply_bytes);
        let redis = |endpoint: Endpoint| Server::Redis(Arc::new(endpoint));
        let server = match self.place {
            Address::Memory(server) => Server::Memory(server),
            Address::Info(info) => redis(Endpoint::from_info(*info, connect_timeout, max_reply)?),
            Address::Url(url) => match MemoryServer::of_url(&url) {
                Some(server) => Server::Memory(server?),
                None => redis(Endpoint::new(&url, connect_timeout, max_reply)?),
            },
        };
        if let Server::Memory(memory) = &server {
            memory.process().check()?;
        }
        Ok((server, config))
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("url", &self.place.redacted())
            .field("config", &self.config)
            .finish()
    }
}
