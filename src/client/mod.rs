//! The client: makes mutexes and fenced values, and connects the parts of the library. Sends requests through the store
//! only.

pub mod address;
pub mod builder;
pub mod memory_store;

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;
use parking_lot::Mutex as PlainMutex;

use crate::acquire::{Acquirer, LeaderState, LocalQueues, NotificationHandler, ObserverId};
use crate::client::address::QuorumNode;
use crate::client::address::ServerAddress;
use crate::client::builder::Builder;
use crate::cluster::{ClusterAddress, ClusterStore};
use crate::command::{Command, Reply};
use crate::config::Config;
use crate::config::key::Key;
use crate::config::other_library::OtherLibrary;
use crate::lease::{CallbackExecutor, Lease, Ticket};
use crate::locks::election::Election;
use crate::locks::fenced::FencedValue;
use crate::locks::guard::Guard;
use crate::locks::held::HeldLock;
use crate::locks::listing::FoundLocks;
use crate::locks::mutex::{Mutex, MutexGuard};
use crate::locks::mutexes::Mutexes;
use crate::locks::once::Once;
use crate::locks::reentrant::ReentrantMutex;
use crate::locks::rwlock::RwLock;
use crate::locks::semaphore::Semaphore;
use crate::locks::transaction::TransactionRunner;
use crate::memory::{MemoryNode, MemoryServer};
use crate::process::fork::ForkGuard;
use crate::process::threads::ThreadGroup;
use crate::quorum::{QuorumAddress, QuorumStore};
use crate::report::environment::{EnvironmentFinding, EnvironmentWarning};
use crate::report::error::{Error, ErrorKind};
use crate::report::node_state::NodeState;
use crate::report::observe;
use crate::store::{
    Backend, Feature, LateRelease, Notifications, Report, ReportedReleases, Reports, ServerId,
    Store, features,
};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::HolderId;
use crate::watchdog::{Scheduler, Watchdog};
use crate::wire::Node;
use crate::wire::endpoint::Endpoint;
use crate::wire::session::Transactions;

/// The bytes of a claim's reply beside the fenced value, at most.
const CLAIM_RESERVE: usize = 1_024;

/// A client of a Redis server, of a primary under Sentinel, of a Redis Cluster, or of a [quorum](Client::quorum) of
/// servers. Make one per process and clone it freely. The drop of the last clone waits for Redis.
///
/// A clone is cheap, and all threads can use the client. A client owns few connections and threads, however many locks
/// are held or waited for:
///
/// | client of | threads |
/// |---|---|
/// | one server | four: timers, renewals, releases, notifications. A fifth, once two renewals have overlapped |
/// | a Redis Cluster | four, two for each master that the client uses, and one more for each master but the first once the client has renewed locks there |
/// | a [quorum](Client::quorum) | four, and two for each node |
/// | a [`MemoryStore`](crate::MemoryStore) | three |
///
/// Callbacks and an event handler have one more thread, locks with [`renew_while`](Mutex::renew_while) have one, all
/// [observers](Election::observe) of elections share one, and a `redis+sentinel://` address has one. While connections
/// are being made, up to three threads make them. The environment check has a thread while it runs.
///
/// The client ends when its last clone, [`Mutex`] and guard are dropped. The last drop waits until Redis has confirmed
/// all releases, for about one command time-out at most. Locks that are not released by then (in an outage, or after
/// hundreds of thousands of guards) stay in Redis until their ttl ends. To wait longer, call
/// [`shutdown`](Self::shutdown) first.
///
/// A child made by `fork` cannot use its parent's clients: each call fails with [`Forked`](ErrorKind::Forked), and
/// dropping a client has no effect. The child cannot make a new client either. So fork first, then make a client in
/// each process.
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
pub struct Client(Arc<ClientInner>);

/// The state that the clones of a client share. Its drop shuts the client down, but not in a forked child.
struct ClientInner {
    /// `None` only during the drop of this struct.
    handle: Option<Handle>,
    /// The fields are dropped in order, so this is dropped after the handle.
    fork_guard: Arc<ForkGuard>,
}

/// The server, or the servers, that store the locks of a client.
pub(crate) enum Server {
    Redis(Box<Endpoint>),
    Cluster(Box<ClusterAddress>),
    Memory(Arc<MemoryServer>),
    Quorum(Box<QuorumAddress>),
    MemoryQuorum(Vec<Arc<MemoryServer>>),
}

/// The parts of a client. Its drop shuts the client down, and waits until Redis has confirmed the releases.
pub(crate) struct Handle {
    number: u64,
    /// The address of the server, for debug output.
    address: String,
    pub(crate) config: Config,
    pub(crate) backend: Backend,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) callbacks: Arc<CallbackExecutor>,
    pub(crate) acquirer: Acquirer,
    pub(crate) transactions: TransactionRunner,
    pub(crate) first_connection: Arc<FirstConnection>,
    holder: HolderId,
    /// All threads but the callback thread.
    threads: Arc<ThreadGroup>,
    /// The callback thread, which ends last.
    callback_thread: ThreadGroup,
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

impl Client {
    /// Connects to the Redis server at this [address](ServerAddress), with default settings. The address is a URL, a
    /// `redis::ConnectionInfo` or a `redis::Client`.
    ///
    /// URLs have the form of redis-rs: `redis://[user][:password@]host[:port][/db]` or
    /// `unix:///path[?db=..&user=..&pass=..]`. `redis+sentinel://[user:password@]host[:port],host[:port]../name[/db]`
    /// is the primary of the group `name` under these sentinels. `redis+cluster://[user][:password@]host[:port],host..`
    /// is a Redis Cluster, of which the URL names some nodes. `memory://[name]` is a
    /// [`MemoryStore`](crate::MemoryStore), for tests.
    ///
    /// # Errors
    /// - `InvalidConfig` for an invalid URL.
    /// - `Unavailable` if no server replies within the connect time-out. On a Cluster, also if all announced masters
    ///   are unreachable for another connect time-out.
    /// - `Denied` for a wrong password, `Protocol` if the server is not Redis.
    /// - `Forked` in a process whose parent had clients when it forked.
    pub fn open(address: impl Into<ServerAddress>) -> Result<Self, Error> {
        Self::builder(address).build()
    }

    /// A builder for a client of the Redis server at this [address](ServerAddress).
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
    pub fn builder(address: impl Into<ServerAddress>) -> Builder {
        Builder::with_address(address.into())
    }

    /// Connects to a quorum, with default settings: one to nine independent Redis servers. A lock is held while a
    /// majority of these nodes has it, so it outlives the failure of any minority, without replication. The guide's
    /// page on [quorums](crate::guide::quorum) has the guarantees and the costs.
    ///
    /// All clients of the same locks need the same nodes, prefix and [`max_ttl`](Builder::max_ttl). A node that is new,
    /// or that restarted without its data, does not vote for one `max_ttl` from the first connection of a client on. So
    /// a new quorum grants its first lock 30 s (the default of `max_ttl` here) after the first client has connected,
    /// however long its nodes have been running. Give each node its own machine, and do not give it replicas: a
    /// fail-over would be a loss of data that the clients do not see.
    ///
    /// [`try_lock`](Mutex::try_lock) returns `Ok(None)` if a majority votes and a node reports that the lock is taken.
    /// [Sets](Self::mutexes) and [reentrant mutexes](Self::reentrant_mutex) work as on one server, and the fencing
    /// tokens of guards rise. Everything that needs the data of a single server is
    /// [`Unsupported`](ErrorKind::Unsupported): transactions, [fenced values](Self::fenced_value),
    /// [tickets](Self::adopt), [read-write locks](Self::rw_lock), [semaphores](Self::semaphore), `min_hold`,
    /// [`once`](Self::once), [elections](Self::election), [`locks`](Self::locks) and
    /// [`Mutex::replicas`](Mutex::replicas).
    ///
    /// # Errors
    /// [`NoQuorum`](ErrorKind::NoQuorum) if fewer than a majority of the nodes answer; its message has the answer of
    /// each node. `InvalidConfig` unless there are 1 to 9 nodes with different addresses of single servers. The errors
    /// of [`open`](Self::open) if a majority of the nodes has them.
    ///
    /// ```
    /// # let servers = [(); 3].map(|()| leasehold_testbed::Server::start().unwrap());
    /// # let [a, b, c] = servers.each_ref().map(|server| server.url());
    /// use leasehold::Client;
    ///
    /// let client = Client::quorum([a, b, c])?;
    /// # let client = Client::quorum_builder(servers.each_ref().map(|server| server.url()))
    /// #     .max_ttl(std::time::Duration::from_millis(50)).ttl(std::time::Duration::from_millis(50)).build_lazy()?;
    /// let mutex = client.mutex("invoice:42");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn quorum<N: Into<QuorumNode>>(nodes: impl IntoIterator<Item = N>) -> Result<Self, Error> {
        Self::quorum_builder(nodes).build()
    }

    /// A builder for a client of a [quorum](Self::quorum). A [`QuorumNode`] may have a login and TLS of its own.
    /// [`Builder::credentials`] and `Builder::tls` are for nodes without them.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let client = leasehold::Client::quorum_builder(["redis://10.0.0.7", "redis://10.0.1.7", "redis://10.0.2.7"])
    ///     .ttl(Duration::from_secs(5))
    ///     .max_ttl(Duration::from_secs(10))
    ///     .build_lazy()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn quorum_builder<N: Into<QuorumNode>>(nodes: impl IntoIterator<Item = N>) -> Builder {
        Builder::with_quorum(nodes.into_iter().map(Into::into).collect())
    }

    /// A client of a new [`MemoryStore`](crate::MemoryStore), for tests without a server. To let several clients
    /// exclude each other, make one `MemoryStore` and get all of them from it.
    ///
    /// # Errors
    /// `Unavailable` if the client's threads cannot be started, `Forked` in a process whose parent had clients when it
    /// forked.
    ///
    /// ```
    /// let client = leasehold::Client::memory()?;
    /// assert_eq!(client.with_lock("online", || 1 + 1)?, 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn memory() -> Result<Self, Error> {
        Builder::with_memory(MemoryServer::new()).build()
    }

    pub(crate) fn start(
        server: Server,
        config: Config,
        fork_guard: Arc<ForkGuard>,
    ) -> Result<Self, Error> {
        let handle = Some(Handle::new(server, config, Arc::clone(&fork_guard))?);
        Ok(Self(Arc::new(ClientInner { handle, fork_guard })))
    }

    /// The lock named `key`, which is a `&str`, `String` or `Cow<str>`. Does no I/O. For an invalid key, the calls on
    /// the mutex fail with `InvalidKey`.
    ///
    /// Keys are text of 1 to 1,024 bytes without control characters. Some texts are reserved for the library's own
    /// keys, and [`InvalidKey`](ErrorKind::InvalidKey) lists them: a key must not begin with `~`, for example. Redis
    /// compares bytes, so keys that differ in case or in Unicode normalization are different locks.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// guard.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn mutex(&self, key: impl AsRef<str>) -> Mutex {
        Mutex::new(self.clone(), key.as_ref())
    }

    /// Several keys that are locked together: 1 to 128 different names, in any order. Does no I/O. For an invalid or
    /// repeated key, the calls on the set fail with `InvalidKey`, and for another number of keys with `InvalidConfig`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let both = client.mutexes(["account:1", "account:2"]).lock()?;
    /// assert!(client.mutex("account:2").try_lock()?.is_none());
    /// both.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn mutexes(&self, keys: impl IntoIterator<Item = impl AsRef<str>>) -> Mutexes {
        Mutexes::new(self.clone(), keys)
    }

    /// The read-write lock named `key`. Does no I/O. For an invalid key, the calls on the lock fail with `InvalidKey`.
    /// A [`mutex`](Self::mutex) with the same key is a writer of the lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let catalog = client.rw_lock("catalog");
    /// let reader = catalog.read()?;
    /// assert!(catalog.try_write()?.is_none());
    /// drop(reader);
    /// let writer = catalog.write()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn rw_lock(&self, key: impl AsRef<str>) -> RwLock {
        RwLock::new(self.clone(), key.as_ref())
    }

    /// The semaphore named `key` with `permits` permits, 1 to 10,000. Does no I/O. For an invalid key or number, the
    /// calls on the semaphore fail with `InvalidKey` or `InvalidConfig`. The key must not be that of a
    /// [read-write lock](Self::rw_lock), since readers and permits do not share a key. A [`mutex`](Self::mutex) with
    /// the same key excludes all permits.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let permit = client.semaphore("gpu", 8).acquire()?;
    /// permit.unlock()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn semaphore(&self, key: impl AsRef<str>, permits: u32) -> Semaphore {
        Semaphore::new(self.clone(), key.as_ref(), permits)
    }

    /// The fenced value named `key`, which refuses writes under an old fencing token. Does no I/O. The value is
    /// independent of the lock with the same name, unless you write the value under that lock's tokens.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let total = client.fenced_value("invoice:42");
    /// client.mutex("invoice:42").with(|guard| total.write(guard.fencing_token(), "17"))??;
    /// assert_eq!(total.read()?.as_deref(), Some(b"17".as_slice()));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fenced_value(&self, key: impl AsRef<str>) -> FencedValue {
        FencedValue::new(self.clone(), key.as_ref())
    }

    /// The work named `name`, which runs once in all processes together. Does no I/O. For an invalid name, the calls on
    /// it fail with `InvalidKey`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::{Error, Run};
    ///
    /// let run = client.once("report:2026-11-28T02:00Z").run(|_| Ok::<_, Error>("42 mails"))?;
    /// assert_eq!(run, Run::Ran("42 mails"));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn once(&self, name: impl AsRef<str>) -> Once {
        Once::new(self.clone(), name.as_ref())
    }

    /// The election named `name`, of one leader among processes. Does no I/O. For an invalid name, the calls on the
    /// election fail with `InvalidKey`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let term = client.election("scheduler").campaign("10.0.0.7:80")?;
    /// println!("leads, with token {}", term.fencing_token());
    /// term.resign()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.clone(), name.as_ref())
    }

    /// Adopts a lock from a ticket that another client made with
    /// [`MutexGuard::into_ticket`](crate::MutexGuard::into_ticket). The adopter gets a greater fencing token, and other
    /// clients cannot have held the lock in between.
    ///
    /// # Errors
    /// - `NotHeld` if the lock was adopted before, its ttl has ended, or the ticket's token is later than both the
    ///   clock and the fence counter of Redis. A call after `Timeout` also fails with `NotHeld` if the first call had
    ///   adopted the lock, because the client has released it since.
    /// - `InvalidTicket` if the text is not a ticket, or its lock has another prefix.
    /// - `InvalidConfig` or `InvalidKey` if the ttl or the key is out of this client's bounds.
    /// - `Unavailable` if Redis was away for the client's `outage_timeout`, `Timeout` if it did not reply. It is then
    ///   unknown whether the lock was adopted. If it was, the client releases it later; if not, the ticket is still
    ///   valid.
    /// - `Unsupported` on a [quorum](Self::quorum).
    /// - `Denied`, `Protocol` and `Shutdown` at once.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # let url = server.url();
    /// use leasehold::{Client, ErrorKind};
    ///
    /// let guard = client.mutex("deploy").lock()?;
    /// let token = guard.fencing_token();
    /// let ticket = guard.into_ticket()?; // send it to another process: in a variable, a message, a file
    ///
    /// let other = Client::open(&url)?; // in another process
    /// let guard = other.adopt(&ticket)?;
    /// assert!(guard.fencing_token() > token);
    /// assert_eq!(other.adopt(&ticket).unwrap_err().kind(), ErrorKind::NotHeld);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn adopt(&self, ticket: &str) -> Result<MutexGuard, Error> {
        let client = self.live()?;
        let ticket = Ticket::read(ticket, &client.config)?;
        let checked = client.check(Feature::Tickets);
        checked.map_err(|error| error.with_key(ticket.key.name()))?;
        let lease = client.acquirer.adopt(&ticket)?;
        Ok(MutexGuard::new(Guard::new(lease, self.clone())))
    }

    /// The locks that this client holds now, the oldest first. Sends no request.
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
        let Ok(client) = self.live() else {
            return Vec::new();
        };
        let now = client.now();
        let held = |lease: Arc<Lease>| {
            let grant = lease.grant();
            Some(HeldLock {
                key: grant.key.name().to_owned(),
                token: grant.token,
                age: now.since(grant.since),
                remaining: lease.valid_for(now)?,
            })
        };
        let leases = client.acquirer.holders();
        let mut all: Vec<HeldLock> = leases.into_iter().filter_map(held).collect();
        all.sort_by_key(|held| std::cmp::Reverse(held.age));
        all
    }

    /// The locks in Redis under this client's prefix whose names begin with `start`, with their holders. The list
    /// contains the locks of all clients, in no order. For diagnosis only: a lock that is acquired or released during
    /// the list may be in it or not, and a lock may be in it twice.
    ///
    /// The list is read part by part (`SCAN`, for 500 keys at a time), so it delays other clients by less than a
    /// millisecond at a time. Redis visits *all* keys of its database, so the list takes time if the database has
    /// millions of other keys. On a Cluster, the masters are read one after another.
    ///
    /// The user needs the right to call `SCAN`, which `leasehold acl --features usual,list` contains.
    ///
    /// # Errors
    /// `Unsupported` on a quorum, whose nodes have different keys; else those of
    /// [`Mutex::inspect`](crate::Mutex::inspect). Values of other programs are left out.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guards = ["invoice:1", "invoice:2", "report"].map(|key| client.mutex(key).lock().unwrap());
    /// let mut keys = Vec::new();
    /// for found in client.locks("invoice:") {
    ///     keys.push(found?.key().to_owned());
    /// }
    /// keys.sort();
    /// assert_eq!(keys, ["invoice:1", "invoice:2"]);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn locks(&self, start: impl AsRef<str>) -> FoundLocks {
        FoundLocks::new(self.clone(), start.as_ref())
    }

    /// The lock named `key`, which its holder's thread can lock again. The same as [`Mutex::reentrant`].
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let (outer, inner) = (mutex.lock()?, mutex.lock()?);
    /// assert_eq!(inner.depth(), 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn reentrant_mutex(&self, key: impl AsRef<str>) -> ReentrantMutex {
        self.mutex(key).reentrant()
    }

    /// Waits for the lock named `key`, runs `work`, and releases the lock.
    ///
    /// The lock is renewed while `work` runs, however long that takes. The lock is also released if `work` panics; the
    /// panic then continues.
    ///
    /// At the end, the lock passes to a waiting thread of this client without a request to Redis, as often and for as
    /// long as [`Builder::max_hand_offs`](crate::Builder::max_hand_offs) and
    /// [`Builder::hand_off_time`](crate::Builder::hand_off_time) allow. Otherwise this call releases it in Redis and
    /// waits for the reply. A release in Redis also finds a loss of which no notification has arrived yet. Before the
    /// client passes a lock on, it only checks that the lock is still valid, and that no notification of a loss has
    /// arrived.
    ///
    /// # Errors
    /// The errors of [`Mutex::lock`], and `LeaseLost` if the client finds that the lock was lost before `work`
    /// returned: another holder may have run at the same time. The value that `work` returned is dropped then.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let online = client.with_lock("online", || 1 + 1)?;
    /// assert_eq!(online, 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn with_lock<T>(&self, key: impl AsRef<str>, work: impl FnOnce() -> T) -> Result<T, Error> {
        self.mutex(key).with(|_| work())
    }

    /// Runs `work` under the lock named `key` if the lock is free now. Otherwise drops `work` and returns `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`Mutex::try_with`].
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// match client.try_with_lock("nightly-report", || 1 + 1)? {
    ///     Some(sum) => println!("done: {sum}"),
    ///     None => println!("another process does it"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_lock<T>(
        &self,
        key: impl AsRef<str>,
        work: impl FnOnce() -> T,
    ) -> Result<Option<T>, Error> {
        self.mutex(key).try_with(|_| work())
    }

    /// Waits for the lock named `key` for at most `timeout`, and runs `work` under it. If the lock is not free within
    /// that time, drops `work` and returns `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`Mutex::try_with_for`].
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let sum = client.try_with_lock_for("invoice:42", Duration::from_millis(250), || 1 + 1)?;
    /// assert_eq!(sum, Some(2));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_lock_for<T>(
        &self,
        key: impl AsRef<str>,
        timeout: Duration,
        work: impl FnOnce() -> T,
    ) -> Result<Option<T>, Error> {
        self.mutex(key).try_with_for(timeout, |_| work())
    }

    /// The id of this client, `host/pid/random`. Redis stores it in the value of every lock that the client holds.
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

    /// Sends `PING` to Redis, for health checks, and returns how long the reply took, without the time for connecting.
    /// The ping has a connection of its own, so transactions and requests under way do not delay it. Several pings wait
    /// for one another. A call takes at most [`connect_timeout`](Builder::connect_timeout) and
    /// [`command_timeout`](Builder::command_timeout) together.
    ///
    /// On a Cluster, a call pings the masters that this client uses, one after another, and returns the longest time.
    /// If the client uses no master yet, it pings one.
    ///
    /// # Errors
    /// `Unavailable` if there is no connection within `connect_timeout`, other pings take too long, or Redis is
    /// loading. `Timeout` if no reply comes within `command_timeout`. `NoQuorum` on a quorum, if fewer than a majority
    /// of the nodes reply. `Denied`, `Tls`, `Protocol` and `Shutdown` as for a lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let took = client.ping()?;
    /// println!("Redis replied in {took:?}");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn ping(&self) -> Result<Duration, Error> {
        self.running()?.backend.store.ping()
    }

    /// The nodes of a quorum, in the order in which they were given, each as the client's requests and probes found it.
    /// Empty for a client of any other kind. The call does no I/O and does not block.
    ///
    /// The client sends each request to all nodes, whatever their health is. If a node does not vote, a thread of the
    /// client probes it, and callers never wait for a probe. A node that fails is probed again until a probe succeeds.
    /// While no requests are sent, a node that fails stays unnoticed. The event
    /// [`node_changed`](crate::EventHandler::node_changed) reports each change, and clocks that differ too much from
    /// the others.
    ///
    /// The health of a node whose vote was not asked for yet is `Unknown`. The call makes a thread probe such a node,
    /// so a later call knows more.
    ///
    /// # Errors
    /// `Shutdown` as for a lock.
    ///
    /// ```
    /// let client = leasehold::MemoryQuorum::new(3).client()?;
    /// client.with_lock("invoice:42", || ())?;
    /// for node in client.nodes()? {
    ///     println!("{}: {}", node.address(), node.health());
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn nodes(&self) -> Result<Vec<NodeState>, Error> {
        Ok(self.running()?.backend.store.nodes())
    }

    /// Checks the settings of Redis and of this client, and returns those with which locks can be lost: eviction,
    /// missing persistence, a replica or Sentinel in place of a primary, an address that leads to several servers, a
    /// proxy without scripts, the version, a small tracking table, and a `command_timeout` that is too long for the
    /// `ttl`. A finding is not an error. If an ACL forbids a part of the check, a finding reports that; `leasehold acl`
    /// prints the rights of a full check (`environment-check`). The check opens a connection of its own, and takes one
    /// round trip after the login. It then connects up to seven times more, within another `command_timeout`, to find
    /// several servers.
    ///
    /// On a Cluster, a call checks the masters that this client uses, one after another. If some of them cannot be
    /// checked, a finding for each contains the reason; the call fails only if it can check none of them.
    ///
    /// A client with an [event handler](crate::Builder::event_handler) does this once by itself:
    /// [`EventHandler::environment_warning`](crate::EventHandler::environment_warning). On a
    /// [`MemoryStore`](crate::MemoryStore), there are no findings.
    ///
    /// # Errors
    /// `Unavailable` if the server cannot be reached or does not reply within
    /// [`command_timeout`](crate::Builder::command_timeout), `Denied` for a wrong password, `Tls` if no TLS connection
    /// can be made, `Protocol` if the server is not Redis, and `Shutdown`. `NoQuorum` on a quorum, if fewer than a
    /// majority of the nodes can be checked.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// for finding in client.check_environment()? {
    ///     eprintln!("{finding}");
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn check_environment(&self) -> Result<Vec<EnvironmentFinding>, Error> {
        let handle = self.running()?;
        check_environment(&*handle.backend.store, &handle.address, &handle.config)
    }

    /// Ends the client and all its clones, and waits until Redis has confirmed all releases. Waiting calls return with
    /// `Shutdown`, renewals stop, and every held lock is lost with
    /// [`LossReason::Shutdown`](crate::LossReason::Shutdown). On success, all callbacks and events have run.
    ///
    /// If Redis is away or refuses releases, the client tries them again until `timeout` has passed. After very many
    /// dropped guards, Redis needs time for their releases: see the page on [performance](crate::guide::performance).
    ///
    /// On a quorum, a majority of the nodes has to confirm the releases. Then this call waits for each other node while
    /// that node makes progress, and otherwise closes the connections to it:
    /// [a shutdown](crate::guide::quorum#a-shutdown).
    ///
    /// This call releases no held lock: the key stays until the lock's guard is dropped or the ttl ends. After the
    /// call, the client does not wait for the replies to releases, so drops of very many guards may leave keys until
    /// their ttl ends. Drop the guards first, or repeat the call after the drops.
    ///
    /// # Errors
    /// `Timeout` or `Unavailable` if, after `timeout`, releases are not confirmed or callbacks are still running. The
    /// client is shut down all the same.
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
        self.live()?.shut_down(timeout)
    }

    /// The parts of the client. Fails with `Forked` in a child of the client's process. Every operation of a client
    /// begins here, so this is the only check for forks.
    pub(crate) fn live(&self) -> Result<&Handle, Error> {
        self.0.fork_guard.process().check()?;
        Ok(self.handle())
    }

    /// The parts of the client. Fails with `Forked`, or with `Shutdown` after a shutdown.
    pub(crate) fn running(&self) -> Result<&Handle, Error> {
        let handle = self.live()?;
        handle.acquirer.check_open()?;
        Ok(handle)
    }

    /// The parts of the client, even in a forked child, which may only read plain data: settings and names.
    fn handle(&self) -> &Handle {
        let handle = self.0.handle.as_ref();
        handle.expect("the handle is taken out only when the last client is dropped")
    }

    pub(crate) fn config(&self) -> &Config {
        &self.handle().config
    }

    /// The longest fenced value that a claim can return. Its reply also contains the lock's value and two numbers.
    pub(crate) fn longest_claimed_value(&self) -> usize {
        self.config().max_reply_bytes - CLAIM_RESERVE
    }

    /// The number of this client. Other clients of this process have other numbers.
    pub(crate) fn number(&self) -> u64 {
        self.handle().number
    }

    /// The callback executor. Callers have to call [`live`](Self::live) first.
    pub(crate) fn callbacks(&self) -> &CallbackExecutor {
        &self.handle().callbacks
    }

    pub(crate) fn now(&self) -> MonotonicTime {
        self.handle().now()
    }

    /// Sends one command about a key, and waits for its reply. An error names the key.
    pub(crate) fn ask(&self, command: Command) -> Result<Reply, Error> {
        self.ask_within(command, self.config().command_timeout)
    }

    /// Sends one command like [`ask`](Self::ask), and waits for `timeout` at most.
    pub(crate) fn ask_within(&self, command: Command, timeout: Duration) -> Result<Reply, Error> {
        let key = command.key().cloned();
        let outcome = self.running().and_then(|handle| {
            let deadline = handle.now().after(timeout);
            handle.backend.store.execute_one(command, deadline)
        });
        outcome.map_err(|error| match key {
            Some(key) => error.with_key(key.name()),
            None => error,
        })
    }
}

// A panic that unwinds through a call leaves no state half changed: only user code panics, and user code never runs
// while state of the library is locked (invariant 5 in ARCHITECTURE.md). The library's mutexes are not poisoned, and
// the unwinding ends the request that the panic interrupts. Panics of event handlers and callbacks are caught.
impl UnwindSafe for Client {}
impl RefUnwindSafe for Client {}

/// Shows the address without user, password and database.
impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.handle().address)
            .field("holder", &self.handle().holder.as_str())
            .field("config", &self.handle().config)
            .finish()
    }
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        if !self.fork_guard.process().is_current() {
            std::mem::forget(self.handle.take());
        }
    }
}

impl Handle {
    fn new(server: Server, config: Config, fork_guard: Arc<ForkGuard>) -> Result<Self, Error> {
        observe::register();
        let holder = HolderId::of_this_process();
        let [threads, callback_thread] =
            [(); 2].map(|()| ThreadGroup::with_fork_guard(Arc::clone(&fork_guard)));
        let (clock, address) = match &server {
            Server::Redis(endpoint) => (Clock::default(), endpoint.address()),
            Server::Cluster(cluster) => (Clock::default(), cluster.text()),
            Server::Memory(memory) => (memory.clock().clone(), "memory://".to_owned()),
            Server::Quorum(quorum) => (Clock::default(), quorum.text()),
            Server::MemoryQuorum(nodes) => (nodes[0].clock().clone(), "memory://".to_owned()),
        };
        let threads = Arc::new(threads);
        let scheduler = Scheduler::new(clock.clone());
        let callbacks = CallbackExecutor::start(&callback_thread, config.event_handler.clone())?;
        let first_connection = Arc::default();
        let reports = reports(&config, &scheduler, &callbacks, &first_connection);
        // A client of a Cluster does not check its environment by itself.
        let checks_environment = config.environment_check
            && callbacks.has_listeners()
            && !matches!(server, Server::Cluster(_));
        let (backend, transactions) = backend_of(server, &config, holder.clone(), reports);
        let watchdog = Watchdog::new(
            scheduler,
            &backend,
            Arc::clone(&callbacks),
            config.command_timeout,
        );
        watchdog.start(&threads).inspect_err(|_| callbacks.stop())?;
        let queues = Arc::new(LocalQueues::new(clock));
        let notification_handler = NotificationHandler::new(
            holder.clone(),
            backend.clone(),
            Arc::clone(&watchdog),
            &callbacks,
            Arc::clone(&queues),
            config.max_ttl,
        );
        let notifications = &backend.notifications;
        notifications
            .start(&threads, Arc::new(notification_handler))
            .inspect_err(|_| {
                watchdog.stop();
                callbacks.stop();
            })?;
        if checks_environment {
            let check = environment_check(&backend.store, &address, &config, &callbacks, &threads);
            *first_connection.0.lock() = Some(Box::new(check));
        }
        let acquirer = Acquirer::new(
            &backend,
            Arc::clone(&watchdog),
            Arc::clone(&callbacks),
            queues,
            config.command_timeout,
            config.outage_timeout,
            config.hand_offs,
        );
        let transactions = TransactionRunner::new(
            check_transactions(transactions, config.other_library),
            Arc::clone(&watchdog),
            config.max_transactions,
            config.connect_timeout,
        );
        Ok(Self {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            address,
            config,
            backend,
            watchdog,
            callbacks,
            acquirer,
            transactions,
            first_connection,
            holder,
            threads,
            callback_thread,
        })
    }

    pub(crate) fn now(&self) -> MonotonicTime {
        self.watchdog.now()
    }

    /// Returns an error if the client does not have this feature.
    pub(crate) fn check(&self, feature: Feature) -> Result<(), Error> {
        features::check_beside(self.config.other_library, feature)?;
        self.backend.store.check(feature)
    }

    /// Starts the thread that runs the checks of locks, unless it runs already.
    pub(crate) fn start_checks(&self) -> Result<(), Error> {
        self.watchdog.start_checks(&self.threads)
    }

    /// Adds an observer of an election. The first observer starts the thread that all observers share.
    pub(crate) fn observe(
        &self,
        lock: &Key,
        value: &Key,
        ttl: Duration,
    ) -> Result<(ObserverId, Receiver<LeaderState>), Error> {
        let leaders = &self.acquirer.leaders;
        leaders.observe(lock, value, ttl, &self.threads)
    }

    fn shut_down(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = MonotonicTime::now().after(timeout);
        // All leases end before the next line removes the entries of the local queues.
        self.watchdog.stop();
        self.acquirer.end();
        let Backend {
            store,
            notifications,
        } = &self.backend;
        let flushed = store.flush(deadline);
        notifications.stop();
        store.end();
        // The other threads end before the callback thread, which then runs all callbacks that they have queued.
        let ended = self.threads.wait_until_ended(deadline);
        self.callbacks.stop();
        let callbacks_ended = self.callback_thread.wait_until_ended(deadline);
        flushed?;
        if ended && callbacks_ended {
            return Ok(());
        }
        let message =
            format!("shutdown: callbacks or connections were still busy after {timeout:?}");
        Err(Error::new(ErrorKind::Timeout, message))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A drop cannot return the error. Locks that are not released by now expire at the end of their ttl.
        let _ = self.shut_down(self.config.command_timeout);
        self.backend.store.close();
    }
}

/// The findings about the servers of `store`, and about the time-outs of the client.
fn check_environment(
    store: &dyn Store,
    address: &str,
    config: &Config,
) -> Result<Vec<EnvironmentFinding>, Error> {
    let Some(mut found) = store.check_environment()? else {
        return Ok(Vec::new());
    };
    let Config {
        command_timeout,
        ttl,
        renew_ratio,
        ..
    } = *config;
    let from_timeout = EnvironmentWarning::from_timeout(command_timeout, ttl, renew_ratio);
    found.extend(from_timeout.map(|warning| EnvironmentFinding::new(address, warning)));
    Ok(found)
}

/// A task that the client does once, after its first connection.
#[derive(Default)]
pub(crate) struct FirstConnection(PlainMutex<Option<Box<dyn FnOnce() + Send>>>);

impl FirstConnection {
    /// Reports a connection. The first call runs the task.
    pub(crate) fn report(&self) {
        let action = self.0.lock().take();
        if let Some(action) = action {
            action();
        }
    }
}

/// Returns a check of the environment that reports the findings as events. The check has a thread of its own, so it
/// does not delay callers. An error of the check is dropped, because requests for locks report the same error.
fn environment_check(
    store: &Arc<dyn Store>,
    address: &str,
    config: &Config,
    callbacks: &Arc<CallbackExecutor>,
    threads: &Arc<ThreadGroup>,
) -> impl FnOnce() + Send + use<> {
    let (of_store, threads) = (Arc::downgrade(store), Arc::downgrade(threads));
    let (address, config, callbacks) = (address.to_owned(), config.clone(), Arc::clone(callbacks));
    let check = move || {
        let Some(store) = of_store.upgrade() else {
            return;
        };
        let found = check_environment(&*store, &address, &config);
        for finding in found.unwrap_or_default() {
            callbacks.queue_warning(move |events| events.environment_warning(&finding));
        }
    };
    move || {
        if let Some(threads) = threads.upgrade() {
            // If the system cannot start the thread, the client leaves the check out.
            let _ = threads.spawn("leasehold-environment", check);
        }
    }
}

/// The receiver of the store's reports. Passes them on to the scheduler and to the callback thread.
fn reports(
    config: &Config,
    scheduler: &Arc<Scheduler>,
    callbacks: &Arc<CallbackExecutor>,
    first_connection: &Arc<FirstConnection>,
) -> Reports {
    let releases = match config.event_handler.is_some() || observe::IS_ON {
        true => ReportedReleases::Late,
        false => ReportedReleases::None,
    };
    let (scheduler, callbacks) = (Arc::clone(scheduler), Arc::clone(callbacks));
    let first_connection = Arc::clone(first_connection);
    let is_refusal_reported = AtomicBool::new(false);
    Reports::new(releases, move |report| match report {
        Report::NeedsMaintenance(urgency) => scheduler.request_maintenance(urgency),
        Report::Connected => first_connection.report(),
        Report::SentinelsUnavailable(error) => {
            callbacks.queue_warning(move |events| events.sentinels_unavailable(&error));
        }
        Report::PlainAcquiresRefused(error) => {
            if !is_refusal_reported.swap(true, Ordering::Relaxed) {
                callbacks.queue_warning(move |events| events.plain_acquires_refused(&error));
            }
        }
        Report::NotificationsRefused(error) => {
            callbacks.queue_event(move |events| events.notifications_refused(&error));
        }
        Report::Release(key, token, LateRelease::Delayed(error)) => {
            callbacks.queue_lock_event(key, token, move |events, lock| {
                events.release_delayed(lock, &error);
            });
        }
        Report::Release(key, token, LateRelease::Lost(reason)) => {
            callbacks.queue_loss(key, token, reason);
        }
        Report::Release(_, _, LateRelease::Ended { .. }) => {}
        Report::NodeChanged(node) => {
            callbacks.queue_warning(move |events| events.node_changed(&node));
        }
        Report::NodeClockRead(node) => {
            callbacks.queue_observation(move || observe::record_clock(&node));
        }
    })
}

/// Returns an error if the store has no transactions, or if they could not check the locks of the other library.
fn check_transactions(
    transactions: Option<Arc<dyn Transactions>>,
    other: Option<OtherLibrary>,
) -> Result<Arc<dyn Transactions>, Error> {
    let message = match transactions {
        None => "a transaction needs one server or a Cluster, not a memory store or a quorum",
        Some(_) if other.is_some_and(OtherLibrary::is_redisson) => {
            "a lock of Redisson has no transactions: write the data with the fencing token, as a fenced value does"
        }
        Some(transactions) => return Ok(transactions),
    };
    Err(Error::new(ErrorKind::Unsupported, message))
}

fn with_transactions<S>(store: Arc<S>) -> (Backend, Option<Arc<dyn Transactions>>)
where
    S: Store + Notifications + Transactions + 'static,
{
    (Backend::new(Arc::clone(&store)), Some(store))
}

/// Makes the store, and its transactions if it has any.
fn backend_of(
    server: Server,
    config: &Config,
    holder: HolderId,
    reports: Reports,
) -> (Backend, Option<Arc<dyn Transactions>>) {
    match server {
        Server::Redis(endpoint) => with_transactions(Arc::new(Node::new(
            ServerId::ONLY,
            *endpoint,
            config,
            holder,
            reports,
            None,
        ))),
        Server::Cluster(address) => {
            with_transactions(ClusterStore::new(*address, config, holder, reports))
        }
        Server::Memory(memory) => {
            let node = MemoryNode::new(memory, holder, reports).beside(config.other_library);
            (Backend::new(Arc::new(node)), None)
        }
        Server::Quorum(address) => {
            let store = QuorumStore::new(*address, config, &holder, reports);
            (Backend::new(store), None)
        }
        Server::MemoryQuorum(nodes) => {
            let store = QuorumStore::of_memory(&nodes, config, &holder, reports);
            (Backend::new(store), None)
        }
    }
}
