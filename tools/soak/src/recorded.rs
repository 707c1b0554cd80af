//! A round whose processes record what they do, in a folder of its own. At the end of the round, all faults end, and
//! the records are checked.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use leasehold_tools::stop::Stopped;

use crate::checks::{self, Sighting, Violation};
use crate::driver::{Findings, Round, Topology};
use crate::faults::Fault;
use crate::history::History;
use crate::inject::inject;
use crate::messages::{Assignment, LONGEST_TTL};
use crate::process::Process;
use crate::random::Random;
use crate::records::{self, now};
use crate::report::{self, Totals};

/// The shortest and the longest time for which the processes of a round work.
pub const SHORTEST_ROUND: Duration = Duration::from_secs(2);
pub const LONGEST_ROUND: Duration = Duration::from_secs(25);
/// Distinguishes the random numbers of faults from those of threads.
const OF_FAULTS: u64 = 2 << 32;

/// The faults and findings of a round. The records of the threads are kept apart.
#[derive(Default)]
pub struct Events {
    pub faults: Vec<Fault>,
    /// The grants that were seen in Redis.
    pub sightings: Vec<Sighting>,
    /// Violations that the faults themselves found.
    pub found: Vec<Violation>,
    /// Whatever was left at the end.
    pub left: Vec<Violation>,
}

/// A topology whose processes record what they do.
pub struct Recorded {
    /// The shortest and the longest round.
    round_times: (Duration, Duration),
    work: Work,
    totals: Totals,
}

/// Runs the processes and the faults of a round, and returns when all have ended. The processes write their records to
/// the folder.
type Work = fn(&Round<'_>, &Path) -> anyhow::Result<Events>;

impl Recorded {
    pub fn new(round_times: (Duration, Duration), work: Work) -> Self {
        Self {
            round_times,
            work,
            totals: Totals::default(),
        }
    }
}

impl Topology for Recorded {
    fn play(&mut self, round: &Round<'_>) -> anyhow::Result<Findings> {
        play(round, &mut self.totals, |folder| (self.work)(round, folder))
    }

    fn round_times(&self) -> (Duration, Duration) {
        self.round_times
    }

    fn text(&self) -> String {
        self.totals.text()
    }
}

/// Plays a round. `work` runs the processes and the faults, and returns when all have ended. The processes write their
/// records to the folder that `work` gets.
fn play(
    round: &Round<'_>,
    totals: &mut Totals,
    work: impl FnOnce(&Path) -> anyhow::Result<Events>,
) -> anyhow::Result<Findings> {
    let folder = tempfile::Builder::new()
        .prefix("leasehold-soak-")
        .tempdir()
        .context("no temporary folder can be made")?;
    let start = now();
    let mut outcome =
        work(folder.path()).and_then(|events| judge(round, events, folder.path(), start, totals));
    let is_clean = |findings: &Findings| findings.violations == 0;
    if !outcome.as_ref().is_ok_and(is_clean) {
        let kept = format!(
            "the records of round {} are in {:?}",
            round.number,
            folder.keep()
        );
        match &mut outcome {
            Ok(findings) => findings.text += &format!("{kept}\n"),
            Err(_) => println!("{kept}"),
        }
    }
    outcome
}

fn judge(
    round: &Round<'_>,
    events: Events,
    folder: &Path,
    start: u64,
    totals: &mut Totals,
) -> anyhow::Result<Findings> {
    let Events {
        faults,
        sightings,
        found,
        left,
    } = events;
    save(&faults, folder)?;
    if let Some(what) = round.soak.inject {
        inject(what, folder, &faults)?;
    }
    let records = records::read(folder)?;
    let history = History::new(&records, &faults);
    let (broken, explained) = checks::all(&history, &faults);
    totals.add(&history, &faults, explained);
    // The violations that the faults found, such as clients that hang, come first, since only the first violations are
    // shown.
    let mut violations = found;
    violations.extend(broken);
    violations.extend(checks::keys_without_holders(
        &sightings,
        LONGEST_TTL,
        &history,
        &faults,
    ));
    violations.extend(left);
    let text = report::findings(&violations, &records, &history, &faults, start);
    Ok(Findings {
        violations: violations.len(),
        text,
    })
}

impl Round<'_> {
    /// The random numbers of the round's faults.
    pub fn random(&self) -> Random {
        Random::new(self.soak.seed, &[OF_FAULTS, self.number])
    }

    /// Starts a process for each of these URLs, and returns when all processes work. Their clients have `outage` as
    /// their `outage_timeout`.
    pub fn start_processes(
        &self,
        urls: impl Iterator<Item = String>,
        outage: Duration,
        folder: &Path,
    ) -> anyhow::Result<Vec<Process>> {
        let assignment = |(process, url)| Assignment {
            url,
            folder: folder.to_owned(),
            seed: self.soak.seed,
            round: self.number,
            process,
            life: 0,
            threads: self.soak.threads,
            outage,
        };
        let processes = urls.enumerate().map(assignment).map(Process::start);
        let processes: Vec<Process> = processes.collect::<anyhow::Result<_>>()?;
        for process in &processes {
            process.wait_until_ready()?;
        }
        Ok(processes)
    }
}

/// Turns the error with which Ctrl-C ends the faults of a round early into a success.
pub fn unless_stopped(ended: anyhow::Result<()>) -> anyhow::Result<()> {
    match ended {
        Err(error) if error.is::<Stopped>() => Ok(()),
        ended => ended,
    }
}

/// Saves the faults beside the records, to explain a finding.
pub fn save(faults: &[Fault], folder: &Path) -> anyhow::Result<()> {
    let text = format!("{faults:#?}\n");
    fs::write(folder.join("faults"), text).context("the faults cannot be saved")
}
