//! Locks on a Redis Cluster of three masters and three replicas.

pub mod pool;

mod addresses;
mod fail_over;
mod resharding;
pub mod rights;
mod servers;
#[cfg(feature = "tls")]
mod tls;
mod under_load;

use leasehold::{Builder, Client};
use leasehold_testbed::{Cluster, Proxy, Server, eventually};

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, in_redis};

fn cluster() -> Cluster {
    Cluster::start().unwrap()
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
fn key_on(cluster: &Cluster, node: usize) -> String {
    let names = (0..).map(|number| format!("k{number}"));
    let mut own = names.filter(|name| node_of(cluster, name) == node);
    own.next().unwrap()
}

/// A name whose key the node `node` serves, for each master.
fn key_on_each(cluster: &Cluster) -> [String; 3] {
    [0, 1, 2].map(|node| key_on(cluster, node))
}

/// How often a node has run scripts.
fn script_calls(server: &Server) -> u64 {
    server.calls("evalsha").unwrap() + server.calls("eval").unwrap()
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

/// A proxy for each node, which the node announces to clients as its address.
pub fn announce_proxies(cluster: &Cluster) -> Vec<Proxy> {
    let announce = |node: &Server| {
        let proxy = Proxy::start(node.port()).unwrap();
        let port = proxy.port().to_string();
        ask(node, &["CONFIG", "SET", "cluster-announce-port", &port]);
        proxy
    };
    let proxies: Vec<Proxy> = cluster.nodes().iter().map(announce).collect();
    let knows_proxies = |node| {
        let slots = ask(node, &["CLUSTER", "SLOTS"]).to_string();
        let mut ports = proxies.iter().map(|proxy| proxy.port().to_string());
        ports.all(|port| slots.contains(&port))
    };
    let is_announced = || cluster.nodes().iter().all(knows_proxies);
    assert!(eventually(3 * SOON, is_announced));
    proxies
}
