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

use crate::lease::{Lease, LeasesByKey};
use crate::store::MAX_RENEWALS;
use crate::util::clock::MonotonicTime;
use crate::util::sync::{Condvar, Mutex};

/// What a worker takes where nothing has had to wait: so few that Redis is done with those of all workers in half
/// a ms, and turns to others.
pub(super) const AT_A_TIME: usize = if cfg!(all(test, shuttle)) { 1 } else { 32 };
/// The longer some have been waiting, the more are renewed at a time, the most of all after this: a slow network or
/// a slow machine needs fewer round trips. Some ms of Redis, which any command time-out should leave room for.
const LATE: Duration = Duration::from_millis(250);

/// The next task of a worker.
pub(crate) enum Work {
    Renew(Vec<Arc<Lease>>),
    /// Ask whether these are held: they seem to be lost.
    Confirm(LeasesByKey),
    /// Ask whether these are held: messages say that they were taken away.
    ConfirmForce(Vec<Arc<Lease>>),
}

/// Bounded by the leases: one is not due again before a change of its ttl has ended. (For each time that it is
/// extended while it acquirer here it may come once more.)
#[derive(Default)]
pub(super) struct Renewals {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// By the end of validity when they came, then as they came.
    leases: BTreeMap<(MonotonicTime, u64), Arc<Lease>>,
    came: u64,
    /// Those that seem to be lost. Bounded by the leases that are tracked.
    doubted: LeasesByKey,
    /// Those of which a message says that they were taken away. Bounded by the leases: each is here once.
    forced: Vec<Arc<Lease>>,
    round: Option<Round>,
    ended: bool,
}

/// Those that waited at one moment: how long it takes until all of them have been taken tells how late the workers
/// are, whatever comes meanwhile and goes before them. The next ones begin with few at a time again.
struct Round {
    since: MonotonicTime,
    /// They came before this one.
    end: u64,
    left: usize,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.doubted.len() == 0 && self.forced.is_empty()
    }

    /// Each with the end of its validity.
    fn add(&mut self, leases: Vec<(MonotonicTime, Arc<Lease>)>) {
        for (until, lease) in leases {
            self.leases.insert((until, self.came), lease);
            self.came += 1;
        }
    }

    /// Some for one round trip.
    fn take(&mut self, now: MonotonicTime) -> Vec<Arc<Lease>> {
        let going_on = self.round.take().filter(|round| round.left > 0);
        let mut round = going_on.unwrap_or(Round {
            since: now,
            end: self.came,
            left: self.leases.len(),
        });
        let late = now.since(round.since).div_duration_f64(LATE).min(1.0);
        let most = AT_A_TIME + ((MAX_RENEWALS - AT_A_TIME) as f64 * late) as usize;
        let pop = || {
            let ((_, came), lease) = self.leases.pop_first()?;
            round.left -= usize::from(came < round.end);
            Some(lease)
        };
        let taken = std::iter::from_fn(pop).take(most).collect();
        self.round = Some(round);
        taken
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
            waiting.add(leases);
        }
        drop(waiting);
        self.changed.notify_one();
    }

    /// Queues a lease that seems to be lost, before all renewals, to be confirmed by a worker.
    pub(super) fn queue_confirmation(&self, lease: Arc<Lease>) {
        let mut waiting = self.waiting.lock();
        let before = if waiting.ended {
            Some(lease)
        } else {
            waiting.doubted.insert(lease)
        };
        drop(waiting);
        drop(before);
        self.changed.notify_one();
    }

    /// Queues a lease of which a message says that it was taken away, before all renewals.
    pub(super) fn queue_force_confirmation(&self, lease: Arc<Lease>) {
        let mut waiting = self.waiting.lock();
        if !waiting.ended {
            waiting.forced.push(lease);
        }
        drop(waiting);
        self.changed.notify_one();
    }

    /// Acquirer for some, to be renewed or confirmed together; nothing once ended.
    pub(super) fn next(&self) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        while waiting.is_empty() && !waiting.ended {
            self.changed.wait(&mut waiting);
        }
        if waiting.ended {
            return None;
        }
        let work = if waiting.doubted.len() > 0 {
            Work::Confirm(mem::take(&mut waiting.doubted))
        } else if !waiting.forced.is_empty() {
            Work::ConfirmForce(mem::take(&mut waiting.forced))
        } else {
            Work::Renew(waiting.take(MonotonicTime::now()))
        };
        let are_more = !waiting.is_empty();
        drop(waiting);
        if are_more {
            // The other worker's.
            self.changed.notify_one();
        }
        Some(work)
    }

    /// Sends the workers away, now and from now on.
    pub(super) fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        let left = (
            mem::take(&mut waiting.leases),
            mem::take(&mut waiting.doubted),
            mem::take(&mut waiting.forced),
        );
        drop(waiting);
        self.changed.notify_all();
        // Where nothing is locked: leases own what their users put there.
        drop(left);
    }
}

fn with_ends(leases: Vec<Arc<Lease>>) -> Vec<(MonotonicTime, Arc<Lease>)> {
    let with_end = |lease: Arc<Lease>| (lease.valid_until(), lease);
    leases.into_iter().map(with_end).collect()
}
