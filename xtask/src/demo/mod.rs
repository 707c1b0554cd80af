//! `cargo xtask demo`: what the lock promises, shown on a real Redis in a few seconds. Every claim
//! printed here is measured first; one that does not hold ends the demo as a failure.

mod actor;
mod counter;
mod crash;
mod messages;
mod part;
mod report;
mod theft;
mod watchdog;

pub use part::main as process;

use std::time::Duration;

use crate::stage::{Place, Stage};
use crate::stop::Stop;

/// The ttl of every lock held in the last three scenes.
const TTL: Duration = Duration::from_secs(3);
/// How long anything may take that should take no time at all.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    place: Place,
    /// How long the counter is raised, without the lock and again with it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let stage = Stage::open(&options.place, "demo", stop)?;
    let space = &stage.space;
    match stage.is_private() {
        true => println!(
            "leasehold demo: locks in Redis, on a private server at {}.",
            space.address()
        ),
        false => println!(
            "leasehold demo: locks in Redis, on the server at {}, under {}.",
            space.address(),
            space.root()
        ),
    }
    counter::show(space, Duration::from_secs(options.seconds), stop)?;
    watchdog::show(space, stop)?;
    crash::show(space, stop)?;
    theft::show(space, stop)?;
    stage.close()?;
    println!("\nAll of it holds. Nothing is left in Redis.");
    Ok(())
}
