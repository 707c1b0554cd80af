//! Runs the part of a test that needs a process of its own: this binary again, started with the test
//! `a_child_process_runs_the_named_body` of the binary's `main.rs`.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::any::type_name;
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use leasehold_testbed::{Process, child};
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The maximum time until the last messages of a killed child have been read.
const SOON: Duration = Duration::from_secs(10);
/// The environment variable that names the body, set in child processes.
const VARIABLE: &str = "LEASEHOLD_TEST_BODY";
/// The test that runs bodies.
const ENTRY: &str = "a_child_process_runs_the_named_body";

/// The code that a child process runs.
pub type Body = fn(&Parent);

/// The bodies that a binary can run, by name.
macro_rules! bodies {
    ($($body:path),* $(,)?) => {
        [$(($crate::child::name_of(&$body), $body as $crate::child::Body)),*]
    };
}
pub(crate) use bodies;

/// The path of a function.
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
    /// The URL that the parent gave.
    pub url: String,
    end: crossbeam_channel::Receiver<()>,
}

impl Parent {
    /// Sends a message to the parent.
    pub fn tell(&self, message: impl Serialize) {
        child::say(&message).expect("the parent listens");
    }

    /// Returns after the next call of [`Child::proceed`].
    pub fn wait_to_proceed(&self) {
        let _ = self.end.recv();
    }

    /// Returns when the parent wants this process to end. (When the parent has died, this process ends at
    /// once.)
    pub fn wait_for_end(&self) {
        let _ = self.end.recv();
    }
}

/// In a child process, runs the body that the parent named. Returns false in all other processes.
pub fn run_body(bodies: &[(&str, Body)]) -> bool {
    if std::env::var_os(VARIABLE).is_none() {
        return false;
    }
    let (Assignment { body, url }, end) = child::assignment().unwrap();
    let named = bodies.iter().find(|(name, _)| *name == body);
    let (_, run) = named.unwrap_or_else(|| panic!("{body} is not among the bodies of main.rs"));
    run_reporting_panics(|| run(&Parent { url, end }));
    true
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`. If it panics, the parent's error has the message: it would otherwise stand anywhere in the output of
/// the parent's other tests.
fn run_reporting_panics(body: impl FnOnce()) {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        LAST_PANIC.set(info.to_string());
        print(info);
    }));
    if let Err(panicked) = panic::catch_unwind(AssertUnwindSafe(body)) {
        child::fail(&LAST_PANIC.take());
        panic::resume_unwind(panicked);
    }
}

/// A body that sends the server's URL and ends: shows that bodies run.
pub fn echo(parent: &Parent) {
    parent.tell(&parent.url);
}

/// A body that panics.
pub fn panic(parent: &Parent) {
    panic!("no luck with {}", parent.url);
}

/// The number of threads of this process; `None` where the system does not show it.
pub fn threads() -> Option<usize> {
    status("Threads:")
}

/// The memory that this process uses, in bytes; `None` where the system does not show it.
pub fn memory() -> Option<usize> {
    status("VmRSS:").map(|kilobytes| kilobytes * 1024)
}

fn status(name: &str) -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// A process that runs a body. Dropping it kills the process.
pub struct Child(Process<serde_json::Value>);

impl Child {
    /// Starts `body`, which must be among the bodies of `main.rs`, for the server at `url`.
    pub fn start<F: Fn(&Parent)>(body: F, url: &str) -> Self {
        let program = Command::new(std::env::current_exe().unwrap());
        Self::start_by(program, body, url)
    }

    /// As [`start`](Self::start), with a `command` that runs this program.
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

    /// The next message of the child, which must come within `limit`.
    #[track_caller]
    pub fn receive<T: DeserializeOwned>(&self, limit: Duration) -> T {
        match self.0.message(limit) {
            Ok(message) => serde_json::from_value(message).unwrap(),
            Err(error) => panic!("{error:#}"),
        }
    }

    /// The remaining messages of a killed child.
    pub fn rest<T: DeserializeOwned>(&self) -> Vec<T> {
        let message = || self.0.try_message(SOON).ok().flatten();
        let messages = std::iter::from_fn(message);
        messages
            .map(|message| serde_json::from_value(message).unwrap())
            .collect()
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, signal: Signal) {
        self.0.signal(signal).unwrap();
    }

    /// Ends one [`Parent::wait_to_proceed`].
    pub fn proceed(&mut self) {
        self.0.order(&()).unwrap();
    }

    /// The exit status of the child, which must end within `limit`.
    #[track_caller]
    pub fn status(&mut self, limit: Duration) -> ExitStatus {
        self.0.status(limit).unwrap()
    }

    /// Kills the child with SIGKILL, and returns once it has ended.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
    }

    /// Waits for the child to end by itself, with success and within `limit`.
    #[track_caller]
    pub fn finish(mut self, limit: Duration) {
        // Most children do not wait for this, and may have ended.
        let _ = self.0.order(&());
        if let Err(error) = self.0.finish(limit) {
            panic!("{error:#}");
        }
    }
}
