//! One client holds many locks, and its watchdog keeps them alive: is any lock lost, are all renewed in time, and what
//! does that cost?
//!
//! Exits with an error if a lock was lost or left behind, or if holding locks took more threads. With
//! `--features metrics` it also prints how late renewals are.

mod support;

use std::alloc::System;
use std::error::Error;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Cluster, Reply, Server, eventually};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

/// Counts allocated bytes, which are more exact than the resident memory of the process.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const PREFIX: &str = "leasehold:";
/// Threads that take the locks.
const TAKERS: usize = 64;
/// Locks that are renewed before threads are counted: so many that each of 16 masters has some.
const FIRST_LOCKS: usize = 500;
/// How long the releases of dropped guards may take.
const RELEASE_LIMIT: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Options {
    /// Seconds for which the locks are held
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of locks
    #[arg(long, default_value_t = 10_000)]
    locks: usize,
    /// Their ttl, in seconds: they are renewed after a third of it
    #[arg(long, default_value_t = 3)]
    ttl: u64,
    /// Number of masters of a Cluster without replicas. Without this option, the locks are on one server
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=16))]
    masters: Option<u8>,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// The server or the Cluster that has the locks.
enum Servers {
    One(Box<Server>),
    Several(Cluster),
}

impl Servers {
    fn start(masters: Option<u8>) -> Result<Self, Box<dyn Error>> {
        Ok(match masters {
            None => Self::One(Box::new(Server::start()?)),
            Some(masters) => {
                let cluster = Cluster::builder().masters(usize::from(masters));
                Self::Several(cluster.without_replicas().start()?)
            }
        })
    }

    fn url(&self) -> String {
        match self {
            Self::One(server) => server.url(),
            Self::Several(cluster) => cluster.url(),
        }
    }

    fn all(&self) -> &[Server] {
        match self {
            Self::One(server) => std::slice::from_ref(&**server),
            Self::Several(cluster) => cluster.nodes(),
        }
    }

    /// The number of keys in Redis, fence counters included.
    fn keys(&self) -> Result<usize, Box<dyn Error>> {
        let mut keys = 0;
        for server in self.all() {
            let Reply::Int(size) = server.command(&["DBSIZE"])? else {
                return Err("unexpected reply to DBSIZE".into());
            };
            keys += usize::try_from(size)?;
        }
        Ok(keys)
    }

    /// The number of fence counters, which stay. Each server looks at all of its keys for this.
    fn counters(&self) -> Result<usize, Box<dyn Error>> {
        let mut counters = 0;
        for server in self.all() {
            let Reply::Array(keys) = server.command(&["KEYS", &format!("{PREFIX}~fence*")])? else {
                return Err("unexpected reply to KEYS".into());
            };
            counters += keys.len();
        }
        Ok(counters)
    }
}

/// The figures of the client at one time, and of each server.
struct Reading {
    at: Instant,
    own_cpu: Duration,
    allocated: u64,
    resident: u64,
    servers: Vec<ServerReading>,
}

struct ServerReading {
    cpu: Duration,
    /// The calls of PEXPIRE. Each renewal is one, and nothing else in this bench calls it.
    renewals: u64,
    /// The time that script calls took in Redis, and their number.
    scripts: [u64; 2],
    memory: u64,
    tracked: u64,
}

impl Reading {
    fn take(servers: &Servers) -> Result<Self, Box<dyn Error>> {
        let heap = ALLOCATOR.stats();
        let all = servers.all().iter().map(ServerReading::take);
        Ok(Self {
            at: Instant::now(),
            own_cpu: support::own_cpu(),
            allocated: heap.bytes_allocated.saturating_sub(heap.bytes_deallocated) as u64,
            resident: resident().unwrap_or(0),
            servers: all.collect::<Result<_, _>>()?,
        })
    }

    fn server_memory(&self) -> u64 {
        self.servers.iter().map(|server| server.memory).sum()
    }
}

impl ServerReading {
    fn take(server: &Server) -> Result<Self, Box<dyn Error>> {
        let number = |section, name| -> Result<u64, Box<dyn Error>> {
            let reported = support::field(&support::info(server, section)?, name);
            Ok(reported.and_then(|n| n.parse().ok()).unwrap_or(0))
        };
        let commands = support::info(server, "commandstats")?;
        let of = |command, what| {
            let reported = support::field(&commands, command)?;
            let mut parts = reported.split(',').filter_map(|part| part.split_once('='));
            parts.find(|(name, _)| *name == what)?.1.parse().ok()
        };
        let evalsha = |what| of("cmdstat_evalsha", what).unwrap_or(0);
        Ok(Self {
            cpu: support::server_cpu(server)?,
            renewals: of("cmdstat_pexpire", "calls").unwrap_or(0),
            scripts: [evalsha("usec"), evalsha("calls")],
            memory: number("memory", "used_memory")?,
            tracked: number("stats", "tracking_total_keys")?,
        })
    }
}

/// Bytes of this process in memory; `None` where the system has no /proc.
fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = support::field(&status, "VmRSS")?;
    let kilobytes: u64 = kilobytes.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes * 1024)
}

fn bar(length: u64, what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}");
    let style = style.expect("a valid template");
    ProgressBar::new(length)
        .with_style(style)
        .with_message(what)
}

/// Takes locks whose names are as short as their numbers.
fn take(client: &Client, locks: usize) -> Result<Vec<MutexGuard>, leasehold::Error> {
    let bar = bar(locks as u64, "taken");
    let next = AtomicUsize::new(0);
    let guards = Mutex::new(Vec::with_capacity(locks));
    let taker = || -> Result<(), leasehold::Error> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= locks {
                return Ok(());
            }
            let guard = client.mutex(number.to_string()).lock()?;
            guards.lock().expect("nobody panics with it").push(guard);
            bar.inc(1);
        }
    };
    thread::scope(|scope| {
        let takers: Vec<_> = (0..TAKERS).map(|_| scope.spawn(taker)).collect();
        let ended = takers
            .into_iter()
            .map(|taker| taker.join().expect("it does not panic"));
        ended.collect::<Result<(), _>>()
    })?;
    bar.finish_and_clear();
    Ok(guards.into_inner().expect("nobody panics with it"))
}

/// Holds locks on each server until the client has renewed some there. It starts the last threads for a server with the
/// first renewal there.
fn renew_on_each(servers: &Servers, client: &Client, ttl: Duration) -> Result<(), Box<dyn Error>> {
    let names = (0..FIRST_LOCKS).map(|number| format!("first-{number}"));
    let guards = names.map(|name| client.mutex(name).lock());
    let guards: Vec<MutexGuard> = guards.collect::<Result<_, _>>()?;
    let is_renewed = |server| ServerReading::take(server).is_ok_and(|it| it.renewals > 0);
    if !eventually(3 * ttl, || servers.all().iter().all(is_renewed)) {
        return Err("a server has no renewed lock".into());
    }
    for guard in guards {
        guard.unlock()?;
    }
    Ok(())
}

fn hold(seconds: u64) {
    let bar = bar(seconds, "held, s");
    for _ in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        bar.inc(1);
    }
    bar.finish_and_clear();
}

/// The bytes of all keys in Redis.
fn key_bytes(guards: &[MutexGuard]) -> u64 {
    let bytes = guards.iter().map(|guard| PREFIX.len() + guard.key().len());
    bytes.sum::<usize>() as u64
}

fn memory(options: &Options, key_bytes: u64, [empty, taken]: [&Reading; 2]) -> Table {
    let each = |bytes: u64| format!("{:.0}", bytes as f64 / options.locks as f64);
    let growth = taken.allocated.saturating_sub(empty.allocated);
    let guards = (options.locks * size_of::<MutexGuard>()) as u64;
    let mut table = support::table(["memory, bytes for each lock", ""]);
    table.add_row(["allocated".to_owned(), each(growth)]);
    table.add_row([
        "of which guard, kept by this bench".to_owned(),
        each(guards),
    ]);
    table.add_row(["of which key".to_owned(), each(key_bytes)]);
    table.add_row([
        "beyond both".to_owned(),
        each(growth.saturating_sub(guards + key_bytes)),
    ]);
    let resident = taken.resident.saturating_sub(empty.resident);
    table.add_row(["growth of the process".to_owned(), each(resident)]);
    let server = taken.server_memory().saturating_sub(empty.server_memory());
    table.add_row(["growth of Redis".to_owned(), each(server)]);
    table
}

fn costs(options: &Options, [start, end]: [&Reading; 2]) -> Table {
    let seconds = (end.at - start.at).as_secs_f64();
    let share = |cpu: Duration| format!("{:.1} %", 100.0 * cpu.as_secs_f64() / seconds);
    let due = options.locks as f64 * seconds / (options.ttl as f64 / 3.0);
    let mut table = support::table(["holding", ""]);
    table.add_row(["locks".to_owned(), options.locks.to_string()]);
    table.add_row(["for".to_owned(), format!("{seconds:.1} s")]);
    let renewals = end.servers.iter().zip(&start.servers);
    let renewals = renewals.map(|(end, start)| end.renewals - start.renewals);
    table.add_row(["renewals".to_owned(), renewals.sum::<u64>().to_string()]);
    table.add_row(["renewals due".to_owned(), format!("{due:.0}")]);
    let own = share(end.own_cpu - start.own_cpu);
    table.add_row(["CPU of this process, of one core".to_owned(), own]);
    table
}

/// A column for each server. `empty` is from before the first lock.
fn costs_of_servers([empty, start, end]: [&Reading; 3]) -> Table {
    let seconds = (end.at - start.at).as_secs_f64();
    let heads = (1..=end.servers.len()).map(|number| format!("Redis {number}"));
    let mut table = support::table(["each server".to_owned()].into_iter().chain(heads));
    let mut row = |name: &str, figure: &dyn Fn([&ServerReading; 3]) -> String| {
        let readings = empty.servers.iter().zip(&start.servers).zip(&end.servers);
        let figures = readings.map(|((empty, start), end)| figure([empty, start, end]));
        table.add_row([name.to_owned()].into_iter().chain(figures));
    };
    let scripts = |[_, start, end]: [&ServerReading; 3]| {
        [0, 1].map(|at| (end.scripts[at] - start.scripts[at]) as f64)
    };
    let renewed = |[_, start, end]: [&ServerReading; 3]| (end.renewals - start.renewals) as f64;
    row("CPU, of one core", &|[_, start, end]| {
        format!(
            "{:.1} %",
            100.0 * (end.cpu - start.cpu).as_secs_f64() / seconds
        )
    });
    row("renewals per second", &|of| {
        format!("{:.0}", renewed(of) / seconds)
    });
    row("script calls per second", &|of| {
        format!("{:.0}", scripts(of)[1] / seconds)
    });
    row("time for each renewal", &|of| {
        format!("{:.1} µs", scripts(of)[0] / renewed(of).max(1.0))
    });
    row("time for each script call", &|of| {
        let [micros, calls] = scripts(of);
        format!("{:.1} µs", micros / calls.max(1.0))
    });
    row("growth of its memory, MB", &|[empty, _, end]| {
        format!(
            "{:.0}",
            end.memory.saturating_sub(empty.memory) as f64 / 1e6
        )
    });
    row("keys in its tracking table", &|[.., end]| {
        end.tracked.to_string()
    });
    table
}

/// How late renewals are, from the library's own metrics.
#[cfg(feature = "metrics")]
mod lateness {
    use std::sync::{Arc, Mutex, OnceLock, PoisonError};
    use std::time::Duration;

    use hdrhistogram::Histogram;
    use metrics::{
        Counter, Gauge, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    };

    use crate::support;

    const ANSWERED: &str = "leasehold_renewal_seconds";

    struct Late(Mutex<Histogram<u64>>);

    impl HistogramFn for Late {
        fn record(&self, seconds: f64) {
            let mut late = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            support::record(&mut late, Duration::from_secs_f64(seconds));
        }
    }

    static LATE: OnceLock<Arc<Late>> = OnceLock::new();

    /// A recorder that keeps the histogram [`ANSWERED`] and drops all other metrics.
    struct OnlyLate;

    impl Recorder for OnlyLate {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::noop()
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> metrics::Histogram {
            match LATE.get() {
                Some(late) if key.name() == ANSWERED => {
                    metrics::Histogram::from_arc(Arc::clone(late))
                }
                _ => metrics::Histogram::noop(),
            }
        }
    }

    pub fn record() {
        LATE.get_or_init(|| Arc::new(Late(Mutex::new(support::histogram()))));
        metrics::set_global_recorder(OnlyLate).expect("the only recorder");
    }

    pub fn print() {
        let late = LATE.get().expect("recorded since the start");
        let late = late.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = support::table(["ms", "p50", "p99", "max", "count"]);
        let what = "from when a renewal was due to its reply";
        table.add_row(support::spread(what, &late));
        println!("{table}\n");
    }
}

#[cfg(not(feature = "metrics"))]
mod lateness {
    pub fn record() {}

    pub fn print() {
        println!("with --features metrics this prints how late renewals were\n");
    }
}

/// Drops all guards. Returns how long that took, how long it took until the locks were gone from Redis, and how many
/// are left there beside the `counters`.
fn release_all(
    guards: Vec<MutexGuard>,
    servers: &Servers,
    counters: usize,
) -> (Duration, Duration, usize) {
    let start = Instant::now();
    let mut left = guards.len();
    drop(guards);
    let dropped = start.elapsed();
    let _ = eventually(RELEASE_LIMIT, || {
        left = servers
            .keys()
            .map_or(left, |keys| keys.saturating_sub(counters));
        left == 0
    });
    (dropped, start.elapsed(), left)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = Options::parse();
    if !options.bench {
        // Run as a test: checks only that the bench works.
        (options.seconds, options.locks) = (options.seconds.min(2), options.locks.min(500));
    }
    lateness::record();
    let servers = Servers::start(options.masters)?;
    println!("{}\n", support::machine(&servers.all()[0])?);
    let _loops = options.busy.start()?;
    let ttl = Duration::from_secs(options.ttl);
    let client = Client::builder(servers.url())
        .prefix(PREFIX)
        .ttl(ttl)
        .build()?;
    // The number of a client's threads must not grow with its locks. On a Cluster, it grows with the servers in use.
    renew_on_each(&servers, &client, ttl)?;
    let threads_before = support::thread_count();
    let empty = Reading::take(&servers)?;
    let start = Instant::now();
    let guards = take(&client, options.locks)?;
    let taking = start.elapsed();
    let taken = Reading::take(&servers)?;

    hold(options.seconds);
    let end = Reading::take(&servers)?;
    let threads = [threads_before, support::thread_count()];
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    let counters = servers.counters()?;
    let present = servers.keys()? - counters;
    println!("{}\n", costs(&options, [&taken, &end]));
    println!("{}\n", costs_of_servers([&empty, &taken, &end]));
    lateness::print();
    println!("{}\n", memory(&options, key_bytes(&guards), [&empty, &end]));

    let (dropping, releasing, left) = release_all(guards, &servers, counters);
    println!(
        "lost: {lost}; in Redis at the end: {present}; taken in {taking:.1?} by {TAKERS} threads"
    );
    println!(
        "dropped in {dropping:.1?}, gone from Redis after {releasing:.1?}; left there: {left}"
    );
    println!("threads before the first lock and at the end: {threads:?}");
    if lost > 0 || present != options.locks {
        return Err(format!("{lost} locks are lost, {present} are in Redis").into());
    }
    if threads[0] != threads[1] {
        return Err(format!("the number of threads changed: {threads:?}").into());
    }
    if left > 0 {
        return Err(format!("{left} locks are still there after their guards were dropped").into());
    }
    Ok(())
}
