//! A grant and a cancellation at the same time: some waiter gets the lock in every case.

use std::sync::{Arc, Mutex as Shared};
use std::thread;

use leasehold::ErrorKind;
use leasehold::crossbeam_channel::{bounded, unbounded};

use crate::support::{SOON, Task, Witness, assert_all_become_free, server, wait_for_queue};

use super::client;

#[test]
fn a_grant_to_a_cancelled_waiter_passes_on() {
    let server = server();
    let (holder, waiting, other) = (client(&server), client(&server), client(&server));
    for round in 0..40 {
        let held = holder.mutex("k").lock().unwrap();
        let (stop, stopped) = bounded(1);
        let mutex = waiting.mutex("k").cancelled_by(stopped);
        let first = Task::start(move || mutex.lock().map(drop));
        wait_for_queue(&server, "k", 1);
        let mutex = other.mutex("k");
        let next = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, "k", 2);
        // Both happen at the same time, in either order.
        let releasing = Task::start(move || held.unlock().unwrap());
        if round % 2 == 0 {
            thread::yield_now();
        }
        drop(stop);
        releasing.within(SOON, "the release");
        if let Err(error) = first.within(SOON, "the end of its wait") {
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        }
        next.within(SOON, "the grant").unlock().unwrap();
    }
    assert_all_become_free(&server);
}

#[test]
fn hand_offs_to_cancelled_waiters_pass_on() {
    let server = server();
    let client = client(&server);
    for round in 0..100 {
        let held = client.mutex("k").lock().unwrap();
        let (stop, stopped) = bounded(1);
        let mutex = client.mutex("k").cancelled_by(stopped);
        let first = Task::start_blocked(move || mutex.lock().map(drop));
        let mutex = client.mutex("k");
        let next = Task::start_blocked(move || mutex.lock().unwrap());
        // Both happen at the same time, in either order.
        let releasing = Task::start(move || drop(held));
        if round % 2 == 0 {
            thread::yield_now();
        }
        drop(stop);
        releasing.within(SOON, "the release");
        if let Err(error) = first.within(SOON, "the end of its wait") {
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        }
        let guard = next.within(SOON, "the grant");
        guard.check().unwrap();
        guard.unlock().unwrap();
    }
    assert_all_become_free(&server);
}

#[test]
fn cancellable_waiters_get_their_turns() {
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    let (_stop, stopped) = unbounded();
    let witness = Arc::new(Witness::default());
    let order = Arc::new(Shared::new(Vec::new()));
    let clients = [client(&server), client(&server)];
    let mut tasks = Vec::new();
    for (place, client) in clients.iter().enumerate() {
        for thread in 0..6 {
            let mut mutex = client.mutex("k");
            if thread % 3 < 2 {
                mutex = mutex.cancelled_by(stopped.clone());
            }
            let (witness, order) = (Arc::clone(&witness), Arc::clone(&order));
            tasks.push(Task::start_blocked(move || {
                let guard = mutex.lock().unwrap();
                let inside = witness.enter(&guard);
                order.lock().unwrap().push((place, thread));
                drop(inside);
                if thread % 2 == 0 {
                    guard.unlock().unwrap();
                }
            }));
            if thread == 0 {
                wait_for_queue(&server, "k", place + 1);
            }
        }
    }
    drop(held);
    for task in tasks {
        task.within(SOON, "a grant");
    }
    let order = order.lock().unwrap();
    for place in [0, 1] {
        let of_one = order.iter().filter(|turn| turn.0 == place);
        let threads: Vec<usize> = of_one.map(|turn| turn.1).collect();
        assert_eq!(threads, [0, 1, 2, 3, 4, 5], "in the order they came");
    }
    assert_eq!(witness.entries(), 12);
}

#[test]
fn random_cancellations_keep_order_and_exclusion() {
    const CLIENTS: usize = 3;
    const THREADS: usize = 3;
    let server = server();
    let witness = Arc::new(Witness::default());
    let (stop, stopped) = unbounded();
    let tasks: Vec<_> = (0..CLIENTS)
        .flat_map(|_| vec![client(&server); THREADS])
        .map(|client| {
            let mutex = client.mutex("k").cancelled_by(stopped.clone());
            let witness = Arc::clone(&witness);
            Task::start(move || {
                let (mut granted, mut cancelled) = (0, 0);
                while granted < 60 {
                    match mutex.lock() {
                        Ok(guard) => {
                            granted += 1;
                            drop(witness.enter(&guard));
                            if granted % 4 == 0 {
                                guard.unlock().unwrap();
                            }
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                            cancelled += 1;
                        }
                    }
                }
                cancelled
            })
        })
        .collect();
    let mut sent = 0;
    while !tasks.iter().all(Task::is_done) {
        if stop.is_empty() {
            stop.send(()).unwrap();
            sent += 1;
        }
        thread::yield_now();
    }
    let cancelled: usize = tasks
        .into_iter()
        .map(|task| task.within(SOON, "all grants"))
        .sum();
    assert!(cancelled > 0 && cancelled <= sent, "{cancelled} of {sent}");
    assert_eq!(witness.entries(), CLIENTS * THREADS * 60);
    assert_all_become_free(&server);
}
