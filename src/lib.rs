#![doc = include_str!("../README.md")]
// Models replace what talks to Redis.
#![cfg_attr(all(test, shuttle), allow(dead_code))]

mod client;
mod clock;
mod config;
mod error;
mod event;
mod guard;
mod id;
mod key;
mod lease;
mod loss;
mod mutex;
mod store;
mod sync;
mod thread;
mod transaction;
mod wait;
mod watchdog;

pub use client::{Builder, Client};
pub use error::{Error, ErrorKind};
pub use event::{EventLock, Events};
pub use guard::{LostSignal, MutexGuard};
pub use id::HolderId;
pub use loss::LossReason;
pub use mutex::Mutex;
pub use store::TransactionConnection;

/// The channels of [`LostSignal`], with their `select!`.
pub use crossbeam_channel;
/// What transactions are written with: pipelines, commands, errors.
pub use redis;
