//! Locks in use by several clients and threads, while their slots move and replicas take over without loss of data.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_testbed::eventually;

use super::{cluster, key_on_each, keys};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, Witness, in_redis, within};

#[test]
fn holders_exclude_each_other_while_slots_move() {
    let cluster = cluster();
    let names = key_on_each(&cluster);
    let slots = names
        .each_ref()
        .map(|name| cluster.slot_of(&in_redis(name)));
    let clients = [(); 2].map(|()| {
        let builder = steady(&cluster.url()).ttl(LONG_TTL);
        builder.build().unwrap()
    });
    let stop = Arc::new(AtomicBool::new(false));
    let witnesses = [(); 3].map(|()| Arc::new(Witness::default()));
    let mut turns = Vec::new();
    for (name, witness) in names.iter().zip(&witnesses) {
        for client in clients.iter().chain(&clients) {
            let (mutex, witness, stop) =
                (client.mutex(name), Arc::clone(witness), Arc::clone(&stop));
            turns.push(Task::start(move || {
                while !stop.load(Ordering::Relaxed) {
                    let guard = mutex.lock().unwrap();
                    drop(witness.enter(&guard));
                    if witness.entries() % 2 == 0 {
                        let released = guard.unlock().unwrap();
                        assert!(released.is_confirmed(), "{released:?}");
                    }
                }
            }));
        }
    }
    let entries = || witnesses.each_ref().map(|witness| witness.entries());
    let all_went_on = |before: [usize; 3]| {
        eventually(3 * SOON, || {
            entries()
                .iter()
                .zip(before)
                .all(|(now, before)| *now > before + 2)
        })
    };
    let faults = within(12 * SOON, "moves and fail-overs", {
        let cluster = Arc::new(cluster);
        let kept = Arc::clone(&cluster);
        move || {
            for round in 0..2 {
                for (index, slot) in slots.into_iter().enumerate() {
                    let from = cluster.master_of(slot);
                    let masters = [0, 1, 2].map(|first| cluster.master_of(first * 5_462));
                    let to = masters[(index + round + 1) % 3];
                    if to != from {
                        cluster.move_slot(slot, to).unwrap();
                    }
                }
                let master = cluster.master_of(slots[round]);
                cluster.fail_over(master).unwrap();
                cluster.wait_until_ok().unwrap();
            }
            kept
        }
    });
    let before = entries();
    assert!(all_went_on(before), "{before:?}, then {:?}", entries());
    stop.store(true, Ordering::Relaxed);
    for turn in turns {
        turn.within(3 * SOON, "a thread's last turn");
    }
    let left = || -> Vec<String> {
        let all = faults.nodes().iter().flat_map(keys);
        all.filter(|key| !key.contains("~fence")).collect()
    };
    assert!(eventually(SOON, || left().is_empty()), "{:?}", left());
}
