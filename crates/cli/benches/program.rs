//! Measures the program `leasehold` on a real server:
//!
//! - the time of `leasehold run KEY true` beside `flock FILE true`;
//! - the time from the loss of a lock to the end of all processes of its command;
//! - the time of `list` and `watch` with many locks, and how much `watch` slows another client.
//!
//! Exits with an error if a limit is missed.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{Table, presets};
use leasehold::Client;
use leasehold_load::{info, server_cpu};
use leasehold_testbed::Server;

/// The most that `run` may take longer than `flock`.
const START_LIMIT: Duration = Duration::from_millis(5);
const GRACE: Duration = Duration::from_millis(200);
/// The latest end of a command after its grace.
const END_LIMIT: Duration = Duration::from_millis(50);
const LIST_LIMIT: Duration = Duration::from_secs(1);
/// The most by which `watch` may slow another client, in percent.
const SLOWER_LIMIT: f64 = 5.0;
/// `watch` and the other client run together for this time in each round.
const SLICE: Duration = Duration::from_secs(5);

#[derive(Parser)]
struct Options {
    /// Number of starts, and of losses
    #[arg(long, default_value_t = 100)]
    rounds: usize,
    /// Number of locks that `list` and `watch` show
    #[arg(long, default_value_t = 10_000)]
    locks: usize,
    /// Number of times that `watch` is measured beside another client
    #[arg(long, default_value_t = 5)]
    watches: usize,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// The figures, and the limits that were missed.
struct Report {
    table: Table,
    missed: Vec<String>,
}

impl Report {
    fn add(&mut self, what: &str, value: String, limit: Option<(String, bool)>) {
        let (limit, is_kept) = limit.unwrap_or_default();
        if !limit.is_empty() && !is_kept {
            self.missed.push(format!("{what}: {value}, limit {limit}"));
        }
        self.table.add_row([what, &value, &limit]);
    }

    fn add_time(&mut self, what: &str, time: Duration, limit: Option<Duration>) {
        let limit = limit.map(|limit| (format!("{limit:?}"), time <= limit));
        self.add(what, format!("{time:.1?}"), limit);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["FIGURE", "VALUE", "LIMIT"]);
    let mut report = Report {
        table,
        missed: Vec::new(),
    };
    let server = Server::start()?;
    measure_starts(&server, &options, &mut report)?;
    measure_losses(&server, &options, &mut report)?;
    measure_lists(&server, &options, &mut report)?;
    println!("{}", report.table.trim_fmt());
    match &report.missed[..] {
        [] => Ok(()),
        missed => Err(missed.join("\n").into()),
    }
}

/// The program `leasehold` with this server.
fn leasehold(server: &Server) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    command
        .env("LEASEHOLD_URL", server.url())
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end. Returns how long it took.
fn time(command: &mut Command) -> Result<Duration, Box<dyn Error>> {
    let started = Instant::now();
    let status = command.stdout(Stdio::null()).status()?;
    let took = started.elapsed();
    match status.success() {
        true => Ok(took),
        false => Err(format!("{command:?}: {status}").into()),
    }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn measure_starts(
    server: &Server,
    options: &Options,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("lock");
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..options.rounds {
        times[0].push(time(Command::new("flock").arg(&file).arg("true"))?);
        times[1].push(time(leasehold(server).args(["run", "k", "true"]))?);
    }
    let [flock, run] = times.map(|mut times| median(&mut times));
    report.add_time("flock FILE true, median", flock, None);
    report.add_time("leasehold run KEY true, median", run, None);
    let more = run.saturating_sub(flock);
    report.add_time("run takes longer than flock by", more, Some(START_LIMIT));
    Ok(())
}

/// A command of two processes that ignore TERM loses its lock.
fn measure_losses(
    server: &Server,
    options: &Options,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let client = Client::open(server.url())?;
    let grace = format!("{}ms", GRACE.as_millis());
    let mut late = Vec::new();
    for _ in 0..options.rounds {
        let script = "trap '' TERM; echo; sleep 1000 | cat";
        let mut run = leasehold(server)
            .args(["run", "--grace", &grace, "k", "-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let output = run.stdout.take().ok_or("it has an output")?;
        let mut output = BufReader::new(output);
        output.read_line(&mut String::new())?;
        let started = Instant::now();
        let taken = client.mutex("k").force_unlock()?;
        taken.ok_or("the lock was free")?;
        // The output ends when all processes have ended.
        output.read_to_end(&mut Vec::new())?;
        late.push(started.elapsed().saturating_sub(GRACE));
        run.wait()?;
    }
    let middle = median(&mut late);
    report.add_time(
        "loss to the end of the group, after the grace: median",
        middle,
        None,
    );
    let latest = late[late.len() - 1];
    report.add_time("the same, latest", latest, Some(END_LIMIT));
    Ok(())
}

fn measure_lists(
    server: &Server,
    options: &Options,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    // The locks are renewed too seldom to be noticed.
    let holder = Client::builder(server.url())
        .ttl(Duration::from_secs(3_000))
        .build()?;
    let (mut mutexes, mut readers, mut permits) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..options.locks {
        let key = format!("job:{number}");
        match number % 10 {
            0 => readers.push(holder.rw_lock(key).read()?),
            1 => permits.push(holder.semaphore(key, 2).acquire()?),
            _ => mutexes.push(holder.mutex(key).lock()?),
        }
    }
    let mut times = (0..9)
        .map(|_| time(leasehold(server).arg("list")))
        .collect::<Result<Vec<_>, _>>()?;
    let count = options.locks;
    report.add_time(
        &format!("list of {count} locks, median"),
        median(&mut times),
        Some(LIST_LIMIT),
    );
    let before = server_cpu(&info(server, "cpu")?)?;
    let lists = 20;
    for _ in 0..lists {
        time(leasehold(server).args(["list", "--json"]))?;
    }
    let cpu = (server_cpu(&info(server, "cpu")?)? - before) / lists;
    report.add_time("CPU time of Redis for a list", cpu, None);
    let mut times = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        drop(Watching::start(server, count)?);
        times.push(started.elapsed());
    }
    report.add_time(
        "watch until it has shown all locks, median",
        median(&mut times),
        Some(LIST_LIMIT),
    );

    let other = Client::open(server.url())?;
    let pairs = || -> Result<f64, leasehold::Error> {
        let started = Instant::now();
        let mut pairs = 0.0;
        while started.elapsed() < SLICE {
            other.mutex("other").lock()?.unlock()?;
            pairs += 1.0;
        }
        Ok(pairs / started.elapsed().as_secs_f64())
    };
    pairs()?;
    let mut slower = Vec::new();
    for _ in 0..options.watches {
        // Slices without `watch` before and after it exclude a trend of the machine.
        let before = pairs()?;
        let watching = Watching::start(server, count)?;
        let beside = pairs()?;
        drop(watching);
        let alone = f64::midpoint(before, pairs()?);
        slower.push(100.0 * (1.0 - beside / alone));
    }
    slower.sort_unstable_by(f64::total_cmp);
    let middle = slower[slower.len() / 2];
    let limit = (format!("{SLOWER_LIMIT} %"), middle <= SLOWER_LIMIT);
    report.add(
        "watch slows a client that locks and unlocks by",
        format!("{middle:.1} %"),
        Some(limit),
    );
    Ok(())
}

/// A running `leasehold watch` that has shown all locks. Its drop ends it.
struct Watching(Child);

impl Watching {
    fn start(server: &Server, locks: usize) -> Result<Self, Box<dyn Error>> {
        let mut watch = leasehold(server)
            .args(["watch", "--max", "1000000", "job:"])
            .stdout(Stdio::piped())
            .spawn()?;
        let output = watch.stdout.take().ok_or("it has an output")?;
        let watch = Self(watch);
        let lines = BufReader::new(output).lines().take(locks);
        match lines.collect::<Result<Vec<_>, _>>()?.len() == locks {
            true => Ok(watch),
            false => Err("watch has ended".into()),
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
