//! Parts that do not depend on locks: clock, ids, slots, synchronization, printable text.

pub mod backoff;
pub mod clock;
#[cfg(all(test, not(shuttle)))]
pub mod fuzz;
pub mod id;
pub mod mailbox;
pub mod slot;
pub mod sync;
pub mod text;
