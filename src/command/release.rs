//! The releases: of a lease by its own client, and of a lock by force.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Notification, Step, clock_micros};
use crate::command::results::{quarantine, taken, wrong_type};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, Outcome, Reply};
use crate::config::key::Key;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Ends the grant of the lease, if the lease still holds the key: grants the key to the first waiter of its queue, or
/// deletes it. If the lease is queued, removes it from the queue. The store repeats a failed release until `until`,
/// when the ttl has ended.
#[derive(Clone, Debug)]
pub struct Release {
    pub key: Key,
    pub lease: LeaseId,
    pub until: MonotonicTime,
    /// Set if a guard held the lease.
    pub held: Option<Held>,
    /// Set if the lease may be queued: the ttl of its acquire.
    pub queued: Option<Duration>,
}

/// The client of a grant that is younger than this may still be connecting for notifications.
const NEW_GRANT: Duration = Duration::from_secs(1);

pub static SCRIPT: Script = Script::new(
    "Release",
    include_str!("../../lua/release.lua"),
    Layout {
        counter: true,
        mark_at_end: true,
        arguments: 1,
        shard_channel: true,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: |code, detail| wrong_type(code, detail).or_else(|| quarantine(code, detail)),
        one_for_all: true,
    },
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
        match (self.queued, self.held) {
            (Some(ttl), _) => {
                let (lease, holder) = (self.lease, context.holder);
                out.text(&format!("{lease},{},{holder}", ttl.as_millis()));
            }
            // The script compares the key's value with this argument first.
            (None, Some(held)) => out.held_value(context.holder, self.lease, held),
            (None, None) => out.lease(self.lease),
        }
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let reply = release(keyspace, &self.key, self.lease, self.queued, None, step);
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
    /// The release of a lease that a guard never held, and that is not queued.
    pub fn undo(key: &Key, lease: LeaseId, until: MonotonicTime) -> Self {
        Self {
            key: key.clone(),
            lease,
            until,
            held: None,
            queued: None,
        }
    }

    /// The key and the fencing token, if a guard held the lease.
    pub fn of_guard(&self) -> Option<(&Key, u64)> {
        self.held.map(|held| (&self.key, held.token))
    }

    /// The reason of a loss, if `reply`, received at `now`, shows one: a guard held the lease, and before its validity
    /// ended, the lease no longer held the key.
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

/// Releases the key by force: ends the grant of another client's `lease`, and notifies that client. The client does not
/// repeat this command.
#[derive(Clone, Debug)]
pub struct ForceUnlock {
    pub key: Key,
    pub lease: LeaseId,
    /// If true, Redis refuses the command while the holder may still be connecting for notifications: the holder does
    /// not listen, and its grant is less than a second old or has no time in its value.
    pub must_notify: bool,
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
        let mark = if self.must_notify { '?' } else { '!' };
        out.text(&format!("{}{mark}{}", self.lease, context.holder));
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let force = Some(self.must_notify);
        let reply = release(keyspace, &self.key, self.lease, None, force, step);
        Ok(keyspace.unless_lost(reply, step))
    }
}

/// The model of [`Release`] and [`ForceUnlock`].
fn release(
    keyspace: &mut Keyspace,
    key: &Key,
    lease: LeaseId,
    queued: Option<Duration>,
    // `None` in a [`Release`].
    must_notify: Option<bool>,
    step: &mut Step<'_>,
) -> Reply {
    let (is_held, is_marked) = match keyspace.entries.get(key) {
        Some(Entry::Lock(lock)) => (lock.lease == lease, lock.marked),
        Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
        None => (false, false),
    };
    if is_held {
        if let (Some(must_notify), Some(Entry::Lock(lock))) =
            (must_notify, keyspace.entries.get(key))
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
        if !(is_marked && keyspace.serve(key, None, step).is_some()) {
            keyspace.entries.remove(key);
            step.notifications.push(Notification::Changed(key.clone()));
        }
        return Reply::Done;
    }
    if let (Some(ttl), Some(queue)) = (queued, keyspace.queues.get_mut(key)) {
        let before = queue.waiters.len();
        queue.waiters.retain(|waiter| {
            let is_own = waiter.lease == lease && waiter.holder == *step.by;
            !(is_own && waiter.ttl.is_none_or(|own| own == ttl))
        });
        let has_left = queue.waiters.len() < before;
        if queue.waiters.is_empty() {
            keyspace.queues.remove(key);
        }
        if has_left {
            keyspace.notify_near(key, 1, step);
            return Reply::Done;
        }
    }
    match keyspace.entries.get(key) {
        Some(Entry::Lock(lock)) => Reply::Taken {
            by: Some(lock.holder.clone()),
        },
        _ => Reply::Missing,
    }
}
