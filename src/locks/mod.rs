//! The types that users lock with: locks of all kinds and their guards, work that runs once, transactions, fenced
//! values, and descriptions of locks.

pub mod election;
pub mod fenced;
pub mod guard;
pub mod held;
pub mod listing;
pub mod lock;
pub mod mutex;
pub mod mutexes;
pub mod once;
pub mod reentrant;
pub mod rwlock;
pub mod semaphore;
#[cfg(feature = "serde")]
pub mod serialize;
pub mod transaction;
