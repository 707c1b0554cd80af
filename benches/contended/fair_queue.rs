//! Threads that pass a lock on in the order in which they asked, without Redis: the limit for fair hand-offs among
//! threads. (`unlock_fair` of a parking_lot mutex is none: it passes the mutex on to sleeping threads only, so two
//! running threads can pass it to each other for long.)

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_load::FairQueue;

/// Hand-offs per second among `threads` that want the lock all the time.
pub fn rate(threads: usize, window: Duration) -> f64 {
    let ready = Barrier::new(threads);
    let compete = |queue: FairQueue| {
        ready.wait();
        let start = Instant::now();
        let mut grants = 0_u64;
        while start.elapsed() < window {
            queue.lock();
            grants += 1;
            queue.unlock();
        }
        grants as f64 / start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let compete = &compete;
        let queues = FairQueue::of_threads(threads).into_iter();
        let running: Vec<_> = queues
            .map(|queue| scope.spawn(move || compete(queue)))
            .collect();
        let rates = running.into_iter().map(|thread| thread.join());
        rates.map(|rate| rate.expect("it does not panic")).sum()
    })
}
