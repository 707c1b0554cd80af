//! The locks, condition variables, sleeps and atomics of code that models run. They come from parking_lot, crossbeam
//! and the standard library, or in tests with `--cfg shuttle` from `model.rs` and shuttle.

#[cfg(test)]
#[cfg(shuttle)]
pub(crate) mod model;

#[cfg(not(all(test, shuttle)))]
mod either;

#[cfg(not(all(test, shuttle)))]
pub(crate) use either::{either, try_send};
#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::atomic::AtomicBool;
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::thread::{Thread, current as this_thread, panicking, park_timeout, yield_now};

#[cfg(all(test, shuttle))]
pub(crate) use {
    model::{
        Condvar, Mutex, MutexGuard, Sleeper as Thread, either, panicking, park_timeout,
        this_thread, try_send,
    },
    shuttle::sync::atomic::AtomicBool,
    shuttle::thread::yield_now,
};

pub(crate) use std::sync::atomic::Ordering;

/// How often a thread yields before it waits for another thread of the client. The other thread usually runs already,
/// and takes a few µs. To park and to be woken takes longer, above all if the core has become idle in between.
pub(crate) const YIELDS: u32 = if cfg!(all(test, shuttle)) { 1 } else { 10 };

/// The channel that had a message or was disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Either {
    First,
    Second,
}
