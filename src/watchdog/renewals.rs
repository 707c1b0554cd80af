//! Renewals that are due and wait for a worker. The lease that ends first goes first (earliest deadline first: Liu
//! and Layland, 1973): a short one is not lost behind a crowd of long ones, which have more time left.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use crate::clock::Moment;
use crate::lease::Lease;
use crate::sync::{Condvar, Mutex};

/// Not bounded by itself: a lease is not due again before a change of its ttl has ended. (One that is extended
/// while its renewal waits here may come once more.)
#[derive(Default)]
pub(crate) struct Renewals {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// By the first end of validity among them, then as they came.
    batches: BTreeMap<(Moment, u64), Vec<Arc<Lease>>>,
    came: u64,
    ended: bool,
}

impl Renewals {
    /// Adds leases that are to be renewed together.
    pub(crate) fn add(&self, leases: Vec<Arc<Lease>>) {
        let Some(first_end) = leases.iter().map(|lease| lease.valid_until()).min() else {
            return;
        };
        let mut waiting = self.waiting.lock();
        if waiting.ended {
            return;
        }
        let nth = waiting.came;
        waiting.came += 1;
        waiting.batches.insert((first_end, nth), leases);
        drop(waiting);
        self.changed.notify_one();
    }

    /// Waits for the next ones; nothing once ended.
    pub(crate) fn next(&self) -> Option<Vec<Arc<Lease>>> {
        let mut waiting = self.waiting.lock();
        loop {
            if waiting.ended {
                return None;
            }
            if let Some((_, leases)) = waiting.batches.pop_first() {
                return Some(leases);
            }
            self.changed.wait(&mut waiting);
        }
    }

    /// The next ones, if some wait.
    pub(crate) fn try_next(&self) -> Option<Vec<Arc<Lease>>> {
        let next = self.waiting.lock().batches.pop_first();
        next.map(|(_, leases)| leases)
    }

    /// Sends the workers away, now and from now on.
    pub(crate) fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        let left = mem::take(&mut waiting.batches);
        drop(waiting);
        self.changed.notify_all();
        // Where nothing is locked: leases own what their users put there.
        drop(left);
    }
}
