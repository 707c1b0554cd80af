//! The command line of `cargo xtask`. Its own commands are in the modules. The others are programs in `tools/`, which
//! cargo builds and runs when they are asked for.

mod doc_links;
mod fuzz;
mod package;
mod servers;
mod test;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use leasehold_tools::cargo::become_program;
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
    #[command(disable_help_flag = true)]
    Demo(Arguments),
    /// Compare WATCH, one lock and a lock per item for the sellers and buyers of a game's market
    #[command(disable_help_flag = true)]
    Market(Arguments),
    /// Use many locks in all ways while servers, connections and processes fail, and check the promises
    #[command(disable_help_flag = true)]
    Soak(Arguments),
    /// Feed changed and random replies, values, messages and tickets to the code that reads them
    Fuzz(fuzz::Options),
    /// Check everything: format, clippy, unit, integration and doc tests, docs
    Test(test::Options),
    /// Measure locks under load: leasehold beside raw commands and other crates
    #[command(disable_help_flag = true)]
    Bench(Arguments),
    /// Draw the pictures of the program `leasehold` in docs/ (needs tmux)
    #[command(disable_help_flag = true)]
    Pictures(Arguments),
    /// Run leasehold beside the locks of other libraries, on the same keys
    #[command(disable_help_flag = true)]
    Interop(Arguments),
    /// Build and test the package with the lowest and the highest redis, and check it with the oldest Rust
    Package,
    /// Check that each link in the API docs leads to a page that exists
    DocLinks,
}

/// The arguments of a program, which it reads itself.
#[derive(clap::Args)]
struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    match Cli::parse().task {
        Task::Demo(options) => become_tool("leasehold-demo", &options),
        Task::Market(options) => become_tool("leasehold-market", &options),
        Task::Soak(options) => become_tool("leasehold-soak", &options),
        Task::Bench(options) => become_tool("leasehold-bench", &options),
        Task::Pictures(options) => become_tool("leasehold-pictures", &options),
        Task::Interop(options) => become_tool("leasehold-interop", &options),
        Task::Fuzz(options) => run(|stop| fuzz::run(&options, stop)),
        Task::Test(options) => run(|stop| test::run(&options, stop)),
        Task::Package => run(package::run),
        Task::DocLinks => run(|_| doc_links::run()),
    }
}

fn become_tool(package: &str, options: &Arguments) -> ExitCode {
    let error = become_program(package, &options.arguments);
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}
