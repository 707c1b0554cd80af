//! `cargo xtask market`: compares ways to keep the sellers and buyers of a game's market apart: WATCH, one lock, a lock
//! per item, and a lock per item with its transaction. Shows the results beside those of an article that compared the
//! first three ways. Checks the market's books after every run, and fails if they are wrong.

mod article;
mod deal;
mod figures;
mod load;
mod messages;
mod methods;
mod report;
mod worker;
mod world;

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use comfy_table::Table;
use leasehold_load::{BusyLoops, described};
use leasehold_tools::cargo::{optimized, target_folder};
use leasehold_tools::environment::Namespace;
use leasehold_tools::environment::{Environment, ServerOptions};
use leasehold_tools::progress;
use leasehold_tools::stop::Stop;
use leasehold_tools::table::framed;

use load::{Floor, Load};
use methods::Way;
use report::Scene;

/// The length of a run with `--quick`: enough to check that everything works, too little to compare.
const QUICK: Duration = Duration::from_millis(60);

#[derive(Parser)]
#[command(
    name = "leasehold-market",
    bin_name = "cargo xtask market",
    about = "Compare WATCH, one lock and a lock per item for the sellers and buyers of a game's market"
)]
struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Seconds of each run; the article's runs took 60
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Run beside one busy loop per core
    #[arg(long)]
    busy: bool,
    /// Run each for a fraction of a second: checks that everything works, compares nothing
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
    /// A process of the command, which gets its job on its standard input
    #[arg(long, hide = true)]
    process: bool,
}

/// The article's three loads.
const LOADS: [Load; 3] = [trade(1, 1), trade(5, 1), trade(5, 5)];
/// Buyers in contention: on a stocked market, the fewer items they want, the more they wait for each other.
const WAITING: [Load; 3] = [after(None), after(Some(8)), after(Some(1))];
/// The longer a transaction, the more others overlap with it.
const DOGPILE: [Load; 4] = [lasting(0), lasting(1), lasting(5), lasting(20)];

const fn trade(sellers: usize, buyers: usize) -> Load {
    Load {
        sellers,
        buyers,
        among: None,
        length: Duration::ZERO,
    }
}

const fn after(among: Option<u32>) -> Load {
    Load {
        among,
        ..trade(0, 8)
    }
}

const fn lasting(milliseconds: u64) -> Load {
    Load {
        length: Duration::from_millis(milliseconds),
        ..trade(0, 8)
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return worker::main();
    }
    leasehold_tools::run(|stop| market(&options, stop))
}

fn market(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    // A program that cargo did not start continues as it is.
    if cfg!(debug_assertions) && !options.quick && env::var_os("CARGO").is_some() {
        begin_anew_optimized(stop)?;
    }
    let environment = Environment::open(&options.server, "market", stop)?;
    let time = match options.quick {
        true => QUICK,
        false => Duration::from_secs(options.seconds),
    };
    let mut machine = machine(&environment.namespace)?;
    let loops = options.busy.then(BusyLoops::start).transpose()?;
    if let Some(loops) = &loops {
        machine += &format!("; beside {} busy loops, one per core", loops.count());
    }
    println!("{machine}\n");
    let page = compare(&environment.namespace, time, &machine, stop)?;
    drop(loops);
    environment.close()?;
    println!(
        "After every run no money was made or lost, each item was in one place, and no lock was \
        left.\nFigures: {}",
        page.display()
    );
    Ok(())
}

/// Replaces this process by an optimized build of the same program, since a debug build would mostly measure its own
/// slowness.
fn begin_anew_optimized(stop: &Stop) -> anyhow::Result<()> {
    let mut again = Command::new(optimized("leasehold-market", &[], stop)?);
    let error = again.args(env::args_os().skip(1)).exec();
    Err(error).context("cannot start the optimized build")
}

fn compare(
    namespace: &Namespace,
    time: Duration,
    machine: &str,
    stop: &Stop,
) -> anyhow::Result<PathBuf> {
    let runs = Way::ALL.len() * LOADS.len() + Way::CAREFUL.len() * (WAITING.len() + DOGPILE.len());
    let words = "{elapsed} of about {duration}: {msg}";
    let bar = progress::bar_of_time(time * runs as u32, words)?;
    let floor = Floor {
        namespace,
        time,
        stop,
        bar: &bar,
    };
    let scenes = |loads: &[Load], ways: &[Way]| -> anyhow::Result<Vec<Scene>> {
        let scene = |load: &Load| {
            let runs = ways.iter().map(|way| load.run(&floor, *way));
            Ok(Scene {
                load: *load,
                runs: runs.collect::<anyhow::Result<_>>()?,
            })
        };
        loads.iter().map(scene).collect()
    };
    let mut tables = Vec::new();
    let mut show = |title: &str, table: Table| {
        let text = framed(table.clone(), 2);
        bar.suspend(|| println!("{title}\n{text}"));
        tables.push((title.to_owned(), table));
    };
    let trading = scenes(&LOADS, &Way::ALL)?;
    show(
        &format!(
            "Sellers x buyers: this machine, {time:?} each | the article, {}s each on its machine",
            article::SECONDS
        ),
        report::compared(&trading),
    );
    show("Gain of a lock per item", report::ratios(&trading));
    show(
        "Buyers in contention for the same items, on a stocked market",
        report::waiting(&scenes(&WAITING, &Way::CAREFUL)?),
    );
    show(
        "The dogpile effect: 8 buyers want any item; the longer a deal, the more overlap",
        report::dogpile(&scenes(&DOGPILE, &Way::CAREFUL)?),
    );
    bar.finish_and_clear();
    figures::page(&target_folder()?.join("market"), machine, &trading, &tables)
}

/// The machine and the build, on which the figures depend.
fn machine(namespace: &Namespace) -> anyhow::Result<String> {
    let about: String = namespace.ask(redis::cmd("INFO").arg("server"))?;
    let build = if cfg!(debug_assertions) {
        "a debug build: do not compare its figures"
    } else {
        "a release build"
    };
    Ok(format!(
        "{} at {}, one process for each seller and buyer; {build}",
        described(&about)?,
        namespace.address()
    ))
}
