//! Measures single parts of the library without contention: the timer wheel, a local queue, the encoder, and the parser
//! of replies beside that of redis-rs. For scale, it also measures a lock and its release on a server.

use std::error::Error;
use std::hint::black_box;

use criterion::{Criterion, Throughput};
use leasehold::Client;
use leasehold::internals::{Batch, LocalQueue, Reader, Wheel};
use leasehold::redis;
use leasehold_testbed::Server;

use crate::support;

/// The size of the largest batch among 64 threads.
const VECTOR: usize = 64;
/// The number of locks that the client holds.
const TIMERS: usize = 100_000;

pub fn measure() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let client = Client::open(server.url())?;
    let mutex = client.mutex("lock");
    let _loops = support::Busy::from_environment().start()?;
    let mut criterion = Criterion::default().configure_from_args();

    let mut group = criterion.benchmark_group("micro");
    group.throughput(Throughput::Elements(1));
    let mut wheel = Wheel::with_timers(TIMERS);
    group.bench_function("wheel: insert, cancel", |bencher| {
        bencher.iter(|| wheel.insert_and_cancel());
    });
    let queue = LocalQueue::new();
    group.bench_function("queue: join, leave", |bencher| {
        bencher.iter(|| black_box(&queue).join_and_leave());
    });
    for keys in [1, VECTOR] {
        let mut batch = Batch::of_acquires(keys);
        group.throughput(Throughput::Elements(keys as u64));
        group.bench_function(format!("encode: acquire of {keys}"), |bencher| {
            bencher.iter(|| batch.encode());
        });
    }
    for keys in [1, VECTOR] {
        let bytes = grants(keys);
        group.throughput(Throughput::Elements(keys as u64));
        let mut reader = Reader::new();
        group.bench_function(format!("read: grants of {keys}"), |bencher| {
            bencher.iter(|| reader.read(&bytes));
        });
        let mut parser = redis::Parser::new();
        group.bench_function(format!("redis-rs: grants of {keys}"), |bencher| {
            bencher.iter(|| parser.parse_value(&bytes[..]));
        });
    }
    group.throughput(Throughput::Elements(1));
    group.bench_function("redis: acquire, unlock", |bencher| {
        bencher.iter(|| mutex.lock()?.unlock());
    });
    group.finish();
    criterion.final_summary();
    Ok(())
}

/// The reply to a script call for `count` acquires. One of the acquires has another kind of result than the others.
fn grants(count: usize) -> Vec<u8> {
    let one = "$16\r\n1795263780943818\r\n";
    match count {
        1 => one.into(),
        _ => format!("*{count}\r\n{}", one.repeat(count)).into_bytes(),
    }
}
