//! Reads a lock's value, or the shares of a key.

use std::time::Duration;

use redis::Value;

use crate::command::encoder::Encoder;
use crate::command::keyspace::shares::{KEPT, Share};
use crate::command::keyspace::{Entry, Keyspace, Step, no_lock};
use crate::command::results::{foreign_lock, millis, quarantine};
use crate::command::script::{Layout, Results, Script};
use crate::command::value::LockValue;
use crate::command::{Call, CallContext, Foreign, Mode, Outcome, Reply};
use crate::config::key::Key;
use crate::util::id::{HolderId, LeaseId};

/// An inspection lists at most this many shares.
const LISTED: usize = 100;

/// Reads the lock's value and ttl, and the length of its queue. If leases share the key, reads its shares.
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
            Some(Entry::Shares(shares)) => {
                // The time on the clock that has set the ends: the key may have moved to a server with another clock.
                let left = shares.expires_at.since(step.now);
                let now = shares.newest().ends_at.after(KEPT).before(left);
                let mut live: Vec<&Share> = shares.all.iter().collect();
                live.retain(|share| share.ends_at >= now);
                live.sort_by_key(|share| share.ends_at);
                let found = live.iter().take(LISTED).map(|share| FoundShare {
                    lease: share.lease,
                    mode: share.mode,
                    holder: share.holder.clone(),
                    expires_in: share.ends_at.since(now),
                });
                Ok(Reply::Shared(Box::new(FoundShares {
                    taken: live.iter().map(|share| share.weight()).sum(),
                    queued: keyspace.queued(key),
                    shares: found.collect(),
                })))
            }
            Some(Entry::Lock(lock)) => Ok(Reply::Found {
                value: Box::new(lock.value(keyspace.queued(key))),
                expires_in: Some(lock.expires_at.since(step.now)),
            }),
        }
    }
}

fn read(result: &mut Value) -> Option<Outcome> {
    match result {
        Value::Int(0) => Some(Ok(Reply::Missing)),
        Value::BulkString(bytes) => inspection(bytes),
        Value::Array(parts) => shares(parts),
        _ => None,
    }
}

/// Reads a result for a shared key: `[<taken>, <length of the queue>, <member>, <ms>, <member>, <ms> ..]`.
fn shares(parts: &[Value]) -> Option<Outcome> {
    let [Value::Int(taken), Value::Int(queued), members @ ..] = parts else {
        return None;
    };
    let share = |pair: &[Value]| match pair {
        [Value::BulkString(member), Value::Int(ms)] => {
            let (lease, mode, holder) = Mode::from_member(std::str::from_utf8(member).ok()?)?;
            let expires_in = millis(*ms);
            Some(FoundShare {
                lease,
                mode,
                holder,
                expires_in,
            })
        }
        _ => None,
    };
    let (taken, queued) = (u32::try_from(*taken).ok()?, usize::try_from(*queued).ok()?);
    let shares: Option<Vec<FoundShare>> = members.chunks(2).map(share).collect();
    Some(Ok(match shares {
        Some(shares) => Reply::Shared(Box::new(FoundShares {
            taken,
            queued,
            shares,
        })),
        // Another user has written such a member. The other keys of the same request are not affected.
        None => Reply::Foreign(Foreign {
            redis_type: "zset",
            expires_in: None,
            mark: 0,
        }),
    }))
}

/// The shares of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundShares {
    /// How many readers or permits there are.
    pub taken: u32,
    /// The number of waiters.
    pub queued: usize,
    /// The first shares to end, at most 100.
    pub shares: Vec<FoundShare>,
}

/// A lease that shares a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundShare {
    pub lease: LeaseId,
    pub mode: Mode,
    pub holder: HolderId,
    pub expires_in: Duration,
}

/// Reads a result: `<ttl in ms> <length of the queue> <value>`.
fn inspection(bytes: &[u8]) -> Option<Outcome> {
    let mut words = bytes.splitn(3, |byte| *byte == b' ');
    let ms: i64 = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let queued = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let found = words.next()?;
    let expires_in = (ms >= 0).then(|| millis(ms));
    Some(Ok(match LockValue::parse(found, queued) {
        Some(value) => Reply::Found {
            value: Box::new(value),
            expires_in,
        },
        // The script does not check each part of the value.
        None => Reply::Foreign(Foreign {
            redis_type: "string",
            expires_in,
            mark: 0,
        }),
    }))
}
