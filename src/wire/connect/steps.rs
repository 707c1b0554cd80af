//! The steps of attempts to connect. If a caller leaves during an attempt, its error names the attempt's step.

use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;

use crate::util::clock::MonotonicTime;
use crate::wire::net::socket::ConnectStep;

/// The next action of an operator if a server is silent on an open connection.
pub const SLOW: &str = "check the server's load and the network";

/// The steps of making a connection, for the errors of failed and of unfinished attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    LookUp,
    Connect,
    #[cfg_attr(not(feature = "tls"), expect(dead_code))]
    TlsHandshake,
    CallCredentials,
    LogIn,
    LoadScripts,
    CheckData,
    Subscribe,
    AskSentinel,
    CheckEnvironment,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LookUp => "the lookup of the host name",
            Self::Connect => "the TCP connection",
            Self::TlsHandshake => "the TLS handshake",
            Self::CallCredentials => "the callback of `Builder::credentials`",
            Self::LogIn => "the login",
            Self::LoadScripts => "the loading of scripts",
            Self::CheckData => "the check for lost data",
            Self::Subscribe => "the subscription to notifications",
            Self::AskSentinel => "the query for the primary",
            Self::CheckEnvironment => "the check of the environment",
        })
    }
}

impl Step {
    /// The next action of an operator if this step does not end.
    pub fn next_action(self) -> &'static str {
        match self {
            Self::LookUp => "check DNS",
            Self::Connect => "check the address, and firewalls",
            Self::TlsHandshake => {
                "check the server's load and the network, and use redis:// if this port is one without TLS"
            }
            Self::CallCredentials => "check where it gets the login",
            Self::AskSentinel => "check the sentinels, and the network",
            Self::LogIn
            | Self::LoadScripts
            | Self::CheckData
            | Self::Subscribe
            | Self::CheckEnvironment => SLOW,
        }
    }
}

impl From<ConnectStep> for Step {
    fn from(step: ConnectStep) -> Self {
        match step {
            ConnectStep::LookUp => Self::LookUp,
            ConnectStep::Connect => Self::Connect,
        }
    }
}

/// The current steps of the attempts to connect that are under way.
#[derive(Default)]
pub struct RunningSteps(Mutex<Attempts>);

#[derive(Default)]
struct Attempts {
    running: Vec<RunningStep>,
    /// The number of attempts so far.
    count: u64,
}

impl RunningSteps {
    /// Begins an attempt. The drop of the returned value ends it.
    pub fn begin(&self, step: Step) -> Progress<'_> {
        let mut attempts = self.0.lock();
        attempts.count += 1;
        let attempt = attempts.count;
        let since = MonotonicTime::now();
        attempts.running.push(RunningStep {
            attempt,
            step,
            since,
        });
        let steps = self;
        Progress { steps, attempt }
    }

    /// Pretends that the first running step began at `since`.
    #[cfg(all(test, not(shuttle)))]
    pub fn set_first_since(&self, since: MonotonicTime) {
        self.0.lock().running[0].since = since;
    }

    /// The step that has lasted longest.
    pub fn longest(&self) -> Option<RunningStep> {
        let attempts = self.0.lock();
        let first = attempts.running.iter().min_by_key(|step| step.since);
        first.copied()
    }
}

/// The current step of an attempt to connect.
#[derive(Clone, Copy)]
pub struct RunningStep {
    /// The number of the attempt.
    attempt: u64,
    pub step: Step,
    pub since: MonotonicTime,
}

impl RunningStep {
    pub fn lasted(&self) -> Duration {
        MonotonicTime::now().since(self.since)
    }
}

/// An attempt to connect that reports its steps. The drop ends the attempt.
pub struct Progress<'a> {
    steps: &'a RunningSteps,
    attempt: u64,
}

impl Progress<'_> {
    pub fn enter(&self, step: Step) {
        let since = MonotonicTime::now();
        let mut attempts = self.steps.0.lock();
        let mut running = attempts.running.iter_mut();
        if let Some(running) = running.find(|running| running.attempt == self.attempt) {
            (running.step, running.since) = (step, since);
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        let mut attempts = self.steps.0.lock();
        attempts
            .running
            .retain(|running| running.attempt != self.attempt);
    }
}
