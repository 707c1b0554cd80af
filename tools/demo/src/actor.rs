//! The requests that the demo's scenes send to a process.

use std::time::Duration;

use leasehold_testbed::Process;
use leasehold_tools::environment::Namespace;
use leasehold_tools::stop::Stop;

use crate::STEP_LIMIT;
use crate::messages::{Assignment, Job, Message, Order};

/// A process of the demo.
pub struct Actor(pub Process<Message>);

impl Actor {
    pub fn start(name: impl Into<String>, namespace: &Namespace, job: Job) -> anyhow::Result<Self> {
        let assignment = Assignment {
            url: namespace.url().to_owned(),
            prefix: namespace.lock_prefix(),
            job,
        };
        let process = Process::again(name, &["--process"], &assignment)?;
        Ok(Self(process))
    }

    /// Waits until the process has the lock, and returns the fencing token of its grant.
    pub fn grant(&self, stop: &Stop, limit: Duration) -> anyhow::Result<u64> {
        match stop.message(&self.0, limit)? {
            Message::Held { token } => Ok(token),
            other => Err(self.0.unexpected("Held", &other)),
        }
    }

    /// Whether the guard is lost, and the error of `check()`.
    pub fn condition(&mut self, stop: &Stop) -> anyhow::Result<(bool, Option<String>)> {
        self.0.order(&Order::Report)?;
        match stop.message(&self.0, STEP_LIMIT)? {
            Message::Condition { lost, objection } => Ok((lost, objection)),
            other => Err(self.0.unexpected("Condition", &other)),
        }
    }

    /// Makes the process unlock; returns the error of `unlock()`.
    pub fn release(&mut self, stop: &Stop) -> anyhow::Result<Option<String>> {
        self.0.order(&Order::Release)?;
        match stop.message(&self.0, STEP_LIMIT)? {
            Message::Released { objection } => Ok(objection),
            other => Err(self.0.unexpected("Released", &other)),
        }
    }
}
