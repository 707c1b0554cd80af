//! A replica takes over while locks are held, acquired, waited for and released.

use std::thread;

use leasehold::Client;
use leasehold_testbed::{Cluster, Server, eventually};

use super::{TestCluster, has_queue, in_slot_of, key_on, keys};
use crate::faults_hold::assert_closed_connections_end_no_hold_or_wait;
use crate::replicas::assert_too_few;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, builder, in_redis, kill_connections, lock, millis, secs,
};

/// Waits until the replica of `master` has the lock's key. Returns the replica.
fn replicated(cluster: &Cluster, master: usize, key: &str) -> usize {
    let replica = cluster.replica_of(master);
    let slot = cluster.slot_of(&in_redis(key)).to_string();
    let has_key = || {
        let count = ask(
            &cluster.nodes()[replica],
            &["CLUSTER", "COUNTKEYSINSLOT", &slot],
        );
        // The lock, and its fence counter.
        count.as_int() >= Some(2)
    };
    assert!(eventually(SOON, has_key), "the key is not replicated");
    replica
}

/// A client that tries to connect for longer than a test lasts. So a test passes only if the client gives up a killed
/// master when the replica takes over.
fn patient(cluster: &TestCluster) -> Client {
    let patient = cluster.settings(builder).ttl(LONG_TTL);
    patient.connect_timeout(6 * SOON).build().unwrap()
}

#[track_caller]
fn assert_free(server: &Server, key: &str) {
    let is_free = || !keys(server).contains(&in_redis(key));
    assert!(eventually(3 * SOON, is_free), "{:?}", keys(server));
}

#[test]
fn a_lock_outlives_a_planned_fail_over() {
    let cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 0);
    let client = cluster.settings(steady).ttl(secs(4)).build().unwrap();
    let guard = lock(&client, &key);
    replicated(&cluster, 0, &key);
    let new = cluster.fail_over(0).unwrap();
    thread::sleep(secs(6));
    guard.check().unwrap();
    let old = &cluster.nodes()[0];
    assert!(keys(&cluster.nodes()[new]).contains(&in_redis(&key)));
    assert!(guard.unlock().unwrap().is_confirmed());
    assert_free(&cluster.nodes()[new], &key);
    // The old master serves no slot any more, so the client closes its connections. Clients of other tests may connect to
    // a port that this server has now.
    let holder = client.holder_id().to_string();
    let list = || ask(old, &["CLIENT", "LIST"]);
    let is_named = || list().as_text().unwrap().contains(&holder);
    assert!(eventually(3 * SOON, || !is_named()), "{:?}", list());
}

#[test]
fn a_killed_master_is_replaced_during_a_hold() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 1);
    let client = cluster.settings(builder).ttl(secs(30)).build().unwrap();
    let guard = lock(&client, &key);
    let replica = replicated(&cluster, 1, &key);
    cluster.node(1).kill();
    cluster.wait_until_master(replica).unwrap();
    drop(lock(&client, "{x}"));
    guard.check().unwrap();
    // The release may be delayed until the client has found the new master.
    guard.unlock().unwrap();
    assert_free(&cluster.nodes()[replica], &key);
}

/// The replica has no link when the lock is requested. A grant without its acknowledgement would be lost with the
/// master.
#[test]
fn acknowledged_locks_survive_the_death_of_a_master() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 1);
    let client = cluster.settings(steady).ttl(LONG_TTL);
    let client = client.replicas(1, millis(500)).build().unwrap();
    let replica = cluster.replica_of(1);
    cluster.nodes()[replica].stop();
    // Otherwise the grant would reach the replica's socket.
    ask(&cluster.nodes()[1], &["CLIENT", "KILL", "TYPE", "replica"]);
    let error = client.mutex(&key).try_lock().unwrap_err();
    assert_too_few(&error, "0 of 1 replicas acknowledged");
    let mutex = client.mutex(&key);
    let granted = Task::start(move || mutex.lock().unwrap());
    cluster.nodes()[replica].resume();
    let guard = granted.within(3 * SOON, "an acknowledged grant");
    cluster.node(1).kill();
    cluster.wait_until_master(replica).unwrap();
    cluster.wait_until_ok().unwrap();
    let other = cluster.client().mutex(&key).try_lock().unwrap();
    assert!(other.is_none(), "granted twice");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert_free(&cluster.nodes()[replica], &key);
}

#[test]
fn a_lock_is_granted_after_a_masters_death() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 2);
    let client = patient(&cluster);
    lock(&client, &key).unlock().unwrap();
    let replica = cluster.replica_of(2);
    cluster.node(2).kill();
    let mutex = client.mutex(&key);
    let granted = Task::start(move || mutex.lock().unwrap());
    let guard = granted.within(3 * SOON, "a grant by the new master");
    assert_eq!(cluster.master_of_key(&in_redis(&key)), replica);
    guard.unlock().unwrap();
    assert_free(&cluster.nodes()[replica], &key);
}

#[test]
fn a_lock_is_granted_after_a_masters_stop() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 0);
    let client = cluster.settings(builder).ttl(LONG_TTL).build().unwrap();
    lock(&client, &key).unlock().unwrap();
    let replica = cluster.replica_of(0);
    cluster.node(0).stop();
    let mutex = client.mutex(&key);
    let granted = Task::start(move || mutex.lock().unwrap());
    let guard = granted.within(3 * SOON, "a grant by the new master");
    cluster.node(0).resume();
    assert!(keys(&cluster.nodes()[replica]).contains(&in_redis(&key)));
    guard.unlock().unwrap();
    cluster.wait_until_ok().unwrap();
    assert_free(&cluster.nodes()[replica], &key);
    assert_free(&cluster.nodes()[0], &key);
}

/// Before the fail-over, these requests wait for a connection to the killed master.
#[test]
fn requests_without_a_connection_reach_the_new_master() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 0);
    let patient = || {
        let patient = cluster.settings(builder).ttl(LONG_TTL);
        let patient = patient.connect_timeout(6 * SOON).command_timeout(6 * SOON);
        patient.build().unwrap()
    };
    let client = patient();
    // It knows the slot map, and has no connection to the killed master. (An acquire that was written is not repeated.)
    let other = patient();
    lock(&other, &key_on(&cluster, 1)).unlock().unwrap();
    let tagged = |name: &str| in_slot_of(&key, name);
    let names = ["extended", "unlocked", "written"].map(tagged);
    let [extended, unlocked, written] = names.clone().map(|name| lock(&client, &name));
    let replica = &cluster.nodes()[cluster.replica_of(0)];
    let has_all = || {
        names
            .iter()
            .all(|name| keys(replica).contains(&in_redis(name)))
    };
    assert!(eventually(SOON, has_all), "{:?}", keys(replica));
    cluster.node(0).kill();
    let (mutex, data) = (other.mutex(tagged("acquired")), tagged("data"));
    let acquired = Task::start(move || mutex.try_lock().unwrap().is_some());
    let extended = Task::start(move || extended.extend(2 * LONG_TTL).unwrap());
    let unlocked = Task::start(move || unlocked.unlock().unwrap().is_confirmed());
    let written = Task::start(move || {
        let result = written.transaction(|_, pipe| {
            pipe.set(&data, "x").ignore();
            Ok::<_, leasehold::redis::RedisError>(())
        });
        result.unwrap();
    });
    assert!(acquired.within(3 * SOON, "an acquire"));
    extended.within(3 * SOON, "an extension");
    assert!(unlocked.within(3 * SOON, "a release"));
    written.within(3 * SOON, "a transaction");
}

#[test]
fn a_release_reaches_the_new_master() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 0);
    let client = patient(&cluster);
    let guard = lock(&client, &key);
    let replica = replicated(&cluster, 0, &key);
    cluster.node(0).kill();
    drop(guard);
    cluster.wait_until_master(replica).unwrap();
    // Nothing but the failed release makes the client ask for the new master.
    assert_free(&cluster.nodes()[replica], &key);
}

/// The replica has no link when the locks are released.
#[test]
fn releases_that_the_new_master_lacks_are_repeated() {
    let mut cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 0);
    let names: Vec<String> = (0..50).map(|n| in_slot_of(&key, n.to_string())).collect();
    let client = patient(&cluster);
    let guards: Vec<_> = names.iter().map(|name| lock(&client, name)).collect();
    let replica = cluster.replica_of(0);
    let all: Vec<String> = names.iter().map(|name| in_redis(name)).collect();
    let held = |server: &Server| {
        let keys = keys(server);
        all.iter().filter(|key| keys.contains(key)).count()
    };
    assert!(eventually(SOON, || held(&cluster.nodes()[replica]) == 50));
    cluster.nodes()[replica].stop();
    // Otherwise the releases would reach the replica's socket.
    ask(&cluster.nodes()[0], &["CLIENT", "KILL", "TYPE", "replica"]);
    for guard in guards {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
    // The replica has an earlier lease of this lock than the last one.
    for _ in 0..100 {
        lock(&client, &names[0]).unlock().unwrap();
    }
    cluster.node(0).kill();
    cluster.nodes()[replica].resume();
    cluster.wait_until_master(replica).unwrap();
    assert!(held(&cluster.nodes()[replica]) > 0);
    let mutex = client.mutex(&names[0]);
    let granted = Task::start(move || mutex.lock().unwrap());
    granted.within(3 * SOON, "the lock").unlock().unwrap();
    let is_free = eventually(SOON, || held(&cluster.nodes()[replica]) == 0);
    assert!(is_free, "{:?}", keys(&cluster.nodes()[replica]));
}

#[test]
fn waiters_follow_their_lock_to_the_new_master() {
    let cluster = TestCluster::builder().start();
    let key = key_on(&cluster, 1);
    let (holder, waiter) = (cluster.client(), cluster.client());
    let guard = lock(&holder, &key);
    let mutex = waiter.mutex(&key);
    let waiting = Task::start(move || mutex.lock().unwrap());
    assert!(eventually(SOON, || has_queue(&cluster.nodes()[1])));
    replicated(&cluster, 1, &key);
    let new = cluster.fail_over(1).unwrap();
    guard.unlock().unwrap();
    let guard = waiting.within(3 * SOON, "the waiter");
    assert!(keys(&cluster.nodes()[new]).contains(&in_redis(&key)));
    guard.unlock().unwrap();
}

#[test]
fn closed_connections_are_made_again_on_each_node() {
    let cluster = TestCluster::builder().start();
    let client = cluster.client();
    let names = super::key_on_each(&cluster);
    let guards: Vec<_> = names.iter().map(|name| lock(&client, name)).collect();
    for node in &cluster.nodes()[..3] {
        kill_connections(node);
    }
    for guard in guards {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
    for name in &names {
        lock(&client, name).unlock().unwrap();
    }
}

/// The connections for notifications are closed, too.
#[test]
fn closed_connections_end_no_hold_or_wait() {
    let cluster = TestCluster::builder().start();
    let server = super::server_of(&cluster, "k");
    let is_queued = || has_queue(server);
    let steady = || cluster.settings(steady);
    assert_closed_connections_end_no_hold_or_wait(server, &steady, &is_queued);
}
