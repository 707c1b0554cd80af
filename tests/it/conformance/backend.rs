//! Backends: the stores on which the list of behaviours runs. Another store needs one more implementation of the trait.

use std::thread;
use std::time::Duration;

use leasehold::{Builder, Client};
use leasehold_testbed::{Cluster, Proxy, Reply, SentinelGroup, Server, eventually};

use crate::cluster::pool::PooledCluster;
use crate::cluster::{Login, announce_proxies};
use crate::encryption::Encryption;
use crate::least_privilege::{as_limited, commands, create_limited_user};
use crate::quorum::nodes::{Nodes, delete_all_but_the_mark, end_quarantine_of, fence_counter};
use crate::sentinel::rights::{assert_suffice, create_user_at_sentinel, limited_login};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, in_redis, micros_now, secs, server};

/// A store of the test's own, empty at first.
pub trait Backend {
    /// The builder of a client with a [`LONG_TTL`], and with time-outs that a busy machine does not reach.
    fn builder(&self) -> Builder;

    /// A ttl short enough to wait for, and long enough that a busy machine renews in time.
    fn ttl(&self) -> Duration {
        secs(4)
    }

    /// Lets `time` pass, for the store and for its clients, whose threads continue meanwhile.
    fn pass(&self, time: Duration) {
        thread::sleep(time);
    }

    /// Restarts the store without its data.
    fn forget(&self);

    fn client(&self) -> Client {
        self.builder().build().unwrap()
    }
}

/// Locks without a server. Time passes when the test advances the clock.
pub struct Memory(leasehold::MemoryStore);

impl Memory {
    pub fn start() -> Self {
        Self(leasehold::MemoryStore::new())
    }
}

impl Backend for Memory {
    fn builder(&self) -> Builder {
        self.0.builder().ttl(LONG_TTL)
    }

    fn ttl(&self) -> Duration {
        secs(30)
    }

    fn pass(&self, time: Duration) {
        let step = self.ttl() / 5;
        let mut left = time;
        while !left.is_zero() {
            let next = left.min(step);
            self.0.advance(next);
            left -= next;
        }
    }

    fn forget(&self) {
        self.0.flush();
    }
}

/// A quorum of servers in memory. Time passes when the test advances the clock.
pub struct QuorumInMemory(leasehold::MemoryQuorum, usize);

impl QuorumInMemory {
    pub fn start(nodes: usize) -> Self {
        Self(leasehold::MemoryQuorum::new(nodes), nodes)
    }
}

impl Backend for QuorumInMemory {
    fn builder(&self) -> Builder {
        // A node refuses a request that gets there after the time-out.
        let builder = self.0.builder().command_timeout(secs(8));
        builder.ttl(LONG_TTL).max_ttl(LONG_TTL)
    }

    fn ttl(&self) -> Duration {
        secs(30)
    }

    fn pass(&self, time: Duration) {
        let step = self.ttl() / 5;
        let mut left = time;
        while !left.is_zero() {
            let next = left.min(step);
            self.0.advance(next);
            left -= next;
        }
    }

    fn forget(&self) {
        for node in 0..self.1 {
            self.0.flush(node);
        }
        // Until then, no node votes.
        self.pass(LONG_TTL);
    }
}

/// A quorum of servers.
pub struct Quorum(Nodes);

impl Quorum {
    pub fn start(nodes: usize) -> Self {
        let nodes = Nodes::start_in_quarantine(nodes);
        for node in &nodes.0 {
            // The suite has clients with another prefix.
            end_quarantine_of(node, &["leasehold:", "billing:"]);
        }
        Self(nodes)
    }
}

impl Backend for Quorum {
    fn builder(&self) -> Builder {
        self.0.builder()
    }

    fn forget(&self) {
        let last = self.0.0.iter().map(fence_counter).max().unwrap();
        self.0.0.iter().for_each(delete_all_but_the_mark);
        // In place of a quarantine, which lasts until no token is ahead of the clocks any more.
        let is_past = |node: &Server| micros_now(node) > last;
        assert!(eventually(SOON, || self.0.0.iter().all(is_past)));
    }
}

/// One Redis.
pub struct Redis(Server);

impl Redis {
    pub fn start() -> Self {
        Self(server())
    }
}

impl Backend for Redis {
    fn builder(&self) -> Builder {
        steady(&self.0.url()).ttl(LONG_TTL)
    }

    fn forget(&self) {
        crate::support::ask(&self.0, &["FLUSHALL"]);
    }
}

/// A Redis Cluster of three masters and their replicas, with a user that has exactly the rights that `leasehold acl`
/// prints, and with TLS if leasehold has it.
pub struct RedisCluster {
    cluster: PooledCluster,
    login: Login,
}

impl RedisCluster {
    pub fn start() -> Self {
        let (cluster, login) = PooledCluster::take_with_login();
        login.prepare(cluster.get(), KEYS_OF_THE_SUITE);
        Self { cluster, login }
    }
}

impl Drop for RedisCluster {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.login.assert_rights_suffice(self.cluster.get());
        }
    }
}

impl Backend for RedisCluster {
    fn builder(&self) -> Builder {
        let url = self.cluster.get().url();
        self.login.settings(&url, steady).ttl(LONG_TTL)
    }

    fn forget(&self) {
        self.cluster.flush();
    }
}

/// Features of a store with a server only: other programs that change its keys, data beside the locks,
/// connections that break, a server that stops. [`MemoryStore`] has everything else.
pub trait Serving: Backend {
    fn server(&mut self) -> &mut Server;

    /// A proxy in front of the server, and the settings of a client that uses the proxy.
    fn proxied(&mut self) -> (Proxy, Builder);

    /// Restarts the server with settings by which its users outlive any further restart, and its data, too, if
    /// `keeps_data`.
    fn make_restartable(&mut self, keeps_data: bool) {
        let server = self.server();
        let users = crate::support::ask(server, &["ACL", "LIST"]);
        let Reply::Array(users) = users else {
            panic!("ACL LIST answers with an array");
        };
        let users = users.iter().filter_map(Reply::as_text);
        for user in users.filter(|user| !user.starts_with("user default ")) {
            let rules = user.strip_prefix("user ").expect("each line begins so");
            server.restart_with("user", rules).unwrap();
        }
        if keeps_data {
            server.restart_with("appendfsync", "always").unwrap();
            server.restart_with("appendonly", "yes").unwrap();
        }
        self.wait_until_ready();
    }

    /// Waits until the server accepts requests after a restart.
    fn wait_until_ready(&mut self) {
        let server = self.server();
        let has_read_its_data = || matches!(server.command(&["PING"]), Ok(Reply::Status(_)));
        assert!(eventually(SOON, has_read_its_data));
    }
}

impl Serving for Redis {
    fn server(&mut self) -> &mut Server {
        &mut self.0
    }

    fn proxied(&mut self) -> (Proxy, Builder) {
        let proxy = Proxy::start(self.0.port()).unwrap();
        let builder = steady(&proxy.url());
        (proxy, builder)
    }
}

/// As [`RedisCluster`], but three masters without replicas, so that no other node takes over while a test stops one. Its
/// server is the master of the lock `k`.
pub struct RedisClusterOfMasters {
    cluster: Cluster,
    login: Login,
    master: usize,
    /// The proxies of the other masters.
    proxies: Vec<Proxy>,
}

impl RedisClusterOfMasters {
    pub fn start() -> Self {
        // The other masters serve their slots while this one is away.
        let cluster = Cluster::builder().arg("cluster-require-full-coverage", "no");
        let cluster = cluster.without_replicas().node_timeout(10 * SOON);
        let login = Login::new();
        let cluster = login.cluster(cluster).start().unwrap();
        login.prepare(&cluster, KEYS_OF_THE_SUITE);
        Self {
            master: cluster.master_of_key(&in_redis("k")),
            cluster,
            login,
            proxies: Vec::new(),
        }
    }
}

impl Drop for RedisClusterOfMasters {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.login.assert_rights_suffice(&self.cluster);
        }
    }
}

impl Backend for RedisClusterOfMasters {
    fn builder(&self) -> Builder {
        self.login
            .settings(&self.cluster.url(), steady)
            .ttl(LONG_TTL)
    }

    fn forget(&self) {
        for node in self.cluster.nodes() {
            crate::support::ask(node, &["FLUSHALL"]);
        }
    }
}

impl Serving for RedisClusterOfMasters {
    fn server(&mut self) -> &mut Server {
        self.cluster.node(self.master)
    }

    /// All masters announce the addresses of proxies to this client.
    fn proxied(&mut self) -> (Proxy, Builder) {
        self.proxies = announce_proxies(&mut self.cluster);
        let proxy = self.proxies.swap_remove(self.master);
        (proxy, self.login.settings(&self.cluster.url(), steady))
    }

    fn wait_until_ready(&mut self) {
        self.cluster.wait_until_ok().unwrap();
    }
}

/// One Redis under a sentinel. The client's user has exactly the rights that `leasehold acl` prints, at the server and
/// at the sentinel, and all connections have TLS if leasehold has it.
pub struct RedisUnderSentinel {
    group: SentinelGroup,
    encryption: Encryption,
}

impl RedisUnderSentinel {
    pub fn start() -> Self {
        let encryption = Encryption::new();
        let group = encryption.sentinel_group(SentinelGroup::builder());
        let group = group.replicas(0).sentinels(1).start().unwrap();
        let server = &group.servers()[0];
        let commands = commands(
            server,
            &["usual", "list", "shares", "fenced-values", "transactions"],
        );
        create_limited_user(server, &commands, KEYS_OF_THE_SUITE);
        create_user_at_sentinel(&group.sentinels()[0], None);
        Self { group, encryption }
    }

    fn settings(&self, url: &str) -> Builder {
        let builder = steady(&as_limited(url)).sentinel_credentials(limited_login());
        self.encryption.client(builder)
    }
}

impl Drop for RedisUnderSentinel {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_suffice(&self.group);
        }
    }
}

impl Backend for RedisUnderSentinel {
    fn builder(&self) -> Builder {
        self.settings(&self.group.url()).ttl(LONG_TTL)
    }

    fn forget(&self) {
        crate::support::ask(&self.group.servers()[0], &["FLUSHALL"]);
    }
}

impl Serving for RedisUnderSentinel {
    fn server(&mut self) -> &mut Server {
        self.group.server_mut(0)
    }

    /// The sentinel watches the server through the proxy, too, and names the proxy's address to this client.
    fn proxied(&mut self) -> (Proxy, Builder) {
        let proxy = Proxy::start(self.group.port_of(&self.group.servers()[0])).unwrap();
        let url = self.group.watch_also("proxied", proxy.port()).unwrap();
        (proxy, self.settings(&url))
    }
}

/// Rules for the keys and channels of clients with another prefix, and for the key that a transaction writes.
const KEYS_OF_THE_SUITE: &[&str] = &["~billing:*", "&billing:~to:*", "~{leasehold:k}data"];
