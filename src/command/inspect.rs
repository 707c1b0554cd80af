//! Reads a lock's value.

use crate::util::key::Key;

/// Reads the lock's value and ttl, and the length of its queue.
#[derive(Clone, Debug)]
pub struct Inspect {
    pub key: Key,
}
