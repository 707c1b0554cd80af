//! A lock of one process that threads get in the order in which they asked. Its speed is the limit for a fair lock.
//! Only for measurements, since a panic under the lock leaves it held.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::drive::{Locker, hold};

#[derive(Default)]
struct State {
    is_held: bool,
    waiting: VecDeque<Arc<Turn>>,
}

/// The turn of one waiting thread.
#[derive(Default)]
struct Turn {
    has_come: AtomicBool,
    changed: Condvar,
}

/// One thread's access to the lock. A waiting thread sleeps until the previous holder releases the lock and wakes the
/// thread.
pub struct FairQueue {
    state: Arc<Mutex<State>>,
    turn: Arc<Turn>,
}

impl FairQueue {
    /// Makes one lock, and returns a handle for each of `threads`.
    #[must_use]
    pub fn of_threads(threads: usize) -> Vec<Self> {
        let state = Arc::<Mutex<State>>::default();
        let one = |_| Self {
            state: Arc::clone(&state),
            turn: Arc::default(),
        };
        (0..threads).map(one).collect()
    }

    /// Waits for the lock, behind all threads that wait already.
    pub fn lock(&self) {
        let mut state = self.state.lock();
        if !state.is_held {
            state.is_held = true;
            return;
        }
        self.turn.has_come.store(false, Ordering::Relaxed);
        state.waiting.push_back(Arc::clone(&self.turn));
        while !self.turn.has_come.load(Ordering::Relaxed) {
            self.turn.changed.wait(&mut state);
        }
    }

    /// Passes the lock on to the thread that has waited for the longest time.
    pub fn unlock(&self) {
        let mut state = self.state.lock();
        let Some(next) = state.waiting.pop_front() else {
            state.is_held = false;
            return;
        };
        next.has_come.store(true, Ordering::Relaxed);
        drop(state);
        next.changed.notify_one();
    }
}

impl Locker for FairQueue {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        self.lock();
        let acquired = hold(time);
        self.unlock();
        Ok(acquired)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn threads_get_the_lock_in_the_order_in_which_they_asked() {
        let (order, seen) = mpsc::channel();
        let mut threads = FairQueue::of_threads(4);
        let first = threads.remove(0);
        first.lock();
        let state = Arc::clone(&first.state);
        thread::scope(|scope| {
            for (index, waiter) in threads.into_iter().enumerate() {
                let order = order.clone();
                scope.spawn(move || {
                    waiter.lock();
                    order.send(index).expect("the test waits for it");
                    waiter.unlock();
                });
                while state.lock().waiting.len() <= index {
                    thread::yield_now();
                }
            }
            first.unlock();
        });
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), [0, 1, 2]);
        assert!(!state.lock().is_held);
    }
}
