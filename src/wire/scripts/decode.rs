//! Reads the replies to script calls.

use std::time::Duration;

use redis::{ServerError, Value};
use smallvec::smallvec;

use crate::command::value;
use crate::command::value::{LockValue, NO_FENCED_VALUE, NO_LOCK};
use crate::command::{Queued, Reply};
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::{Few, Outcome};
use crate::util::id;
use crate::util::text::without_ids;
use crate::wire::connect::errors;
use crate::wire::connect::refusal::{is_refused, script_refused};
use crate::wire::net::replies::TOO_LARGE;
use crate::wire::scripts::ScriptKind;

/// The reply to one script call.
pub enum Decoded {
    /// An outcome for each command.
    Outcomes(Few<Outcome>),
    /// An error from a proxy, for example, but not from Redis. The call may have been carried out.
    OutcomeUnknown(Error),
    /// Redis refused the call because of one of its keys: send a call for each command.
    SplitBatch,
    /// Send the script's text. The server does not know the script, after SCRIPT FLUSH or a fail-over. Or the server, a
    /// proxy or an ACL refuses all calls by hash.
    NoScript { are_hashes_refused: bool },
    /// A reply that this script cannot give: the connection must not be used again.
    Unexpected(Error),
}

/// Reads the reply to a call of the script `kind` for `n` commands. `prefix` is the prefix of the client's keys.
pub fn decode(kind: ScriptKind, n: usize, value: Value, prefix: &str) -> Decoded {
    if let Value::ServerError(error) = &value {
        let (code, detail) = code_and_detail(error);
        match code {
            "NOSCRIPT" => {
                return Decoded::NoScript {
                    are_hashes_refused: false,
                };
            }
            _ if is_refused("EVALSHA", code, detail) => {
                return Decoded::NoScript {
                    are_hashes_refused: true,
                };
            }
            "CROSSSLOT" | "NOPERM" if n > 1 => return Decoded::SplitBatch,
            // The slot is moving, and some of its keys have moved. A call with one key is carried out by the old node,
            // or by the new one.
            "ASK" | "TRYAGAIN" if n > 1 && kind.has_one_key_each() => return Decoded::SplitBatch,
            _ if !errors::is_redis_code(code) => {
                return Decoded::OutcomeUnknown(errors::error_reply(code, Some(detail)));
            }
            _ => {}
        }
    }
    let value = match (kind, value) {
        // A value may be long, so it is moved, not copied.
        (ScriptKind::Read, Value::BulkString(bytes)) if n == 1 => {
            return Decoded::Outcomes(smallvec![Ok(Reply::Value(bytes))]);
        }
        (_, value) => value,
    };
    let outcomes: Option<Few<Outcome>> = match &value {
        Value::Array(values) if n > 1 && values.len() == n => {
            let each = values.iter();
            each.map(|result| outcome(kind, result, prefix)).collect()
        }
        Value::Array(_) if n > 1 => None,
        // One command's reply, or an error of the whole call.
        one if n == 1 || matches!(one, Value::ServerError(_)) => {
            outcome(kind, one, prefix).map(|one| smallvec![one; n])
        }
        one => outcome(kind, one, prefix).and_then(|one| outcomes_of_all(kind, one, n)),
    };
    outcomes.map_or_else(|| unexpected(kind, &value), Decoded::Outcomes)
}

/// The outcomes of `n` commands from one result: all were granted with consecutive tokens, or all were done.
fn outcomes_of_all(kind: ScriptKind, one: Outcome, n: usize) -> Option<Few<Outcome>> {
    match (kind, one) {
        (_, Ok(Reply::Granted { token, .. })) => {
            let granted = |token| Ok(Reply::granted(token));
            let all: Few<Outcome> = value::consecutive_tokens(token)
                .take(n)
                .map(granted)
                .collect();
            (all.len() == n).then_some(all)
        }
        (ScriptKind::Probe, one) => Some(smallvec![one; n]),
        (ScriptKind::Release | ScriptKind::Renew, Ok(Reply::Done)) => {
            Some(smallvec![Ok(Reply::Done); n])
        }
        _ => None,
    }
}

/// Whether a reply, or an element of it, is an error of a server that is not the primary or cannot serve requests now.
pub fn is_refused_by_non_primary(reply: &Value) -> bool {
    match reply {
        Value::Array(parts) => parts.iter().any(has_non_primary_code),
        one => has_non_primary_code(one),
    }
}

fn has_non_primary_code(reply: &Value) -> bool {
    let Value::ServerError(error) = reply else {
        return false;
    };
    let code = code_and_detail(error).0;
    matches!(code, "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "READONLY")
}

fn code_and_detail(error: &ServerError) -> (&str, &str) {
    errors::code_and_detail(error.code(), error.details())
}

fn unexpected(kind: ScriptKind, value: &Value) -> Decoded {
    let kind = format_args!("{kind:?}");
    Decoded::Unexpected(errors::unexpected_reply(kind, value))
}

/// The outcome of one command from its result, as the script's header describes it. `None` if the script cannot return
/// this result. If the result holds unreadable text that another user wrote under the key, the outcome is an error of
/// this key.
fn outcome(kind: ScriptKind, result: &Value, prefix: &str) -> Option<Result<Reply, Error>> {
    let reply = match (kind, result) {
        // All other scripts cut a foreign value to its first bytes. So none of them can cause this error, and the
        // reply is unexpected.
        (_, Value::ServerError(error)) if !kind.sends_limit() && error.code() == TOO_LARGE => {
            return None;
        }
        (_, Value::ServerError(error)) => return Some(error_outcome(kind, error, prefix)),
        (
            ScriptKind::Acquire | ScriptKind::Propose | ScriptKind::Hold,
            Value::BulkString(micros),
        ) => {
            let token = std::str::from_utf8(micros).ok().and_then(value::token);
            match token {
                Some(token) => Reply::granted(token),
                None => return Some(Err(foreign_value(NO_LOCK, "string"))),
            }
        }
        (ScriptKind::Probe, Value::BulkString(micros)) => {
            let micros = std::str::from_utf8(micros).ok().and_then(id::number)?;
            Reply::Clock { micros }
        }
        (ScriptKind::Probe, _) => return None,
        (ScriptKind::Propose, Value::Array(none)) if none.is_empty() => Reply::Missing,
        (ScriptKind::Propose | ScriptKind::Hold, Value::Array(stored)) => {
            let [Value::BulkString(stored)] = stored.as_slice() else {
                return None;
            };
            Reply::Taken {
                by: value::holder_of(stored),
            }
        }
        (ScriptKind::Hold, Value::Int(0)) => Reply::Missing,
        (ScriptKind::Hold, _) => return None,
        (ScriptKind::Acquire | ScriptKind::Propose, Value::Int(ms)) => {
            let expires_in = millis(*ms);
            Reply::Contended {
                expires_in,
                queued: None,
            }
        }
        (ScriptKind::Acquire, Value::Array(queued)) => {
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
        (ScriptKind::Release | ScriptKind::Renew | ScriptKind::Write, Value::Int(1)) => Reply::Done,
        (ScriptKind::Release, Value::Int(2)) => Reply::NotListening { by_some: false },
        (ScriptKind::Write, Value::BulkString(seen)) => {
            let token = std::str::from_utf8(seen).ok();
            match token.and_then(|token| token.parse().ok()) {
                Some(token) => Reply::Stale { token },
                None => return Some(Err(foreign_value(NO_FENCED_VALUE, "hash"))),
            }
        }
        (ScriptKind::Write, _) => return None,
        (_, Value::Int(0)) => Reply::Missing,
        (ScriptKind::Adopt, Value::Array(adopted)) => {
            let [Value::Int(ms), Value::BulkString(micros)] = adopted.as_slice() else {
                return None;
            };
            let micros = std::str::from_utf8(micros).ok();
            Reply::Adopted {
                expires_in: millis(*ms),
                token: micros.and_then(value::token)?,
            }
        }
        (ScriptKind::Release | ScriptKind::Renew | ScriptKind::Adopt, Value::BulkString(bytes)) => {
            Reply::Taken {
                by: value::holder_of(bytes),
            }
        }
        (ScriptKind::Inspect, Value::BulkString(bytes)) => return inspection(bytes),
        (ScriptKind::Read, Value::BulkString(bytes)) => Reply::Value(bytes.clone()),
        _ => return None,
    };
    Some(Ok(reply))
}

fn error_outcome(kind: ScriptKind, error: &ServerError, prefix: &str) -> Result<Reply, Error> {
    match (kind, code_and_detail(error)) {
        // Another user wrote a value of another type under the lock's key.
        (ScriptKind::Release | ScriptKind::Renew | ScriptKind::Adopt, ("WRONGTYPE", _)) => {
            Ok(Reply::Taken { by: None })
        }
        (
            ScriptKind::Acquire | ScriptKind::Propose | ScriptKind::Hold | ScriptKind::Inspect,
            ("FOREIGN", found),
        ) => Err(foreign_value(NO_LOCK, found)),
        (ScriptKind::Write | ScriptKind::Read, ("FOREIGN", found)) => {
            Err(foreign_value(NO_FENCED_VALUE, found))
        }
        (kind, ("QUARANTINE", ms))
            if kind.is_of_quorum() || matches!(kind, ScriptKind::Release | ScriptKind::Inspect) =>
        {
            let for_another = Duration::from_millis(ms.parse().unwrap_or(0));
            Ok(Reply::Abstained { for_another })
        }
        (ScriptKind::Propose | ScriptKind::Hold, ("LATE", micros)) => Ok(Reply::TooLate {
            micros: micros.parse().unwrap_or(0),
        }),
        (ScriptKind::Propose | ScriptKind::Hold, ("AHEAD", _)) => Ok(Reply::TooFarAhead),
        (_, (code, detail)) => Err(script_refused(kind, (code, Some(detail)), prefix)),
    }
}

/// Reads the result of lua/inspect.lua: `<ttl in ms> <length of the queue> <value>`.
fn inspection(bytes: &[u8]) -> Option<Result<Reply, Error>> {
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

/// The error for a value of another user: `what`, and the type of the value. Its content may be secret.
fn foreign_value(what: &str, found: &str) -> Error {
    Error::new(
        ErrorKind::Protocol,
        format!("{what}: a {}", without_ids(found)),
    )
}

fn millis(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}
