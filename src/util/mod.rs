//! Parts that do not depend on locks: clock, keys, ids, threads, printable text.

pub mod backoff;
pub mod clock;
pub mod fork;
#[cfg(all(test, not(shuttle)))]
pub mod fuzz;
pub mod id;
pub mod key;
pub mod slot;
pub mod sync;
pub mod text;
pub mod threads;
