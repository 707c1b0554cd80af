//! The release of a dropped guard comes before the next request of the same thread, whatever else happens,
//! and without a wait for a reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::Client;

use crate::steady::steady;
use crate::support::{SOON, Task, assert_all_become_free, kill_connections, millis, server};

const WORK: Duration = Duration::from_secs(120);

/// Drops the lock and acquires it again at once, `rounds` times.
fn drop_and_take(client: &Client, key: &str, rounds: usize) {
    let mutex = client.mutex(key);
    for round in 0..rounds {
        let guard = mutex.try_lock().unwrap();
        let guard = guard.unwrap_or_else(|| panic!("{key} is contended in round {round}"));
        drop(guard);
    }
}

/// Starts threads that keep all pipelines busy until `stop` is set: they acquire and release other keys, wait for each
/// other, and request contended keys.
fn noise(client: &Client, threads: usize, stop: &Arc<AtomicBool>) -> Vec<Task<()>> {
    let held = client.mutex("noise-held");
    (0..threads)
        .map(|n| {
            let (client, stop, held) = (client.clone(), Arc::clone(stop), held.clone());
            Task::start(move || {
                let (own, common) = (
                    client.mutex(format!("noise-{n}")),
                    client.mutex("noise-common"),
                );
                while !stop.load(Ordering::Acquire) {
                    drop(own.lock().unwrap());
                    drop(common.try_lock_for(SOON).unwrap());
                    drop(held.try_lock().unwrap());
                    own.lock().unwrap().unlock().unwrap();
                }
            })
        })
        .collect()
}

#[test]
fn a_thread_alone_never_finds_its_own_key_taken() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    Task::start(move || drop_and_take(&client, "k", 5_000)).within(WORK, "5,000 rounds");
    assert_all_become_free(&server);
}

#[test]
fn threads_with_own_keys_never_find_them_taken_under_load() {
    for pipelines in [1, 2, 4] {
        let server = server();
        let client = steady(&server.url()).pipelines(pipelines).build().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let noise = noise(&client, 6, &stop);
        let takers: Vec<_> = (0..6)
            .map(|n| {
                let client = client.clone();
                Task::start(move || drop_and_take(&client, &format!("own-{n}"), 700))
            })
            .collect();
        for taker in takers {
            taker.within(WORK, "700 rounds");
        }
        stop.store(true, Ordering::Release);
        for thread in noise {
            thread.within(WORK, "the end of the noise");
        }
        assert_all_become_free(&server);
    }
}

#[test]
fn drops_on_other_threads_precede_this_threads_request() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let noise = noise(&client, 4, &stop);
    let mutex = client.mutex("k");
    std::thread::scope(|scope| {
        for round in 0..300 {
            let guard = mutex.try_lock().unwrap();
            let guard = guard.unwrap_or_else(|| panic!("contended in round {round}"));
            // The end of the other thread tells this thread that the guard was dropped, as a message would.
            scope.spawn(move || drop(guard)).join().unwrap();
        }
    });
    stop.store(true, Ordering::Release);
    for thread in noise {
        thread.within(WORK, "the end of the noise");
    }
}

#[test]
fn guards_dropped_in_a_row_are_free() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutexes: Vec<_> = (0..500).map(|n| client.mutex(format!("k{n}"))).collect();
    for _ in 0..4 {
        let guards: Vec<_> = mutexes
            .iter()
            .map(|mutex| mutex.try_lock().unwrap().expect("it was released"))
            .collect();
        drop(guards);
    }
    assert_all_become_free(&server);
}

#[test]
fn a_release_lost_with_its_connection_still_comes_first() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    for round in 0..30 {
        let guard = mutex.lock().unwrap();
        kill_connections(&server);
        // The server has closed the connection already, and the client does not know yet.
        drop(guard);
        let again = mutex.try_lock_for(millis(5_000)).unwrap();
        assert!(
            again.is_some(),
            "still taken in round {round}, long before its ttl ends"
        );
    }
}
