//! The parent's side of the protocol between a process and its parent; [`child`](crate::child) is the other
//! side, and describes the protocol. Dropping a [`Process`] kills it.

use std::env;
use std::fmt::Debug;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::child::MARK;
use crate::eventually;

/// How long to wait for the last message of a process that accepts no more orders.
const LAST_WORDS: Duration = Duration::from_secs(60);

/// A process that sends messages of type `M`. Dropping it kills the process.
pub struct Process<M> {
    name: String,
    child: Child,
    orders: ChildStdin,
    messages: Receiver<anyhow::Result<M>>,
}

impl<M: DeserializeOwned + Send + 'static> Process<M> {
    /// Starts this program once more, with these `arguments`.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start).
    pub fn again(
        name: impl Into<String>,
        arguments: &[&str],
        assignment: &impl Serialize,
    ) -> anyhow::Result<Self> {
        let program = env::current_exe().context("cannot find this program's own file")?;
        Self::start(name, Command::new(program).args(arguments), assignment)
    }

    /// Starts `command` in a process group of its own: the parent gets Ctrl-C, and ends its processes itself. The
    /// assignment goes to the process's input, since every user of the machine can read a command line, and a URL may
    /// contain a password.
    ///
    /// # Errors
    /// The command cannot be started, or ends at once.
    pub fn start(
        name: impl Into<String>,
        command: &mut Command,
        assignment: &impl Serialize,
    ) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let orders = child.stdin.take().expect("its input is piped");
        let messages = listen(child.stdout.take().expect("its output is piped"));
        let mut process = Self {
            name: name.into(),
            child,
            orders,
            messages,
        };
        process.order(assignment)?;
        Ok(process)
    }

    /// Sends an order.
    ///
    /// # Errors
    /// The process has ended. The error contains the reason that the process gave, if it gave one.
    pub fn order(&mut self, order: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let Err(error) = self.orders.write_all(line.as_bytes()) else {
            return Ok(());
        };
        // The last message contains the reason why the process ended.
        while self.try_message(LAST_WORDS)?.is_some() {}
        Err(error).with_context(|| format!("{} accepts no orders", self.name))
    }

    /// The next message of the process, which must come within `limit`.
    ///
    /// # Errors
    /// No message comes within `limit`, or the process reports a failure, or has ended.
    pub fn message(&self, limit: Duration) -> anyhow::Result<M> {
        let message = self.try_message(limit)?;
        message.with_context(|| format!("{} sent nothing for {limit:?}", self.name))
    }

    /// The next message of the process, if one comes within `limit`.
    ///
    /// # Errors
    /// The process reports a failure, or has ended.
    pub fn try_message(&self, limit: Duration) -> anyhow::Result<Option<M>> {
        match self.messages.recv_timeout(limit) {
            Ok(message) => message.map(Some).with_context(|| self.name.clone()),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("{} has ended by itself", self.name),
        }
    }

    /// The channel of the process's messages, to select on together with other channels. The last message is an error.
    pub fn messages(&self) -> &Receiver<anyhow::Result<M>> {
        &self.messages
    }

    /// Waits for the process to end by itself, with success.
    ///
    /// # Errors
    /// The process fails, or does not end within `limit`. The error of a failure contains the reason that the process
    /// gave, if it gave one.
    pub fn finish(mut self, limit: Duration) -> anyhow::Result<()> {
        let status = self.status(limit)?;
        if status.success() {
            return Ok(());
        }
        let reason = loop {
            // The last message contains the reason why the process ended.
            match self.try_message(LAST_WORDS) {
                Ok(Some(_)) => {}
                Ok(None) => break format!("{} has ended by itself", self.name),
                Err(error) => break format!("{error:#}"),
            }
        };
        bail!("{reason} ({status})")
    }

    /// Waits for the process to end.
    ///
    /// # Errors
    /// The process does not end within `limit`.
    pub fn status(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let mut status = None;
        let ended = eventually(limit, || {
            status = self.child.try_wait().transpose();
            status.is_some()
        });
        ensure!(ended, "{} still runs after {limit:?}", self.name);
        Ok(status.expect("it has ended")?)
    }

    /// An error for a message that is not the `wanted` one.
    pub fn unexpected(&self, wanted: &str, got: &M) -> anyhow::Error
    where
        M: Debug,
    {
        anyhow!("{} sent {got:?} instead of {wanted}", self.name)
    }
}

impl<M> Process<M> {
    /// Ends the process with SIGKILL, and returns when it has ended.
    ///
    /// # Errors
    /// The system refuses it.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed.with_context(|| format!("cannot kill {}", self.name))?;
        Ok(())
    }

    /// Sends the process a signal.
    ///
    /// # Errors
    /// The process has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let signalled = kill_process(Pid::from_child(&self.child), signal);
        signalled.with_context(|| format!("{} has ended by itself", self.name))
    }

    /// The name of the process in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
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
            let message = match &line {
                Ok(line) => match line.split_once(MARK) {
                    Some((_, message)) => read(message),
                    None => continue,
                },
                Err(error) => Err(anyhow!("cannot read its output: {error}")),
            };
            if sender.send(message).is_err() {
                return;
            }
        }
        // An error means that the parent no longer listens, so the message is not needed.
        let _ = sender.send(Err(anyhow!("has ended by itself")));
    });
    messages
}

fn read<M: DeserializeOwned>(message: &str) -> anyhow::Result<M> {
    let said: Result<M, String> =
        serde_json::from_str(message).with_context(|| format!("cannot read {message:?}"))?;
    said.map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str) -> anyhow::Result<Process<u32>> {
        Process::start("it", Command::new("sh").args(["-c", text]), &())
    }

    #[test]
    fn a_failed_order_reports_the_last_message() -> anyhow::Result<()> {
        let mut process =
            script(r#"read assignment; echo '@ {"Ok": 1}'; echo '@ {"Err": "no luck"}'"#)?;
        let refusal = loop {
            if let Err(refusal) = process.order(&()) {
                break refusal;
            }
        };
        assert_eq!(format!("{refusal:#}"), "it: no luck");
        Ok(())
    }

    #[test]
    fn a_silent_running_process_is_no_error() -> anyhow::Result<()> {
        let mut process = script("read assignment; read order")?;
        assert_eq!(process.try_message(Duration::ZERO)?, None);
        process.order(&())?;
        let end = process
            .try_message(LAST_WORDS)
            .expect_err("a running process without messages");
        assert_eq!(format!("{end:#}"), "it: has ended by itself");
        Ok(())
    }

    #[test]
    fn text_before_and_between_messages_is_ignored() -> anyhow::Result<()> {
        let process = script(
            r#"read assignment; echo running; printf 'test .. '; echo '@ {"Ok": 7}'; echo end"#,
        )?;
        assert_eq!(process.message(LAST_WORDS)?, 7);
        process.finish(LAST_WORDS)
    }

    #[test]
    fn finish_fails_if_the_process_fails_or_continues() -> anyhow::Result<()> {
        for (text, reason) in [
            ("exit 3", "it: has ended by itself (exit status: 3)"),
            (
                r#"echo '@ {"Ok": 1}'; echo '@ {"Err": "no luck"}'; exit 1"#,
                "it: no luck (exit status: 1)",
            ),
        ] {
            let process = script(&format!("read assignment; {text}"))?;
            let failed = process.finish(LAST_WORDS).expect_err("it failed");
            assert_eq!(format!("{failed}"), reason);
        }
        let limit = Duration::from_millis(50);
        let hung = script("read assignment; read order")?.finish(limit);
        let hung = hung.expect_err("the process waits for an order");
        assert_eq!(format!("{hung}"), "it still runs after 50ms");
        Ok(())
    }
}
