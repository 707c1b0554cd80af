//! One round: a server, processes that work, faults, their end, and the checks.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use leasehold_testbed::Proxy;
use leasehold_tools::stop::{Stop, Stopped};

use crate::Topology;
use crate::checks::{self, Sighting, Violation};
use crate::cluster;
use crate::faults::{Fault, Faults, Kind, Subjects, mend};
use crate::history::History;
use crate::inject::{Defect, inject};
use crate::leaks::{self, Remaining};
use crate::messages::{Assignment, LONGEST_TTL};
use crate::process::Process;
use crate::random::Random;
use crate::records::{self, now};
use crate::report::{self, Totals};
use crate::servers::Servers;

/// Distinguishes the random numbers of faults from those of threads.
pub const OF_FAULTS: u64 = 2 << 32;

pub struct Round<'a> {
    pub number: u64,
    pub seed: u64,
    pub time: Duration,
    pub topology: Topology,
    pub processes: usize,
    pub threads: usize,
    /// The faults to choose from. If this is empty, all faults are used.
    pub only: &'a [Kind],
    pub inject: Option<Defect>,
}

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

impl Round<'_> {
    /// Plays the round, and prints each violation. Returns their number. After Ctrl-C, the round ends as usual, but
    /// earlier.
    pub fn play(
        &self,
        stop: &Stop,
        totals: &mut Totals,
        tick: impl Fn(String),
    ) -> anyhow::Result<usize> {
        let folder = tempfile::Builder::new()
            .prefix("leasehold-soak-")
            .tempdir()
            .context("no temporary folder can be made")?;
        let start = now();
        let outcome = self.judge(folder.path(), start, stop, totals, tick);
        if !matches!(outcome, Ok(0)) {
            println!(
                "the records of round {} are in {:?}",
                self.number,
                folder.keep()
            );
        }
        outcome
    }

    fn judge(
        &self,
        folder: &Path,
        start: u64,
        stop: &Stop,
        totals: &mut Totals,
        tick: impl Fn(String),
    ) -> anyhow::Result<usize> {
        let events = match self.topology {
            Topology::Cluster => cluster::work(self, folder, stop, tick)?,
            _ => self.work(folder, stop, tick)?,
        };
        let Events {
            faults,
            sightings,
            found,
            left,
        } = events;
        save(&faults, folder)?;
        if let Some(what) = self.inject {
            inject(what, folder, &faults)?;
        }
        let records = records::read(folder)?;
        let history = History::new(&records, &faults);
        let (broken, explained) = checks::all(&history, &faults);
        totals.add(&history, &faults, explained);
        // Violations about hanging calls come first, since only the first violations are shown.
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
        print!("{text}");
        Ok(violations.len())
    }

    /// Runs the processes and the faults on a primary and its replica.
    fn work(&self, folder: &Path, stop: &Stop, tick: impl Fn(String)) -> anyhow::Result<Events> {
        let random = Random::new(self.seed, &[OF_FAULTS, self.number]);
        let mut faults = Faults::new(random, self.only, self.inject);
        let mut subjects = self.subjects(folder)?;
        for process in &subjects.processes {
            process.wait_until_ready()?;
        }
        let end = Instant::now() + self.time;
        let number = self.number;
        let ended = faults.run(&mut subjects, end, stop, |faults| {
            tick(format!("round {number}: {faults} faults"));
        });
        match ended {
            Err(error) if error.is::<Stopped>() => {}
            Err(error) => {
                save(&faults.done, folder)?;
                return Err(error);
            }
            Ok(()) => {}
        }
        tick(format!("round {number}: finishing"));
        faults.end_all(&mut subjects)?;
        subjects.proxies.iter().for_each(mend);
        let Servers { primary, replica } = &subjects.servers;
        let remaining = Remaining {
            servers: vec![primary, replica],
            masters: vec![primary],
            url: primary.url(),
        };
        let left = leaks::finish(&mut subjects.processes, &remaining, folder)?;
        Ok(Events {
            faults: faults.done,
            found: faults.found,
            left,
            ..Events::default()
        })
    }

    /// A process for this round.
    pub fn start_process(
        &self,
        process: usize,
        url: String,
        folder: &Path,
    ) -> anyhow::Result<Process> {
        Process::start(Assignment {
            url,
            folder: folder.to_owned(),
            seed: self.seed,
            round: self.number,
            process,
            life: 0,
            threads: self.threads,
        })
    }

    fn subjects(&self, folder: &Path) -> anyhow::Result<Subjects> {
        let remembers = !self.number.is_multiple_of(2);
        let servers = Servers::start(remembers)?;
        let address = |_| Proxy::start(servers.primary.port());
        let direct = self.processes / 2;
        let addresses: Vec<Proxy> = (0..direct).map(address).collect::<Result<_, _>>()?;
        let proxies: Vec<Proxy> = (direct..self.processes)
            .map(address)
            .collect::<Result<_, _>>()?;
        let urls = addresses.iter().chain(&proxies).map(Proxy::url);
        let processes = urls.enumerate();
        let processes = processes.map(|(process, url)| self.start_process(process, url, folder));
        let processes = processes.collect::<anyhow::Result<_>>()?;
        Ok(Subjects {
            servers,
            remembers,
            processes,
            addresses,
            proxies,
        })
    }
}

/// Saves the faults beside the records, to explain a finding.
fn save(faults: &[Fault], folder: &Path) -> anyhow::Result<()> {
    let text = format!("{faults:#?}\n");
    fs::write(folder.join("faults"), text).context("the faults cannot be saved")
}
