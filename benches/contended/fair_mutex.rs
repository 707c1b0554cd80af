//! Threads that pass a `parking_lot` mutex on with `unlock_fair`: the limit for hand-offs among threads.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// Hand-offs per second among `threads` that want the mutex all the time. `unlock_fair` hands the mutex on only to a thread
/// that is parked at that moment. Otherwise the same thread may take it again, which does not count.
pub fn rate(threads: usize, window: Duration) -> f64 {
    let last = Mutex::new(None);
    let ready = Barrier::new(threads);
    let compete = |seat| {
        ready.wait();
        let start = Instant::now();
        let mut hand_offs = 0_u64;
        while start.elapsed() < window {
            let mut last = last.lock();
            let is_other = last.replace(seat) != Some(seat);
            MutexGuard::unlock_fair(last);
            hand_offs += u64::from(is_other);
        }
        hand_offs as f64 / start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let compete = &compete;
        let running = (0..threads).map(|seat| scope.spawn(move || compete(seat)));
        let running: Vec<_> = running.collect();
        let rates = running.into_iter().map(|thread| thread.join());
        rates.map(|rate| rate.expect("it does not panic")).sum()
    })
}
