//! One of several processes that compete for one key: its threads acquire and release the lock as fast as they can, and
//! it reports every grant.

use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;
use leasehold::crossbeam_channel::Receiver;
use leasehold::{Client, Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::{role, support};

pub const KEY: &str = "wanted";

/// A grant to one thread.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct Grant {
    pub token: u64,
    /// When its thread had the lock, on the clock of all processes, in ns.
    pub entered: u64,
}

/// The report of one process.
#[derive(Default, Serialize, Deserialize)]
pub struct WorkerReport {
    pub threads: Vec<Vec<Grant>>,
    /// How often each wait from a request to its grant occurred: (µs, count).
    waits: Vec<(u64, u64)>,
}

/// How the threads acquire and release the lock.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum Way {
    /// With a guard that is dropped.
    Guard,
    /// With `Mutex::with`.
    Closure,
}

#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    pub threads: usize,
    pub way: Way,
    pub window: Duration,
}

/// The role of the worker: competes from the ordered time, in ns, until the window ends.
pub fn work(assignment: Assignment, orders: Receiver<u64>) -> anyhow::Result<()> {
    let client = Client::open(&assignment.url)?;
    let mutex = client.mutex(KEY);
    // Connections are made before the start.
    mutex.lock()?.unlock()?;
    role::ready()?;
    let start = orders.recv()?;
    let end = start + assignment.window.as_nanos() as u64;
    let mut waits = support::histogram();
    let mut report = WorkerReport::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..assignment.threads)
            .map(|_| scope.spawn(|| compete(&mutex, assignment.way, start, end)))
            .collect();
        for thread in threads {
            let (grants, waited) = thread.join().expect("it does not panic")?;
            report.threads.push(grants);
            waits += waited;
        }
        Ok::<_, leasehold::Error>(())
    })?;
    let steps = waits.iter_recorded();
    let steps = steps.map(|step| (step.value_iterated_to(), step.count_at_value()));
    report.waits = steps.collect();
    role::report(report)
}

/// One thread: its grants, and the wait for each.
fn compete(
    mutex: &Mutex,
    way: Way,
    start: u64,
    end: u64,
) -> Result<(Vec<Grant>, Histogram<u64>), leasehold::Error> {
    let mut grants = Vec::new();
    let mut waits = support::histogram();
    thread::sleep(Duration::from_nanos(
        start.saturating_sub(support::nanoseconds()),
    ));
    loop {
        let asked = support::nanoseconds();
        if asked >= end {
            return Ok((grants, waits));
        }
        let enter = |guard: &MutexGuard| Grant {
            entered: support::nanoseconds(),
            token: guard.fencing_token(),
        };
        let grant = match way {
            Way::Guard => enter(&mutex.lock()?),
            Way::Closure => mutex.with(enter)?,
        };
        grants.push(grant);
        support::record(&mut waits, Duration::from_nanos(grant.entered - asked));
    }
}

impl WorkerReport {
    pub fn waits(&self) -> Histogram<u64> {
        let mut waits = support::histogram();
        for (micros, count) in &self.waits {
            waits.saturating_record_n(*micros, *count);
        }
        waits
    }
}
