//! A process in a role: this program again. It sends a message when it is ready, and then its reports.

use std::error::Error;
use std::time::Duration;

use leasehold_testbed::{Process, child};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// How long a process may be silent, beyond the time of its work.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
enum Said<T> {
    Ready,
    Report(T),
}

/// The parent's side of a process that reports `T`. Dropping it kills the process.
pub struct Role<T>(Process<Said<T>>);

impl<T: DeserializeOwned + Send + 'static> Role<T> {
    /// Starts a process in the role `name`, and waits until it is ready.
    pub fn start(name: &str, assignment: &impl Serialize) -> Result<Self, Box<dyn Error>> {
        let process = Process::again(format!("a {name}"), &[name], assignment)?;
        match process.message(SILENCE)? {
            Said::Ready => Ok(Self(process)),
            Said::Report(_) => Err(format!("a {name} reported before it was ready").into()),
        }
    }

    pub fn order(&mut self, order: &impl Serialize) -> Result<(), Box<dyn Error>> {
        Ok(self.0.order(order)?)
    }

    /// The next report of the process.
    pub fn report(&self) -> Result<T, Box<dyn Error>> {
        match self.0.message(SILENCE)? {
            Said::Report(report) => Ok(report),
            Said::Ready => Err(format!("{} is ready twice", self.0.name()).into()),
        }
    }

    pub fn kill(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(self.0.kill()?)
    }
}

/// Tells the parent of this process that everything is set up.
pub fn ready() -> anyhow::Result<()> {
    child::say(&Said::<()>::Ready)
}

/// Sends a report to the parent of this process.
pub fn report(report: impl Serialize) -> anyhow::Result<()> {
    child::say(&Said::Report(report))
}
