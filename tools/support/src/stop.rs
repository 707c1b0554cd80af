//! Ctrl-C as an event that a thread can wait for together with others. After Ctrl-C, waits return an error, and the
//! values of their callers clean up as they are dropped.

use std::convert::Infallible;
use std::fmt;
use std::process::{self, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError, after, bounded, select};
use leasehold_testbed::Process;
use serde::de::DeserializeOwned;

/// The exit code that shells report for a program ended by Ctrl-C.
const EXIT_STOPPED: u8 = 130;

/// Runs a command to its end, or until the user stops it. Returns the exit code of the program.
pub fn run(command: impl FnOnce(&Stop) -> anyhow::Result<()>) -> ExitCode {
    let stop = match Stop::install() {
        Ok(stop) => stop,
        Err(error) => return failed(&error),
    };
    match command(&stop) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if stop.requested() && !error.is::<Finding>() => {
            eprintln!("stopped");
            ExitCode::from(EXIT_STOPPED)
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

/// An error that a command reports even after Ctrl-C. Any other error after Ctrl-C counts as caused by it.
#[derive(Debug)]
pub struct Finding(pub String);

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Finding {}

/// The user asked to stop.
#[derive(Debug)]
pub struct Stopped;

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stopped by the user")
    }
}

impl std::error::Error for Stopped {}

/// Whether the user has asked to stop, by Ctrl-C, SIGTERM or SIGHUP.
pub struct Stop {
    /// No message is ever sent. The channel disconnects when the user asks to stop, which wakes every waiter.
    asked: Receiver<Infallible>,
}

impl Stop {
    /// Handles Ctrl-C for the rest of the program. A second Ctrl-C ends the program at once.
    pub fn install() -> anyhow::Result<Stop> {
        let (sender, asked) = bounded(0);
        let mut sender = Some(sender);
        ctrlc::set_handler(move || {
            if sender.take().is_none() {
                process::exit(i32::from(EXIT_STOPPED));
            }
        })
        .context("cannot handle Ctrl-C")?;
        Ok(Stop { asked })
    }

    /// Whether the user has asked to stop.
    pub fn requested(&self) -> bool {
        self.asked.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// An error if the user has asked to stop.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.requested() {
            Err(Stopped)
        } else {
            Ok(())
        }
    }

    /// Waits for `time`.
    pub fn pause(&self, time: Duration) -> Result<(), Stopped> {
        match self.asked.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Stopped),
            Ok(never) => match never {},
        }
    }

    /// The next message of `source`, or `None` when `limit` passes or its sender is gone.
    pub fn receive<T>(&self, source: &Receiver<T>, limit: Duration) -> Result<Option<T>, Stopped> {
        let deadline = after(limit);
        select! {
            recv(self.asked) -> _ => Err(Stopped),
            recv(source) -> message => Ok(message.ok()),
            recv(deadline) -> _ => Ok(None),
        }
    }

    /// The next message of a process. Fails if no message comes within `limit`, or if the process ends.
    pub fn message<M>(&self, process: &Process<M>, limit: Duration) -> anyhow::Result<M>
    where
        M: DeserializeOwned + Send + 'static,
    {
        match self.receive(process.messages(), limit)? {
            Some(message) => message.with_context(|| process.name().to_owned()),
            None => bail!("{} sent nothing for {limit:?}", process.name()),
        }
    }
}
