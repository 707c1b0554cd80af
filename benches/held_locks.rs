//! Ten thousand held locks in one client, kept alive by its watchdog: is any lost, and what does it
//! cost? Says nothing about how fast locks are taken.
//!
//! Exits with an error if a lock was lost, or if holding locks took more threads.

mod support;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use hdrhistogram::Histogram;
use leasehold::{Client, EventLock, Events, LossReason, MutexGuard};
use leasehold_testbed::{Reply, Server, eventually};
use parking_lot::Mutex;

const TTL: Duration = Duration::from_secs(3);
/// The part of the ttl after which a client renews unless told otherwise.
const EVERY: Duration = Duration::from_secs(1);

#[derive(Parser)]
struct Options {
    /// For how long the locks are held
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// How many are held
    #[arg(long, default_value_t = 10_000)]
    locks: usize,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// Hears of every renewal, and for each lock how long after the one before.
struct Renewals {
    count: AtomicU64,
    failed: AtomicU64,
    lost: AtomicU64,
    seen: Mutex<Seen>,
}

struct Seen {
    last: Vec<Instant>,
    pauses: Histogram<u64>,
}

impl Renewals {
    fn new(locks: usize) -> Self {
        Self {
            count: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            seen: Mutex::new(Seen {
                last: vec![Instant::now(); locks],
                pauses: support::histogram(),
            }),
        }
    }
}

impl Events for Renewals {
    fn acquired(&self, lock: EventLock<'_>, _waited: Duration) {
        if let Ok(number) = lock.key.parse::<usize>() {
            self.seen.lock().last[number] = Instant::now();
        }
    }

    fn renewed(&self, lock: EventLock<'_>) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let Ok(number) = lock.key.parse::<usize>() else {
            return;
        };
        let now = Instant::now();
        let mut seen = self.seen.lock();
        let pause = now - std::mem::replace(&mut seen.last[number], now);
        support::record(&mut seen.pauses, pause);
    }

    fn renewal_failed(&self, _: EventLock<'_>, _: &leasehold::Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
}

/// What one period of holding took.
struct Period {
    lasted: Duration,
    renewals: u64,
    own_cpu: Duration,
    server_cpu: Duration,
}

fn hold(seconds: u64, renewals: &Renewals, server: &Server) -> Result<Period, Box<dyn Error>> {
    let before = (support::own_cpu(), support::server_cpu(server)?);
    let counted = renewals.count.load(Ordering::Relaxed);
    let start = Instant::now();
    thread::sleep(Duration::from_secs(seconds));
    Ok(Period {
        lasted: start.elapsed(),
        renewals: renewals.count.load(Ordering::Relaxed) - counted,
        own_cpu: support::own_cpu() - before.0,
        server_cpu: support::server_cpu(server)? - before.1,
    })
}

/// How many of our locks stand in Redis.
fn in_redis(server: &Server) -> Result<usize, Box<dyn Error>> {
    match server.command(&["KEYS", "leasehold:[0-9]*"])? {
        Reply::Array(keys) => Ok(keys.len()),
        other => Err(format!("unexpected answer to KEYS: {other}").into()),
    }
}

fn print(period: &Period, renewals: &Renewals, locks: usize, threads: [Option<usize>; 2]) {
    let seconds = period.lasted.as_secs_f64();
    let share = |cpu: Duration| format!("{:.1} %", 100.0 * cpu.as_secs_f64() / seconds);
    let count = |threads: Option<usize>| threads.map_or("unknown".to_owned(), |n| n.to_string());
    let due = locks as f64 * seconds / EVERY.as_secs_f64();
    let mut table = support::table(["", ""]);
    table.add_row(["locks held".to_owned(), locks.to_string()]);
    table.add_row(["for".to_owned(), format!("{seconds:.1} s")]);
    table.add_row(["renewals".to_owned(), period.renewals.to_string()]);
    table.add_row(["renewals due".to_owned(), format!("{due:.0}")]);
    for (name, counter) in [("that failed", &renewals.failed), ("lost", &renewals.lost)] {
        let n = counter.load(Ordering::Relaxed);
        table.add_row([name.to_owned(), n.to_string()]);
    }
    table.add_row([
        "threads before the first lock".to_owned(),
        count(threads[0]),
    ]);
    table.add_row(["threads at the end".to_owned(), count(threads[1])]);
    table.add_row([
        "CPU of this process, of one core".to_owned(),
        share(period.own_cpu),
    ]);
    table.add_row([
        "CPU of Redis, of one core".to_owned(),
        share(period.server_cpu),
    ]);
    println!("{table}\n");

    let mut late = support::table(["ms", "p50", "p99", "max", "count"]);
    late.add_row(support::spread(
        "from one renewal of a lock to the next",
        &renewals.seen.lock().pauses,
    ));
    println!("{late}\nttl {TTL:?}, renewed every {EVERY:?}; told on the callback thread\n");
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::parse();
    if !options.bench {
        // Run as a test: only whether it works.
        (options.seconds, options.locks) = (options.seconds.min(2), options.locks.min(500));
    }
    let server = Server::start()?;
    println!("{}\n", support::machine(&server)?);
    let renewals = Arc::new(Renewals::new(options.locks));
    let client = Client::builder(&server.url())
        .ttl(TTL)
        .events(Arc::clone(&renewals))
        .build()?;
    let threads_before = support::thread_count();
    let guards: Vec<MutexGuard> = (0..options.locks)
        .map(|number| client.mutex(&number.to_string()).lock())
        .collect::<Result<_, _>>()?;

    let period = hold(options.seconds, &renewals, &server)?;
    let threads = [threads_before, support::thread_count()];
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    let present = in_redis(&server)?;
    print(&period, &renewals, options.locks, threads);

    drop(guards);
    let mut left = present;
    let freed = eventually(Duration::from_secs(10), || {
        left = in_redis(&server).unwrap_or(left);
        left == 0
    });
    let told = renewals.lost.load(Ordering::Relaxed);
    if lost > 0 || told > 0 || present != options.locks {
        return Err(format!(
            "{lost} locks are lost, {told} were told so, {present} stand in Redis"
        )
        .into());
    }
    if threads[0] != threads[1] {
        return Err(format!("the number of threads changed: {threads:?}").into());
    }
    if !freed {
        return Err(format!("{left} locks are still there after their guards were dropped").into());
    }
    Ok(())
}
