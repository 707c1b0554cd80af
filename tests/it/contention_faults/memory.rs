//! Redis has too little memory: for values, or for its table of tracked keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use leasehold::{Client, LossReason, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::contention_faults::{KEY, Turns, assert_kept, client};
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, builder, in_redis,
    is_held, lost_within, millis, reads_during, secs, server, tracked, wait_for_queue,
};

fn without_memory(server: &Server) {
    ask(server, &["CONFIG", "SET", "maxmemory", "100000"]);
}

fn with_memory(server: &Server) {
    ask(server, &["CONFIG", "SET", "maxmemory", "0"]);
}

#[test]
fn without_memory_a_release_frees_the_lock() {
    let server = server();
    let recorder = Recorder::new();
    let holder = client(&server.url());
    let clients: Vec<Client> = (0..3)
        .map(|_| {
            let builder = builder(&server.url())
                .ttl(LONG_TTL)
                .outage_timeout(6 * SOON);
            builder
                .event_handler(Arc::clone(&recorder))
                .build()
                .unwrap()
        })
        .collect();
    let held = holder.mutex(KEY).lock().unwrap();
    let witness = Arc::new(Witness::default());
    let waiters: Vec<Task<()>> = (0..6)
        .map(|n| witness.start_turns(clients[n % 3].mutex(KEY), 1))
        .collect();
    wait_for_queue(&server, KEY, 3);
    without_memory(&server);
    assert_kept(held.unlock());
    recorder.wait_for(3, What::Unavailable, KEY);
    assert!(!is_held(&server, KEY), "released, and granted to nobody");
    assert_eq!(witness.entries(), 0);
    with_memory(&server);
    for waiter in waiters {
        waiter.within(SOON, "the grant once there is memory");
    }
    assert_all_become_free(&server);
}

/// While Redis has no memory, a waiter that gives up cannot remove its queue entry.
#[test]
fn waiters_gone_during_oom_are_granted_nothing_later() {
    let server = server();
    let (holder, leaving, next) = (
        client(&server.url()),
        client(&server.url()),
        client(&server.url()),
    );
    let held = holder.mutex(KEY).lock().unwrap();
    let mutex = leaving.mutex(KEY);
    let leaver = Task::start(move || mutex.try_lock_for(secs(4)).map(|guard| guard.is_some()));
    wait_for_queue(&server, KEY, 1);
    let mutex = next.mutex(KEY);
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 2);
    without_memory(&server);
    // Another client has the lock, or Redis cannot answer.
    assert!(!leaver.within(SOON, "the deadline").unwrap_or(false));
    with_memory(&server);
    assert_kept(held.unlock());
    let guard = waiter.within(secs(8), "the grant of the remaining waiter");
    assert_kept(guard.unlock());
    assert_all_become_free(&server);
}

#[test]
fn grants_continue_while_memory_runs_out_repeatedly() {
    let server = server();
    let clients: Vec<Client> = (0..4).map(|_| client(&server.url())).collect();
    let turns = Turns::of(&clients, 2, 30);
    let mut pause = 0;
    turns.go_on_under(|| {
        without_memory(&server);
        thread::sleep(millis(1 + pause % 40));
        with_memory(&server);
        pause += 7;
    });
    assert_all_become_free(&server);
}

fn forgetful() -> Server {
    let builder = Server::builder().arg("tracking-table-max-keys", "3");
    builder.start().unwrap()
}

fn hold(holder: &Client, keys: &[String]) -> Vec<MutexGuard> {
    let lock = |key: &String| holder.mutex(key).lock().unwrap();
    keys.iter().map(lock).collect()
}

#[test]
fn a_small_tracking_table_starves_no_waiter() {
    const LOCKS: usize = 30;
    let server = forgetful();
    let (holder, waiting) = (client(&server.url()), client(&server.url()));
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("lock-{n}")).collect();
    let held = hold(&holder, &keys);
    let waiters: Vec<Task<MutexGuard>> = keys
        .iter()
        .map(|key| {
            let mutex = waiting.mutex(key);
            Task::start(move || mutex.lock().unwrap())
        })
        .collect();
    for key in &keys {
        wait_for_queue(&server, key, 1);
    }
    // Both clients have asked to be notified by now.
    thread::sleep(millis(300));
    for (n, guard) in held.into_iter().enumerate() {
        match n % 3 {
            0 => assert_kept(guard.unlock()),
            1 => drop(guard),
            // A tool changes the key without a notification.
            _ => {
                ask(&server, &["DEL", &in_redis(&keys[n])]);
                drop(guard);
            }
        }
    }
    for waiter in waiters {
        drop(waiter.within(SOON, "the grant"));
    }
    assert_all_become_free(&server);
}

#[test]
fn a_small_tracking_table_delays_losses_little() {
    const LOCKS: usize = 30;
    let server = forgetful();
    let client = builder(&server.url()).ttl(secs(6)).build().unwrap();
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("lock-{n}")).collect();
    let held = hold(&client, &keys);
    let signals: Vec<_> = held.iter().map(MutexGuard::lost_signal).collect();
    thread::sleep(millis(300));
    for key in &keys {
        ask(&server, &["DEL", &in_redis(key)]);
    }
    for signal in &signals {
        assert_eq!(lost_within(secs(6), signal), LossReason::Deleted);
    }
}

/// The client does not ask again and again for keys that the table has no room for. Redis evicts entries with each
/// command of any client.
#[test]
fn a_small_tracking_table_causes_few_requests() {
    const LOCKS: usize = 30;
    let server = forgetful();
    let (holder, other) = (client(&server.url()), client(&server.url()));
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("lock-{n}")).collect();
    let held = hold(&holder, &keys);
    assert!(
        eventually(SOON, || tracked(&server) > 0),
        "the clients read the keys"
    );
    let busy = Arc::new(AtomicBool::new(true));
    let work = {
        let (mutex, busy) = (other.mutex(KEY), Arc::clone(&busy));
        Task::start(move || {
            while busy.load(Ordering::Relaxed) {
                assert_kept(mutex.lock().unwrap().unlock());
            }
        })
    };
    thread::sleep(millis(300));
    let start = Instant::now();
    let looked = reads_during(&server, || thread::sleep(millis(1000)));
    // All changed keys are read together, 10 ms apart.
    let most = (100.0 * start.elapsed().as_secs_f64() + 2.0) * LOCKS as f64;
    busy.store(false, Ordering::Relaxed);
    work.within(SOON, "the work of other clients");
    assert!((looked as f64) < most, "{looked} keys read in a second");
    drop(held);
    assert_all_become_free(&server);
}
