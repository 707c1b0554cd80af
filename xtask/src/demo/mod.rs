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

use anyhow::ensure;

use crate::server;
use crate::space::Space;
use crate::stop::Stop;

/// The ttl of every lock held in the last three scenes.
const TTL: Duration = Duration::from_secs(3);
/// How long anything may take that should take no time at all.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub struct Options {
    /// Use this Redis or Valkey instead of a private server. Everything the demo writes is under a
    /// prefix of its own and deleted at the end
    #[arg(long)]
    url: Option<String>,
    /// Never install redis-server: say what is missing instead
    #[arg(long)]
    no_install: bool,
    /// How long the counter is raised, without the lock and again with it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    // Dropped last: the space is cleaned while its server still runs.
    let server = if options.url.is_none() {
        Some(server::private(options.no_install)?)
    } else {
        None
    };
    stop.check()?;
    let url = match (&options.url, &server) {
        (Some(url), _) => url.clone(),
        (None, Some(server)) => server.url(),
        (None, None) => unreachable!("without --url a server was started"),
    };
    let mut space = Space::open(&url, "demo")?;
    match &server {
        Some(_) => println!(
            "leasehold demo: locks in Redis, on a private server at {}.",
            space.address()
        ),
        None => println!(
            "leasehold demo: locks in Redis, on the server at {}, under {}.",
            space.address(),
            space.root()
        ),
    }
    counter::show(&space, Duration::from_secs(options.seconds), stop)?;
    watchdog::show(&space, stop)?;
    crash::show(&space, stop)?;
    theft::show(&space, stop)?;
    space.clean()?;
    if server.is_some() {
        let keys = space.keys_on_server()?;
        ensure!(
            keys == 0,
            "{keys} keys were written outside the demo's own prefix"
        );
    }
    println!("\nAll of it holds. Nothing is left in Redis.");
    Ok(())
}
