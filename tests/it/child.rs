//! The part of a test that runs in a process of its own: this binary again, asked for the test
//! `a_process_of_its_own_runs_the_named_body` of the binary's `main.rs`. Knows nothing of locks.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::any::type_name;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use leasehold_testbed::{Process, child};
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Set in processes that a test starts.
const VARIABLE: &str = "LEASEHOLD_TEST_BODY";
/// The test that runs bodies.
const ENTRY: &str = "a_process_of_its_own_runs_the_named_body";

/// What a process of its own does.
pub type Body = fn(&Parent);

/// The bodies that a binary can run, by name.
macro_rules! bodies {
    ($($body:path),* $(,)?) => {
        [$(($crate::child::name_of(&$body), $body as $crate::child::Body)),*]
    };
}
pub(crate) use bodies;

/// A function's path.
pub fn name_of<F>(_: &F) -> &'static str {
    type_name::<F>()
}

#[derive(Serialize, Deserialize)]
struct Assignment {
    body: String,
    url: String,
}

/// The process that started this one.
pub struct Parent {
    /// The server that it named.
    pub url: String,
    end: crossbeam_channel::Receiver<()>,
}

impl Parent {
    /// Sends it a message.
    pub fn tell(&self, message: impl Serialize) {
        child::say(&message).expect("the parent listens");
    }

    /// Returns when it wants this process to end. (When it is gone, this process ends at once.)
    pub fn wait_for_end(&self) {
        let _ = self.end.recv();
    }
}

/// In a process that a test started, runs the body that it named. False in all other processes.
pub fn run_body(bodies: &[(&str, Body)]) -> bool {
    if std::env::var_os(VARIABLE).is_none() {
        return false;
    }
    let (Assignment { body, url }, end) = child::assignment().unwrap();
    let named = bodies.iter().find(|(name, _)| *name == body);
    let (_, run) = named.unwrap_or_else(|| panic!("{body} is not among the bodies of main.rs"));
    run(&Parent { url, end });
    true
}

/// Tells the server's URL and ends: a body that shows that bodies run.
pub fn echo(parent: &Parent) {
    parent.tell(&parent.url);
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

/// A process that runs a body. Dropped, it is killed.
pub struct Child(Process<serde_json::Value>);

impl Child {
    /// Starts `body`, which must be among the bodies of `main.rs`, for the server at `url`.
    pub fn start<F: Fn(&Parent)>(body: F, url: &str) -> Self {
        let program = Command::new(std::env::current_exe().unwrap());
        Self::start_by(program, body, url)
    }

    /// The same by a `command` that runs this program.
    pub fn start_by<F: Fn(&Parent)>(mut command: Command, body: F, url: &str) -> Self {
        let assignment = Assignment {
            body: name_of(&body).to_owned(),
            url: url.to_owned(),
        };
        command
            .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
            .env(VARIABLE, "1");
        Self(Process::start(&assignment.body, &mut command, &assignment).unwrap())
    }

    /// The next message that it tells, within `limit`.
    #[track_caller]
    pub fn told<T: DeserializeOwned>(&self, limit: Duration) -> T {
        match self.0.message(limit) {
            Ok(message) => serde_json::from_value(message).unwrap(),
            Err(error) => panic!("{error:#}"),
        }
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        self.0.signal(signal).unwrap();
    }

    /// How it ended, which it has to do within `limit`.
    #[track_caller]
    pub fn status(&mut self, limit: Duration) -> ExitStatus {
        self.0.status(limit).unwrap()
    }

    /// Ends it with SIGKILL; returns once it is gone.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
    }

    /// Lets it end by itself, which it has to do well and within `limit`.
    #[track_caller]
    pub fn finish(mut self, limit: Duration) {
        // Most do not wait for this, and may have ended.
        let _ = self.0.order(&());
        if let Err(error) = self.0.finish(limit) {
            panic!("{error:#}");
        }
    }
}
