//! The URLs of a Cluster, and the errors of wrong ones.

use leasehold::{Client, Error, ErrorKind};
use leasehold_testbed::{Cluster, Reply, eventually};

use super::pool::PooledCluster;
use crate::hostile::server::{Attack, Hostile, Since};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, builder, lock, server};

fn open(url: &str) -> Error {
    builder(url).build().unwrap_err()
}

#[test]
fn a_client_finds_all_nodes_from_one() {
    let cluster = PooledCluster::take();
    for node in cluster.get().nodes() {
        let url = format!("redis+cluster://127.0.0.1:{}", node.port());
        let client = Client::open(&url).unwrap();
        for n in 0..20 {
            lock(&client, &format!("k{n}")).unlock().unwrap();
        }
    }
}

#[test]
fn a_seed_that_is_away_is_skipped() {
    let cluster = PooledCluster::take();
    let port = cluster.get().nodes()[2].port();
    let url = format!("redis+cluster://127.0.0.1:1,127.0.0.1:{port}/0");
    let client = Client::open(&url).unwrap();
    lock(&client, "k").unlock().unwrap();
    let shown = format!("{client:?}");
    assert!(shown.contains("127.0.0.1:1,127.0.0.1:"), "{shown}");
}

/// A URL may name a node that belongs to another Cluster by now.
#[test]
fn a_node_of_another_cluster_moves_no_slot() {
    let cluster = super::cluster();
    let other = Cluster::builder().masters(1).without_replicas();
    let other = other.start().unwrap();
    let stranger = &other.nodes()[0];
    let url = format!("{},127.0.0.1:{}", cluster.url(), stranger.port());
    let client = steady(&url).ttl(LONG_TTL).build().unwrap();
    let guard = lock(&client, "k");
    let queries = || {
        let calls = |command| stranger.calls(command).unwrap();
        calls("cluster|slots") + calls("cluster")
    };
    let before = queries();
    // After a connection was closed, the client asks another node for the slot map.
    let asked_twice = || {
        for node in cluster.nodes() {
            ask(node, &["CLIENT", "KILL", "TYPE", "normal"]);
        }
        let _ = client.ping();
        queries() >= before + 2
    };
    assert!(eventually(SOON, asked_twice));
    guard.unlock().unwrap();
    for n in 0..20 {
        lock(&client, &format!("k{n}")).unlock().unwrap();
    }
    assert_eq!(ask(stranger, &["DBSIZE"]), Reply::Int(0));
}

/// The nodes of the new Cluster have other ids, and the slots of another node.
#[test]
fn a_cluster_that_was_made_anew_is_followed() {
    let cluster = Cluster::builder().masters(2).without_replicas();
    let cluster = cluster.start().unwrap();
    let [first, second] = cluster.nodes() else {
        panic!("two nodes");
    };
    let url = format!("redis+cluster://127.0.0.1:{}", first.port());
    let client = builder(&url).ttl(LONG_TTL).outage_timeout(3 * SOON);
    let client = client.build().unwrap();
    let key = super::key_on(&cluster, 1);
    lock(&client, &key).unlock().unwrap();
    for node in [first, second] {
        ask(node, &["FLUSHALL"]);
        ask(node, &["CLUSTER", "RESET", "HARD"]);
    }
    let slots: Vec<String> = (0..16_384).map(|slot: u16| slot.to_string()).collect();
    let mut add = vec!["CLUSTER", "ADDSLOTS"];
    add.extend(slots.iter().map(String::as_str));
    ask(first, &add);
    lock(&client, &key).unlock().unwrap();
    assert_eq!(super::node_of(&cluster, &key), 0);
}

#[test]
fn the_url_of_one_server_is_refused() {
    let cluster = PooledCluster::take();
    let port = cluster.get().nodes()[0].port();
    let error = open(&format!("redis://127.0.0.1:{port}"));
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    let wanted = format!("use the URL redis+cluster://127.0.0.1:{port}");
    assert!(error.to_string().contains(&wanted), "{error}");
}

#[test]
fn a_single_server_is_refused_as_a_cluster() {
    let server = server();
    let error = open(&format!("redis+cluster://127.0.0.1:{}", server.port()));
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(
        error.to_string().contains("is no node of a Redis Cluster"),
        "{error}"
    );
}

#[test]
fn wrong_parts_of_a_url_are_named() {
    for (url, part) in [
        ("redis+cluster://a,b/3", "a Cluster has only database 0"),
        ("redis+cluster://a,b:99999", "a port that is no number"),
        ("redis+cluster://a,,b", "has an empty host"),
    ] {
        let error = open(url);
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        assert!(error.to_string().contains(part), "{url}: {error}");
    }
}

#[test]
fn a_cluster_that_is_away_is_an_error() {
    let error = open("redis+cluster://127.0.0.1:1,127.0.0.1:2");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

/// The reply to `CLUSTER SLOTS` has 16,384 ranges, and is longer than the default of `max_reply_bytes`.
#[test]
fn slots_may_alternate_between_masters() {
    let cluster = Cluster::builder().masters(2).without_replicas();
    let cluster = cluster.alternating_slots().start().unwrap();
    let client = super::client(&cluster);
    for n in 0..20 {
        lock(&client, &format!("k{n}")).unlock().unwrap();
    }
}

#[test]
fn a_slot_map_beyond_32_mib_is_refused() {
    let cluster = PooledCluster::take();
    let node = cluster.get().nodes()[0].port();
    let hostile = Hostile::start(node, Attack::Array, Since::argument("SLOTS"));
    let error = open(&hostile.url().replace("redis:", "redis+cluster:"));
    assert!(error.to_string().contains("33554432 bytes"), "{error}");
    assert!(!error.to_string().contains("max_reply_bytes"), "{error}");
}
