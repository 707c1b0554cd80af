//! `cargo xtask interop`: runs leasehold beside the locks of other libraries, on the same keys of a private server.
//! Checks that they exclude each other, that releases wake waiters of the other side, and what happens after crashes.

mod cases;
mod install;
mod library;
mod messages;
mod ours;
mod pair;
mod report;

use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use clap::Parser;
use indicatif::ProgressBar;
use leasehold_testbed::Server;
use leasehold_tools::options::Provision;
use leasehold_tools::progress;
use leasehold_tools::stop::{Finding, Stop, Stopped};

use cases::{Case, Effort, LOADS, TIMES, WAITS};
use install::Installed;
use library::{LIBRARIES, Library, Runtime};
use pair::Pair;
use report::{LeftOut, Outcome, Results};

#[derive(Parser)]
#[command(
    name = "leasehold-interop",
    bin_name = "cargo xtask interop",
    about = "Run leasehold beside the locks of other libraries, on the same keys"
)]
struct Options {
    /// Only these libraries
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = Library::by_name)]
    only: Vec<Library>,
    /// Grants of each other library
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    grants: u32,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    provision: Provision,
    /// For tests: few grants, Python and Node only, limits for a busy machine, and success without a runtime
    #[arg(long, hide = true, conflicts_with = "grants")]
    short: bool,
    /// A worker of the command, which gets its assignment on its standard input
    #[arg(long, hide = true)]
    process: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.process {
        return ours::main();
    }
    leasehold_tools::run(|stop| interop(&options, stop))
}

impl Options {
    fn effort(&self) -> Effort {
        match self.short {
            true => Effort::short(),
            false => Effort::full(self.grants),
        }
    }

    /// The chosen libraries of a runtime.
    fn libraries(&self, runtime: Runtime) -> Vec<Library> {
        let is_chosen = |library: &Library| {
            let is_named = self.only.iter().any(|only| only.name == library.name);
            library.runtime == runtime && (self.only.is_empty() || is_named)
        };
        LIBRARIES.into_iter().filter(is_chosen).collect()
    }

    fn runtimes(&self) -> Vec<Runtime> {
        let all: &[Runtime] = match self.short {
            true => &Runtime::QUICK,
            false => &Runtime::ALL,
        };
        let is_used = |runtime: &Runtime| !self.libraries(*runtime).is_empty();
        all.iter().copied().filter(is_used).collect()
    }

    /// Whether the command fails if the runtime is left out.
    fn needs(&self, runtime: Runtime) -> bool {
        !self.short && (runtime.is_required() || !self.only.is_empty())
    }
}

fn interop(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    options.provision.redis()?;
    let runtimes = options.runtimes();
    let (installed, left_out) = install(options, &runtimes, stop)?;
    let start = Instant::now();
    let server = Server::start().context("cannot start a private Redis server")?;
    let run = Run {
        effort: options.effort(),
        bar: bar(&installed)?,
        stop,
    };
    let outcomes = run.all(&installed, &server)?;
    run.bar.finish_and_clear();
    let results = Results {
        outcomes,
        left_out,
        seconds: start.elapsed().as_secs_f64(),
    };
    match options.json {
        true => println!("{}", serde_json::to_string(&results)?),
        false => println!("{}", results.text()),
    }
    let mut findings = Vec::new();
    if results.faults() > 0 {
        findings.push(format!("{} cases failed", results.faults()));
    }
    for runtime in runtimes
        .into_iter()
        .filter(|runtime| options.needs(*runtime))
    {
        let mut left_out = results.left_out.iter();
        findings.extend(
            left_out
                .find(|left_out| left_out.runtime == runtime.name())
                .map(LeftOut::text),
        );
    }
    if !findings.is_empty() {
        return Err(Finding(findings.join("; ")).into());
    }
    Ok(())
}

/// The libraries of a runtime.
type Group = (Installed, Vec<Library>);

/// Installs the libraries of all runtimes at the same time. Prints a line for each runtime that is left out.
fn install(
    options: &Options,
    runtimes: &[Runtime],
    stop: &Stop,
) -> anyhow::Result<(Vec<Group>, Vec<LeftOut>)> {
    let provided = thread::scope(|scope| {
        let threads = runtimes
            .iter()
            .map(|runtime| scope.spawn(|| Installed::provide(*runtime, stop)));
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("it does not panic"))
            .collect::<Vec<_>>()
    });
    let (mut groups, mut all_left_out) = (Vec::new(), Vec::new());
    for (runtime, provided) in runtimes.iter().zip(provided) {
        let libraries = options.libraries(*runtime);
        match provided {
            Ok(installed) => groups.push((installed, libraries)),
            Err(error) if error.is::<Stopped>() => return Err(error),
            Err(error) => {
                let left_out = LeftOut {
                    runtime: runtime.name(),
                    libraries: libraries.iter().map(|library| library.name).collect(),
                    reason: format!("{error:#}"),
                };
                eprintln!("{}", left_out.text());
                all_left_out.push(left_out);
            }
        }
    }
    Ok((groups, all_left_out))
}

fn cases_of(library: Library) -> impl Iterator<Item = Case> {
    let all = LOADS.into_iter().chain(TIMES).chain(WAITS);
    all.filter(move |(_, applies, _)| applies(library))
}

fn bar(groups: &[Group]) -> anyhow::Result<ProgressBar> {
    let libraries = groups.iter().flat_map(|(_, libraries)| libraries);
    let cases: usize = libraries.map(|library| cases_of(*library).count()).sum();
    progress::bar(cases as u64, "{pos}/{len} {msg} ({elapsed})")
}

/// A library with its workers.
struct Entry<'a> {
    pair: Pair<'a>,
    outcome: Outcome,
}

struct Run<'a> {
    effort: Effort,
    bar: ProgressBar,
    stop: &'a Stop,
}

impl Run<'_> {
    fn all(&self, groups: &[Group], server: &Server) -> anyhow::Result<Vec<Outcome>> {
        let mut entries = Vec::new();
        for (installed, libraries) in groups {
            let group = libraries.iter().map(|library| {
                anyhow::Ok(Entry {
                    pair: Pair::start(*library, installed, server, self.stop)?,
                    outcome: Outcome::new(*library),
                })
            });
            entries.push(group.collect::<anyhow::Result<Vec<_>>>()?);
        }
        self.at_once(&mut entries, &LOADS)?;
        for group in &mut entries {
            self.in_turn(group, &TIMES)?;
        }
        self.at_once(&mut entries, &WAITS)?;
        Ok(entries
            .into_iter()
            .flatten()
            .map(|entry| entry.outcome)
            .collect())
    }

    /// Runs the cases in all groups at the same time.
    fn at_once(&self, groups: &mut [Vec<Entry>], cases: &[Case]) -> anyhow::Result<()> {
        thread::scope(|scope| {
            let threads = groups
                .iter_mut()
                .map(|group| scope.spawn(|| self.in_turn(group, cases)));
            let threads: Vec<_> = threads.collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().expect("it does not panic"))
        })
    }

    fn in_turn(&self, group: &mut [Entry], cases: &[Case]) -> anyhow::Result<()> {
        for entry in group {
            for case in cases {
                self.case(entry, *case)?;
            }
        }
        Ok(())
    }

    /// Runs a case if it applies. An error of the case is a fault in the library's outcome, unless the user has stopped
    /// the run.
    fn case(&self, entry: &mut Entry, (name, applies, check): Case) -> anyhow::Result<()> {
        let Entry { pair, outcome } = entry;
        if !applies(pair.library) {
            return Ok(());
        }
        self.bar.set_message(format!("{}: {name}", pair.library));
        match check(pair, self.effort, outcome) {
            Ok(()) => outcome.passed.push(name),
            Err(error) if error.is::<Stopped>() => return Err(error),
            Err(error) => {
                outcome.faults.push(format!("{name}: {error:#}"));
                pair.begin_anew()?;
            }
        }
        self.bar.inc(1);
        Ok(())
    }
}
