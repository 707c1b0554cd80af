//! The three commands of a quorum to one of its nodes: propose a grant, hold a key for a lease, and read the node's
//! clock.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Entry, Keyspace, Step, no_lock, token};
use crate::command::results::{foreign_lock, granted, millis, quarantine, taken};
use crate::command::script::{Layout, Results, Script};
use crate::command::{Call, CallContext, IfUnanswered, Outcome, Reply};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id;
use crate::util::id::LeaseId;

/// Asks one node of a quorum to grant a key to the lease, if the key is free. The token is the proposal, or a greater
/// one if the node's clock or its fence counter is later.
#[derive(Clone, Debug)]
pub struct Propose {
    pub key: Key,
    pub lease: LeaseId,
    pub ttl: Duration,
    /// The µs part of the proposed token.
    pub micros: u64,
    /// The time in µs until which the client waits for the votes. If the node's clock is later, it replies `TooLate`.
    pub until: u64,
}

/// A hold with this ttl only asks whether the lease holds the key, and leaves the key's ttl as it is.
const ONLY_ASKS: Duration = Duration::from_millis(1);

/// The layout of the scripts that propose and hold.
const LAYOUT: Layout = Layout {
    counter: true,
    mark: true,
    holder: true,
    arguments: 4,
    ..Layout::KEYS_ONLY
};

pub static PROPOSE: Script = Script::new(
    "Propose",
    include_str!("../../lua/propose.lua"),
    LAYOUT,
    Results {
        read: read_proposed,
        read_error,
        one_for_all: true,
    },
)
.only_on_quorum();

impl Call for Propose {
    fn script(&self) -> &'static Script {
        &PROPOSE
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        out.lease(self.lease);
        out.millis(self.ttl);
        // The script compares times as text.
        out.text(&format!("{:016}", self.micros));
        out.text(&format!("{:016}", self.until));
    }

    /// The caller gets an error. The quorum's store then releases the lease on the node.
    fn if_unanswered(&self, _: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Report
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, lease, ttl, proposal) = (&self.key, self.lease, self.ttl, self.micros);
        if let Some(refusal) = keyspace.abstained(step).or(too_late(self.until, step)) {
            return Ok(refusal);
        }
        Ok(match keyspace.entries.get(key) {
            Some(Entry::Fenced { .. } | Entry::Shares(_)) => return Err(no_lock()),
            Some(Entry::Lock(lock)) if lock.lease == lease => Reply::granted(token(lock.micros)),
            Some(Entry::Lock(lock)) => Reply::contended(lock.expires_at.since(step.now)),
            None => vote(keyspace, key, lease, proposal, ttl, step),
        })
    }
}

fn read_proposed(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::BulkString(micros) => return Some(granted(micros)),
        Value::Int(ms) => Reply::contended(millis(*ms)),
        _ => return None,
    }))
}

fn read_error(code: &str, detail: &str) -> Option<Outcome> {
    let reply = match code {
        "LATE" => Reply::TooLate {
            micros: detail.parse().unwrap_or(0),
        },
        "AHEAD" => Reply::TooFarAhead,
        _ => return quarantine(code, detail).or_else(|| foreign_lock(code, detail)),
    };
    Some(Ok(reply))
}

/// Makes one node of a quorum hold the key for the lease, with the full ttl and at least this token. A key of another
/// lease stays as it is.
#[derive(Clone, Debug)]
pub struct Hold {
    pub key: Key,
    pub lease: LeaseId,
    pub ttl: Duration,
    /// The µs part of the token.
    pub micros: u64,
    /// Whether the node sets a missing key:
    ///
    /// - `None`: the node does not set the key, and replies `Missing`.
    /// - `Some`: the node sets the key while its clock shows at most these µs. Later it replies
    ///   [`TooLate`](crate::command::Reply::TooLate).
    pub sets_missing: Option<u64>,
}

pub static HOLD: Script = Script::new(
    "Hold",
    include_str!("../../lua/hold.lua"),
    LAYOUT,
    Results {
        read: read_held,
        read_error,
        one_for_all: true,
    },
)
.only_on_quorum();

impl Call for Hold {
    fn script(&self) -> &'static Script {
        &HOLD
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn arguments(&self, out: &mut Encoder<'_>, _: CallContext<'_>) {
        out.lease(self.lease);
        out.millis(self.ttl);
        // The script compares times as text.
        out.text(&format!("{:016}", self.micros));
        let until = self.sets_missing.map(|until| format!("{until:016}"));
        out.text(&until.unwrap_or_default());
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let (key, lease, ttl, micros) = (&self.key, self.lease, self.ttl, self.micros);
        let sets_missing = self.sets_missing;
        if let Some(abstained) = keyspace.abstained(step) {
            return Ok(abstained);
        }
        let is_too_far_ahead = keyspace.is_too_far_ahead(micros, step);
        match keyspace.entries.get_mut(key) {
            Some(Entry::Fenced { .. } | Entry::Shares(_)) => return Err(no_lock()),
            Some(Entry::Lock(lock)) if lock.lease != lease => {
                let by = Some(lock.holder.clone());
                return Ok(Reply::Taken { by });
            }
            Some(Entry::Lock(_)) if is_too_far_ahead => return Ok(Reply::TooFarAhead),
            Some(Entry::Lock(lock)) => {
                let only_asks = ttl <= ONLY_ASKS;
                if !only_asks {
                    lock.expires_at = lock.expires_at.max(step.now.after(ttl));
                }
                if !only_asks || lock.micros != micros {
                    step.changed(key);
                }
                lock.micros = micros;
            }
            None => {
                let Some(until) = sets_missing else {
                    return Ok(Reply::Missing);
                };
                if let Some(refusal) = too_late(until, step) {
                    return Ok(refusal);
                }
                if is_too_far_ahead {
                    return Ok(Reply::TooFarAhead);
                }
                keyspace.set(key, lease, micros, ttl, step);
            }
        }
        keyspace.last_micros = keyspace.last_micros.max(micros);
        let token = token(micros);
        Ok(Reply::granted(token))
    }
}

fn read_held(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::BulkString(micros) => return Some(granted(micros)),
        Value::Int(0) => Reply::Missing,
        Value::Array(stored) => match stored.as_slice() {
            [Value::BulkString(stored)] => taken(stored),
            _ => return None,
        },
        _ => return None,
    }))
}

/// Reads the clock of one node of a quorum, if the node votes.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The key of the node's mark.
    pub mark: Key,
}

pub static PROBE: Script = Script::new(
    "Probe",
    include_str!("../../lua/probe.lua"),
    Layout {
        arguments: 1,
        ..Layout::KEYS_ONLY
    },
    Results {
        read: read_clock,
        read_error: quarantine,
        one_for_all: true,
    },
)
.only_on_quorum();

impl Call for Probe {
    fn script(&self) -> &'static Script {
        &PROBE
    }

    fn key(&self) -> &Key {
        &self.mark
    }

    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        out.millis(context.quarantine);
    }

    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        let micros = step.micros();
        Ok(keyspace.abstained(step).unwrap_or(Reply::Clock { micros }))
    }
}

fn read_clock(result: &mut Value) -> Option<Outcome> {
    let Value::BulkString(micros) = result else {
        return None;
    };
    let micros = std::str::from_utf8(micros).ok().and_then(id::number)?;
    Some(Ok(Reply::Clock { micros }))
}

/// Grants a free key to the lease, under the greatest of the proposal, the clock and the fence counter.
fn vote(
    keyspace: &mut Keyspace,
    key: &Key,
    lease: LeaseId,
    proposal: u64,
    ttl: Duration,
    step: &mut Step<'_>,
) -> Reply {
    if keyspace.is_too_far_ahead(proposal, step) {
        return Reply::TooFarAhead;
    }
    let micros = keyspace.next_micros(step).max(proposal);
    keyspace.last_micros = micros;
    keyspace.set(key, lease, micros, ttl, step);
    Reply::granted(token(micros))
}

/// The reply `TooLate`, if the node's clock is later than `until`, in µs.
fn too_late(until: u64, step: &Step<'_>) -> Option<Reply> {
    let micros = step.micros();
    (micros > until).then_some(Reply::TooLate { micros })
}
