// Of two definitions of a link the first counts: here pages are modules and not files.
#![doc = "[choosing a ttl]: guide::choosing_a_ttl"]
#![doc = "[coming from another library]: guide::coming_from"]
#![doc = "[failures]: guide::failures"]
#![doc = "[guarantees]: guide::guarantees"]
#![doc = "[observability]: guide::observability"]
#![doc = "[testing]: guide::testing"]
#![doc = "[the market]: guide::market"]
#![doc = "[tokio]: guide::tokio"]
#![doc = "[what is tested]: guide::conformance"]
#![doc = ""]
#![doc = include_str!("../README.md")]
// Models replace what talks to Redis.
#![cfg_attr(all(test, shuttle), allow(dead_code))]

mod acquire;
mod builder;
mod client;
mod config;
mod error;
mod event;
mod fenced;
mod guard;
// The Rust in it is run by the crate snippets/.
#[cfg(all(doc, not(doctest)))]
pub mod guide;
mod held;
// What benches measure of the parts.
#[cfg(leasehold_internals)]
#[doc(hidden)]
pub mod internals;
mod lease;
mod loss;
mod memory;
mod mutex;
mod observe;
mod reentrant;
mod released;
#[cfg(feature = "serde")]
mod serialize;
mod store;
mod transaction;
mod util;
mod watchdog;

pub use builder::{Builder, ServerAddress};
pub use client::Client;
pub use error::{Error, ErrorKind};
pub use event::{EventHandler, EventLock};
pub use fenced::FencedValue;
pub use guard::{LostSignal, MutexGuard};
pub use held::{HeldLock, LockInfo};
pub use loss::LossReason;
pub use memory::MemoryStore;
pub use mutex::Mutex;
pub use reentrant::{ReentrantGuard, ReentrantMutex};
pub use released::Released;
pub use store::TransactionConnection;
pub use transaction::Committed;
pub use util::id::HolderId;

/// The channels of [`LostSignal`], with their `select!`.
pub use crossbeam_channel;
/// What transactions are written with: pipelines, commands, errors.
pub use redis;
