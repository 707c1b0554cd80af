//! The settings of a client before it is built. `config` has their bounds; `client` connects the parts of the library.

use std::sync::Arc;
use std::time::Duration;

use crate::client::address::{Address, QuorumNode, ServerAddress};
use crate::client::{Client, Server};
use crate::cluster::ClusterAddress;
use crate::config::credentials::{Credentials, CredentialsCallback};
use crate::config::key::KeyLayout;
use crate::config::other_library::{OtherLibrary, PYTHON_PREFIX};
#[cfg(feature = "tls")]
use crate::config::tls::TlsConfig;
use crate::config::{Config, QUORUM_MAX_TTL, Replicas};
use crate::memory::MemoryServer;
use crate::process::fork::ForkGuard;
use crate::quorum::QuorumAddress;
use crate::report::error::{Error, ErrorKind};
use crate::report::event::EventHandler;
use crate::wire::endpoint::Endpoint;

/// The settings of a client. Each setting has a default, and [`build`](Builder::build) checks all of them.
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
///     .max_hold(Duration::from_secs(600)) // the default is no limit
///     .max_key_bytes(1024)
///     .max_reply_bytes(4 * 1024 * 1024)
///     .connect_timeout(Duration::from_secs(1))
///     .command_timeout(Duration::from_secs(1))
///     .outage_timeout(Duration::from_secs(5))
///     .max_connection_idle(Duration::from_secs(120))
///     .max_connection_age(Duration::from_secs(30 * 60))
///     .pipelines(2)
///     .max_transactions(4)
///     .max_hand_offs(256)
///     .hand_off_time(Duration::from_millis(5))
///     .replicas(0, Duration::from_millis(100)) // no replicas
///     .environment_check(true)
///     .event_handler(Arc::new(Silent))
///     .build()?; // connects once
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    address: Address,
    config: Config,
    /// Whether the caller has set the prefix.
    has_prefix: bool,
    /// Whether the caller has set the number of hand-offs.
    has_max_hand_offs: bool,
    credentials: Option<CredentialsCallback>,
    sentinel_login: Option<Credentials>,
    #[cfg(feature = "tls")]
    tls: Option<TlsConfig>,
}

/// The examples of [`Builder`] use every method.
impl Builder {
    pub(crate) fn with_address(address: ServerAddress) -> Self {
        Self::of(address.0)
    }

    pub(crate) fn with_memory(server: Arc<MemoryServer>) -> Self {
        Self::of(Address::Memory(server))
    }

    pub(crate) fn with_quorum(nodes: Vec<QuorumNode>) -> Self {
        let mut builder = Self::of(Address::Quorum(nodes));
        builder.config.max_ttl = QUORUM_MAX_TTL;
        builder
    }

    pub(crate) fn with_memory_quorum(nodes: Vec<Arc<MemoryServer>>) -> Self {
        let mut builder = Self::of(Address::MemoryQuorum(nodes));
        builder.config.max_ttl = QUORUM_MAX_TTL;
        builder
    }

    fn of(address: Address) -> Self {
        Self {
            address,
            config: Config::default(),
            has_prefix: false,
            has_max_hand_offs: false,
            credentials: None,
            sentinel_login: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Sets the beginning of all keys and channels in Redis. Clients exclude each other only under the same prefix.
    /// At most 256 bytes, without control characters and `~`. Defaults to `leasehold:`.
    ///
    /// In one Redis database, a prefix must not be the beginning of another prefix. With the prefixes `a:` and `a:b:`,
    /// the name `b:x` under `a:` is the same lock as `x` under `a:b:`. But each prefix has its own counter of fencing
    /// tokens and its own queues. So if clients with both prefixes take this lock, its waiters are not served in order,
    /// and a token may be smaller than an earlier token if the clock of Redis is set back. Clients cannot detect nested
    /// prefixes. End every prefix with the same character: `t1` is the beginning of `t10`, but `t1:` is not the
    /// beginning of `t10:`. The empty prefix is the beginning of every other prefix.
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.config.prefix = prefix.to_owned();
        self.has_prefix = true;
        self
    }

    /// Sets for how long Redis keeps a lock that is not renewed. Waiters wait this long at most after a holder crashes.
    /// 10 ms to [`max_ttl`](Self::max_ttl). Defaults to 30 s.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.config.ttl = ttl;
        self
    }

    /// Sets the longest ttl that a lock of this client may have. 10 ms to 24 h. Defaults to 24 h.
    ///
    /// On a [quorum](Client::quorum), this is also the time for which a node does not vote after it may have lost its
    /// data, and it defaults to 30 s. There all clients must have the same `max_ttl`.
    pub fn max_ttl(mut self, max_ttl: Duration) -> Self {
        self.config.max_ttl = max_ttl;
        self
    }

    /// Sets when held locks are renewed: after this part of their ttl. 0.05 to 0.9. Defaults to 1/3.
    pub fn renew_ratio(mut self, ratio: f64) -> Self {
        self.config.renew_ratio = ratio;
        self
    }

    /// Sets the longest time for which a lock may be held, however often it is renewed. After that time, a stuck or
    /// forgotten holder loses the lock. [`EventHandler::max_hold_ending`] warns before that. At least 10 ms. Defaults
    /// to no limit.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.config.max_hold = Some(max_hold);
        self
    }

    /// Sets the length of the longest key, in bytes. 1 to 65,536. Defaults to 1,024.
    pub fn max_key_bytes(mut self, bytes: usize) -> Self {
        self.config.max_key_bytes = bytes;
        self
    }

    /// Sets the size of the largest reply to a command of a transaction, to its `EXEC`, or to the read of a fenced
    /// value. 256 KiB to 512 MiB. Defaults to 4 MiB.
    ///
    /// The size of a reply is its length in bytes, plus 56 for each element of an array. The replies to a pipeline
    /// count as one reply. Reading a reply takes at most twice its size in memory, so a server cannot fill the memory
    /// of the client.
    ///
    /// For a larger reply, the call fails with [`TooLarge`](crate::ErrorKind::TooLarge). The closure of a transaction
    /// gets an error with the code `TOOLARGE`. If the reply is a string, the connection stays open. The client closes
    /// the connection after any other reply that is too large.
    pub fn max_reply_bytes(mut self, bytes: usize) -> Self {
        self.config.max_reply_bytes = bytes;
        self
    }

    /// Sets how long connecting, logging in and loading the scripts may take together. 1 ms to 60 s. Defaults to 1 s.
    ///
    /// If an attempt fails for a reason that may pass (the server restarts, loads its data, or is busy), the call tries
    /// again for this time, or until its own time ends. A call fails at once if the login or a certificate is refused,
    /// or if nothing listens at an address that this client has never reached.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// Sets for how long a request waits for its reply. 1 ms to 60 s. Defaults to 1 s.
    ///
    /// If a call has to connect first, that counts towards this time, except for transactions and pings. Keep this time
    /// well below the ttl: a renewal without a reply is tried again once this time has passed.
    pub fn command_timeout(mut self, timeout: Duration) -> Self {
        self.config.command_timeout = timeout;
        self
    }

    /// Sets for how long [`Mutex::lock`](crate::Mutex::lock) tries again while Redis is away, before it fails with
    /// `Unavailable`. Waiting for another holder does not count. Defaults to 5 s.
    pub fn outage_timeout(mut self, outage_timeout: Duration) -> Self {
        self.config.outage_timeout = outage_timeout;
        self
    }

    /// Sets how long a connection may be idle and still be used. 100 ms or more; [`Duration::MAX`] is no limit.
    /// Defaults to two minutes.
    ///
    /// Load balancers, firewalls and NAT gateways forget a connection that was silent for some minutes, and then drop
    /// its bytes: a request would wait for its time-out. So the call after a longer pause opens a new connection first,
    /// and closes the old one. Set less than the time after which your network forgets connections. The notification
    /// connection sends a `PING` after half of this time, or after 10 s if that is earlier. All connections have TCP
    /// keepalive, with a first probe after 30 s.
    pub fn max_connection_idle(mut self, max_idle: Duration) -> Self {
        self.config.connection_limits.max_idle = max_idle;
        self
    }

    /// Sets for how long a connection is used. Each connection is replaced after a random part of this time, between
    /// three quarters and all of it. 1 s or more; [`Duration::MAX`] is no limit. Defaults to 30 minutes.
    ///
    /// A new connection resolves the host's name again, so the client follows a name that has moved to another server
    /// within this time. Until then, it uses the old server if that still runs: see
    /// [guarantees](crate::guide::guarantees). The old connection is closed only once the new one is open, so an
    /// attempt that fails ends no request.
    pub fn max_connection_age(mut self, max_age: Duration) -> Self {
        self.config.connection_limits.max_age = max_age;
        self
    }

    /// Sets the number of connections for requests. Notifications have another connection. Renewals have one or two
    /// more, except while at most eight locks are due together: renewals then use an idle connection for requests. 1 to
    /// 4. Defaults to 2.
    pub fn pipelines(mut self, pipelines: usize) -> Self {
        self.config.pipelines = pipelines;
        self
    }

    /// Sets how many transactions ([`MutexGuard::transaction`](crate::MutexGuard::transaction)) may run at a time, each
    /// on a connection of its own. A further transaction waits until another transaction ends, and fails with
    /// `Unavailable` after one [`connect_timeout`](Self::connect_timeout). 1 to 64. Defaults to 4.
    pub fn max_transactions(mut self, max_transactions: usize) -> Self {
        self.config.max_transactions = max_transactions;
        self
    }

    /// Sets how many hand-offs may follow one another before other clients get the lock. In a hand-off, a lock passes
    /// from one thread of this client to the next waiting thread, without a request to Redis. The drop of a guard and
    /// the end of `with_lock` and its relatives hand the lock off;
    /// [`MutexGuard::unlock`](crate::MutexGuard::unlock) does not. 0 to 1,023; 0 switches hand-offs off. Defaults to
    /// 256, and to 0 with [`compatible_with`](Self::compatible_with).
    pub fn max_hand_offs(mut self, count: u32) -> Self {
        self.config.hand_offs.count = count;
        self.has_max_hand_offs = true;
        self
    }

    /// Sets for how long in a row a lock may be handed off while other clients wait. Defaults to 5 ms.
    pub fn hand_off_time(mut self, time: Duration) -> Self {
        self.config.hand_offs.time = time;
        self
    }

    /// Sets how many replicas have to acknowledge a grant within `timeout` (`WAIT`) before this client relies on it. A
    /// fail-over to one of these replicas keeps the lock. Renewals, [extensions](crate::MutexGuard::extend) and
    /// adoptions of tickets need the same acknowledgements. Defaults to a `count` of 0: no acknowledgements. `timeout`
    /// is 1 ms to half of [`command_timeout`](Self::command_timeout). [`Mutex::replicas`](crate::Mutex::replicas) sets
    /// both for one lock.
    ///
    /// If fewer replicas acknowledge a grant in time, the client releases it, and the attempt fails with `Unavailable`:
    /// [`lock`](crate::Mutex::lock) tries again for [`outage_timeout`](Self::outage_timeout), as in any outage. If
    /// fewer acknowledge a renewal, the lock keeps its old deadline, and the client tries again. So a holder that loses
    /// its replicas keeps its lock for one ttl at most.
    ///
    /// `WAIT` is not consensus: a fail-over may elect a replica that has not acknowledged. The page on
    /// [replicas](crate::guide::replicas) lists the risks that remain, and by how much other requests of this client
    /// are delayed while replicas are away. A [`MemoryStore`](crate::MemoryStore) has no fail-over, and ignores this
    /// setting.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use leasehold::Client;
    ///
    /// let client = Client::builder("redis://127.0.0.1:6379")
    ///     .replicas(1, Duration::from_millis(100))
    ///     .build_lazy()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Self {
        self.config.replicas = Replicas::new(count, timeout);
        self
    }

    /// Makes this client and another library exclude each other: the client waits while that library holds a key, and
    /// that library finds the client's keys taken. Prefix and name together have to be the key of the other library.
    /// Defaults to none: a key of another program is then an error ([`Protocol`](ErrorKind::Protocol)).
    ///
    /// Building the client fails with [`InvalidConfig`](ErrorKind::InvalidConfig)
    ///
    /// - on a [quorum](Client::quorum);
    /// - with [`PlainKeys`](OtherLibrary::PlainKeys) or [`Redisson`](OtherLibrary::Redisson) without an explicit
    ///   [`prefix`](Self::prefix);
    /// - with [`PythonRedisLock`](OtherLibrary::PythonRedisLock) on a Cluster, or with a prefix that does not begin
    ///   with `lock:`, its default;
    /// - with `Redisson` and [`max_hand_offs`](Self::max_hand_offs) above 0, or on a
    ///   [`MemoryStore`](crate::MemoryStore).
    ///
    /// Waiters do not queue in Redis, and [`max_hand_offs`](Self::max_hand_offs) defaults to 0, since the other library
    /// could not get a lock that passes from one client to the next. [`EventHandler::foreign_holder`] names the keys
    /// that another library holds. The guide's page on [other libraries](crate::guide::other_libraries) lists the
    /// libraries, and the guarantees that are weaker.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let mut redis = leasehold::redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    /// use leasehold::redis::cmd;
    /// use leasehold::{Client, OtherLibrary};
    ///
    /// let builder = Client::builder(&server.url()).prefix("");
    /// let client = builder.compatible_with(OtherLibrary::PlainKeys).build()?;
    /// cmd("SET").arg("invoice:42").arg("5f1c0b1e").exec(&mut redis).unwrap(); // as redis-py does
    /// assert!(client.mutex("invoice:42").try_lock()?.is_none());
    /// cmd("DEL").arg("invoice:42").exec(&mut redis).unwrap();
    /// assert!(client.mutex("invoice:42").try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn compatible_with(mut self, other: OtherLibrary) -> Self {
        self.config.other_library = Some(other);
        self
    }

    /// Tells a client of a [quorum](Client::quorum) whether each node writes every command to disk before it replies
    /// (`appendonly yes` and `appendfsync always`). Then a restarted node that still has its data votes at once,
    /// instead of after [`max_ttl`](Self::max_ttl). A node without its data still waits. Set this to true on all
    /// clients, and only if all nodes do so: a node that lost the last second of its data would grant a held lock
    /// again. Defaults to false.
    ///
    /// ```
    /// use leasehold::Client;
    ///
    /// let nodes = ["redis://127.0.0.1:6379", "redis://127.0.0.1:6380", "redis://127.0.0.1:6381"];
    /// let client = Client::quorum_builder(nodes).assume_durable_nodes(true).build_lazy()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn assume_durable_nodes(mut self, durable: bool) -> Self {
        self.config.assume_durable_nodes = durable;
        self
    }

    /// Sets whether the client checks its environment once, after its first connection, and reports each finding to
    /// [`EventHandler::environment_warning`]. The check runs on a thread and on connections of its own, and only if
    /// there is an event handler or the feature `tracing`. Defaults to true.
    pub fn environment_check(mut self, is_on: bool) -> Self {
        self.config.environment_check = is_on;
        self
    }

    /// Sets the receiver of this client's events. [`EventHandler`] has an example. Defaults to none.
    pub fn event_handler<E: EventHandler>(mut self, event_handler: Arc<E>) -> Self {
        self.config.event_handler = Some(event_handler);
        self
    }

    /// Calls `callback` for the login of each new connection, for passwords or tokens that expire. The address must not
    /// contain a login. [`Credentials`] has another example.
    ///
    /// The callback runs after a server has accepted the connection. It runs on the threads that connect, perhaps on
    /// several at a time; [`build`](Self::build) runs it on the caller's thread. The library holds none of its mutexes
    /// while it runs. The callback has to return soon: it has no time-out, and its time does not count for
    /// `connect_timeout`. If it fails or panics, the connection fails with `Unavailable`, and `source()` has the text
    /// of its error. Keep passwords out of that error.
    ///
    /// ```
    /// use leasehold::{Client, Credentials};
    ///
    /// # fn token() -> std::io::Result<String> { Ok("t0ken".to_owned()) }
    /// let client = Client::builder("redis://127.0.0.1:6379")
    ///     .credentials(|| Ok(Credentials::user("billing", token()?)))
    ///     .build_lazy()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn credentials<F>(mut self, callback: F) -> Self
    where
        F: Fn() -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>>
            + Send
            + Sync
            + 'static,
    {
        self.credentials = Some(CredentialsCallback::new(callback));
        self
    }

    /// Sets the login at the sentinels of a `redis+sentinel://` address. The login of the URL and that of
    /// [`credentials`](Self::credentials) are for the servers. By default, the client sends the sentinels no login.
    ///
    /// ```
    /// use leasehold::{Client, Credentials};
    ///
    /// let client = Client::builder("redis+sentinel://:s3cret@10.0.0.7,10.0.0.8/mymaster")
    ///     .sentinel_credentials(Credentials::password("t0ken"))
    ///     .build_lazy()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn sentinel_credentials(mut self, credentials: Credentials) -> Self {
        self.sentinel_login = Some(credentials);
        self
    }

    /// Sets how connections to a `rediss://` address use TLS. Defaults to the authorities that the system trusts,
    /// without a client certificate. Building the client fails with `InvalidConfig` if the address has no TLS.
    ///
    /// ```no_run
    /// use leasehold::{Client, TlsConfig};
    ///
    /// # fn open() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = Client::builder("rediss://redis.example.com")
    ///     .tls(TlsConfig::new().ca_pem(std::fs::read("ca.pem")?))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: TlsConfig) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Builds the client, and connects once. So this call reports a wrong address or login.
    ///
    /// # Errors
    /// The errors of [`build_lazy`](Self::build_lazy) and of [`Client::open`].
    pub fn build(self) -> Result<Client, Error> {
        let fork_guard = ForkGuard::enter()?;
        let (server, config) = self.check()?;
        match &server {
            Server::Redis(endpoint) => drop(endpoint.open()?),
            Server::Cluster(cluster) => cluster.check_reachable()?,
            Server::Memory(memory) => memory.check_reachable()?,
            // The ping below connects to all nodes at the same time.
            Server::Quorum(_) | Server::MemoryQuorum(_) => {}
        }
        let is_quorum = matches!(server, Server::Quorum(_) | Server::MemoryQuorum(_));
        let client = Client::start(server, config, fork_guard)?;
        if is_quorum {
            client.ping()?;
        }
        client.live()?.first_connection.report();
        Ok(client)
    }

    /// Builds the client without connecting. Redis may start later: the first call that needs Redis connects.
    ///
    /// # Errors
    /// `InvalidConfig` if a setting is out of its bounds; the message names the setting and its value. For a wrong
    /// address of a quorum's node, the message contains the node's number, from 1 on. `Forked` in a process whose
    /// parent had clients when it forked, or for a [`MemoryStore`](crate::MemoryStore) that another process made.
    /// `Unavailable` if the client's threads cannot be started.
    pub fn build_lazy(self) -> Result<Client, Error> {
        let fork_guard = ForkGuard::enter()?;
        let (server, config) = self.check()?;
        Client::start(server, config, fork_guard)
    }

    /// Checks the settings, and makes the address of the servers.
    fn check(mut self) -> Result<(Server, Config), Error> {
        self.adapt_to_other_library();
        self.config.validate()?;
        let server = match self.address.clone() {
            Address::Url(url) => self.server_of_url(&url)?,
            Address::Info(info) => {
                let (connect_timeout, max_reply) = self.endpoint_settings();
                self.redis(Endpoint::from_info(*info, connect_timeout, max_reply)?)?
            }
            Address::Memory(server) => self.memory(Server::Memory(server))?,
            Address::Quorum(nodes) => self.quorum(nodes)?,
            Address::MemoryQuorum(nodes) => self.memory(Server::MemoryQuorum(nodes))?,
        };
        self.check_other_library(&server)?;
        Ok((server, self.config))
    }

    /// Changes the defaults that differ with [`compatible_with`](Self::compatible_with).
    fn adapt_to_other_library(&mut self) {
        let Some(other) = self.config.other_library else {
            return;
        };
        if other == OtherLibrary::PythonRedisLock && !self.has_prefix {
            self.config.prefix = PYTHON_PREFIX.to_owned();
        }
        if !self.has_max_hand_offs {
            self.config.hand_offs.count = 0;
        }
    }

    /// Returns an error if the server or a setting does not fit the other library.
    fn check_other_library(&self, server: &Server) -> Result<(), Error> {
        use OtherLibrary::{PlainKeys, PythonRedisLock, Redisson};
        let Some(other) = self.config.other_library else {
            return Ok(());
        };
        let message = match (other, server) {
            (_, Server::Quorum(_) | Server::MemoryQuorum(_)) => {
                "a quorum cannot take part in the locks of other libraries"
            }
            (PlainKeys | Redisson { .. }, _) if !self.has_prefix => {
                "set `prefix` to the start of the other library's keys; it is \"\" if the names of the locks are the keys"
            }
            (PythonRedisLock, Server::Cluster(_)) => {
                "python-redis-lock needs keys of two slots for each lock, so it does not run on a Cluster"
            }
            (PythonRedisLock, _) if !self.config.prefix.starts_with(PYTHON_PREFIX) => {
                "the keys of python-redis-lock begin with `lock:`, so `prefix` has to, too"
            }
            (Redisson { .. }, Server::Memory(_)) => {
                "a memory store has no locks of Redisson; leave this setting out in tests without a server"
            }
            (Redisson { .. }, _) if self.config.hand_offs.count > 0 => {
                "Redisson counts each grant, so it allows no hand-offs: leave `max_hand_offs` out, or set it to 0"
            }
            _ => return Ok(()),
        };
        let message = format!("compatible_with: {message}");
        Err(Error::new(ErrorKind::InvalidConfig, message))
    }

    /// The time to connect, and the size of the largest reply.
    fn endpoint_settings(&self) -> (Duration, usize) {
        (self.config.connect_timeout, self.config.max_reply_bytes)
    }

    fn server_of_url(&mut self, url: &str) -> Result<Server, Error> {
        let (connect_timeout, max_reply) = self.endpoint_settings();
        let timeouts = (connect_timeout, self.config.command_timeout);
        if let Some(cluster) = ClusterAddress::from_url(url, timeouts, max_reply) {
            return self.cluster(cluster?);
        }
        match MemoryServer::from_url(url) {
            Some(server) => self.memory(Server::Memory(server?)),
            None => self.redis(Endpoint::new(url, connect_timeout, max_reply)?),
        }
    }

    fn redis(&mut self, mut endpoint: Endpoint) -> Result<Server, Error> {
        endpoint.limits = self.config.connection_limits;
        endpoint.dialer.set_prefix(&self.config.prefix);
        if let Some(callback) = self.credentials.take() {
            endpoint.set_credentials(callback)?;
        }
        if let Some(login) = self.sentinel_login.take() {
            endpoint.set_sentinel_login(login)?;
        }
        #[cfg(feature = "tls")]
        endpoint.set_up_tls(self.tls.as_ref())?;
        Ok(Server::Redis(Box::new(endpoint)))
    }

    fn cluster(&mut self, mut cluster: ClusterAddress) -> Result<Server, Error> {
        self.config.layout = KeyLayout::for_cluster(&self.config.prefix)?;
        cluster.set_limits(self.config.connection_limits);
        cluster.set_prefix(&self.config.prefix);
        if let Some(callback) = self.credentials.take() {
            cluster.set_credentials(callback);
        }
        #[cfg(feature = "tls")]
        cluster.set_tls(self.tls.take());
        cluster.check()?;
        Ok(Server::Cluster(Box::new(cluster)))
    }

    fn quorum(&self, nodes: Vec<QuorumNode>) -> Result<Server, Error> {
        let setting = match (&self.sentinel_login, self.config.replicas) {
            (Some(_), _) => "sentinel_credentials: a quorum has no sentinels",
            (_, Some(_)) => "replicas: a quorum counts its nodes, and no replicas",
            _ => "",
        };
        if !setting.is_empty() {
            return Err(Error::new(ErrorKind::InvalidConfig, setting));
        }
        let (connect_timeout, max_reply) = self.endpoint_settings();
        let endpoint = |node: QuorumNode| {
            let mut endpoint = (node.address.0).endpoint_of_node(connect_timeout, max_reply)?;
            endpoint.limits = self.config.connection_limits;
            if let Some(callback) = node.credentials.or_else(|| self.credentials.clone()) {
                endpoint.set_credentials(callback)?;
            }
            #[cfg(feature = "tls")]
            endpoint.set_up_tls(node.tls.as_ref().or(self.tls.as_ref()))?;
            Ok(endpoint)
        };
        // An error contains the number of its node, but not the URL, which may contain a password.
        let numbered = |(node, index)| {
            endpoint(node).map_err(|error: Error| error.at(&format!("node {index}")))
        };
        let endpoints = nodes
            .into_iter()
            .zip(1..)
            .map(numbered)
            .collect::<Result<_, Error>>()?;
        let quorum = QuorumAddress::new(endpoints, &self.config)?;
        Ok(Server::Quorum(Box::new(quorum)))
    }

    /// Checks the settings of a store in this process, and that this process has made the store.
    fn memory(&self, server: Server) -> Result<Server, Error> {
        #[cfg(feature = "tls")]
        let has_tls = self.tls.is_some();
        #[cfg(not(feature = "tls"))]
        let has_tls = false;
        let settings = [
            ("credentials", self.credentials.is_some()),
            ("sentinel_credentials", self.sentinel_login.is_some()),
            ("tls", has_tls),
        ];
        if let Some((setting, _)) = settings.iter().find(|(_, is_set)| *is_set) {
            let message = format!("{setting}: a memory store has no connections");
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        match &server {
            Server::Memory(memory) => memory.live().map(drop)?,
            Server::MemoryQuorum(nodes) => nodes[0].live().map(drop)?,
            _ => {}
        }
        Ok(server)
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("url", &self.address.redacted())
            .field("config", &self.config)
            .finish()
    }
}
