//! `cargo xtask market`: sellers and buyers of a game's market, kept apart by WATCH, by one lock, by a
//! lock per item, and by that with its transaction; beside the figures of the article that compared the
//! first three. After every run the books are checked: a way that is wrong ends it as a failure.

mod article;
mod deal;
mod figures;
mod load;
mod messages;
mod part;
mod report;
mod ways;
mod world;

pub use part::main as process;

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::Table;
use leasehold_load::described;

use crate::cargo::{optimized, target_folder};
use crate::progress;
use crate::space::Space;
use crate::stage::{Place, Stage};
use crate::stop::Stop;
use crate::table::framed;
use load::{Floor, Load};
use report::Scene;
use ways::Way;

/// A run with `--quick`: enough to see that all of it works, too little to compare.
const QUICK: Duration = Duration::from_millis(60);

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    place: Place,
    /// How long each of the runs takes; the article's took 60
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// A fraction of a second for each run: shows that all of it works, compares nothing
    #[arg(long, conflicts_with = "seconds")]
    quick: bool,
}

/// The article's three.
const LOADS: [Load; 3] = [trade(1, 1), trade(5, 1), trade(5, 5)];
/// Buyers that wait for one another: on a stocked market, the fewer items they want the more.
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

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    // Where cargo did not start it, it goes on as it is.
    if cfg!(debug_assertions) && !options.quick && env::var_os("CARGO").is_some() {
        begin_anew_optimized(stop)?;
    }
    let stage = Stage::open(&options.place, "market", stop)?;
    let time = match options.quick {
        true => QUICK,
        false => Duration::from_secs(options.seconds),
    };
    let machine = machine(&stage.space)?;
    println!("{machine}\n");
    let page = compare(&stage.space, time, &machine, stop)?;
    stage.close()?;
    println!(
        "After every run no money was made or lost, each item was in one place, and no lock was left.\n\
         Figures: {}",
        page.display()
    );
    Ok(())
}

/// Becomes an optimized build of itself: in a debug build, most of what is compared is the build.
fn begin_anew_optimized(stop: &Stop) -> anyhow::Result<()> {
    let mut again = Command::new(optimized("xtask", &[], stop)?);
    let error = again.args(env::args_os().skip(1)).exec();
    Err(error).context("cannot begin anew")
}

fn compare(space: &Space, time: Duration, machine: &str, stop: &Stop) -> anyhow::Result<PathBuf> {
    let runs = Way::ALL.len() * LOADS.len() + Way::CAREFUL.len() * (WAITING.len() + DOGPILE.len());
    let words = "{elapsed} of about {duration}: {msg}";
    let bar = progress::bar_of_time(time * runs as u32, words)?;
    let floor = Floor {
        space,
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
            "Sellers x buyers: ours, {time:?} each | the article's, {}s each on the article's machine",
            article::SECONDS
        ),
        report::compared(&trading),
    );
    show("What a lock per item gains", report::ratios(&trading));
    show(
        "Buyers that wait for one another, on a market that is stocked",
        report::waiting(&scenes(&WAITING, &Way::CAREFUL)?),
    );
    show(
        "The dogpile effect: 8 buyers after any item, the longer a deal the more overlap",
        report::dogpile(&scenes(&DOGPILE, &Way::CAREFUL)?),
    );
    bar.finish_and_clear();
    figures::page(&target_folder()?.join("market"), machine, &trading, &tables)
}

/// What the figures depend on.
fn machine(space: &Space) -> anyhow::Result<String> {
    let about: String = space.ask(redis::cmd("INFO").arg("server"))?;
    let build = if cfg!(debug_assertions) {
        "a debug build: its figures compare little"
    } else {
        "a release build"
    };
    Ok(format!(
        "{} at {}, every seller and buyer a process; {build}",
        described(&about)?,
        space.address()
    ))
}
