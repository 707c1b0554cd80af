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
use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::stop::Stop;

/// For the end of a process that takes no orders any more.
const LAST_WORDS: Duration = Duration::from_secs(60);

/// A process that says `M`.
pub struct Process<M> {
    name: String,
    child: Child,
    orders: ChildStdin,
    messages: Receiver<anyhow::Result<M>>,
}

impl<M: DeserializeOwned + Debug + Send + 'static> Process<M> {
    /// This program once more, as its hidden `command`.
    pub fn spawn(
        name: impl Into<String>,
        command: &str,
        assignment: &impl Serialize,
    ) -> anyhow::Result<Process<M>> {
        let program = env::current_exe().context("cannot find this program's own file")?;
        Process::start(name, Command::new(program).arg(command), assignment)
    }

    /// Told its `assignment` on its input: everybody on the machine can read a command line, and a URL may
    /// hold a password. In a process group of its own: Ctrl-C is for the parent, which ends its processes
    /// itself.
    pub fn start(
        name: impl Into<String>,
        command: &mut Command,
        assignment: &impl Serialize,
    ) -> anyhow::Result<Process<M>> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
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
        let Err(error) = self.orders.write_all(line.as_bytes()) else {
            return Ok(());
        };
        // Why it ended is in what it said last.
        while self.hear(LAST_WORDS)?.is_some() {}
        Err(error).with_context(|| format!("{} takes no orders", self.name))
    }

    /// Its next message; none within `limit` is a failure, and so is the end of the process.
    pub fn message(&self, stop: &Stop, limit: Duration) -> anyhow::Result<M> {
        match stop.receive(&self.messages, limit)? {
            Some(message) => message.with_context(|| self.name.clone()),
            None => bail!("{} said nothing for {limit:?}", self.name),
        }
    }

    /// Its next message, if it comes within `limit`, whether the user asks to stop or not. The end of the
    /// process is a failure.
    pub fn hear(&self, limit: Duration) -> anyhow::Result<Option<M>> {
        match self.messages.recv_timeout(limit) {
            Ok(message) => message.map(Some).with_context(|| self.name.clone()),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("{} has ended by itself", self.name),
        }
    }

    /// SIGKILL: when this returns, it does nothing more.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed.with_context(|| format!("cannot kill {}", self.name))?;
        Ok(())
    }

    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let signalled = kill_process(Pid::from_child(&self.child), signal);
        signalled.with_context(|| format!("{} has ended by itself", self.name))
    }

    pub fn name(&self) -> &str {
        &self.name
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

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> anyhow::Result<Process<u32>> {
        Process::start("it", Command::new("sh").args(["-c", text]), &())
    }

    #[test]
    fn what_it_said_last_is_why_it_takes_no_orders() -> anyhow::Result<()> {
        let mut process =
            script(r#"read assignment; echo '{"Ok": 1}'; echo '{"Err": "no luck"}'"#)?;
        let refusal = loop {
            if let Err(refusal) = process.order(&()) {
                break refusal;
            }
        };
        assert_eq!(format!("{refusal:#}"), "it: no luck");
        Ok(())
    }

    #[test]
    fn it_may_be_silent_for_as_long_as_it_lives() -> anyhow::Result<()> {
        let mut process = script("read assignment; read order")?;
        assert_eq!(process.hear(Duration::ZERO)?, None);
        process.order(&())?;
        let end = process.hear(LAST_WORDS).expect_err("it has said nothing");
        assert_eq!(format!("{end:#}"), "it: has ended by itself");
        Ok(())
    }
}
