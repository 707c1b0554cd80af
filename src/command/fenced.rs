//! Writes and reads a fenced value.

use std::sync::Arc;
use std::time::Duration;

use crate::util::key::Key;

/// Writes or deletes a fenced value, unless it was changed under a greater token. The token stays.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: Key,
    pub token: u64,
    /// `None` deletes the value.
    pub value: Option<Arc<[u8]>>,
    /// For how long Redis keeps value and token from now on. `None` leaves the ttl as it is.
    pub ttl: Option<Duration>,
}

/// Reads a fenced value.
#[derive(Clone, Debug)]
pub struct Read {
    pub key: Key,
}
