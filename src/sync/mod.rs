//! The locks, condition variables and atomics of the library, from one place: those of parking_lot and
//! the standard library. Tests built with `--cfg shuttle` get the ones of the models in their stead.

#![allow(unused_imports)]

#[cfg(all(test, shuttle))]
pub(crate) mod model;

#[cfg(not(all(test, shuttle)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::thread::panicking;

#[cfg(all(test, shuttle))]
pub(crate) use model::{Condvar, Mutex, MutexGuard, panicking};
#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

pub(crate) use std::sync::atomic::Ordering;
