//! Several threads and several processes that want one key: how often it changes hands, how fairly,
//! and how soon each learns what it waits for. Says nothing about locks that nobody else wants.
//!
//! Exits with an error if a limit was missed. The other processes are this program again, started
//! in one of its hidden roles.

mod alarms;
mod crowd;
mod expiry;
mod member;
mod monitor;
mod queue;
mod role;
mod sheet;
mod stolen;
#[path = "../support/mod.rs"]
mod support;
mod wake_up;

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use hdrhistogram::Histogram;
use leasehold_testbed::{Server, child};

use sheet::Sheet;

/// How long to look at what else the machine does, before and after each case.
const QUIET: Duration = Duration::from_millis(300);

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Options {
    /// What to measure; everything unless named
    #[arg(value_enum)]
    cases: Vec<Case>,
    /// For how long threads and processes compete, per case
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// For how long they do so once more while requests are counted
    #[arg(long, default_value_t = 2.0)]
    counted_seconds: f64,
    /// How often `wake-up` lets go
    #[arg(long, default_value_t = 250)]
    notifications: usize,
    /// How many holders `expiry` kills
    #[arg(long, default_value_t = 50)]
    expiries: usize,
    /// How many locks `stolen` takes away
    #[arg(long, default_value_t = 200)]
    thefts: usize,
    /// How many renewals `stolen` waits for, while nothing is taken away
    #[arg(long, default_value_t = 30_000)]
    renewals: u64,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Case {
    /// From one process letting go to another, which waits, having it
    WakeUp,
    /// From the end of a dead holder's ttl to another having it
    Expiry,
    /// 16 threads of one process
    Threads,
    /// 4 processes of one thread each
    #[value(name = "processes-4x1")]
    FourProcesses,
    /// 8 processes of one thread each
    #[value(name = "processes-8x1")]
    EightProcesses,
    /// 4 processes of 4 threads each
    #[value(name = "processes-4x4")]
    ManyThreads,
    /// From a lock being taken away to its holder being told; and never a word without cause
    Stolen,
}

// What another process is started for. (A doc comment would be shown for the whole program.)
#[derive(Subcommand)]
enum Role {
    /// Wants the key all the time, with some threads, for some time
    #[command(hide = true)]
    Member,
    /// Waits for the key when told to
    #[command(hide = true)]
    Waiter,
    /// Takes a key, to be killed
    #[command(hide = true)]
    Holder,
}

impl Options {
    /// Enough to see whether it works.
    fn reduced(self) -> Self {
        Self {
            seconds: self.seconds.min(0.2),
            counted_seconds: self.counted_seconds.min(0.2),
            notifications: self.notifications.min(4),
            expiries: self.expiries.min(2),
            thefts: self.thefts.min(8),
            renewals: self.renewals.min(1000),
            ..self
        }
    }

    fn measure(&self, case: Case, server: &Server) -> Result<Sheet, Box<dyn Error>> {
        let window = Duration::from_secs_f64(self.seconds);
        let counted = Duration::from_secs_f64(self.counted_seconds);
        let limits = crowd::Limits {
            rate: 9_000.0,
            longest_wait: Some(Duration::from_millis(50)),
            requests: Some(5.0),
        };
        match case {
            Case::WakeUp => wake_up::measure(server, self.notifications),
            Case::Expiry => expiry::measure(server, self.expiries),
            Case::Threads => crowd::threads(server, 16, window),
            Case::FourProcesses => crowd::processes(server, [4, 1], window, counted, limits),
            Case::EightProcesses => crowd::processes(server, [8, 1], window, counted, limits),
            Case::ManyThreads => {
                let limits = crowd::Limits {
                    rate: 40_000.0,
                    longest_wait: None,
                    requests: None,
                };
                crowd::processes(server, [4, 4], window, counted, limits)
            }
            Case::Stolen => {
                let mut sheet = stolen::measure(server, self.thefts)?;
                alarms::measure(server, self.renewals, &mut sheet)?;
                Ok(sheet)
            }
        }
    }
}

/// Does `work`, and says how late this machine woke a thread that slept for `pause` meanwhile.
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
        Some(Role::Member) => child::run(member::work),
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
        // Run as a test: only whether it works.
        options = options.reduced();
    }
    let cases = match options.cases.as_slice() {
        [] => Case::value_variants(),
        named => named,
    };
    println!("{}\n", support::machine(&Server::start()?)?);
    let mut failures = Vec::new();
    for case in cases {
        let name = case.to_possible_value().expect("no case is skipped");
        let name = name.get_name();
        // One each, so that no case finds what another left behind.
        let server = Server::start()?;
        let busy_before = support::busy(QUIET);
        let sheet = options.measure(*case, &server)?;
        let others = [busy_before, support::busy(QUIET)];
        let [before, after] = others.map(|busy| busy.map_or("?".into(), |b| format!("{b:.0}")));
        println!("== {name} (machine busy with other work before: {before} %, after: {after} %)");
        println!("{sheet}\n");
        failures.extend(sheet.failures(options.bench, name));
    }
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.join("; ").into())
}
