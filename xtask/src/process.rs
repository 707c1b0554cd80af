//! A process of a command as its parent sees it: orders in, messages out, one JSON value per line.
//! Dropped, it is killed: no process outlives what it was started for. `leasehold_load::child` is its other
//! side.

use std::env;
use std::fmt::Debug;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use crossbeam_channel::{Receiver, unbounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::stop::Stop;

/// A process that says `M`.
pub struct Process<M> {
    name: String,
    child: Child,
    orders: ChildStdin,
    messages: Receiver<anyhow::Result<M>>,
}

impl<M: DeserializeOwned + Debug + Send + 'static> Process<M> {
    /// This program once more, as its hidden `command`, told its `assignment` (on its input: everybody
    /// on the machine can read a command line, and a URL may hold a password). In a process group of its
    /// own: Ctrl-C is for the parent, which ends its processes itself.
    pub fn spawn(
        name: impl Into<String>,
        command: &str,
        assignment: &impl Serialize,
    ) -> anyhow::Result<Process<M>> {
        let program = env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(program)
            .arg(command)
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
        process.order(assignment)?;
        Ok(process)
    }

    pub fn order(&mut self, order: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let written = self.orders.write_all(line.as_bytes());
        written.with_context(|| format!("{} has ended by itself", self.name))
    }

    /// Its next message; none within `limit` is a failure, and so is the end of the process.
    pub fn message(&self, stop: &Stop, limit: Duration) -> anyhow::Result<M> {
        match stop.receive(&self.messages, limit)? {
            Some(message) => message.with_context(|| self.name.clone()),
            None => bail!("{} said nothing for {limit:?}", self.name),
        }
    }

    /// SIGKILL: it gets to do nothing more.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child
            .kill()
            .with_context(|| format!("cannot kill {}", self.name))
    }

    pub fn unexpected(&self, wanted: &str, got: &M) -> anyhow::Error {
        anyhow!("{} said {got:?} where it should say {wanted}", self.name)
    }
}

impl<M> Drop for Process<M> {
    fn drop(&mut self) {
        // Both fail only for a process that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen<M: DeserializeOwned + Send + 'static>(
    output: ChildStdout,
) -> Receiver<anyhow::Result<M>> {
    let (sender, messages) = unbounded();
    thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let message = line.map_err(anyhow::Error::from).and_then(|line| {
                let said: Result<M, String> =
                    serde_json::from_str(&line).with_context(|| format!("cannot read {line:?}"))?;
                said.map_err(anyhow::Error::msg)
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
