//! The renewal: sets the ttl of a lease's key back to its full length.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Step};
use crate::command::results::{taken, wrong_type};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, Mode, Outcome, Reply};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::util::id::LeaseId;

/// Sets the key's ttl back to its full length, if the lease still holds the key.
#[derive(Clone, Debug)]
pub struct Renew {
    pub key: Key,
    pub lease: LeaseId,
    pub mode: Mode,
    /// The token of the grant, for a quorum.
    pub token: u64,
    pub ttl: Duration,
    /// The replicas that have to acknowledge the new ttl. If too few do, the outcome is `Unavailable`.
    pub replicas: Option<Replicas>,
}

pub static SCRIPT: Script = Script::new(
    "Renew",
    include_str!("../../lua/renew.lua"),
    Layout {
        arguments: 2,
        ..Layout::KEYS_ONLY
    },
    Results {
        read,
        read_error: wrong_type,
        one_for_all: true,
    },
);

impl Call for Renew {
    fn script(&self) -> &'static Script {
        &SCRIPT
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        match self.mode.member(self.lease, context.holder) {
            Some(member) => out.text(&member),
            None => context.write_lease(out, self.lease),
        }
        out.millis(self.ttl);
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, lease, ttl) = (&self.key, self.lease, self.ttl);
        if !self.mode.is_exclusive() {
            return Ok(self.renew_share(keyspace, step));
        }
        let lock = match keyspace.entries.get_mut(key) {
            Some(Entry::Lock(lock)) if lock.lease == lease => lock,
            Some(entry) => return Ok(entry.taken()),
            None => return Ok(Reply::Missing),
        };
        lock.doubt = None;
        let expires_at = step.now.after(ttl);
        if lock.expires_at < expires_at {
            lock.expires_at = expires_at;
            step.changed(key);
        }
        Ok(Reply::Done)
    }
}

impl Renew {
    fn renew_share(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Reply {
        // A late confirmation counts until another lease gets the share.
        keyspace.look(&self.key, true, step);
        let shares = match keyspace.entries.get_mut(&self.key) {
            Some(Entry::Shares(shares)) => shares,
            Some(entry) => return entry.taken(),
            None => return Reply::Missing,
        };
        let Some(share) = shares.find(self.lease, self.mode, step.by) else {
            return Reply::Missing;
        };
        share.extend(step.now.after(self.ttl));
        keyspace.keep_shares(&self.key, step);
        Reply::Done
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::Int(0) => Reply::Missing,
        Value::Int(1) => Reply::Done,
        Value::BulkString(value) => taken(value),
        _ => return None,
    }))
}
