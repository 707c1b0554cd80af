//! The number of threads of a client: as many as README.md, ARCHITECTURE.md and the API docs say.

use leasehold::{Client, MemoryQuorum, MemoryStore};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::cluster::pool::PooledCluster;
use crate::quorum::nodes::{Nodes, builder};
use crate::support::{SOON, secs, server};

#[test]
fn a_client_has_nine_threads_and_one_more_for_checks() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    Child::start(count_threads_of_clients, &server.url()).finish(secs(120));
}

#[test]
fn a_cluster_client_has_threads_for_each_master() {
    if child::threads().is_none() {
        return;
    }
    let cluster = PooledCluster::take();
    Child::start(count_threads_on_a_cluster, &cluster.get().url()).finish(secs(120));
}

#[test]
fn a_client_of_a_quorum_has_threads_for_each_node() {
    if child::threads().is_none() {
        return;
    }
    let nodes = Nodes::start(5);
    let urls = nodes.urls().join(" ");
    Child::start(count_threads_on_a_quorum, &urls).finish(secs(120));
}

/// Returns a function that waits until this process has the given number of threads more than now.
fn count_further_threads() -> impl Fn(usize, &str) {
    let before = child::threads().unwrap();
    move |more, what| {
        let is_so = || child::threads().unwrap() == before + more;
        let seen = eventually(SOON, is_so);
        let found = child::threads().unwrap() - before;
        assert!(seen, "{what}: {found} threads, not {more}");
    }
}

pub fn count_threads_on_a_cluster(parent: &Parent) {
    let assert_more = count_further_threads();
    let client = Client::open(&parent.url).unwrap();
    assert_more(6, "a client without locks");
    // Each of the three masters has some of these keys.
    let names = || (0..30).map(|n| format!("k{n}"));
    let lock = |name| client.mutex(name).fixed_ttl(secs(60)).lock().unwrap();
    let guards: Vec<_> = names().map(lock).collect();
    assert_more(6 + 3 * 5, "a client with locks that are not renewed");
    drop(guards);
    let lock = |name| client.mutex(name).ttl(secs(3)).lock().unwrap();
    let guards: Vec<_> = names().map(lock).collect();
    assert_more(6 + 3 * 5 + 2 * 2, "a client with renewed locks");
    drop((guards, client));
    assert_more(0, "no client");
}

pub fn count_threads_on_a_quorum(parent: &Parent) {
    let assert_more = count_further_threads();
    let urls = parent.url.split(' ').map(str::to_owned).collect();
    let client = builder(urls).build().unwrap();
    assert_more(6 + 5 * 5, "a client of five nodes");
    let lock = |n| client.mutex(format!("k{n}")).lock().unwrap();
    let guards: Vec<_> = (0..100).map(lock).collect();
    assert_more(6 + 5 * 5, "a client of five nodes with locks");
    client.ping().unwrap();
    assert_more(6 + 5 * 5, "a client that has pinged");
    drop((guards, client));
    assert_more(0, "no client");
}

pub fn count_threads_of_clients(parent: &Parent) {
    let assert_more = count_further_threads();
    let client = Client::open(&parent.url).unwrap();
    assert_more(9, "a client");
    let guards: Vec<_> = (0..100)
        .map(|n| client.mutex(format!("k{n}")).lock().unwrap())
        .collect();
    guards[0].transaction(|_, _| Ok(())).unwrap();
    assert_more(9, "a client with locks");
    let checked = client.mutex("checked").renew_while(|| true);
    let guard = checked.lock().unwrap();
    assert_more(10, "a client with checks");
    drop((guards, guard, checked, client));
    assert_more(0, "no client");
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    assert_more(5, "a client of a memory store");
    drop(client);
    assert_more(0, "no client of a memory store");
    let client = MemoryQuorum::new(3).client().unwrap();
    assert_more(6 + 3, "a client of a quorum in memory");
    drop(client);
    assert_more(0, "no client of a quorum in memory");
}
