//! How the answers to script calls are read.

use std::time::Duration;

use redis::{ServerError, Value};
use smallvec::smallvec;

use crate::error::{Error, ErrorKind};
use crate::store::command::{Queued, Reply};
use crate::store::redis::connection;
use crate::store::redis::pipeline::caller::{Few, Outcome};
use crate::store::redis::replies::TOO_LARGE;
use crate::store::redis::scripts::Kind;
use crate::store::value::{self, LockValue, NO_FENCED_VALUE, NO_LOCK};
use crate::util::text::without_ids;

/// What came back for one script call.
pub(crate) enum Decoded {
    /// An outcome for each command.
    Outcomes(Few<Outcome>),
    /// An error that is not Redis' own (a proxy's, say): nobody knows what was done.
    OutcomeUnknown(Error),
    /// The call was refused for one of its keys: ask for each by itself.
    SplitBatch,
    /// The server does not know the script (flushed, failed over): send its text.
    NoScript,
    /// Not an answer to what was asked: the connection cannot be trusted.
    Nonsense(Error),
}

/// Reads the answer to a script call for `n` commands of `kind`.
pub(crate) fn decode(kind: Kind, n: usize, value: Value) -> Decoded {
    if let Value::ServerError(error) = &value {
        let (code, detail) = own_words(error);
        match code {
            "NOSCRIPT" => return Decoded::NoScript,
            "CROSSSLOT" | "NOPERM" if n > 1 => return Decoded::SplitBatch,
            _ if !connection::is_code(code) => {
                return Decoded::OutcomeUnknown(connection::refusal(code, Some(detail)));
            }
            _ => {}
        }
    }
    let value = match (kind, value) {
        // Moved instead of copied: it may be long.
        (Kind::Read, Value::BulkString(bytes)) if n == 1 => {
            return Decoded::Outcomes(smallvec![Ok(Reply::Value(bytes))]);
        }
        (_, value) => value,
    };
    let outcomes: Option<Few<Outcome>> = match &value {
        Value::Array(values) if n > 1 && values.len() == n => {
            values.iter().map(|result| outcome(kind, result)).collect()
        }
        Value::Array(_) if n > 1 => None,
        // The answer to one command, or a refusal of the whole call.
        one if n == 1 || matches!(one, Value::ServerError(_)) => {
            outcome(kind, one).map(|one| smallvec![one; n])
        }
        one => outcome(kind, one).and_then(|one| for_all(kind, one, n)),
    };
    outcomes.map_or_else(|| nonsense(kind, &value), Decoded::Outcomes)
}

/// The outcomes of several commands that one result stands for: all were granted, each with the next token,
/// or all were done.
fn for_all(kind: Kind, one: Outcome, n: usize) -> Option<Few<Outcome>> {
    match (kind, one) {
        (_, Ok(Reply::Granted { token })) => {
            let granted = |token| Ok(Reply::Granted { token });
            let all: Few<Outcome> = value::tokens(token).take(n).map(granted).collect();
            (all.len() == n).then_some(all)
        }
        (Kind::Release | Kind::Renew, Ok(Reply::Done)) => Some(smallvec![Ok(Reply::Done); n]),
        _ => None,
    }
}

/// Whether a reply, or a part of it, says that another connection may lead to a server that can do what
/// this one cannot: the new primary.
pub(crate) fn is_out_of_place(reply: &Value) -> bool {
    match reply {
        Value::Array(parts) => parts.iter().any(is_refused_here),
        one => is_refused_here(one),
    }
}

fn is_refused_here(reply: &Value) -> bool {
    let Value::ServerError(error) = reply else {
        return false;
    };
    let code = own_words(error).0;
    matches!(code, "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "READONLY")
}

fn own_words(error: &ServerError) -> (&str, &str) {
    connection::own_words(error.code(), error.details())
}

fn nonsense(kind: Kind, value: &Value) -> Decoded {
    let message = format!(
        "unexpected answer to {kind:?}: {}",
        connection::shape(value)
    );
    Decoded::Nonsense(Error::new(ErrorKind::Protocol, message))
}

/// What one result of a script means, as its header says. A result of the right shape may hold anything that
/// another user of Redis wrote under the key: that is an error of this key, and the connection stays.
fn outcome(kind: Kind, result: &Value) -> Option<Result<Reply, Error>> {
    let reply = match (kind, result) {
        // Scripts return the beginning of what others wrote. Only `read.lua` returns whole strings.
        (_, Value::ServerError(error)) if kind != Kind::Read && error.code() == TOO_LARGE => {
            return None;
        }
        (_, Value::ServerError(error)) => return Some(refused(kind, error)),
        (Kind::Acquire, Value::BulkString(micros)) => {
            let token = std::str::from_utf8(micros).ok().and_then(value::token);
            match token {
                Some(token) => Reply::Granted { token },
                None => return Some(Err(not_ours(NO_LOCK, "string"))),
            }
        }
        (Kind::Acquire, Value::Int(ms)) => {
            let expires_in = millis(*ms);
            Reply::Contended {
                expires_in,
                queued: None,
            }
        }
        (Kind::Acquire, Value::Array(queued)) => {
            let [Value::Int(ms), Value::Int(ahead), Value::Int(since)] = queued.as_slice() else {
                return None;
            };
            let queued = Queued {
                ahead: u64::try_from(*ahead).ok()?,
                since: u64::try_from(*since).ok()?,
            };
            Reply::Contended {
                expires_in: millis(*ms),
                queued: Some(queued),
            }
        }
        (Kind::Release | Kind::Renew | Kind::Write, Value::Int(1)) => Reply::Done,
        (Kind::Write, Value::BulkString(seen)) => {
            let token = std::str::from_utf8(seen).ok();
            match token.and_then(|token| token.parse().ok()) {
                Some(token) => Reply::Stale { token },
                None => return Some(Err(not_ours(NO_FENCED_VALUE, "hash"))),
            }
        }
        (Kind::Write, _) => return None,
        (_, Value::Int(0)) => Reply::Missing,
        (Kind::Adopt, Value::Int(ms)) => Reply::Adopted {
            expires_in: millis(*ms),
        },
        (Kind::Release | Kind::Renew | Kind::Adopt, Value::BulkString(bytes)) => Reply::Taken {
            by: value::holder_of(bytes),
        },
        (Kind::Inspect, Value::BulkString(bytes)) => return inspected(bytes),
        (Kind::Read, Value::BulkString(bytes)) => Reply::Value(bytes.clone()),
        _ => return None,
    };
    Some(Ok(reply))
}

fn refused(kind: Kind, error: &ServerError) -> Result<Reply, Error> {
    match (kind, own_words(error)) {
        // Not even a string where the lock was: somebody wrote over it.
        (Kind::Release | Kind::Renew | Kind::Adopt, ("WRONGTYPE", _)) => {
            Ok(Reply::Taken { by: None })
        }
        (Kind::Acquire | Kind::Inspect, ("FOREIGN", found)) => Err(not_ours(NO_LOCK, found)),
        (Kind::Write | Kind::Read, ("FOREIGN", found)) => Err(not_ours(NO_FENCED_VALUE, found)),
        (_, (code, detail)) => Err(connection::refusal(code, Some(detail))),
    }
}

/// `<ttl in ms> <length of the queue> <value>`
fn inspected(bytes: &[u8]) -> Option<Result<Reply, Error>> {
    let mut words = bytes.splitn(3, |byte| *byte == b' ');
    let ms: i64 = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let queued = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let found = words.next()?;
    let value = LockValue::of(found, queued);
    let reply = value.map(|value| Reply::Found {
        value: Box::new(value),
        expires_in: (ms >= 0).then(|| millis(ms)),
    });
    Some(reply.ok_or_else(|| not_ours(NO_LOCK, "string")))
}

/// An error that begins with `what` and names the type of the value that was found. Its content may be a secret
/// of others.
fn not_ours(what: &str, found: &str) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("{what}: a {}", without_ids(found)),
    )
}

fn millis(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}
