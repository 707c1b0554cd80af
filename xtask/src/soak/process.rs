//! A process of the soak as its parent sees it. Dropped, it is killed: no process outlives its round.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use rustix::process::{Pid, Signal, kill_process};

use super::messages::{Assignment, Message, Order};

/// For a process to start, on the busiest of machines.
const START: Duration = Duration::from_secs(60);

pub struct Process {
    assignment: Assignment,
    child: Child,
    orders: ChildStdin,
    messages: Receiver<anyhow::Result<Message>>,
}

impl Process {
    /// This program once more, in a process group of its own: Ctrl-C is for the parent.
    pub fn start(assignment: Assignment) -> anyhow::Result<Self> {
        let program = env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .arg("soak-process")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("cannot start a process")?;
        let orders = child.stdin.take().expect("its input is piped");
        let messages = listen(child.stdout.take().expect("its output is piped"));
        let mut process = Self {
            child,
            orders,
            messages,
            assignment,
        };
        let assignment = serde_json::to_string(&process.assignment)?;
        process.write(assignment)?;
        Ok(process)
    }

    pub fn wait_until_ready(&self) -> anyhow::Result<()> {
        match self.message(START)? {
            Some(Message::Ready) => Ok(()),
            other => bail!("{} said {other:?} instead of Ready", self.name()),
        }
    }

    pub fn name(&self) -> String {
        let Assignment { process, life, .. } = &self.assignment;
        format!("process {process}-{life}")
    }

    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.write(serde_json::to_string(&Order::Finish)?)
    }

    /// What it says is left once it has finished: threads, and whether a client is kept; `None` if it has not within `limit`.
    pub fn left_behind(&self, limit: Duration) -> anyhow::Result<Option<(Vec<String>, bool)>> {
        match self.message(limit)? {
            Some(Message::Finished { threads, is_kept }) => Ok(Some((threads, is_kept))),
            // It was started anew, and nobody waited for that.
            Some(Message::Ready) => self.left_behind(limit),
            Some(other) => bail!("{} said {other:?} instead of Finished", self.name()),
            None => Ok(None),
        }
    }

    /// SIGKILL, and the next life.
    pub fn kill_and_start_anew(&mut self) -> anyhow::Result<()> {
        let mut assignment = self.assignment.clone();
        assignment.life += 1;
        self.child.kill()?;
        self.child.wait()?;
        // Not ready yet when this returns; nobody waits for that.
        *self = Self::start(assignment)?;
        Ok(())
    }

    pub fn life(&self) -> usize {
        self.assignment.life
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let signalled = kill_process(Pid::from_child(&self.child), signal);
        signalled.with_context(|| format!("{} has ended by itself", self.name()))
    }

    /// What it has said for itself in between: only that it has begun, or has failed.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.message(Duration::ZERO)? {
            None | Some(Message::Ready) => Ok(()),
            Some(other) => bail!("{} said {other:?}", self.name()),
        }
    }

    fn message(&self, limit: Duration) -> anyhow::Result<Option<Message>> {
        match self.messages.recv_timeout(limit) {
            Ok(Ok(Message::Failed { why })) => Err(anyhow!("{}: {why}", self.name())),
            Ok(message) => message.map(Some).with_context(|| self.name()),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("{} has ended by itself", self.name()),
        }
    }

    fn write(&mut self, mut line: String) -> anyhow::Result<()> {
        line.push('\n');
        let written = self.orders.write_all(line.as_bytes());
        written.with_context(|| format!("{} has ended by itself", self.name()))
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
    });
    messages
}
