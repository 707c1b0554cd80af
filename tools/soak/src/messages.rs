//! The messages between the soak and its processes: one JSON value per line. Also the keys and the settings that both
//! use.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::random::Random;
use crate::records::now;

pub const COMMAND_TIMEOUT: Duration = Duration::from_millis(300);
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
/// For how long a `lock()` waits through an outage: for less than many faults last, or for more than any. In the second
/// case, no outage is a reason for a `lock()` to fail.
pub const SHORT_OUTAGE: Duration = Duration::from_secs(2);
pub const LONG_OUTAGE: Duration = Duration::from_secs(120);
/// The longest ttl that is requested, also by an extension.
pub const LONGEST_TTL: Duration = Duration::from_secs(4);
/// Until a waiter has confirmed its grant, the ttl of the key may exceed the longest requested ttl by this time.
pub const UNCONFIRMED: Duration = Duration::from_secs(3);

const HOT_KEYS: usize = 3;
const COLD_KEYS: usize = 60;
/// The idle connections that a client's pool may keep after its shutdown, if a forgotten guard keeps the client: one of
/// its pipeline, one of a transaction, two for renewals, and one of pings. The soak sends no pings, but a pool that
/// connects slowly makes a spare connection for a caller that waits.
pub const KEPT_CONNECTIONS: usize = 5;
/// The keys that the usual threads want.
pub const DRAWN_KEYS: usize = HOT_KEYS + COLD_KEYS;
pub const KEYS: usize = DRAWN_KEYS + 9;
/// The time after which a run with a new name begins, in ns.
const RUN_PERIOD: u64 = 400_000_000;
/// The beginning of the keys with the balances of the accounts.
pub const BALANCES: &str = "balance:";
/// The permits under [`permits_key`] and [`paced_key`].
pub const PERMITS: u32 = 5;
pub const PACED: u32 = 3;
/// For how long each permit under [`paced_key`] stays taken from its grant on.
pub const MIN_HOLD: Duration = Duration::from_millis(300);
/// The ttl in a race, longer than any wait.
pub const RACE_TTL: Duration = Duration::from_secs(60);

/// Whether the key is one of the first keys, which every thread wants.
pub const fn is_hot(key: usize) -> bool {
    key < HOT_KEYS
}

pub const fn hot_keys() -> usize {
    HOT_KEYS
}

/// The key of the contention fault.
pub const fn contended_key() -> usize {
    DRAWN_KEYS
}

/// The key of the races.
pub const fn race_key() -> usize {
    DRAWN_KEYS + 1
}

/// The key of readers and writers.
pub const fn rw_key() -> usize {
    DRAWN_KEYS + 2
}

/// The key of permits, and sometimes of a mutex.
pub const fn permits_key() -> usize {
    DRAWN_KEYS + 3
}

/// The key of permits with a shortest hold.
pub const fn paced_key() -> usize {
    DRAWN_KEYS + 4
}

/// The keys of two accounts, which are locked together. They have one slot.
pub const fn account_keys() -> [usize; 2] {
    [DRAWN_KEYS + 5, DRAWN_KEYS + 6]
}

/// The key of the election.
pub const fn election_key() -> usize {
    DRAWN_KEYS + 7
}

/// The key that stands for the keys of all runs. The numbers of those keys begin with [`KEYS`], and the keys have the
/// same slot as this one.
pub const fn runs_key() -> usize {
    DRAWN_KEYS + 8
}

/// The key of the run whose time is now.
pub fn present_run() -> usize {
    KEYS + (now() / RUN_PERIOD) as usize
}

/// Whether the work of this run shall run at most once. The work of other runs shall run at least once.
pub const fn is_at_most_once(key: usize) -> bool {
    key.is_multiple_of(2)
}

/// The key below [`KEYS`] that has the slot of this key.
pub fn key_of_slot(key: usize) -> usize {
    key.min(runs_key())
}

/// Whether leases may share the key.
pub const fn is_shared(key: usize) -> bool {
    key >= rw_key() && key <= paced_key()
}

/// A random key of those that are held most of the time.
pub fn busy_key(random: &mut Random) -> usize {
    let drawn = random.below(HOT_KEYS + KEYS - rw_key());
    match drawn.checked_sub(HOT_KEYS) {
        None => drawn,
        Some(shared) => rw_key() + shared,
    }
}

pub fn key_name(key: usize) -> String {
    let kind = match key {
        key if key == rw_key() => "rw",
        key if key == permits_key() => "permits",
        key if key == paced_key() => "paced",
        key if key == contended_key() => "contended",
        key if key == race_key() => "race",
        key if key >= runs_key() => "{run}",
        key if key == election_key() => "election",
        key if account_keys().contains(&key) => "{account}",
        key if is_hot(key) => "hot",
        _ => "cold",
    };
    format!("{kind}-{key}")
}

/// The lock that this name belongs to: see [`key_name`].
pub fn key_of(name: &str) -> Option<usize> {
    let (_, number) = name.rsplit_once('-')?;
    number.parse().ok()
}

/// The key in Redis with the balance of an account.
pub fn balance_name(account: usize) -> String {
    format!("{BALANCES}{}", key_name(account))
}

/// The name of the lock's key in Redis.
pub fn key_in_redis(key: usize) -> String {
    format!("leasehold:{}", key_name(key))
}

/// The first line that a process reads.
#[derive(Clone, Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// The folder of the threads' records.
    pub folder: PathBuf,
    pub seed: u64,
    pub round: u64,
    pub process: usize,
    pub life: usize,
    pub threads: usize,
    /// For how long a `lock()` waits through an outage.
    pub outage: Duration,
}

/// A message to a process, after its assignment. The process ends when its input ends.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Begin nothing new, end the client, and report what is left.
    Finish,
    /// Acquire this many locks that only this process wants, and report their number.
    Hold { count: usize },
    /// Drop them, and report that.
    Drop,
    /// Make this many clients, with a thread each, compete for one key for this many ms.
    Contend { clients: usize, millis: u64 },
    /// Make a client for each of these numbers of threads, for a race, and report that.
    Race { threads: Vec<usize> },
    /// Race until this moment, on the clock of all processes, and report when all clients have ended.
    Go { until: u64 },
}

/// The work of a process's clients in a race.
#[derive(Debug, Serialize, Deserialize)]
pub struct Raced {
    /// How often the clients left traces in Redis.
    pub raised: u64,
}

/// A message from a process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    Ready,
    /// This many of the ordered locks are held.
    Holding {
        count: usize,
    },
    /// All guards were dropped.
    Dropped,
    /// The clients for a race are ready.
    AtStart,
    /// The race is over, and its clients have ended.
    Raced(Raced),
    /// All threads and the client have ended.
    Finished {
        /// Names of leasehold's threads that still run.
        threads: Vec<String>,
        /// Whether forgotten guards keep a client.
        is_kept: bool,
    },
}
