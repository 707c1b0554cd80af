//! What the threads of all processes write down: one file per thread, one JSON value per line, each
//! written at once, so that it outlives a SIGKILL. Judges nothing.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Which thread of which process wrote; a process that was killed and started anew has the next life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Who {
    pub process: usize,
    pub life: usize,
    pub thread: usize,
}

/// What a thread set out to do: an operation is several calls.
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
    Reopen,
    /// By a client of many that want one key.
    Crowd,
    /// By a thread of a race.
    Race,
}

/// A call that can take time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Doing {
    Lock,
    TryLock,
    TryLockFor,
    CancelledLock,
    Unlock,
    Drop,
    Extend,
    HandOver,
    Adopt,
    ForceUnlock,
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

/// A lock in hand. Times are in ms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub key: usize,
    pub token: u64,
    pub ttl: u64,
    /// It was asked for on the condition that it is never believed in for longer.
    pub at_most: Option<u64>,
    /// It is another's grant, gone on with.
    pub adopted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum What {
    Began(Operation),
    /// Before the call. `allowed` is for how long it may wait, in ms; without, as long as it takes.
    Called {
        doing: Doing,
        key: Option<usize>,
        allowed: Option<u64>,
    },
    /// After the call, which began at `since`: to write down that it would begin takes time.
    Returned {
        since: u64,
        outcome: Outcome,
    },
    /// After the call that granted it.
    Held(Grant),
    /// From before a look at a guard that was valid, and for so many more ns.
    Seen {
        left: u64,
    },
    /// From before its ttl was made this long, in ms.
    Extended {
        ttl: u64,
    },
    /// From after the guard said so.
    Lost {
        reason: String,
    },
    /// From before it.
    LettingGo,
    /// After `force_unlock` was called at `since`: which grant it ended, where that is known.
    Forced {
        key: usize,
        since: u64,
        lease: Option<u64>,
    },
    /// Something that the thread itself saw to be wrong.
    Wrong(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub at: u64,
    pub who: Who,
    pub what: What,
}

/// Nanoseconds on a clock that all processes of this machine share, the one leases go by.
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
        // What follows the last line feed was cut by a SIGKILL.
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
    fn what_is_written_is_read_but_for_a_line_that_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let who = Who {
            process: 1,
            life: 0,
            thread: 2,
        };
        let mut writer = Writer::create(folder.path(), who).unwrap();
        writer.write_at(5, What::LettingGo);
        writer.write_at(6, What::Seen { left: 7 });
        writer.file.write_all(b"{\"at\":9,").unwrap();
        let read: Vec<(u64, What)> = read(folder.path())
            .unwrap()
            .into_iter()
            .map(|record| (record.at, record.what))
            .collect();
        assert_eq!(read, [(5, What::LettingGo), (6, What::Seen { left: 7 })]);
    }
}
