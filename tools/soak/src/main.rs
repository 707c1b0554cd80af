//! `cargo xtask soak`: several processes use many locks in all ways while the server, the connections and the
//! processes fail, and their records are checked against the library's promises.
//!
//! The soak runs in rounds. Each round has servers, processes and records of its own. At the end of a round, all faults
//! end, and the records are checked. The servers are a primary with a replica, or a Cluster. In every other round with
//! a primary, a killed server loses its data. A group under sentinels and a quorum have soaks of their own, in
//! `sentinel` and `quorum`.

mod checks;
#[cfg(test)]
mod checks_tests;
mod cluster;
mod faults;
mod history;
mod inject;
mod leaks;
mod mass;
mod messages;
mod operations;
mod process;
mod quorum;
mod race;
mod random;
mod records;
mod report;
mod round;
mod sentinel;
mod servers;
mod tickets;
mod value;
mod worker;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::{Parser, ValueEnum as _};
use leasehold_tools::options::{Provision, minutes};
use leasehold_tools::progress;
use leasehold_tools::stop::{Finding, Stop, Stopped};
use uuid::Uuid;

use faults::Kind;
use inject::Defect;
use report::Totals;
use round::Round;

/// For how long the processes work, per round.
const ROUND: Duration = Duration::from_secs(25);
/// The shortest round. If less time is left, no further round begins.
const SHORTEST_ROUND: Duration = Duration::from_secs(2);

/// The servers that the soak uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Topology {
    /// A primary and its replica, at a fixed address
    Single,
    /// A primary and two replicas under three sentinels
    Sentinel,
    /// Three masters and a replica of each, as a Cluster
    Cluster,
    /// Five independent servers
    Quorum,
}

impl Topology {
    /// The faults that are drawn.
    fn kinds(self) -> Vec<Kind> {
        match self {
            Self::Single => faults::kinds(),
            Self::Sentinel | Self::Quorum => Vec::new(),
            Self::Cluster => cluster::kinds(),
        }
    }
}

#[derive(Parser)]
#[command(
    name = "leasehold-soak",
    bin_name = "cargo xtask soak",
    about = "Use many locks in all ways while servers, connections and processes fail, and check the promises"
)]
struct Options {
    /// Minutes to run
    #[arg(long, default_value_t = 2.0, value_parser = minutes)]
    minutes: f64,
    /// The seed of all random choices [default: a random one]
    #[arg(long)]
    seed: Option<u64>,
    /// The number of the first round: the round of an earlier run that found something
    #[arg(long, default_value_t = 1)]
    round: u64,
    /// Number of rounds, instead of minutes; only of a quorum
    #[arg(long, conflicts_with = "minutes")]
    rounds: Option<u64>,
    /// Number of processes at a time [default: 4, or 8 of a quorum]
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=64))]
    processes: Option<u64>,
    /// Threads of each process
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: u64,
    #[command(flatten)]
    provision: Provision,
    /// The servers. `cluster` has faults of its own. `sentinel` and `quorum` have faults and checks of their own: with
    /// `sentinel`, each of `--processes` is a client of this process; with `quorum`, each process has one thread
    #[arg(long, value_enum, default_value_t = Topology::Single)]
    topology: Topology,
    /// The same as `--topology quorum`
    #[arg(long, conflicts_with = "topology")]
    quorum: bool,
    /// Use only these faults
    #[arg(long, value_name = "FAULT,..", value_delimiter = ',')]
    only: Vec<Kind>,
    /// Put a violation into the records, to show that the checks find it
    #[arg(long, hide = true)]
    inject: Option<Defect>,
    /// A process of the command, which gets its job on its standard input
    #[arg(long, hide = true)]
    process: bool,
}

impl Options {
    fn topology(&self) -> Topology {
        match self.quorum {
            true => Topology::Quorum,
            false => self.topology,
        }
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return match options.topology() {
            Topology::Quorum => quorum::process(),
            _ => worker::main(),
        };
    }
    leasehold_tools::run(|stop| soak(&options, stop))
}

fn soak(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let seed = options.seed.unwrap_or_else(fresh_seed);
    options.provision.redis()?;
    let topology = options.topology();
    let is_quorum = topology == Topology::Quorum;
    let processes = options.processes.unwrap_or(if is_quorum { 8 } else { 4 });
    let threads = if is_quorum { 1 } else { options.threads };
    let length = match options.rounds {
        Some(rounds) => format!("{rounds} rounds"),
        None => format!("{} minutes", options.minutes),
    };
    println!("leasehold soak: {length}, {processes} processes of {threads} threads, seed {seed}");
    let time = Duration::from_secs_f64(options.minutes * 60.0);
    ensure!(
        options.rounds.is_none() || is_quorum,
        "--rounds needs --topology quorum"
    );
    for kind in &options.only {
        ensure!(
            topology.kinds().contains(kind),
            "--topology {topology:?} has no fault {kind:?}"
        );
    }
    match topology {
        Topology::Sentinel => {
            return sentinel::run(time, processes, threads, seed, options.inject, stop);
        }
        Topology::Quorum => {
            let length = options.rounds.map(quorum::Length::Rounds);
            let length = length.unwrap_or(quorum::Length::Time(time));
            let clock = options.provision.own_clock();
            return quorum::run(length, processes, seed, options.round, clock, stop);
        }
        Topology::Single | Topology::Cluster => {}
    }
    let (start, bar) = (Instant::now(), progress::bar_of_time(time, "{msg}")?);
    let mut totals = Totals::default();
    let mut number = options.round;
    let outcome = loop {
        let left = time.saturating_sub(start.elapsed());
        if left < SHORTEST_ROUND && totals.rounds > 0 {
            break Ok(());
        }
        let round = Round {
            number,
            seed,
            time: left.min(ROUND),
            topology,
            processes: processes as usize,
            threads: threads as usize,
            only: &options.only,
            inject: options.inject,
        };
        let tick = |text: String| {
            bar.set_position(start.elapsed().as_millis() as u64);
            bar.set_message(text);
        };
        match round.play(stop, &mut totals, tick) {
            Ok(0) => {}
            Ok(violations) => {
                let mut again = format!("cargo xtask soak --seed {seed} --round {number}");
                if topology == Topology::Cluster {
                    again.push_str(" --topology cluster");
                }
                if !options.only.is_empty() {
                    let names = options.only.iter().filter_map(Kind::to_possible_value);
                    let names: Vec<String> = names.map(|name| name.get_name().to_owned()).collect();
                    again = format!("{again} --only {}", names.join(","));
                }
                break Err(broken(violations, &again));
            }
            Err(error) => break Err(error.context(format!("round {number}, seed {seed}"))),
        }
        if stop.requested() {
            break Err(Stopped.into());
        }
        number += 1;
    };
    bar.finish_and_clear();
    println!("{}seed {seed}", totals.text());
    if outcome.is_ok() {
        println!("All of it holds.");
    }
    outcome
}

/// The violations have been printed. `again` is the command that plays the round again.
fn broken(violations: usize, again: &str) -> anyhow::Error {
    Finding(format!(
        "{violations} violations; to run this again: {again}"
    ))
    .into()
}

/// A random seed that is short enough to type.
fn fresh_seed() -> u64 {
    Uuid::new_v4().as_u64_pair().1 % 1_000_000_000
}
