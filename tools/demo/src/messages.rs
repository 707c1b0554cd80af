//! The messages between the demo and its processes: one JSON value per line. Data only.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The first line that a process reads: its server and its job.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    /// The URL of Redis. It is not on the command line, where every user of the machine could read its password.
    pub url: String,
    /// The library's prefix.
    pub prefix: String,
    pub job: Job,
}

#[derive(Serialize, Deserialize)]
pub enum Job {
    Increment(Increment),
    /// Hold the lock `key` until the release order, with a renewed ttl.
    Hold {
        key: String,
        ttl: Duration,
    },
}

/// Increment a counter by reading it and then writing it.
#[derive(Clone, Serialize, Deserialize)]
pub struct Increment {
    /// The key of the counter, with the prefix.
    pub counter: String,
    /// The key with the fencing token of the last increment.
    pub last_token: String,
    /// The lock to hold for each increment, if any.
    pub lock: Option<String>,
    pub threads: usize,
    pub time: Duration,
}

/// A message to a process, after its assignment. The process ends when its input ends.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    Go,
    Report,
    Release,
}

/// A message from a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// The process has connected, and waits for `Order::Go`.
    Ready,
    Incremented(Tally),
    /// Another process has the lock, and this process waits.
    Waiting,
    Held {
        token: u64,
    },
    /// The state of the guard.
    Condition {
        lost: bool,
        /// The error of `check()`, if it returned one.
        objection: Option<String>,
    },
    /// The guard's signal came.
    Lost {
        reason: String,
    },
    /// The error of `unlock()`, if it returned one.
    Released {
        objection: Option<String>,
    },
}

/// The work of one process on the counter.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    pub increments: u64,
    /// The time from the start to the end of the last increment.
    pub took: Duration,
    /// The number of grants whose token was not greater than the token before.
    pub out_of_order: u64,
    /// How often each wait for the lock occurred: (ns, count).
    pub waits: Vec<(u64, u64)>,
}
