//! Renewals that are due and wait for a worker. The lease that ends first goes first (earliest deadline first: Liu
//! and Layland, 1973): a short one is not lost behind a crowd of long ones, which have more time left. Where there
//! is too much to do, that renews each just before its end, as long as one renewal per ttl is possible. Knows no timer,
//! and asks nobody.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::lease::Lease;
use crate::store::MAX_RENEWALS;
use crate::sync::{Condvar, Mutex};

/// Workers that renew: while one works through the answers to a batch, Redis has the other's.
pub(super) const RENEWERS: usize = 2;
/// What a worker takes: so few that Redis is done with those of all workers in half a ms, and turns to others.
pub(super) const AT_A_TIME: usize = if cfg!(all(test, shuttle)) { 1 } else { 32 };
/// After the first has been waiting for this long, more are renewed at a time: a slow network or a slow machine needs
/// fewer round trips. Some ms of Redis, which any command time-out should leave room for.
const LATE: Duration = Duration::from_millis(250);

/// Bounded by the leases: one is not due again before a change of its ttl has ended. (For each time that it is
/// extended while it waits here it may come once more.)
#[derive(Default)]
pub(super) struct Renewals {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// By the end of validity when they came, then as they came.
    leases: BTreeMap<(Moment, u64), Waiter>,
    came: u64,
    ended: bool,
}

struct Waiter {
    lease: Arc<Lease>,
    since: Moment,
}

impl Waiting {
    /// Each with the end of its validity.
    fn add(&mut self, leases: Vec<(Moment, Arc<Lease>)>, now: Moment) {
        for (until, lease) in leases {
            let waiter = Waiter { lease, since: now };
            self.leases.insert((until, self.came), waiter);
            self.came += 1;
        }
    }

    /// Some for one round trip.
    fn take(&mut self, now: Moment) -> Vec<Arc<Lease>> {
        let first = self.leases.first_key_value();
        let late = first.is_some_and(|(_, first)| now.since(first.since) > LATE);
        let most = if late { MAX_RENEWALS } else { AT_A_TIME };
        let pop = || self.leases.pop_first().map(|(_, first)| first.lease);
        std::iter::from_fn(pop).take(most).collect()
    }
}

impl Renewals {
    pub(super) fn add(&self, leases: Vec<Arc<Lease>>) {
        if leases.is_empty() {
            return;
        }
        // Not under the queue's lock, which is then free to be taken under a lease's.
        let leases = with_ends(leases);
        let mut waiting = self.waiting.lock();
        if !waiting.ended {
            waiting.add(leases, Moment::now());
        }
        drop(waiting);
        self.changed.notify_one();
    }

    /// Waits for some, to be renewed together; nothing once ended.
    pub(super) fn next(&self) -> Option<Vec<Arc<Lease>>> {
        let mut waiting = self.waiting.lock();
        while waiting.leases.is_empty() && !waiting.ended {
            self.changed.wait(&mut waiting);
        }
        if waiting.ended {
            return None;
        }
        let taken = waiting.take(Moment::now());
        let are_more = !waiting.leases.is_empty();
        drop(waiting);
        if are_more {
            // The other worker's.
            self.changed.notify_one();
        }
        Some(taken)
    }

    /// Sends the workers away, now and from now on.
    pub(super) fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        let left = mem::take(&mut waiting.leases);
        drop(waiting);
        self.changed.notify_all();
        // Where nothing is locked: leases own what their users put there.
        drop(left);
    }
}

fn with_ends(leases: Vec<Arc<Lease>>) -> Vec<(Moment, Arc<Lease>)> {
    let with_end = |lease: Arc<Lease>| (lease.valid_until(), lease);
    leases.into_iter().map(with_end).collect()
}
