//! The parent's handle of a process of the soak. When the process is killed, a new one takes its place.

use std::time::Duration;

use anyhow::bail;
use leasehold_testbed::Process as Child;
use rustix::process::Signal;

use crate::messages::{Assignment, Message, Order, Raced};

/// The limit for starting a process on a busy machine.
const START: Duration = Duration::from_secs(60);

pub struct Process {
    assignment: Assignment,
    current: Child<Message>,
}

impl Process {
    /// Starts a process, and returns before it is ready.
    pub fn start(assignment: Assignment) -> anyhow::Result<Self> {
        let Assignment { process, life, .. } = &assignment;
        let name = format!("process {process}-{life}");
        let current = Child::again(name, &["--process"], &assignment)?;
        Ok(Self {
            assignment,
            current,
        })
    }

    pub fn wait_until_ready(&self) -> anyhow::Result<()> {
        match self.current.try_message(START)? {
            Some(Message::Ready) => Ok(()),
            other => bail!("{} sent {other:?} instead of Ready", self.name()),
        }
    }

    pub fn name(&self) -> &str {
        self.current.name()
    }

    /// Makes the process acquire this many locks that only this process wants. Returns the number that it has got.
    pub fn hold(&mut self, count: usize) -> anyhow::Result<usize> {
        self.current.order(&Order::Hold { count })?;
        match self.reply()? {
            Message::Holding { count } => Ok(count),
            other => bail!("{} sent {other:?} instead of Holding", self.name()),
        }
    }

    /// Makes the process drop these locks, and returns once it has done so.
    pub fn drop_held(&mut self) -> anyhow::Result<()> {
        self.current.order(&Order::Drop)?;
        match self.reply()? {
            Message::Dropped => Ok(()),
            other => bail!("{} sent {other:?} instead of Dropped", self.name()),
        }
    }

    /// Makes this many clients of the process want one key for some time.
    pub fn contend(&mut self, clients: usize, time: Duration) -> anyhow::Result<()> {
        let millis = time.as_millis() as u64;
        self.current.order(&Order::Contend { clients, millis })
    }

    /// Makes clients for a race, each with this many threads.
    pub fn prepare_race(&mut self, threads: Vec<usize>) -> anyhow::Result<()> {
        self.current.order(&Order::Race { threads })?;
        match self.reply()? {
            Message::AtStart => Ok(()),
            other => bail!("{} sent {other:?} instead of AtStart", self.name()),
        }
    }

    /// Starts the race, which ends at this moment.
    pub fn go(&mut self, until: u64) -> anyhow::Result<()> {
        self.current.order(&Order::Go { until })
    }

    /// Waits until all clients have ended, and returns their work. `None` if they have not ended within `limit`.
    pub fn raced(&self, limit: Duration) -> anyhow::Result<Option<Raced>> {
        match self.current.try_message(limit)? {
            Some(Message::Raced(raced)) => Ok(Some(raced)),
            Some(other) => Err(self.current.unexpected("Raced", &other)),
            None => Ok(None),
        }
    }

    fn reply(&self) -> anyhow::Result<Message> {
        loop {
            match self.current.try_message(START)? {
                // The process was restarted, and this first message was not read yet.
                Some(Message::Ready) => {}
                Some(answer) => return Ok(answer),
                None => bail!("{} does not reply", self.name()),
            }
        }
    }

    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.current.order(&Order::Finish)
    }

    /// The threads that the process reports as left once it has finished, and whether a client is kept;
    /// `None` if it does not report within `limit`.
    pub fn remaining(&self, limit: Duration) -> anyhow::Result<Option<(Vec<String>, bool)>> {
        match self.current.try_message(limit)? {
            Some(Message::Finished { threads, is_kept }) => Ok(Some((threads, is_kept))),
            // An earlier message that was not read: the process was restarted, or its race took too long.
            Some(Message::Ready | Message::Raced(_)) => self.remaining(limit),
            Some(other) => Err(self.current.unexpected("Finished", &other)),
            None => Ok(None),
        }
    }

    /// Kills the process with SIGKILL, and starts a new one in its place.
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

    /// Reads the messages so far. Fails if the process has failed.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.current.try_message(Duration::ZERO)? {
            None | Some(Message::Ready) => Ok(()),
            Some(other) => Err(self.current.unexpected("nothing", &other)),
        }
    }
}
