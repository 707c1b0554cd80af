//! What the demo and its processes say to each other: one JSON value per line. No behaviour.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The first line a process reads: where it works, and at what.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    /// Not on the command line, where everybody on the machine could read its password.
    pub url: String,
    /// The library's prefix.
    pub prefix: String,
    pub job: Job,
}

#[derive(Serialize, Deserialize)]
pub enum Job {
    Raise(Raise),
    /// Hold the lock `key` until told otherwise, with a renewed ttl.
    Hold {
        key: String,
        ttl: Duration,
    },
}

/// Raise a counter by reading it and then writing it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Raise {
    /// Where the counter is kept, the prefix included.
    pub counter: String,
    /// Where the fencing token of the last raise is kept.
    pub last_token: String,
    /// The lock to raise it in, if any.
    pub lock: Option<String>,
    pub threads: usize,
    pub time: Duration,
}

/// To a process, after its assignment. When its input ends, so does the process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Go,
    Report,
    Release,
}

/// From a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// Connected: waits for `Order::Go`.
    Ready,
    Raised(Tally),
    /// The lock is somebody else's: waits for it.
    Waiting,
    Held {
        token: u64,
    },
    /// What the guard says of itself.
    Condition {
        lost: bool,
        /// What `check()` said, when it did not say yes.
        objection: Option<String>,
    },
    /// The guard's signal.
    Lost {
        reason: String,
    },
    /// What `unlock()` said, when it did not say yes.
    Released {
        objection: Option<String>,
    },
}

/// What one process did to the counter.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    pub raises: u64,
    /// From the start to the end of the last raise.
    pub took: Duration,
    /// Grants whose token was not above the one before it.
    pub out_of_order: u64,
    /// How long the grants were waited for: ns, how often.
    pub waits: Vec<(u64, u64)>,
}
