//! Turns: first come, first served among the threads of a client, and a release wakes the next.

use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{Recorder, SOON, Task, What, millis, secs, server};

/// Starts a thread and returns once it sleeps, as somebody who waits in line does.
fn start_and_see_asleep(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (sender, started) = std::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        let me = std::fs::read_link("/proc/thread-self");
        sender.send(me.ok()).unwrap();
        drop(sender);
        work();
    });
    let Some(me) = started.recv().unwrap() else {
        // Where threads cannot be looked at, a guess has to do.
        thread::sleep(millis(200));
        return thread;
    };
    let stat = std::path::Path::new("/proc").join(me).join("stat");
    let asleep = eventually(SOON, || {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        let state = stat
            .rsplit(')')
            .next()
            .and_then(|rest| rest.trim().chars().next());
        state == Some('S') || state.is_none()
    });
    assert!(asleep);
    thread
}

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
            start_and_see_asleep(move || {
                let guard = match n % 2 {
                    0 => mutex.lock().unwrap(),
                    _ => mutex
                        .try_lock_for(secs(60))
                        .unwrap()
                        .expect("its turn comes"),
                };
                order.lock().unwrap().push(n);
                drop(guard);
            })
        })
        .collect();
    held.unlock().unwrap();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..25).collect::<Vec<_>>());
}

#[test]
fn nobody_who_does_not_wait_gets_before_those_who_do() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url())
        .events(recorder.clone())
        .build()
        .unwrap();
    let holder = steady(&server.url()).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::Contended, "k");
    // Free in Redis, and this client's next is on its way.
    held.unlock().unwrap();
    let mut looks = 0;
    while !waiter.is_done() && looks < 2_000 {
        assert!(
            client.mutex("k").try_lock().unwrap().is_none(),
            "look {looks}"
        );
        looks += 1;
    }
    drop(waiter.within(SOON, "its turn"));
}

#[test]
fn a_place_in_line_is_passed_on_by_whoever_gives_up() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    let held = mutex.lock().unwrap();
    let hasty = mutex.clone();
    let first = start_and_see_asleep(move || {
        assert!(hasty.try_lock_for(millis(150)).unwrap().is_none());
    });
    let next = mutex.clone();
    let second = Task::start(move || next.lock().unwrap());
    first.join().unwrap();
    held.unlock().unwrap();
    drop(second.within(SOON, "the turn of who waited on"));
}

#[test]
fn a_release_wakes_the_next_thread_of_the_same_client() {
    const ROUNDS: usize = 30;
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    let mut at_once = 0;
    let mut waits = Vec::new();
    for round in 0..ROUNDS {
        let held = mutex.lock().unwrap();
        let next = mutex.clone();
        let waiter = thread::spawn(move || {
            let guard = next.lock().unwrap();
            let entered = Instant::now();
            drop(guard);
            entered
        });
        // Until its looks at Redis are as far apart as they get.
        thread::sleep(millis(100 + (round as u64 * 7) % 40));
        let released = Instant::now();
        drop(held);
        let waited = waiter.join().unwrap().saturating_duration_since(released);
        at_once += usize::from(waited < millis(10));
        waits.push(waited);
    }
    // Without a wake-up a quarter of them would be so lucky.
    assert!(at_once > ROUNDS * 3 / 5, "{at_once} of {ROUNDS}: {waits:?}");
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
        // Long before the ttl: it looks again and again.
        waiter.within(secs(5), "entering after a release").unwrap();
    }
}

#[test]
fn a_line_of_waiters_asks_redis_as_one() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let holder = steady(&server.url()).build().unwrap();
    let commands = || -> i64 {
        let info = server.command(&["INFO", "stats"]).unwrap();
        let text = info.as_text().expect("INFO answers with text").to_owned();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("total_commands_processed:"));
        line.expect("it counts them").trim().parse().unwrap()
    };
    let asked_by = |waiters: usize| {
        let held = holder.mutex("k").lock().unwrap();
        let tasks: Vec<_> = (0..waiters)
            .map(|_| {
                let mutex = client.mutex("k");
                Task::start(move || mutex.try_lock_for(secs(1)).map(drop))
            })
            .collect();
        thread::sleep(Duration::from_millis(300));
        let before = commands();
        thread::sleep(Duration::from_millis(500));
        let asked = commands() - before;
        drop(held);
        for task in tasks {
            task.within(SOON, "a deadline").unwrap();
        }
        asked
    };
    let (alone, together) = (asked_by(1), asked_by(60));
    assert!(
        together <= 3 * alone + 10,
        "{together} commands, {alone} by one alone"
    );
}
