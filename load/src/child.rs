//! A process of a command: how it hears and speaks, one JSON value per line. Ends it as soon as its input
//! ends, so that none is left behind whatever becomes of the parent.

use std::io::{self, Write as _};
use std::process::{self, ExitCode};
use std::thread;

use anyhow::Context as _;
use crossbeam_channel::{Receiver, unbounded};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Does `work` with what it was assigned, its first line, and with the orders that follow, a line each.
/// Its failure is told to the parent.
pub fn run<A, O>(work: impl FnOnce(A, Receiver<O>) -> anyhow::Result<()>) -> ExitCode
where
    A: DeserializeOwned,
    O: DeserializeOwned + Send + 'static,
{
    let outcome = assignment().and_then(|assignment| work(assignment, listen()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without a parent there is nobody left to tell.
            let _ = write(&Err::<(), _>(format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// Tells the parent: as `{"Ok": message}`, where a failure is `{"Err": reason}`.
///
/// # Errors
/// The parent does not listen any more.
pub fn say(message: &impl Serialize) -> anyhow::Result<()> {
    write(&Ok::<_, String>(message))
}

fn assignment<A: DeserializeOwned>() -> anyhow::Result<A> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    serde_json::from_str(&line).context("this is for other commands only; see `cargo xtask --help`")
}

fn write(line: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(line)?;
    line.push('\n');
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes())?;
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
