//! What the benches share: what they ran on, clocks, CPU time, pinning, tables. Measures no lock.
#![allow(dead_code, reason = "each bench uses its own part of this")]

use std::error::Error;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use hdrhistogram::Histogram;
use leasehold_testbed::Server;

/// The machine in one line, to stand above every figure.
pub fn machine(server: &Server) -> Result<String, Box<dyn Error>> {
    let cores = std::thread::available_parallelism()?;
    let cpu = field(&read("/proc/cpuinfo"), "model name").unwrap_or(std::env::consts::ARCH.into());
    let system = rustix::system::uname();
    let (name, release) = (system.sysname(), system.release());
    let info = info(server, "server")?;
    let redis = field(&info, "redis_version").unwrap_or_default();
    Ok(format!(
        "{cores} cores of {cpu}, {} {}, Redis {redis}",
        name.to_string_lossy(),
        release.to_string_lossy()
    ))
}

/// The monotonic clock in nanoseconds. All processes of a machine read the same one.
pub fn nanoseconds() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A duration drawn at random.
pub fn between(low: Duration, high: Duration) -> Duration {
    // Each state is a new one, so its hash of nothing is a random number.
    let part = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    low + (high - low).mul_f64(part)
}

/// How late this machine wakes a thread that sleeps for `pause`, again and again.
pub fn oversleep(pause: Duration, until: &AtomicBool) -> Histogram<u64> {
    let mut late = histogram();
    while !until.load(Ordering::Relaxed) {
        let start = Instant::now();
        thread::sleep(pause);
        record(&mut late, start.elapsed().saturating_sub(pause));
    }
    late
}

/// How busy all cores together are from now on, in percent; nothing where the system has no /proc.
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

/// The CPU time that this process has used, all its threads together.
pub fn own_cpu() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// The CPU time that the server has used.
pub fn server_cpu(server: &Server) -> Result<Duration, Box<dyn Error>> {
    let info = info(server, "cpu")?;
    let mut used = 0.0;
    for name in ["used_cpu_user", "used_cpu_sys"] {
        let seconds = field(&info, name).ok_or_else(|| format!("INFO cpu tells no {name}"))?;
        used += seconds.parse::<f64>()?;
    }
    Ok(Duration::from_secs_f64(used))
}

/// The threads of this process; nothing where the system has no /proc.
pub fn thread_count() -> Option<usize> {
    field(&read("/proc/self/status"), "Threads")?.parse().ok()
}

/// Pins every thread of this process and of `other` to the last core that this one may use, and
/// says which; nothing where threads cannot be pinned.
#[cfg(target_os = "linux")]
pub fn pin_to_one_core(other: u32) -> io::Result<Option<usize>> {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let allowed = sched_getaffinity(None)?;
    let core = (0..CpuSet::MAX_CPU)
        .rev()
        .find(|core| allowed.is_set(*core));
    let core = core.ok_or_else(|| io::Error::other("this thread may run nowhere"))?;
    let mut one = CpuSet::new();
    one.set(core);
    for process in [std::process::id(), other] {
        for task in fs::read_dir(format!("/proc/{process}/task"))? {
            let id = task?.file_name().to_str().and_then(|id| id.parse().ok());
            sched_setaffinity(id.and_then(Pid::from_raw), &one)?;
        }
    }
    Ok(Some(core))
}

#[cfg(not(target_os = "linux"))]
pub fn pin_to_one_core(_other: u32) -> io::Result<Option<usize>> {
    Ok(None)
}

/// Durations in µs up to a minute, to three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000, 3).expect("these bounds are valid")
}

pub fn record(into: &mut Histogram<u64>, duration: Duration) {
    into.saturating_record(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
}

/// A row: what it is, then median, 99th percentile, maximum and count.
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

/// A table whose first column is text and whose others are figures.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// One section of what the server tells of itself.
pub fn info(server: &Server, section: &str) -> Result<String, Box<dyn Error>> {
    let reply = server.command(&["INFO", section])?;
    let text = reply.as_text().ok_or("INFO answers no text")?;
    Ok(text.to_owned())
}

/// The value in the first line `name : value`.
pub fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(each, _)| each.trim() == name)?;
    Some(value.trim().to_owned())
}

/// Empty where there is no such file.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}
