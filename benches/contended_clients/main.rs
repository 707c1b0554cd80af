//! Hundreds of clients, each a process with one thread, compete for one key: the cost of a grant, the waits,
//! whether clients are served in the order in which they asked, and what stays in Redis. On request, clients
//! are killed and replaced, stopped, or lose their notification connection meanwhile.
//!
//! Exits with an error if a limit was missed; with `--busy`, times have no limits. The other processes are this program
//! again, started in a hidden role.

mod analysis;
mod events;
mod faults;
#[path = "../contended/monitor.rs"]
mod monitor;
mod report;
#[path = "../support/mod.rs"]
mod support;
mod worker;
mod workers;

use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use leasehold_load::ServerStats;
use leasehold_testbed::{Server, child};

use analysis::{Analysis, IN_ORDER, analyse, mean, quantile};
use faults::{Faults, Plan, keys_left};
use monitor::{Monitor, Requests};
use report::Report;
use workers::{Setup, Workers};

/// A number above that of one client's connections: for pipelines, renewals, transactions and notifications.
const CONNECTIONS: usize = 16;
/// The limits of requests, and of KB in and out, for each grant.
const REQUESTS: f64 = 5.0;
const KB: f64 = 4.0;
/// The limit of the longest wait divided by the fair wait.
const UNFAIRNESS: f64 = 2.0;
/// A client counts as starved if it gets no grant in this many rounds. A round is the time in which every client can
/// hold the lock once. (A stopped client delays the others by a ttl.)
const ROUNDS: f64 = 3.0;
/// How much longer than its ttl a key may show the same lease, as a factor: the sampler may be late.
const TTL_TOLERANCE: f64 = 1.25;

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Options {
    /// Number of clients that compete, each a process of its own
    #[arg(long, default_value_t = 100)]
    clients: usize,
    /// Seconds of measurement
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds for which they compete once more while MONITOR counts requests
    #[arg(long, default_value_t = 3.0)]
    counted_seconds: f64,
    /// Seconds for which they compete before the measurement [default: a second, and two holds per client]
    #[arg(long)]
    warm_up: Option<f64>,
    /// How long a client holds the lock, in ms
    #[arg(long, default_value_t = 5)]
    hold: u64,
    /// The ttl, in ms
    #[arg(long, default_value_t = 1000)]
    ttl: u64,
    /// Number of clients that are killed and replaced each second
    #[arg(long, default_value_t = 0.0)]
    kill: f64,
    /// Number of waiting clients that are stopped (SIGSTOP) before the measurement, for the rest of the run
    #[arg(long, default_value_t = 0)]
    stop: usize,
    /// Interval in ms at which the notification connection of a random client is closed
    #[arg(long)]
    cut: Option<u64>,
    /// Print the report as one line of JSON on the standard output, and the table on the standard error
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

// The role of a child process. (A doc comment would be shown as the help of the whole program.)
#[derive(Subcommand)]
enum Role {
    /// Locks and releases the key all the time
    #[command(hide = true)]
    Worker,
}

/// The server's own counts.
struct Counts {
    /// The counts of the measured window.
    stats: ServerStats,
    faults_bytes: u64,
    /// The counts of the window after that: requests of the workers, grants, and whether requests were counted.
    requests: Requests,
    counted: std::ops::Range<u64>,
}

impl Options {
    /// Reduces the work of the run to a check that the bench works.
    fn reduced(self) -> Self {
        Self {
            clients: self.clients.min(4),
            seconds: self.seconds.min(0.5),
            counted_seconds: self.counted_seconds.min(0.2),
            ..self
        }
    }

    fn warm_up(&self) -> Duration {
        match self.warm_up {
            Some(seconds) => Duration::from_secs_f64(seconds),
            None => Duration::from_secs(1) + 2 * self.round(),
        }
    }

    fn round(&self) -> Duration {
        Duration::from_millis(self.hold * self.clients as u64)
    }

    fn plan(&self) -> Plan {
        let kills = (self.kill > 0.0).then(|| Duration::from_secs_f64(1.0 / self.kill));
        Plan {
            kill_period: kills,
            cut_period: self.cut.map(Duration::from_millis),
        }
    }

    fn has_faults(&self) -> bool {
        self.kill > 0.0 || self.stop > 0 || self.cut.is_some()
    }

    fn run(&self) -> Result<Report, Box<dyn Error>> {
        let connections = (self.clients * CONNECTIONS).max(1000);
        let server = Server::builder()
            .arg("maxclients", connections.to_string())
            .start()?;
        let mut workers = Workers::new(Setup {
            url: server.url(),
            hold: Duration::from_millis(self.hold),
            ttl: Duration::from_millis(self.ttl),
        })?;
        eprintln!("{}", support::machine(&server)?);
        let loops = self.busy.start()?;
        let bar = progress(self.clients, "{bar:30} {pos} of {len} clients started");
        workers.start(self.clients, |started| bar.set_position(started as u64))?;
        bar.finish_and_clear();

        workers.go()?;
        thread::sleep(self.warm_up());
        for _ in 0..self.stop {
            workers.stop()?;
        }
        let mut faults = Faults::new(&server, self.plan(), self.has_faults());
        let window = Duration::from_secs_f64(self.seconds);
        let counted = Duration::from_secs_f64(self.counted_seconds);
        let bar = progress(
            (window + counted).as_millis() as usize,
            "{bar:30} {eta} left",
        );
        let begun = Instant::now();
        let show = || bar.set_position(begun.elapsed().as_millis() as u64);

        let before = ServerStats::until_now(&server)?;
        let start = support::nanoseconds();
        faults.inject(&mut workers, begun + window, show)?;
        let end = support::nanoseconds();
        let stats = ServerStats::until_now(&server)?.since(&before);
        let faults_bytes = faults.bytes;

        faults.requests.clear();
        let monitor = Monitor::start(&server)?;
        let counted_start = support::nanoseconds();
        faults.inject(&mut workers, Instant::now() + counted, show)?;
        let counted_end = support::nanoseconds();
        let mut requests = monitor.end(&server)?;
        for (name, own) in &faults.requests {
            let sent = requests.entry(name.clone()).or_default();
            *sent = sent.saturating_sub(*own);
        }
        bar.finish_and_clear();

        let careers = workers.end()?;
        let left_at_once = keys_left(&server)?;
        let ttl = Duration::from_millis(self.ttl);
        if !left_at_once.is_empty() {
            thread::sleep(ttl.mul_f64(TTL_TOLERANCE));
        }
        let left = keys_left(&server)?;

        let counts = Counts {
            stats,
            faults_bytes,
            requests,
            counted: counted_start..counted_end,
        };
        let waiting = self.clients - self.stop;
        let bound = self.round().mul_f64(ROUNDS) + ttl * self.stop as u32;
        let analysis = analyse(&careers, &(start..end), waiting, bound);
        let grants_counted = analyse(&careers, &counts.counted, waiting, bound).grants;
        let mut report = Report::new();
        report.figure("clients", self.clients as f64);
        report.figure("seconds", (end - start) as f64 / 1e9);
        report.figure("busy loops", loops.map_or(0, |loops| loops.count()) as f64);
        self.costs(&mut report, &analysis, &counts, grants_counted);
        self.waits(&mut report, &analysis);
        if self.has_faults() {
            report.figure("clients killed", faults.killed as f64);
            report.figure("clients stopped", self.stop as f64);
            report.figure("notification connections closed", faults.cut as f64);
            let longest = faults.longest_lease.as_secs_f64() * 1000.0;
            let limit = self.ttl as f64 * TTL_TOLERANCE;
            let what = "longest time with one lease in the key ms";
            // Beside busy loops, the thread that samples the key has to wait for a core.
            if self.busy.busy {
                report.figure(what, longest);
            } else {
                report.at_most(what, longest, limit);
            }
        }
        report.figure("keys left at the end", left_at_once.len() as f64);
        report.never("keys left after a ttl", left.len());
        if !left.is_empty() {
            report.note(format!("keys left after a ttl: {}", left.join(", ")));
        }
        Ok(report)
    }

    fn costs(&self, report: &mut Report, analysis: &Analysis, counts: &Counts, counted: usize) {
        let grants = analysis.grants as f64;
        let stats = &counts.stats;
        let each = |count: u64| count as f64 / grants;
        report.figure("grants", grants);
        let sent: u64 = counts.requests.values().sum();
        let requests = sent as f64 / counted as f64;
        report.at_most("requests per grant", requests, REQUESTS);
        report.figure("scripts per grant", each(stats.scripts()));
        // Notification connections read changed keys with GETRANGE. Redis' own count would include the reads of
        // scripts.
        let reads = counts.requests.get("getrange").copied().unwrap_or(0);
        report.figure(
            "reads of changed keys per grant",
            reads as f64 / counted as f64,
        );
        let out = stats.sent.saturating_sub(counts.faults_bytes);
        let [received, sent] = [stats.received, out].map(|bytes| each(bytes) / 1000.0);
        report.figure("KB received by Redis per grant", received);
        report.figure("KB sent by Redis per grant", sent);
        report.at_most("KB per grant", received + sent, KB);
        let cpu = stats.cpu.as_secs_f64() * 1e6 / grants;
        report.figure("CPU of Redis per grant us", cpu);
        report.figure("connections", stats.connections as f64);
        report.note(by_command(&counts.requests, counted));
    }

    fn waits(&self, report: &mut Report, analysis: &Analysis) {
        let ms = |ns: f64| ns / 1e6;
        let Analysis { waits, gaps, .. } = analysis;
        report.figure("wait mean ms", ms(mean(waits)));
        report.figure("wait p50 ms", ms(quantile(waits, 0.5) as f64));
        report.figure("wait p99 ms", ms(quantile(waits, 0.99) as f64));
        report.figure("wait longest ms", ms(analysis.longest_wait as f64));
        report.figure("wait fair ms", ms(analysis.fair_wait));
        let unfairness = analysis.longest_wait as f64 / analysis.fair_wait;
        let what = "longest wait to fair wait";
        if self.has_faults() {
            report.figure(what, unfairness);
        } else {
            report.at_most(what, unfairness, UNFAIRNESS);
        }
        let another = analysis.most_grants_to_another as f64;
        let what = "grants to one other client during a wait";
        if self.has_faults() {
            report.figure(what, another);
        } else {
            report.at_most(what, another, IN_ORDER as f64);
        }
        report.figure(
            "later requests granted first",
            analysis.most_overtaken as f64,
        );
        report.figure("gap p50 ms", ms(quantile(gaps, 0.5) as f64));
        report.figure("gap p99 ms", ms(quantile(gaps, 0.99) as f64));
        report.figure("gap longest ms", ms(quantile(gaps, 1.0) as f64));
        report.never("clients without a grant", analysis.without_grant);
        report.never("holds during another hold", analysis.holders_together);
        report.never("tokens out of order", analysis.tokens_out_of_order);
        report.never("leases lost", analysis.leases_lost);
        report.never("errors", analysis.errors.len());
        if let Some(error) = analysis.errors.first() {
            report.note(format!("first error: {error}"));
        }
    }
}

fn by_command(requests: &Requests, grants: usize) -> String {
    let each = requests.iter().filter(|(_, sent)| **sent > 0);
    let each = each.map(|(name, sent)| format!("{sent} {name}"));
    let all: Vec<String> = each.collect();
    format!(
        "requests, counted apart: {} for {grants} grants",
        all.join(", ")
    )
}

/// A progress bar, visible on a terminal only.
fn progress(length: usize, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(length as u64);
    bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
    bar
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(Role::Worker) = &options.role {
        return child::run(worker::work);
    }
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut options: Options) -> Result<(), Box<dyn Error>> {
    if !options.bench {
        // Run as a test: checks only that the bench works.
        options = options.reduced();
    }
    if options.stop >= options.clients {
        return Err("--stop leaves no client".into());
    }
    let report = options.run()?;
    if options.json {
        eprintln!("{report}");
        println!("{}", report.json());
    } else {
        println!("{report}");
    }
    let missed = report.missed(options.bench);
    if missed.is_empty() {
        return Ok(());
    }
    Err(missed.join("; ").into())
}
