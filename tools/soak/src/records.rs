//! The records of the threads of all processes. Each thread has a file, with one JSON value per line. Each line is
//! written at once, so it outlives a SIGKILL.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use leasehold_testbed::terms::Share;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::value::GrantId;

/// The thread and the process that wrote a record. A process that replaces a killed one has the same number and the
/// next life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Who {
    pub process: usize,
    pub life: usize,
    pub thread: usize,
}

/// The next work of a thread. An operation makes several calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operation {
    WithLock,
    LockDrop,
    LockUnlock,
    TryLock,
    TryLockFor,
    Cancelled,
    OwnTtl,
    RenewWhile,
    MaxHold,
    Extend,
    Reentrant,
    HandOver,
    Adopt,
    ForceUnlock,
    Forget,
    /// A lock is held for longer than its ttl.
    Stay,
    /// A fenced value is written under the lock, and sometimes again after the release.
    Write,
    Reopen,
    /// A reader, a writer, permits, and permits with a shortest hold.
    Reader,
    Writer,
    Permits,
    Paced,
    /// The share of some holder is taken away.
    ForceShare,
    /// Several keys are locked together.
    Set,
    /// A term of the election.
    Campaign,
    /// Work is run that shall run once for its name.
    Once,
    /// Two accounts are locked together, and an amount moves between them.
    Transfer,
    /// The work of one of many clients that want one key.
    Contend,
    /// The work of a thread of a race.
    Race,
}

/// A call that can take time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Doing {
    Lock,
    TryLock,
    TryLockFor,
    CancelledLock,
    LockSet,
    TryLockSet,
    CancelledSet,
    Unlock,
    Drop,
    Extend,
    Inspect,
    HandOver,
    Adopt,
    ForceUnlock,
    /// The upgrade of a reader, or the downgrade of a writer.
    Upgrade,
    /// The write of a fenced value.
    Write,
    Campaign,
    Proclaim,
    /// The call of a run, until its work begins or it finds a record.
    Run,
    /// The rest of that call, after the work has returned.
    EndRun,
    /// A transaction between two accounts.
    Transfer,
    Shutdown,
    /// The last handle of a client is dropped.
    Close,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Done,
    Contended,
    /// The kind of the error.
    Failed(String),
}

/// A granted lock. Times are in ms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub key: usize,
    /// 0 for permits, which have none.
    pub token: u64,
    pub share: Share,
    pub ttl: u64,
    /// The longest time for which the lock may be held.
    pub at_most: Option<u64>,
}

/// The state of an election.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Observed {
    Leader { token: u64 },
    Vacant,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    Began(Operation),
    /// Written before a call. `allowed` is the longest wait, in ms. `None` for no limit.
    Called {
        doing: Doing,
        key: Option<usize>,
        allowed: Option<u64>,
    },
    /// Written before the call that locks this set.
    Wants {
        keys: Vec<usize>,
    },
    /// Written after a call, which began at `since`. (That is later than the record before the call, since writing a
    /// record takes time.)
    Returned {
        since: u64,
        outcome: Outcome,
    },
    /// Written after the call that granted the lock.
    Held(Grant),
    /// Written after `Held`: a further key of the same set.
    HeldToo(Grant),
    /// The lease id of the lock, as Redis shows it.
    Identified {
        lease: String,
    },
    /// Written after a check found the guard valid for this many more ns. The time is from before the check.
    Seen {
        left: u64,
    },
    /// An extension to this ttl, in ms. The time is from before the extension.
    Extended {
        ttl: u64,
    },
    /// Written after the guard reported its loss. If it has several keys, it names the lost one.
    Lost {
        reason: String,
        key: Option<usize>,
    },
    /// The time is from before the release.
    Releasing,
    /// Written after `force_unlock`, which was called at `since`: the grant that it ended, if that is known.
    Forced {
        key: usize,
        since: u64,
        grant: Option<GrantId>,
    },
    /// Written after Redis accepted a write of this key's fenced value. The call began at `since`.
    Written {
        key: usize,
        token: u64,
        since: u64,
    },
    /// Written after a transfer between the accounts was committed, with the balances before it. The call began at
    /// `since`.
    Transferred {
        before: [i64; 2],
        since: u64,
    },
    /// Written when the work of a run begins. The call began at `since`.
    RunBegan {
        key: usize,
        token: u64,
        since: u64,
    },
    /// Written before the work of a run fails, so that it may run again.
    RunFailed {
        key: usize,
    },
    /// Written after a call that ran the work, or found the record of the run with this token. The call began at
    /// `since`.
    RunEnded {
        key: usize,
        token: u64,
        /// Whether the work has ended. Otherwise it was interrupted.
        is_done: bool,
        since: u64,
    },
    /// Written after an observer got a state of the election. The observer began at the time `observer`.
    Observed {
        observer: u64,
        state: Observed,
    },
    /// A violation that the thread itself saw.
    Wrong(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub at: u64,
    pub who: Who,
    pub what: What,
}

/// Nanoseconds on a clock that all processes of this machine share, and that leases use.
pub fn now() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let now = clock_gettime(CLOCK);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub struct Writer {
    who: Who,
    file: File,
}

impl Writer {
    pub fn create(folder: &Path, who: Who) -> anyhow::Result<Self> {
        let name = format!("{}-{}-{}.records", who.process, who.life, who.thread);
        let path = folder.join(name);
        let file = File::create(&path).with_context(|| format!("cannot make {path:?}"))?;
        Ok(Self { who, file })
    }

    pub fn write(&mut self, what: What) {
        self.write_at(now(), what);
    }

    pub fn write_at(&mut self, at: u64, what: What) {
        let who = self.who;
        let record = Record { at, who, what };
        let mut line = serde_json::to_string(&record).expect("a record is plain data");
        line.push('\n');
        let written = self.file.write_all(line.as_bytes());
        written.expect("records can be written to the temporary folder");
    }
}

/// All records in `folder`, those of each thread in their order.
pub fn read(folder: &Path) -> anyhow::Result<Vec<Record>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|found| found != "records") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        // Text after the last line feed is a line that a SIGKILL has cut.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for line in whole.lines() {
            let record = serde_json::from_str(line);
            all.push(record.with_context(|| format!("{path:?}: cannot read {line:?}"))?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_records_are_read_except_a_cut_line() {
        let folder = tempfile::tempdir().unwrap();
        let who = Who {
            process: 1,
            life: 0,
            thread: 2,
        };
        let mut writer = Writer::create(folder.path(), who).unwrap();
        writer.write_at(5, What::Releasing);
        writer.write_at(6, What::Seen { left: 7 });
        writer.file.write_all(b"{\"at\":9,").unwrap();
        let read: Vec<(u64, What)> = read(folder.path())
            .unwrap()
            .into_iter()
            .map(|record| (record.at, record.what))
            .collect();
        assert_eq!(read, [(5, What::Releasing), (6, What::Seen { left: 7 })]);
    }
}
