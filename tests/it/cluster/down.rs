//! A Cluster that refuses all requests, since some of its slots have no master (`cluster-require-full-coverage yes`).

use std::sync::Arc;

use leasehold::{Error, ErrorKind};
use leasehold_testbed::{Server, eventually};

use super::{TestCluster, in_slot_of, key_on_each, keys};
use crate::steady::steady;
use crate::support::{LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, lock, secs};

/// A Cluster without replicas that refuses all requests while a slot has no master.
fn start() -> TestCluster {
    let mut cluster = TestCluster::builder().without_replicas();
    cluster.cluster = cluster.cluster.arg("cluster-require-full-coverage", "yes");
    cluster.start()
}

/// Stops the first master. Returns once the others refuse all requests.
#[track_caller]
fn take_down(cluster: &TestCluster) {
    let is_down = |node: &Server| {
        let info = ask(node, &["CLUSTER", "INFO"]);
        info.as_text().unwrap().contains("cluster_state:fail")
    };
    let [first, others @ ..] = cluster.nodes() else {
        panic!("a Cluster has nodes");
    };
    first.stop();
    assert!(eventually(3 * SOON, || others.iter().all(is_down)));
}

fn bring_back(cluster: &TestCluster) {
    cluster.nodes()[0].resume();
    cluster.wait_until_ok().unwrap();
}

/// Repeats `attempt` until its error names the reply of the node. If no reply has come to the last request of an
/// attempt by its deadline, the attempt ends with another error.
fn assert_names_the_next_step(attempt: impl Fn() -> Error) {
    let mut text = String::new();
    let is_named = eventually(6 * SOON, || {
        let error = attempt();
        assert!(error.is_unavailable(), "{error}");
        text = error.to_string();
        error.kind() == ErrorKind::Unavailable && text.contains("CLUSTERDOWN")
    });
    assert!(is_named, "{text}");
    assert!(text.contains("check the nodes with CLUSTER INFO"), "{text}");
}

#[test]
fn down_cluster_errors_name_the_next_step() {
    let cluster = start();
    let [_, key, _] = key_on_each(&cluster);
    let client = cluster.settings(steady).ttl(LONG_TTL);
    let client = client.command_timeout(secs(4)).outage_timeout(TIMEOUT);
    let client = client.build().unwrap();
    let tagged = |name: &str| in_slot_of(&key, name);
    let held = lock(&client, &tagged("held"));
    take_down(&cluster);
    let [trying, locking] = ["tried", "locked"].map(|name| client.mutex(tagged(name)));
    let tasks = [
        Task::start(move || {
            assert_names_the_next_step(|| trying.try_lock().map(drop).unwrap_err());
        }),
        Task::start(move || {
            assert_names_the_next_step(|| locking.lock().map(drop).unwrap_err());
        }),
    ];
    assert_names_the_next_step(|| held.extend(2 * LONG_TTL).unwrap_err());
    for task in tasks {
        task.within(6 * SOON, "an error");
    }
    held.check().unwrap();
    bring_back(&cluster);
    lock(&client, &key).unlock().unwrap();
    assert!(held.unlock().unwrap().is_confirmed());
}

#[test]
fn locks_and_waiters_outlive_a_down_cluster() {
    let cluster = start();
    let names = key_on_each(&cluster);
    let recorder = Recorder::new();
    let client = cluster.settings(steady).ttl(LONG_TTL);
    let client = client.command_timeout(secs(4)).outage_timeout(LONG_TTL);
    let client = client.event_handler(Arc::clone(&recorder)).build().unwrap();
    let guards = names.each_ref().map(|name| lock(&client, name));
    let tagged = |name: &str| in_slot_of(&names[1], name);
    let (dropped, awaited) = (lock(&client, &tagged("dropped")), tagged("awaited"));
    take_down(&cluster);
    drop(dropped);
    let mutex = client.mutex(&awaited);
    let waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::Unavailable, &awaited);
    bring_back(&cluster);
    let granted = waiter.within(3 * SOON, "the grant");
    for guard in guards.into_iter().chain([granted]) {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
    let held = || -> Vec<String> {
        let all = cluster.nodes().iter().flat_map(keys);
        all.filter(|key| !key.contains("~fence")).collect()
    };
    assert!(eventually(SOON, || held().is_empty()), "{:?}", held());
}
