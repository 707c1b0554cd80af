//! `cargo xtask demo`: shows the lock's promises on a real Redis in a few seconds. The demo measures everything before
//! it prints it, and fails if a promise does not hold.

mod actor;
mod counter;
mod crash;
mod messages;
mod overwrite;
mod renewal;
mod report;
mod shell;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use leasehold_tools::environment::{Environment, ServerOptions};
use leasehold_tools::stop::Stop;

/// The ttl of every lock held in the last four scenes.
const TTL: Duration = Duration::from_secs(3);
/// The limit for steps that should take no time.
const STEP_LIMIT: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(
    name = "leasehold-demo",
    bin_name = "cargo xtask demo",
    about = "Show what the lock does: lost updates without it, none with it, a crash, an overwritten key, a command of a shell"
)]
struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// How many seconds the counter is incremented, without the lock and again with it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// A process of the command, which gets its job on its standard input
    #[arg(long, hide = true)]
    process: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return worker::main();
    }
    leasehold_tools::run(|stop| demo(&options, stop))
}

fn demo(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let environment = Environment::open(&options.server, "demo", stop)?;
    let namespace = &environment.namespace;
    match environment.is_private() {
        true => println!(
            "leasehold demo: locks in Redis, on a private server at {}.",
            namespace.address()
        ),
        false => println!(
            "leasehold demo: locks in Redis, on the server at {}, under the prefix {}.",
            namespace.address(),
            namespace.root()
        ),
    }
    counter::show(namespace, Duration::from_secs(options.seconds), stop)?;
    renewal::show(namespace, stop)?;
    crash::show(namespace, stop)?;
    overwrite::show(namespace, stop)?;
    shell::show(namespace, stop)?;
    environment.close()?;
    println!("\nAll checks passed. No keys are left in Redis.");
    Ok(())
}
