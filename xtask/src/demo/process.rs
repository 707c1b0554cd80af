//! A process of the demo as its parent sees it: orders in, messages out. Dropped, it is killed: no
//! process outlives the scene it plays in.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use crossbeam_channel::{Receiver, unbounded};
use serde::Serialize;

use super::PATIENCE;
use super::messages::{Job, Message, Order};
use super::space::Space;
use crate::stop::Stop;

pub struct Process {
    name: String,
    child: Child,
    orders: ChildStdin,
    messages: Receiver<anyhow::Result<Message>>,
}

impl Process {
    /// This program once more. In a process group of its own: Ctrl-C is for the parent, which ends
    /// its processes itself.
    pub fn start(name: impl Into<String>, space: &Space, job: Job) -> anyhow::Result<Process> {
        let program = env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .arg("demo-process")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a process")?;
        let orders = child.stdin.take().expect("its input is piped");
        let messages = listen(child.stdout.take().expect("its output is piped"));
        let mut process = Process {
            name: name.into(),
            child,
            orders,
            messages,
        };
        process.write(&space.assignment(job))?;
        Ok(process)
    }

    pub fn order(&mut self, order: Order) -> anyhow::Result<()> {
        self.write(&order)
    }

    /// Its next message; none within `limit` is a failure, and so is the end of the process.
    pub fn message(&self, stop: &Stop, limit: Duration) -> anyhow::Result<Message> {
        match stop.receive(&self.messages, limit)? {
            Some(Ok(Message::Failed { why })) => Err(anyhow!("{}: {why}", self.name)),
            Some(message) => message.with_context(|| self.name.clone()),
            None => bail!("{} said nothing for {limit:?}", self.name),
        }
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
        self.order(Order::Report)?;
        match self.message(stop, PATIENCE)? {
            Message::Condition { lost, objection } => Ok((lost, objection)),
            other => Err(self.unexpected("Condition", &other)),
        }
    }

    /// Lets it unlock: what `unlock()` objects to.
    pub fn release(&mut self, stop: &Stop) -> anyhow::Result<Option<String>> {
        self.order(Order::Release)?;
        match self.message(stop, PATIENCE)? {
            Message::Released { objection } => Ok(objection),
            other => Err(self.unexpected("Released", &other)),
        }
    }

    /// SIGKILL: it gets to do nothing more.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child
            .kill()
            .with_context(|| format!("cannot kill {}", self.name))
    }

    pub fn unexpected(&self, wanted: &str, got: &Message) -> anyhow::Error {
        anyhow!("{} said {got:?} where it should say {wanted}", self.name)
    }

    fn write(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        let written = self.orders.write_all(line.as_bytes());
        written.with_context(|| format!("{} has ended by itself", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(output: ChildStdout) -> Receiver<anyhow::Result<Message>> {
    let (sender, messages) = unbounded();
    thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let message = line.map_err(anyhow::Error::from).and_then(|line| {
                serde_json::from_str(&line).with_context(|| format!("cannot read {line:?}"))
            });
            if sender.send(message).is_err() {
                return;
            }
        }
        // The parent may have stopped listening: then nobody misses this.
        let _ = sender.send(Err(anyhow!("has ended by itself")));
    });
    messages
}
