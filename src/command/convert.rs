//! The conversion: the only reader of a key becomes its writer, or the writer becomes a reader.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::queue::Waiter;
use crate::command::keyspace::{Entry, Keyspace, Step, token};
use crate::command::results::{granted, millis, taken, wrong_type};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, IfUnanswered, Mode, Outcome, Release, Reply};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Moves the grant of the lease `from` to `lease`, and changes its mode: to [`Mode::Exclusive`] for a reader, to
/// [`Mode::Read`] for a writer.
#[derive(Clone, Debug)]
pub struct Convert {
    pub key: Key,
    pub from: LeaseId,
    pub lease: LeaseId,
    /// The mode of `lease`.
    pub mode: Mode,
    /// The minimum ttl of `lease`. A longer ttl of the key stays.
    pub ttl: Duration,
    /// An upper bound for the key's ttl after the conversion.
    pub longest: Duration,
    /// The replicas that have to acknowledge the conversion. If too few do, the outcome is `Unavailable`, and the store
    /// releases the key.
    pub replicas: Option<Replicas>,
}

pub static SCRIPT: Script = Script::new(
    "Convert",
    include_str!("../../lua/convert.lua"),
    Layout {
        counter: true,
        holder: true,
        arguments: 4,
        shard_channel: true,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: wrong_type,
        one_for_all: false,
    },
);

impl Call for Convert {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn has_queue_key(&self) -> bool {
        true
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        out.lease(self.from);
        out.lease(self.lease);
        out.millis(self.ttl);
        out.text(&self.mode.to_string());
    }

    /// The store releases the new lease, because Redis may have moved the grant to it. The caller releases the old one.
    fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Undo(Release {
            mode: self.mode,
            ..Release::unheld(self.key.clone(), self.lease, now.after(self.longest))
        })
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let key = &self.key;
        let to = Waiter::new(self.lease, self.mode, None, step.by);
        let least = step.now.after(self.ttl);
        if self.mode.is_read() {
            let expires_at = match keyspace.entries.get(key) {
                Some(Entry::Lock(lock)) if lock.lease == self.from => lock.expires_at,
                Some(entry) => return Ok(entry.taken()),
                None => return Ok(Reply::Missing),
            };
            let ttl = expires_at.max(least).since(step.now);
            let micros = keyspace.give(key, &to, ttl, None, step);
            keyspace.serve(key, None, step);
            return Ok(Reply::granted(token(micros)));
        }
        keyspace.look(key, false, step);
        let ends_at = match keyspace.entries.get_mut(key) {
            Some(Entry::Shares(shares)) => {
                let Some(own) = shares.find(self.from, Mode::Read, step.by) else {
                    return Ok(Reply::Missing);
                };
                let ends_at = own.ends_at;
                if shares.used() > 1 {
                    let expires_in = shares.newest().ends_at.since(step.now);
                    return Ok(refused(expires_in));
                }
                ends_at
            }
            Some(entry) => return Ok(entry.taken()),
            None => return Ok(Reply::Missing),
        };
        let marked = keyspace.queues.contains_key(key);
        let ttl = ends_at.max(least).since(step.now);
        let micros = keyspace.grant(key, &to, ttl, marked, step);
        Ok(Reply::granted(token(micros)))
    }
}

/// The reply while other readers hold the key.
fn refused(expires_in: Duration) -> Reply {
    Reply::Contended {
        expires_in,
        queued: None,
        shared: Some(0),
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::BulkString(micros) => return Some(granted(micros)),
        Value::Int(0) => Reply::Missing,
        Value::Int(ms) => refused(millis(*ms)),
        Value::Array(found) => match found.as_slice() {
            [Value::BulkString(value)] => taken(value),
            _ => return None,
        },
        _ => return None,
    }))
}
