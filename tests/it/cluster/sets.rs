//! Sets of keys in several slots of a Cluster.

use leasehold::ErrorKind;
use leasehold_testbed::eventually;

use super::{TestCluster, has_queue, in_slot_of, key_on, key_on_each, keys, server_of};
use crate::support::{SOON, Task, in_redis, script_calls, warm_up};

fn start() -> TestCluster {
    TestCluster::builder().without_replicas().start()
}

fn calls(cluster: &TestCluster) -> u64 {
    cluster.nodes().iter().map(script_calls).sum()
}

#[test]
fn a_set_takes_two_requests_for_each_slot() {
    let cluster = start();
    let client = cluster.client();
    let bases = key_on_each(&cluster);
    let mut names = Vec::new();
    for base in &bases {
        client.mutex(base).lock().unwrap().unlock().unwrap();
        names.extend((0..4).map(|n| in_slot_of(base, n)));
    }
    warm_up(&client);
    let set = client.mutexes(&names);
    set.lock().unwrap().unlock().unwrap();
    let before = calls(&cluster);
    set.lock().unwrap().unlock().unwrap();
    assert!(
        calls(&cluster) - before <= 6,
        "{}",
        calls(&cluster) - before
    );
    let before = calls(&cluster);
    let all = set.try_lock().unwrap().unwrap();
    let tried = calls(&cluster) - before;
    assert!(tried <= 3, "{tried}");
    assert!(
        cluster
            .client()
            .mutexes(&names)
            .try_lock()
            .unwrap()
            .is_none()
    );
    all.unlock().unwrap();
}

#[test]
fn a_transaction_needs_keys_in_one_slot() {
    let cluster = start();
    let client = cluster.client();
    let [one, other, _] = key_on_each(&cluster);
    let (near, far) = (in_slot_of(&one, "near"), other);
    let far_data = in_redis(&far);
    let both = client.mutexes([&one, &far]).lock().unwrap();
    let error = both.transaction(|_, pipe| {
        pipe.set(&far_data, 1);
        Ok(())
    });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::CrossSlot);
    both.unlock().unwrap();
    let both = client.mutexes([&one, &near]).lock().unwrap();
    let data = in_slot_of(&one, "data");
    let written = both.transaction(|_, pipe| {
        pipe.set(&data, "written");
        Ok(())
    });
    written.unwrap();
    both.unlock().unwrap();
}

#[test]
fn a_slot_moves_between_two_requests_of_a_set() {
    let cluster = start();
    let (one, two) = (cluster.client(), cluster.client());
    let set = one.mutexes([key_on(&cluster, 0), key_on(&cluster, 1)]);
    let order: Vec<String> = set.keys().map(str::to_owned).collect();
    let (first, last) = (&order[0], &order[1]);
    let held = two.mutex(last).lock().unwrap();
    let waiting = Task::start(move || set.lock().unwrap());
    assert!(eventually(SOON, || has_queue(server_of(&cluster, last))));
    // Both slots move: that of the key that the set has, and that of the key for which it waits.
    for key in [first, last] {
        cluster
            .move_slot(cluster.slot_of(&in_redis(key)), 2)
            .unwrap();
    }
    held.unlock().unwrap();
    let all = waiting.within(4 * SOON, "both keys");
    all.check().unwrap();
    assert!(two.mutex(first).try_lock().unwrap().is_none());
    all.unlock().unwrap();
    let is_free = || {
        let mut nodes = cluster.nodes().iter();
        nodes.all(|node| order.iter().all(|key| !keys(node).contains(&in_redis(key))))
    };
    assert!(eventually(SOON, is_free));
}
