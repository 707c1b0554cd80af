//! Locks in Redis for multi-threaded services.
//!
//! A [`Client`] acquires a lock and blocks the calling thread until the thread has the lock. It renews each held lock
//! in the background, and notifies the holder when a lock is lost.
//!
//! ```no_run
//! use leasehold::Client;
//!
//! fn main() -> Result<(), leasehold::Error> {
//!     let client = Client::open("redis://127.0.0.1:6379")?; // one per process; clone it freely
//!     client.with_lock("invoice:42", || println!("no other process is here"))?;
//!
//!     let guard = client.mutex("invoice:42").lock()?;
//!     println!("write with fencing token {}", guard.fencing_token());
//!     guard.check() // Err(LeaseLost) if the lock was lost; dropping the guard releases it
//! }
//! ```
//!
//! A lock is a *lease*: if a process stops for longer than the ttl, or if Redis loses its data, two holders can exist
//! for a short time. Each grant has a fencing token, with which a storage can refuse the writes of a late holder. Read
//! [`guide::guarantees`] before you rely on a lock alone.
//!
//! Tests work without a server: [`Client::memory`] keeps locks in the process, and a test moves the clock of a
//! [`MemoryStore`], or makes it fail: [`guide::testing`].
//!
//! # Which type to use
//!
//! | task | type |
//! |---|---|
//! | run a closure under a lock | [`Client::with_lock`] |
//! | hold a lock for as long as a guard lives | [`Mutex`], [`MutexGuard`] |
//! | lock several keys together | [`Mutexes`], [`MutexesGuard`] |
//! | lock again on the same thread | [`ReentrantMutex`] |
//! | run work once for each name, such as a nightly job | [`Once`] |
//! | elect a leader among processes, and observe who leads | [`Election`], [`Leader`], [`Observer`] |
//! | let many readers in, or one writer | [`RwLock`], [`RwLockReadGuard`], [`RwLockWriteGuard`] |
//! | let n holders in at a time | [`Semaphore`], [`SemaphorePermit`] |
//! | limit how often something starts | [`Semaphore::min_hold`], [`Mutex::min_hold`] |
//! | stop waiting | [`Mutex::try_lock`], [`Mutex::try_lock_for`], [`Mutex::try_with_for`], [`Mutex::cancelled_by`] |
//! | learn of a loss | [`MutexGuard::check`], [`MutexGuard::lost_signal`], [`MutexGuard::on_lost`], [`LossReason`] |
//! | change data in the same Redis only while the lock is held | [`MutexGuard::transaction`] |
//! | refuse late writes | [`MutexGuard::fencing_token`], [`FencedValue`] |
//! | pass a held lock to another process | [`MutexGuard::into_ticket`], [`Client::adopt`] |
//! | inspect or take away a lock | [`Mutex::inspect`], [`Client::held_locks`], [`Client::locks`], [`Mutex::force_unlock`] |
//! | exclude the locks of other libraries | [`Builder::compatible_with`], [`OtherLibrary`] |
//! | check the settings of Redis | [`Client::check_environment`] |
//! | log and count what happens | [`EventHandler`], the features below |
//!
//! Fork before you make a client: in a forked child, the parent's client fails with [`Forked`](ErrorKind::Forked), and
//! the child cannot make a new client. The parent keeps its locks.
//!
//! # Feature flags
//!
//! | feature | adds | default |
//! |---|---|---|
//! | `tracing` | spans of waits and holds, warnings of losses | off |
//! | `metrics` | counters and histograms | off |
//! | `tls` | `rediss://` URLs and `TlsConfig`, by rustls | off |
//! | `serde` | `Serialize` of plain data: [`LockInfo`], [`RwLockInfo`], [`SemaphoreInfo`], [`HolderInfo`], [`HolderId`], [`LossReason`], [`LostKey`], [`ErrorKind`] | off |
//!
//! [`guide::observability`] lists the names of spans and metrics.
//!
//! # Where to read on
//!
//! The [`guide`] has a page on each subject. Start with [`guide::guarantees`] and [`guide::choosing_a_ttl`];
//! [`guide::settings`] lists the settings, [`guide::failures`] the errors, [`guide::topologies`] the URLs, and
//! [`guide::in_your_redis`] what Redis stores and which rights its user needs.

// In the builds for models (`--cfg shuttle`), doubles replace the code that talks to Redis, so that code is unused.
#![cfg_attr(all(test, shuttle), allow(dead_code))]

mod acquire;
mod client;
mod cluster;
mod command;
mod config;
// `crates/snippets/` runs the Rust of these pages.
#[cfg(all(doc, not(doctest)))]
pub mod guide;
// Parts of the library, for the bench `micro`.
#[cfg(leasehold_internals)]
#[doc(hidden)]
pub mod internals;
mod lease;
mod locks;
mod memory;
mod process;
mod quorum;
mod report;
mod store;
mod util;
mod watchdog;
mod wire;

pub use acquire::{LeaderInfo, LeaderState};
pub use client::Client;
pub use client::address::{QuorumNode, ServerAddress};
pub use client::builder::Builder;
pub use client::memory_store::{MemoryQuorum, MemoryStore};
pub use config::credentials::Credentials;
pub use config::other_library::OtherLibrary;
#[cfg(feature = "tls")]
pub use config::tls::TlsConfig;
pub use locks::election::{Election, Leader, Observer};
pub use locks::fenced::FencedValue;
pub use locks::guard::LostSignal;
pub use locks::held::{HeldLock, HolderInfo, HolderKind, LockInfo};
pub use locks::listing::{FoundLock, FoundLocks};
pub use locks::mutex::{Mutex, MutexGuard};
pub use locks::mutexes::{Mutexes, MutexesGuard};
pub use locks::once::{Once, Record, Recordable, Run};
pub use locks::reentrant::{ReentrantGuard, ReentrantMutex};
pub use locks::rwlock::{RwLock, RwLockInfo, RwLockReadGuard, RwLockWriteGuard};
pub use locks::semaphore::{Semaphore, SemaphoreInfo, SemaphorePermit};
pub use locks::transaction::Committed;
pub use report::environment::{EnvironmentFinding, EnvironmentWarning};
pub use report::error::{Error, ErrorKind};
pub use report::event::{EventHandler, EventLock};
pub use report::loss::{LossReason, LostKey};
pub use report::node_state::{NodeClock, NodeHealth, NodeState};
pub use report::released::Released;
pub use util::id::HolderId;
pub use wire::session::TransactionConnection;

/// The channel crate: the channels of [`LostSignal`], and `select!`.
pub use crossbeam_channel;
/// The redis crate: the pipelines, commands and errors of transactions.
pub use redis;
