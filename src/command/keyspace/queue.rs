//! The queue of a key in the model: who waits, and who is granted the key next.

use std::time::Duration;

use crate::command::keyspace::{
    Entry, KEPT_UNCONFIRMED, Keyspace, Notification, Step, clock_micros, token,
};
use crate::command::value::Doubt;
use crate::command::{FIRST_USUAL_PLACE, GrantMessage, QueueMode, Queued};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

/// The most waiters in a queue, and the most waiters that one grant skips.
const MAX_QUEUE: usize = 10_000;
/// How many of the first waiters are near the front, and send a request each second.
const NEAR: usize = 8;
/// A queue outlives its lock by at least this time. A request that finds less time left sets twice this time.
const QUEUE_OUTLIVES: Duration = Duration::from_secs(10);
/// The ttl of a grant to a waiter that polls.
const KEPT_FOR_POLLING: Duration = Duration::from_millis(100);
/// The ttl of a grant to a waiter that polled too late for an earlier grant.
const KEPT_LONGER: Duration = Duration::from_secs(1);
/// A waiter that joined longer ago than this, or than a third of its ttl, has to confirm its grant.
const CONFIRMED_AFTER: Duration = Duration::from_secs(1);
/// A waiter with a ttl of this length or less has to confirm its grant if it joined longer ago than this: a third of its
/// ttl would be too short.
const SHORT_TTL: Duration = Duration::from_millis(500);
/// A waiter has a quarter of its ttl to confirm its grant, limited to this least and this greatest time.
const UNCONFIRMED: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];
/// The time to confirm for a waiter that replied too late to an earlier grant.
const UNCONFIRMED_LATE: Duration = Duration::from_secs(3);
/// How long waiters have to reply to a roll call.
const ROLL_CALL: Duration = Duration::from_millis(500);
/// The most waiters that a roll call makes silent, the most that it removes, and the most that are asked to send a
/// request at once.
const CALLED: usize = 1000;
/// A waiter that was silent at a roll call has a place that is greater than its own by this.
const SILENT: u64 = 4_000_000_000_000_000;

/// The queue of a key. Never empty.
#[derive(Clone)]
pub struct Queue {
    /// The waiters, sorted by the time at which they joined.
    pub waiters: Vec<Waiter>,
    pub expires_at: MonotonicTime,
}

#[derive(Clone)]
pub struct Waiter {
    /// When the waiter joined, in µs.
    pub since: u64,
    pub lease: LeaseId,
    /// `None` for a waiter that polls.
    pub ttl: Option<Duration>,
    pub holder: HolderId,
}

impl Waiter {
    /// Whether the waiter replied too late to an earlier turn.
    pub fn was_late(&self) -> bool {
        self.since < FIRST_USUAL_PLACE
    }

    /// Whether the waiter was silent at the last roll call.
    pub fn is_silent(&self) -> bool {
        self.since >= SILENT
    }

    /// The time for the waiter to confirm a grant; `None` if the waiter need not confirm.
    pub fn time_to_confirm(&self, now_micros: u64) -> Option<Duration> {
        let [shortest, longest] = UNCONFIRMED;
        let ttl = self.ttl?;
        let waited = Duration::from_micros(now_micros.saturating_sub(self.since));
        let allowed = match ttl > SHORT_TTL {
            true => CONFIRMED_AFTER.min(ttl / 3),
            false => SHORT_TTL,
        };
        let quarter = Duration::from_millis(ttl.as_millis() as u64 / 4);
        let time = match self.was_late() {
            true => UNCONFIRMED_LATE,
            false => quarter.clamp(shortest, longest),
        };
        (waited > allowed).then(|| time.min(ttl))
    }

    /// The waiter's entry in the queue of Redis.
    pub fn entry(&self) -> String {
        let millis = self.ttl.map_or(0, |ttl| ttl.as_millis());
        format!("{},{millis},{}", self.lease, self.holder)
    }
}

impl Keyspace {
    /// Makes the key's queue outlive the lock, which expires in `left`. Returns the place of the waiter, or `None` if it
    /// is not queued: an entry beyond the bound of a queue is removed.
    pub fn stay_queued(
        &mut self,
        key: &Key,
        entry: &Waiter,
        left: Duration,
        asks_again: bool,
        now: MonotonicTime,
    ) -> Option<Queued> {
        let queue = self.queues.get_mut(key)?;
        let ahead = queue.find(entry)?;
        if ahead >= MAX_QUEUE {
            queue.waiters.remove(ahead);
            return None;
        }
        if asks_again || queue.expires_at < now.after(left + QUEUE_OUTLIVES) {
            let expires_at = now.after(left + 2 * QUEUE_OUTLIVES);
            queue.expires_at = queue.expires_at.max(expires_at);
        }
        Some(Queued {
            ahead: ahead as u64,
            since: queue.waiters[ahead].since,
        })
    }

    pub fn join(&mut self, key: &Key, own: &Waiter, queue_mode: QueueMode, now: MonotonicTime) {
        let micros = clock_micros(now);
        let queue = self.queues.entry(key.clone()).or_insert_with(|| Queue {
            waiters: Vec::new(),
            expires_at: now,
        });
        let newest = queue.waiters.iter().rfind(|waiter| !waiter.is_silent());
        let since = match (queue_mode, newest) {
            (QueueMode::Rejoin { since, .. }, _) => since,
            (_, Some(newest)) => micros.max(newest.since + 1),
            (_, None) => micros,
        };
        if let Some(place) = queue.find(own) {
            queue.waiters.remove(place);
        }
        queue.insert(Waiter {
            since,
            ..own.clone()
        });
    }

    /// Grants the key to the first waiter that listens, polls, or is the caller (`own`: its lease and ttl). Returns the
    /// waiter's lease and the µs of its token.
    pub fn serve(
        &mut self,
        key: &Key,
        own: Option<(LeaseId, Duration)>,
        step: &mut Step<'_>,
    ) -> Option<(LeaseId, u64)> {
        for gone in 1..=MAX_QUEUE {
            let queue = self.queues.get_mut(key)?;
            if queue.waiters[0].is_silent() {
                // All others are silent, too.
                let queue = self.queues.remove(key)?;
                notify_called(key, &queue.waiters, step);
                return None;
            }
            let first = queue.waiters.remove(0);
            if queue.waiters.is_empty() {
                self.queues.remove(key);
            }
            let own_ttl = own.filter(|(lease, _)| *lease == first.lease);
            let is_notified = first.ttl.is_some() && own_ttl.is_none();
            if is_notified && !(step.listens)(&first.holder) {
                // The waiter's client does not listen any more, so its entry is skipped.
                continue;
            }
            let unconfirmed = first
                .time_to_confirm(clock_micros(step.now))
                .filter(|_| is_notified);
            let asked = own_ttl.map(|(_, ttl)| ttl).or(unconfirmed).or(first.ttl);
            let kept = if first.was_late() {
                KEPT_LONGER
            } else {
                KEPT_FOR_POLLING
            };
            let ttl = asked.unwrap_or(kept);
            let more = self.queues.contains_key(key);
            let micros = self.grant(key, &first, ttl, more, step);
            if let (Some(_), Some(Entry::Lock(lock))) = (unconfirmed, self.entries.get_mut(key)) {
                lock.doubt = Some(Doubt::Unconfirmed);
                lock.expires_at = lock.expires_at.after(KEPT_UNCONFIRMED);
            }
            if is_notified {
                step.notifications.push(Notification::Granted {
                    to: first.holder,
                    key: key.clone(),
                    lease: first.lease,
                    grant: GrantMessage {
                        token: token(micros),
                        to_confirm: unconfirmed.is_some(),
                    },
                });
            }
            self.notify_near(key, gone, step);
            return Some((first.lease, micros));
        }
        // The next request serves the rest of the queue.
        self.notify_near(key, MAX_QUEUE, step);
        None
    }

    /// Ends a grant that was not confirmed in time: calls the roll, or deletes the key if the roll was called before or
    /// there are no other waiters. Returns the time for which the key stays granted; `None` if the key was deleted.
    pub fn end_late_grant(
        &mut self,
        key: &Key,
        doubt: Doubt,
        own: &Waiter,
        step: &mut Step<'_>,
    ) -> Option<Duration> {
        let left = match doubt {
            Doubt::Unconfirmed => self.call_roll(key, own, step),
            Doubt::RollCalled => None,
        };
        if left.is_none() {
            self.entries.remove(key);
            step.notifications.push(Notification::Changed(key.clone()));
        }
        left
    }

    /// Calls the roll of the queue: makes all waiters but the caller, whose entry is `own`, silent. Returns the time
    /// for which the key stays granted, or `None` if there are no other waiters.
    pub fn call_roll(&mut self, key: &Key, own: &Waiter, step: &mut Step<'_>) -> Option<Duration> {
        let queue = self.queues.get_mut(key)?;
        let mut missing = 0..CALLED;
        queue
            .waiters
            .retain(|waiter| !(waiter.is_silent() && missing.next().is_some()));
        let is_own = |waiter: &Waiter| {
            (waiter.lease, waiter.ttl) == (own.lease, own.ttl) && waiter.holder == own.holder
        };
        let mut rest = queue.waiters.split_off(CALLED.min(queue.waiters.len()));
        let (own, mut called): (Vec<_>, Vec<_>) = queue.waiters.drain(..).partition(is_own);
        rest.extend(own);
        if called.is_empty() {
            queue.waiters = rest;
            return None;
        }
        notify_called(key, &called, step);
        called.iter_mut().for_each(|waiter| waiter.since += SILENT);
        rest.extend(called);
        for waiter in rest {
            queue.insert(waiter);
        }
        if let Some(Entry::Lock(lock)) = self.entries.get_mut(key) {
            lock.doubt = Some(Doubt::RollCalled);
            lock.expires_at = step.now.after(ROLL_CALL + KEPT_UNCONFIRMED);
            step.notifications.push(Notification::Changed(key.clone()));
        }
        Some(ROLL_CALL)
    }

    /// Notifies the waiters that came among the first [`NEAR`] when `gone` waiters left the queue.
    pub fn notify_near(&self, key: &Key, gone: usize, step: &mut Step<'_>) {
        let waiters = self.queues.get(key).map_or(&[][..], |queue| &queue.waiters);
        let near = waiters.iter().take(NEAR).skip(NEAR.saturating_sub(gone));
        for waiter in near.filter(|waiter| waiter.ttl.is_some()) {
            step.notifications.push(Notification::Near {
                to: waiter.holder.clone(),
                key: key.clone(),
                lease: waiter.lease.start(),
            });
        }
    }
}

impl Queue {
    /// Finds the entry of a waiter that joined to be notified or to poll. With `notify`, an entry that polls is
    /// notified from now on, and keeps its place.
    pub fn find_waiter(
        &mut self,
        notified: Waiter,
        polling: Waiter,
        notify: bool,
    ) -> Option<Waiter> {
        if self.find(&notified).is_some() {
            return Some(notified);
        }
        let place = self.find(&polling)?;
        if !notify {
            return Some(polling);
        }
        let since = self.waiters.remove(place).since;
        self.insert(Waiter {
            since,
            ..notified.clone()
        });
        Some(notified)
    }

    /// Gives a silent waiter its own place back.
    pub fn give_back_place(&mut self, entry: &Waiter) {
        let silent = self.find(entry).filter(|at| self.waiters[*at].is_silent());
        if let Some(at) = silent {
            let mut waiter = self.waiters.remove(at);
            waiter.since -= SILENT;
            self.insert(waiter);
        }
    }

    pub fn insert(&mut self, own: Waiter) {
        let behind = |waiter: &Waiter| (waiter.since, waiter.entry()) > (own.since, own.entry());
        let place = self.waiters.iter().position(behind);
        self.waiters
            .insert(place.unwrap_or(self.waiters.len()), own);
    }

    pub fn find(&self, entry: &Waiter) -> Option<usize> {
        let same = |waiter: &Waiter| {
            (waiter.lease, waiter.ttl, &waiter.holder) == (entry.lease, entry.ttl, &entry.holder)
        };
        self.waiters.iter().position(same)
    }
}

/// Asks the first waiters to send a request at once.
fn notify_called(key: &Key, waiters: &[Waiter], step: &mut Step<'_>) {
    let first = waiters.iter().take(CALLED);
    for waiter in first.filter(|waiter| waiter.ttl.is_some()) {
        step.notifications.push(Notification::Called {
            to: waiter.holder.clone(),
            key: key.clone(),
            lease: waiter.lease.start(),
        });
    }
}
