//! Locks on a Redis Cluster of three masters and three replicas.

pub mod pool;

mod addresses;
mod credentials;
mod down;
mod fail_over;
mod resharding;
pub mod rights;
mod servers;
mod sets;
#[cfg(feature = "tls")]
mod tls;
mod under_load;

use std::fmt::Display;
use std::ops::{Deref, DerefMut};

use leasehold::{Builder, Client};
use leasehold_testbed::{Cluster, ClusterBuilder, Proxy, Server, eventually};

use crate::encryption::Encryption;
use crate::least_privilege::{as_limited, commands, create_limited_user, refused, version};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, in_redis};

fn cluster() -> Cluster {
    Cluster::start().unwrap()
}

/// Settings of a [`TestCluster`].
struct TestClusterBuilder {
    cluster: ClusterBuilder,
    login: Login,
}

/// How clients reach the Cluster of a test: as a user that has exactly the rights that `leasehold acl` prints, and
/// with TLS if leasehold has it.
#[derive(Clone)]
pub struct Login {
    encryption: Encryption,
}

impl Login {
    pub fn new() -> Self {
        Self {
            encryption: Encryption::new(),
        }
    }

    /// Adds the settings of nodes that accept the login.
    pub fn cluster(&self, cluster: ClusterBuilder) -> ClusterBuilder {
        self.encryption.cluster(cluster)
    }

    /// The settings that `make` makes from a URL, for clients of a Cluster with this `url`.
    pub fn settings(&self, url: &str, make: impl Fn(&str) -> Builder) -> Builder {
        self.encryption.client(make(&as_limited(url)))
    }

    /// Makes the user on each node. `more` are rules for keys and channels.
    pub fn prepare(&self, cluster: &Cluster, more: &[&str]) {
        for node in cluster.nodes() {
            create_limited_user(node, &commands(node, &RIGHTS), more);
            ask(node, &["ACL", "LOG", "RESET"]);
        }
    }

    /// Fails if the user lacked a right on a node that runs.
    pub fn assert_rights_suffice(&self, cluster: &Cluster) {
        for node in cluster.nodes() {
            if node.command(&["PING"]).is_ok() {
                let refused = refused(node);
                assert!(refused.is_empty(), "rights are missing: {refused:?}");
            }
        }
    }
}

/// The features of `leasehold acl` that these tests use, as docs/redis.md says.
const RIGHTS: [&str; 8] = [
    "usual",
    "list",
    "shares",
    "fenced-values",
    "transactions",
    "replicas",
    "cluster",
    "shard-channels",
];

impl TestClusterBuilder {
    fn without_replicas(mut self) -> Self {
        self.cluster = self.cluster.without_replicas();
        self
    }

    fn start(self) -> TestCluster {
        let cluster = self.cluster.start().unwrap();
        // Transactions write keys beside a lock's key.
        self.login.prepare(&cluster, &["~{leasehold:*"]);
        TestCluster {
            cluster,
            login: self.login,
        }
    }
}

/// A Cluster of a test's own, and the settings of its clients.
struct TestCluster {
    cluster: Cluster,
    login: Login,
}

impl TestCluster {
    fn builder() -> TestClusterBuilder {
        let login = Login::new();
        TestClusterBuilder {
            cluster: login.cluster(Cluster::builder()),
            login,
        }
    }

    /// The settings that `make` makes from a URL, for clients of this Cluster.
    fn settings(&self, make: impl Fn(&str) -> Builder) -> Builder {
        self.login.settings(&self.cluster.url(), make)
    }

    fn client(&self) -> Client {
        self.settings(steady).ttl(LONG_TTL).build().unwrap()
    }
}

impl Deref for TestCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl DerefMut for TestCluster {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.cluster
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.login.assert_rights_suffice(&self.cluster);
        }
    }
}

fn builder(cluster: &Cluster) -> Builder {
    steady(&cluster.url()).ttl(LONG_TTL)
}

fn client(cluster: &Cluster) -> Client {
    builder(cluster).build().unwrap()
}

/// The node that serves the lock's key now.
fn node_of(cluster: &Cluster, key: &str) -> usize {
    cluster.master_of_key(&in_redis(key))
}

/// The server that serves the lock's key now.
fn server_of<'a>(cluster: &'a Cluster, key: &str) -> &'a Server {
    &cluster.nodes()[node_of(cluster, key)]
}

/// The name of a lock whose key the node `node` serves.
pub fn key_on(cluster: &Cluster, node: usize) -> String {
    let names = (0..1_000).map(|number| format!("k{number}"));
    let mut own = names.filter(|name| node_of(cluster, name) == node);
    own.next().expect("the node serves slots")
}

/// A name whose key the node `node` serves, for each master.
pub fn key_on_each(cluster: &Cluster) -> [String; 3] {
    [0, 1, 2].map(|node| key_on(cluster, node))
}

/// All keys that a server has.
fn keys(server: &Server) -> Vec<String> {
    let leasehold_testbed::Reply::Array(keys) = ask(server, &["KEYS", "*"]) else {
        panic!("KEYS returns an array");
    };
    keys.iter()
        .filter_map(|key| key.as_text().map(str::to_owned))
        .collect()
}

/// Whether a server has the queue of a lock.
fn has_queue(server: &Server) -> bool {
    keys(server).iter().any(|key| key.contains("~queue"))
}

/// A name in the slot of the lock `key`.
fn in_slot_of(key: &str, name: impl Display) -> String {
    format!("{{{}}}{name}", in_redis(key))
}

/// A proxy for each node, which the node announces to clients as its address.
pub fn announce_proxies(cluster: &mut Cluster) -> Vec<Proxy> {
    let announce = |node: &mut Server| {
        let (to, setting) = match node.tls_port() {
            0 => (node.port(), "cluster-announce-port"),
            port => (port, "cluster-announce-tls-port"),
        };
        let proxy = Proxy::start(to).unwrap();
        let port = proxy.port().to_string();
        ask(node, &["CONFIG", "SET", setting, &port]);
        if version(node) < (7, 0) {
            // A node of Redis 6.2 itself shows another port after a restart only.
            node.restart_with(setting, &port).unwrap();
        }
        proxy
    };
    let count = cluster.nodes().len();
    let proxies: Vec<Proxy> = (0..count).map(|n| announce(cluster.node(n))).collect();
    cluster.wait_until_ok().unwrap();
    let knows_proxies = |node: &Server| {
        // CLUSTER SLOTS names the ports with TLS over TLS only.
        let command = match node.tls_port() {
            0 => "SLOTS",
            _ => "SHARDS",
        };
        let slots = ask(node, &["CLUSTER", command]).to_string();
        let mut ports = proxies.iter().map(|proxy| proxy.port().to_string());
        ports.all(|port| slots.contains(&port))
    };
    let is_announced = || cluster.nodes().iter().all(knows_proxies);
    assert!(eventually(3 * SOON, is_announced));
    proxies
}
