//! Threads that pass a `parking_lot` mutex on with `unlock_fair`: the limit for hand-offs among threads.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Grants per second among `threads` that want the mutex all the time.
pub fn rate(threads: usize, window: Duration) -> f64 {
    let mutex = Mutex::new(());
    let ready = Barrier::new(threads);
    let compete = || {
        ready.wait();
        let start = Instant::now();
        let mut grants = 0_u64;
        while start.elapsed() < window {
            MutexGuard::unlock_fair(mutex.lock());
            grants += 1;
        }
        grants as f64 / start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(compete)).collect();
        let rates = running.into_iter().map(|thread| thread.join());
        rates.map(|rate| rate.expect("it does not panic")).sum()
    })
}
