//! The locks, condition variables, sleeps and atomics of code that models run. They come from parking_lot, crossbeam
//! and the standard library, or in tests with `--cfg shuttle` from `model.rs` and shuttle.

#[cfg(test)]
#[cfg(shuttle)]
pub mod model;

#[cfg(not(all(test, shuttle)))]
pub mod either;
pub mod yields;

#[cfg(not(all(test, shuttle)))]
pub use either::{either, try_send};
#[cfg(not(all(test, shuttle)))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub use std::sync::atomic::AtomicBool;
#[cfg(not(all(test, shuttle)))]
pub use std::thread::{Thread, current as this_thread, panicking, park_timeout, yield_now};

#[cfg(all(test, shuttle))]
pub use {
    model::{
        Condvar, Mutex, MutexGuard, Sleeper as Thread, either, panicking, park_timeout,
        this_thread, try_send,
    },
    shuttle::sync::atomic::AtomicBool,
    shuttle::thread::yield_now,
};

pub use std::sync::atomic::Ordering;

pub use yields::Yields;

/// The channel that had a message or was disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either {
    First,
    Second,
}
