//! The child's side of the protocol between a process and its parent; [`Process`](crate::Process) is the
//! parent's side. Ends the child when its input ends, so that no child outlives its parent.
//!
//! A message is one line. The parent sends JSON values: first the child's assignment, then orders. The child sends
//! [`MARK`] and `{"Ok": message}`, or [`MARK`] and `{"Err": reason}` before it fails. The parent ignores other text on
//! the child's standard output, such as that of a test harness.

use std::io::{self, Write as _};
use std::process::{self, ExitCode};
use std::thread;

use anyhow::Context as _;
use crossbeam_channel::{Receiver, unbounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Precedes each message of a child.
pub const MARK: &str = "@ ";

/// Runs `work` with its assignment and the orders that follow. Reports a failure to the parent.
pub fn run<A, O>(work: impl FnOnce(A, Receiver<O>) -> anyhow::Result<()>) -> ExitCode
where
    A: DeserializeOwned,
    O: DeserializeOwned + Send + 'static,
{
    let outcome = assignment().and_then(|(assignment, orders)| work(assignment, orders));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            fail(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Reads the assignment, and starts a thread that receives orders and ends the process when its input ends.
///
/// # Errors
/// The first line of the input is no assignment.
pub fn assignment<A, O>() -> anyhow::Result<(A, Receiver<O>)>
where
    A: DeserializeOwned,
    O: DeserializeOwned + Send + 'static,
{
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    let assignment = serde_json::from_str(&line)
        .context("only another program starts this one: its input is no assignment")?;
    Ok((assignment, listen()))
}

/// Sends the parent a message.
///
/// # Errors
/// The parent does not read any more.
pub fn say(message: &impl Serialize) -> anyhow::Result<()> {
    write(&Ok::<_, String>(message))
}

/// Tells the parent why this process is about to end.
pub fn fail(reason: &str) {
    // An error means that the parent has ended, so the message is not needed.
    let _ = write(&Err::<(), _>(reason));
}

fn write(line: &impl Serialize) -> anyhow::Result<()> {
    let line = serde_json::to_string(line)?;
    let mut output = io::stdout().lock();
    output.write_all(format!("{MARK}{line}\n").as_bytes())?;
    Ok(output.flush()?)
}

fn listen<O: DeserializeOwned + Send + 'static>() -> Receiver<O> {
    let (sender, orders) = unbounded();
    thread::spawn(move || {
        for line in io::stdin().lines() {
            let order = line.ok().and_then(|line| serde_json::from_str(&line).ok());
            match order {
                Some(order) => sender.send(order).unwrap_or(()),
                None => break,
            }
        }
        process::exit(1);
    });
    orders
}
