//! The messages between a load process and its parent: one JSON value per line. The process first reads its
//! [`Assignment`] and sets up, then it reads [`Round`]s. It answers each message with a `Result` of a [`Tally`], which
//! is empty after the assignment.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The kind of lock, and how it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// The raw commands on a connection per thread. The thread awaits both replies.
    Raw,
    /// The same as `Raw`, but the thread does not await the reply to the release.
    PipedRaw,
    /// A `parking_lot` mutex with fair unlock, without Redis. Counts only the holds that came from another thread.
    FairMutex,
    /// [`FairQueue`](crate::FairQueue), without Redis: the limit for a fair lock of one process.
    FairQueue,
    /// A minimal program: group commit with leasehold's scripts. A thread does not await the reply to its release.
    Limit,
    /// leasehold, dropping the guard.
    Drop,
    /// leasehold, with `unlock()`.
    Unlock,
    /// leasehold, with the closure of `with_lock`.
    WithLock,
    /// rslock, a task per thread, one connection.
    Rslock {
        /// The longest pause before the next attempt; the default of the crate is 200.
        pause_ms: u32,
    },
    /// redlock, a connection for each request.
    Redlock {
        /// The longest pause before the next attempt; the default of the crate is 200.
        pause_ms: u32,
    },
}

/// The keys that the threads want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keys {
    /// Each thread of each process wants its own key.
    Own,
    /// All threads want one key.
    One,
}

/// The work of a process in every round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// The URL of Redis.
    pub url: String,
    /// The kind of lock.
    pub way: Way,
    /// The number of the process, from 0.
    pub process: usize,
    /// The number of its threads (or tasks).
    pub threads: usize,
    /// The keys that they want.
    pub keys: Keys,
    /// How long each lock is held.
    pub hold: Duration,
    /// The one core to run on.
    pub core: Option<usize>,
}

impl Assignment {
    /// The key that a thread wants. Kinds of locks do not share keys.
    pub fn key(&self, thread: usize) -> String {
        match self.keys {
            Keys::Own => format!("{:?}-{}-{thread}", self.way, self.process),
            Keys::One => format!("{:?}", self.way),
        }
    }
}

/// The start, the length and the pace of a round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Round {
    /// The start, in ns on the monotonic clock that all processes read.
    pub start: u64,
    /// The length. Without a pace, threads request no lock after it. With a pace, threads that are late still send the
    /// requests that were due in this time, until twice the length has passed.
    pub window: Duration,
    /// The times of requests. Without a pace, each thread requests a lock as soon as it has released one.
    pub pace: Option<Pace>,
}

/// Fixed times for requests, which do not depend on how long earlier locks took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    /// The time between two requests of a thread.
    pub interval: Duration,
    /// The number of threads in all processes: their requests are spread evenly.
    pub threads: usize,
}

/// The work of a thread, a process or a group of processes in a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Locks acquired and released.
    pub pairs: u64,
    /// Locks acquired within the window.
    pub in_time: u64,
    /// Requests that were due and never sent: the pace was too fast.
    pub left_out: u64,
    /// The locks of the thread that got the fewest.
    pub least: u64,
    /// The locks of the thread that got the most.
    pub most: u64,
    /// How often each wait from a request to its lock occurred: (ns, count).
    pub waits: Vec<(u64, u64)>,
    /// The CPU time of the process.
    pub cpu: Duration,
}
