//! Cancelled waits leave nothing behind: no queue entry, no thread, no connection.

use std::thread;
use std::time::Duration;

use leasehold::crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use leasehold::{Client, ErrorKind};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, assert_all_become_free, connections, in_time, lease_of, millis, queued,
    secs, server, wait_for_queue, within,
};

use super::{WORK, assert_cancelled, client};

#[test]
fn shutdown_leaves_the_queue() {
    let server = server();
    let (holder, waiting, other) = (client(&server), client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    let (_stop, stopped) = bounded::<()>(1);
    let mutexes = [waiting.mutex("k").cancelled_by(stopped), waiting.mutex("k")];
    let tasks = mutexes.map(|mutex| Task::start_blocked(move || mutex.lock().map(drop)));
    wait_for_queue(&server, "k", 1);
    let mutex = other.mutex("k");
    let next = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 2);
    waiting.shutdown(secs(8)).unwrap();
    for task in tasks {
        let error = task.within(SOON, "the end of the wait").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Shutdown);
    }
    assert_eq!(queued(&server, "k"), 1, "confirmed by then");
    held.unlock().unwrap();
    next.within(SOON, "the grant").unlock().unwrap();
}

#[test]
fn the_last_client_dropped_leaves_the_queue() {
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    for _ in 0..5 {
        let waiting = client(&server);
        let (stop, stopped) = bounded(1);
        let mutex = waiting.mutex("k").cancelled_by(stopped);
        drop(waiting);
        // The waiter has the last mutex, so the client ends with the waiter.
        let waiter = Task::start(move || mutex.lock().map(drop));
        wait_for_queue(&server, "k", 1);
        drop(stop);
        assert_cancelled(waiter.within(SOON, "the cancellation"));
        wait_for_queue(&server, "k", 0);
    }
    held.unlock().unwrap();
}

/// Waits and is cancelled `times` times, at every stage of a wait: before it begins, during the request, in
/// the queue.
fn cancel_often(waiting: &Client, times: usize) {
    let (senders, to_drop) = unbounded::<Sender<()>>();
    let canceller = thread::spawn(move || {
        for (n, stop) in to_drop.iter().enumerate() {
            match n % 4 {
                0 => {}
                1 => thread::yield_now(),
                2 => thread::sleep(Duration::from_micros(300)),
                _ => thread::sleep(millis(2)),
            }
            if n % 2 == 0 {
                // This message is the other way to cancel. It fails if the wait is over.
                let _ = stop.try_send(());
            }
            drop(stop);
        }
    });
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (waiting, senders) = (waiting.clone(), senders.clone());
            Task::start(move || {
                for _ in 0..times / 4 {
                    let (stop, stopped): (_, Receiver<()>) = bounded(1);
                    senders.send(stop).unwrap();
                    let mutex = waiting.mutex("k").cancelled_by(stopped);
                    assert_cancelled(mutex.lock());
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(WORK, "the cancelled waits");
    }
    drop(senders);
    canceller.join().unwrap();
}

#[test]
fn a_thousand_cancelled_waits_leave_nothing() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    cancel_often(&waiting, 20);
    let lease = lease_of(&server, "k");
    cancel_often(&waiting, 1_000);
    wait_for_queue(&server, "k", 0);
    assert_eq!(lease_of(&server, "k"), lease);
    held.check().unwrap();
    // At most two pipelines, two connections for renewals, and one for notifications, for each client.
    assert!(connections(&server) <= 10, "{}", connections(&server));
    held.unlock().unwrap();
    for client in [&waiting, &holder, &waiting] {
        let client = client.clone();
        within(SOON, "a lock", move || {
            client.with_lock("k", || ()).unwrap()
        });
    }
    assert_all_become_free(&server);
}

#[test]
fn waits_that_time_out_leave_the_queue() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|thread| {
            let mutex = waiting.mutex("k");
            Task::start(move || {
                let wait = |round: u64| {
                    let wait = Duration::from_micros(150 * ((7 * thread + round) % 40));
                    in_time(mutex.try_lock_for(wait))
                };
                let replies: Vec<_> = (0..50).filter_map(wait).collect();
                assert!(!replies.is_empty());
                assert!(replies.iter().all(Option::is_none));
            })
        })
        .collect();
    for task in tasks {
        task.within(WORK, "deadlines");
    }
    wait_for_queue(&server, "k", 0);
    held.unlock().unwrap();
    waiting.with_lock("k", || ()).unwrap();
    assert_all_become_free(&server);
}

#[test]
fn a_thousand_cancelled_waits_leave_no_thread() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    let child = Child::start(count_threads, &server.url());
    child.finish(WORK);
    wait_for_queue(&server, "k", 0);
    held.unlock().unwrap();
}

pub fn count_threads(parent: &Parent) {
    let client = steady(&parent.url).ttl(LONG_TTL).build().unwrap();
    cancel_often(&client, 20);
    let mut before = 0;
    // While a client connects, its threads end only when the attempt to connect has ended.
    let _ = eventually(millis(500), || {
        before = child::threads().unwrap();
        false
    });
    cancel_often(&client, 1_000);
    let gone = eventually(SOON, || child::threads().unwrap() <= before);
    let now = child::threads().unwrap();
    assert!(gone, "{now} threads, {before} before");
}
