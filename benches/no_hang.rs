//! Whether anybody hangs: round after round, several processes want one key all the time while one
//! of their connections is killed. Measures no speed; says how long the longest had to wait.
//!
//! Exits with an error if somebody hung, had company inside, or if something was left held. The
//! other processes are this program again, started in a hidden role; their clients are new ones in
//! each round.

#[path = "contended/process.rs"]
mod process;
#[path = "no_hang/racer.rs"]
mod racer;
mod support;

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::thread;
use std::time::Duration;

use clap::{Parser, Subcommand};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold_testbed::{Reply, Server, eventually};

use process::Process;
use racer::{KEY, Outcome, Report, WITNESS};

/// All have heard of the start by then.
const NOTICE: Duration = Duration::from_millis(20);
const PROCESSES: [usize; 2] = [4, 8];
const THREADS: [usize; 2] = [1, 2];
/// Where there is no terminal for a bar: a line every so many rounds.
const ROUNDS_PER_LINE: u64 = 20;

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Options {
    /// How many rounds there are
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// For how long the processes want the key, per round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Within how many seconds after that each must be done
    #[arg(long, default_value_t = 10.0)]
    bound: f64,
    /// How many connections are killed, per round
    #[arg(long, default_value_t = 1)]
    kills: usize,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

// What another process is started for. (A doc comment would be shown for the whole program.)
#[derive(Subcommand)]
enum Role {
    /// Wants the key in each round
    #[command(hide = true)]
    Racer { url: String, bound: u64 },
}

/// What was seen in all rounds so far.
struct Soak {
    rounds: u64,
    grants: usize,
    /// How often the key came to another process than the one before.
    changes: usize,
    /// How often the witness was raised.
    raised: u64,
    waits: Histogram<u64>,
    /// From the end of the time to when a process was done, and to when its client had gone.
    ends: Histogram<u64>,
    closes: Histogram<u64>,
    killed: BTreeMap<String, u64>,
}

impl Soak {
    fn new() -> Self {
        Self {
            rounds: 0,
            grants: 0,
            changes: 0,
            raised: 0,
            waits: support::histogram(),
            ends: support::histogram(),
            closes: support::histogram(),
            killed: BTreeMap::new(),
        }
    }

    /// One round; an error is the end of all.
    fn round(
        &mut self,
        server: &Server,
        racers: &mut [Process],
        [window, bound]: [Duration; 2],
        kills: usize,
    ) -> Result<(), Box<dyn Error>> {
        for racer in &mut *racers {
            let threads = between(THREADS);
            racer.tell(&threads.to_string())?;
        }
        for racer in &*racers {
            let line = racer.told()?;
            if line != "ready" {
                return Err(format!("a process said {line:?} instead of being ready").into());
            }
        }
        let start = support::nanoseconds() + NOTICE.as_nanos() as u64;
        let end = start + window.as_nanos() as u64;
        for racer in &mut *racers {
            racer.tell(&format!("{start} {end}"))?;
        }
        self.kill(server, start, window, kills)?;
        let mut reports = Vec::new();
        let mut hung = Vec::new();
        for racer in &*racers {
            match racer::read(racer)? {
                Outcome::Done(report) => reports.push(report),
                Outcome::Hung(what) => hung.push(what),
            }
        }
        if !hung.is_empty() {
            return Err(format!(
                "{} of {} processes hung:\n  {}\n{}",
                hung.len(),
                racers.len(),
                hung.join("\n  "),
                state(server)
            )
            .into());
        }
        self.rounds += 1;
        self.add(&reports, end)?;
        self.check_witness(server)?;
        let free = || server.command(&["EXISTS", &in_redis()]).ok() == Some(Reply::Int(0));
        if !eventually(bound, free) {
            return Err(format!("the key is held by nobody\n{}", state(server)).into());
        }
        Ok(())
    }

    /// Kills connections at random moments after `start`, none so late that nobody would notice.
    fn kill(
        &mut self,
        server: &Server,
        start: u64,
        window: Duration,
        kills: usize,
    ) -> Result<(), Box<dyn Error>> {
        let mut moments: Vec<u64> = (0..kills)
            .map(|_| support::between(Duration::ZERO, window.mul_f64(0.95)).as_nanos() as u64)
            .collect();
        moments.sort_unstable();
        for moment in moments {
            let left = (start + moment).saturating_sub(support::nanoseconds());
            thread::sleep(Duration::from_nanos(left));
            if let Some(killed) = kill_one(server)? {
                *self.killed.entry(killed).or_default() += 1;
            }
        }
        Ok(())
    }

    fn add(&mut self, reports: &[Report], end: u64) -> Result<(), Box<dyn Error>> {
        let mut grants = Vec::new();
        for (process, report) in reports.iter().enumerate() {
            self.waits += &report.waits;
            self.raised += report.raised;
            for (into, moment) in [
                (&mut self.ends, report.done),
                (&mut self.closes, report.closed),
            ] {
                support::record(into, Duration::from_nanos(moment.saturating_sub(end)));
            }
            grants.extend(report.grants.iter().map(|grant| (*grant, process)));
        }
        grants.sort_unstable();
        self.grants += grants.len();
        for pair in grants.windows(2) {
            let [
                ((token, entered), owner),
                ((next, next_entered), next_owner),
            ] = pair
            else {
                continue;
            };
            if token == next {
                return Err(format!("the token {token} was given twice").into());
            }
            // Each looked at the clock while it had the key.
            if next_entered < entered {
                let early = Duration::from_nanos(entered - next_entered);
                return Err(format!(
                    "the token {next} came {early:?} before {token}, a smaller one"
                )
                .into());
            }
            self.changes += usize::from(owner != next_owner);
        }
        Ok(())
    }

    /// It was raised by reading, then writing: two at the same time lose an update.
    fn check_witness(&self, server: &Server) -> Result<(), Box<dyn Error>> {
        let reply = server.command(&["GET", WITNESS])?;
        let counted: u64 = reply.as_text().unwrap_or("0").parse()?;
        if counted == self.raised {
            return Ok(());
        }
        let lost = self.raised.abs_diff(counted);
        Err(format!("{lost} updates made under the lock were lost").into())
    }
}

impl fmt::Display for Soak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts = support::table(["", ""]);
        counts.add_row(["rounds".to_owned(), self.rounds.to_string()]);
        counts.add_row(["grants".to_owned(), self.grants.to_string()]);
        counts.add_row(["changes of owner".to_owned(), self.changes.to_string()]);
        counts.add_row(["witness raised".to_owned(), self.raised.to_string()]);
        for (what, times) in &self.killed {
            counts.add_row([format!("killed: {what}"), times.to_string()]);
        }
        let mut spreads = support::table(["ms", "p50", "p99", "max", "count"]);
        for (what, of) in [
            ("wait for the lock", &self.waits),
            ("done after the end of the time", &self.ends),
            ("client gone after it", &self.closes),
        ] {
            spreads.add_row(support::spread(what, of));
        }
        write!(f, "{counts}\n\n{spreads}")
    }
}

/// A whole number within these bounds.
fn between([low, high]: [usize; 2]) -> usize {
    let count = Duration::from_nanos((high - low + 1) as u64);
    let drawn = support::between(Duration::ZERO, count).as_nanos() as usize;
    (low + drawn).min(high)
}

fn in_redis() -> String {
    format!("leasehold:{KEY}")
}

/// Kills one connection of the clients, if there is one; says of which kind it was.
fn kill_one(server: &Server) -> Result<Option<String>, Box<dyn Error>> {
    loop {
        let list = server.command(&["CLIENT", "LIST"])?;
        let list = list.as_text().ok_or("CLIENT LIST answers no text")?;
        let field = |line: &str, name: &str| {
            let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
            fields
                .find(|(each, _)| *each == name)
                .map(|f| f.1.to_owned())
        };
        let mut candidates = Vec::new();
        for line in list.lines() {
            let [id, name, command] = ["id", "name", "cmd"].map(|name| field(line, name));
            let (name, command) = (name.unwrap_or_default(), command.unwrap_or_default());
            // This program's own.
            if name != WITNESS && command != "client|list" {
                let what = if name.is_empty() { "a pipeline" } else { &name };
                candidates.push((id.ok_or("a client without an id")?, what.to_owned()));
            }
        }
        if candidates.is_empty() {
            return Ok(None);
        }
        let (id, what) = candidates.swap_remove(between([0, candidates.len() - 1]));
        if server.command(&["CLIENT", "KILL", "ID", &id])? == Reply::Int(1) {
            return Ok(Some(what));
        }
    }
}

/// What Redis knows, for whoever looks into a failure.
fn state(server: &Server) -> String {
    let say = |args: &[&str]| match server.command(args) {
        Ok(reply) => match reply.as_text() {
            Some(text) => text.to_owned(),
            None => reply.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let (value, left) = (say(&["GET", &in_redis()]), say(&["PTTL", &in_redis()]));
    let clients = say(&["CLIENT", "LIST"]);
    format!("the key: {value}\nits ttl: {left} ms\nthe connections:\n{clients}")
}

/// A bar on a terminal, lines elsewhere.
struct Progress(ProgressBar);

impl Progress {
    fn new(rounds: u64) -> Self {
        let bar = ProgressBar::new(rounds);
        let style = "{bar:30} {pos} of {len} rounds, {eta} to go; {msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("a valid template"));
        Self(bar)
    }

    fn show(&self, soak: &Soak) {
        let longest = soak.waits.max() as f64 / 1000.0;
        let slowest = soak.ends.max() as f64 / 1000.0;
        let message = format!(
            "{} grants, longest wait {longest:.0} ms, slowest end {slowest:.0} ms",
            soak.grants
        );
        if self.0.is_hidden() && soak.rounds.is_multiple_of(ROUNDS_PER_LINE) {
            println!("{} rounds; {message}", soak.rounds);
        }
        self.0.set_message(message);
        self.0.set_position(soak.rounds);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::parse();
    if let Some(Role::Racer { url, bound }) = &options.role {
        return racer::work(url, Duration::from_millis(*bound));
    }
    if !options.bench {
        // Run as a test: only whether it works.
        (options.rounds, options.seconds) = (options.rounds.min(2), options.seconds.min(0.2));
    }
    let window = Duration::from_secs_f64(options.seconds);
    let bound = Duration::from_secs_f64(options.bound);
    let server = Server::start()?;
    println!("{}\n", support::machine(&server)?);
    let role = ["racer", &server.url(), &bound.as_millis().to_string()];
    let mut racers = (0..PROCESSES[1])
        .map(|_| Process::start(&role))
        .collect::<Result<Vec<_>, _>>()?;
    let mut soak = Soak::new();
    let progress = Progress::new(options.rounds);
    for round in 1..=options.rounds {
        let racers = &mut racers[..between(PROCESSES)];
        let outcome = soak.round(&server, racers, [window, bound], options.kills);
        if let Err(error) = outcome {
            progress.0.abandon();
            println!("{soak}\n\nround {round}: {error}");
            return Err(format!("round {round} failed, see above").into());
        }
        progress.show(&soak);
    }
    progress.0.finish_and_clear();
    println!("{soak}");
    Ok(())
}
