//! What a load process and whoever started it say to each other: one JSON value per line. The first that
//! a process reads is its [`Assignment`], then come [`Round`]s. It answers each of them by a `Result` of a
//! [`Tally`] (an empty one once it has set up). No behaviour.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Whose locks, and how they are let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// The commands themselves on a connection per thread, both awaited.
    Raw,
    /// Group commit with our scripts and nothing else, no answer to a release awaited.
    Limit,
    /// Ours, the guard dropped.
    Drop,
    /// Ours, `unlock()`.
    Unlock,
    /// rslock, a task per thread, one connection.
    Rslock {
        /// How long it pauses at most before it asks again; its default is 200.
        pause_ms: u32,
    },
    /// redlock, a connection for each request.
    Redlock {
        /// As for rslock.
        pause_ms: u32,
    },
}

/// Which keys the threads want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keys {
    /// Each thread of each process its own.
    Own,
    /// All of them one.
    One,
}

/// What a process does in every round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Where Redis is.
    pub url: String,
    /// Whose locks.
    pub way: Way,
    /// Which of its crew's processes it is, from 0.
    pub process: usize,
    /// How many threads (or tasks) it has.
    pub threads: usize,
    /// Which keys they want.
    pub keys: Keys,
    /// How long each lock is held.
    pub hold: Duration,
    /// The one core to run on.
    pub core: Option<usize>,
}

impl Assignment {
    /// The key that a thread wants. Ways do not share keys.
    pub fn key(&self, thread: usize) -> String {
        match self.keys {
            Keys::Own => format!("{:?}-{}-{thread}", self.way, self.process),
            Keys::One => format!("{:?}", self.way),
        }
    }
}

/// From when on, for how long, and how.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Round {
    /// On the clock of all processes, in ns.
    pub start: u64,
    /// No lock is asked for when it has passed.
    pub window: Duration,
    /// Locks are asked for as fast as they are had, unless at times that are given.
    pub pace: Option<Pace>,
}

/// When locks are asked for, however long those before took: a rate that does not adapt.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    /// From one of a thread's locks to its next.
    pub interval: Duration,
    /// How many threads there are in all processes together: their turns are spread evenly.
    pub threads: usize,
}

/// What a thread, a process or a crew did in a round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Locks had and let go.
    pub pairs: u64,
    /// Those of them that were had within the window.
    pub in_time: u64,
    /// Locks that were to be asked for and never were: the pace could not be kept.
    pub left_out: u64,
    /// What the thread had that got least, and the one that got most.
    pub least: u64,
    /// As for `least`.
    pub most: u64,
    /// From asking to having: ns, how often.
    pub waits: Vec<(u64, u64)>,
    /// CPU time of the process.
    pub cpu: Duration,
}
