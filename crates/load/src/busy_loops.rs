//! Busy loops beside a measurement: the machine of a service whose other threads always have work.
//!
//! The loops are processes, since the CPU time of threads would count as that of the measuring program, and the threads
//! would be pinned with it. Linux schedules threads and processes in the same way.

use std::io::{self, BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::available_parallelism;

use crate::machine::{cores_by_preference, pin};

/// The shell that owns the loops, one for each of its arguments. It prints their process ids.
///
/// Its input ends when [`BusyLoops`] is dropped, or when the program ends in any way. Then the shell ends the loops.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
loops=
for each in "$@"; do
    while :; do :; done </dev/null >/dev/null &
    loops="$loops $!"
done
echo $loops
read -r line
kill -KILL $loops
wait
"#;

/// One busy loop per core that the caller may use, at the program's own priority. Dropping it ends the loops, and waits
/// until they have ended.
pub struct BusyLoops {
    shell: Child,
    /// Closing it ends the loops.
    input: Option<ChildStdin>,
    loops: Vec<u32>,
}

impl BusyLoops {
    /// Starts the loops, and pins each to a core of its own where the system can pin. Call it before the caller pins
    /// itself: the loops get only the cores that the caller may use.
    ///
    /// # Errors
    /// The processes cannot be started.
    pub fn start() -> io::Result<Self> {
        let cores = cores_by_preference()?;
        let count = match cores.len() {
            0 => available_parallelism()?.get(),
            cores => cores,
        };
        let mut shell = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "leasehold-busy-loops"])
            .args((0..count).map(|each| each.to_string()))
            // A terminal's Ctrl-C reaches the program only, which ends the loops itself.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (input, output) = (shell.stdin.take(), shell.stdout.take());
        let mut busy = Self {
            shell,
            input,
            loops: Vec::new(),
        };
        let mut ids = String::new();
        BufReader::new(output.expect("it is piped")).read_line(&mut ids)?;
        let ids = ids.split_whitespace().map(str::parse);
        busy.loops = ids.collect::<Result<_, _>>().map_err(io::Error::other)?;
        if busy.loops.len() != count {
            let started = busy.loops.len();
            return Err(io::Error::other(format!(
                "only {started} of {count} busy loops have started"
            )));
        }
        for (id, core) in busy.loops.iter().zip(cores) {
            pin(*id, core)?;
        }
        Ok(busy)
    }

    /// The number of loops.
    pub fn count(&self) -> usize {
        self.loops.len()
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.shell.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_testbed::child::{self, say};
    use leasehold_testbed::{Process, eventually};
    use rustix::process::{Pid, test_kill_process};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn runs(process: &u32) -> bool {
        let id = Pid::from_raw(process.cast_signed()).expect("an id is positive");
        test_kill_process(id).is_ok()
    }

    #[test]
    fn a_loop_per_core_runs_until_the_guard_is_dropped() -> io::Result<()> {
        let busy = BusyLoops::start()?;
        assert_eq!(busy.count(), available_parallelism()?.get());
        let loops = busy.loops.clone();
        assert!(loops.iter().all(runs), "{loops:?}");
        drop(busy);
        assert!(!loops.iter().any(runs), "{loops:?}");
        Ok(())
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn each_loop_uses_a_core_of_its_own() -> anyhow::Result<()> {
        let busy = BusyLoops::start()?;
        let mut cores: Vec<String> = Vec::new();
        for id in &busy.loops {
            let stat = || std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            // The 14th field is the CPU time in user space.
            let cpu = || {
                stat()
                    .split(' ')
                    .nth(13)
                    .and_then(|ticks| ticks.parse().ok())
            };
            assert!(eventually(LIMIT, || cpu() > Some(2_u64)), "{}", stat());
            let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
            cores.extend(crate::machine::field(&status, "Cpus_allowed_list"));
        }
        cores.sort_unstable();
        cores.dedup();
        assert_eq!(cores.len(), busy.count(), "{cores:?}");
        Ok(())
    }

    /// Set in the process that the next test kills.
    const ROLE: &str = "LEASEHOLD_LOAD_TEST_ROLE";

    /// The program that the next test kills. As a test of its own, it does nothing.
    #[test]
    fn program_with_busy_loops() {
        if std::env::var_os(ROLE).is_none() {
            return;
        }
        let _ = child::run(|(): (), orders: crossbeam_channel::Receiver<()>| {
            let busy = BusyLoops::start()?;
            say(&busy.loops)?;
            let _ = orders.recv();
            Ok(())
        });
    }

    #[test]
    fn the_loops_end_when_their_program_is_killed() -> anyhow::Result<()> {
        let mut again = Command::new(std::env::current_exe()?);
        let name = "busy_loops::tests::program_with_busy_loops";
        again.args([name, "--exact", "--nocapture"]).env(ROLE, "1");
        let mut program = Process::<Vec<u32>>::start("program", &mut again, &())?;
        let loops = program.message(LIMIT)?;
        assert!(loops.iter().all(runs), "{loops:?}");
        program.kill()?;
        let have_ended = eventually(LIMIT, || !loops.iter().any(runs));
        assert!(have_ended, "{loops:?}");
        Ok(())
    }
}
