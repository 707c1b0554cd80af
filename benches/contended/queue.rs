//! The cost of a hand-off among threads without leasehold: a plain FIFO queue that parks its waiters.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

#[derive(Default)]
struct Queue(Mutex<Line>);

#[derive(Default)]
struct Line {
    taken: bool,
    waiting: VecDeque<Arc<Turn>>,
}

struct Turn {
    has_come: AtomicBool,
    thread: Thread,
}

impl Queue {
    fn lock(&self) {
        let turn = {
            let mut line = self.0.lock();
            if !std::mem::replace(&mut line.taken, true) {
                return;
            }
            let turn = Arc::new(Turn {
                has_come: AtomicBool::new(false),
                thread: thread::current(),
            });
            line.waiting.push_back(Arc::clone(&turn));
            turn
        };
        while !turn.has_come.load(Ordering::Acquire) {
            thread::park();
        }
    }

    /// Passes the lock to the next waiter. Without a waiter, the lock is free.
    fn unlock(&self) {
        let next = {
            let mut line = self.0.lock();
            let next = line.waiting.pop_front();
            line.taken = next.is_some();
            next
        };
        if let Some(turn) = next {
            turn.has_come.store(true, Ordering::Release);
            turn.thread.unpark();
        }
    }
}

/// Grants per second among `threads` that want it all the time.
pub fn rate(threads: usize, window: Duration) -> f64 {
    let queue = Queue::default();
    let compete = || {
        let start = Instant::now();
        let mut grants = 0_u64;
        while start.elapsed() < window {
            queue.lock();
            queue.unlock();
            grants += 1;
        }
        grants
    };
    // The lock is held until all threads have started, so that no thread competes alone.
    queue.lock();
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(compete)).collect();
        while queue.0.lock().waiting.len() < threads {
            thread::yield_now();
        }
        let start = Instant::now();
        queue.unlock();
        let counts = running.into_iter().map(|thread| thread.join());
        let grants: u64 = counts.map(|count| count.expect("it does not panic")).sum();
        grants as f64 / start.elapsed().as_secs_f64()
    })
}
