//! A test's body in a process of its own: this binary again, asked for one ignored test. Knows
//! nothing of locks.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child as Process, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

const URL: &str = "LEASEHOLD_IT_URL";
const MARK: &str = "@ ";

/// The server that this process was started for; `None` in everybody else's.
pub fn url() -> Option<String> {
    std::env::var(URL).ok()
}

/// Tells the parent one line.
pub fn tell(line: impl std::fmt::Display) {
    println!("{MARK}{line}");
}

/// Returns when the parent has gone or wants this process to end.
pub fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// How many threads this process has; `None` where the system does not say.
pub fn threads() -> Option<usize> {
    status("Threads:")
}

/// How much memory this process uses, in bytes; `None` where the system does not say.
pub fn memory() -> Option<usize> {
    status("VmRSS:").map(|kilobytes| kilobytes * 1024)
}

fn status(name: &str) -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// A process that runs one ignored test of this binary. Dropped, it is killed.
pub struct Child {
    process: Process,
    lines: Receiver<String>,
}

impl Child {
    /// Runs the ignored test named `test`, as `module::name`, for the server at `url`.
    pub fn start(test: &str, url: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut process = Command::new(program)
            .args([
                "--exact",
                test,
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(URL, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = process.stdout.take().expect("it was just piped");
        Self {
            process,
            lines: lines_of(stdout),
        }
    }

    /// The next line that it tells, within `limit`.
    #[track_caller]
    pub fn told(&self, limit: Duration) -> String {
        match self.lines.recv_timeout(limit) {
            Ok(line) => line,
            Err(error) => panic!("the child process told nothing within {limit:?}: {error}"),
        }
    }

    /// Ends it with SIGKILL; returns once it is gone.
    pub fn kill(&mut self) {
        // Fails when it has ended by itself, which is as well.
        let _ = self.process.kill();
        self.process.wait().unwrap();
    }

    /// Lets it end by itself, which it has to do well and within `limit`.
    #[track_caller]
    pub fn finish(mut self, limit: Duration) {
        drop(self.process.stdin.take());
        let mut status = None;
        let _ = leasehold_testbed::eventually(limit, || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap_or_else(|| panic!("the child process runs after {limit:?}"));
        assert!(status.success(), "the child process failed: {status}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn lines_of(stdout: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The test runner's own words may stand on the same line.
            if let Some((_, told)) = line.split_once(MARK) {
                let _ = sender.send(told.to_owned());
            }
        }
    });
    lines
}
