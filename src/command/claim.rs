//! Grants a free lock, depending on the fenced value of the same name: the value has to be missing, or the grant writes
//! it. Otherwise reads both.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::queue::Waiter;
use crate::command::keyspace::{Entry, Keyspace, Step, no_lock, no_value, token};
use crate::command::results::{foreign_lock, foreign_value, granted, millis};
use crate::command::script::{Layout, Results, Script};
use crate::command::value::{LockValue, NO_FENCED_VALUE, NO_LOCK};
use crate::command::{Call, CallContext, IfUnanswered, Mode, Outcome, Release, Reply};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::report::error::Error;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Grants a lock to the lease, provided that the lock is free and its queue is empty. Otherwise reads the lock and the
/// fenced value. `term` decides how the grant depends on the fenced value.
#[derive(Clone, Debug)]
pub struct Claim {
    pub key: Key,
    /// The key of the fenced value. It shares the slot of `key`.
    pub value: Key,
    pub lease: LeaseId,
    pub ttl: Duration,
    /// `None` grants the lock only if the fenced value is missing or deleted. `Some` writes these bytes as the value,
    /// under the token of the grant. If the lock is not granted, a claim with `Some` does not read the value.
    pub term: Option<Arc<[u8]>>,
    /// The replicas that have to acknowledge the grant: see [`Acquire`](crate::command::Acquire).
    pub replicas: Option<Replicas>,
}

/// Reads a lock and the fenced value of the same name, in one step.
#[derive(Clone, Debug)]
pub struct Look {
    pub key: Key,
    /// The key of the fenced value. It shares the slot of `key`.
    pub value: Key,
}

/// The state of a lock and of the fenced value of the same name, as one script has read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockAndValue {
    /// The lock's value and its ttl; `None` if the lock is free.
    pub lock: Option<(LockValue, Option<Duration>)>,
    /// The last token of the fenced value. The token outlives a deletion of the value.
    pub token: Option<u64>,
    /// `None` if the value is missing or deleted.
    pub value: Option<Vec<u8>>,
}

pub static SCRIPT: Script = Script::new(
    "Claim",
    include_str!("../../lua/claim.lua"),
    Layout {
        counter: true,
        holder: true,
        limit: true,
        arguments: 3,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error,
        one_for_all: false,
    },
);

impl Call for Claim {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn value_key(&self) -> Option<&Key> {
        Some(&self.value)
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        out.lease(self.lease);
        out.millis(self.ttl);
        match &self.term {
            None => out.text(""),
            Some(term) => out.bytes(&[b"+", &term[..]].concat()),
        }
    }

    /// The outcome is unknown, so the claim is not repeated under its lease id.
    fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        let until = now.after(self.ttl);
        IfUnanswered::Undo(Release::unheld(self.key.clone(), self.lease, until))
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let mut found = look(keyspace, &self.key, &self.value, step)?;
        if self.term.is_some() {
            found.value = None;
        }
        let is_free = found.lock.is_none() && !keyspace.queues.contains_key(&self.key);
        let last = found.token.filter(|_| self.term.is_some());
        let is_stale = last.is_some_and(|last| last > token(keyspace.next_micros(step)));
        if !is_free || is_stale || found.value.is_some() {
            return Ok(Reply::LockAndValue(Box::new(found)));
        }
        let to = Waiter::new(self.lease, Mode::Exclusive, Some(self.ttl), step.by);
        let token = token(keyspace.grant(&self.key, &to, self.ttl, false, step));
        if let Some(term) = &self.term {
            let expires_at = match keyspace.entries.get(&self.value) {
                Some(Entry::Fenced { expires_at, .. }) => *expires_at,
                _ => None,
            };
            let value = Entry::Fenced {
                token,
                value: Some(Arc::clone(term)),
                expires_at,
            };
            keyspace.entries.insert(self.value.clone(), value);
            step.changed(&self.value);
        }
        Ok(Reply::granted(token))
    }
}

impl Call for Look {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn value_key(&self) -> Option<&Key> {
        Some(&self.value)
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        out.text("");
        out.millis(Duration::ZERO);
        out.text("");
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let found = look(keyspace, &self.key, &self.value, step)?;
        Ok(Reply::LockAndValue(Box::new(found)))
    }
}

/// Reads the lock and the fenced value in the model.
fn look(
    keyspace: &mut Keyspace,
    key: &Key,
    value: &Key,
    step: &mut Step<'_>,
) -> Result<LockAndValue, Error> {
    keyspace.expire_key(value, step);
    keyspace.look(key, false, step);
    let (last_token, value) = match keyspace.entries.get(value) {
        None => (None, None),
        Some(Entry::Fenced { token, value, .. }) => (Some(*token), value.as_deref()),
        Some(_) => return Err(no_value()),
    };
    let lock = match keyspace.entries.get(key) {
        None => None,
        Some(Entry::Lock(lock)) => Some((lock.value(0), Some(lock.expires_at.since(step.now)))),
        Some(_) => return Err(no_lock()),
    };
    Ok(LockAndValue {
        lock,
        token: last_token,
        value: value.map(<[u8]>::to_vec),
    })
}

fn read(result: &mut Value) -> Option<Outcome> {
    let found = match result {
        Value::BulkString(micros) => return Some(granted(micros)),
        Value::Array(found) => found,
        _ => return None,
    };
    let [
        Value::Int(left),
        Value::BulkString(lock),
        Value::BulkString(token),
        value,
    ] = found.as_mut_slice()
    else {
        return None;
    };
    let value = match value {
        // A value may be long, so it is moved, not copied.
        Value::BulkString(bytes) => Some(std::mem::take(bytes)),
        Value::Nil => None,
        _ => return None,
    };
    let lock = match &lock[..] {
        [] => None,
        text => match LockValue::parse(text, 0) {
            Some(value) => Some((value, (*left >= 0).then(|| millis(*left)))),
            None => return Some(Err(foreign_value(NO_LOCK, "string"))),
        },
    };
    let token = match &token[..] {
        [] => None,
        digits => match std::str::from_utf8(digits).ok()?.parse() {
            Ok(token) => Some(token),
            Err(_) => return Some(Err(no_fenced_value("hash"))),
        },
    };
    Some(Ok(Reply::LockAndValue(Box::new(LockAndValue {
        lock,
        token,
        value,
    }))))
}

fn read_error(code: &str, detail: &str) -> Option<Outcome> {
    let foreign = (code == "FOREIGNVALUE").then(|| Err(no_fenced_value(detail)));
    foreign.or_else(|| foreign_lock(code, detail))
}

fn no_fenced_value(found: &str) -> Error {
    foreign_value(NO_FENCED_VALUE, found)
}
