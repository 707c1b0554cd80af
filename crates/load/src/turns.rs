//! The messages of a process that locks and releases as often as its parent orders. `benches/quorum` measures such
//! processes. Its assignment is a list of the servers' URLs. It sends an empty [`Turns`] when it is connected, and
//! answers each order, a number of pairs, with the [`Turns`] of these pairs.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use leasehold_testbed::child::{self, say};
use serde::{Deserialize, Serialize};

use crate::machine::own_cpu;

/// The time that a number of pairs took.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Turns {
    /// The time of each lock with its release, in µs.
    pub micros: Vec<u64>,
    /// The CPU time of the process, in µs.
    pub cpu_micros: u64,
}

impl Turns {
    /// Runs `pair` `count` times.
    ///
    /// # Errors
    /// The first error of `pair`.
    pub fn run<E>(count: usize, mut pair: impl FnMut() -> Result<(), E>) -> Result<Self, E> {
        let whole = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let before = own_cpu();
        let mut micros = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            pair()?;
            micros.push(whole(start.elapsed()));
        }
        let cpu_micros = whole(own_cpu().saturating_sub(before));
        Ok(Self { micros, cpu_micros })
    }
}

/// Carries out the orders on the input of this process until the input ends. `connect` gets the URLs, and returns a
/// function that acquires and releases the lock once.
pub fn serve_turns<P>(connect: impl FnOnce(Vec<String>) -> anyhow::Result<P>) -> ExitCode
where
    P: FnMut() -> anyhow::Result<()>,
{
    child::run(|urls: Vec<String>, orders: Receiver<usize>| {
        let mut pair = connect(urls)?;
        say(&Turns::default())?;
        for count in orders {
            say(&Turns::run(count, &mut pair)?)?;
        }
        Ok(())
    })
}
