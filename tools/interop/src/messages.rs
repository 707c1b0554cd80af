//! The messages between this program and its workers. A worker runs the locks of one library, in the library's
//! language; crates/peers/interop has the workers of the other libraries, and [`ours`](crate::ours) is the worker of
//! leasehold. All fields are plain values beside each other: one worker reads them without a JSON library.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How often a worker of a polling library asks.
const POLL: Duration = Duration::from_millis(3);

/// The first message to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// The name of the other library.
    pub library: String,
    /// The name of the lock, as users of the other library write it.
    pub name: String,
    poll_ms: u64,
    watchdog_ms: u64,
}

impl Assignment {
    pub fn new(url: String, library: &str, name: &str) -> Self {
        Self {
            url,
            library: library.to_owned(),
            name: name.to_owned(),
            poll_ms: in_millis(POLL),
            watchdog_ms: in_millis(WATCHDOG),
        }
    }
}

/// The ttl of Redisson's renewed locks.
pub const WATCHDOG: Duration = Duration::from_secs(3);

/// An order to a worker, which answers each one with a [`Report`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Order {
    /// Takes the lock and runs the section, again and again.
    Grants(Grants),
    /// Waits for the lock, and holds it.
    Lock {
        /// `None` for the library's form of a lock without a given ttl.
        ttl_ms: Option<u64>,
    },
    /// Holds the lock if it is free.
    TryLock { ttl_ms: u64 },
    /// Releases the lock.
    Unlock,
    /// Redisson only: holds the locks `NAME:0`, `NAME:1` and so on.
    LockMany { count: u32 },
    /// Redisson only: releases these locks.
    UnlockMany,
    /// leasehold only: asks for the locks of `LockMany` without waiting, for this time. Reports the grants.
    Contend { count: u32, for_ms: u64 },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Grants {
    /// `None` until the next order comes: leasehold only.
    pub count: Option<u32>,
    /// The ttl of each lock, unless the library renews its locks.
    pub ttl_ms: u64,
    /// The time in the section.
    pub hold_ms: u64,
    /// The longest pause after a release. Without it, a library that polls would find the lock taken nearly always.
    pub pause_ms: u64,
    /// False for the control: the worker enters the section without the lock.
    pub locked: bool,
}

/// The answer to an order. Workers leave out what does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Whether the lock was taken, or released.
    pub done: bool,
    pub grants: u32,
    /// The number of entries that found another worker in the section.
    pub overlaps: u32,
    /// How often a fencing token was not greater than the one before.
    pub stale_tokens: u32,
    pub longest_wait_ms: f64,
}

/// The name in the section's keys.
pub fn section_key(name: &str, field: &str) -> String {
    format!("section:{name}:{field}")
}

pub fn in_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
