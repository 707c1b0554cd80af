//! Waiters, split votes, and losses that nodes report.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use leasehold::{LossReason, MemoryQuorum};
use leasehold_testbed::{Proxy, Server, eventually};

use super::nodes::{Nodes, builder};
use crate::support::{
    SOON, Task, ask, in_redis, is_held, lock, lost_within, millis, script_calls, secs, tracked,
};

/// Waits until the nodes get few scripts in a second. A waiter polls until its notification connections are open.
#[track_caller]
fn assert_become_few(calls: impl Fn() -> u64, most: f64) {
    let mut rate = 0.0;
    let are_few = eventually(3 * SOON, || {
        let (begun, before) = (Instant::now(), calls());
        thread::sleep(millis(1_500));
        rate = (calls() - before) as f64 / begun.elapsed().as_secs_f64();
        rate <= most
    });
    assert!(are_few, "{rate} scripts in a second");
}

/// A waiter that polled would ask some 20 times a second, and more at first.
#[test]
fn a_waiter_is_notified_by_the_nodes() {
    let nodes = Nodes::start(3);
    let (holder, other) = (nodes.client(), nodes.client());
    let guard = lock(&holder, "k");
    nodes.bring_to_all(&guard, "k");
    let waits = Task::start(move || drop(other.mutex("k").lock().unwrap()));
    // The holder tracks the key, too.
    let are_tracked = || nodes.0.iter().all(|node| tracked(node) == 2);
    assert!(eventually(SOON, are_tracked));
    // Five attempts, each of which asks all nodes.
    let calls = || nodes.0.iter().map(script_calls).sum::<u64>();
    assert_become_few(calls, 3.0 * 5.0);
    assert!(!waits.is_done());
    guard.unlock().unwrap();
    waits.within(SOON, "the waiter's turn");
    nodes.assert_all_become_free();
}

/// The node that lacks the key grants it to the waiter, which gives it up. The holder then asks all nodes whether it still
/// has the lock, which must not wake the waiter again.
#[test]
fn a_waiter_asks_seldom_while_a_node_lacks_the_key() {
    let nodes = Nodes::start(3);
    let (holder, other) = (nodes.client(), nodes.client());
    let guard = lock(&holder, "k");
    nodes.bring_to_all(&guard, "k");
    let waits = Task::start(move || drop(other.mutex("k").lock().unwrap()));
    // The holder tracks the key, too.
    let are_tracked = || nodes.0.iter().all(|node| tracked(node) == 2);
    assert!(eventually(SOON, are_tracked));
    ask(&nodes.0[1], &["DEL", &in_redis("k")]);
    // Up to two attempts, each with two questions of the holder.
    assert_become_few(|| script_calls(&nodes.0[0]), 8.0);
    guard.unlock().unwrap();
    waits.within(SOON, "the waiter's turn");
    nodes.assert_all_become_free();
}

/// Changed keys are read every 10 ms only, and another client may have the key again by then. So a change of a key that
/// is present counts as its release, if a majority reports it.
#[test]
fn a_waiter_asks_soon_after_a_change() {
    let nodes = Nodes::start(3);
    let holder = nodes.builder().ttl(secs(20)).build().unwrap();
    let (other, guard) = (nodes.client(), lock(&holder, "k"));
    let waits = Task::start(move || drop(other.mutex("k").lock().unwrap()));
    // The holder tracks the key, too.
    let are_tracked = || nodes.0.iter().all(|node| tracked(node) == 2);
    let calls = || nodes.0.iter().map(script_calls).sum::<u64>();
    let mut at_once = 0;
    for _ in 0..12 {
        assert!(eventually(SOON, are_tracked));
        let before = calls();
        let begin = Instant::now();
        // A longer ttl changes the key, as a release does.
        guard.extend(guard.remaining() + secs(1)).unwrap();
        // Three scripts for the extension, and three for the attempt.
        assert!(eventually(SOON, || calls() >= before + 6), "an attempt");
        // Without notifications, the waiter asks at least half a second after its last attempt.
        at_once += usize::from(begin.elapsed() < millis(400));
    }
    // Usually eleven times. If a node's read comes after its change, and before a majority has reported the change, the
    // key counts as present there again.
    assert!(at_once >= 2, "{at_once} times");
    guard.unlock().unwrap();
    waits.within(SOON, "the waiter's turn");
    nodes.assert_all_become_free();
}

/// It is notified later than the others, and its requests come later.
#[test]
fn a_distant_client_is_not_shut_out() {
    let nodes = Nodes::start(3);
    let proxy = |node: &Server| Proxy::start(node.port()).unwrap();
    let proxies: Vec<Proxy> = nodes.0.iter().map(proxy).collect();
    let distant = builder(proxies.iter().map(Proxy::url).collect());
    let distant = distant.build().unwrap();
    drop(lock(&distant, "other"));
    proxies.iter().for_each(|proxy| proxy.delay(millis(5)));
    let [turns, grants] = [0; 2].map(AtomicU64::new);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in [nodes.client(), nodes.client()] {
            let (turns, ended) = (&turns, &ended);
            scope.spawn(move || {
                while !ended.load(Ordering::SeqCst) {
                    let guard = lock(&client, "k");
                    thread::sleep(millis(40));
                    guard.unlock().unwrap();
                    turns.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // The threads go on until `ended` is set. A failure here has to set it, too: the scope waits for its threads.
        let all_run = eventually(SOON, || turns.load(Ordering::SeqCst) > 10);
        ended.store(!all_run, Ordering::SeqCst);
        assert!(all_run, "{turns:?} turns");
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                // It may take longer than `lock` waits.
                drop(distant.mutex("k").lock().unwrap());
                grants.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Each grant usually takes 2 to 4 s, since an attempt finds the key free by chance only.
        let is_served = eventually(6 * SOON, || grants.load(Ordering::SeqCst) >= 3);
        ended.store(true, Ordering::SeqCst);
        assert!(is_served, "{grants:?}");
    });
    nodes.assert_all_become_free();
}

#[test]
fn a_forced_release_ends_the_lease_on_a_quorum() {
    let nodes = Nodes::start(3);
    let (holder, operator) = (nodes.client(), nodes.client());
    let guard = lock(&holder, "k");
    let are_tracked = || nodes.0.iter().all(|node| tracked(node) > 0);
    assert!(eventually(SOON, are_tracked));
    let taken = operator.mutex("k").force_unlock().unwrap().unwrap();
    assert_eq!(taken.holder(), holder.holder_id());
    // No renewal is due before this time is over.
    lost_within(SOON, &guard.lost_signal());
    drop(lock(&operator, "k"));
    nodes.assert_all_become_free();
}

#[test]
fn one_node_without_the_key_ends_no_lease() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let mut guard = lock(&client, "k");
    let has_lock = |node: &Server| is_held(node, "k") && tracked(node) > 0;
    // A call ends with the grants of a majority, and may drop the request to the last node.
    let is_everywhere = eventually(SOON, || {
        let is_granted = eventually(secs(1), || nodes.0.iter().all(has_lock));
        if !is_granted {
            client.mutex("k").force_unlock().unwrap();
            guard = lock(&client, "k");
        }
        is_granted
    });
    assert!(is_everywhere);
    // No probe comes among the counted requests before ten more seconds.
    let clocks_are_read = || {
        let states = client.nodes().unwrap();
        states.iter().all(|node| node.clock().is_some())
    };
    assert!(eventually(SOON, clocks_are_read));
    let delete = |node: &Server| ask(node, &["DEL", &in_redis("k")]);
    let before = script_calls(&nodes.0[0]);
    delete(&nodes.0[0]);
    // The client asks all nodes, and a majority has the lease.
    assert!(eventually(SOON, || script_calls(&nodes.0[0]) > before));
    guard.check().unwrap();
    delete(&nodes.0[1]);
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Deleted);
}

#[test]
fn a_client_that_asks_again_at_once_pauses() {
    let client = MemoryQuorum::new(3).client().unwrap();
    let guard = lock(&client, "k");
    let begin = Instant::now();
    guard.unlock().unwrap();
    drop(lock(&client, "k"));
    // At least half of four round trips, which count as half a millisecond.
    assert!(begin.elapsed() >= millis(1), "{:?}", begin.elapsed());
}

/// Without turns for others, a client that asks again at once gets hundreds of grants for each grant of another.
#[test]
fn a_client_leaves_turns_to_others() {
    const TURNS: usize = 30;
    let nodes = Nodes::start(3);
    let (greedy, other) = (nodes.client(), nodes.client());
    let grants = Arc::new(AtomicU64::new(0));
    let of_greedy = Arc::clone(&grants);
    let waits = Task::start(move || {
        let one_turn = || {
            // The greedy client has the lock again, or has just had it.
            let before = of_greedy.load(Ordering::Relaxed);
            while of_greedy.load(Ordering::Relaxed) == before {
                thread::yield_now();
            }
            let guard = other.mutex("k").lock().unwrap();
            let passed = of_greedy.load(Ordering::Relaxed) - before;
            guard.unlock().unwrap();
            passed
        };
        let mut passed: Vec<u64> = (0..TURNS).map(|_| one_turn()).collect();
        passed.sort_unstable();
        passed
    });
    while !waits.is_done() {
        let guard = lock(&greedy, "k");
        thread::sleep(millis(3));
        guard.unlock().unwrap();
        let granted = grants.fetch_add(1, Ordering::Relaxed);
        assert!(granted < 600 * TURNS as u64, "the other client waits");
    }
    // A busy machine may delay the other client at some of its turns.
    let passed = waits.within(SOON, "the other client's turns");
    assert!(passed[TURNS * 4 / 5] <= 6, "{passed:?}");
    nodes.assert_all_become_free();
}

#[test]
fn contending_clients_of_a_quorum_all_get_the_lock() {
    let nodes = Nodes::start(3);
    let total = Arc::new(AtomicU64::new(0));
    let start = |_| {
        let (client, total) = (nodes.client(), Arc::clone(&total));
        Task::start(move || {
            for _ in 0..10 {
                let guard = client.mutex("k").lock().unwrap();
                let seen = total.load(Ordering::SeqCst);
                thread::sleep(millis(1));
                total.store(seen + 1, Ordering::SeqCst);
                guard.unlock().unwrap();
            }
        })
    };
    let tasks: Vec<Task<()>> = (0..4).map(start).collect();
    for task in tasks {
        task.within(6 * SOON, "ten grants of a client");
    }
    assert_eq!(total.load(Ordering::SeqCst), 40, "lost updates");
    nodes.assert_all_become_free();
}
