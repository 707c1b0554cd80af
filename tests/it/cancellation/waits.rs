//! A cancellation ends the right wait at once, by each way to cancel and in each stage. Other waits continue.

use std::sync::{Arc, Mutex as Shared};
use std::thread;

use leasehold::crossbeam_channel::{bounded, unbounded};
use leasehold::{Error, Mutex};
use leasehold_testbed::{Server, eventually};

use crate::support::{
    LONG_TTL, SOON, Task, assert_all_become_free, builder, lock_requests, millis, server, value_of,
    wait_for_queue, warm_up,
};

use super::{WAYS, WORK, assert_cancelled, client};

/// The methods that wait. None of them may return before the cancellation.
fn wait_by(form: usize, mutex: &Mutex) -> Result<(), Error> {
    match form {
        0 => mutex.lock().map(drop),
        1 => mutex.try_lock_for(WORK).map(drop),
        2 => mutex.with(|_| ()),
        _ => mutex
            .try_lock_until(std::time::Instant::now() + WORK)
            .map(drop),
    }
}

#[test]
fn a_wait_for_another_client_is_cancelled_at_once() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    for way in WAYS {
        for form in 0..4 {
            let (stop, stopped) = bounded(1);
            let mutex = waiting.mutex("k").cancelled_by(stopped);
            let waiter = Task::start(move || wait_by(form, &mutex));
            wait_for_queue(&server, "k", 1);
            let kept = way(stop);
            assert_cancelled(waiter.within(SOON, "the cancellation"));
            wait_for_queue(&server, "k", 0);
            drop(kept);
        }
    }
    held.unlock().unwrap();
    waiting.with_lock("k", || ()).unwrap();
}

#[test]
fn a_wait_for_another_thread_of_the_client_is_cancelled_at_once() {
    let server = server();
    let client = client(&server);
    let held = client.mutex("k").lock().unwrap();
    let value = value_of(&server, "k");
    for way in WAYS {
        for form in 0..4 {
            let (stop, stopped) = bounded(1);
            let mutex = client.mutex("k").cancelled_by(stopped);
            let waiter = Task::start_blocked(move || wait_by(form, &mutex));
            let kept = way(stop);
            assert_cancelled(waiter.within(SOON, "the cancellation"));
            drop(kept);
        }
    }
    assert_eq!(value_of(&server, "k"), value, "untouched");
    held.unlock().unwrap();
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn a_cancelled_wait_leaves_the_other_waiters_queued() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    for held_by_us in [true, false] {
        let by = if held_by_us { &waiting } else { &holder };
        let held = by.mutex("k").lock().unwrap();
        let order = Arc::new(Shared::new(Vec::new()));
        let (stop, stopped) = unbounded();
        let tasks: Vec<_> = (0..7)
            .map(|n| {
                let mut mutex = waiting.mutex("k");
                if n % 2 == 1 {
                    mutex = mutex.cancelled_by(stopped.clone());
                }
                let order = Arc::clone(&order);
                Task::start_blocked(move || {
                    let guard = mutex.lock()?;
                    order.lock().unwrap().push(n);
                    drop(guard);
                    Ok::<(), Error>(())
                })
            })
            .collect();
        drop((stop, stopped));
        let (cancelled, others): (Vec<_>, Vec<_>) =
            tasks.into_iter().enumerate().partition(|(n, _)| n % 2 == 1);
        for (_, task) in cancelled {
            assert_cancelled(task.within(SOON, "the cancellation"));
        }
        held.unlock().unwrap();
        for (_, task) in others {
            task.within(SOON, "a grant").unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [0, 2, 4, 6]);
    }
    assert_all_become_free(&server);
}

#[test]
fn the_next_thread_replaces_a_cancelled_first_waiter() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    let (stop, stopped) = bounded(1);
    let first = waiting.mutex("k").cancelled_by(stopped);
    let first = Task::start(move || first.lock().map(drop));
    wait_for_queue(&server, "k", 1);
    let before = value_of(&server, "k");
    let next = waiting.mutex("k");
    let next = Task::start_blocked(move || next.lock().unwrap());
    drop(stop);
    assert_cancelled(first.within(SOON, "the cancellation"));
    assert_eq!(
        value_of(&server, "k"),
        before,
        "the client's queue entry is kept"
    );
    held.unlock().unwrap();
    let guard = next.within(SOON, "the grant");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn cancelled_clients_keep_the_order_of_others() {
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    let order = Arc::new(Shared::new(Vec::new()));
    let (stop, stopped) = unbounded();
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let mut mutex = client(&server).mutex("k");
            // Cancel the first waiter, the last, and two neighbours.
            if [0, 3, 4, 7].contains(&n) {
                mutex = mutex.cancelled_by(stopped.clone());
            }
            let order = Arc::clone(&order);
            let task = Task::start(move || {
                let guard = mutex.lock()?;
                order.lock().unwrap().push(n);
                drop(guard);
                Ok::<(), Error>(())
            });
            wait_for_queue(&server, "k", n + 1);
            task
        })
        .collect();
    drop(stop);
    wait_for_queue(&server, "k", 4);
    held.unlock().unwrap();
    for (n, task) in tasks.into_iter().enumerate() {
        let outcome = task.within(SOON, "the end of a wait");
        assert_eq!(outcome.is_err(), [0, 3, 4, 7].contains(&n), "{outcome:?}");
    }
    assert_eq!(*order.lock().unwrap(), [1, 2, 5, 6]);
    assert_all_become_free(&server);
}

#[test]
fn a_wait_cancelled_in_advance_sends_no_request() {
    let server = server();
    let client = client(&server);
    warm_up(&client);
    let requests = lock_requests(&server);
    for form in 0..4 {
        let (stop, stopped) = bounded(1);
        stop.send(()).unwrap();
        let mutex = client.mutex("k").cancelled_by(stopped);
        assert_cancelled(wait_by(form, &mutex));
        // The first wait has received the only message, so this wait is not cancelled. A disconnected channel cancels
        // every later wait.
        wait_by(form, &mutex).unwrap();
        drop(stop);
        assert_cancelled(wait_by(form, &mutex));
        assert_cancelled(wait_by(form, &mutex));
    }
    // In each form, one of the four waits was not cancelled: it acquired and released the lock.
    assert_eq!(lock_requests(&server), requests + 8);
}

#[test]
fn a_message_ends_one_wait_and_a_disconnect_all() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    let (stop, stopped) = unbounded();
    let ended = Arc::new(Shared::new(0));
    let tasks: Vec<_> = (0..6)
        .map(|_| {
            let mutex = waiting.mutex("k").cancelled_by(stopped.clone());
            let ended = Arc::clone(&ended);
            Task::start_blocked(move || {
                let outcome = mutex.lock().map(drop);
                *ended.lock().unwrap() += 1;
                outcome
            })
        })
        .collect();
    for n in 1..=3 {
        stop.send(()).unwrap();
        assert!(eventually(SOON, || *ended.lock().unwrap() == n));
    }
    thread::sleep(millis(50));
    assert_eq!(*ended.lock().unwrap(), 3, "one for each message");
    drop(stop);
    for task in tasks {
        assert_cancelled(task.within(SOON, "the cancellation"));
    }
    wait_for_queue(&server, "k", 0);
    held.unlock().unwrap();
}

#[test]
fn cancellation_leaves_a_held_lock_alone() {
    let server = server();
    let client = client(&server);
    let (stop, stopped) = bounded(1);
    let mutex = client.mutex("k").cancelled_by(stopped);
    let guard = mutex.lock().unwrap();
    drop(stop);
    assert!(guard.lost_signal().recv_timeout(millis(50)).is_err());
    guard.check().unwrap();
    guard.unlock().unwrap();
}

#[test]
fn a_wait_is_cancelled_during_an_outage() {
    let server = server();
    let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    server.stop();
    let (stop, stopped) = bounded(1);
    let mutex = client.mutex("k").cancelled_by(stopped);
    let waiter = Task::start(move || mutex.lock().map(drop));
    thread::sleep(millis(100));
    drop(stop);
    assert_cancelled(waiter.within(SOON, "the cancellation"));
    server.resume();
    assert_all_become_free(&server);
}

#[test]
fn a_wait_that_polls_is_cancelled_at_once() {
    // Without RESP3 a client gets no notifications.
    let server = Server::builder().arg("rename-command", "HELLO \"\"");
    let server = server.start().unwrap();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    for way in WAYS {
        let (stop, stopped) = bounded(1);
        let mutex = waiting.mutex("k").cancelled_by(stopped);
        let waiter = Task::start(move || mutex.lock().map(drop));
        wait_for_queue(&server, "k", 1);
        let kept = way(stop);
        assert_cancelled(waiter.within(SOON, "the cancellation"));
        wait_for_queue(&server, "k", 0);
        drop(kept);
    }
    held.unlock().unwrap();
    waiting.with_lock("k", || ()).unwrap();
}
