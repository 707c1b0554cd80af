//! What the demo's scenes ask of a process, on top of what any process of ours can do.

use std::time::Duration;

use super::PATIENCE;
use super::messages::{Assignment, Job, Message, Order};
use crate::process::Process;
use crate::space::Space;
use crate::stop::Stop;

impl Process<Message> {
    pub fn doing(
        name: impl Into<String>,
        space: &Space,
        job: Job,
    ) -> anyhow::Result<Process<Message>> {
        let assignment = Assignment {
            url: space.url().to_owned(),
            prefix: space.lock_prefix(),
            job,
        };
        Process::spawn(name, "demo-process", &assignment)
    }

    /// For a process that holds, or will soon: the token of its grant.
    pub fn grant(&self, stop: &Stop, limit: Duration) -> anyhow::Result<u64> {
        match self.message(stop, limit)? {
            Message::Held { token } => Ok(token),
            other => Err(self.unexpected("Held", &other)),
        }
    }

    /// What the guard says of itself: whether it is lost, and what `check()` objects to.
    pub fn condition(&mut self, stop: &Stop) -> anyhow::Result<(bool, Option<String>)> {
        self.order(&Order::Report)?;
        match self.message(stop, PATIENCE)? {
            Message::Condition { lost, objection } => Ok((lost, objection)),
            other => Err(self.unexpected("Condition", &other)),
        }
    }

    /// Lets it unlock: what `unlock()` objects to.
    pub fn release(&mut self, stop: &Stop) -> anyhow::Result<Option<String>> {
        self.order(&Order::Release)?;
        match self.message(stop, PATIENCE)? {
            Message::Released { objection } => Ok(objection),
            other => Err(self.unexpected("Released", &other)),
        }
    }
}
