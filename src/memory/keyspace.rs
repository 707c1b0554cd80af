//! The locks of a server in memory. Plain code does what each script does in Redis; a test compares both on generated
//! histories. Pure: the caller passes the time and delivers the notifications.

use std::sync::Arc;
use std::time::Duration;

use crate::command::value;
use crate::command::value::{Doubt, LockValue};
use crate::command::{
    Acquire, Adopt, Command, FIRST_USUAL_PLACE, ForceUnlock, GrantMessage, Hold, Inspect, Propose,
    QueueMode, Queued, Read, Release, Renew, Reply, TicketLease, Write,
};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::{Key, KeyMap};

/// A hold with this ttl sets no ttl, as in lua/hold.lua.
const ONLY_ASKS: Duration = Duration::from_millis(1);

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
/// A key outlives the time for the confirmation by this time.
const KEPT_UNCONFIRMED: Duration = Duration::from_secs(3);
/// How long waiters have to reply to a roll call.
const ROLL_CALL: Duration = Duration::from_millis(500);
/// The most waiters that a roll call makes silent, the most that it removes, and the most that are asked to send a
/// request at once.
const CALLED: usize = 1000;
/// A waiter that was silent at a roll call has a place that is greater than its own by this.
const SILENT: u64 = 4_000_000_000_000_000;
/// A client whose grant is younger than this may still be connecting for notifications.
const NEW_GRANT: Duration = Duration::from_secs(1);
/// The time at the start of the clock, in µs. It has sixteen digits, like all times of grants.
const FIRST_MICROS: u64 = 1_700_000_000_000_000;

/// The locks, fenced values and queues of a server.
#[derive(Clone, Default)]
pub struct Keyspace {
    entries: KeyMap<Entry>,
    queues: KeyMap<Queue>,
    /// The fence counter.
    last_micros: u64,
    /// The mark of a quorum's node; `None` if it is missing.
    mark: Option<Mark>,
}

/// The mark of a quorum's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The mark is of an earlier process.
    pub is_old: bool,
    /// Since when the node has had its data, in µs.
    pub since: u64,
}

#[derive(Clone)]
enum Entry {
    Lock(Lock),
    Fenced {
        token: u64,
        /// `None` once the value was deleted.
        value: Option<Arc<[u8]>>,
        expires_at: Option<MonotonicTime>,
    },
}

#[derive(Clone)]
struct Lock {
    lease: LeaseId,
    micros: u64,
    holder: HolderId,
    /// The release of the lock has to serve the queue.
    marked: bool,
    /// The mark of a grant that its waiter has not confirmed.
    doubt: Option<Doubt>,
    expires_at: MonotonicTime,
}

/// The queue of a key. Never empty.
#[derive(Clone)]
struct Queue {
    /// The waiters, sorted by the time at which they joined.
    waiters: Vec<Waiter>,
    expires_at: MonotonicTime,
}

#[derive(Clone)]
struct Waiter {
    /// When the waiter joined, in µs.
    since: u64,
    lease: LeaseId,
    /// `None` for a waiter that polls.
    ttl: Option<Duration>,
    holder: HolderId,
}

/// A notification to a client, or to the clients that track a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification {
    /// `lease`, which was queued, has the key.
    Granted {
        to: HolderId,
        key: Key,
        lease: LeaseId,
        grant: GrantMessage,
    },
    /// `lease` is now one of the first in its queue.
    Near {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
    },
    /// `lease` has to send a request at once, or it loses its place.
    Called {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
    },
    /// Another client took the key of `lease` by force.
    Forced {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
        by: HolderId,
    },
    /// The key was written to, deleted, or has expired.
    Changed(Key),
}

/// The context of one command.
pub struct Step<'a> {
    pub now: MonotonicTime,
    /// The client that sent the command.
    pub by: &'a HolderId,
    /// The length of a quarantine, if the server is a node of a quorum.
    pub quarantine: Duration,
    /// How far the server's clock is ahead, in µs. Only nodes of a quorum differ.
    pub ahead: u64,
    /// Whether a client can be notified.
    pub listens: &'a dyn Fn(&HolderId) -> bool,
    pub notifications: &'a mut Vec<Notification>,
}

impl Step<'_> {
    /// The time of the server's clock in µs.
    fn micros(&self) -> u64 {
        clock_micros(self.now) + self.ahead
    }
}

impl Waiter {
    /// Whether the waiter replied too late to an earlier turn.
    fn was_late(&self) -> bool {
        self.since < FIRST_USUAL_PLACE
    }

    /// Whether the waiter was silent at the last roll call.
    fn is_silent(&self) -> bool {
        self.since >= SILENT
    }

    /// The time for the waiter to confirm a grant; `None` if the waiter need not confirm.
    fn time_to_confirm(&self, now_micros: u64) -> Option<Duration> {
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
    fn entry(&self) -> String {
        let millis = self.ttl.map_or(0, |ttl| ttl.as_millis());
        format!("{},{millis},{}", self.lease, self.holder)
    }
}

impl Keyspace {
    /// Carries out a command, and adds its notifications to `step`.
    pub fn execute(&mut self, command: &Command, step: &mut Step<'_>) -> Result<Reply, Error> {
        if let Some(key) = command.key() {
            self.expire_key(key, step);
        }
        match command {
            Command::Acquire(Acquire {
                key,
                lease,
                ttl,
                queue_mode,
                ..
            }) => self.acquire(key, *lease, *ttl, *queue_mode, step),
            Command::Release(Release {
                key, lease, queued, ..
            }) => {
                let reply = self.release(key, *lease, *queued, None, step);
                Ok(self.unless_lost(reply, step))
            }
            Command::ForceUnlock(ForceUnlock {
                key,
                lease,
                must_notify,
            }) => {
                let reply = self.release(key, *lease, None, Some(*must_notify), step);
                Ok(self.unless_lost(reply, step))
            }
            Command::Renew(Renew {
                key, lease, ttl, ..
            }) => Ok(self.renew(key, *lease, *ttl, step)),
            Command::Adopt(Adopt { key, lease, grant }) => {
                let ticket = (grant.from, value::micros_of(grant.token));
                let ttl = grant.renew.then_some(grant.ttl);
                Ok(self.adopt(key, *lease, ticket, ttl, step))
            }
            Command::Inspect(Inspect { key }) => match self.lost(step) {
                Some(abstained) => Ok(abstained),
                None => self.inspect(key, step),
            },
            Command::Write(Write {
                key,
                token,
                value,
                ttl,
            }) => self.write(key, *token, value.as_ref(), *ttl, step),
            Command::Read(Read { key }) => self.read(key),
            Command::Propose(Propose {
                key,
                lease,
                ttl,
                micros,
                until,
                from,
            }) => {
                if let Some(refusal) = self.abstained(step).or(too_late(*until, step)) {
                    return Ok(refusal);
                }
                self.propose(key, *lease, *ttl, *micros, *from, step)
            }
            Command::Hold(Hold {
                key,
                lease,
                ttl,
                micros,
                sets_missing,
            }) => self.hold(key, *lease, *ttl, *micros, *sets_missing, step),
            Command::Probe(_) => {
                let micros = step.micros();
                Ok(self.abstained(step).unwrap_or(Reply::Clock { micros }))
            }
            Command::Flush => Ok(Reply::Done),
        }
    }

    fn acquire(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ttl: Duration,
        queue_mode: QueueMode,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        let own = Waiter {
            since: 0,
            lease,
            ttl: (!queue_mode.polls()).then_some(ttl),
            holder: step.by.clone(),
        };
        let is_queued = self.queues.contains_key(key) && queue_mode != QueueMode::None;
        let mut doubt = None;
        let mut left = match self.entries.get_mut(key) {
            Some(Entry::Fenced { .. }) => return Err(no_lock()),
            Some(Entry::Lock(lock)) if lock.lease == lease => {
                // The lease was granted the key while it was queued.
                lock.expires_at = step.now.after(ttl);
                lock.doubt = None;
                step.notifications.push(Notification::Changed(key.clone()));
                let token = token(lock.micros);
                return Ok(Reply::granted(token));
            }
            Some(Entry::Lock(lock)) if queue_mode != QueueMode::None => {
                doubt = lock.doubt;
                Some(lock.left(step.now))
            }
            Some(Entry::Lock(lock)) => Some(lock.expires_at.since(step.now)),
            // A repeated request must not acquire a free key: its caller may be gone, and nobody would release the key.
            None if matches!(queue_mode, QueueMode::Existing { .. }) || is_queued => None,
            None => {
                let micros = self.grant(key, &own, ttl, false, step);
                let token = token(micros);
                return Ok(Reply::granted(token));
            }
        };
        let contended = |left: Option<Duration>, queued| {
            Ok(Reply::Contended {
                expires_in: left.unwrap_or_default(),
                queued,
            })
        };
        let entry = match queue_mode {
            QueueMode::None => return contended(left, None),
            QueueMode::Existing { notified } => {
                let polls = Waiter {
                    ttl: None,
                    ..own.clone()
                };
                let queue = self.queues.get_mut(key);
                queue.and_then(|queue| {
                    let found = queue.find_waiter(own, polls, notified)?;
                    queue.give_back_place(&found);
                    Some(found)
                })
            }
            QueueMode::Polling | QueueMode::Notified | QueueMode::Rejoin { .. } => {
                self.join(key, &own, queue_mode, step.now);
                Some(own)
            }
        };
        let Some(entry) = entry else {
            return contended(left, None);
        };
        if let Some(Entry::Lock(lock)) = self.entries.get_mut(key)
            && !std::mem::replace(&mut lock.marked, true)
        {
            step.notifications.push(Notification::Changed(key.clone()));
        }
        if let Some(doubt) = doubt
            && left == Some(Duration::ZERO)
        {
            left = self.end_late_grant(key, doubt, &entry, step);
        }
        let left = match left {
            Some(left) => left,
            None => match self.serve(key, Some((lease, ttl)), step) {
                Some((granted, micros)) if granted == lease => {
                    let token = token(micros);
                    return Ok(Reply::granted(token));
                }
                _ => match self.entries.get(key) {
                    Some(Entry::Lock(lock)) => lock.expires_at.since(step.now),
                    _ => Duration::ZERO,
                },
            },
        };
        let asks_again = matches!(queue_mode, QueueMode::Existing { .. });
        let queued = self.stay_queued(key, &entry, left, asks_again, step.now);
        contended(Some(left), queued)
    }

    /// Makes the key's queue outlive the lock, which expires in `left`. Returns the place of the waiter, or `None` if it
    /// is not queued: an entry beyond the bound of a queue is removed.
    fn stay_queued(
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

    fn join(&mut self, key: &Key, own: &Waiter, queue_mode: QueueMode, now: MonotonicTime) {
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

    /// Grants the key to a waiter. Returns the µs of its token.
    fn grant(
        &mut self,
        key: &Key,
        to: &Waiter,
        ttl: Duration,
        marked: bool,
        step: &mut Step<'_>,
    ) -> u64 {
        self.last_micros = self.next_micros(step);
        let lock = Lock {
            lease: to.lease,
            micros: self.last_micros,
            holder: to.holder.clone(),
            marked,
            doubt: None,
            expires_at: step.now.after(ttl),
        };
        self.entries.insert(key.clone(), Entry::Lock(lock));
        step.notifications.push(Notification::Changed(key.clone()));
        self.last_micros
    }

    /// Grants the key to the first waiter that listens, polls, or is the caller (`own`: its lease and ttl). Returns the
    /// waiter's lease and the µs of its token.
    fn serve(
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
    fn end_late_grant(
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
    fn call_roll(&mut self, key: &Key, own: &Waiter, step: &mut Step<'_>) -> Option<Duration> {
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
    fn notify_near(&self, key: &Key, gone: usize, step: &mut Step<'_>) {
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

    fn release(
        &mut self,
        key: &Key,
        lease: LeaseId,
        queued: Option<Duration>,
        // `None` for a usual release; `Some` for a release by force.
        must_notify: Option<bool>,
        step: &mut Step<'_>,
    ) -> Reply {
        let (is_held, is_marked) = match self.entries.get(key) {
            Some(Entry::Lock(lock)) => (lock.lease == lease, lock.marked),
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => (false, false),
        };
        if is_held {
            if let (Some(must_notify), Some(Entry::Lock(lock))) =
                (must_notify, self.entries.get(key))
            {
                let is_new = clock_micros(step.now) < lock.micros + NEW_GRANT.as_micros() as u64;
                if must_notify && is_new && !(step.listens)(&lock.holder) {
                    return Reply::NotListening { by_some: false };
                }
                step.notifications.push(Notification::Forced {
                    to: lock.holder.clone(),
                    key: key.clone(),
                    lease: lease.start(),
                    by: step.by.clone(),
                });
            }
            if !(is_marked && self.serve(key, None, step).is_some()) {
                self.entries.remove(key);
                step.notifications.push(Notification::Changed(key.clone()));
            }
            return Reply::Done;
        }
        if let (Some(ttl), Some(queue)) = (queued, self.queues.get_mut(key)) {
            let before = queue.waiters.len();
            queue.waiters.retain(|waiter| {
                let is_own = waiter.lease == lease && waiter.holder == *step.by;
                !(is_own && waiter.ttl.is_none_or(|own| own == ttl))
            });
            let has_left = queue.waiters.len() < before;
            if queue.waiters.is_empty() {
                self.queues.remove(key);
            }
            if has_left {
                self.notify_near(key, 1, step);
                return Reply::Done;
            }
        }
        match self.entries.get(key) {
            Some(Entry::Lock(lock)) => Reply::Taken {
                by: Some(lock.holder.clone()),
            },
            _ => Reply::Missing,
        }
    }

    fn renew(&mut self, key: &Key, lease: LeaseId, ttl: Duration, step: &mut Step<'_>) -> Reply {
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => return Reply::Missing,
        };
        if lock.lease != lease {
            let by = Some(lock.holder.clone());
            return Reply::Taken { by };
        }
        lock.doubt = None;
        let expires_at = step.now.after(ttl);
        if lock.expires_at < expires_at {
            lock.expires_at = expires_at;
            step.notifications.push(Notification::Changed(key.clone()));
        }
        Reply::Done
    }

    fn adopt(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ticket: (LeaseId, u64),
        ttl: Option<Duration>,
        step: &mut Step<'_>,
    ) -> Reply {
        let micros = self.next_micros(step);
        let reached = step.micros().max(self.last_micros);
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => return Reply::Missing,
        };
        let (from, ticket_micros) = ticket;
        if lock.lease != from || ticket_micros > reached {
            let by = Some(lock.holder.clone());
            return Reply::Taken { by };
        }
        (self.last_micros, lock.micros) = (micros, micros);
        lock.lease = lease;
        lock.holder = step.by.clone();
        lock.doubt = None;
        let asked = ttl.map_or(step.now, |ttl| step.now.after(ttl));
        lock.expires_at = lock.expires_at.max(asked);
        step.notifications.push(Notification::Changed(key.clone()));
        Reply::Adopted {
            expires_in: lock.expires_at.since(step.now),
            token: token(micros),
        }
    }

    fn inspect(&self, key: &Key, step: &Step<'_>) -> Result<Reply, Error> {
        match self.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Fenced { .. }) => Err(no_lock()),
            Some(Entry::Lock(lock)) => Ok(Reply::Found {
                value: Box::new(LockValue {
                    lease: lock.lease,
                    token: Some(token(lock.micros)),
                    holder: lock.holder.clone(),
                    queued: self.queues.get(key).map_or(0, |queue| queue.waiters.len()),
                }),
                expires_in: Some(lock.expires_at.since(step.now)),
            }),
        }
    }

    fn write(
        &mut self,
        key: &Key,
        token: u64,
        value: Option<&Arc<[u8]>>,
        ttl: Option<Duration>,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        let kept_until = match self.entries.get(key) {
            Some(Entry::Lock(_)) => return Err(no_value()),
            Some(Entry::Fenced { token: seen, .. }) if *seen > token => {
                return Ok(Reply::Stale { token: *seen });
            }
            Some(Entry::Fenced { expires_at, .. }) => *expires_at,
            None => None,
        };
        let entry = Entry::Fenced {
            token,
            value: value.cloned(),
            expires_at: ttl.map(|ttl| step.now.after(ttl)).or(kept_until),
        };
        self.entries.insert(key.clone(), entry);
        step.notifications.push(Notification::Changed(key.clone()));
        Ok(Reply::Done)
    }

    fn read(&self, key: &Key) -> Result<Reply, Error> {
        match self.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Lock(_)) => Err(no_value()),
            Some(Entry::Fenced { value, .. }) => Ok(value
                .as_ref()
                .map_or(Reply::Missing, |value| Reply::Value(value.to_vec()))),
        }
    }

    fn propose(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ttl: Duration,
        proposal: u64,
        from: Option<TicketLease>,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        let reached = step.micros().max(self.last_micros);
        Ok(match (self.entries.get(key), from) {
            (Some(Entry::Fenced { .. }), _) => return Err(no_lock()),
            (Some(Entry::Lock(lock)), _) if lock.lease == lease => {
                Reply::granted(token(lock.micros))
            }
            (Some(Entry::Lock(lock)), Some(from)) => {
                if lock.lease == from.lease && from.micros <= reached {
                    let left = lock.expires_at.since(step.now);
                    self.vote(key, lease, proposal, ttl.max(left), step)
                } else {
                    let by = Some(lock.holder.clone());
                    Reply::Taken { by }
                }
            }
            (None, Some(_)) => Reply::Missing,
            (Some(Entry::Lock(lock)), None) => Reply::Contended {
                expires_in: lock.expires_at.since(step.now),
                queued: None,
            },
            (None, None) => self.vote(key, lease, proposal, ttl, step),
        })
    }

    /// Grants the key on a node of a quorum.
    fn vote(
        &mut self,
        key: &Key,
        lease: LeaseId,
        proposal: u64,
        ttl: Duration,
        step: &mut Step<'_>,
    ) -> Reply {
        if self.is_too_far_ahead(proposal, step) {
            return Reply::TooFarAhead;
        }
        let micros = self.next_micros(step).max(proposal);
        self.last_micros = micros;
        self.set(key, lease, micros, ttl, step);
        Reply::granted(token(micros))
    }

    /// Whether these µs are later than the node's clock and its fence counter by more than a quarantine.
    fn is_too_far_ahead(&self, micros: u64, step: &Step<'_>) -> bool {
        let quarantine = step.quarantine.as_micros() as u64;
        micros > step.micros().max(self.last_micros) + quarantine
    }

    fn hold(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ttl: Duration,
        micros: u64,
        sets_missing: Option<u64>,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        if let Some(abstained) = self.abstained(step) {
            return Ok(abstained);
        }
        let is_too_far_ahead = self.is_too_far_ahead(micros, step);
        match self.entries.get_mut(key) {
            Some(Entry::Fenced { .. }) => return Err(no_lock()),
            Some(Entry::Lock(lock)) if lock.lease != lease => {
                let by = Some(lock.holder.clone());
                return Ok(Reply::Taken { by });
            }
            Some(Entry::Lock(_)) if is_too_far_ahead => return Ok(Reply::TooFarAhead),
            Some(Entry::Lock(lock)) => {
                let only_asks = ttl <= ONLY_ASKS;
                if !only_asks {
                    lock.expires_at = lock.expires_at.max(step.now.after(ttl));
                }
                if !only_asks || lock.micros != micros {
                    step.notifications.push(Notification::Changed(key.clone()));
                }
                lock.micros = micros;
            }
            None => {
                let Some(until) = sets_missing else {
                    return Ok(Reply::Missing);
                };
                if let Some(refusal) = too_late(until, step) {
                    return Ok(refusal);
                }
                if is_too_far_ahead {
                    return Ok(Reply::TooFarAhead);
                }
                self.set(key, lease, micros, ttl, step);
            }
        }
        self.last_micros = self.last_micros.max(micros);
        let token = token(micros);
        Ok(Reply::granted(token))
    }

    /// Sets the key on a node of a quorum.
    fn set(&mut self, key: &Key, lease: LeaseId, micros: u64, ttl: Duration, step: &mut Step<'_>) {
        let lock = Lock {
            lease,
            micros,
            holder: step.by.clone(),
            marked: false,
            doubt: None,
            expires_at: step.now.after(ttl),
        };
        self.entries.insert(key.clone(), Entry::Lock(lock));
        step.notifications.push(Notification::Changed(key.clone()));
    }

    /// The reply of a quorum's node that does not vote. A mark that is missing or in the future begins a quarantine.
    fn abstained(&mut self, step: &Step<'_>) -> Option<Reply> {
        let for_another = self.quarantine_left(false, step);
        (!for_another.is_zero()).then_some(Reply::Abstained { for_another })
    }

    /// The reply of a quorum's node that may have lost the key. `None` on a single server.
    fn lost(&mut self, step: &Step<'_>) -> Option<Reply> {
        let is_in_quorum = !step.quarantine.is_zero();
        is_in_quorum.then(|| self.abstained(step)).flatten()
    }

    /// The reply to a release. A node that may have lost the lease's key does not know whether the lease was lost.
    fn unless_lost(&mut self, reply: Reply, step: &Step<'_>) -> Reply {
        match reply {
            Reply::Missing | Reply::Taken { .. } => self.lost(step).unwrap_or(reply),
            reply => reply,
        }
    }

    /// Checks at the login of a connection whether the process is a new one, and then begins a quarantine. Returns the
    /// time until the node votes.
    pub fn check_data(&mut self, step: &Step<'_>) -> Duration {
        self.quarantine_left(true, step)
    }

    fn quarantine_left(&mut self, is_new_connection: bool, step: &Step<'_>) -> Duration {
        let now = step.micros();
        let is_usable = |mark: &Mark| mark.since <= now && !(is_new_connection && mark.is_old);
        let mark = self.mark.filter(is_usable).unwrap_or(Mark {
            is_old: false,
            since: now,
        });
        self.mark = Some(mark);
        step.quarantine
            .saturating_sub(Duration::from_micros(now - mark.since))
    }

    /// Acts as if the node of a quorum had had its data for ever.
    pub fn mark_as_old_node(&mut self) {
        self.mark = Some(Mark {
            is_old: false,
            since: 0,
        });
    }

    /// Acts as if a new process had started with the data, and a client had connected at once.
    pub fn restart(&mut self, step: &Step<'_>) {
        if let Some(mark) = &mut self.mark {
            mark.is_old = true;
            self.check_data(step);
        }
    }

    /// The fence counter; 0 if it is missing.
    #[cfg(test)]
    pub fn counter(&self) -> u64 {
        self.last_micros
    }

    #[cfg(test)]
    pub fn set_counter(&mut self, micros: u64) {
        self.last_micros = micros;
    }

    #[cfg(test)]
    pub fn mark(&self) -> Option<Mark> {
        self.mark
    }

    #[cfg(test)]
    pub fn set_mark(&mut self, mark: Option<Mark>) {
        self.mark = mark;
    }

    /// The value of a lock's key, as GET returns it.
    pub fn text(&mut self, key: &Key, step: &mut Step<'_>) -> Option<String> {
        self.expire_key(key, step);
        match self.entries.get(key) {
            Some(Entry::Lock(lock)) => Some(lock.text()),
            _ => None,
        }
    }

    /// Removes all expired keys and queues.
    pub fn expire(&mut self, step: &mut Step<'_>) {
        let expired = |_: &Key, entry: &mut Entry| entry.has_expired(step.now);
        let gone = self.entries.extract_if(expired);
        step.notifications
            .extend(gone.map(|(key, _)| Notification::Changed(key)));
        self.queues.retain(|_, queue| queue.expires_at >= step.now);
    }

    /// Deletes a key, by its name in Redis. Returns true if it existed.
    pub fn delete(&mut self, name: &str, step: &mut Step<'_>) -> bool {
        self.expire(step);
        let key = self.entries.keys().find(|key| key.in_redis() == name);
        let Some(key) = key.cloned() else {
            return false;
        };
        self.entries.remove(&key);
        step.notifications.push(Notification::Changed(key));
        true
    }

    /// Deletes all keys, including the fence counter. A client of a quorum's node notices that at once.
    pub fn flush(&mut self, step: &Step<'_>) {
        let had_mark = self.mark.is_some();
        *self = Self::default();
        if had_mark {
            self.check_data(step);
        }
    }

    /// Deletes a key without a notification.
    #[cfg(test)]
    pub fn remove(&mut self, key: &Key) {
        self.entries.remove(key);
    }

    /// Acts as if the clock had been set back by `by`: moves the fence counter ahead.
    #[cfg(test)]
    pub fn put_back(&mut self, by: Duration) {
        let ahead = u64::try_from(by.as_micros()).unwrap_or(0);
        self.last_micros = self.last_micros.max(FIRST_MICROS) + ahead;
    }

    /// The entries of a key's queue, as in Redis.
    #[cfg(test)]
    pub fn queue(&self, key: &Key) -> Vec<String> {
        let queue = self.queues.get(key);
        queue.map_or_else(Vec::new, |queue| {
            queue.waiters.iter().map(Waiter::entry).collect()
        })
    }

    #[cfg(test)]
    pub fn expires_at(&self, key: &Key) -> Option<MonotonicTime> {
        match self.entries.get(key)? {
            Entry::Lock(lock) => Some(lock.expires_at),
            Entry::Fenced { expires_at, .. } => *expires_at,
        }
    }

    #[cfg(test)]
    pub fn expire_at(&mut self, key: &Key, at: MonotonicTime) {
        match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock.expires_at = at,
            Some(Entry::Fenced { expires_at, .. }) => {
                *expires_at = Some(at);
            }
            None => {}
        }
    }

    /// Whether a lock or a fenced value stands under the key.
    #[cfg(test)]
    pub fn contains(&mut self, key: &Key, step: &mut Step<'_>) -> bool {
        self.expire_key(key, step);
        self.entries.contains_key(key)
    }

    fn expire_key(&mut self, key: &Key, step: &mut Step<'_>) {
        let entry = self.entries.get(key);
        if entry.is_some_and(|entry| entry.has_expired(step.now)) {
            self.entries.remove(key);
            step.notifications.push(Notification::Changed(key.clone()));
        }
        let queue = self.queues.get(key);
        if queue.is_some_and(|queue| queue.expires_at < step.now) {
            self.queues.remove(key);
        }
    }

    /// The time of the next grant in µs: that of the clock, or one more than the time of the last grant if that is
    /// later.
    fn next_micros(&self, step: &Step<'_>) -> u64 {
        step.micros().max(self.last_micros + 1)
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

/// The reply of a quorum's node to a request that the client has given up at `until`, in µs of the node's clock.
fn too_late(until: u64, step: &Step<'_>) -> Option<Reply> {
    let micros = step.micros();
    (micros > until).then_some(Reply::TooLate { micros })
}

/// The time of the server's clock in µs.
pub fn clock_micros(now: MonotonicTime) -> u64 {
    let since_boot = now.since(MonotonicTime::at_tick(0)).as_micros();
    FIRST_MICROS + u64::try_from(since_boot).unwrap_or(0)
}

impl Entry {
    fn has_expired(&self, now: MonotonicTime) -> bool {
        match self {
            // A lock expires at the end of its last millisecond, as in Redis.
            Self::Lock(lock) => lock.expires_at < now,
            Self::Fenced { expires_at, .. } => expires_at.is_some_and(|at| at < now),
        }
    }
}

impl Lock {
    fn text(&self) -> String {
        value::format(
            self.lease,
            self.micros,
            &self.holder,
            self.doubt,
            self.marked,
        )
    }

    /// The time until the lock expires, or until its waiter should have confirmed it.
    fn left(&self, now: MonotonicTime) -> Duration {
        let kept = match self.doubt {
            Some(_) => KEPT_UNCONFIRMED,
            None => Duration::ZERO,
        };
        self.expires_at.since(now).saturating_sub(kept)
    }
}

impl Queue {
    /// Finds the entry of a waiter that joined to be notified or to poll. With `notify`, an entry that polls is
    /// notified from now on, and keeps its place.
    fn find_waiter(&mut self, notified: Waiter, polling: Waiter, notify: bool) -> Option<Waiter> {
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
    fn give_back_place(&mut self, entry: &Waiter) {
        let silent = self.find(entry).filter(|at| self.waiters[*at].is_silent());
        if let Some(at) = silent {
            let mut waiter = self.waiters.remove(at);
            waiter.since -= SILENT;
            self.insert(waiter);
        }
    }

    fn insert(&mut self, own: Waiter) {
        let behind = |waiter: &Waiter| (waiter.since, waiter.entry()) > (own.since, own.entry());
        let place = self.waiters.iter().position(behind);
        self.waiters
            .insert(place.unwrap_or(self.waiters.len()), own);
    }

    fn find(&self, entry: &Waiter) -> Option<usize> {
        let same = |waiter: &Waiter| {
            (waiter.lease, waiter.ttl, &waiter.holder) == (entry.lease, entry.ttl, &entry.holder)
        };
        self.waiters.iter().position(same)
    }
}

fn token(micros: u64) -> u64 {
    value::token(&micros.to_string()).expect("sixteen digits leave room for the lower bits")
}

fn no_lock() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_LOCK)
}

fn no_value() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_FENCED_VALUE)
}
