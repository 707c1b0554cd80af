//! One round: a server, processes that work, faults, their end, and the checks.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use leasehold_testbed::Proxy;

use super::checks;
use super::faults::{Faults, Kind, Subjects, mend};
use super::history::History;
use super::inject::{Defect, inject};
use super::leaks;
use super::messages::Assignment;
use super::process::Process;
use super::random::Random;
use super::records::{self, now};
use super::report::{self, Totals};
use super::servers::Servers;
use crate::stop::{Stop, Stopped};

/// Distinguishes the random numbers of faults from those of threads.
const OF_FAULTS: u64 = 2 << 32;

pub struct Round<'a> {
    pub number: u64,
    pub seed: u64,
    pub time: Duration,
    pub processes: usize,
    pub threads: usize,
    /// The faults to choose from. If this is empty, all faults are used.
    pub only: &'a [Kind],
    pub inject: Option<Defect>,
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
        let random = Random::new(self.seed, &[OF_FAULTS, self.number]);
        let mut faults = Faults::new(random, self.only, self.inject);
        let left = self.work(folder, &mut faults, stop, tick)?;
        let Faults {
            done: faults,
            found,
            ..
        } = faults;
        fs::write(folder.join("faults"), format!("{faults:#?}\n"))?;
        if let Some(what) = self.inject {
            inject(what, folder, &faults)?;
        }
        let records = records::read(folder)?;
        let history = History::new(&records, &faults);
        totals.add(&history, &faults);
        // Violations about hanging calls come first, since only the first violations are shown.
        let mut violations = found;
        violations.extend(checks::all(&history, &faults));
        violations.extend(left);
        let text = report::findings(&violations, &records, &history, &faults, start);
        print!("{text}");
        Ok(violations.len())
    }

    /// Runs the processes and the faults. Returns the violations that show at the end.
    fn work(
        &self,
        folder: &Path,
        faults: &mut Faults,
        stop: &Stop,
        tick: impl Fn(String),
    ) -> anyhow::Result<Vec<checks::Violation>> {
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
            other => other?,
        }
        tick(format!("round {number}: finishing"));
        faults.end_all(&mut subjects)?;
        subjects.proxies.iter().for_each(mend);
        leaks::finish(&mut subjects, folder)
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
        let processes = urls.enumerate().map(|(process, url)| {
            Process::start(Assignment {
                url,
                folder: folder.to_owned(),
                seed: self.seed,
                round: self.number,
                process,
                life: 0,
                threads: self.threads,
            })
        });
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
