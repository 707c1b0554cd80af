//! Reads the replies to script calls.

use redis::{ServerError, Value};
use smallvec::smallvec;

use crate::command::script::Script;
use crate::command::value;
use crate::command::{Outcome, Reply};
use crate::config::other_library::OtherLibrary;
use crate::report::error::Error;
use crate::store::completion::Few;
use crate::wire::net::error_replies;
use crate::wire::net::refusal::{is_refused, script_refused};
use crate::wire::net::replies::TOO_LARGE;

/// The reply to one script call.
pub enum Decoded {
    /// The outcomes of the commands.
    Outcomes(Few<Outcome>),
    /// An error that Redis does not send, for example from a proxy. Redis may have carried the call out.
    OutcomeUnknown(Error),
    /// Redis refused the call because of one of its keys, so the client has to send one call for each command.
    SplitBatch,
    /// The client has to send the script's text. Either the server does not know the script, after SCRIPT FLUSH or a
    /// fail-over; or the server, a proxy or an ACL refuses calls by hash.
    NoScript { are_hashes_refused: bool },
    /// A reply that this script never gives. The connection must not be used again.
    Unexpected(Error),
}

/// Reads the reply to a call of `script` for `n` commands. `prefix` is the prefix of the client's keys. With
/// `other_library`, a key that another program has written is the lock of that library, and no error.
pub fn decode(
    script: &Script,
    n: usize,
    mut value: Value,
    prefix: &str,
    other_library: Option<OtherLibrary>,
) -> Decoded {
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
            // The slot is moving, and some of the keys have moved. The old or the new node carries out a call with one
            // key.
            "ASK" | "TRYAGAIN" if n > 1 && script.layout.has_one_key_each() => {
                return Decoded::SplitBatch;
            }
            _ if !error_replies::is_redis_code(code) => {
                return Decoded::OutcomeUnknown(error_replies::error_reply(code, Some(detail)));
            }
            _ => {}
        }
    }
    let outcomes: Option<Few<Outcome>> = match &mut value {
        Value::Array(values) if n > 1 && values.len() == n => {
            let each = values.iter_mut();
            each.map(|result| outcome(script, result, prefix, other_library))
                .collect()
        }
        Value::Array(_) if n > 1 => None,
        // The result of one command, or an error of the whole call.
        one if n == 1 || matches!(one, Value::ServerError(_)) => {
            outcome(script, one, prefix, other_library).map(|one| smallvec![one; n])
        }
        one => outcome(script, one, prefix, other_library)
            .and_then(|one| outcomes_of_all(script, &one, n)),
    };
    outcomes.map_or_else(
        || Decoded::Unexpected(error_replies::unexpected_reply(script.name, &value)),
        Decoded::Outcomes,
    )
}

/// The outcomes of `n` commands from one result, which stands for all of them: all were granted, with consecutive
/// tokens, or all had the same outcome.
fn outcomes_of_all(script: &Script, one: &Outcome, n: usize) -> Option<Few<Outcome>> {
    match one {
        Ok(Reply::Granted { token, .. }) => {
            let granted = |token| Ok(Reply::granted(token));
            let all: Few<Outcome> = value::consecutive_tokens(*token)
                .take(n)
                .map(granted)
                .collect();
            (all.len() == n).then_some(all)
        }
        Ok(Reply::Done | Reply::Clock { .. }) if script.results.one_for_all => {
            Some(smallvec![one.clone(); n])
        }
        _ => None,
    }
}

/// Whether a reply, or an element of it, is an error of a server that is not the primary or is unavailable.
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
    error_replies::code_and_detail(error.code(), error.details())
}

/// The outcome of one command, from its result. `None` if the script never returns this result.
fn outcome(
    script: &Script,
    result: &mut Value,
    prefix: &str,
    other_library: Option<OtherLibrary>,
) -> Option<Outcome> {
    Some(match read(script, result, prefix)? {
        Ok(Reply::Foreign(found)) if other_library.is_none() => Err(found.error()),
        outcome => outcome,
    })
}

fn read(script: &Script, result: &mut Value, prefix: &str) -> Option<Outcome> {
    let Value::ServerError(error) = result else {
        return (script.results.read)(result);
    };
    // Scripts without a limit cut a foreign value to its first bytes, so they never cause this error, and the reply is
    // unexpected.
    if !script.layout.limit && error.code() == TOO_LARGE {
        return None;
    }
    let (code, detail) = code_and_detail(error);
    let known = (script.results.read_error)(code, detail);
    Some(known.unwrap_or_else(|| Err(script_refused(script, (code, Some(detail)), prefix))))
}
