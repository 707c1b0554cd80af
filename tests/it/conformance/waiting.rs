//! Waiting for a lock: in a queue, for a chosen time, without a missed wake-up.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task, Witness, millis};

/// Waits until the queue of the lock has `of` clients.
#[track_caller]
fn wait_for_queue(client: &Client, of: usize) {
    let waiting = || client.mutex("k").inspect().unwrap();
    let there = eventually(SOON, || {
        waiting().is_some_and(|found| found.clients_waiting() == of)
    });
    assert!(there, "not {of} queued: {:?}", waiting());
}

pub fn a_release_admits_a_waiter(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    for let_go in [
        |guard| drop(guard),
        |guard: leasehold::MutexGuard| {
            guard.unlock().unwrap();
        },
    ] {
        let held = one.mutex("k").lock().unwrap();
        let mutex = two.mutex("k");
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&one, 1);
        let_go(held);
        waiter.within(SOON, "the grant").unlock().unwrap();
    }
}

pub fn a_flush_admits_a_waiter(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let _held = one.mutex("k").lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&one, 1);
    backend.forget();
    waiter.within(SOON, "the grant").unlock().unwrap();
}

pub fn max_hold_bounds_a_wait(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let guard = one.mutex("k").max_hold(ttl).lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&two, 1);
    backend.pass(ttl + ttl / 10);
    let next = waiter.within(SOON, "the grant");
    assert!(guard.is_lost());
    next.unlock().unwrap();
}

pub fn an_expired_lock_admits_one_of_many(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let clients: Vec<_> = (0..4).map(|_| backend.client()).collect();
    let _expired = clients[0].mutex("k").fixed_ttl(ttl).lock().unwrap();
    let witness = Arc::new(Witness::default());
    let waiters: Vec<_> = clients[1..]
        .iter()
        .cycle()
        .take(9)
        .map(|client| {
            let (mutex, witness) = (client.mutex("k"), Arc::clone(&witness));
            Task::start(move || {
                let guard = mutex.lock().unwrap();
                let inside = witness.enter(&guard);
                std::thread::yield_now();
                drop(inside);
            })
        })
        .collect();
    wait_for_queue(&clients[0], 3);
    backend.pass(ttl + ttl / 10);
    for waiter in waiters {
        waiter.within(2 * SOON, "the grant");
    }
    assert_eq!(witness.entries(), 9);
}

pub fn a_wait_ends_at_its_limit(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.try_lock_for(ttl / 2).unwrap().is_none());
    wait_for_queue(&one, 1);
    backend.pass(ttl / 2);
    assert!(waiter.within(SOON, "the deadline"));
    wait_for_queue(&one, 0);
    held.unlock().unwrap();
    assert!(!two.mutex("k").is_locked().unwrap(), "it left the queue");
}

pub fn a_deadline_in_the_past_is_one_try(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let now = Instant::now();
    let free = one.mutex("k").try_lock_until(now).unwrap();
    assert!(free.is_some());
    assert!(two.mutex("k").try_lock_until(now).unwrap().is_none());
}

pub fn a_wait_that_is_cancelled_ends(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    let (stop, stopped) = bounded(0);
    let mutex = two.mutex("k").cancelled_by(stopped);
    let waiter = Task::start(move || mutex.lock().map(drop).unwrap_err());
    wait_for_queue(&one, 1);
    drop(stop);
    let error = waiter.within(SOON, "the end of its wait");
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    wait_for_queue(&one, 0);
    held.unlock().unwrap();
}

pub fn clients_are_served_in_arrival_order(backend: &dyn Backend) {
    let clients: Vec<_> = (0..5).map(|_| backend.client()).collect();
    let held = clients[0].mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for (n, client) in clients.iter().enumerate().skip(1) {
        let (mutex, order) = (client.mutex("k"), Arc::clone(&order));
        waiters.push(Task::start(move || {
            let guard = mutex.lock().unwrap();
            order.lock().unwrap().push(n);
            guard.unlock().unwrap();
        }));
        wait_for_queue(client, n);
    }
    held.unlock().unwrap();
    for waiter in waiters {
        waiter.within(SOON, "the grant");
    }
    assert_eq!(*order.lock().unwrap(), [1, 2, 3, 4]);
}

pub fn departed_waiters_are_skipped(backend: &dyn Backend) {
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let held = clients[0].mutex("k").lock().unwrap();
    let mut waiters = Vec::new();
    for (n, client) in clients.iter().enumerate().skip(1) {
        let mutex = client.mutex("k");
        waiters.push(Task::start(move || mutex.lock()));
        wait_for_queue(client, n);
    }
    clients[1].shutdown(SOON).unwrap();
    held.unlock().unwrap();
    let mut outcomes = waiters.into_iter().map(|one| one.within(SOON, "the grant"));
    let gone = outcomes.next().expect("two waited").map(drop).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Shutdown);
    outcomes
        .next()
        .expect("two waited")
        .unwrap()
        .unlock()
        .unwrap();
}

pub fn threads_of_one_client_served_in_arrival_order(backend: &dyn Backend) {
    let client = backend.builder().max_hand_offs(1023).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..6)
        .map(|n| {
            let (mutex, order) = (client.mutex("k"), Arc::clone(&order));
            Task::start_blocked(move || {
                let guard = mutex.lock().unwrap();
                order.lock().unwrap().push((n, guard.fencing_token()));
            })
        })
        .collect();
    drop(held);
    for waiter in waiters {
        waiter.within(SOON, "the grant");
    }
    let order = order.lock().unwrap();
    assert!(order.is_sorted_by(|one, next| one.0 < next.0 && one.1 < next.1));
    assert_eq!(order.len(), 6);
}

pub fn a_busy_client_starves_no_other(backend: &dyn Backend) {
    let busy = backend.builder().max_hand_offs(8).build().unwrap();
    let other = backend.client();
    let held = busy.mutex("k").lock().unwrap();
    let mutex = other.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap().unlock());
    wait_for_queue(&other, 1);
    let (stop, stopped) = bounded::<()>(0);
    let busy_threads: Vec<_> = (0..3)
        .map(|_| {
            let (mutex, stopped) = (busy.mutex("k"), stopped.clone());
            Task::start(move || {
                while stopped
                    .recv_timeout(millis(0))
                    .is_err_and(|e| e.is_timeout())
                {
                    drop(mutex.lock().unwrap());
                }
            })
        })
        .collect();
    drop(held);
    waiter.within(SOON, "a turn among many").unwrap();
    drop(stop);
    for thread in busy_threads {
        thread.within(SOON, "its end");
    }
}

pub fn shutdown_ends_waits_and_keeps_locks_in_redis(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("held").lock().unwrap();
    let wanted = two.mutex("k").lock().unwrap();
    let mutex = one.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop).unwrap_err());
    wait_for_queue(&two, 1);
    one.shutdown(SOON).unwrap();
    let error = waiter.within(SOON, "the end of its wait");
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    assert!(held.is_lost());
    assert!(two.mutex("held").is_locked().unwrap(), "not released");
    wait_for_queue(&two, 0);
    wanted.unlock().unwrap();
    drop(held);
    let free = eventually(SOON, || !two.mutex("held").is_locked().unwrap());
    assert!(free, "released by its guard");
}
