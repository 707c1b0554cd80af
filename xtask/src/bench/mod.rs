//! `cargo xtask bench`: locks of several kinds under the same load, side by side in one run. All results are
//! ratios to the raw commands of that run. Judges nothing, and writes below `target/` only, unless `--keep`
//! is given.

mod cases;
mod date;
mod document;
mod limit;
mod load;
mod plot;
mod process_group;
mod programs;
mod row;
mod run;
mod statistics;
mod table;

pub use load::main as process;

use std::time::Duration;

use anyhow::ensure;
use indicatif::ProgressBar;

use crate::cargo::{target_folder, workspace_root};
use crate::progress;
use crate::provision::Provision;
use crate::stop::Stop;
use cases::{CASES, Case};
use programs::Programs;
use run::Effort;

#[derive(clap::Args)]
pub struct Options {
    /// Cases to run: each case whose name contains one of these words [default: all]
    cases: Vec<String>,
    /// Print only one JSON object per row
    #[arg(long)]
    json: bool,
    /// Measure for half a minute instead of several: enough to check that the bench works, too little to
    /// quote
    #[arg(long)]
    quick: bool,
    /// Leave out rslock and redlock, and the time to build them
    #[arg(long)]
    no_peers: bool,
    /// Write the report into docs/performance/ too, in a folder with today's date
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    provision: Provision,
    /// Use this build of the program as it is, without optimization
    #[arg(long, hide = true)]
    as_built: bool,
}

impl Options {
    fn chosen(&self) -> anyhow::Result<Vec<&'static Case>> {
        let named = |case: &&Case| {
            self.cases.is_empty() || self.cases.iter().any(|part| case.is_named(part))
        };
        let chosen: Vec<_> = CASES.iter().filter(named).collect();
        let all: Vec<_> = CASES.iter().map(|case| case.name).collect();
        ensure!(
            !chosen.is_empty(),
            "no such case; the cases are {}",
            all.join(", ")
        );
        Ok(chosen)
    }
}

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let cases = options.chosen()?;
    let programs = if options.as_built {
        Programs::as_built()?
    } else {
        Programs::optimized(!options.no_peers, stop)?
    };
    options.provision.redis()?;
    let effort = if options.quick {
        Effort::quick()
    } else {
        Effort::full()
    };
    let progress = bar(&cases, &programs, &effort)?;
    let mut results = Vec::new();
    let mut machine = String::new();
    for case in cases {
        progress.set_message(case.name);
        let result = run::case(case, &programs, &effort, &progress, stop)?;
        machine.clone_from(&result.machine);
        progress.suspend(|| {
            if options.json {
                result.rows.iter().try_for_each(row::print_json)
            } else {
                println!("\n{}", table::terminal(&result));
                Ok(())
            }
        })?;
        results.push(result);
    }
    progress.finish_and_clear();
    let document = document::Document {
        machine,
        effort,
        results,
    };
    let mut folders = vec![target_folder()?.join("bench")];
    if options.keep {
        folders.push(
            workspace_root()?
                .join("docs/performance")
                .join(date::today()?),
        );
    }
    for folder in folders {
        document.write(&folder)?;
        if !options.json {
            println!("written: {}", folder.join("README.md").display());
        }
    }
    if !options.json {
        println!("{}", document.machine);
    }
    Ok(())
}

/// The progress of all rounds of all cases.
fn bar(cases: &[&Case], programs: &Programs, effort: &Effort) -> anyhow::Result<ProgressBar> {
    let rounds: usize = cases
        .iter()
        .map(|case| programs.ways(case).count() * (effort.rounds + effort.paced_rounds))
        .sum();
    let progress = progress::bar(rounds as u64, "{pos}/{len} {msg} (about {eta} left)")?;
    progress.enable_steady_tick(Duration::from_millis(500));
    Ok(progress)
}
