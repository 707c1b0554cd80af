//! Runs one case. Each round runs all ways in turn, so that other load on the machine affects all ways alike. In the
//! first part, each way is as fast as it can be, first on the quiet machine and then beside busy loops. In the second
//! part, on the quiet machine, all ways that can keep a fixed rate have this rate.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use indicatif::ProgressBar;
use leasehold_load::{BusyLoops, Keys, Pace, cores_by_preference, description, pin};
use leasehold_testbed::Server;
use leasehold_tools::stop::Stop;

use crate::cases::{Case, Form, Plan};
use crate::process_group::{Measured, ProcessGroup};
use crate::programs::Programs;
use crate::row::{Paced, Quantiles, Rounds, Row};

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
    /// Rounds of each case of shared locks.
    pub share_rounds: usize,
    /// The least length of such a round.
    pub share_window: Duration,
}

impl Effort {
    pub fn full() -> Self {
        Self {
            rounds: 9,
            window: Duration::from_millis(400),
            contended_window: Duration::from_secs(1),
            paced_rounds: 3,
            paced_window: Duration::from_secs(1),
            share_rounds: 3,
            share_window: Duration::from_secs(2),
        }
    }

    pub fn quick() -> Self {
        Self {
            rounds: 2,
            window: Duration::from_millis(60),
            contended_window: Duration::from_millis(100),
            paced_rounds: 1,
            paced_window: Duration::from_millis(100),
            share_rounds: 1,
            share_window: Duration::from_millis(100),
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
            share_rounds: 0,
            share_window: Duration::ZERO,
        }
    }

    fn window(&self, case: &Case) -> Duration {
        match case.keys {
            Keys::Own => self.window,
            Keys::One => self.contended_window,
        }
    }
}

/// The results of one form of a case.
pub struct Outcome {
    pub title: String,
    pub name: String,
    pub case: &'static str,
    pub form: Form,
    pub machine: String,
    pub rows: Vec<Row>,
}

/// The rounds of each group, in the groups' order.
type RoundsOfGroups = Vec<Vec<Measured>>;

/// Measures both forms of a case in turn: a quiet round of each way, then a round of each way beside busy loops.
pub fn case(
    plan: &Plan,
    programs: &Programs,
    effort: &Effort,
    progress: &ProgressBar,
    stop: &Stop,
) -> anyhow::Result<Vec<Outcome>> {
    let open = |form| Scene::open(plan, form, programs, stop);
    let [mut quiet, mut busy] = [open(Form::Quiet)?, open(Form::Busy)?];
    let turns = Turns { progress, stop };
    let window = effort.window(plan.case);
    for turn in 0..effort.rounds {
        turns.take(&mut quiet, turn, window, None)?;
        if !busy.groups.is_empty() {
            let loops = BusyLoops::start().context("cannot start busy loops")?;
            turns.take(&mut busy, turn, window, None)?;
            drop(loops);
        }
    }
    let mut outcomes = Vec::new();
    for mut scene in [quiet, busy] {
        if scene.groups.is_empty() {
            continue;
        }
        let (name, free) = (plan.case.name_of(scene.form), scene.take_rounds());
        let mut rows = rows(&name, &scene.groups, &free)?;
        // Beside busy loops, waits at a fixed rate would show the loops' time slices, and little of the locks.
        if scene.form == Form::Quiet {
            turns.paced(plan.case, &mut scene, effort, &mut rows)?;
        }
        outcomes.push(Outcome {
            title: plan.case.title(scene.form),
            name,
            case: plan.case.name,
            form: scene.form,
            machine: description(&scene.server)?,
            rows,
        });
    }
    Ok(outcomes)
}

fn rows(name: &str, groups: &[ProcessGroup], rounds: &RoundsOfGroups) -> anyhow::Result<Vec<Row>> {
    let raw = Rounds::of(rounds.first().context("a case has ways")?);
    let rows = groups.iter().zip(rounds);
    let rows = rows.map(|(group, rounds)| Row::new(name, group, rounds, &raw));
    let rows: anyhow::Result<Vec<_>> = rows.collect();
    rows.with_context(|| format!("case {name}"))
}

/// The processes of one form of a case, with a server of their own, so that no form finds data of another. Each form
/// has its own processes, since a client that has noticed busy loops does not yield for some seconds afterwards.
struct Scene {
    form: Form,
    /// Dropped before the server, so that the clients end first.
    groups: Vec<ProcessGroup>,
    rounds: RoundsOfGroups,
    server: Server,
}

impl Scene {
    fn open(plan: &Plan, form: Form, programs: &Programs, stop: &Stop) -> anyhow::Result<Self> {
        let (case, server) = (plan.case, Server::start()?);
        let core = case.pinned.then(|| one_core(&server)).transpose()?;
        let groups = plan.ways(form).iter();
        let groups: Vec<_> = groups
            .map(|way| ProcessGroup::start(case, form, *way, core, &server, programs, stop))
            .collect::<anyhow::Result<_>>()?;
        let rounds = groups.iter().map(|_| Vec::new()).collect();
        Ok(Self {
            form,
            groups,
            rounds,
            server,
        })
    }

    /// Takes out all rounds so far.
    fn take_rounds(&mut self) -> RoundsOfGroups {
        self.rounds.iter_mut().map(std::mem::take).collect()
    }
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
    progress: &'a ProgressBar,
    stop: &'a Stop,
}

impl Turns<'_> {
    /// Runs one round of each group. Each turn begins with another group.
    fn take(
        &self,
        scene: &mut Scene,
        turn: usize,
        window: Duration,
        pace: Option<(Pace, &[bool])>,
    ) -> anyhow::Result<()> {
        let count = scene.groups.len();
        for place in 0..count {
            let at = (turn + place) % count;
            if pace.is_none_or(|(_, able)| able[at]) {
                let pace = pace.map(|(pace, _)| pace);
                let round = scene.groups[at].round(&scene.server, window, pace, self.stop)?;
                scene.rounds[at].push(round);
            }
            self.progress.inc(1);
        }
        Ok(())
    }

    /// Measures the ways that can keep a fixed rate once more, at that rate, and adds the waits to their rows.
    fn paced(
        &self,
        case: &Case,
        scene: &mut Scene,
        effort: &Effort,
        rows: &mut [Row],
    ) -> anyhow::Result<()> {
        let rate = PACE * rows[0].pairs_per_second;
        ensure!(rate > 0.0, "the raw commands got no lock in {}", case.name);
        let able = |row: &Row| row.pairs_per_second > ROOM * rate;
        let able: Vec<bool> = rows.iter().map(able).collect();
        let pace = Pace {
            interval: Duration::from_secs_f64(case.seats() as f64 / rate),
            threads: case.seats(),
        };
        for turn in 0..effort.paced_rounds {
            self.take(scene, turn, effort.paced_window, Some((pace, &able)))?;
        }
        for (row, rounds) in rows.iter_mut().zip(scene.take_rounds()) {
            if !rounds.is_empty() {
                row.paced = paced_waits(&rounds, rate)?;
            }
        }
        Ok(())
    }
}
