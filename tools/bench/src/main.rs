//! `cargo xtask bench`: locks of several kinds under the same load, side by side in one run, on the quiet machine and
//! beside busy loops. All results are ratios to other ways in that run. Says which of the project's goals were reached;
//! a missed goal is no error. Writes below `target/` only, unless `--keep` is given.

mod cases;
mod date;
mod document;
mod goals;
mod limit;
mod load;
mod plot;
mod process_group;
mod programs;
mod row;
mod run;
mod shares;
mod statistics;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use clap::Parser;
use indicatif::ProgressBar;
use leasehold_load::Way;
use leasehold_tools::cargo::{target_folder, workspace_root};
use leasehold_tools::options::Provision;
use leasehold_tools::progress;
use leasehold_tools::stop::Stop;
use serde::Serialize;

use cases::{CASES, Case, Form, Plan};
use programs::Programs;
use run::Effort;

#[derive(Parser)]
#[command(
    name = "leasehold-bench",
    bin_name = "cargo xtask bench",
    about = "Measure locks under load: leasehold beside raw commands and other crates"
)]
struct Options {
    /// Cases to run: each case whose name contains one of these words [default: all]
    cases: Vec<String>,
    /// Print only one JSON object per row, and one per goal
    #[arg(long)]
    json: bool,
    /// Measure for a minute instead of half an hour: enough to check that the bench works, too little to
    /// quote
    #[arg(long)]
    quick: bool,
    /// Measure only what the project's goals compare, for about five minutes
    #[arg(long)]
    goals: bool,
    /// Leave out rslock, redlock and Redisson, and the time to build them
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
    /// A process of the command, which gets its job on its standard input
    #[arg(long, hide = true)]
    process: bool,
    /// The same for a lock that threads share
    #[arg(long, hide = true)]
    share_process: bool,
}

impl Options {
    /// The cases to run: those of exclusive locks, and those of shared locks.
    fn cases(&self) -> anyhow::Result<(Vec<&'static Case>, Vec<shares::cases::Case>)> {
        let named = |case: &&Case| {
            let is_named = self.cases.iter().any(|part| case.is_named(part));
            let is_needed = !self.goals || goals::need(case.name, Form::Quiet, Way::Raw);
            (self.cases.is_empty() || is_named) && is_needed
        };
        let chosen: Vec<_> = CASES.iter().filter(named).collect();
        let mut shared = shares::cases::all();
        let all = CASES.iter().map(|case| case.name);
        let all: Vec<_> = all.chain(shared.iter().map(|case| &*case.name)).collect();
        let all = all.join(", ");
        // No goal compares shared locks.
        shared.retain(|case| {
            let is_named = self.cases.iter().any(|part| case.name.contains(part));
            (self.cases.is_empty() || is_named) && !self.goals
        });
        let has_some = !chosen.is_empty() || !shared.is_empty();
        ensure!(has_some, "no such case; the cases are {all}");
        Ok((chosen, shared))
    }

    /// The ways of a case that there are programs for, and that the goals compare if only these are asked for.
    fn plan(&self, case: &'static Case, programs: &Programs) -> Plan {
        let ways = |form| {
            let is_needed = |way| !self.goals || goals::need(case.name, form, way);
            let ways = case.ways(form).iter().copied();
            let ways = ways.filter(|way| programs.can_run(*way) && is_needed(*way));
            ways.collect()
        };
        Plan {
            case,
            quiet: ways(Form::Quiet),
            busy: ways(Form::Busy),
        }
    }

    fn effort(&self) -> Effort {
        match (self.quick, self.goals) {
            (true, false) => Effort::quick(),
            (true, true) => Effort {
                paced_rounds: 0,
                ..Effort::quick()
            },
            (false, true) => Effort::goals(),
            (false, false) => Effort::full(),
        }
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return load::main();
    }
    if options.share_process {
        return shares::load::main();
    }
    leasehold_tools::run(|stop| bench(&options, stop))
}

fn bench(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let (cases, shared) = options.cases()?;
    let programs = if options.as_built {
        Programs::as_built()?
    } else {
        let with_peers = !options.no_peers;
        Programs::optimized(
            with_peers && !cases.is_empty(),
            with_peers && !shared.is_empty(),
            stop,
        )?
    };
    options.provision.redis()?;
    let effort = options.effort();
    let plan = |case| options.plan(case, &programs);
    let plans: Vec<_> = cases.into_iter().map(plan).collect();
    let progress = bar(&plans, shared.len(), &effort)?;
    let mut results = Vec::new();
    let mut machine = String::new();
    for plan in &plans {
        progress.set_message(plan.case.name);
        for result in run::case(plan, &programs, &effort, &progress, stop)? {
            machine.clone_from(&result.machine);
            progress.suspend(|| {
                if options.json {
                    result.rows.iter().try_for_each(print_json)
                } else {
                    println!("\n{}", table::terminal(&result));
                    Ok(())
                }
            })?;
            results.push(result);
        }
    }
    let mut shares = Vec::new();
    for case in &shared {
        progress.set_message(case.name.clone());
        let result = shares::case(case, &programs, &effort, &progress, stop)?;
        machine.clone_from(&result.machine);
        progress.suspend(|| {
            if options.json {
                result.rows.iter().try_for_each(print_json)
            } else {
                println!("\n{}", shares::report::terminal(&result));
                Ok(())
            }
        })?;
        shares.push(result);
    }
    progress.finish_and_clear();
    let judged = goals::judge(&results);
    if options.json {
        judged.iter().try_for_each(print_json)?;
    } else if !judged.is_empty() {
        println!("\nGoals\n{}\n", goals::terminal(&judged));
    }
    let document = document::Document {
        machine,
        effort,
        results,
        shares,
        goals: judged,
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

fn print_json(object: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(object)?);
    Ok(())
}

/// The progress of all rounds of all cases.
fn bar(plans: &[Plan], shared: usize, effort: &Effort) -> anyhow::Result<ProgressBar> {
    let shared = shared * effort.share_rounds;
    let rounds: usize = plans
        .iter()
        .map(|plan| {
            let quiet = plan.quiet.len() * (effort.rounds + effort.paced_rounds);
            quiet + plan.busy.len() * effort.rounds
        })
        .sum();
    let progress = progress::bar(
        (rounds + shared) as u64,
        "{pos}/{len} {msg} (about {eta} left)",
    )?;
    progress.enable_steady_tick(Duration::from_millis(500));
    Ok(progress)
}
