//! Heap memory of pending releases while Redis is down. This test has a program of its own, since the allocator counts
//! for all threads of a process.

use std::alloc::System;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Server, eventually};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The number of guards, unless LEASEHOLD_GUARDS says otherwise.
const GUARDS: usize = 20_000;
const TIMEOUT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(60);
/// Bytes that a pending release may use beyond its key.
const MOST: usize = 100;
/// Bytes that the event of a delayed release may use, until the callback thread has passed it on. The features `tracing`
/// and `metrics` take these events.
const EVENT: usize = match cfg!(any(feature = "tracing", feature = "metrics")) {
    true => 120,
    false => 0,
};
/// Bytes that the client may use in an outage for its threads and connections, however many releases are pending.
const FIXED: usize = 512 * 1024;
/// Bytes for the 8,192 confirmed releases of each of its two pipelines, which it repeats on the next connection.
const REPEATED: usize = 2 * 8192 * 100;

fn allocated() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn hold(client: &Client, count: usize) -> Vec<MutexGuard> {
    let lock = |n| client.mutex(format!("k{n:06}")).lock();
    (0..count)
        .map(|n| lock(n).expect("the lock is free"))
        .collect()
}

fn keys(server: &Server) -> i64 {
    let size = server.command(&["DBSIZE"]).expect("Redis is there");
    size.as_int().expect("a number")
}

fn are_released(server: &Server) -> bool {
    // The fence counter stays in Redis.
    eventually(LONG, || keys(server) == 1)
}

#[test]
fn a_guard_dropped_in_an_outage_costs_100_bytes() -> Result<(), Box<dyn std::error::Error>> {
    let asked = std::env::var("LEASEHOLD_GUARDS").ok();
    let count = asked.map_or(Ok(GUARDS), |count| count.parse())?;
    let server = Server::start()?;
    let client = Client::builder(server.url())
        .ttl(2 * LONG)
        .connect_timeout(TIMEOUT)
        .command_timeout(TIMEOUT)
        .outage_timeout(LONG)
        .build()?;
    drop(hold(&client, count));
    assert!(are_released(&server));
    let before = allocated();
    let guards = hold(&client, count);
    let over = AtomicBool::new(false);
    let longest = AtomicU64::new(0);
    let (settled, peak, outage, took) = thread::scope(|scope| {
        for n in 0..4 {
            let mutex = client.mutex(format!("other{n}"));
            let (over, longest) = (&over, &longest);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let asked = Instant::now();
                    drop(mutex.lock().expect("lock() waits through the outage"));
                    longest.fetch_max(asked.elapsed().as_millis() as u64, Ordering::Relaxed);
                }
            });
        }
        let stopped = Instant::now();
        server.stop();
        drop(guards);
        let dropped = Instant::now();
        let (mut settled, mut peak) = (0, 0);
        let mut is_away = true;
        let mut back_at = stopped;
        let ended = eventually(LONG, || {
            peak = peak.max(allocated());
            if is_away && dropped.elapsed() > 6 * TIMEOUT {
                is_away = false;
                settled = allocated();
                back_at = Instant::now();
                server.resume();
            }
            // The connections of the four threads come and go.
            !is_away && keys(&server) <= 1 + 4
        });
        over.store(true, Ordering::Relaxed);
        assert!(ended, "not all were released");
        (settled, peak, back_at - stopped, back_at.elapsed())
    });
    assert!(are_released(&server));
    let key = "leasehold:k000000".len();
    let each = |bytes: usize| bytes.saturating_sub(before + FIXED) / count;
    let (settled, peak) = (each(settled), each(peak.saturating_sub(REPEATED)));
    let longest = Duration::from_millis(longest.into_inner());
    println!("{settled} bytes for each release after {outage:?}, and {peak} bytes at some time");
    println!("all were released in {took:?}, and the longest lock() took {longest:?}");
    assert!(settled <= key + MOST, "{settled} bytes for each release");
    assert!(
        peak <= key + MOST + EVENT,
        "{peak} bytes for each release and its event"
    );
    // One more time-out, and as much again for delays of the test's threads.
    assert!(
        longest < outage + 10 * TIMEOUT,
        "a lock waited for {longest:?}"
    );
    Ok(())
}
