//! `Builder::credentials` on a Cluster: a callback returns the login of each connection to each node.

use std::sync::{Arc, Mutex};

use leasehold::Credentials;
use leasehold_testbed::{Cluster, eventually};

use super::{key_on_each, server_of};
use crate::least_privilege::version;
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, ask, lock, notified_clients};

const TOKENS: [&str; 2] = ["t0ken-one", "t0ken-two"];

/// How often the nodes have sent the slot map. Redis 6.2 counts all subcommands of `CLUSTER`.
fn slot_maps_sent(cluster: &Cluster) -> u64 {
    let of_node = |node| match version(node) >= (7, 0) {
        true => node.calls("cluster|slots").unwrap(),
        false => node.calls("cluster").unwrap(),
    };
    cluster.nodes().iter().map(of_node).sum()
}

#[test]
fn each_connection_calls_the_credentials_callback() {
    let cluster = Cluster::builder().without_replicas().password("admin");
    let cluster = cluster.start().unwrap();
    let names = key_on_each(&cluster);
    let servers = names.each_ref().map(|name| server_of(&cluster, name));
    let allow = |password: &str| {
        let password = format!(">{password}");
        let command = ["ACL", "SETUSER", "me", "reset", "on", "~*", "&*", "+@all"];
        for node in cluster.nodes() {
            ask(node, &[&command[..], &[&password]].concat());
        }
    };
    allow(TOKENS[0]);
    let token = Arc::new(Mutex::new(TOKENS[0]));
    let current = Arc::clone(&token);
    let url = cluster.url().replace(":admin@", "");
    let client = steady(&url).ttl(LONG_TTL).credentials(move || {
        let token = *current.lock().unwrap();
        Ok(Credentials::user("me", token))
    });
    let client = client.build().unwrap();
    let other = steady(&cluster.url()).ttl(LONG_TTL).build().unwrap();
    for (name, server) in names.iter().zip(servers) {
        for (client, notified) in [(&client, 1), (&other, 2)] {
            let guard = lock(client, name);
            assert!(eventually(SOON, || notified_clients(server) == notified));
            guard.unlock().unwrap();
        }
    }
    // The nodes no longer accept the old token. All connections of the client are closed.
    *token.lock().unwrap() = TOKENS[1];
    allow(TOKENS[1]);
    let before = slot_maps_sent(&cluster);
    for node in cluster.nodes() {
        ask(node, &["CLIENT", "KILL", "USER", "me"]);
    }
    for (name, server) in names.iter().zip(servers) {
        let guard = lock(&client, name);
        assert!(eventually(SOON, || notified_clients(server) == 2));
        guard.unlock().unwrap();
        let guard = lock(&other, name);
        let mutex = client.mutex(name);
        let waiter = Task::start(move || mutex.lock().map(drop));
        guard.unlock().unwrap();
        waiter.within(SOON, "the lock").unwrap();
    }
    assert!(eventually(SOON, || slot_maps_sent(&cluster) > before));
}
