//! The work and the findings of a soak, as tables and text. Measures nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::Table;
use leasehold_tools::table::plain;

use crate::checks::{Explained, Violation, overrun};
use crate::faults::{Effect, Fault};
use crate::history::{History, Hold, Stops};
use crate::messages::{election_key, race_key};
use crate::records::{Doing, Outcome, Record, Who};

/// Violations that are shown in full.
const SHOWN: usize = 5;
/// Records shown around each violation.
const LINES: usize = 60;
/// Records within this time around a violation are shown, in ns.
const AROUND: u64 = 200_000_000;

/// The sums over all rounds.
#[derive(Default)]
pub struct Totals {
    pub rounds: u64,
    grants: u64,
    operations: BTreeMap<String, u64>,
    faults: BTreeMap<String, u64>,
    losses: BTreeMap<String, u64>,
    calls: BTreeMap<Doing, Calls>,
    explained: Explained,
    transfers: u64,
    runs: u64,
    terms: u64,
    observations: u64,
    races: Races,
    /// The longest time from the moment when Redis lost a grant until its holder knew of the loss.
    worst_delay: Duration,
}

/// All grants of the key of the races.
#[derive(Default)]
struct Races {
    grants: u64,
    /// How often a grant went to another process than the grant before.
    changes: u64,
    longest_wait: Duration,
}

impl Races {
    fn add(&mut self, history: &History) {
        let mut holds: Vec<&Hold> = history
            .holds
            .iter()
            .filter(|hold| hold.key == race_key())
            .collect();
        holds.sort_by_key(|hold| hold.token);
        self.grants += holds.len() as u64;
        let changes = holds
            .windows(2)
            .filter(|pair| pair[0].who.process != pair[1].who.process);
        self.changes += changes.count() as u64;
        for call in &history.calls {
            if call.key == Some(race_key())
                && call.doing == Doing::Lock
                && let Some((to, _)) = call.returned
            {
                let waited = Duration::from_nanos(to.saturating_sub(call.from));
                self.longest_wait = self.longest_wait.max(waited);
            }
        }
    }
}

#[derive(Default)]
struct Calls {
    count: u64,
    failed: u64,
    worst: Option<Duration>,
}

impl Totals {
    pub fn add(&mut self, history: &History, faults: &[Fault], explained: Explained) {
        self.explained.forced += explained.forced;
        self.explained.lost += explained.lost;
        self.explained.longest = self.explained.longest.max(explained.longest);
        self.explained.writes += explained.writes;
        self.explained.transfers += explained.transfers;
        self.explained.runs += explained.runs;
        self.runs += history.runs.len() as u64;
        let terms = history
            .holds
            .iter()
            .filter(|hold| hold.key == election_key());
        self.terms += terms.count() as u64;
        self.observations += history.observations.len() as u64;
        self.transfers += history.transfers.len() as u64;
        self.rounds += 1;
        self.grants += history.holds.len() as u64;
        for (operation, count) in &history.began {
            *self.operations.entry(format!("{operation:?}")).or_default() += count;
        }
        for fault in faults {
            *self.faults.entry(format!("{:?}", fault.kind)).or_default() += 1;
        }
        for (reason, count) in &history.losses {
            *self.losses.entry(reason.clone()).or_default() += count;
        }
        let stops = Stops(faults);
        for call in &history.calls {
            let calls = self.calls.entry(call.doing).or_default();
            calls.count += 1;
            let failed = |(_, outcome): &(u64, Outcome)| *outcome != Outcome::Done;
            calls.failed += u64::from(call.returned.as_ref().is_some_and(failed));
            calls.worst = calls.worst.max(overrun(call, &stops));
        }
        self.races.add(history);
        self.worst_delay = self.worst_delay.max(worst_delay(history));
    }
}

/// The longest time for which a holder still held a grant that Redis is known to have lost.
fn worst_delay(history: &History) -> Duration {
    let mut worst = 0;
    for excuse in &history.excuses {
        for hold in history.holds.iter().filter(|hold| excuse.names(hold)) {
            worst = worst.max(hold.end().saturating_sub(excuse.to));
        }
    }
    Duration::from_nanos(worst)
}

impl Totals {
    pub fn text(&self) -> String {
        let mut text = format!("{} grants in {} rounds.\n", self.grants, self.rounds);
        for (title, counts) in [
            ("operations", &self.operations),
            ("faults", &self.faults),
            ("losses reported", &self.losses),
        ] {
            let counts = counts.iter().map(|(name, count)| format!("{name} {count}"));
            let counts: Vec<String> = counts.collect();
            let _ = writeln!(text, "{title}: {}", counts.join(", "));
        }
        let Explained {
            forced,
            lost,
            longest,
            writes,
            transfers,
            runs,
        } = self.explained;
        let _ = writeln!(
            text,
            "two holders at a time: {forced} by force_unlock, {lost} by a loss of data in Redis, for {longest:.1?} at \
             most\nstale writes after a loss of data: {writes}\ntransfers: {}, and {transfers} again after a loss of data\nruns: {}, and {runs} wrong \
             ones after a loss of data\nterms: {}, and {} states that observers saw",
            self.transfers, self.runs, self.terms, self.observations
        );
        let Races {
            grants,
            changes,
            longest_wait,
        } = self.races;
        if self.operations.contains_key("Race") {
            let _ = writeln!(
                text,
                "races: {grants} grants, {changes} changes of owner, longest wait {longest_wait:.1?}"
            );
        }
        let _ = writeln!(
            text,
            "longest hold of a lock that was deleted: {:.1?}\n{}",
            self.worst_delay,
            self.table()
        );
        text
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.set_header(["call", "times", "failed", "worst overrun"]);
        for (doing, calls) in &self.calls {
            let worst = calls.worst.map(|worst| format!("{worst:.1?}"));
            table.add_row([
                format!("{doing:?}"),
                calls.count.to_string(),
                calls.failed.to_string(),
                worst.unwrap_or_default(),
            ]);
        }
        plain(table, 1)
    }
}

/// The violations of a round, with the records around them. Times count from `start`.
pub fn findings(
    violations: &[Violation],
    records: &[Record],
    history: &History,
    faults: &[Fault],
    start: u64,
) -> String {
    let mut text = String::new();
    for violation in violations.iter().take(SHOWN) {
        let (from, to) = (violation.from.saturating_sub(AROUND), violation.to + AROUND);
        let _ = writeln!(text, "\nVIOLATION: {}", violation.text);
        for fault in faults
            .iter()
            .filter(|fault| fault.from <= to && fault.to >= from)
        {
            let (begun, ended) = (seconds(fault.from, start), seconds(fault.to, start));
            let effect = match &fault.effect {
                Effect::None => String::new(),
                effect => format!(", {effect:?}"),
            };
            let _ = writeln!(text, "  fault {begun} to {ended}: {:?}{effect}", fault.kind);
        }
        let whose = threads_about(violation.key, history, from, to);
        let near =
            |record: &&Record| record.at >= from && record.at <= to && whose.contains(&record.who);
        let mut near: Vec<&Record> = records.iter().filter(near).collect();
        near.sort_by_key(|record| record.at);
        for record in near.iter().take(LINES) {
            let Who {
                process,
                life,
                thread,
            } = record.who;
            let at = seconds(record.at, start);
            let _ = writeln!(text, "  {at} {process}-{life}/{thread} {:?}", record.what);
        }
        if let Some(more) = near.len().checked_sub(LINES).filter(|more| *more > 0) {
            let _ = writeln!(text, "  and {more} more");
        }
    }
    if let Some(more) = violations.len().checked_sub(SHOWN).filter(|more| *more > 0) {
        let _ = writeln!(text, "\nand {more} more violations");
    }
    text
}

fn seconds(at: u64, start: u64) -> String {
    format!("{:.6} s", at.saturating_sub(start) as f64 / 1e9)
}

fn threads_about(key: Option<usize>, history: &History, from: u64, to: u64) -> BTreeSet<Who> {
    let holds = history
        .holds
        .iter()
        .filter(|hold| Some(hold.key) == key && hold.asked <= to && hold.end() >= from);
    holds.map(|hold| hold.who).collect()
}
