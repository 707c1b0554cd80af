//! Redis is stopped for longer than the ttl: how late does each holder learn that its lock is lost, and does everything
//! work again afterwards?
//!
//! Exits with an error if a signal came more than 50 ms late (not with `--busy`) or not at all, if another client had a
//! lock before its holder knew of the loss, or if a lock leaked.

mod support;

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use hdrhistogram::Histogram;
use leasehold::{Client, LostSignal, MutexGuard};
use leasehold_testbed::{Reply, Server, eventually};

const TTL: Duration = Duration::from_secs(1);
/// How long Redis is stopped.
const STOP: Duration = Duration::from_millis(1600);
/// The latest time of a signal after the end of validity.
const LIMIT: Duration = Duration::from_millis(50);
/// One lock in this many has a waiter.
const WANTED: usize = 25;

#[derive(Parser)]
struct Options {
    /// Number of held locks, each with a thread that waits for its signal
    #[arg(long, default_value_t = 200)]
    holders: usize,
    /// Number of times that Redis is stopped
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// The results of all rounds.
struct Findings {
    late: Histogram<u64>,
    sleep: Histogram<u64>,
    first_lock: Histogram<u64>,
    all_locks: Histogram<u64>,
    entered_by_others: usize,
    /// Whether a late signal is a violation.
    limits_count: bool,
    /// Violations, as text.
    wrong: Vec<String>,
}

/// When a holder's thread woke, if its signal came at all.
fn await_loss(lost: &LostSignal) -> Option<Instant> {
    let reason = lost.recv_timeout(3 * TTL + STOP);
    reason.is_ok().then(Instant::now)
}

/// When the validity of each lock ends, as far as its holder knows. Call it some time after the server has stopped,
/// when no reply is in flight any more. Do not call it near the end of the validity, since the call itself could detect
/// the loss.
fn ends(guards: &[MutexGuard]) -> Vec<Instant> {
    let stop_asking = Instant::now() + TTL / 10;
    let mut ends = vec![Instant::now(); guards.len()];
    while Instant::now() < stop_asking {
        for (end, guard) in ends.iter_mut().zip(guards) {
            // Reading the clock first can make the end a little too early, but never too late.
            let now = Instant::now();
            *end = (*end).max(now + guard.remaining());
        }
        thread::sleep(Duration::from_millis(5));
    }
    ends
}

fn key(number: usize) -> String {
    format!("held-{number}")
}

fn take_all(client: &Client, holders: usize) -> Result<Vec<MutexGuard>, leasehold::Error> {
    let keys = (0..holders).map(key);
    keys.map(|key| client.mutex(&key).lock()).collect()
}

/// Stops the server while all locks are held, and resumes it.
fn round(
    server: &Server,
    client: &Client,
    others: &Client,
    holders: usize,
    findings: &mut Findings,
) -> Result<(), Box<dyn Error>> {
    let guards = take_all(client, holders)?;
    let wanted: Vec<usize> = (0..holders).step_by(WANTED).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let signals: Vec<_> = guards
            .iter()
            .map(MutexGuard::lost_signal)
            .map(|lost| scope.spawn(move || await_loss(&lost)))
            .collect();
        let (entered, entries) = mpsc::channel();
        for number in wanted {
            let entered = entered.clone();
            scope.spawn(move || {
                let guard = others.mutex(key(number)).lock();
                // Fails if the receiver has ended with an error, which is reported there.
                let _ = entered.send((number, Instant::now(), guard));
            });
        }
        drop(entered);
        // Long enough for some renewals.
        thread::sleep(TTL);
        let sleeper = scope.spawn(|| support::oversleep(Duration::from_millis(1), &over));
        server.stop();
        let stopped = Instant::now();
        let ends = ends(&guards);
        let signals: Vec<Option<Instant>> = signals
            .into_iter()
            .map(|thread| thread.join().expect("it does nothing but wait"))
            .collect();
        thread::sleep(STOP.saturating_sub(stopped.elapsed()));
        over.store(true, Ordering::Relaxed);
        findings.sleep += sleeper.join().expect("it does nothing but sleep");
        findings.judge(&ends, &signals);
        let early = entries.try_iter().count();
        if early > 0 {
            findings
                .wrong
                .push(format!("{early} locks were granted by a stopped server"));
        }
        drop(guards);

        server.resume();
        let resumed = Instant::now();
        drop(client.mutex("another").lock()?);
        support::record(&mut findings.first_lock, resumed.elapsed());
        for (number, at, guard) in entries {
            drop(guard?);
            findings.entered_by_others += 1;
            if signals[number].is_none_or(|signal| at < signal) {
                let key = key(number);
                findings.wrong.push(format!(
                    "{key} was granted to another client before its holder knew of the loss"
                ));
            }
        }
        drop(take_all(client, holders)?);
        support::record(&mut findings.all_locks, resumed.elapsed());
        drop(take_all(others, holders)?);
        Ok(())
    })
}

impl Findings {
    fn new(limits_count: bool) -> Self {
        Self {
            limits_count,
            late: support::histogram(),
            sleep: support::histogram(),
            first_lock: support::histogram(),
            all_locks: support::histogram(),
            entered_by_others: 0,
            wrong: Vec::new(),
        }
    }

    fn judge(&mut self, ends: &[Instant], signals: &[Option<Instant>]) {
        let (mut missing, mut early, mut over) = (0, 0, 0);
        for (end, signal) in ends.iter().zip(signals) {
            let Some(signal) = signal else {
                missing += 1;
                continue;
            };
            let late = signal.saturating_duration_since(*end);
            support::record(&mut self.late, late);
            early += usize::from(signal < end);
            over += usize::from(self.limits_count && late > LIMIT);
        }
        for (signals, what) in [
            (missing, "did not come".to_owned()),
            (early, "came before the end of validity".to_owned()),
            (over, format!("came more than {LIMIT:?} late")),
        ] {
            if signals > 0 {
                self.wrong.push(format!("{signals} signals {what}"));
            }
        }
    }

    fn print(&self) {
        let mut table = support::table(["ms", "p50", "p99", "max", "count"]);
        for (what, histogram) in [
            ("signal after the end of validity", &self.late),
            ("a sleep of 1 ms on this machine, too long by", &self.sleep),
            ("first lock after Redis was resumed", &self.first_lock),
            ("all locks taken once more after that", &self.all_locks),
        ] {
            table.add_row(support::spread(what, histogram));
        }
        println!("{table}\n");
        println!("{} locks went to waiters", self.entered_by_others);
    }
}

/// The keys that are left once all locks are released, without the fence counter.
fn leaked_keys(server: &Server) -> Vec<String> {
    let mut left = Vec::new();
    let _ = eventually(Duration::from_secs(10), || {
        if let Ok(Reply::Array(keys)) = server.command(&["KEYS", "leasehold:[^~]*"]) {
            left = keys.iter().map(Reply::to_string).collect();
            return left.is_empty();
        }
        false
    });
    left
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::parse();
    if !options.bench {
        // Run as a test: checks only that the bench works.
        options.rounds = options.rounds.min(1);
    }
    let server = Server::start()?;
    println!("{}", support::machine(&server)?);
    println!(
        "{} holders, ttl {TTL:?}, Redis stopped for {STOP:?}\n",
        options.holders
    );
    let client = Client::builder(server.url()).ttl(TTL).build()?;
    // The waiters release their locks at once, so these locks need no longer ttl.
    let others = Client::builder(server.url()).ttl(TTL).build()?;
    let _loops = options.busy.start()?;
    // Beside busy loops, the thread that waits for a signal also waits for a core.
    let mut findings = Findings::new(!options.busy.busy);
    for _ in 0..options.rounds {
        round(&server, &client, &others, options.holders, &mut findings)?;
        let left = leaked_keys(&server);
        if !left.is_empty() {
            let keys = left.join(", ");
            findings.wrong.push(format!("leaked keys: {keys}"));
        }
    }
    findings.print();
    match findings.wrong.as_slice() {
        [] => Ok(()),
        wrong => Err(wrong.join("; ").into()),
    }
}
