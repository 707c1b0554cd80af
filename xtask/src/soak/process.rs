//! A process of the soak as its parent sees it: one life after the other, in the same place.

use std::time::Duration;

use anyhow::bail;
use leasehold_testbed::Process as Child;
use rustix::process::Signal;

use super::messages::{Assignment, Message, Order, Raced};

/// For a process to start, on the busiest of machines.
const START: Duration = Duration::from_secs(60);

pub struct Process {
    assignment: Assignment,
    current: Child<Message>,
}

impl Process {
    /// Not ready yet when this returns.
    pub fn start(assignment: Assignment) -> anyhow::Result<Self> {
        let Assignment { process, life, .. } = &assignment;
        let name = format!("process {process}-{life}");
        let current = Child::again(name, &["soak-process"], &assignment)?;
        Ok(Self {
            assignment,
            current,
        })
    }

    pub fn wait_until_ready(&self) -> anyhow::Result<()> {
        match self.current.hear(START)? {
            Some(Message::Ready) => Ok(()),
            other => bail!("{} said {other:?} instead of Ready", self.name()),
        }
    }

    pub fn name(&self) -> &str {
        self.current.name()
    }

    /// Has it hold so many locks that nobody else wants. How many it has got.
    pub fn hold(&mut self, count: usize) -> anyhow::Result<usize> {
        self.current.order(&Order::Hold { count })?;
        match self.hear_answer()? {
            Message::Holding { count } => Ok(count),
            other => bail!("{} said {other:?} instead of Holding", self.name()),
        }
    }

    /// Has it drop them, and returns once it has.
    pub fn drop_held(&mut self) -> anyhow::Result<()> {
        self.current.order(&Order::Drop)?;
        match self.hear_answer()? {
            Message::Dropped => Ok(()),
            other => bail!("{} said {other:?} instead of Dropped", self.name()),
        }
    }

    /// Has so many of its clients want one key for some time.
    pub fn crowd(&mut self, clients: usize, time: Duration) -> anyhow::Result<()> {
        let millis = time.as_millis() as u64;
        self.current.order(&Order::Crowd { clients, millis })
    }

    /// Has it make clients for a race, each with so many threads.
    pub fn prepare_race(&mut self, threads: Vec<usize>) -> anyhow::Result<()> {
        self.current.order(&Order::Race { threads })?;
        match self.hear_answer()? {
            Message::AtStart => Ok(()),
            other => bail!("{} said {other:?} instead of AtStart", self.name()),
        }
    }

    /// Has them race until this moment.
    pub fn go(&mut self, until: u64) -> anyhow::Result<()> {
        self.current.order(&Order::Go { until })
    }

    /// What they did, once all of them have gone; `None` if they have not within `limit`.
    pub fn raced(&self, limit: Duration) -> anyhow::Result<Option<Raced>> {
        match self.current.hear(limit)? {
            Some(Message::Raced(raced)) => Ok(Some(raced)),
            Some(other) => Err(self.current.unexpected("Raced", &other)),
            None => Ok(None),
        }
    }

    fn hear_answer(&self) -> anyhow::Result<Message> {
        loop {
            match self.current.hear(START)? {
                // It was started anew, and nobody waited for that.
                Some(Message::Ready) => {}
                Some(answer) => return Ok(answer),
                None => bail!("{} gives no answer", self.name()),
            }
        }
    }

    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.current.order(&Order::Finish)
    }

    /// What it says is left once it has finished: threads, and whether a client is kept; `None` if it has not within `limit`.
    pub fn left_behind(&self, limit: Duration) -> anyhow::Result<Option<(Vec<String>, bool)>> {
        match self.current.hear(limit)? {
            Some(Message::Finished { threads, is_kept }) => Ok(Some((threads, is_kept))),
            // It was started anew, and nobody waited for that; or it raced for longer than it was waited for.
            Some(Message::Ready | Message::Raced(_)) => self.left_behind(limit),
            Some(other) => Err(self.current.unexpected("Finished", &other)),
            None => Ok(None),
        }
    }

    /// SIGKILL, and the next life.
    pub fn kill_and_start_anew(&mut self) -> anyhow::Result<()> {
        self.current.kill()?;
        let mut assignment = self.assignment.clone();
        assignment.life += 1;
        *self = Self::start(assignment)?;
        Ok(())
    }

    pub fn life(&self) -> usize {
        self.assignment.life
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.current.signal(signal)
    }

    /// What it has said for itself in between: only that it has begun, or has failed.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.current.hear(Duration::ZERO)? {
            None | Some(Message::Ready) => Ok(()),
            Some(other) => Err(self.current.unexpected("nothing", &other)),
        }
    }
}
