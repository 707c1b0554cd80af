//! Ends a lease's grant: in time by its holder, or by force by another client.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::results::{quarantine, taken, wrong_type};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, Outcome, Reply};
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Releases the key if the lease still holds it, and grants it to the first waiter. A lease that is queued leaves the
/// queue. Retries end at `until`, when the ttl has ended.
#[derive(Clone, Debug)]
pub struct Release {
    pub key: Key,
    pub lease: LeaseId,
    pub until: MonotonicTime,
    /// The grant, if a guard held it.
    pub held: Option<Held>,
    /// The ttl of the lease's acquire, if the lease may be in the queue.
    pub queued: Option<Duration>,
}

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
    /// The release of a lease that no guard held, and that is not queued.
    pub fn undo(key: &Key, lease: LeaseId, until: MonotonicTime) -> Self {
        Self {
            key: key.clone(),
            lease,
            until,
            held: None,
            queued: None,
        }
    }

    /// The key and the fencing token, if this is the release of a guard's lease.
    pub fn of_guard(&self) -> Option<(&Key, u64)> {
        self.held.map(|held| (&self.key, held.token))
    }

    /// Why the lock was lost, if this is the release of a guard's lease, and `reply`, received at `now`, shows that the
    /// lease had lost its key before the end of its validity.
    pub fn loss(&self, reply: &Reply, now: MonotonicTime) -> Option<LossReason> {
        let held = self.held?;
        (now < held.valid_until).then(|| reply.loss()).flatten()
    }

    /// The key, if the release may grant it to another client's waiter.
    pub fn key_for_next_waiter(&self) -> Option<&Key> {
        let may_grant = self.held.is_some_and(|held| held.others_queued);
        may_grant.then_some(&self.key)
    }
}

/// The part of a guard's grant that its release needs.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub token: u64,
    /// Whether the lock's value has the token.
    pub is_token_in_value: bool,
    /// Other clients may be queued for the key.
    pub others_queued: bool,
    /// If Redis replies before this time that another lease or none holds the key, the lock was lost while it was held.
    pub valid_until: MonotonicTime,
}

/// Releases the key in place of the holder of `lease`, and notifies that holder. The background does not retry this
/// command.
#[derive(Clone, Debug)]
pub struct ForceUnlock {
    pub key: Key,
    pub lease: LeaseId,
    /// If true, the command does nothing while the holder does not listen for notifications and the grant is less than a
    /// second old or has no time: the holder's client may still be connecting.
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
}
