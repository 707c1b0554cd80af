//! The command line of `cargo xtask`. The commands are in the modules.

mod acl;
mod bench;
mod cargo;
mod chart;
mod demo;
mod doc_links;
mod fuzz;
mod market;
mod namespace;
mod package;
mod progress;
mod provision;
mod servers;
mod soak;
mod stop;
mod table;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::stop::Stop;

/// The exit code that shells report for a program ended by Ctrl-C.
const EXIT_STOPPED: u8 = 130;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "leasehold's own commands"
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Show what the lock does: lost updates without it, none with it, a crash, an overwritten key
    Demo(demo::Options),
    /// Compare WATCH, one lock and a lock per item for the sellers and buyers of a game's market
    Market(market::Options),
    /// Use many locks in all ways while servers, connections and processes fail, and check the promises
    Soak(soak::Options),
    /// Feed changed and random replies, values, messages and tickets to the code that reads them
    Fuzz(fuzz::Options),
    /// Check everything: format, clippy, unit, integration and doc tests, docs
    Test(test::Options),
    /// Measure locks under load: leasehold beside raw commands and other crates
    Bench(bench::Options),
    /// Print the ACL rule of a user of leasehold, for redis-cli or an aclfile
    Acl(acl::Options),
    /// Build and test the package with the lowest and the highest redis, and check it with the oldest Rust
    Package,
    /// Check that each link in the API docs leads to a page that exists
    DocLinks,
    /// A process of the demo, which gets its job on its standard input
    #[command(hide = true)]
    DemoProcess,
    /// A process of the market: a seller or a buyer
    #[command(hide = true)]
    MarketProcess,
    /// A process of the soak, which gets its job on its standard input
    #[command(hide = true)]
    SoakProcess,
    /// A process of the soak of a quorum
    #[command(hide = true)]
    SoakQuorumProcess,
    /// A process of the bench, which gets its job on its standard input
    #[command(hide = true)]
    BenchProcess,
}

fn main() -> ExitCode {
    let task = match Cli::parse().task {
        Task::DemoProcess => return demo::process(),
        Task::MarketProcess => return market::process(),
        Task::SoakProcess => return soak::process(),
        Task::SoakQuorumProcess => return soak::quorum_process(),
        Task::BenchProcess => return bench::process(),
        task => task,
    };
    let stop = match Stop::install() {
        Ok(stop) => stop,
        Err(error) => return failed(&error),
    };
    let outcome = match task {
        Task::Demo(options) => demo::run(&options, &stop),
        Task::Market(options) => market::run(&options, &stop),
        Task::Soak(options) => soak::run(&options, &stop),
        Task::Fuzz(options) => fuzz::run(&options, &stop),
        Task::Test(options) => test::run(&options, &stop),
        Task::Bench(options) => bench::run(&options, &stop),
        Task::Acl(options) => acl::run(&options),
        Task::Package => package::run(&stop),
        Task::DocLinks => doc_links::run(),
        Task::DemoProcess
        | Task::MarketProcess
        | Task::SoakProcess
        | Task::SoakQuorumProcess
        | Task::BenchProcess => {
            unreachable!("handled above")
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // After Ctrl-C, only broken promises are reported: Ctrl-C itself causes other errors.
        Err(error) if stop.requested() && !error.is::<soak::Broken>() => {
            eprintln!("stopped");
            ExitCode::from(EXIT_STOPPED)
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}
