//! What a lock and its release take from the heap, on a client that is warm. In a program of its own: the
//! allocator counts for all threads of it.

use std::alloc::System;

use leasehold::Client;
use leasehold::redis::{self, Value};
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

/// What redis-rs takes to read answers such as those to an acquire and a release, which come together or
/// one by one.
fn of_redis_rs(server: &Server) -> Result<[usize; 2], Box<dyn std::error::Error>> {
    let mut redis = redis::Client::open(server.url())?.get_connection()?;
    let micros = "1795263780943818";
    let acquire = redis::cmd("ECHO").arg(micros).get_packed_command();
    let release = redis::cmd("EXISTS").arg("key").get_packed_command();
    let together = [&acquire[..], &release].concat();
    let mut ask = |request: &[u8], answers: &[Value]| {
        redis.send_packed_command(request).expect("Redis is there");
        for answer in answers {
            assert_eq!(redis.recv_response().as_ref(), Ok(answer));
        }
    };
    let answers = [Value::BulkString(micros.into()), Value::Int(0)];
    Ok([
        allocations(|| ask(&together, &answers)),
        allocations(|| {
            ask(&acquire, &answers[..1]);
            ask(&release, &answers[1..]);
        }),
    ])
}

#[test]
fn what_a_lock_takes_beyond_redis_rs_is_its_lease_and_a_place_to_wait()
-> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start()?;
    let [together, one_by_one] = of_redis_rs(&server)?;
    let client = Client::open(&server.url())?;
    let mutex = client.mutex("key");
    let dropped = allocations(|| drop(mutex.lock().expect("nobody else wants it")));
    let unlocked = allocations(|| {
        let guard = mutex.lock().expect("nobody else wants it");
        guard.unlock().expect("it is held");
    });
    // A lease, a place in the line of its key, and one in the queue of its connection: each is shared
    // with threads that outlive the call. Who awaits the release waits once more.
    assert_eq!([dropped - together, unlocked - one_by_one], [3, 4]);
    Ok(())
}
