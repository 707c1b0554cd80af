//! Reads a lock's value.

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Step, no_lock, token};
use crate::command::results::{foreign_lock, foreign_value, millis, quarantine};
use crate::command::script::{Layout, Results, Script};
use crate::command::value::{LockValue, NO_LOCK};
use crate::command::{Call, CallContext, Outcome, Reply};
use crate::config::key::Key;

/// Reads the lock's value and ttl, and the length of its queue.
#[derive(Clone, Debug)]
pub struct Inspect {
    pub key: Key,
}

pub static SCRIPT: Script = Script::new(
    "Inspect",
    include_str!("../../lua/inspect.lua"),
    Layout {
        mark_at_end: true,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: |code, detail| foreign_lock(code, detail).or_else(|| quarantine(code, detail)),
        one_for_all: false,
    },
);

impl Call for Inspect {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn arguments(&self, _: &mut Encoder<'_>, _: CallContext<'_>) {}

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let key = &self.key;
        if let Some(abstained) = keyspace.lost(step) {
            return Ok(abstained);
        }
        match keyspace.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Fenced { .. }) => Err(no_lock()),
            Some(Entry::Lock(lock)) => Ok(Reply::Found {
                value: Box::new(LockValue {
                    lease: lock.lease,
                    token: Some(token(lock.micros)),
                    holder: lock.holder.clone(),
                    queued: keyspace
                        .queues
                        .get(key)
                        .map_or(0, |queue| queue.waiters.len()),
                }),
                expires_in: Some(lock.expires_at.since(step.now)),
            }),
        }
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    match result {
        Value::Int(0) => Some(Ok(Reply::Missing)),
        Value::BulkString(bytes) => inspection(bytes),
        _ => None,
    }
}

/// Reads a result: `<ttl in ms> <length of the queue> <value>`.
fn inspection(bytes: &[u8]) -> Option<Outcome> {
    let mut words = bytes.splitn(3, |byte| *byte == b' ');
    let ms: i64 = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let queued = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let found = words.next()?;
    let value = LockValue::parse(found, queued);
    let reply = value.map(|value| Reply::Found {
        value: Box::new(value),
        expires_in: (ms >= 0).then(|| millis(ms)),
    });
    Some(reply.ok_or_else(|| foreign_value(NO_LOCK, "string")))
}
