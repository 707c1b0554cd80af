//! Puts a violation into the records of a round, to show that the checks find it.

use std::path::Path;

use anyhow::Context as _;
use clap::ValueEnum;

use crate::faults::Fault;
use crate::history::{Excuse, History, Hold};
use crate::records::{Doing, Grant, Outcome, What, Who, Writer, read};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Defect {
    /// A second holder of a held lock
    Overlap,
    /// A later request with a smaller token
    Token,
    /// A stale write of a fenced value that was accepted
    Write,
    /// A call that never returned
    Hang,
    /// In a race: a lost update
    Update,
    /// In a race: a lock without a holder. On a Cluster and under sentinels: two of them
    Nobody,
}

/// The values of locks without holders: as a script writes it, and as plain commands write it.
pub const NOBODYS: [&str; 2] = [
    "lh1 0123456789abcdef0123456789abcdef 1795263780943818 nowhere/1/0",
    "lh1 123456789abcdef0123456789abcdef0 0000000000000000 nowhere/1/0",
];
/// The ttl of these locks.
pub const NOBODYS_TTL_MS: &str = "20000";

/// The process and thread of an injected record. No real process has this number.
const NOBODY: Who = Who {
    process: 999,
    life: 0,
    thread: 0,
};

pub fn inject(what: Defect, folder: &Path, faults: &[Fault]) -> anyhow::Result<()> {
    let history = History::new(&read(folder)?, faults);
    let is_excused = |hold: &Hold, excuse: &Excuse| {
        excuse.may_be_for(hold) && excuse.to >= hold.asked && excuse.from <= hold.end() + hold.ttl
    };
    let has_no_excuse = |hold: &&Hold| {
        !history
            .excuses
            .iter()
            .any(|excuse| is_excused(hold, excuse))
    };
    let was_seen = |hold: &&Hold| hold.seen.is_some() && hold.end() > hold.granted + 1000;
    let mut holds = history.holds.iter().filter(has_no_excuse);
    let hold = holds.find(was_seen).context("no lock was held for long")?;
    let (at, token) = match what {
        Defect::Overlap => (hold.granted + 500, hold.token + 1),
        Defect::Token => (hold.end() + 1, hold.token - 1),
        Defect::Hang => (hold.end(), 0),
        Defect::Write => (hold.end() + 1, hold.token - 1),
        Defect::Update | Defect::Nobody => return Ok(()),
    };
    let mut records = Writer::create(folder, NOBODY)?;
    let key = hold.key;
    if what == Defect::Write {
        for (at, token) in [(at, hold.token), (at + 1_000, token)] {
            let since = at;
            records.write_at(at, What::Written { key, token, since });
        }
        return Ok(());
    }
    records.write_at(
        at,
        What::Called {
            doing: Doing::Lock,
            key: Some(key),
            allowed: None,
        },
    );
    if what == Defect::Hang {
        return Ok(());
    }
    let (since, outcome) = (at, Outcome::Done);
    records.write_at(at, What::Returned { since, outcome });
    let (ttl, at_most) = (1000, None);
    let grant = Grant {
        key,
        token,
        ttl,
        at_most,
    };
    records.write_at(at, What::Held(grant));
    records.write_at(at, What::Seen { left: 1_000_000 });
    records.write_at(at + 100_000, What::Releasing);
    Ok(())
}
