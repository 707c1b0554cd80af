//! Many locks of one client, held at the same time and dropped at once while the server is down.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use leasehold::{Client, Error, LossReason, MutexGuard};

use crate::messages::{Assignment, LONGEST_TTL};
use crate::worker::settings;

/// The number of threads that acquire the locks.
const TAKERS: usize = 8;
/// The limit for dropping all guards, on a busy machine and without optimization. A drop does no I/O while the server
/// is down.
const DROPS: Duration = Duration::from_secs(10);

/// The guards, and their client, which outlives them: it has to carry out their releases.
pub struct Mass {
    pub client: Client,
    guards: Vec<MutexGuard>,
}

impl Mass {
    /// Acquires `count` locks that only this client wants. Leaves out locks that it cannot acquire.
    pub fn take(assignment: &Assignment, count: usize) -> anyhow::Result<Self> {
        let client = settings(assignment, LONGEST_TTL).build_lazy()?;
        let process = assignment.process;
        let take = |taker: usize| {
            let mut guards = Vec::new();
            for n in (taker..count).step_by(TAKERS) {
                let mutex = client.mutex(format!("mass-{process}-{n}"));
                guards.extend(mutex.lock().ok());
            }
            guards
        };
        let guards = thread::scope(|scope| {
            let takers: Vec<_> = (0..TAKERS)
                .map(|taker| scope.spawn(move || take(taker)))
                .collect();
            let taken = takers
                .into_iter()
                .map(|taker| taker.join().map_err(|_| anyhow!("a taker panicked")));
            taken.collect::<anyhow::Result<Vec<_>>>()
        })?;
        let guards = guards.into_iter().flatten().collect();
        Ok(Self { client, guards })
    }

    pub fn len(&self) -> usize {
        self.guards.len()
    }

    /// Drops all guards; returns the violations.
    pub fn drop_all(&mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        for guard in &self.guards {
            let lost = guard.check().err();
            let reason = lost.as_ref().and_then(Error::loss_reason);
            // There was no other fault, so only the end of the ttl can end the lock.
            if reason.is_some_and(|reason| *reason != LossReason::Expired) {
                wrong.push(format!("one of many locks was lost: {guard:?}: {reason:?}"));
            }
        }
        let (count, started) = (self.guards.len(), Instant::now());
        self.guards.clear();
        let took = started.elapsed();
        if took > DROPS {
            wrong.push(format!("dropping {count} guards took {took:?}"));
        }
        wrong
    }
}
