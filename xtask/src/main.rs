//! The command line of `cargo xtask`. The commands are in the modules.

mod acl;
mod bench;
mod demo;
mod doc_links;
mod fuzz;
mod market;
mod package;
mod servers;
mod soak;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use leasehold_tools::run;

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
    match Cli::parse().task {
        Task::DemoProcess => demo::process(),
        Task::MarketProcess => market::process(),
        Task::SoakProcess => soak::process(),
        Task::SoakQuorumProcess => soak::quorum_process(),
        Task::BenchProcess => bench::process(),
        Task::Demo(options) => run(|stop| demo::run(&options, stop)),
        Task::Market(options) => run(|stop| market::run(&options, stop)),
        Task::Soak(options) => run(|stop| soak::run(&options, stop)),
        Task::Fuzz(options) => run(|stop| fuzz::run(&options, stop)),
        Task::Test(options) => run(|stop| test::run(&options, stop)),
        Task::Bench(options) => run(|stop| bench::run(&options, stop)),
        Task::Acl(options) => run(|_| acl::run(&options)),
        Task::Package => run(package::run),
        Task::DocLinks => run(|_| doc_links::run()),
    }
}
