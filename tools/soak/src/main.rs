//! `cargo xtask soak`: several processes use many locks in all ways while the server, the connections and the
//! processes fail, and their records are checked against the library's promises.
//!
//! The soak runs in rounds. `driver` plays them on a `Topology`: `single`, `sentinel`, `cluster` or `quorum`. The
//! processes of the first three write records, which `checks` compares with the promises at the end of a round.

mod checks;
#[cfg(test)]
mod checks_tests;
mod cluster;
mod driver;
mod faults;
mod history;
mod inject;
mod leaks;
mod mass;
mod messages;
mod operations;
mod process;
mod quorum;
mod random;
mod recorded;
mod records;
mod report;
mod sentinel;
mod single;
mod tickets;
mod value;
mod watch;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use clap::{Parser, ValueEnum};
use leasehold_tools::options::{Provision, minutes};
use leasehold_tools::stop::Stop;
use uuid::Uuid;

use driver::{Length, Soak, Topology, drive};
use faults::Kind;
use inject::Defect;
use quorum::Quorum;

/// The servers that the soak uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Servers {
    /// A primary and its replica, at a fixed address
    Single,
    /// A primary and two replicas under three sentinels
    Sentinel,
    /// Three masters and a replica of each, as a Cluster
    Cluster,
    /// Five independent servers
    Quorum,
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
    /// The servers. Each choice has faults of its own, and `quorum` also has checks of its own, and processes of one
    /// thread
    #[arg(long, value_enum, default_value_t = Servers::Single)]
    topology: Servers,
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
    fn servers(&self) -> Servers {
        match self.quorum {
            true => Servers::Quorum,
            false => self.topology,
        }
    }

    /// The command that plays a round again.
    fn again(&self, seed: u64, round: u64) -> String {
        let mut again = format!("cargo xtask soak --seed {seed} --round {round}");
        let servers = self.servers();
        if servers != Servers::Single {
            again += &format!(" --topology {}", name(&servers));
        }
        if !self.only.is_empty() {
            let names: Vec<String> = self.only.iter().map(name).collect();
            again += &format!(" --only {}", names.join(","));
        }
        again
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return match options.servers() {
            Servers::Quorum => quorum::process(),
            _ => worker::main(),
        };
    }
    leasehold_tools::run(|stop| soak(&options, stop))
}

fn soak(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let seed = options.seed.unwrap_or_else(fresh_seed);
    options.provision.redis()?;
    let servers = options.servers();
    let is_quorum = servers == Servers::Quorum;
    let processes = options.processes.unwrap_or(if is_quorum { 8 } else { 4 });
    let threads = if is_quorum { 1 } else { options.threads };
    let text = match options.rounds {
        Some(rounds) => format!("{rounds} rounds"),
        None => format!("{} minutes", options.minutes),
    };
    println!("leasehold soak: {text}, {processes} processes of {threads} threads, seed {seed}");
    ensure!(
        options.rounds.is_none() || is_quorum,
        "--rounds needs --topology quorum"
    );
    let time = Duration::from_secs_f64(options.minutes * 60.0);
    let length = options.rounds.map_or(Length::Time(time), Length::Rounds);
    let soak = Soak {
        seed,
        processes: processes as usize,
        threads: threads as usize,
        only: &options.only,
        inject: options.inject,
        stop,
    };
    let again = |round| options.again(seed, round);
    let mut topology: Box<dyn Topology> = match servers {
        Servers::Single => Box::new(single::topology(&soak)?),
        Servers::Sentinel => Box::new(sentinel::topology(&soak)?),
        Servers::Cluster => Box::new(cluster::topology(&soak)?),
        Servers::Quorum => {
            let clock = options.provision.own_clock();
            Box::new(Quorum::start(&soak, clock.as_ref())?)
        }
    };
    drive(&mut *topology, &soak, length, options.round, again)
}

/// The name of a choice on the command line.
fn name(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value();
    value.map_or(String::new(), |value| value.get_name().to_owned())
}

/// A random seed that is short enough to type.
fn fresh_seed() -> u64 {
    Uuid::new_v4().as_u64_pair().1 % 1_000_000_000
}
