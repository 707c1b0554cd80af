//! The slot of a lock moves to another master while the lock is held, acquired, waited for and released.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use leasehold::{Builder, Client, ErrorKind, MutexGuard};
use leasehold_testbed::{Cluster, Proxy, eventually};

use super::servers::has_shard_channels;
use super::{TestCluster, announce_proxies, has_queue, in_slot_of, key_on, keys, server_of};
use crate::bad_input::messages::assert_says;
use crate::conformance::election::Watched;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, builder, in_redis, lock, millis, secs, tracked,
};

/// The slot of key `k` of a Cluster, which node 0 serves, and which moves to node 1.
struct Move {
    cluster: TestCluster,
    key: String,
    slot: u16,
}

impl Move {
    fn prepare() -> Self {
        let cluster = TestCluster::builder().without_replicas().start();
        let key = key_on(&cluster, 0);
        let slot = cluster.slot_of(&in_redis(&key));
        Self { cluster, key, slot }
    }

    /// Moves the lock's key only: its node answers `ASK`, or `TRYAGAIN` for calls with more keys.
    fn begin(&self) {
        let lock = in_redis(&self.key);
        self.cluster.begin_move(self.slot, 1).unwrap();
        self.cluster
            .move_keys(self.slot, 1, |key| key == lock)
            .unwrap();
    }

    fn end(&self) {
        self.cluster.move_keys(self.slot, 1, |_| true).unwrap();
        self.cluster.end_move(self.slot, 1).unwrap();
    }

    /// A client, and its lock.
    fn hold(&self, ttl: Duration) -> (Client, MutexGuard) {
        let client = self.cluster.settings(steady).ttl(ttl).build().unwrap();
        let guard = lock(&client, &self.key);
        (client, guard)
    }

    /// A task of another client, which is in the queue of the lock.
    #[track_caller]
    fn wait_in_queue(&self) -> Task<MutexGuard> {
        let mutex = self.cluster.client().mutex(&self.key);
        let waiting = Task::start(move || mutex.lock().unwrap());
        let is_queued = || has_queue(server_of(&self.cluster, &self.key));
        assert!(eventually(SOON, is_queued));
        waiting
    }

    #[track_caller]
    fn assert_free(&self) {
        let lock = in_redis(&self.key);
        let is_free = || {
            !self
                .cluster
                .nodes()
                .iter()
                .any(|node| keys(node).contains(&lock))
        };
        assert!(eventually(SOON, is_free), "the lock stays");
    }
}

#[test]
fn a_held_lock_moves_with_its_slot() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(3));
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    thread::sleep(secs(5));
    guard.check().unwrap();
    assert!(guard.unlock().unwrap().is_confirmed());
    moving.assert_free();
}

#[test]
fn a_lock_is_renewed_while_its_slot_moves() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(3));
    moving.begin();
    thread::sleep(secs(5));
    guard.check().unwrap();
    moving.end();
    assert!(guard.unlock().unwrap().is_confirmed());
    moving.assert_free();
}

/// Observers of another client see each change, before, while and after the slot moves.
#[test]
fn observers_follow_a_moved_slot() {
    let moving = Move::prepare();
    let client = |ttl| moving.cluster.settings(steady).ttl(ttl).build().unwrap();
    let (leader, observing) = (client(secs(20)), client(secs(3)));
    let mut states = Watched::new(&observing, &moving.key);
    let term = leader.election(&moving.key).campaign("before").unwrap();
    states.wait_for("before");
    moving.begin();
    // While keys of the slot are on two nodes, scripts with several keys wait.
    moving.end();
    term.proclaim("after").unwrap();
    states.wait_for("after");
    term.resign().unwrap();
    states.wait_until_vacant();
    let _term = observing.election(&moving.key).campaign("next").unwrap();
    states.wait_for("next");
    assert_eq!(server_of(&moving.cluster, &moving.key).port(), {
        moving.cluster.nodes()[1].port()
    });
}

#[test]
fn permits_move_with_their_slot() {
    let moving = Move::prepare();
    let holder = moving
        .cluster
        .settings(steady)
        .ttl(secs(3))
        .build()
        .unwrap();
    let other = moving.cluster.client().semaphore(&moving.key, 2);
    let permit = holder.semaphore(&moving.key, 2).acquire().unwrap();
    moving.begin();
    thread::sleep(secs(5));
    permit.check().unwrap();
    moving.end();
    let second = other.acquire().unwrap();
    assert!(other.try_acquire().unwrap().is_none());
    for permit in [permit, second] {
        assert!(permit.unlock().unwrap().is_confirmed());
    }
    moving.assert_free();
}

/// A conversion is requested while its slot moves. It follows the slot, or it fails and leaves nothing.
#[test]
fn a_conversion_follows_its_slot() {
    for is_moving in [false, true] {
        let moving = Move::prepare();
        let client = moving
            .cluster
            .settings(steady)
            .ttl(secs(20))
            .build()
            .unwrap();
        let lock = client.rw_lock(&moving.key);
        let reader = lock.read().unwrap();
        if is_moving {
            moving.begin();
            let task = Task::start(move || reader.try_upgrade());
            thread::sleep(millis(300));
            moving.end();
            match task.within(2 * SOON, "the upgrade") {
                Ok(writer) => drop(writer.unwrap().unlock().unwrap()),
                Err(error) => assert!(error.is_unavailable(), "{error}"),
            }
            moving.assert_free();
            continue;
        }
        moving.cluster.move_slot(moving.slot, 1).unwrap();
        let writer = reader.try_upgrade().unwrap().unwrap();
        let reader = writer.downgrade().unwrap();
        assert!(reader.unlock().unwrap().is_confirmed());
        moving.assert_free();
    }
}

#[test]
fn an_acquire_follows_its_slot() {
    let moving = Move::prepare();
    let client = moving.cluster.client();
    let first = lock(&client, &moving.key);
    let token = first.fencing_token();
    first.unlock().unwrap();
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    let guard = client.mutex(&moving.key).try_lock().unwrap().unwrap();
    assert!(guard.fencing_token() > token);
    assert!(guard.unlock().unwrap().is_confirmed());
}

#[test]
fn an_acquire_waits_while_its_slot_moves() {
    let moving = Move::prepare();
    let client = moving.cluster.client();
    lock(&client, &moving.key).unlock().unwrap();
    moving.begin();
    let mutex = client.mutex(&moving.key);
    let task = Task::start(move || mutex.lock().unwrap());
    thread::sleep(millis(300));
    moving.end();
    task.within(SOON, "the acquire").unlock().unwrap();
    moving.assert_free();
}

#[test]
fn an_acquire_fails_during_a_long_move() {
    let moving = Move::prepare();
    let client = moving.cluster.settings(builder).build().unwrap();
    lock(&client, &moving.key).unlock().unwrap();
    moving.begin();
    let is_named = || {
        let error = client.mutex(&moving.key).try_lock().unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        // On a busy machine, the last attempt may have no reply.
        error.kind() == ErrorKind::Unavailable && error.to_string().contains("(TRYAGAIN)")
    };
    assert!(eventually(SOON, is_named));
    moving.end();
    lock(&client, &moving.key).unlock().unwrap();
}

#[test]
fn an_unlock_waits_while_the_slot_moves() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(60));
    moving.begin();
    let task = Task::start(move || guard.unlock().unwrap());
    thread::sleep(millis(300));
    moving.end();
    assert!(task.within(SOON, "the unlock").is_confirmed());
    moving.assert_free();
}

/// The move takes longer than the release may take.
#[test]
fn an_unlock_is_late_after_a_long_move() {
    let moving = Move::prepare();
    let client = moving.cluster.settings(builder).ttl(secs(60));
    let client = client.build().unwrap();
    let guard = lock(&client, &moving.key);
    moving.begin();
    assert!(!guard.unlock().unwrap().is_confirmed());
    moving.end();
    moving.assert_free();
}

#[test]
fn a_dropped_guard_releases_at_the_new_node() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(60));
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    drop(guard);
    moving.assert_free();
}

#[test]
fn a_guard_dropped_during_a_move_is_released() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(60));
    moving.begin();
    drop(guard);
    thread::sleep(millis(300));
    moving.end();
    moving.assert_free();
}

/// All keys of the release have moved, so the new node accepts it with `ASKING` before the move ends.
#[test]
fn a_release_reaches_the_new_node_mid_move() {
    let moving = Move::prepare();
    let (_holder, guard) = moving.hold(secs(60));
    let _other = moving.wait_in_queue();
    moving.cluster.begin_move(moving.slot, 1).unwrap();
    moving.cluster.move_keys(moving.slot, 1, |_| true).unwrap();
    drop(guard);
    // The release grants the lock to the waiter, the last one in the queue.
    let new = &moving.cluster.nodes()[1];
    let is_served = || !has_queue(new);
    assert!(eventually(SOON, is_served), "{:?}", keys(new));
    moving.cluster.end_move(moving.slot, 1).unwrap();
}

/// The new node may skip waiters whose clients do not listen there yet, so their order is not sure.
#[test]
fn all_waiters_are_served_after_a_release_mid_move() {
    let moving = Move::prepare();
    let (_holder, guard) = moving.hold(secs(60));
    let node = server_of(&moving.cluster, &moving.key);
    let waiting = [1, 2, 3].map(|n| {
        let mutex = moving.cluster.client().mutex(&moving.key);
        let task = Task::start(move || mutex.lock().unwrap().unlock().unwrap());
        let is_full =
            |key: &String| key.contains("~queue") && ask(node, &["ZCARD", key]).as_int() == Some(n);
        let is_queued = || keys(node).iter().any(is_full);
        assert!(eventually(SOON, is_queued));
        task
    });
    moving.cluster.begin_move(moving.slot, 1).unwrap();
    moving.cluster.move_keys(moving.slot, 1, |_| true).unwrap();
    drop(guard);
    moving.cluster.end_move(moving.slot, 1).unwrap();
    for waiter in waiting {
        waiter.within(SOON, "the grant of a waiter");
    }
    moving.assert_free();
}

#[test]
fn a_waiter_follows_its_slot() {
    let moving = Move::prepare();
    let (_holder, guard) = moving.hold(secs(60));
    let waiting = moving.wait_in_queue();
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    guard.unlock().unwrap();
    waiting.within(SOON, "the waiter").unlock().unwrap();
    moving.assert_free();
}

#[test]
fn a_loss_is_noticed_at_the_new_node() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(60));
    let lost = guard.lost_signal();
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    let target = &moving.cluster.nodes()[1];
    let is_tracked = || tracked(target) > 0;
    assert!(
        eventually(3 * SOON, is_tracked),
        "the key is tracked at the new node"
    );
    ask(target, &["DEL", &in_redis(&moving.key)]);
    crate::support::lost_within(SOON, &lost);
}

#[test]
fn a_transaction_follows_its_slot() {
    let moving = Move::prepare();
    let (_client, guard) = moving.hold(secs(60));
    let write = || {
        guard.transaction(|_, pipe| {
            pipe.set(in_slot_of(&moving.key, "x"), "1").ignore();
            Ok::<_, leasehold::redis::RedisError>(())
        })
    };
    write().unwrap();
    moving.cluster.move_slot(moving.slot, 1).unwrap();
    write().unwrap();
    assert!(guard.unlock().unwrap().is_confirmed());
}

/// The lowest slot of a node names the shard channels there. If that slot moves, all clients use the next one.
#[test]
fn shard_channels_follow_the_lowest_slot() {
    let cluster = Cluster::builder().without_replicas().start().unwrap();
    let node = &cluster.nodes()[0];
    if !has_shard_channels(node) {
        return;
    }
    let (holder, waiter) = (super::client(&cluster), super::client(&cluster));
    let key = key_on(&cluster, 0);
    let published = |command| node.calls(command).unwrap();
    // Whether the release of a waiter's lock publishes on the shard channel only.
    let uses_shard_channel = || {
        let before = ["spublish", "publish"].map(published);
        let guard = lock(&holder, &key);
        let mutex = waiter.mutex(&key);
        let waiting = Task::start(move || mutex.lock().unwrap());
        assert!(eventually(SOON, || has_queue(node)));
        guard.unlock().unwrap();
        waiting.within(SOON, "the waiter").unlock().unwrap();
        let after = ["spublish", "publish"].map(published);
        after[0] > before[0] && after[1] == before[1]
    };
    assert!(eventually(SOON, uses_shard_channel));
    let lowest = (0..).find(|slot| cluster.master_of(*slot) == 0).unwrap();
    assert_ne!(cluster.slot_of(&in_redis(&key)), lowest);
    cluster.move_slot(lowest, 1).unwrap();
    let names = (0..).map(|n| format!("{{{n}}}"));
    let mut moved = names.filter(|name| cluster.slot_of(&in_redis(name)) == lowest);
    let moved = moved.next().unwrap();
    for client in [&holder, &waiter] {
        lock(client, &moved).unlock().unwrap();
    }
    assert!(eventually(3 * SOON, uses_shard_channel));
}

/// The new master's replica has no link. The lock moves without its acknowledgement, but is not renewed without it.
#[test]
fn a_renewal_after_a_move_needs_acknowledgement() {
    let cluster = Cluster::start().unwrap();
    let key = key_on(&cluster, 0);
    let recorder = Recorder::new();
    let client = steady(&cluster.url()).ttl(secs(60)).renew_ratio(0.05);
    let client = client.replicas(1, millis(500));
    let client = client.event_handler(Arc::clone(&recorder)).build().unwrap();
    let guard = lock(&client, &key);
    cluster
        .move_slot(cluster.slot_of(&in_redis(&key)), 1)
        .unwrap();
    let replica = &cluster.nodes()[cluster.replica_of(1)];
    replica.stop();
    ask(&cluster.nodes()[1], &["CLIENT", "KILL", "TYPE", "replica"]);
    recorder.wait_for_more(1, What::RenewalFailed, &key);
    guard.check().unwrap();
    replica.resume();
    recorder.wait_for_more(1, What::Renewed, &key);
    assert!(keys(replica).contains(&in_redis(&key)));
    assert!(guard.unlock().unwrap().is_confirmed());
}

/// The old node carries out the first attempt, whose reply is lost with the connection, and redirects the second one.
/// The new node lacks the lease since the old node has released it, which is no loss.
#[test]
fn a_move_after_an_unlock_without_a_reply_is_no_loss() {
    let (cluster, proxies, builder, slot) = one_slot_behind_proxies();
    let recorder = Recorder::new();
    let client = |timeout| {
        let builder = builder().command_timeout(timeout);
        let builder = builder.event_handler(Arc::clone(&recorder));
        builder.build().unwrap()
    };
    let (patient, impatient) = (client(secs(8)), client(secs(2)));
    let mut from = cluster.master_of(slot);
    for (client, names) in [
        (&patient, &["a"][..]),
        (&patient, &["b", "c"]),
        (&impatient, &["d"]),
    ] {
        let is_late = client.holder_id() == impatient.holder_id();
        let guard = client.mutexes(names).lock().unwrap();
        let to = (from + 1) % 3;
        proxies[from].hold_replies(true);
        let unlocked = Task::start(|| guard.unlock());
        let is_free = |name: &&str| {
            let key = format!("{{app}}:{name}");
            ask(&cluster.nodes()[from], &["EXISTS", &key]).as_int() == Some(0)
        };
        assert!(eventually(SOON, || names.iter().all(is_free)));
        cluster.move_slot(slot, to).unwrap();
        proxies[to].hold_replies(is_late);
        proxies[from].cut_all();
        proxies[from].hold_replies(false);
        let released = unlocked.within(3 * SOON, "the releases").unwrap();
        assert!(is_late || released.is_confirmed(), "{released:?}");
        proxies[to].hold_replies(false);
        from = to;
    }
    // This waits for the late reply.
    impatient.shutdown(SOON).unwrap();
    for name in ["a", "b", "c", "d"] {
        assert_eq!(recorder.count(What::Lost, name), 0, "{name}");
    }
}

/// A Cluster, a proxy that each node announces as its address, the settings of clients whose keys are all in one slot,
/// and this slot.
fn one_slot_behind_proxies() -> (Cluster, Vec<Proxy>, impl Fn() -> Builder, u16) {
    let mut cluster = Cluster::builder().without_replicas().start().unwrap();
    let proxies = announce_proxies(&mut cluster);
    let url = proxies[0].url().replace("redis:", "redis+cluster:");
    let builder = move || steady(&url).prefix("{app}:").ttl(LONG_TTL);
    let slot = cluster.slot_of("{app}:");
    (cluster, proxies, builder, slot)
}

/// Locks of one slot that one client holds. Every second lock has moved to the node `to`; the others have not moved.
struct HalfMoved {
    cluster: Cluster,
    /// A proxy in front of each node. The node announces the proxy as its address.
    proxies: Vec<Proxy>,
    slot: u16,
    to: usize,
    guards: Vec<MutexGuard>,
}

fn name(lock: usize) -> String {
    format!("k{lock}")
}

impl HalfMoved {
    fn prepare(locks: usize, ttl: Duration) -> Self {
        let (cluster, proxies, builder, slot) = one_slot_behind_proxies();
        let client = builder().ttl(ttl).build().unwrap();
        let guards = (0..locks).map(|n| lock(&client, &name(n)));
        let guards = guards.collect();
        let from = cluster.master_of(slot);
        let to = (from + 1) % 3;
        cluster.begin_move(slot, to).unwrap();
        let even = |key: &str| key.ends_with(['0', '2', '4', '6', '8']);
        cluster.move_keys(slot, to, even).unwrap();
        Self {
            cluster,
            proxies,
            slot,
            to,
            guards,
        }
    }

    fn end(self) {
        self.cluster
            .move_keys(self.slot, self.to, |_| true)
            .unwrap();
        self.cluster.end_move(self.slot, self.to).unwrap();
        for guard in self.guards {
            assert!(guard.unlock().unwrap().is_confirmed());
        }
    }
}

/// The slot moves between the reads and the writes of the transaction.
#[test]
fn a_move_during_a_transaction_names_the_node() {
    let cluster = Cluster::builder().without_replicas().start().unwrap();
    let client = super::client(&cluster);
    let guard = lock(&client, "k");
    let slot = cluster.slot_of(&in_redis("k"));
    let from = cluster.master_of(slot);
    let error = guard.transaction(|_, pipe| {
        cluster.move_slot(slot, (from + 1) % 3).unwrap();
        pipe.set(in_slot_of("k", "data"), "x");
        Ok(())
    });
    assert_says(
        &error.map(drop).unwrap_err(),
        &cluster.nodes()[from].url(),
        "Redis is unavailable (\"k\"): ADDR: the slot of the lock's key moves to another node of the Cluster; nothing was \
         written; try again",
    );
    assert!(guard.unlock().unwrap().is_confirmed());
}

/// One renewal after the other would take 10 s for all of them.
#[test]
fn locks_of_one_slot_outlive_its_slow_move() {
    let moving = HalfMoved::prepare(400, secs(3));
    for proxy in &moving.proxies {
        proxy.delay(millis(10));
    }
    thread::sleep(secs(8));
    for proxy in &moving.proxies {
        proxy.delay(Duration::ZERO);
    }
    for guard in &moving.guards {
        guard.check().unwrap();
    }
    moving.end();
}

/// Until the slot has moved, one worker renews the locks that have moved and those that stay.
#[test]
fn a_silent_new_node_costs_no_unmoved_lock() {
    let moving = HalfMoved::prepare(40, secs(3));
    moving.proxies[moving.to].black_hole(true);
    thread::sleep(secs(8));
    let (stays, moved): (Vec<_>, Vec<_>) = moving
        .guards
        .iter()
        .enumerate()
        .partition(|(lock, _)| lock % 2 == 1);
    for (lock, guard) in stays {
        assert!(guard.check().is_ok(), "lock {lock} has not moved");
    }
    assert!(moved.iter().all(|(_, guard)| guard.check().is_err()));
    moving.proxies[moving.to].black_hole(false);
}

/// Plain commands set a key whose slot has no fence counter, so the client asks the script for the grant. Before that,
/// `change` moves the slot.
#[track_caller]
fn assert_held_after_a_move_between(change: impl FnOnce(&Cluster, u16, usize, &Proxy)) {
    let (cluster, proxies, builder, slot) = one_slot_behind_proxies();
    let client = builder().build().unwrap();
    let from = cluster.master_of(slot);
    let to = (from + 1) % 3;
    let (source, target) = (&cluster.nodes()[from], &cluster.nodes()[to]);
    let before = source.calls("exec").unwrap();
    // Connects the pipeline of this key. It could not do so later, since the proxy holds the replies.
    for _ in 0..4 {
        lock(&client, "x").unlock().unwrap();
    }
    let transactions = source.calls("exec").unwrap() - before;
    assert!(transactions > 1, "plain commands are in use");
    for counter in keys(source) {
        ask(source, &["DEL", &counter]);
    }
    proxies[from].hold_replies(true);
    let guard = thread::scope(|scope| {
        let task = scope.spawn(|| lock(&client, "x"));
        let is_set = || ask(source, &["EXISTS", "{app}:x"]).as_int() == Some(1);
        assert!(eventually(SOON, is_set));
        change(&cluster, slot, to, &proxies[from]);
        task.join().unwrap()
    });
    let value = || ask(target, &["GET", "{app}:x"]).to_string();
    let granted = value();
    // A release of an earlier attempt would come at once, or after a pause of 200 ms.
    thread::sleep(millis(600));
    assert_eq!(value(), granted);
    assert!(guard.unlock().unwrap().is_confirmed());
}

#[test]
fn move_done_before_the_script_costs_no_lock() {
    assert_held_after_a_move_between(|cluster, slot, to, proxy| {
        cluster.move_slot(slot, to).unwrap();
        proxy.hold_replies(false);
    });
}

#[test]
fn move_begun_before_the_script_costs_no_lock() {
    assert_held_after_a_move_between(|cluster, slot, to, proxy| {
        cluster.begin_move(slot, to).unwrap();
        cluster.move_keys(slot, to, |key| key == "{app}:x").unwrap();
        proxy.hold_replies(false);
        thread::sleep(millis(100));
        cluster.move_keys(slot, to, |_| true).unwrap();
        cluster.end_move(slot, to).unwrap();
    });
}
