//! Several threads and processes want one key. Measures how often the key changes its holder, how fair that is, and how
//! soon waiters and holders are notified.
//!
//! Exits with an error if a limit was missed; with `--busy`, missed limits of times do not count. The other processes are
//! this program again, started in one of its hidden roles.

mod contention;
mod expiry;
mod fair_queue;
mod false_losses;
mod loss_latency;
mod monitor;
mod report;
mod role;
#[path = "../support/mod.rs"]
mod support;
mod wake_up;
mod worker;

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use hdrhistogram::Histogram;
use leasehold_testbed::{Server, child};

use report::Report;
use worker::Way;

/// How long to measure the machine's other load, before and after each case.
const QUIET: Duration = Duration::from_millis(300);

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Options {
    /// Cases to run [default: all]
    #[arg(value_enum)]
    cases: Vec<Case>,
    /// Seconds for which threads and processes compete, per case
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Seconds for which they compete once more while requests are counted
    #[arg(long, default_value_t = 2.0)]
    counted_seconds: f64,
    /// Number of releases in `wake-up`
    #[arg(long, default_value_t = 250)]
    notifications: usize,
    /// Number of holders that `expiry` kills
    #[arg(long, default_value_t = 50)]
    expiries: usize,
    /// Number of locks that `loss-latency` overwrites
    #[arg(long, default_value_t = 200)]
    overwrites: usize,
    /// Number of renewals that `loss-latency` waits for, while nothing is overwritten
    #[arg(long, default_value_t = 30_000)]
    renewals: u64,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Case {
    /// From a release in one process to the grant of a waiter in another
    WakeUp,
    /// From the end of a dead holder's ttl to the grant of a waiter
    Expiry,
    /// 16 threads of one process, which drop their guards
    Threads,
    /// 16 threads of one process, which work in closures
    Closures,
    /// 4 processes of one thread each
    #[value(name = "processes-4x1")]
    FourProcesses,
    /// 8 processes of one thread each
    #[value(name = "processes-8x1")]
    EightProcesses,
    /// 4 processes of 4 threads each
    #[value(name = "processes-4x4")]
    ManyThreads,
    /// From overwriting a lock to the signal that its holder gets. Checks that no signal comes without a cause
    LossLatency,
}

// The role of a child process. (A doc comment would be shown as the help of the whole program.)
#[derive(Subcommand)]
enum Role {
    /// Wants the key all the time, with several threads, for some time
    #[command(hide = true)]
    Worker,
    /// Waits for the key on request
    #[command(hide = true)]
    Waiter,
    /// Takes a key, to be killed
    #[command(hide = true)]
    Holder,
}

impl Options {
    /// Reduces the work of the run to a check that the bench works.
    fn reduced(self) -> Self {
        Self {
            seconds: self.seconds.min(0.2),
            counted_seconds: self.counted_seconds.min(0.2),
            notifications: self.notifications.min(4),
            expiries: self.expiries.min(2),
            overwrites: self.overwrites.min(8),
            renewals: self.renewals.min(1000),
            ..self
        }
    }

    fn measure(&self, case: Case, server: &Server) -> Result<Report, Box<dyn Error>> {
        let window = Duration::from_secs_f64(self.seconds);
        let counted = Duration::from_secs_f64(self.counted_seconds);
        let limits = contention::Limits {
            rate: 0.6,
            longest_wait: Some(100.0),
            requests: Some(5.0),
        };
        match case {
            Case::WakeUp => wake_up::measure(server, self.notifications),
            Case::Expiry => expiry::measure(server, self.expiries),
            Case::Threads => contention::threads(server, 16, Way::Guard, window),
            Case::Closures => contention::threads(server, 16, Way::Closure, window),
            Case::FourProcesses => contention::processes(server, [4, 1], window, counted, limits),
            Case::EightProcesses => contention::processes(server, [8, 1], window, counted, limits),
            Case::ManyThreads => {
                let limits = contention::Limits {
                    rate: 2.0,
                    longest_wait: None,
                    requests: None,
                };
                contention::processes(server, [4, 4], window, counted, limits)
            }
            Case::LossLatency => {
                let mut report = loss_latency::measure(server, self.overwrites)?;
                false_losses::measure(server, self.renewals, &mut report)?;
                Ok(report)
            }
        }
    }
}

/// Runs `work`, and measures how late this machine wakes a thread that sleeps for `pause` meanwhile.
fn beside_a_sleeper<T>(pause: Duration, work: impl FnOnce() -> T) -> (T, Histogram<u64>) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| support::oversleep(pause, &over));
        let outcome = work();
        over.store(true, Ordering::Relaxed);
        let late = sleeper.join().expect("it does nothing but sleep");
        (outcome, late)
    })
}

fn main() -> ExitCode {
    let options = Options::parse();
    match &options.role {
        Some(Role::Worker) => child::run(worker::work),
        Some(Role::Waiter) => child::run(wake_up::wait),
        Some(Role::Holder) => child::run(expiry::hold),
        None => match run(options) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("Error: {error}");
                ExitCode::FAILURE
            }
        },
    }
}

fn run(mut options: Options) -> Result<(), Box<dyn Error>> {
    if !options.bench {
        // Run as a test: checks only that the bench works.
        options = options.reduced();
    }
    let cases = match options.cases.as_slice() {
        [] => Case::value_variants(),
        named => named,
    };
    println!("{}\n", support::machine(&Server::start()?)?);
    let _loops = options.busy.start()?;
    let mut failures = Vec::new();
    for case in cases {
        let name = case.to_possible_value().expect("no case is skipped");
        let name = name.get_name();
        // One server for each case, so that no case finds data of another.
        let server = Server::start()?;
        let busy_before = support::busy(QUIET);
        let report = options.measure(*case, &server)?;
        let others = [busy_before, support::busy(QUIET)];
        let [before, after] = others.map(|busy| busy.map_or("?".into(), |b| format!("{b:.0}")));
        println!("== {name} (other load on the machine before: {before} %, after: {after} %)");
        println!("{report}\n");
        failures.extend(report.failures(options.bench, !options.busy.busy, name));
    }
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("; ").into())
}
