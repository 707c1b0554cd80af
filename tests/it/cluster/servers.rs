//! Which servers a client uses, and what it keeps on each.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use leasehold::{Client, redis};
use leasehold_testbed::{Cluster, Reply, Server, eventually};

use super::pool::PooledCluster;
use super::{cluster, in_slot_of, key_on, key_on_each, keys, node_of};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, connections, in_redis, lock, millis, script_calls,
    secs, tracked, within,
};

fn client(cluster: &PooledCluster) -> Client {
    super::client(cluster.get())
}

#[test]
fn connections_are_made_where_keys_are_used() {
    let cluster = PooledCluster::take();
    let own = key_on(cluster.get(), 0);
    let before = cluster
        .get()
        .nodes()
        .iter()
        .map(connections)
        .collect::<Vec<_>>();
    let client = client(&cluster);
    for _ in 0..10 {
        lock(&client, &own).unlock().unwrap();
    }
    let mut made = Vec::new();
    let is_one = || {
        let after = cluster.get().nodes().iter().map(connections);
        made = after
            .zip(&before)
            .map(|(after, before)| after - before)
            .collect();
        matches!(made[..], [1 | 2, 0, 0, 0, 0, 0])
    };
    // The key uses one pipeline, which begins a second attempt if the first one takes longer than half a second. The
    // connections that asked for the slot map are closed; a busy server notices it later.
    assert!(eventually(SOON, is_one), "{made:?}");
}

/// The number of the client's connections that a lock has used. A slow attempt to connect leaves another connection
/// unused.
fn connections_in_use(server: &Server, client: &Client) -> usize {
    let list = ask(server, &["CLIENT", "LIST"]);
    let holder = format!(":{} ", client.holder_id());
    let of_client = list.as_text().unwrap().lines();
    let of_client = of_client.filter(|line| line.contains(&holder));
    // The last commands of a new connection, and the query for the slot map.
    let is_unused = |line: &&str| {
        let mut commands = [" cmd=client", " cmd=script", " cmd=cluster"].into_iter();
        !line.contains(" name=leasehold-notifications:") && commands.any(|it| line.contains(it))
    };
    of_client.filter(|line| !is_unused(line)).count()
}

/// Each master has one connection for each pipeline, one or two for renewals, and one for notifications.
#[test]
fn threads_add_no_connections_to_a_master() {
    const THREADS: usize = 64;
    const PIPELINES: usize = 2;
    const FEWEST: usize = PIPELINES + 2;
    const MOST: usize = PIPELINES + 3;
    let cluster = PooledCluster::take();
    let recorder = Recorder::new();
    let builder = steady(&cluster.get().url()).ttl(secs(6));
    let builder = builder.pipelines(PIPELINES);
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    // Each thread locks keys of many slots until its held lock is renewed.
    let work = |thread| {
        let (client, recorder) = (client.clone(), Arc::clone(&recorder));
        Task::start(move || {
            let held = format!("held:{thread}");
            let guard = client.mutex(&held).lock().unwrap();
            let mut number = 0;
            while recorder.count(What::Renewed, &held) == 0 {
                client
                    .with_lock(format!("{thread}:{number}"), || ())
                    .unwrap();
                number += 1;
            }
            guard.unlock().unwrap();
        })
    };
    let tasks: Vec<_> = (0..THREADS).map(work).collect();
    let mut counts = Vec::new();
    let are_done = || {
        let masters = cluster.get().nodes()[..3].iter();
        counts = masters.map(|it| connections_in_use(it, &client)).collect();
        assert!(counts.iter().all(|count| *count <= MOST), "{counts:?}");
        tasks.iter().all(Task::is_done)
    };
    assert!(eventually(6 * SOON, are_done));
    assert!(counts.iter().all(|count| *count >= FEWEST), "{counts:?}");
    for task in tasks {
        task.within(SOON, "a thread");
    }
}

#[test]
fn a_batch_is_split_by_server() {
    let cluster = PooledCluster::take();
    let client = steady(&cluster.get().url()).ttl(secs(3)).build().unwrap();
    let names: Vec<String> = (0..300).map(|number| format!("k{number}")).collect();
    let guards: Vec<_> = names.iter().map(|name| lock(&client, name)).collect();
    let used: BTreeSet<usize> = names
        .iter()
        .map(|name| node_of(cluster.get(), name))
        .collect();
    assert_eq!(used.len(), 3);
    let renewed = || cluster.get().nodes().iter().map(renewals).sum::<u64>();
    // As many renewals as locks.
    let before = renewed();
    assert!(eventually(SOON, || renewed() >= before + 300));
    for guard in guards {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
}

/// Renewals of ten slots become due in turn. Without the order by slot, a batch would have a few locks of each slot,
/// and each slot needs a script call of its own.
#[test]
fn renewals_of_one_slot_share_script_calls() {
    let cluster = Cluster::builder().node_timeout(secs(10));
    let cluster = cluster.without_replicas().start().unwrap();
    let client = steady(&cluster.url()).ttl(secs(12)).build().unwrap();
    let tags: Vec<String> = (0..)
        .map(|number| format!("{{k{number}}}"))
        .filter(|tag| node_of(&cluster, tag) == 0)
        .take(10)
        .collect();
    let names = (0..60).flat_map(|lock_number| tags.iter().map(move |tag| (tag, lock_number)));
    let names = names.map(|(tag, lock_number)| format!("{tag}:{lock_number}"));
    let guards: Vec<_> = names.map(|name| lock(&client, &name)).collect();
    let node = &cluster.nodes()[0];
    let (calls, renewed) = (script_calls(node), renewals(node));
    // All renewals become due while the node is stopped.
    node.stop();
    thread::sleep(millis(4_400));
    node.resume();
    assert!(eventually(SOON, || renewals(node) >= renewed + 600));
    let (calls, renewed) = (script_calls(node) - calls, renewals(node) - renewed);
    assert!(renewed >= 6 * calls, "{renewed} renewals in {calls} calls");
    for guard in guards {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
}

/// How many leases a node has renewed.
fn renewals(server: &Server) -> u64 {
    server.calls("pexpire").unwrap()
}

#[test]
fn tokens_rise_in_each_slot() {
    let cluster = PooledCluster::take();
    let client = client(&cluster);
    for name in key_on_each(cluster.get()) {
        let tokens: Vec<u64> = (0..5)
            .map(|_| {
                let guard = lock(&client, &name);
                let token = guard.fencing_token();
                guard.unlock().unwrap();
                token
            })
            .collect();
        assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    }
}

#[test]
fn each_slot_in_use_has_one_fence_counter() {
    let cluster = PooledCluster::take();
    let client = client(&cluster);
    let names = ["a", "b", "c", "{a}x", "{a}y"];
    let slots: BTreeSet<u16> = names
        .iter()
        .map(|name| cluster.get().slot_of(&in_redis(name)))
        .collect();
    for _ in 0..3 {
        for name in names {
            lock(&client, name).unlock().unwrap();
        }
    }
    let left: Vec<String> = cluster.get().nodes()[..3].iter().flat_map(keys).collect();
    let counters = left.iter().filter(|key| key.contains("~fence")).count();
    assert_eq!(counters, slots.len(), "{left:?}");
    assert_eq!(left.len(), counters, "{left:?}");
}

/// The leases on the stopped node are renewed one by one, and no renewal gets a reply.
#[test]
fn a_stopped_node_costs_other_nodes_no_lease() {
    let mut cluster = Cluster::builder()
        .arg("cluster-require-full-coverage", "no")
        .without_replicas()
        .start()
        .unwrap();
    let [stopped, other, _] = key_on_each(&cluster);
    // Two renewals that wait for this whole time, one on each thread, would cost the leases of 3 s.
    let client = steady(&cluster.url()).build().unwrap();
    let hold = |key: &str, number: u64, ttl| {
        let mutex = client.mutex(in_slot_of(key, number)).ttl(ttl);
        mutex.lock().unwrap()
    };
    let held: Vec<_> = (0..3).map(|number| hold(&other, number, secs(3))).collect();
    let _on_stopped: Vec<_> = (0..12)
        .map(|number| {
            // The pause keeps the renewals from being due together.
            thread::sleep(millis(100));
            hold(&stopped, number, secs(6))
        })
        .collect();
    cluster.node(0).stop();
    let lost = held[0].lost_signal().recv_timeout(secs(9));
    lost.expect_err("a lease on another node is lost");
    for guard in held {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
    cluster.node(0).resume();
}

/// Requests to a stopped node wait. The test counts the requests to the other nodes meanwhile.
#[test]
fn a_stopped_node_delays_no_other_nodes_keys() {
    let mut cluster = Cluster::builder()
        .arg("cluster-require-full-coverage", "no")
        .without_replicas()
        .start()
        .unwrap();
    let [stopped, second, third] = key_on_each(&cluster);
    let client = steady(&cluster.url()).ttl(LONG_TTL).build().unwrap();
    for key in [&stopped, &second, &third] {
        lock(&client, key).unlock().unwrap();
    }
    cluster.node(0).stop();
    let waiting: Vec<_> = (0..4)
        .map(|number| {
            let mutex = client.mutex(in_slot_of(&stopped, number));
            Task::start(move || mutex.try_lock().map(drop))
        })
        .collect();
    let others = client.clone();
    within(SOON, "locks on the other nodes", move || {
        for _ in 0..50 {
            for key in [&second, &third] {
                others.mutex(key).lock().unwrap().unlock().unwrap();
            }
        }
    });
    cluster.node(0).resume();
    for task in waiting {
        // The steady client's time-outs are long: the requests are answered in the end.
        let _ = task.within(SOON, "a request of the stopped node");
    }
}

#[test]
fn waiters_are_notified_on_every_node() {
    let cluster = PooledCluster::take();
    let (holder, waiter) = (client(&cluster), client(&cluster));
    for name in key_on_each(cluster.get()) {
        let server = &cluster.get().nodes()[node_of(cluster.get(), &name)];
        let guard = lock(&holder, &name);
        let mutex = waiter.mutex(&name);
        let waiting = Task::start(move || mutex.lock().unwrap());
        // Once its connection for notifications is open, the waiter asks to be notified.
        let is_notified = || {
            queue_entries(server)
                .iter()
                .any(|entry| !entry.contains(",0,"))
        };
        assert!(eventually(SOON, is_notified), "{:?}", queue_entries(server));
        let has_shards = has_shard_channels(server);
        let subscribed = || subscribers(server, "SHARDCHANNELS") > 0;
        assert!(!has_shards || eventually(SOON, subscribed));
        let published = || ["spublish", "publish"].map(|command| server.calls(command).unwrap());
        let before = published();
        guard.unlock().unwrap();
        waiting.within(SOON, "the waiter").unlock().unwrap();
        // A message on a shard channel reaches this node only. All nodes forward a message on a plain channel.
        let kind = usize::from(!has_shards);
        assert!(
            published()[kind] > before[kind],
            "{before:?}, {:?}",
            published()
        );
    }
}

fn queue_entries(server: &Server) -> Vec<String> {
    let queues = keys(server)
        .into_iter()
        .filter(|key| key.contains("~queue"));
    let entries = queues.flat_map(|queue| match ask(server, &["ZRANGE", &queue, "0", "-1"]) {
        Reply::Array(entries) => entries,
        other => panic!("{other}"),
    });
    entries
        .filter_map(|entry| entry.as_text().map(str::to_owned))
        .collect()
}

/// Redis has shard channels from version 7 on.
pub fn has_shard_channels(server: &Server) -> bool {
    !matches!(
        server.command(&["PUBSUB", "SHARDCHANNELS", "*"]).unwrap(),
        Reply::Error(_)
    )
}

fn subscribers(server: &Server, kind: &str) -> usize {
    match ask(server, &["PUBSUB", kind, "*"]) {
        Reply::Array(channels) => channels.len(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_loss_is_reported_by_each_node() {
    let cluster = PooledCluster::take();
    let client = client(&cluster);
    for name in key_on_each(cluster.get()) {
        let server = &cluster.get().nodes()[node_of(cluster.get(), &name)];
        let guard = lock(&client, &name);
        let lost = guard.lost_signal();
        let is_tracked = || tracked(server) > 0;
        assert!(eventually(SOON, is_tracked), "the key is tracked");
        ask(server, &["DEL", &in_redis(&name)]);
        assert_eq!(
            crate::support::lost_within(SOON, &lost),
            leasehold::LossReason::Deleted
        );
    }
}

#[test]
fn operators_reach_the_locks_of_all_nodes() {
    let cluster = PooledCluster::take();
    let (client, operator) = (client(&cluster), client(&cluster));
    for name in key_on_each(cluster.get()) {
        let guard = lock(&client, &name);
        let held = operator.mutex(&name).inspect().unwrap().unwrap();
        assert_eq!(held.holder(), client.holder_id());
        assert!(operator.mutex(&name).force_unlock().unwrap().is_some());
        crate::support::lost_within(SOON, &guard.lost_signal());
        let value = client.fenced_value(&name);
        value.write(guard.fencing_token(), "x").unwrap();
        assert_eq!(value.read().unwrap().as_deref(), Some(b"x".as_slice()));
        let ticket = lock(&client, &name).into_ticket().unwrap();
        operator.adopt(&ticket).unwrap().unlock().unwrap();
    }
    assert!(operator.ping().unwrap() < SOON);
    assert_eq!(client.held_locks().len(), 0);
    client.shutdown(SOON).unwrap();
}

#[test]
fn transactions_run_on_the_locks_node() {
    let cluster = PooledCluster::take();
    let client = client(&cluster);
    for name in key_on_each(cluster.get()) {
        let guard = lock(&client, &name);
        let data = in_slot_of(&name, "data");
        let written = guard.transaction(|_, pipe| {
            pipe.set(&data, "x").ignore();
            Ok::<_, redis::RedisError>(())
        });
        written.unwrap();
        let server = &cluster.get().nodes()[node_of(cluster.get(), &name)];
        assert_eq!(ask(server, &["GET", &data]).as_text(), Some("x"));
        guard.unlock().unwrap();
    }
}

#[test]
fn a_dropped_guard_is_released_on_its_node() {
    let cluster = cluster();
    let client = super::client(&cluster);
    for name in key_on_each(&cluster) {
        drop(lock(&client, &name));
        let server = &cluster.nodes()[node_of(&cluster, &name)];
        let is_free = || !keys(server).contains(&in_redis(&name));
        assert!(eventually(SOON, is_free), "{name}");
        assert!(script_calls(server) > 0);
    }
}
