//! Code that the benches share, beside `crates/load/`: busy loops, how busy the machine is, tables.
#![allow(
    dead_code,
    unused_imports,
    reason = "each bench uses its own part of this"
)]

use std::error::Error;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{CellAlignment, Row, Table, presets};
use hdrhistogram::Histogram;
use leasehold_load::{BusyLoops, cores_by_preference, pin};
pub use leasehold_load::{description as machine, field, info, nanoseconds, own_cpu};
use leasehold_testbed::Server;

/// The option that all benches have.
#[derive(Args)]
pub struct Busy {
    /// Run beside one busy loop per core. Limits on absolute times then do not count
    #[arg(long)]
    pub busy: bool,
}

/// The variable that stands for `--busy` in benches whose arguments are criterion's.
const BUSY: &str = "LEASEHOLD_BENCH_BUSY";

impl Busy {
    /// The option of a bench whose arguments are criterion's.
    pub fn from_environment() -> Self {
        Self {
            busy: std::env::var_os(BUSY).is_some_and(|value| !value.is_empty()),
        }
    }

    /// Starts the loops if the option is given, and says so. They run until the value is dropped. Call it before this
    /// process is pinned.
    pub fn start(&self) -> io::Result<Option<BusyLoops>> {
        let loops = self.busy.then(BusyLoops::start).transpose()?;
        if let Some(loops) = &loops {
            // Some benches have only JSON on their standard output.
            eprintln!("beside {} busy loops, one per core", loops.count());
        }
        Ok(loops)
    }
}

pub fn between(low: Duration, high: Duration) -> Duration {
    // Each `RandomState` has new keys, so its hash of `()` is a random number.
    let part = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    low + (high - low).mul_f64(part)
}

/// A random index of a list with `length` items; `None` if it is empty.
pub fn index(length: usize) -> Option<usize> {
    let random = RandomState::new().hash_one(()) as usize;
    random.checked_rem(length)
}

/// Sleeps for `pause` again and again until `until` is set. Returns how late the machine ended each sleep.
pub fn oversleep(pause: Duration, until: &AtomicBool) -> Histogram<u64> {
    let mut late = histogram();
    while !until.load(Ordering::Relaxed) {
        let start = Instant::now();
        thread::sleep(pause);
        record(&mut late, start.elapsed().saturating_sub(pause));
    }
    late
}

/// How busy all cores together are during this time, in percent; `None` where the system has no /proc.
pub fn busy(during: Duration) -> Option<f64> {
    let ticks = || -> Option<[u64; 2]> {
        let stat = read("/proc/stat");
        let fields = stat.lines().next()?.split_whitespace().skip(1).take(8);
        let ticks: Vec<u64> = fields
            .map(|field| field.parse().ok())
            .collect::<Option<_>>()?;
        // user nice system idle iowait irq softirq steal
        let idle = ticks.get(3)? + ticks.get(4)?;
        let all: u64 = ticks.iter().sum();
        Some([all - idle, all])
    };
    let before = ticks()?;
    thread::sleep(during);
    let after = ticks()?;
    let [busy, all] = [0, 1].map(|at| after[at].saturating_sub(before[at]) as f64);
    (all > 0.0).then(|| 100.0 * busy / all)
}

/// The CPU time that the server has used.
pub fn server_cpu(server: &Server) -> Result<Duration, Box<dyn Error>> {
    Ok(leasehold_load::server_cpu(&info(server, "cpu")?)?)
}

/// The number of threads of this process; `None` where the system has no /proc.
pub fn thread_count() -> Option<usize> {
    field(&read("/proc/self/status"), "Threads")?.parse().ok()
}

/// Pins every thread of this process and of `other` to the last core that this process may use, and returns
/// the core; `None` where threads cannot be pinned.
pub fn pin_to_one_core(other: u32) -> io::Result<Option<usize>> {
    let core = cores_by_preference()?.first().copied();
    if let Some(core) = core {
        pin(std::process::id(), core)?;
        pin(other, core)?;
    }
    Ok(core)
}

/// A histogram of durations in µs up to a minute, to three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000, 3).expect("these bounds are valid")
}

pub fn record(into: &mut Histogram<u64>, duration: Duration) {
    into.saturating_record(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
}

/// A row: its name, then median, 99th percentile, maximum and count.
pub fn spread(what: &str, of: &Histogram<u64>) -> [String; 5] {
    let ms = |micros: u64| format!("{:.3}", micros as f64 / 1000.0);
    [
        what.to_owned(),
        ms(of.value_at_quantile(0.5)),
        ms(of.value_at_quantile(0.99)),
        ms(of.max()),
        of.len().to_string(),
    ]
}

/// A table whose first column is text and whose other columns are figures.
pub fn table(header: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The text of a file; empty if there is no such file.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
