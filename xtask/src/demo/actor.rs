//! The requests that the demo's scenes send to a process.

use std::time::Duration;

use leasehold_testbed::Process;

use super::PATIENCE;
use super::messages::{Assignment, Job, Message, Order};
use crate::space::Space;
use crate::stop::Stop;

/// A process of the demo.
pub struct Actor(pub Process<Message>);

impl Actor {
    pub fn start(name: impl Into<String>, space: &Space, job: Job) -> anyhow::Result<Self> {
        let assignment = Assignment {
            url: space.url().to_owned(),
            prefix: space.lock_prefix(),
            job,
        };
        let process = Process::again(name, &["demo-process"], &assignment)?;
        Ok(Self(process))
    }

    /// For a process that holds, or will soon: the token of its grant.
    pub fn grant(&self, stop: &Stop, limit: Duration) -> anyhow::Result<u64> {
        match stop.message(&self.0, limit)? {
            Message::Held { token } => Ok(token),
            other => Err(self.0.unexpected("Held", &other)),
        }
    }

    /// What the guard says of itself: whether it is lost, and what `check()` objects to.
    pub fn condition(&mut self, stop: &Stop) -> anyhow::Result<(bool, Option<String>)> {
        self.0.order(&Order::Report)?;
        match stop.message(&self.0, PATIENCE)? {
            Message::Condition { lost, objection } => Ok((lost, objection)),
            other => Err(self.0.unexpected("Condition", &other)),
        }
    }

    /// Lets it unlock: what `unlock()` objects to.
    pub fn release(&mut self, stop: &Stop) -> anyhow::Result<Option<String>> {
        self.0.order(&Order::Release)?;
        match stop.message(&self.0, PATIENCE)? {
            Message::Released { objection } => Ok(objection),
            other => Err(self.0.unexpected("Released", &other)),
        }
    }
}
