//! Puts a violation into the records of a round, to show that the checks find it.

use std::path::Path;

use anyhow::Context as _;
use clap::ValueEnum;
use leasehold_testbed::terms::Share;

use crate::faults::Fault;
use crate::history::{Excuse, History, Hold, RunRecord};
use crate::messages::{account_keys, election_key, is_at_most_once};
use crate::records::{Doing, Grant, Observed, Outcome, What, Who, Writer, read};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Defect {
    /// A second holder of a held lock
    Overlap,
    /// A permit more than the limit
    Permit,
    /// A later request with a smaller token
    Token,
    /// A stale write of a fenced value that was accepted
    Write,
    /// A second holder of a key of a set
    Set,
    /// An amount that has left one account, and has not reached the other one
    Sum,
    /// A transfer that another one has overwritten
    Transfer,
    /// A second leader
    Leader,
    /// An earlier leader that an observer sees after a later one
    Observer,
    /// Work that ran again, although it shall run at most once
    Run,
    /// A record of a run that is older than one before
    Record,
    /// A call that never returned
    Hang,
    /// In a race: a lost update
    Update,
    /// In a race: a lock without a holder. On a Cluster and under sentinels: two of them
    Nobody,
}

/// The values of two locks without holders: one as a script writes it, and one as plain commands write it.
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
    let is_fit = |hold: &&Hold| match what {
        Defect::Permit => matches!(hold.share, Share::Permits { .. }),
        Defect::Leader => hold.key == election_key(),
        Defect::Set => account_keys()[1] == hold.key,
        _ => hold.share == Share::Alone,
    };
    let mut holds = history.holds.iter().filter(has_no_excuse).filter(is_fit);
    let hold = holds.find(was_seen).context("no lock was held for long")?;
    let (at, token) = match what {
        Defect::Overlap | Defect::Set | Defect::Leader => (hold.granted + 500, hold.token + 1),
        Defect::Permit => (hold.granted + 500, 0),
        Defect::Token => (hold.end() + 1, hold.token - 1),
        Defect::Hang => (hold.end(), 0),
        Defect::Write => (hold.end() + 1, hold.token - 1),
        Defect::Sum | Defect::Transfer => return inject_transfer(what, folder, &history),
        Defect::Run | Defect::Record => return inject_run(what, folder, &history),
        Defect::Observer => return inject_observation(folder, hold),
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
        share: match hold.share {
            // All permits, beside those that are held.
            Share::Permits { limit, .. } => Share::Permits {
                weight: limit,
                limit,
            },
            share => share,
        },
        ttl,
        at_most,
    };
    records.write_at(at, What::Held(grant));
    records.write_at(at, What::Seen { left: 1_000_000 });
    records.write_at(at + 100_000, What::Releasing);
    Ok(())
}

fn inject_transfer(what: Defect, folder: &Path, history: &History) -> anyhow::Result<()> {
    // The last one, which no fault follows.
    let transfers = history.transfers.iter();
    let last = transfers.max_by_key(|transfer| transfer.from);
    let last = last.context("no transfer was committed")?;
    let mut before = last.before;
    before[0] -= i64::from(what == Defect::Sum);
    let since = last.to + 1_000;
    Writer::create(folder, NOBODY)?.write_at(since + 1_000, What::Transferred { before, since });
    Ok(())
}

fn inject_run(what: Defect, folder: &Path, history: &History) -> anyhow::Result<()> {
    // The last ones, which no fault follows.
    let records = history.run_records.iter();
    let of_kind = |record: &&RunRecord| {
        record.is_done && (what == Defect::Record || is_at_most_once(record.key))
    };
    let last = records.filter(of_kind).max_by_key(|record| record.to);
    let &RunRecord { key, token, to, .. } = last.context("no run has ended")?;
    let (since, at) = (to + 1_000, to + 2_000);
    let mut records = Writer::create(folder, NOBODY)?;
    let token = match what {
        Defect::Run => token + 1,
        _ => token - 1,
    };
    if what == Defect::Run {
        records.write_at(at, What::RunBegan { key, token, since });
        return Ok(());
    }
    let is_done = true;
    records.write_at(
        at,
        What::RunEnded {
            key,
            token,
            is_done,
            since,
        },
    );
    Ok(())
}

fn inject_observation(folder: &Path, hold: &Hold) -> anyhow::Result<()> {
    let mut records = Writer::create(folder, NOBODY)?;
    for (at, token) in [(hold.granted, hold.token), (hold.end(), hold.token - 1)] {
        let (observer, state) = (hold.asked, Observed::Leader { token });
        records.write_at(at, What::Observed { observer, state });
    }
    Ok(())
}
