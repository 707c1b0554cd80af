//! A state that threads share, and the wake-up of the threads that wait for its changes.

use std::time::Duration;

use crate::util::clock::MonotonicTime;
use crate::util::sync::{Condvar, Mutex};

/// A state `T` that worker threads wait for. `T` itself bounds what it queues.
pub struct Mailbox<T> {
    contents: Mutex<Contents<T>>,
    changed: Condvar,
}

#[derive(Default)]
struct Contents<T> {
    state: T,
    is_stopped: bool,
}

/// The next step of a thread that has looked at the state.
pub enum Step<R> {
    Return(R),
    /// Look again after the next change that wakes threads, or at this time.
    Sleep(Option<MonotonicTime>),
}

impl<T: Default> Default for Mailbox<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Mailbox<T> {
    pub fn new(state: T) -> Self {
        let is_stopped = false;
        Self {
            contents: Mutex::new(Contents { state, is_stopped }),
            changed: Condvar::new(),
        }
    }

    /// Changes the state and wakes no thread. After [`stop`](Self::stop), returns `None` and does not call `change`.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut contents = self.contents.lock();
        if contents.is_stopped {
            // `change` may own user code. As an argument, it is dropped after the unlock.
            return None;
        }
        Some(change(&mut contents.state))
    }

    /// Changes the state, unless the mailbox is stopped. Wakes all waiting threads if `change` returns true.
    pub fn post(&self, change: impl FnOnce(&mut T) -> bool) {
        if self.change(change) == Some(true) {
            self.changed.notify_all();
        }
    }

    /// Calls `look` with the state now, and again after each sleep that it asks for. Returns `None` once the mailbox is
    /// stopped.
    pub fn wait<R>(&self, mut look: impl FnMut(&mut T) -> Step<R>) -> Option<R> {
        let mut contents = self.contents.lock();
        while !contents.is_stopped {
            match look(&mut contents.state) {
                Step::Return(result) => return Some(result),
                Step::Sleep(None) => self.changed.wait(&mut contents),
                Step::Sleep(Some(until)) => {
                    let pause = until.since(MonotonicTime::now());
                    self.changed.wait_for(&mut contents, pause);
                }
            }
        }
        None
    }

    /// Sleeps for `pause`, or until the mailbox is stopped.
    pub fn sleep(&self, pause: Duration) {
        let until = MonotonicTime::now().after(pause);
        self.wait(|_| match MonotonicTime::now() < until {
            true => Step::Sleep(Some(until)),
            false => Step::Return(()),
        });
    }

    /// Ends all waits, now and later. `last` changes the state for the last time. The caller drops its result after the
    /// unlock.
    pub fn stop<R>(&self, last: impl FnOnce(&mut T) -> R) -> R {
        let mut contents = self.contents.lock();
        contents.is_stopped = true;
        let result = last(&mut contents.state);
        drop(contents);
        self.changed.notify_all();
        result
    }

    pub fn is_stopped(&self) -> bool {
        self.contents.lock().is_stopped
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_wait_ends_by_a_change_its_time_or_a_stop() {
        let mailbox = Mailbox::new(0);
        let wait_for = |wanted: u32, until: Option<MonotonicTime>| {
            mailbox.wait(|state| match *state == wanted {
                true => Step::Return(true),
                false if until.is_some_and(|until| until <= MonotonicTime::now()) => {
                    Step::Return(false)
                }
                false => Step::Sleep(until),
            })
        };
        let begun = MonotonicTime::now();
        let until = begun.after(Duration::from_millis(1));
        assert_eq!(wait_for(1, Some(until)), Some(false));
        std::thread::scope(|scope| {
            let changed = scope.spawn(|| wait_for(1, None));
            mailbox.post(|state| {
                *state = 1;
                true
            });
            assert_eq!(changed.join().unwrap(), Some(true));
            let stopped = scope.spawn(|| wait_for(2, None));
            let sleeping = scope.spawn(|| mailbox.sleep(LONG));
            assert_eq!(mailbox.stop(|state| std::mem::replace(state, 2)), 1);
            assert_eq!(stopped.join().unwrap(), None);
            sleeping.join().unwrap();
        });
        assert_eq!(mailbox.change(|state| *state), None);
        assert_eq!(wait_for(2, None), None);
        assert!(MonotonicTime::now().since(begun) < LONG);
    }
}
