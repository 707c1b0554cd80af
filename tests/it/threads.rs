//! The number of threads of a client: as many as README.md, ARCHITECTURE.md and the API docs say.

use std::ops::RangeInclusive;
use std::sync::Arc;

use leasehold::{Client, EventHandler, MemoryQuorum, MemoryStore};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::cluster::pool::PooledCluster;
use crate::quorum::nodes::{Nodes, builder};
use crate::support::{SOON, secs, server};

#[test]
fn a_client_has_four_threads_and_starts_more_on_demand() {
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

/// Tracing and metrics need the callback thread from the start.
const CALLBACKS: usize = cfg!(any(feature = "tracing", feature = "metrics")) as usize;

/// Returns a function that waits until this process has a number of threads more than now that is in the given range.
fn count_further_threads() -> impl Fn(RangeInclusive<usize>, &str) {
    let before = child::threads().unwrap();
    move |more, what| {
        let found = || child::threads().unwrap() - before;
        let seen = eventually(SOON, || more.contains(&found()));
        assert!(seen, "{what}: {} threads, not {more:?}", found());
    }
}

pub fn count_threads_on_a_cluster(parent: &Parent) {
    let assert_more = count_further_threads();
    let client = Client::open(&parent.url).unwrap();
    let own = 4 + CALLBACKS;
    assert_more(own..=own, "a client without locks");
    // Each of the three masters has some of these keys.
    let names = || (0..30).map(|n| format!("k{n}"));
    let lock = |name| client.mutex(name).fixed_ttl(secs(60)).lock().unwrap();
    let guards: Vec<_> = names().map(lock).collect();
    let with_masters = own + 3 * 2;
    let not_renewed = "a client with locks that are not renewed";
    assert_more(with_masters..=with_masters, not_renewed);
    drop(guards);
    let lock = |name| client.mutex(name).ttl(secs(3)).lock().unwrap();
    let guards: Vec<_> = names().map(lock).collect();
    // Two further masters have a worker, and each of the three has a second one if renewals overlap.
    let renewed = with_masters + 2..=with_masters + 2 + 3;
    assert_more(renewed, "a client with renewed locks");
    drop((guards, client));
    assert_more(0..=0, "no client");
}

pub fn count_threads_on_a_quorum(parent: &Parent) {
    let assert_more = count_further_threads();
    let urls = parent.url.split(' ').map(str::to_owned).collect();
    let client = builder(urls).build().unwrap();
    let own = 4 + CALLBACKS + 5 * 2;
    assert_more(own..=own, "a client of five nodes");
    let lock = |n| client.mutex(format!("k{n}")).lock().unwrap();
    let guards: Vec<_> = (0..100).map(lock).collect();
    // If a node has not granted a lock, a worker asks whether the lock is held; two of them, if there are more at a
    // time.
    let with_locks = own..=own + 1;
    assert_more(with_locks.clone(), "a client of five nodes with locks");
    client.ping().unwrap();
    assert_more(with_locks, "a client that has pinged");
    drop((guards, client));
    assert_more(0..=0, "no client");
}

/// Does nothing.
struct NoEvents;

impl EventHandler for NoEvents {}

pub fn count_threads_of_clients(parent: &Parent) {
    let assert_more = count_further_threads();
    let client = Client::open(&parent.url).unwrap();
    let own = 4 + CALLBACKS;
    assert_more(own..=own, "a client");
    let lock = |n: u32| client.mutex(format!("k{n}")).lock().unwrap();
    let guards: Vec<_> = (0..100).map(lock).collect();
    guards[0].transaction(|_, _| Ok(())).unwrap();
    client.ping().unwrap();
    assert_more(own..=own, "a client with locks");
    let renewed = client.mutex("renewed").ttl(secs(3)).lock().unwrap();
    let mut seen = renewed.remaining();
    let has_risen = || {
        let before = std::mem::replace(&mut seen, renewed.remaining());
        seen > before
    };
    assert!(eventually(SOON, has_risen), "no renewal");
    // The workers may have renewed one of the hundred locks at the same time.
    assert_more(own..=own + 1, "a client with renewed locks");
    drop(renewed);
    let without_callbacks = child::threads().unwrap();
    guards[0].on_lost(drop);
    guards[1].on_lost(drop);
    let more = 1 - CALLBACKS;
    assert_eq!(child::threads().unwrap(), without_callbacks + more);
    let checked = client.mutex("checked").renew_while(|| true);
    let guard = checked.lock().unwrap();
    assert_eq!(child::threads().unwrap(), without_callbacks + more + 1);
    let before = child::threads().unwrap();
    let observers = [(); 3].map(|()| client.election("observed").observe().unwrap());
    let one_thread = before + 1;
    assert_eq!(child::threads().unwrap(), one_thread, "three observers");
    drop((guards, guard, checked, observers, client));
    assert_more(0..=0, "no client");
    let listened = Client::builder(&parent.url).event_handler(Arc::new(NoEvents));
    let listened = listened.build().unwrap();
    assert_more(5..=5, "a client with an event handler");
    drop(listened);
    assert_more(0..=0, "no client");
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    assert_more(3 + CALLBACKS..=3 + CALLBACKS, "a client of a memory store");
    drop(client);
    assert_more(0..=0, "no client of a memory store");
    let client = MemoryQuorum::new(3).client().unwrap();
    let of_quorum = 4 + CALLBACKS + 3;
    assert_more(of_quorum..=of_quorum, "a client of a quorum in memory");
    drop(client);
    assert_more(0..=0, "no client of a quorum in memory");
}
