//! The machine of a measurement: its description, its clock, CPU time, pinning.

use std::fs;
use std::io;
use std::time::Duration;

use anyhow::Context as _;
use leasehold_testbed::Server;

/// Describes the machine in one line, to print above the figures.
///
/// # Errors
/// The server does not reply.
pub fn description(server: &Server) -> anyhow::Result<String> {
    described(&info(server, "server")?)
}

/// Describes the machine and a server in one line. `about` is the server's reply to `INFO server`.
///
/// # Errors
/// The cores cannot be counted.
pub fn described(about: &str) -> anyhow::Result<String> {
    let cores = std::thread::available_parallelism().context("cannot count the cores")?;
    let facts = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = field(&facts, "model name").unwrap_or(std::env::consts::ARCH.into());
    let system = rustix::system::uname();
    let (name, release) = (system.sysname(), system.release());
    // Valkey also reports the version of Redis that it is compatible with.
    let server = match field(about, "valkey_version") {
        Some(version) => format!("Valkey {version}"),
        None => {
            let version = field(about, "redis_version");
            format!(
                "Redis {}",
                version.as_deref().unwrap_or("of an unknown version")
            )
        }
    };
    Ok(format!(
        "{cores} cores of {cpu}, {} {}, {server}",
        name.to_string_lossy(),
        release.to_string_lossy()
    ))
}

/// The monotonic clock in nanoseconds. All processes of a machine read the same clock.
pub fn nanoseconds() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The CPU time that all threads of this process have used.
pub fn own_cpu() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// The CPU time that a server has used, from its `INFO cpu`.
///
/// # Errors
/// The text lacks the CPU time.
pub fn server_cpu(info: &str) -> anyhow::Result<Duration> {
    let mut used = 0.0;
    for name in ["used_cpu_user", "used_cpu_sys"] {
        let seconds = field(info, name).with_context(|| format!("INFO has no {name}"))?;
        used += seconds.parse::<f64>()?;
    }
    Ok(Duration::from_secs_f64(used))
}

/// The cores that this thread may use, the last one first: the system gives the first core more work of its own.
///
/// # Errors
/// Threads cannot be pinned here.
#[cfg(target_os = "linux")]
pub fn cores_by_preference() -> io::Result<Vec<usize>> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let allowed = sched_getaffinity(None)?;
    let cores = (0..CpuSet::MAX_CPU).rev();
    Ok(cores.filter(|core| allowed.is_set(*core)).collect())
}

/// Pins all threads of a process to one core. Threads that these threads start later are pinned, too.
///
/// # Errors
/// The process has ended, or threads cannot be pinned here.
#[cfg(target_os = "linux")]
pub fn pin(process: u32, core: usize) -> io::Result<()> {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut one = CpuSet::new();
    one.set(core);
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let id = task?.file_name().to_str().and_then(|id| id.parse().ok());
        sched_setaffinity(id.and_then(Pid::from_raw), &one)?;
    }
    Ok(())
}

/// Returns no core, since threads cannot be pinned on this system.
///
/// # Errors
/// None.
#[cfg(not(target_os = "linux"))]
pub fn cores_by_preference() -> io::Result<Vec<usize>> {
    Ok(Vec::new())
}

/// Fails, since threads cannot be pinned on this system.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn pin(_process: u32, _core: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The server's INFO: one section, or `all`.
///
/// # Errors
/// The server does not reply.
pub fn info(server: &Server, section: &str) -> anyhow::Result<String> {
    let reply = server.command(&["INFO", section])?;
    let text = reply.as_text().context("INFO replies with no text")?;
    Ok(text.to_owned())
}

/// The value in the first line `name : value`.
pub fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(each, _)| each.trim() == name)?;
    Some(value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_name_is_read_from_its_info() -> anyhow::Result<()> {
        let redis = "# Server\r\nredis_version:7.0.15\r\n";
        assert!(described(redis)?.ends_with(", Redis 7.0.15"));
        let valkey = "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.0\r\n";
        assert!(described(valkey)?.ends_with(", Valkey 8.1.0"));
        assert!(described("")?.ends_with(", Redis of an unknown version"));
        Ok(())
    }
}
