//! Runs one case: in each round, all ways in turn.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use indicatif::ProgressBar;
use leasehold_load::{Round, ServerStats, description, nanoseconds, sum};
use leasehold_testbed::{Process, Reply, Server};
use leasehold_tools::stop::Stop;

use super::cases::{Case, Way};
use super::load::{Assignment, Tallies, key};
use super::report::{Outcome, Row};
use crate::programs::Programs;
use crate::run::Effort;

/// The time from the start order to the start of a round.
const NOTICE: Duration = Duration::from_millis(50);
/// The maximum time until a process reports, beyond the time of its work.
const SILENCE: Duration = Duration::from_secs(120);
/// The most rounds that are not measured. Usually, two or three are enough until a round makes no connection.
const MOST_WARM_UPS: usize = 10;
/// The time for which the further readers hold the key.
const HOUR_MS: u64 = 3_600_000;

/// One round of a way.
pub struct Measured {
    pub tallies: Tallies,
    pub stats: ServerStats,
    pub window: Duration,
}

pub fn case(
    case: &Case,
    programs: &Programs,
    effort: &Effort,
    progress: &ProgressBar,
    stop: &Stop,
) -> anyhow::Result<Outcome> {
    let server = Server::start()?;
    let ways = case.ways.iter().filter(|way| programs.can_share(**way));
    let mut groups: Vec<Group> = ways
        .map(|way| Group::start(case, *way, &server, programs, effort, stop))
        .collect::<anyhow::Result<_>>()?;
    // All rounds together last for several turns of each thread, even if only one thread can hold the key at a time.
    let turns = effort.share_rounds as u32 * case.hold * case.seats() as u32 / 2;
    let window = effort.share_window.max(turns);
    for turn in 0..effort.share_rounds {
        let count = groups.len();
        for place in 0..count {
            groups[(turn + place) % count].round(&server, window, stop)?;
        }
        progress.inc(1);
    }
    let rows = groups
        .iter()
        .map(|group| Row::new(case, group.way, &group.rounds));
    Ok(Outcome {
        name: case.name.clone(),
        title: case.title.clone(),
        machine: description(&server)?,
        rows: rows.collect::<anyhow::Result<_>>()?,
    })
}

/// The processes of one way.
struct Group {
    way: Way,
    processes: Vec<Process<Tallies>>,
    rounds: Vec<Measured>,
}

impl Group {
    fn start(
        case: &Case,
        way: Way,
        server: &Server,
        programs: &Programs,
        effort: &Effort,
        stop: &Stop,
    ) -> anyhow::Result<Self> {
        if way != Way::Redisson {
            add_readers(server, way, case.others)?;
        }
        let mut processes = Vec::new();
        for process in 0..case.processes {
            let assignment = Assignment {
                url: server.url(),
                way,
                process,
                threads: case.threads,
                own_clients: case.own_clients,
                mix: case.mix,
                hold: case.hold,
                others: case.others,
            };
            let mut program: Command = programs.share_load(way);
            let name = format!("{} process {process}", way.name());
            let process = Process::start(name, &mut program, &assignment)?;
            // The process sends empty tallies once it has connected. The next process starts afterwards: if hundreds of
            // clients connected at the same time, some would exceed their time limit.
            stop.message(&process, SILENCE)?;
            processes.push(process);
        }
        let mut group = Self {
            way,
            processes,
            rounds: Vec::new(),
        };
        // These rounds are not measured: in them, scripts are loaded, connections are made, and Java compiles. A client
        // connects for notifications when it first waits. If clients connected in a measured round, their waits would
        // be part of the result.
        let window = 2 * case.hold
            + match way {
                Way::Redisson => effort.share_window,
                _ => Duration::from_millis(100),
            };
        let mut connections = ServerStats::until_now(server)?.connections;
        for _ in 0..MOST_WARM_UPS {
            group.round(server, window, stop)?;
            let before = connections;
            connections = group
                .rounds
                .last()
                .map_or(0, |round| round.stats.connections);
            if connections <= before {
                break;
            }
        }
        group.rounds.clear();
        Ok(group)
    }

    fn round(&mut self, server: &Server, window: Duration, stop: &Stop) -> anyhow::Result<()> {
        let before = ServerStats::until_now(server)?;
        let round = Round {
            start: nanoseconds() + NOTICE.as_nanos() as u64,
            window,
            pace: None,
        };
        for process in &mut self.processes {
            process.order(&round)?;
        }
        let mut all: Vec<Tallies> = Vec::new();
        for process in &self.processes {
            all.push(stop.message(process, SILENCE + window)?);
        }
        let mut tallies = Tallies::default();
        for (kind, tally) in tallies.iter_mut().enumerate() {
            let of_kind: Vec<_> = all.iter().map(|tallies| tallies[kind].clone()).collect();
            *tally = sum(&of_kind)?;
        }
        let stats = ServerStats::until_now(server)?.since(&before);
        self.rounds.push(Measured {
            tallies,
            stats,
            window,
        });
        Ok(())
    }
}

/// Adds readers that hold the key of the way for an hour, as clients of leasehold or of the raw commands would.
fn add_readers(server: &Server, way: Way, count: usize) -> anyhow::Result<()> {
    let Reply::Array(time) = server.command(&["TIME"])? else {
        bail!("TIME has no array");
    };
    let seconds: u64 = time.first().context("TIME is empty")?.to_string().parse()?;
    let end = (seconds * 1000 + HOUR_MS).to_string();
    let key = match way {
        Way::Raw => key(way),
        _ => format!("leasehold:{}", key(way)),
    };
    let member = |n: usize| format!("lh1 {n:032x} r 1 1 0 bench.example/1/{n:08x}");
    for first in (0..count).step_by(1000) {
        let members: Vec<_> = (first..count.min(first + 1000)).map(member).collect();
        let mut add = vec!["ZADD", &key];
        for member in &members {
            add.extend([&*end, &**member]);
        }
        let added = server.command(&add)?;
        ensure!(matches!(added, Reply::Int(_)), "{added}");
    }
    let expires = (seconds * 1000 + HOUR_MS + 1000).to_string();
    server.command(&["PEXPIREAT", &key, &expires])?;
    Ok(())
}
