//! The locks, condition variables, sleeps and atomics of all that models run, from one place: those of
//! parking_lot, crossbeam and the standard library. Tests built with `--cfg shuttle` get the models' instead.

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
pub(crate) use std::thread::{Thread, current as this_thread, panicking, park_timeout};

#[cfg(all(test, shuttle))]
pub(crate) use {
    model::{
        Condvar, Mutex, MutexGuard, Sleeper as Thread, either, panicking, park_timeout,
        this_thread, try_send,
    },
    shuttle::sync::atomic::AtomicBool,
};

pub(crate) use std::sync::atomic::Ordering;

/// Which of two channels had a message, or has no sender any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Either {
    First,
    Second,
}
