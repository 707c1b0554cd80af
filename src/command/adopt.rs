//! The adoption: moves a grant from the lease in a ticket to a new lease.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Step, token};
use crate::command::results::{millis, taken, wrong_type};
use crate::command::script::{Layout, Results, Script};
use crate::command::value;
use crate::command::{Call, CallContext, IfUnanswered, Outcome, Release, Reply};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Moves the grant of the ticket's lease to `lease`.
#[derive(Clone, Debug)]
pub struct Adopt {
    pub key: Key,
    pub lease: LeaseId,
    pub grant: Box<Adoption>,
}

pub static SCRIPT: Script = Script::new(
    "Adopt",
    include_str!("../../lua/adopt.lua"),
    Layout {
        counter: true,
        holder: true,
        arguments: 4,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: wrong_type,
        one_for_all: false,
    },
);

impl Call for Adopt {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        let grant = &self.grant;
        out.lease(grant.from);
        // The script compares times as text.
        out.text(&format!("{:016}", value::micros_of(grant.token)));
        out.lease(self.lease);
        if grant.renew {
            out.millis(grant.ttl);
        } else {
            out.text("");
        }
    }

    /// The store releases the lease, because Redis may have moved the grant to it.
    fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Undo(self.undo(now))
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, lease) = (&self.key, self.lease);
        let granted = value::micros_of(self.grant.token);
        let ttl = self.grant.renew.then_some(self.grant.ttl);
        let micros = keyspace.next_micros(step);
        let reached = step.micros().max(keyspace.last_micros);
        let lock = match keyspace.entries.get_mut(key) {
            Some(Entry::Lock(lock)) if lock.lease == self.grant.from && granted <= reached => lock,
            Some(entry) => return Ok(entry.taken()),
            None => return Ok(Reply::Missing),
        };
        (keyspace.last_micros, lock.micros) = (micros, micros);
        lock.lease = lease;
        lock.holder = step.by.clone();
        lock.doubt = None;
        let asked = ttl.map_or(step.now, |ttl| step.now.after(ttl));
        lock.expires_at = lock.expires_at.max(asked);
        step.changed(key);
        Ok(Reply::Adopted {
            expires_in: lock.expires_at.since(step.now),
            token: token(micros),
        })
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::Int(0) => Reply::Missing,
        Value::Array(adopted) => {
            let [Value::Int(ms), Value::BulkString(micros)] = adopted.as_slice() else {
                return None;
            };
            let micros = std::str::from_utf8(micros).ok();
            Reply::Adopted {
                expires_in: millis(*ms),
                token: micros.and_then(value::token)?,
            }
        }
        Value::BulkString(value) => taken(value),
        _ => return None,
    }))
}

impl Adopt {
    /// The release that undoes this adoption, even if Redis carries the adoption out after the release was sent.
    pub fn undo(&self, now: MonotonicTime) -> Release {
        Release::unheld(self.key.clone(), self.lease, now.after(self.grant.longest))
    }
}

/// The grant in a ticket, and the key's ttl after the adoption.
#[derive(Clone, Debug)]
pub struct Adoption {
    pub from: LeaseId,
    pub token: u64,
    /// The key's new ttl with `renew`. Without `renew`, the key keeps the rest of its ttl.
    pub ttl: Duration,
    /// An upper bound for the key's ttl after the adoption.
    pub longest: Duration,
    pub renew: bool,
    /// The replicas that have to acknowledge the adoption. If too few do, the outcome is `Unavailable`, and the store
    /// releases the key.
    pub replicas: Option<Replicas>,
}
