//! The queue of the workers that renew leases and confirm losses.
//!
//! The workers first renew the lease that ends first (earliest deadline first: Liu and Layland, 1973). So a lease with
//! a short ttl is not lost while leases with more time left are renewed. Under overload, each lease is renewed just
//! before its end, and none is lost while the machine manages one renewal per lease and ttl. Confirmations go before
//! renewals, except those after missed messages ([`LossReport::Missed`]).
//!
//! On a Cluster, a script call has keys of one slot only. So a worker takes renewals of one slot together, up to
//! [`SLOT_GROUP`]. The next renewals of these leases are due together, too. Under overload the groups grow, and the
//! calls become fewer.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use crate::lease::Lease;
use crate::store::ServerId;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::slot::Slot;
use crate::util::sync::{Condvar, Mutex};

/// A worker takes at least this many renewals, if that many are due. Redis handles one such batch from each worker in
/// half a millisecond in total, and then serves other clients.
pub const MIN_BATCH: usize = if cfg!(all(test, shuttle)) { 1 } else { 32 };
/// If renewals have waited for this long, a batch is as large as the store allows, which takes Redis some milliseconds.
/// A batch grows with the time of waiting, because fewer round trips help a slow network or machine.
const FULL_BATCH_AFTER: Duration = Duration::from_millis(250);

/// On a Cluster, a worker takes at most this many renewals of one slot together, and sends them in one script call.
/// That costs less than a call for each renewal. With larger groups, leases of other slots that end earlier would wait
/// longer.
pub const SLOT_GROUP: usize = 16;

/// The source of a report that a lease was lost. The reply to a request has to confirm the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LossReport {
    /// A read of the key did not find the lease.
    KeyRead,
    /// A message reports that a client unlocked the lease by force. Any user may publish such a message.
    ForceMessage,
    /// Messages may have been missed, or the server was flushed. Used for shares only, since their keys are not
    /// tracked. Each new notification connection reports all shares of the client, which may be thousands. So these
    /// confirmations wait while renewals are due, and a renewal finds a loss, too.
    Missed,
}

/// Leases to confirm. A client may have several leases of one key.
pub type LeasesById = BTreeMap<LeaseId, Arc<Lease>>;

/// The leases that a worker handles together.
pub enum RenewalBatch {
    Renew(Vec<Arc<Lease>>),
    /// Ask whether these leases are held.
    Confirm(LossReport, LeasesById),
}

/// The queues of all servers. Each has workers of its own, so a server that does not reply does not delay renewals on
/// another server.
pub struct RenewalQueues(Mutex<BTreeMap<ServerId, Arc<RenewalQueue>>>);

impl Default for RenewalQueues {
    /// Contains the queue of [`ServerId::ONLY`].
    fn default() -> Self {
        let first = (ServerId::ONLY, Arc::default());
        Self(Mutex::new(BTreeMap::from([first])))
    }
}

impl RenewalQueues {
    /// The queue of `server`. A server without a queue gets a new one if `start_workers` returns true for it; otherwise
    /// it shares the queue of [`ServerId::ONLY`].
    pub fn of(
        &self,
        server: ServerId,
        start_workers: impl FnOnce(&Arc<RenewalQueue>) -> bool,
    ) -> Arc<RenewalQueue> {
        let mut queues = self.0.lock();
        if let Some(queue) = queues.get(&server) {
            return Arc::clone(queue);
        }
        let new = Arc::default();
        let queue = match start_workers(&new) {
            true => new,
            false => Arc::clone(&queues[&ServerId::ONLY]),
        };
        queues.insert(server, Arc::clone(&queue));
        queue
    }

    /// Ends all queues.
    pub fn end(&self) {
        // Leases are dropped after the unlock: they may own values of users.
        let queues: Vec<_> = self.0.lock().values().map(Arc::clone).collect();
        queues.iter().for_each(|queue| queue.end());
    }
}

/// The leases on one server that wait for a worker. The number of held leases bounds the queue, since a renewal is not
/// due again until a change of the ttl has ended. (But a lease that is extended while it is queued may be queued
/// twice.) The queue is not a `Mailbox`, because an addition wakes only one worker, and the queue counts idle workers.
#[derive(Default)]
pub struct RenewalQueue {
    waiting: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// Leases to renew, by the end of their validity when they were queued, then by the number of the renewal.
    renewals: BTreeMap<(MonotonicTime, u64), Arc<Lease>>,
    /// The keys of `renewals` with the slots of their locks. `None` if slots do not matter.
    by_slot: Option<BTreeSet<(Slot, MonotonicTime, u64)>>,
    /// The number of renewals that were ever queued.
    added: u64,
    /// Leases to confirm, each at most once for each kind of report.
    to_confirm: BTreeMap<LossReport, LeasesById>,
    round: Option<Round>,
    /// The number of workers.
    workers: usize,
    /// The number of workers that wait for leases.
    idle: usize,
    ended: bool,
}

/// The renewals that were queued at one moment. While some of them are left, the age of the round shows how late the
/// workers are. A renewal that is queued later may be taken first, but does not change the age. The next round begins
/// with small batches again.
struct Round {
    since: MonotonicTime,
    /// The renewals of the round have numbers below this one.
    end: u64,
    left: usize,
}

impl QueueState {
    fn is_empty(&self) -> bool {
        self.renewals.is_empty() && self.to_confirm.is_empty()
    }

    /// Queues renewals, each with the end of its lease's validity.
    fn add_renewals(&mut self, leases: Vec<(MonotonicTime, Arc<Lease>)>) {
        for (until, lease) in leases {
            if let Some(by_slot) = &mut self.by_slot {
                by_slot.insert((lease.grant().key.slot(), until, self.added));
            }
            self.renewals.insert((until, self.added), lease);
            self.added += 1;
        }
    }

    /// Takes leases to confirm, if some of them are due now.
    fn take_confirmations(&mut self, at_a_time: usize) -> Option<RenewalBatch> {
        let mut first = self.to_confirm.first_entry()?;
        let report = *first.key();
        if report != LossReport::Missed {
            return Some(RenewalBatch::Confirm(report, first.remove()));
        }
        if !self.renewals.is_empty() {
            return None;
        }
        let leases = first.get_mut();
        let rest = match leases.keys().nth(at_a_time).copied() {
            Some(next) => leases.split_off(&next),
            None => LeasesById::new(),
        };
        let taken = mem::replace(leases, rest);
        if leases.is_empty() {
            first.remove();
        }
        Some(RenewalBatch::Confirm(report, taken))
    }

    /// Takes the renewals for one round trip, at most `at_a_time`: those of the leases that end first. On a Cluster,
    /// also takes other renewals of their slots.
    fn take_renewals(&mut self, now: MonotonicTime, at_a_time: usize) -> Vec<Arc<Lease>> {
        let current = self.round.take().filter(|round| round.left > 0);
        let mut round = current.unwrap_or(Round {
            since: now,
            end: self.added,
            left: self.renewals.len(),
        });
        let lateness = now.since(round.since);
        let share = lateness.div_duration_f64(FULL_BATCH_AFTER).min(1.0);
        let most = MIN_BATCH + (at_a_time.saturating_sub(MIN_BATCH) as f64 * share) as usize;
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some((first, lease)) = self.renewals.pop_first()
        {
            let others = self.take_others_of_slot(&lease, first, most - taken.len());
            taken.push(lease);
            round.left -= usize::from(first.1 < round.end);
            for (number, other) in others {
                round.left -= usize::from(number < round.end);
                taken.push(other);
            }
        }
        self.round = Some(round);
        taken
    }

    /// On a Cluster, takes further renewals of the slot of `lease`, whose own renewal is `first`. Together with
    /// `first`, these are at most [`SLOT_GROUP`] renewals, and at most `most`. Also returns the number of each renewal.
    fn take_others_of_slot(
        &mut self,
        lease: &Lease,
        first: (MonotonicTime, u64),
        most: usize,
    ) -> Vec<(u64, Arc<Lease>)> {
        let Some(by_slot) = &mut self.by_slot else {
            return Vec::new();
        };
        let slot = lease.grant().key.slot();
        let first = (slot, first.0, first.1);
        let of_slot = by_slot.range(first..).take_while(|next| next.0 == slot);
        let group: Vec<_> = of_slot.take(most.min(SLOT_GROUP)).copied().collect();
        for renewal in &group {
            by_slot.remove(renewal);
        }
        let others = group.into_iter().skip(1);
        others
            .filter_map(|(_, until, number)| {
                let lease = self.renewals.remove(&(until, number))?;
                Some((number, lease))
            })
            .collect()
    }
}

impl RenewalQueue {
    /// Makes workers take renewals of one slot together.
    pub fn group_by_slot(&self) {
        self.waiting.lock().by_slot.get_or_insert_default();
    }

    pub fn add(&self, leases: Vec<Arc<Lease>>) {
        if leases.is_empty() {
            return;
        }
        // This call locks each lease, so it comes before the lock of the queue: other threads lock a lease first, and
        // then the queue.
        let leases = with_ends(leases);
        let mut waiting = self.waiting.lock();
        if !waiting.ended {
            waiting.add_renewals(leases);
        }
        drop(waiting);
        self.changed.notify_one();
    }

    /// Records one more worker.
    pub fn add_worker(&self) {
        self.waiting.lock().workers += 1;
    }

    /// Records one more worker and returns true, if leases wait, all workers are busy, and there are fewer than `most`.
    pub fn add_worker_if_missing(&self, most: usize) -> bool {
        let mut waiting = self.waiting.lock();
        let is_missing = !waiting.is_empty() && waiting.idle == 0 && waiting.workers < most;
        waiting.workers += usize::from(is_missing);
        is_missing
    }

    /// Records one worker less, because a thread could not be started.
    pub fn remove_worker(&self) {
        self.waiting.lock().workers -= 1;
    }

    /// Queues a lease to be confirmed.
    pub fn queue_confirmation(&self, lease: Arc<Lease>, report: LossReport) {
        let mut waiting = self.waiting.lock();
        let replaced = if waiting.ended {
            Some(lease)
        } else {
            let leases = waiting.to_confirm.entry(report).or_default();
            leases.insert(lease.grant().id, lease)
        };
        drop(waiting);
        // Drop the lease after the unlock: it may own values of users.
        drop(replaced);
        self.changed.notify_one();
    }

    /// Waits for leases to confirm or to renew. Returns at most `at_a_time` to renew, or to confirm after missed
    /// messages. Returns `None` after the queue has ended.
    pub fn wait_for_batch(&self, at_a_time: usize) -> Option<RenewalBatch> {
        let mut waiting = self.waiting.lock();
        while waiting.is_empty() && !waiting.ended {
            waiting.idle += 1;
            self.changed.wait(&mut waiting);
            waiting.idle -= 1;
        }
        if waiting.ended {
            return None;
        }
        let batch = waiting.take_confirmations(at_a_time).unwrap_or_else(|| {
            RenewalBatch::Renew(waiting.take_renewals(MonotonicTime::now(), at_a_time))
        });
        let are_more = !waiting.is_empty();
        drop(waiting);
        if are_more {
            // Wake the other worker, if there is one, for the rest.
            self.changed.notify_one();
        }
        Some(batch)
    }

    /// Ends the workers, and drops everything that is queued.
    pub fn end(&self) {
        let mut waiting = self.waiting.lock();
        waiting.ended = true;
        waiting.by_slot = None;
        let left = (
            mem::take(&mut waiting.renewals),
            mem::take(&mut waiting.to_confirm),
        );
        drop(waiting);
        self.changed.notify_all();
        // Drop the leases after the unlock: they may own values of users.
        drop(left);
    }
}

/// For each of these leases, a number from 0.0 to 1.0 that spreads its next renewal. With `by_slot`, renewals of one
/// slot that were sent together have the same number, so that they are due together again.
pub fn jitters<'a>(
    leases: impl IntoIterator<Item = &'a Arc<Lease>>,
    by_slot: bool,
) -> impl Iterator<Item = f64> {
    let mut group: Option<(Slot, f64)> = None;
    let mut left = 0;
    leases.into_iter().map(move |lease| {
        let grant = lease.grant();
        let own = grant.id.jitter();
        if !by_slot {
            return own;
        }
        let slot = grant.key.slot();
        match group {
            Some((of, jitter)) if of == slot && left > 0 => {
                left -= 1;
                jitter
            }
            _ => {
                (group, left) = (Some((slot, own)), SLOT_GROUP - 1);
                own
            }
        }
    })
}

fn with_ends(leases: Vec<Arc<Lease>>) -> Vec<(MonotonicTime, Arc<Lease>)> {
    let with_end = |lease: Arc<Lease>| (lease.valid_until(), lease);
    leases.into_iter().map(with_end).collect()
}
