//! The acquire: grants a key to a lease, or adds the lease to the key's queue.

use std::time::Duration;

use redis::Value;
use smallvec::SmallVec;

use crate::command::encoder::Encoder;
use crate::command::keyspace::queue::Waiter;
use crate::command::keyspace::shares::mixed;
use crate::command::keyspace::{Entry, Keyspace, Step, no_lock, token};
use crate::command::results::{foreign_lock, granted, millis};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, IfUnanswered, Mode, Outcome, Release, Reply};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::report::error::Error;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Grants the key to the lease, if the key is free or the lease is the first in the key's queue.
#[derive(Clone, Debug)]
pub struct Acquire {
    pub key: Key,
    pub lease: LeaseId,
    pub mode: Mode,
    pub ttl: Duration,
    pub queue_mode: QueueMode,
    pub link: Link,
    /// The replicas that have to acknowledge the grant. If too few do, the outcome is `Unavailable`, and the store
    /// releases the grant.
    pub replicas: Option<Replicas>,
}

pub static SCRIPT: Script = Script::new(
    "Acquire",
    include_str!("../../lua/acquire.lua"),
    Layout {
        counter: true,
        holder: true,
        arguments: 3,
        shard_channel: true,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: |code, detail| {
            let mixes = (code == "MIXED").then(|| Err(mixed()));
            mixes.or_else(|| foreign_lock(code, detail))
        },
        one_for_all: true,
    },
);

impl Call for Acquire {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        // A share is never granted past the queue.
        self.may_queue() || !self.mode.is_exclusive()
    }

    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        context.write_lease(out, self.lease);
        out.millis(self.ttl);
        if context.is_for_redisson() {
            return;
        }
        let place;
        let queue_mode = match self.queue_mode {
            QueueMode::None => "",
            QueueMode::Existing { notified: false } => "-",
            QueueMode::Existing { notified: true } => "-+",
            QueueMode::Polling => "0",
            QueueMode::Notified => "+",
            QueueMode::Rejoin { since, polls } => {
                place = format!("{}{since}", if polls { '0' } else { '+' });
                &place
            }
        };
        let link = match self.link {
            Link::Alone | Link::First => "",
            Link::Next => ">",
            Link::NextOrNone => "&",
        };
        match self.mode {
            Mode::Exclusive => out.parts(&[link, queue_mode]),
            mode => out.text(&format!("{link}{queue_mode}{mode}")),
        }
    }

    /// The store releases the lease, because Redis may have granted it. The caller's next acquire has a new lease id.
    fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Undo(self.undo(now))
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, lease, ttl) = (&self.key, self.lease, self.ttl);
        let queue_mode = self.queue_mode;
        let own_ttl = (!queue_mode.polls()).then_some(ttl);
        let own = Waiter::new(lease, self.mode, own_ttl, step.by);
        let waits = matches!(queue_mode, QueueMode::Existing { .. });
        let may_wait = self.may_queue() || !self.mode.is_exclusive();
        let keeps_late = may_wait && keyspace.queues.contains_key(key);
        keyspace.look(key, keeps_late, step);
        if !self.mode.is_exclusive()
            && let Some(micros) = self.share(keyspace, &own, waits, step)?
        {
            return Ok(Reply::granted(token(micros)));
        }
        let is_queued = keyspace.queues.contains_key(key) && queue_mode != QueueMode::None;
        let mut doubt = None;
        let mut left = match keyspace.entries.get_mut(key) {
            Some(Entry::Fenced { .. }) => return Err(no_lock()),
            Some(Entry::Lock(lock)) if self.mode.is_exclusive() && lock.lease == lease => {
                // While the lease was queued, another client's release granted it the key.
                lock.expires_at = step.now.after(ttl);
                lock.doubt = None;
                step.changed(key);
                let token = token(lock.micros);
                return Ok(Reply::granted(token));
            }
            Some(Entry::Lock(lock)) if queue_mode != QueueMode::None => {
                doubt = lock.doubt;
                Some(lock.left(step.now))
            }
            Some(Entry::Lock(lock)) => Some(lock.expires_at.since(step.now)),
            // A request for a lease that was queued before must not acquire a free key: if the request's caller has
            // left, the key would stay taken until its ttl ends.
            None if waits || is_queued || !self.mode.is_exclusive() => None,
            Some(Entry::Shares(_)) => None,
            None => {
                let micros = keyspace.grant(key, &own, ttl, false, step);
                let token = token(micros);
                return Ok(Reply::granted(token));
            }
        };
        let entry = match queue_mode {
            QueueMode::None => return Ok(self.contended(keyspace, left, None, step)),
            QueueMode::Existing { notified } => {
                let polls = Waiter {
                    ttl: None,
                    ..own.clone()
                };
                let queue = keyspace.queues.get_mut(key);
                queue.and_then(|queue| {
                    let found = queue.find_waiter(own, polls, notified)?;
                    queue.give_back_place(&found);
                    Some(found)
                })
            }
            QueueMode::Polling | QueueMode::Notified | QueueMode::Rejoin { .. } => {
                keyspace.join(key, &own, queue_mode, step.now);
                Some(own)
            }
        };
        let Some(entry) = entry else {
            return Ok(self.contended(keyspace, left, None, step));
        };
        if let Some(Entry::Lock(lock)) = keyspace.entries.get_mut(key)
            && !std::mem::replace(&mut lock.marked, true)
        {
            step.changed(key);
        }
        if let Some(doubt) = doubt
            && left == Some(Duration::ZERO)
        {
            left = keyspace.end_late_grant(key, doubt, &entry, step);
        }
        keyspace.end_late_shares(key, Some(&entry), step);
        let left = match left {
            Some(left) => left,
            None => {
                let served = keyspace.serve(key, Some((lease, ttl)), step);
                if let Some(micros) = served.own {
                    return Ok(Reply::granted(token(micros)));
                }
                self.left(keyspace, served.called_until, step)
            }
        };
        let queued = keyspace.stay_queued(key, &entry, left, waits, step.now);
        Ok(self.contended(keyspace, Some(left), queued, step))
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::BulkString(micros) => return Some(granted(micros)),
        Value::Nil => Reply::Skipped,
        Value::Int(ms) => Reply::contended(millis(*ms)),
        Value::Array(queued) => {
            let number = |value: &Value| match value {
                Value::Int(number) => u64::try_from(*number).ok(),
                _ => None,
            };
            let numbers: Option<SmallVec<[u64; 4]>> = queued.iter().map(number).collect();
            let (ms, place, shared) = match numbers?[..] {
                [ms, limit] => (ms, None, Some(limit)),
                [ms, ahead, since] => (ms, Some((ahead, since)), None),
                [ms, ahead, since, limit] => (ms, Some((ahead, since)), Some(limit)),
                _ => return None,
            };
            Reply::Contended {
                expires_in: Duration::from_millis(ms),
                queued: place.map(|(ahead, since)| QueuePlace { ahead, since }),
                shared: shared.map(u32::try_from).transpose().ok()?,
            }
        }
        _ => return None,
    }))
}

impl Acquire {
    /// Grants a share if the lease already has it, or if the queue is empty and other leases do not exclude it. Returns
    /// the µs part of the share's token.
    fn share(
        &self,
        keyspace: &mut Keyspace,
        own: &Waiter,
        waits: bool,
        step: &mut Step<'_>,
    ) -> Result<Option<u64>, Error> {
        let (key, mode) = (&self.key, self.mode);
        let is_queue_empty = !keyspace.queues.contains_key(key);
        let is_granted = match keyspace.entries.get_mut(key) {
            Some(Entry::Lock(_) | Entry::Fenced { .. }) => false,
            Some(Entry::Shares(shares)) if !shares.mixes_with(mode) => return Err(mixed()),
            Some(Entry::Shares(shares)) if waits => {
                shares.find(self.lease, mode, step.by).is_some()
            }
            Some(Entry::Shares(shares)) => {
                is_queue_empty && shares.wait_for(mode, step.now).is_none()
            }
            None => is_queue_empty && !waits,
        };
        Ok(is_granted.then(|| keyspace.give(key, own, self.ttl, None, step)))
    }

    /// For how long other leases exclude this lease from the key. If only waiters of a shared key exclude it, the time
    /// until `called_until`, the end of a roll call, or otherwise until all shares have ended.
    fn left(
        &self,
        keyspace: &Keyspace,
        called_until: Option<MonotonicTime>,
        step: &Step<'_>,
    ) -> Duration {
        match keyspace.entries.get(&self.key) {
            Some(Entry::Lock(lock)) => lock.expires_at.since(step.now),
            Some(Entry::Shares(shares)) => {
                let until = called_until.unwrap_or(shares.newest().ends_at);
                let wait = shares.wait_for(self.mode, step.now);
                wait.unwrap_or_else(|| until.since(step.now))
            }
            _ => Duration::ZERO,
        }
    }

    fn contended(
        &self,
        keyspace: &Keyspace,
        left: Option<Duration>,
        queued: Option<QueuePlace>,
        step: &Step<'_>,
    ) -> Reply {
        let shared = match keyspace.entries.get(&self.key) {
            Some(Entry::Shares(shares)) => Some(match shares.newest().mode {
                Mode::Permits { limit, .. } => limit,
                _ => 0,
            }),
            _ => None,
        };
        Reply::Contended {
            expires_in: left.unwrap_or_else(|| self.left(keyspace, None, step)),
            queued,
            shared,
        }
    }

    /// Whether Redis may have the lease in its queue after this acquire.
    pub fn may_queue(&self) -> bool {
        self.queue_mode != QueueMode::None
    }

    /// The release that undoes this acquire. It also undoes an acquire that Redis carries out after the release was
    /// sent: the store repeats the release until the ttl has passed.
    pub fn undo(&self, now: MonotonicTime) -> Release {
        let queued = self.may_queue().then_some(self.ttl);
        Release {
            queued,
            mode: self.mode,
            ..Release::unheld(self.key.clone(), self.lease, now.after(self.ttl))
        }
    }
}

/// The place of an acquire in a *set*: acquires of several keys for one caller. The acquires of a set follow one
/// another in one call of the store, and so usually in one call of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The acquire belongs to no set.
    Alone,
    /// The first acquire of a set.
    First,
    /// The script acquires the key only if the same call has granted the key before it. Otherwise the script changes
    /// nothing for this key, and the reply is [`Reply::Skipped`].
    Next,
    /// The same as [`Next`](Self::Next). If the key is taken, the script also gives back the keys of the set that the
    /// same call has granted, and their replies are [`Reply::Skipped`], too.
    NextOrNone,
}

impl Link {
    /// Whether the acquire depends on the one before it.
    pub fn is_next(self) -> bool {
        matches!(self, Self::Next | Self::NextOrNone)
    }
}

/// The progress of a call with acquires of sets, in the model. The model skips the same keys as the script.
#[derive(Default)]
pub struct SetProgress {
    /// The places, in the call, of the set's keys that were granted. `None` before a set, and after the first key of
    /// the set that was not granted.
    granted: Option<Vec<usize>>,
}

impl SetProgress {
    /// Begins an acquire. Returns whether the model carries it out.
    pub fn begin(&mut self, link: Link) -> bool {
        if !link.is_next() {
            self.granted = Some(Vec::new());
        }
        self.granted.is_some()
    }

    /// Records the outcome of the acquire at `place`. Returns the places of the acquires to undo.
    pub fn end(&mut self, link: Link, place: usize, outcome: &Outcome) -> Vec<usize> {
        let granted = self.granted.take();
        if matches!(outcome, Ok(Reply::Granted { .. })) {
            self.granted = granted;
            self.granted.get_or_insert_default().push(place);
            return Vec::new();
        }
        match link {
            Link::NextOrNone => granted.unwrap_or_default(),
            _ => Vec::new(),
        }
    }
}

/// How an acquire uses the key's queue if another lease holds the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueMode {
    /// The lease does not join the queue.
    None,
    /// The lease joins the queue, but Redis cannot notify this client. When the lease is first in the queue, Redis
    /// grants it the key with a short ttl. The client polls, and so finds the grant.
    Polling,
    /// The lease joins the queue. When it is first, Redis grants it the key and notifies the client.
    Notified,
    /// The lease joins the queue at the place `since`, which an earlier lease of this client had before Redis removed
    /// it. If `polls` is true, the client polls, otherwise Redis notifies it. [`front_place`] computes a place in front
    /// of all others.
    Rejoin { since: u64, polls: bool },
    /// An earlier request has added the lease to the queue, so this request does not. `notified` turns an entry that
    /// polls into one that Redis notifies.
    Existing { notified: bool },
}

/// The smallest usual place, in µs. A waiter that confirmed an earlier grant too late gets a smaller place, so it comes
/// first.
pub const FIRST_USUAL_PLACE: u64 = 1_000_000_000_000_000;

/// The place in front of the queue for a waiter that joined at `since` and confirmed its grant too late. Several such
/// waiters keep their order.
pub fn front_place(since: u64) -> u64 {
    since.checked_sub(FIRST_USUAL_PLACE).unwrap_or(since)
}

/// The time at which a waiter with this place joined, even if it was moved to the [front](front_place) since.
pub fn joined_at(place: u64) -> u64 {
    match place < FIRST_USUAL_PLACE {
        true => place + FIRST_USUAL_PLACE,
        false => place,
    }
}

impl QueueMode {
    /// Whether the waiter polls instead of being notified.
    pub fn polls(self) -> bool {
        matches!(self, Self::Polling | Self::Rejoin { polls: true, .. })
    }
}

/// A waiter's place in the queue of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePlace {
    /// How many waiters are before this waiter.
    pub ahead: u64,
    /// When the waiter joined, in µs by the clock of Redis. The queue is sorted by this.
    pub since: u64,
}
