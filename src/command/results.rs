//! Readers for results that several scripts return.

use std::time::Duration;

use crate::command::value::NO_LOCK;
use crate::command::{Foreign, Outcome, Reply, value};
use crate::report::error::{Error, ErrorKind};
use crate::util::text::without_ids;

/// Reads the µs part of a fencing token: the script has granted the key to the lease.
pub fn granted(micros: &[u8]) -> Outcome {
    let token = std::str::from_utf8(micros).ok().and_then(value::token);
    let reply = token.map(Reply::granted);
    reply.ok_or_else(|| foreign_value(NO_LOCK, "string"))
}

/// Reads the value of a lock: another lease holds the key.
pub fn taken(value: &[u8]) -> Reply {
    let by = value::holder_of(value);
    Reply::Taken { by }
}

/// Reads the errors `WRONGTYPE` and `FOREIGN` of a lease's request: another program has written the key. Returns `None`
/// for another `code`.
pub fn wrong_type(code: &str, _: &str) -> Option<Outcome> {
    matches!(code, "WRONGTYPE" | "FOREIGN").then_some(Ok(Reply::Taken { by: None }))
}

/// Reads the error `FOREIGN`: another program has written a value to the key. If the client excludes no other library,
/// the decoder of replies turns this reply into an error. Returns `None` for another `code`.
pub fn foreign_lock(code: &str, detail: &str) -> Option<Outcome> {
    (code == "FOREIGN").then(|| Ok(Reply::Foreign(Foreign::parse(detail))))
}

/// Reads the error `QUARANTINE`: the node of a quorum does not vote for `ms` milliseconds. Returns `None` for another
/// `code`.
pub fn quarantine(code: &str, ms: &str) -> Option<Outcome> {
    let for_another = Duration::from_millis(ms.parse().unwrap_or(0));
    (code == "QUARANTINE").then_some(Ok(Reply::Abstained { for_another }))
}

/// The error for a key with another program's value of the type `found`. `what` is the start of the message. The error
/// does not contain the value, which may be secret.
pub fn foreign_value(what: &str, found: &str) -> Error {
    let message = format!("{what}, but a {}", without_ids(found));
    Error::new(ErrorKind::Protocol, message)
}

pub fn millis(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}
