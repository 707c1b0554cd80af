//! The cases of the bench: which locks, by how many threads and processes, on which keys, held for how long. Each case
//! has two forms: on a quiet machine, and beside busy loops. Data only.

use std::time::Duration;

use leasehold_load::{Keys, Way};

pub struct Case {
    /// Names the number of threads or processes, and the differences from the usual case, in which each thread has its
    /// own key and releases it at once.
    pub name: &'static str,
    pub processes: usize,
    /// Threads of each process.
    pub threads: usize,
    pub keys: Keys,
    pub hold: Duration,
    /// Whether all processes and the server share one core.
    pub pinned: bool,
}

/// The other load on the machine while a case is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Nothing.
    Quiet,
    /// One busy loop per core.
    Busy,
}

/// The ways that a run measures in each form of a case.
pub struct Plan {
    pub case: &'static Case,
    /// In each list, the raw commands come first.
    pub quiet: Vec<Way>,
    pub busy: Vec<Way>,
}

impl Plan {
    pub fn ways(&self, form: Form) -> &[Way] {
        match form {
            Form::Quiet => &self.quiet,
            Form::Busy => &self.busy,
        }
    }
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

pub const CASES: [Case; 13] = [
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
    case("2-threads-one-key", Keys::One, 1, 2),
    case("4-threads-one-key", Keys::One, 1, 4),
    case("16-threads-one-key", Keys::One, 1, 16),
    case("64-threads-one-key", Keys::One, 1, 64),
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

// Beside busy loops, a run leaves out the ways that no goal and no text compares there. Otherwise the run would take
// too long.
const UNCONTENDED_BUSY: [Way; 5] = [Way::Raw, Way::Limit, Way::Drop, Way::Unlock, RSLOCK];
const CONTENDED_BY_PROCESSES_BUSY: [Way; 4] = [Way::Raw, Way::Drop, Way::Unlock, EAGER_RSLOCK];
const CONTENDED_BY_THREADS_BUSY: [Way; 6] = [
    Way::Raw,
    Way::FairQueue,
    Way::Drop,
    Way::WithLock,
    Way::Unlock,
    EAGER_RSLOCK,
];

impl Case {
    /// The ways that a run can measure in this form. The raw commands come first, since a run compares all other ways
    /// with them.
    pub fn ways(&self, form: Form) -> &'static [Way] {
        match (form, self.keys, self.processes) {
            (Form::Quiet, Keys::Own, _) => &UNCONTENDED,
            (Form::Quiet, Keys::One, 1) => &CONTENDED_BY_THREADS,
            (Form::Quiet, Keys::One, _) => &CONTENDED_BY_PROCESSES,
            (Form::Busy, Keys::Own, _) => &UNCONTENDED_BUSY,
            (Form::Busy, Keys::One, 1) => &CONTENDED_BY_THREADS_BUSY,
            (Form::Busy, Keys::One, _) => &CONTENDED_BY_PROCESSES_BUSY,
        }
    }

    pub fn name_of(&self, form: Form) -> String {
        match form {
            Form::Quiet => self.name.to_owned(),
            Form::Busy => format!("{}-busy", self.name),
        }
    }

    /// Whether the name of one of its forms contains this part.
    pub fn is_named(&self, part: &str) -> bool {
        self.name_of(Form::Busy).contains(part)
    }

    /// The threads of all processes.
    pub fn seats(&self) -> usize {
        self.processes * self.threads
    }

    /// A form of the case in words.
    pub fn title(&self, form: Form) -> String {
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
        let beside = match form {
            Form::Quiet => "",
            Form::Busy => ", beside one busy loop per core",
        };
        format!("{who}, {keys}, {held}{pinned}{beside}")
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
        let both = [Form::Quiet, Form::Busy];
        let forms = CASES.iter().flat_map(|case| both.map(|form| (case, form)));
        for (case, form) in forms {
            assert_eq!(case.ways(form).first(), Some(&Way::Raw));
            for way in case.ways(form) {
                assert!(names.insert(format!("{}/{}", case.name_of(form), way_name(*way))));
            }
        }
    }

    #[test]
    fn every_way_beside_busy_loops_has_a_quiet_form() {
        for case in &CASES {
            for way in case.ways(Form::Busy) {
                assert!(
                    case.ways(Form::Quiet).contains(way),
                    "{}: {way:?}",
                    case.name
                );
            }
        }
    }
}
