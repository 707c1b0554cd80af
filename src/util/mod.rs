//! Parts that do not depend on locks: clock, keys, ids, threads, printable text.

pub(crate) mod clock;
pub(crate) mod fork;
#[cfg(all(test, not(shuttle)))]
pub(crate) mod fuzz;
pub(crate) mod id;
pub(crate) mod key;
pub(crate) mod slot;
pub(crate) mod sync;
pub(crate) mod text;
pub(crate) mod threads;
