//! Runs one case: in each round, all ways in turn, so that other load on the machine affects all alike. In the first
//! part, each way is as fast as it can be. In the second part, all ways have the same rate, which each can keep.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use indicatif::ProgressBar;
use leasehold_load::{Keys, Pace, cores_by_preference, description, pin};
use leasehold_testbed::Server;

use super::cases::{Case, Plan};
use super::process_group::{Measured, ProcessGroup};
use super::programs::Programs;
use super::row::{Paced, Quantiles, Rounds, Row};
use crate::stop::Stop;

/// The rate of the second part, as a share of the raw commands' rate in the first.
pub const PACE: f64 = 0.5;
/// A way is measured at the rate only if it was faster than the rate by this factor. Otherwise it might be beyond its
/// limit, where waits grow without end.
pub const ROOM: f64 = 1.25;

/// How much to measure.
#[derive(Clone, Copy)]
pub struct Effort {
    pub rounds: usize,
    pub window: Duration,
    /// The length of a round in a contended case. Threads then sleep for up to 200 ms at a time, so such a round has to
    /// be longer.
    pub contended_window: Duration,
    pub paced_rounds: usize,
    pub paced_window: Duration,
}

impl Effort {
    pub fn full() -> Self {
        Self {
            rounds: 9,
            window: Duration::from_millis(400),
            contended_window: Duration::from_secs(1),
            paced_rounds: 3,
            paced_window: Duration::from_secs(1),
        }
    }

    pub fn quick() -> Self {
        Self {
            rounds: 2,
            window: Duration::from_millis(60),
            contended_window: Duration::from_millis(100),
            paced_rounds: 1,
            paced_window: Duration::from_millis(100),
        }
    }

    /// Enough rounds to judge the goals by their medians. They need no waits at a fixed rate, and no way that sleeps
    /// for long.
    pub fn goals() -> Self {
        Self {
            rounds: 9,
            window: Duration::from_millis(300),
            contended_window: Duration::from_millis(300),
            paced_rounds: 0,
            paced_window: Duration::ZERO,
        }
    }

    fn window(&self, case: &Case) -> Duration {
        match case.keys {
            Keys::Own => self.window,
            Keys::One => self.contended_window,
        }
    }
}

/// The results of a case.
pub struct Outcome {
    pub title: String,
    pub name: &'static str,
    pub machine: String,
    pub rows: Vec<Row>,
}

/// The rounds of each group, in the groups' order.
type RoundsOfGroups = Vec<Vec<Measured>>;

pub fn case(
    Plan { case, ways }: &Plan,
    programs: &Programs,
    effort: &Effort,
    progress: &ProgressBar,
    stop: &Stop,
) -> anyhow::Result<Outcome> {
    // A server for each case, so that no case finds data of another. It outlives its clients.
    let server = Server::start()?;
    let core = case.pinned.then(|| one_core(&server)).transpose()?;
    let mut groups = ways
        .iter()
        .map(|way| ProcessGroup::start(case, *way, core, &server, programs, stop))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let window = effort.window(case);
    let all = vec![true; groups.len()];
    let turns = Turns {
        server: &server,
        progress,
        stop,
    };
    let free = turns.take(&mut groups, &all, effort.rounds, window, None)?;

    let raw = Rounds::of(free.first().context("a case has ways")?);
    let rows = groups.iter().zip(&free);
    let rows = rows
        .map(|(group, rounds)| Row::new(case.name, group, rounds, &raw))
        .collect::<anyhow::Result<Vec<_>>>()
        .with_context(|| format!("case {}", case.name))?;
    let rate = PACE * rows[0].pairs_per_second;
    ensure!(rate > 0.0, "the raw commands got no lock in {}", case.name);
    let able: Vec<bool> = rows
        .iter()
        .map(|row| row.pairs_per_second > ROOM * rate)
        .collect();
    let pace = Pace {
        interval: Duration::from_secs_f64(case.seats() as f64 / rate),
        threads: case.seats(),
    };
    let window = effort.paced_window;
    let paced = turns.take(&mut groups, &able, effort.paced_rounds, window, Some(pace))?;

    let rows = rows.into_iter().zip(&paced).map(|(row, rounds)| {
        let paced = match rounds.as_slice() {
            [] => None,
            rounds => paced_waits(rounds, rate)?,
        };
        Ok(Row { paced, ..row })
    });
    Ok(Outcome {
        title: case.title(),
        name: case.name,
        machine: description(&server)?,
        rows: rows.collect::<anyhow::Result<_>>()?,
    })
}

fn one_core(server: &Server) -> anyhow::Result<usize> {
    let cores = cores_by_preference().context("this thread's cores are not known")?;
    let core = *cores.first().context("this system cannot pin threads")?;
    pin(server.pid(), core).context("the server cannot be pinned")?;
    Ok(core)
}

/// The waits of one way over all rounds. `None` if the way could not keep the rate after all.
fn paced_waits(rounds: &[Measured], rate: f64) -> anyhow::Result<Option<Paced>> {
    let mut kept = true;
    for round in rounds {
        kept &= round.tally.left_out == 0;
    }
    let quantiles = Quantiles::of(rounds)?;
    Ok(quantiles.filter(|_| kept).map(|wait| Paced { rate, wait }))
}

struct Turns<'a> {
    server: &'a Server,
    progress: &'a ProgressBar,
    stop: &'a Stop,
}

impl Turns<'_> {
    /// Runs all rounds. Each round begins with another group.
    fn take(
        &self,
        groups: &mut [ProcessGroup],
        of: &[bool],
        count: usize,
        window: Duration,
        pace: Option<Pace>,
    ) -> anyhow::Result<RoundsOfGroups> {
        let mut rounds: RoundsOfGroups = groups.iter().map(|_| Vec::new()).collect();
        for turn in 0..count {
            for place in 0..groups.len() {
                let at = (turn + place) % groups.len();
                if of[at] {
                    let round = groups[at].round(self.server, window, pace, self.stop)?;
                    rounds[at].push(round);
                }
                self.progress.inc(1);
            }
        }
        Ok(rounds)
    }
}
