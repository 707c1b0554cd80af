//! Writes and reads a fenced value.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Step, no_value};
use crate::command::results::foreign_value;
use crate::command::script::{Layout, Results, Script};
use crate::command::value::NO_FENCED_VALUE;
use crate::command::{Call, CallContext, IfUnanswered, Outcome, Reply};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;

/// Writes or deletes a fenced value, unless the value was last changed under a greater token. A deleted value keeps its
/// token in Redis, so that older tokens stay refused.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: Key,
    pub token: u64,
    /// `None` deletes the value.
    pub value: Option<Arc<[u8]>>,
    /// The new ttl of the value and its token. `None` keeps the current ttl.
    pub ttl: Option<Duration>,
}

pub static WRITE: Script = Script::new(
    "Write",
    include_str!("../../lua/write.lua"),
    Layout {
        arguments: 3,
        ..Layout::KEYS_ONLY
    },
    Results {
        read: read_written,
        read_error,
        one_for_all: false,
    },
);

impl Call for Write {
    fn script(&self) -> &'static Script {
        &WRITE
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        // The script compares tokens as text. With leading zeros, text sorts in the order of the numbers. A Lua number
        // could not hold all digits of a token.
        out.text(&format!("{:020}", self.token));
        let delete = if self.value.is_none() { "-" } else { "" };
        let ttl = self.ttl.map(|ttl| ttl.as_millis().to_string());
        out.text(&format!("{delete}{}", ttl.unwrap_or_default()));
        out.bytes(self.value.as_deref().unwrap_or_default());
    }

    /// The caller gets an error. If the client repeated the write and Redis got both copies, the second copy could
    /// overwrite a value that another client wrote between them.
    fn if_unanswered(&self, _: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Report
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, token, value, ttl) = (&self.key, self.token, self.value.as_ref(), self.ttl);
        let kept_until = match keyspace.entries.get(key) {
            Some(Entry::Lock(_) | Entry::Shares(_)) => return Err(no_value()),
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
        keyspace.entries.insert(key.clone(), entry);
        step.changed(key);
        Ok(Reply::Done)
    }
}

fn read_written(result: &mut Value) -> Option<Outcome> {
    match result {
        Value::Int(1) => Some(Ok(Reply::Done)),
        Value::BulkString(seen) => {
            let token = std::str::from_utf8(seen).ok();
            let token = token.and_then(|token| token.parse().ok());
            let stale = token.map(|token| Reply::Stale { token });
            Some(stale.ok_or_else(|| foreign_value(NO_FENCED_VALUE, "hash")))
        }
        _ => None,
    }
}

fn read_error(code: &str, detail: &str) -> Option<Outcome> {
    (code == "FOREIGN").then(|| Err(foreign_value(NO_FENCED_VALUE, detail)))
}

/// Reads a fenced value.
#[derive(Clone, Debug)]
pub struct Read {
    pub key: Key,
}

pub static READ: Script = Script::new(
    "Read",
    include_str!("../../lua/read.lua"),
    Layout {
        limit: true,
        ..Layout::KEYS_ONLY
    },
    Results {
        read: read_value,
        read_error,
        one_for_all: false,
    },
);

impl Call for Read {
    fn script(&self) -> &'static Script {
        &READ
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, _: &mut Encoder<'_>, _: CallContext<'_>) {}

    fn model(&self, keyspace: &mut Keyspace, _: &mut Step<'_>) -> Outcome {
        let key = &self.key;
        match keyspace.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Lock(_) | Entry::Shares(_)) => Err(no_value()),
            Some(Entry::Fenced { value, .. }) => Ok(value
                .as_ref()
                .map_or(Reply::Missing, |value| Reply::Value(value.to_vec()))),
        }
    }
}

fn read_value(result: &mut Value) -> Option<Outcome> {
    match result {
        Value::Int(0) => Some(Ok(Reply::Missing)),
        // A value may be long, so it is moved, not copied.
        Value::BulkString(bytes) => Some(Ok(Reply::Value(std::mem::take(bytes)))),
        _ => None,
    }
}
