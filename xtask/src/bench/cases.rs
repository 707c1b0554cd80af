//! The cases of the bench: which locks, by how many threads and processes, on which keys, held for how long.
//! Data only.

use std::time::Duration;

use leasehold_load::{Keys, Way};

pub struct Case {
    /// Says how many threads or processes there are, and how the case differs from a key for each of them, released at
    /// once.
    pub name: &'static str,
    pub processes: usize,
    /// Threads of each process.
    pub threads: usize,
    pub keys: Keys,
    pub hold: Duration,
    /// Whether all processes and the server share one core.
    pub pinned: bool,
}

/// The ways that a run measures in a case.
pub struct Plan {
    pub case: &'static Case,
    /// The raw commands come first.
    pub ways: Vec<Way>,
}

const fn case(name: &'static str, keys: Keys, processes: usize, threads: usize) -> Case {
    Case {
        name,
        processes,
        threads,
        keys,
        hold: Duration::ZERO,
        pinned: false,
    }
}

const HOLD: Duration = Duration::from_millis(1);

pub const CASES: [Case; 10] = [
    case("1-thread", Keys::Own, 1, 1),
    Case {
        pinned: true,
        ..case("1-thread-one-core", Keys::Own, 1, 1)
    },
    case("16-threads", Keys::Own, 1, 16),
    case("64-threads", Keys::Own, 1, 64),
    case("256-threads", Keys::Own, 1, 256),
    Case {
        hold: HOLD,
        ..case("16-threads-held-1ms", Keys::Own, 1, 16)
    },
    case("16-threads-one-key", Keys::One, 1, 16),
    case("4-processes-one-key", Keys::One, 4, 1),
    case("8-processes-one-key", Keys::One, 8, 1),
    Case {
        hold: HOLD,
        ..case("4-processes-one-key-held-1ms", Keys::One, 4, 1)
    },
];

/// By default both crates pause for up to 200 ms before the next attempt.
pub const RSLOCK: Way = Way::Rslock { pause_ms: 200 };
const REDLOCK: Way = Way::Redlock { pause_ms: 200 };
/// Short pauses, as a user would choose for throughput.
const EAGER_RSLOCK: Way = Way::Rslock { pause_ms: 5 };
const EAGER_REDLOCK: Way = Way::Redlock { pause_ms: 5 };

const UNCONTENDED: [Way; 7] = [
    Way::Raw,
    Way::PipedRaw,
    Way::Limit,
    Way::Drop,
    Way::Unlock,
    RSLOCK,
    REDLOCK,
];
const CONTENDED_BY_PROCESSES: [Way; 7] = [
    Way::Raw,
    Way::Drop,
    Way::Unlock,
    RSLOCK,
    EAGER_RSLOCK,
    REDLOCK,
    EAGER_REDLOCK,
];

const CONTENDED_BY_THREADS: [Way; 10] = [
    Way::Raw,
    Way::FairMutex,
    Way::FairQueue,
    Way::Drop,
    Way::WithLock,
    Way::Unlock,
    RSLOCK,
    EAGER_RSLOCK,
    REDLOCK,
    EAGER_REDLOCK,
];

impl Case {
    /// The raw commands come first: all other ways are compared with them.
    pub fn ways(&self) -> &'static [Way] {
        match (self.keys, self.processes) {
            (Keys::Own, _) => &UNCONTENDED,
            (Keys::One, 1) => &CONTENDED_BY_THREADS,
            (Keys::One, _) => &CONTENDED_BY_PROCESSES,
        }
    }

    pub fn is_named(&self, part: &str) -> bool {
        self.name.contains(part)
    }

    /// The threads of all processes.
    pub fn seats(&self) -> usize {
        self.processes * self.threads
    }

    /// The case in words.
    pub fn title(&self) -> String {
        let who = match (self.processes, self.threads) {
            (1, 1) => "1 thread".to_owned(),
            (1, threads) => format!("{threads} threads"),
            (processes, 1) => format!("{processes} processes of 1 thread"),
            (processes, threads) => format!("{processes} processes of {threads} threads"),
        };
        let keys = match self.keys {
            Keys::Own => "one key per thread",
            Keys::One => "one key",
        };
        let held = match self.hold {
            Duration::ZERO => "released at once".to_owned(),
            hold => format!("held for {hold:?}"),
        };
        let pinned = if self.pinned {
            ", all on one core together with Redis"
        } else {
            ""
        };
        format!("{who}, {keys}, {held}{pinned}")
    }
}

/// The name of a way in the rows.
pub fn way_name(way: Way) -> String {
    match way {
        Way::Raw => "raw".to_owned(),
        Way::PipedRaw => "raw-piped".to_owned(),
        Way::FairMutex => "fair-mutex".to_owned(),
        Way::FairQueue => "fair-queue".to_owned(),
        Way::Limit => "limit".to_owned(),
        Way::Drop => "drop".to_owned(),
        Way::Unlock => "unlock".to_owned(),
        Way::WithLock => "with_lock".to_owned(),
        Way::Rslock { pause_ms: 200 } => "rslock".to_owned(),
        Way::Redlock { pause_ms: 200 } => "redlock".to_owned(),
        Way::Rslock { pause_ms } => format!("rslock-{pause_ms}ms"),
        Way::Redlock { pause_ms } => format!("redlock-{pause_ms}ms"),
    }
}

/// The commands that only the scripts and transactions of a way call. Redis counts these commands in addition to the
/// script calls. A transaction counts as one request, its `EXEC`.
pub fn scripted(way: Way) -> &'static [&'static str] {
    match way {
        Way::Limit | Way::Drop | Way::Unlock | Way::WithLock => &[
            "append",
            "del",
            "exists",
            "getrange",
            "mget",
            "multi",
            "pexpire",
            "pttl",
            "publish",
            "pubsub|numsub",
            "set",
            "time",
            "zadd",
            "zcard",
            "zcount",
            "zpopmin",
            "zrange",
            "zrank",
            "zrem",
            "zscore",
        ],
        Way::Raw | Way::PipedRaw | Way::Rslock { .. } | Way::Redlock { .. } => &["get", "del"],
        Way::FairMutex | Way::FairQueue => &[],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn rows_are_unique_and_raw_comes_first() {
        let mut names = BTreeSet::new();
        for case in &CASES {
            assert_eq!(case.ways().first(), Some(&Way::Raw));
            for way in case.ways() {
                assert!(names.insert(format!("{}/{}", case.name, way_name(*way))));
            }
        }
    }
}
