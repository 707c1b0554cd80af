//! Redisson's locks: the scripts that take the place of the usual ones for a client of
//! [`OtherLibrary::Redisson`](crate::OtherLibrary::Redisson), and the names of Redisson's own keys.
//!
//! A lock of Redisson is a hash with one field, which names the holder. Redisson only compares this field with the
//! field of its own caller, so this library can choose the form of its fields: `<lease id>:<holder id>`.

use std::time::Duration;

use redis::Value;

use crate::command::results::{foreign_lock, granted, wrong_type};
use crate::command::script::{FurtherKeys, Layout, Results, Script};
use crate::command::value::LockValue;
use crate::command::{Foreign, Outcome, Reply, acquire, inspect, release, renew};
use crate::config::MAX_TTL;
use crate::config::key::{Key, KeyLayout};
use crate::config::other_library::OtherLibrary;
use crate::report::error::{Error, ErrorKind};
use crate::util::id::{HolderId, LeaseId};
use crate::util::slot::Slot;

/// Redisson's counter of the tokens of a fenced lock, up to the lock's name.
const TOKEN: &str = "redisson_lock_token:";
/// The queue of Redisson's fair lock, up to the lock's name.
const QUEUE: &str = "redisson_lock_queue:";

/// A call with one key for each command, and no arguments.
const KEYS_ONLY: Layout = Layout {
    redisson: true,
    ..Layout::KEYS_ONLY
};

pub static ACQUIRE: Script = Script::new(
    "Acquire",
    include_str!("../../lua/redisson_acquire.lua"),
    Layout {
        further: Some(FurtherKeys::TokenCounters),
        arguments: 2,
        ..KEYS_ONLY
    },
    Results {
        read: read_acquired,
        read_error: foreign_lock,
        one_for_all: false,
    },
);

pub static RENEW: Script = Script::new(
    "Renew",
    include_str!("../../lua/redisson_renew.lua"),
    Layout {
        arguments: 2,
        ..KEYS_ONLY
    },
    Results {
        read: read_held,
        read_error: wrong_type,
        one_for_all: false,
    },
);

pub static RELEASE: Script = Script::new(
    "Release",
    include_str!("../../lua/redisson_release.lua"),
    Layout {
        further: Some(FurtherKeys::FairQueues),
        arguments: 1,
        shard_channel: true,
        ..KEYS_ONLY
    },
    Results {
        read: read_held,
        read_error: wrong_type,
        one_for_all: false,
    },
);

pub static INSPECT: Script = Script::new(
    "Inspect",
    include_str!("../../lua/redisson_inspect.lua"),
    KEYS_ONLY,
    Results {
        read: read_inspected,
        read_error: foreign_lock,
        one_for_all: false,
    },
);

/// The script in place of `usual`. Fenced values are no locks, so their scripts stay the same.
pub fn script(usual: &'static Script) -> &'static Script {
    let pairs = [
        (&acquire::SCRIPT, &ACQUIRE),
        (&renew::SCRIPT, &RENEW),
        (&release::SCRIPT, &RELEASE),
        (&inspect::SCRIPT, &INSPECT),
    ];
    let own = pairs.into_iter().find(|(of, _)| *of == usual);
    own.map_or(usual, |(_, own)| own)
}

/// The parts of the field that names the holder of a lock.
pub fn field<'a>(lease: &'a str, holder: &'a HolderId) -> [&'a str; 3] {
    [lease, ":", holder.as_str()]
}

/// The parts of the name of Redisson's counter of tokens for a lock.
pub fn token_counter(key: &Key) -> [&str; 4] {
    name(TOKEN, key)
}

/// The parts of the name of the queue of Redisson's fair lock.
pub fn fair_queue(key: &Key) -> [&str; 4] {
    name(QUEUE, key)
}

/// Redisson puts braces around the name of the lock, unless the name has an opening brace. So all keys of the lock have
/// the same slot, as long as the braces in the name are in order.
fn name<'a>(start: &'static str, key: &'a Key) -> [&'a str; 4] {
    let key = key.in_redis();
    match key.contains('{') {
        true => [start, "", key, ""],
        false => [start, "{", key, "}"],
    }
}

/// Returns an error if Redisson's counter of tokens for `key` is in another slot of a Cluster than the key.
pub fn check_key(other: Option<OtherLibrary>, layout: KeyLayout, key: &Key) -> Result<(), Error> {
    let needs_counter = other == Some(OtherLibrary::Redisson { fenced: true });
    if !needs_counter
        || layout != KeyLayout::Slots
        || Slot::of(&token_counter(key).concat()) == key.slot()
    {
        return Ok(());
    }
    let message =
        "its braces give the lock and Redisson's counter of tokens different slots of the Cluster";
    Err(Error::new(ErrorKind::InvalidKey, message))
}

/// Reads the field of a lease of this library.
fn parse_field(field: &str) -> Option<(LeaseId, HolderId)> {
    let (lease, holder) = field.split_once(':')?;
    Some((LeaseId::decode(lease)?, HolderId::decode(holder)?))
}

fn read_acquired(result: &mut Value) -> Option<Outcome> {
    Some(match result {
        Value::BulkString(token) => match token.strip_prefix(b"=") {
            Some(number) => Ok(Reply::Granted {
                token: std::str::from_utf8(number).ok()?.parse().ok()?,
                is_token_in_value: false,
            }),
            None => granted(token),
        },
        // Another program may have removed the ttl. The next renewal sets it again.
        Value::Int(ms) => Ok(Reply::contended(
            u64::try_from(*ms).map_or(MAX_TTL, Duration::from_millis),
        )),
        _ => return None,
    })
}

fn read_held(result: &mut Value) -> Option<Outcome> {
    Some(Ok(match result {
        Value::Int(0) => Reply::Missing,
        Value::Int(1) => Reply::Done,
        Value::BulkString(field) => {
            let field = std::str::from_utf8(field).ok();
            let by = field.and_then(parse_field).map(|(_, holder)| holder);
            Reply::Taken { by }
        }
        _ => return None,
    }))
}

fn read_inspected(result: &mut Value) -> Option<Outcome> {
    let text = match result {
        Value::Int(0) => return Some(Ok(Reply::Missing)),
        Value::BulkString(text) => text,
        _ => return None,
    };
    let (ms, field) = text.split_at(text.iter().position(|byte| *byte == b' ')?);
    let ms = std::str::from_utf8(ms).ok()?;
    let expires_in = ms.parse().ok().map(Duration::from_millis);
    // Another user may have written the field.
    let field = std::str::from_utf8(&field[1..]).ok();
    Some(Ok(match field.and_then(parse_field) {
        Some((lease, holder)) => Reply::Found {
            value: Box::new(LockValue {
                lease,
                token: None,
                holder,
                queued: 0,
            }),
            expires_in,
        },
        // The script has checked only one character of the field.
        None => Reply::Foreign(Foreign {
            redis_type: "hash",
            expires_in,
            mark: 0,
        }),
    }))
}
