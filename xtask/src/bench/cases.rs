//! The cases of the bench: which locks, by how many threads and processes, on which keys, held for how long.
//! Data only.

use std::time::Duration;

use leasehold_load::{Keys, Way};

pub struct Case {
    /// The first word says which keys the threads want: `own` or `one`.
    pub name: &'static str,
    pub processes: usize,
    /// Threads of each process.
    pub threads: usize,
    pub keys: Keys,
    pub hold: Duration,
    /// Whether all processes and the server share one core.
    pub pinned: bool,
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
    case("own-key-1", Keys::Own, 1, 1),
    Case {
        pinned: true,
        ..case("own-key-1-pinned", Keys::Own, 1, 1)
    },
    case("own-keys-16", Keys::Own, 1, 16),
    case("own-keys-64", Keys::Own, 1, 64),
    case("own-keys-256", Keys::Own, 1, 256),
    Case {
        hold: HOLD,
        ..case("own-keys-16-held", Keys::Own, 1, 16)
    },
    case("one-key-16", Keys::One, 1, 16),
    case("one-key-4x1", Keys::One, 4, 1),
    case("one-key-8x1", Keys::One, 8, 1),
    Case {
        hold: HOLD,
        ..case("one-key-4x1-held", Keys::One, 4, 1)
    },
];

/// By default both crates pause for up to 200 ms before the next attempt.
const RSLOCK: Way = Way::Rslock { pause_ms: 200 };
const REDLOCK: Way = Way::Redlock { pause_ms: 200 };
/// Short pauses, as a user would choose for throughput.
const EAGER_RSLOCK: Way = Way::Rslock { pause_ms: 5 };
const EAGER_REDLOCK: Way = Way::Redlock { pause_ms: 5 };

const UNCONTENDED: [Way; 6] = [
    Way::Raw,
    Way::Limit,
    Way::Drop,
    Way::Unlock,
    RSLOCK,
    REDLOCK,
];
const CONTENDED: [Way; 7] = [
    Way::Raw,
    Way::Drop,
    Way::Unlock,
    RSLOCK,
    EAGER_RSLOCK,
    REDLOCK,
    EAGER_REDLOCK,
];

impl Case {
    /// The raw commands come first: all other ways are compared with them.
    pub fn ways(&self) -> &'static [Way] {
        match self.keys {
            Keys::Own => &UNCONTENDED,
            Keys::One => &CONTENDED,
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
        Way::Limit => "limit".to_owned(),
        Way::Drop => "drop".to_owned(),
        Way::Unlock => "unlock".to_owned(),
        Way::Rslock { pause_ms: 200 } => "rslock".to_owned(),
        Way::Redlock { pause_ms: 200 } => "redlock".to_owned(),
        Way::Rslock { pause_ms } => format!("rslock-{pause_ms}ms"),
        Way::Redlock { pause_ms } => format!("redlock-{pause_ms}ms"),
    }
}

/// The commands that only the scripts of a way call. Redis counts these commands in addition to the script calls.
pub fn scripted(way: Way) -> &'static [&'static str] {
    match way {
        Way::Limit | Way::Drop | Way::Unlock => &[
            "append",
            "del",
            "exists",
            "getrange",
            "mget",
            "pexpire",
            "pttl",
            "publish",
            "pubsub|numsub",
            "set",
            "time",
        ],
        Way::Raw | Way::Rslock { .. } | Way::Redlock { .. } => &["get", "del"],
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
