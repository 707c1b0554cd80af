//! The heap allocations of a lock and its release, on a client that has its connections and buffers. This test has a
//! program of its own, since the allocator counts for all threads of a process. Spans and metrics would add their own.
#![cfg(not(any(feature = "tracing", feature = "metrics")))]

use std::alloc::System;

use leasehold::Client;
use leasehold_testbed::Server;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const TIMES: usize = 100;

/// The least number of allocations in several runs of `work`, since background work adds some now and then.
fn allocations(mut work: impl FnMut()) -> usize {
    let turns = || {
        let before = ALLOCATOR.stats();
        (0..TIMES).for_each(|_| work());
        let during = ALLOCATOR.stats() - before;
        (during.allocations + during.reallocations) / TIMES
    };
    let rounds: Vec<usize> = std::iter::repeat_with(turns).take(20).collect();
    rounds.into_iter().min().expect("at least one run")
}

#[test]
fn a_lock_makes_five_allocations() -> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start()?;
    let client = Client::open(server.url())?;
    let mutex = client.mutex("key");
    let dropped = allocations(|| drop(mutex.lock().expect("nobody else wants the lock")));
    let unlocked = allocations(|| {
        let guard = mutex.lock().expect("nobody else wants the lock");
        guard.unlock().expect("the lock is held");
    });
    // A drop makes five: the lease, an entry in the local queue of its key, an entry in the queue of its pipeline, and
    // for the reply to `EXEC` a vector and the text of the token. (Other threads may use the first three after the
    // call.) `unlock` waits for its release, so it has one more entry in the queue of its pipeline.
    assert_eq!([dropped, unlocked], [5, 6]);
    Ok(())
}
