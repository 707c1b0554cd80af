//! The releases: of a lease by its own client, and of a lock by force.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::queue::Waiter;
use crate::command::keyspace::shares::Share;
use crate::command::keyspace::{Entry, Keyspace, Notification, Step, clock_micros};
use crate::command::results::{quarantine, taken, wrong_type};
use crate::command::script::{FurtherKeys, Layout, Results, Script};
use crate::command::{Call, CallContext, Mode, Outcome, Reply, value};
use crate::config::key::Key;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

/// Ends the grant of the lease, if the lease still holds the key: grants the key to the first waiter of the key's
/// queue, or deletes the key. If the lease is queued, removes it from the queue. The store repeats a failed release
/// until `until`, when the ttl has ended.
#[derive(Clone, Debug)]
pub struct Release {
    pub key: Key,
    pub lease: LeaseId,
    pub mode: Mode,
    pub until: MonotonicTime,
    /// Set if a guard held the lease.
    pub held: Option<Held>,
    /// Set if the lease may be queued: the ttl of its acquire.
    pub queued: Option<Duration>,
    /// How long the key stays taken, counted from the grant. Zero unless a guard held the lease.
    pub min_hold: Duration,
}

/// A client whose grant is younger than this may still be connecting for notifications.
const NEW_GRANT: Duration = Duration::from_secs(1);

const LAYOUT: Layout = Layout {
    counter: true,
    mark_at_end: true,
    arguments: 1,
    shard_channel: true,
    ..Layout::KEYS_ONLY
};

const RESULTS: Results = Results {
    read,
    read_error: |code, detail| wrong_type(code, detail).or_else(|| quarantine(code, detail)),
    one_for_all: true,
};

pub static SCRIPT: Script = Script::new(
    "Release",
    include_str!("../../lua/release.lua"),
    LAYOUT,
    RESULTS,
);

/// The release of a client beside python-redis-lock: it also wakes a waiter of that library.
pub static WITH_SIGNAL: Script = Script::new(
    "Release",
    include_str!("../../lua/release_with_signal.lua"),
    Layout {
        further: Some(FurtherKeys::Signals),
        ..LAYOUT
    },
    RESULTS,
);

impl Call for Release {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        if context.is_for_redisson() {
            return context.write_lease(out, self.lease);
        }
        let (lease, mode, holder) = (self.lease, self.mode, context.holder);
        match (self.queued, self.held) {
            (Some(ttl), _) => {
                out.text(&format!("{lease},{}{mode},{holder}", ttl.as_millis()));
            }
            (None, Some(held)) if !self.min_hold.is_zero() => {
                let value = mode.member(lease, holder);
                let value = value.unwrap_or_else(|| lease.to_string());
                let (micros, ms) = (value::micros_of(held.token), self.min_hold.as_millis());
                out.text(&format!("keep {micros} {ms} {value}"));
            }
            (None, _) if !mode.is_exclusive() => {
                let member = mode.member(lease, holder).unwrap_or_default();
                out.text(&format!("keep 0 0 {member}"));
            }
            // The script compares the key's value with this argument first.
            (None, Some(held)) => out.held_value(holder, lease, held),
            (None, None) => out.lease(lease),
        }
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let ended = EndedLease {
            lease: self.lease,
            mode: self.mode,
            holder: step.by.clone(),
            queued: self.queued,
            rest: self.rest(step),
            must_notify: None,
        };
        let reply = ended.release(keyspace, &self.key, step);
        Ok(keyspace.unless_lost(reply, step))
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::Int(0) => Reply::Missing,
        Value::Int(1) => Reply::Done,
        Value::Int(2) => Reply::NotListening { by_some: false },
        Value::BulkString(value) => taken(value),
        _ => return None,
    }))
}

impl Release {
    /// The release of an exclusive lease that no guard holds, and that is not queued.
    pub fn unheld(key: Key, lease: LeaseId, until: MonotonicTime) -> Self {
        Self {
            key,
            lease,
            mode: Mode::Exclusive,
            until,
            held: None,
            queued: None,
            min_hold: Duration::ZERO,
        }
    }

    /// Whether this is the release of an exclusive lease, and frees its key at once.
    pub fn is_usual(&self) -> bool {
        self.mode.is_exclusive() && self.min_hold.is_zero()
    }

    /// How much longer the key has to stay taken.
    fn rest(&self, step: &Step<'_>) -> Duration {
        let Some(held) = self.held else {
            return Duration::ZERO;
        };
        let granted = Duration::from_micros(value::micros_of(held.token));
        let rest =
            (granted + self.min_hold).saturating_sub(Duration::from_micros(clock_micros(step.now)));
        rest.min(self.min_hold)
    }

    /// The key and the fencing token, if a guard held the lease.
    pub fn of_guard(&self) -> Option<(&Key, u64)> {
        self.held.map(|held| (&self.key, held.token))
    }

    /// The reason of a loss, if `reply`, received at `now`, shows one: a guard held the lease, and the lease lost the
    /// key before its validity ended.
    pub fn loss(&self, reply: &Reply, now: MonotonicTime) -> Option<LossReason> {
        let held = self.held?;
        (now < held.valid_until).then(|| reply.loss()).flatten()
    }

    /// The key, if other clients may be queued for it. Redis then grants it to the first of them.
    pub fn key_for_next_waiter(&self) -> Option<&Key> {
        let may_grant = self.held.is_some_and(|held| held.others_queued);
        may_grant.then_some(&self.key)
    }
}

/// The facts about a guard's lease that its release needs.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub token: u64,
    /// Whether the lock's value contains the token.
    pub is_token_in_value: bool,
    /// Other clients may be queued for the key.
    pub others_queued: bool,
    /// The end of the lease's validity. The lock was lost if Redis replies before this time that the lease does not
    /// hold the key.
    pub valid_until: MonotonicTime,
}

/// Releases the key by force: ends the grant of another client's `lease`, and notifies that client. The client repeats
/// this command only once, if its connection breaks before the reply.
#[derive(Clone, Debug)]
pub struct ForceUnlock {
    pub key: Key,
    pub lease: LeaseId,
    /// If true, Redis refuses the command while the holder may still be connecting for notifications: the holder does
    /// not listen, and its grant is less than a second old or has no time in its value.
    pub must_notify: bool,
    /// The mode of the lease and its holder, unless the lease is exclusive.
    pub share: Option<(Mode, HolderId)>,
}

impl Call for ForceUnlock {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        let (lease, by) = (self.lease, context.holder);
        if context.is_for_redisson() {
            return out.text(&format!("{lease}!"));
        }
        let mark = if self.must_notify { '?' } else { '!' };
        let share = self.share.as_ref();
        let member = share.and_then(|(mode, holder)| mode.member(lease, holder));
        out.text(&match member {
            Some(member) => format!("{lease}{mark}{by} {member}"),
            None => format!("{lease}{mark}{by}"),
        });
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (mode, holder) = match &self.share {
            Some((mode, holder)) => (*mode, holder.clone()),
            None => (Mode::Exclusive, step.by.clone()),
        };
        let ended = EndedLease {
            lease: self.lease,
            mode,
            holder,
            queued: None,
            rest: Duration::ZERO,
            must_notify: Some(self.must_notify),
        };
        let reply = ended.release(keyspace, &self.key, step);
        Ok(keyspace.unless_lost(reply, step))
    }
}

/// The lease that a [`Release`] or a [`ForceUnlock`] ends, in the model.
struct EndedLease {
    lease: LeaseId,
    mode: Mode,
    /// The holder of the share, or of the entry in the queue.
    holder: HolderId,
    /// Set if the lease may be queued: the ttl of its acquire.
    queued: Option<Duration>,
    /// How much longer the key has to stay taken.
    rest: Duration,
    /// `None` for a usual release; `Some` for a release by force.
    must_notify: Option<bool>,
}

impl EndedLease {
    fn release(&self, keyspace: &mut Keyspace, key: &Key, step: &mut Step<'_>) -> Reply {
        let leaves = self.queued.is_some();
        let is_share = !self.mode.is_exclusive();
        let waiter = |ttl| Waiter::new(self.lease, self.mode, Some(ttl), &self.holder);
        let queued = self.queued.map(waiter);
        if is_share || leaves {
            keyspace.look(key, true, step);
            keyspace.end_late_shares(key, queued.as_ref(), step);
        }
        let is_held = match keyspace.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => !is_share && lock.lease == self.lease,
            Some(Entry::Shares(shares)) if is_share => {
                shares.find(self.lease, self.mode, &self.holder).is_some()
            }
            Some(entry @ (Entry::Shares(_) | Entry::Fenced { .. })) if !leaves => {
                return entry.taken();
            }
            _ => false,
        };
        if is_held {
            return self.release_held(keyspace, key, step);
        }
        if let (Some(ttl), Some(queue)) = (self.queued, keyspace.queues.get_mut(key)) {
            let before = queue.waiters.len();
            queue.waiters.retain(|waiter| {
                let is_own = (waiter.lease, waiter.mode) == (self.lease, self.mode)
                    && waiter.holder == self.holder;
                !(is_own && waiter.ttl.is_none_or(|own| own == ttl))
            });
            let has_left = queue.waiters.len() < before;
            if queue.waiters.is_empty() {
                keyspace.queues.remove(key);
            }
            if has_left {
                keyspace.notify_near(key, 1, step);
                if matches!(keyspace.entries.get(key), Some(Entry::Shares(_))) {
                    keyspace.serve(key, None, step);
                }
                return Reply::Done;
            }
        }
        match keyspace.entries.get(key) {
            None | Some(Entry::Shares(_)) => Reply::Missing,
            Some(entry) => entry.taken(),
        }
    }

    fn release_held(&self, keyspace: &mut Keyspace, key: &Key, step: &mut Step<'_>) -> Reply {
        let (holder, is_new) = match keyspace.entries.get(key) {
            Some(Entry::Lock(lock)) => {
                let is_new = clock_micros(step.now) < lock.micros + NEW_GRANT.as_micros() as u64;
                (lock.holder.clone(), is_new)
            }
            // A share does not contain the time of its grant, so its grant counts as new.
            _ => (self.holder.clone(), true),
        };
        if let Some(must_notify) = self.must_notify {
            if must_notify && is_new && !(step.listens)(&holder) {
                return Reply::NotListening { by_some: false };
            }
            step.notifications.push(Notification::Forced {
                to: holder,
                key: key.clone(),
                lease: self.lease.start(),
                by: step.by.clone(),
            });
        }
        let rests_until = (!self.rest.is_zero()).then(|| step.now.after(self.rest));
        match (keyspace.entries.get_mut(key), rests_until) {
            (Some(Entry::Lock(lock)), Some(until)) => {
                lock.expires_at = until.after(lock.kept());
                step.changed(key);
                keyspace.call_first(key, step);
            }
            (Some(Entry::Lock(lock)), None) => {
                let serves = lock.marked;
                let is_served = serves && keyspace.serve(key, None, step).any;
                if !is_served {
                    keyspace.entries.remove(key);
                    step.changed(key);
                }
            }
            (Some(Entry::Shares(shares)), Some(until)) => {
                if let Some(share) = shares.find(self.lease, self.mode, &self.holder) {
                    share.ends_at = until;
                    share.doubt = None;
                }
                keyspace.keep_shares(key, step);
                keyspace.call_first(key, step);
            }
            (Some(Entry::Shares(shares)), None) => {
                let is_own = |share: &Share| {
                    (share.lease, share.mode, &share.holder)
                        == (self.lease, self.mode, &self.holder)
                };
                shares.all.retain(|share| !is_own(share));
                keyspace.keep_shares(key, step);
                keyspace.serve(key, None, step);
            }
            _ => {}
        }
        Reply::Done
    }
}
