//! What the soak and its processes say to each other: one JSON value per line; and the settings that
//! both go by. No behaviour.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub const COMMAND_TIMEOUT: Duration = Duration::from_millis(300);
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
/// For how long a `lock()` rides out an outage.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// No lock is asked for, or extended, for longer.
pub const LONGEST_TTL: Duration = Duration::from_secs(4);

const HOT_KEYS: usize = 3;
const COLD_KEYS: usize = 60;
/// Idle connections that the pool of a client may keep after its shutdown, if something keeps the client:
/// with one pipeline and one transaction at a time, and two for renewals.
pub const KEPT_CONNECTIONS: usize = 4;
/// Those that the usual threads want.
pub const DRAWN_KEYS: usize = HOT_KEYS + COLD_KEYS;
pub const KEYS: usize = DRAWN_KEYS + 2;
/// In a race: longer than anybody waits for anything.
pub const RACE_TTL: Duration = Duration::from_secs(60);

/// The first are wanted by everybody.
pub const fn is_hot(key: usize) -> bool {
    key < HOT_KEYS
}

pub const fn hot_keys() -> usize {
    HOT_KEYS
}

/// The one that a crowd of clients wants.
pub const fn crowd_key() -> usize {
    DRAWN_KEYS
}

/// The one that is raced for.
pub const fn race_key() -> usize {
    DRAWN_KEYS + 1
}

pub fn key_name(key: usize) -> String {
    let kind = match key {
        key if key == crowd_key() => "crowd",
        key if key == race_key() => "race",
        key if is_hot(key) => "hot",
        _ => "cold",
    };
    format!("{kind}-{key}")
}

/// The first line a process reads.
#[derive(Clone, Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// Where its threads write their records.
    pub folder: PathBuf,
    pub seed: u64,
    pub round: u64,
    pub process: usize,
    pub life: usize,
    pub threads: usize,
}

/// To a process, after its assignment. When its input ends, so does the process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Begin nothing new, end the client, and tell what is left.
    Finish,
    /// Take so many locks that nobody else wants, and say so.
    Hold { count: usize },
    /// Drop them, and say so.
    Drop,
    /// Have so many clients, each with a thread, want one key for some ms.
    Crowd { clients: usize, millis: u64 },
    /// Make a client for each of these, with so many threads, for a race, and say so.
    Race { threads: Vec<usize> },
    /// Race until this moment, on the clock of all processes, and say when all clients have gone.
    Go { until: u64 },
}

/// What the clients of a process did in a race.
#[derive(Debug, Serialize, Deserialize)]
pub struct Raced {
    /// How often they left traces in Redis.
    pub raised: u64,
}

/// From a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    Ready,
    /// So many of the locks that were ordered are held.
    Holding {
        count: usize,
    },
    /// All of them were dropped.
    Dropped,
    /// The clients for a race are there.
    AtStart,
    /// They have raced, and gone.
    Raced(Raced),
    /// All threads have ended, and the client.
    Finished {
        /// Names of threads of leasehold that are still there.
        threads: Vec<String>,
        /// Whether there is a client that forgotten guards keep.
        is_kept: bool,
    },
}
