//! The command line of `cargo xtask`. What the commands do is in their modules.

mod bench;
mod cargo;
mod chart;
mod demo;
mod doc_links;
mod fuzz;
mod market;
mod package;
mod progress;
mod servers;
mod soak;
mod space;
mod stage;
mod stop;
mod table;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::stop::Stop;

/// What a shell reports for a program ended by Ctrl-C.
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
    /// Show what the lock does: lost updates without it, none with it, a crash, a theft
    Demo(demo::Options),
    /// Sellers and buyers of a game's market: WATCH, one lock, a lock per item, compared
    Market(market::Options),
    /// Use many locks in all ways while everything fails, and see that they keep their promises
    Soak(soak::Options),
    /// Try changed and random replies, values, messages and tickets on the code that reads them
    Fuzz(fuzz::Options),
    /// Check everything: format, clippy, unit, integration and doc tests, docs
    Test(test::Options),
    /// Measure locks under load, ours and others, side by side
    Bench(bench::Options),
    /// Build and test the package with the lowest and the highest redis, and check it with the oldest Rust
    Package,
    /// Check that each link in the API docs leads to a page that exists
    DocLinks,
    /// One of the demo's own processes, told what to do on its standard input
    #[command(hide = true)]
    DemoProcess,
    /// One of the market's sellers or buyers
    #[command(hide = true)]
    MarketProcess,
    /// One of the soak's own processes, told what to do on its standard input
    #[command(hide = true)]
    SoakProcess,
    /// One of the bench's, likewise
    #[command(hide = true)]
    BenchProcess,
}

fn main() -> ExitCode {
    let task = match Cli::parse().task {
        Task::DemoProcess => return demo::process(),
        Task::MarketProcess => return market::process(),
        Task::SoakProcess => return soak::process(),
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
        Task::Package => package::run(&stop),
        Task::DocLinks => doc_links::run(),
        Task::DemoProcess | Task::MarketProcess | Task::SoakProcess | Task::BenchProcess => {
            unreachable!("handled above")
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // Whatever else went wrong after Ctrl-C went wrong because of it.
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
