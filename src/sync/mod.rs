//! The locks, condition variables, sleeps and atomics of all that models run, from one place: those of
//! parking_lot and the standard library. Tests built with `--cfg shuttle` get the models' instead.

#[cfg(test)]
#[cfg(shuttle)]
pub(crate) mod model;

#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::atomic::AtomicBool;
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::thread::{Thread, current as this_thread, panicking, park_timeout};

#[cfg(all(test, shuttle))]
pub(crate) use {
    model::{Condvar, Mutex, MutexGuard, Sleeper as Thread, panicking, park_timeout, this_thread},
    shuttle::sync::atomic::AtomicBool,
};

pub(crate) use std::sync::atomic::Ordering;
