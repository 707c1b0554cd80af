//! A Cluster whose nodes use TLS, and announce their ports with TLS.

use leasehold_testbed::eventually;

use super::{key_on_each, keys, node_of};
use crate::support::{LONG_TTL, SOON, Task, in_redis, lock};
use crate::tls::TlsCluster;

#[test]
fn all_connections_use_tls() {
    let encrypted = TlsCluster::start();
    let cluster = &encrypted.cluster;
    assert!(
        cluster.url().starts_with("rediss+cluster://"),
        "{}",
        cluster.url()
    );
    let client = encrypted.steady().ttl(LONG_TTL).build().unwrap();
    for name in key_on_each(cluster) {
        lock(&client, &name).unlock().unwrap();
    }
    let name = &key_on_each(cluster)[0];
    let guard = lock(&client, name);
    let slot = cluster.slot_of(&in_redis(name));
    cluster.move_slot(slot, 1).unwrap();
    assert_eq!(node_of(cluster, name), 1);
    drop(guard);
    let is_free = || !keys(&cluster.nodes()[1]).contains(&in_redis(name));
    assert!(eventually(SOON, is_free));
}

#[test]
fn each_node_gets_the_client_certificate() {
    let encrypted = TlsCluster::start_with(true);
    let client = || encrypted.steady_with_certificate().build().unwrap();
    let (client, waiting) = (client(), client());
    for name in key_on_each(&encrypted.cluster) {
        let guard = lock(&client, &name);
        let mutex = waiting.mutex(name.as_str());
        let waiter = Task::start(move || drop(mutex.lock().unwrap()));
        guard.unlock().unwrap();
        waiter.within(SOON, "the waiter's turn");
    }
    let error = encrypted.steady().build().unwrap_err();
    let text = format!("{error:?}");
    assert!(text.contains("requires a client certificate"), "{text}");
}
