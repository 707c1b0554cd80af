//! A key's queue in the model: its waiters, and which waiter is granted the key next.

use std::time::Duration;

use crate::command::keyspace::{
    Entry, KEPT_UNCONFIRMED, Keyspace, Notification, Step, clock_micros, token,
};
use crate::command::value::Doubt;
use crate::command::{FIRST_USUAL_PLACE, GrantMessage, Mode, QueueMode, QueuePlace};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

/// A queue has at most this many waiters, and one request skips at most this many.
const MAX_QUEUE: usize = 10_000;
/// This many waiters at the front of a queue send a request each second.
const NEAR: usize = 8;
/// A queue's ttl exceeds its lock's ttl by at least this time. A request that finds a smaller difference sets it to
/// twice this time.
const QUEUE_OUTLIVES: Duration = Duration::from_secs(10);
/// The ttl of a grant to a waiter that polls.
const KEPT_FOR_POLLING: Duration = Duration::from_millis(100);
/// The ttl of a grant to a waiter that polls, if the waiter polled too late for an earlier grant.
const KEPT_LONGER: Duration = Duration::from_secs(1);
/// A waiter has to confirm its grant if it has waited for longer than this time, or than a third of its ttl.
const CONFIRMED_AFTER: Duration = Duration::from_secs(1);
/// A waiter with this ttl or a shorter one has to confirm its grant if it has waited for longer than this time. A third
/// of its ttl would be too short.
const SHORT_TTL: Duration = Duration::from_millis(500);
/// A waiter has a quarter of its ttl to confirm its grant, but at least the first and at most the second of these
/// times.
const UNCONFIRMED: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];
/// The time to confirm for a waiter that confirmed an earlier grant too late.
const UNCONFIRMED_LATE: Duration = Duration::from_secs(3);
/// How long waiters have to reply to a roll call.
pub const ROLL_CALL: Duration = Duration::from_millis(500);
/// A roll call makes at most this many waiters silent, and removes at most this many earlier silent ones. Redis asks at
/// most this many waiters to send a request at once.
const CALLED: usize = 1000;
/// A roll call adds this to the places of waiters, so that they come last. Their next request subtracts it.
const SILENT: u64 = 4_000_000_000_000_000;

/// If waiters can share a key, one request grants it to at most this many of them, because other clients of Redis have
/// to wait for that request.
const SERVED: usize = 128;
/// If the first waiter can have the key sooner than this, Redis asks it to send a request at once. Otherwise, the
/// waiter sends a request each second.
const SOON: Duration = Duration::from_secs(1);

/// The waiters that a request has granted a key.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Whether there are any.
    pub any: bool,
    /// The µs part of the token, if the sender of the request is one of them.
    pub own: Option<u64>,
    /// Set if the other waiters have to wait for replies to a roll call: the end of the roll call.
    pub called_until: Option<MonotonicTime>,
}

/// The queue of a key. A queue without waiters is removed.
#[derive(Clone)]
pub struct Queue {
    /// Sorted by their places (`since`).
    pub waiters: Vec<Waiter>,
    pub expires_at: MonotonicTime,
}

#[derive(Clone)]
pub struct Waiter {
    /// The waiter's place: the time at which it joined, in µs.
    pub since: u64,
    pub lease: LeaseId,
    pub mode: Mode,
    /// `None` for a waiter that polls.
    pub ttl: Option<Duration>,
    pub holder: HolderId,
}

impl Waiter {
    /// The waiter of a request, before it has a place.
    pub fn new(lease: LeaseId, mode: Mode, ttl: Option<Duration>, holder: &HolderId) -> Self {
        Self {
            since: 0,
            lease,
            mode,
            ttl,
            holder: holder.clone(),
        }
    }

    /// Whether the waiter confirmed an earlier grant too late.
    pub fn was_late(&self) -> bool {
        self.since < FIRST_USUAL_PLACE
    }

    /// Whether the waiter has sent no request since the last roll call.
    pub fn is_silent(&self) -> bool {
        self.since >= SILENT
    }

    /// The place that a silent waiter had before the roll call.
    fn own_place(&self) -> u64 {
        self.since - SILENT
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

    /// Whether both waiters have the same entry in Redis.
    fn has_entry_of(&self, other: &Self) -> bool {
        (self.lease, self.mode, self.ttl, &self.holder)
            == (other.lease, other.mode, other.ttl, &other.holder)
    }

    /// The waiter's entry in the queue, as Redis stores it.
    pub fn entry(&self) -> String {
        let millis = self.ttl.map_or(0, |ttl| ttl.as_millis());
        format!("{},{millis}{},{}", self.lease, self.mode, self.holder)
    }
}

impl Keyspace {
    /// Extends the queue's ttl beyond the ttl of the lock, which expires in `left`. Returns the waiter's place. Returns
    /// `None` if the waiter is not in the queue, and removes it if its place is beyond [`MAX_QUEUE`].
    pub fn stay_queued(
        &mut self,
        key: &Key,
        entry: &Waiter,
        left: Duration,
        asks_again: bool,
        now: MonotonicTime,
    ) -> Option<QueuePlace> {
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
        Some(QueuePlace {
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

    /// Grants the key to the first waiter that listens for notifications, polls, or sent this request. `own` has the
    /// lease and the ttl of the request. If several waiters can share the key, grants it to all of them, in their
    /// order, but to [`SERVED`] at most. While waiters may still reply to a roll call of a shared key, no waiter is
    /// granted a share before a silent waiter with an earlier place.
    pub fn serve(
        &mut self,
        key: &Key,
        own: Option<(LeaseId, Duration)>,
        step: &mut Step<'_>,
    ) -> Served {
        let mut served = Served::default();
        let (mut gone, mut shares_given) = (0, 0);
        let silent = self.first_silent(key, step.now);
        for _ in 0..MAX_QUEUE {
            let Some(queue) = self.queues.get_mut(key) else {
                return served;
            };
            let first = queue.waiters[0].clone();
            if let Some((place, called_until)) = silent
                && first.since >= place
            {
                served.called_until = Some(called_until);
                break;
            }
            if first.is_silent() {
                // Silent waiters come last, so all others are silent, too.
                if let Some(queue) = self.queues.remove(key) {
                    notify_called(key, &queue.waiters, step);
                }
                return served;
            }
            let own_ttl = own.filter(|(lease, _)| *lease == first.lease);
            let is_notified = first.ttl.is_some() && own_ttl.is_none();
            if is_notified && !(step.listens)(&first.holder) {
                // The waiter's client has stopped listening, so its entry is skipped.
                self.remove_first(key);
                gone += 1;
                continue;
            }
            if let Some(Entry::Shares(shares)) = self.entries.get(key) {
                let wait = shares.wait_for(first.mode, step.now);
                let has_changed = gone > 0 || own.is_none();
                let is_soon = wait.is_some_and(|wait| wait < SOON) && has_changed;
                if (is_soon && own_ttl.is_none()) || (wait.is_none() && shares_given == SERVED) {
                    notify_called(key, &[first], step);
                    break;
                }
                if wait.is_some() {
                    break;
                }
            }
            self.remove_first(key);
            gone += 1;
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
            let is_exclusive = first.mode.is_exclusive();
            let micros = match is_exclusive {
                true => self.grant(key, &first, ttl, more, step),
                false => {
                    let doubt = unconfirmed.map(|_| Doubt::Unconfirmed);
                    self.give(key, &first, ttl, doubt, step)
                }
            };
            shares_given += usize::from(!is_exclusive);
            served.any = true;
            if own_ttl.is_some() {
                served.own = Some(micros);
            }
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
            if is_exclusive {
                break;
            }
        }
        // The next request serves the rest of the queue.
        self.notify_near(key, gone, step);
        served
    }

    /// The own place of the first waiter that may still reply to a roll call of a shared key, and the end of the roll
    /// call.
    fn first_silent(&self, key: &Key, now: MonotonicTime) -> Option<(u64, MonotonicTime)> {
        let ends_at = self.roll_call_end(key, now)?;
        let mut waiters = self.queues.get(key)?.waiters.iter();
        let silent = waiters.find(|waiter| waiter.is_silent())?;
        Some((silent.own_place(), ends_at))
    }

    fn remove_first(&mut self, key: &Key) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.waiters.remove(0);
            if queue.waiters.is_empty() {
                self.queues.remove(key);
            }
        }
    }

    /// Asks the first waiter to send a request at once.
    pub fn call_first(&self, key: &Key, step: &mut Step<'_>) {
        if let Some(queue) = self.queues.get(key) {
            notify_called(key, &queue.waiters[..1], step);
        }
    }

    /// Handles a grant that its waiter has not confirmed in time. Calls the roll; if the roll was called before or
    /// there are no other waiters, deletes the key. Returns the time for which the key stays granted, or `None` if it
    /// was deleted.
    pub fn end_late_grant(
        &mut self,
        key: &Key,
        doubt: Doubt,
        own: &Waiter,
        step: &mut Step<'_>,
    ) -> Option<Duration> {
        let is_called = doubt == Doubt::Unconfirmed && self.call_roll(key, Some(own), step);
        match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) if is_called => {
                lock.doubt = Some(Doubt::RollCalled);
                lock.expires_at = step.now.after(ROLL_CALL + KEPT_UNCONFIRMED);
            }
            _ => _ = self.entries.remove(key),
        }
        step.changed(key);
        is_called.then_some(ROLL_CALL)
    }

    /// Calls the roll: makes all waiters of the queue silent except `own`, the sender of this request. Returns false if
    /// there are no other waiters.
    pub fn call_roll(&mut self, key: &Key, own: Option<&Waiter>, step: &mut Step<'_>) -> bool {
        let Some(queue) = self.queues.get_mut(key) else {
            return false;
        };
        let mut missing = 0..CALLED;
        queue
            .waiters
            .retain(|waiter| !(waiter.is_silent() && missing.next().is_some()));
        let is_own = |waiter: &Waiter| own.is_some_and(|own| waiter.has_entry_of(own));
        let mut rest = queue.waiters.split_off(CALLED.min(queue.waiters.len()));
        let (own, mut called): (Vec<_>, Vec<_>) = queue.waiters.drain(..).partition(is_own);
        rest.extend(own);
        if called.is_empty() {
            queue.waiters = rest;
            if queue.waiters.is_empty() {
                self.queues.remove(key);
            }
            return false;
        }
        notify_called(key, &called, step);
        called.iter_mut().for_each(|waiter| waiter.since += SILENT);
        rest.extend(called);
        for waiter in rest {
            queue.insert(waiter);
        }
        true
    }

    /// Notifies the waiters that have come among the first [`NEAR`], after `gone` waiters left the queue.
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
    /// Finds the waiter's entry: `notified`, or `polling` if the waiter joined to poll. With `notify`, replaces
    /// `polling` by `notified`, at the same place.
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

    /// If the waiter is silent, gives it back the place that it had before the roll call.
    pub fn give_back_place(&mut self, entry: &Waiter) {
        let silent = self.find(entry).filter(|at| self.waiters[*at].is_silent());
        if let Some(at) = silent {
            let mut waiter = self.waiters.remove(at);
            waiter.since = waiter.own_place();
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
        let mut waiters = self.waiters.iter();
        waiters.position(|waiter| waiter.has_entry_of(entry))
    }
}

/// Asks these waiters, at most [`CALLED`], to send a request at once.
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
