//! Order: first come, first served among the threads of a client, and a release wakes the next thread.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, in_redis, info_number, make_first_join_earlier,
    millis, secs, server, wait_for_queue,
};

#[test]
fn threads_of_a_client_enter_in_the_order_they_came() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mutex = client.mutex("k");
    let held = mutex.lock().unwrap();
    let threads: Vec<_> = (0..25)
        .map(|n| {
            let (mutex, order) = (mutex.clone(), Arc::clone(&order));
            Task::start_blocked(move || {
                let guard = match n % 2 {
                    0 => mutex.lock().unwrap(),
                    _ => mutex.try_lock_for(secs(60)).unwrap().expect("its grant"),
                };
                order.lock().unwrap().push(n);
                drop(guard);
            })
        })
        .collect();
    held.unlock().unwrap();
    for thread in threads {
        thread.within(SOON, "the grant");
    }
    assert_eq!(*order.lock().unwrap(), (0..25).collect::<Vec<_>>());
}

/// Redis first grants the waiter the lock for only two seconds, because the waiter may have been stopped.
#[test]
fn a_long_queued_waiter_gets_its_whole_ttl() {
    let server = server();
    let clients = [(); 2].map(|()| steady(&server.url()).ttl(LONG_TTL).build().unwrap());
    let held = clients[0].mutex("k").lock().unwrap();
    let mutex = clients[1].mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    make_first_join_earlier(&server, "k", secs(3600));
    held.unlock().unwrap();
    let guard = waiter.within(SOON, "the grant");
    assert!(guard.remaining() > LONG_TTL / 2, "{guard:?}");
    let left = ask(&server, &["PTTL", &in_redis("k")]).as_int().unwrap();
    assert!(left > LONG_TTL.as_millis() as i64 / 2, "{left} ms");
}

#[test]
fn try_lock_never_overtakes_waiters() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url())
        .event_handler(recorder.clone())
        .build()
        .unwrap();
    let holder = steady(&server.url()).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::Contended, "k");
    // The lock is free in Redis, and the next acquire of this client is in flight.
    held.unlock().unwrap();
    let mut looks = 0;
    while !waiter.is_done() && looks < 2_000 {
        assert!(
            client.mutex("k").try_lock().unwrap().is_none(),
            "look {looks}"
        );
        looks += 1;
    }
    drop(waiter.within(SOON, "the grant"));
}

#[test]
fn a_departing_waiter_passes_its_position_on() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    let held = mutex.lock().unwrap();
    let hasty = mutex.clone();
    let first = Task::start_blocked(move || {
        assert!(hasty.try_lock_for(millis(150)).unwrap().is_none());
    });
    let next = mutex.clone();
    let second = Task::start(move || next.lock().unwrap());
    first.within(SOON, "the end of the wait");
    held.unlock().unwrap();
    drop(second.within(SOON, "the grant of the remaining waiter"));
}

#[test]
fn a_release_wakes_the_next_thread_of_the_same_client() {
    let server = server();
    let client = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let mutex = client.mutex("k");
    for _ in 0..10 {
        let held = mutex.lock().unwrap();
        let next = mutex.clone();
        let waiter = Task::start_blocked(move || {
            let guard = next.lock().unwrap();
            let entered = Instant::now();
            drop(guard);
            entered
        });
        let released = Instant::now();
        drop(held);
        let entered = waiter.within(SOON, "entering");
        let waited = entered.saturating_duration_since(released);
        // Without a notification, the waiter would sleep as long as the lock can be held.
        assert!(waited < SOON, "{waited:?}");
    }
}

#[test]
fn waiters_of_other_clients_enter_soon_after_a_release() {
    let server = server();
    let (one, two) = (
        steady(&server.url()).build().unwrap(),
        steady(&server.url()).build().unwrap(),
    );
    for _ in 0..10 {
        let held = one.mutex("k").lock().unwrap();
        let next = two.mutex("k");
        let waiter = Task::start(move || next.lock().map(drop));
        thread::sleep(millis(60));
        drop(held);
        // The waiter polls, so it gets the lock long before the ttl ends.
        waiter.within(secs(5), "the grant after a release").unwrap();
    }
}

#[test]
fn local_waiters_send_one_request() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let holder = steady(&server.url()).build().unwrap();
    let commands = || info_number(&server, "stats", "total_commands_processed");
    let asked_by = |waiters: usize| {
        let held = holder.mutex("k").lock().unwrap();
        let tasks: Vec<_> = (0..waiters)
            .map(|_| {
                let mutex = client.mutex("k");
                Task::start(move || mutex.lock().map(drop))
            })
            .collect();
        thread::sleep(Duration::from_millis(300));
        let before = commands();
        thread::sleep(Duration::from_millis(500));
        let asked = commands() - before;
        drop(held);
        for task in tasks {
            task.within(SOON, "the lock").unwrap();
        }
        asked
    };
    let (alone, together) = (asked_by(1), asked_by(60));
    assert!(
        together <= 3 * alone + 10,
        "{together} commands, {alone} by one alone"
    );
}
