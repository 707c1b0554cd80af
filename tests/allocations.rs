//! What a lock and its release take from the heap, on a client that is warm. In a program of its own: the
//! allocator counts for all threads of it.

use std::alloc::System;

use leasehold::Client;
use leasehold_testbed::Server;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const TIMES: usize = 100;

/// Allocations of one turn of `work`, the least of some: what runs beside it comes now and then only.
fn allocations(mut work: impl FnMut()) -> usize {
    let turns = || {
        let before = ALLOCATOR.stats();
        (0..TIMES).for_each(|_| work());
        let during = ALLOCATOR.stats() - before;
        (during.allocations + during.reallocations) / TIMES
    };
    let rounds: Vec<usize> = std::iter::repeat_with(turns).take(20).collect();
    rounds.into_iter().min().expect("there are some")
}

#[test]
fn a_lock_takes_its_lease_a_place_and_its_answer() -> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start()?;
    let client = Client::open(server.url())?;
    let mutex = client.mutex("key");
    let dropped = allocations(|| drop(mutex.lock().expect("nobody else wants it")));
    let unlocked = allocations(|| {
        let guard = mutex.lock().expect("nobody else wants it");
        guard.unlock().expect("it is held");
    });
    // A lease, a place in the line of its key, and one in the queue of its connection: each is shared
    // with threads that outlive the call. The text of the answer. An awaited release waits once more.
    assert_eq!([dropped, unlocked], [4, 5]);
    Ok(())
}
