//! Turns errors of redis-rs and error replies of the server into errors of this library. The texts of these errors are
//! shortened, and hold no secret.

use std::borrow::Cow;
use std::time::Duration;

use redis::{ConnectionInfo, RedisError, ServerError, Value};

use crate::error::{Error, ErrorKind};
use crate::store::redis::replies::TOO_LARGE;
use crate::store::redis::url::address;
use crate::util::text::{has_id, printable, without_ids};

/// The most bytes of a server's text in an error. A longer text is cut.
const LONGEST_TEXT: usize = 300;

/// The error of a request whose reply did not come.
pub(crate) fn no_reply(error: RedisError) -> Error {
    from_redis(classify(&error), error)
}

/// Makes an error of this kind with the text of redis-rs.
pub(crate) fn from_redis(kind: ErrorKind, error: RedisError) -> Error {
    let error = sanitized(error);
    Error::new(kind, error.to_string()).with_source(error)
}

/// The error codes that mean something to this library. They are shown even if they contain the password.
const CODES: &[&str] = &[
    "BUSY",
    "CLUSTERDOWN",
    "CROSSSLOT",
    "DENIED",
    "ERR",
    "EXECABORT",
    "FOREIGN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOAUTH",
    "NOPERM",
    "NOREPLICAS",
    "NOSCRIPT",
    "OOM",
    "READONLY",
    "TOOLARGE",
    "TRYAGAIN",
    "UNBLOCKED",
    "WRONGPASS",
    "WRONGTYPE",
];

/// Puts `<password>` in place of the password in each error of a reply.
pub(super) fn hide_password(reply: &mut Value, password: &str) {
    match reply {
        Value::ServerError(error) => {
            if let Some(hidden) = without_password(error, password) {
                *reply = hidden;
            }
        }
        Value::Array(parts) | Value::Set(parts) | Value::Push { data: parts, .. } => {
            let each = parts.iter_mut();
            each.for_each(|part| hide_password(part, password));
        }
        Value::Map(pairs) => pairs.iter_mut().for_each(|(key, value)| {
            hide_password(key, password);
            hide_password(value, password);
        }),
        _ => {}
    }
}

/// Returns the error without the password. Returns `None` if the error does not contain the password, or if the error
/// would have another kind without it.
fn without_password(error: &ServerError, password: &str) -> Option<Value> {
    let (code, detail) = (error.code(), error.details().unwrap_or(""));
    let hide = |text: &str| text.replace(password, "<password>");
    let said = format!("{code} {detail}");
    let shown = match CODES.contains(&code) {
        true => format!("{code} {}", hide(detail)),
        false => hide(&said),
    };
    let line = format!("-{}\r\n", shown.replace(['\r', '\n'], " "));
    let hidden = redis::parse_redis_value(line.as_bytes()).ok();
    hidden.filter(|hidden| {
        let kind = |error: &ServerError| error_reply(error.code(), error.details()).kind();
        shown != said && matches!(hidden, Value::ServerError(hidden) if kind(hidden) == kind(error))
    })
}

/// `error` with a [`printable`] text, without lease ids, and without the arguments that Redis quotes, which may be
/// secrets.
pub(crate) fn sanitized(error: RedisError) -> RedisError {
    let text = error.to_string();
    let shown = without_arguments(&text);
    let is_clean = shown == text && !has_id(shown);
    if is_clean && matches!(printable(shown, LONGEST_TEXT), Cow::Borrowed(_)) {
        return error;
    }
    let detail = without_arguments(error.detail().unwrap_or(&text));
    let detail = printable(&without_ids(detail), LONGEST_TEXT).into_owned();
    match (error.kind(), error.code()) {
        (redis::ErrorKind::Extension, Some(code)) => {
            let code = printable(&without_ids(code), LONGEST_TEXT).into_owned();
            redis::make_extension_error(code, Some(detail))
        }
        (kind, _) => (kind, "the other side said", detail).into(),
    }
}

/// Cuts the arguments that Redis quotes from an unknown command: an argument may be a password or a lease id.
fn without_arguments(text: &str) -> &str {
    text.split(", with args beginning with")
        .next()
        .unwrap_or(text)
}

/// The kind of an error of redis-rs.
pub(crate) fn classify(error: &RedisError) -> ErrorKind {
    use redis::ErrorKind as Redis;
    if error.is_timeout() {
        return ErrorKind::Timeout;
    }
    if let Some(errors) = error.clone().into_server_errors()
        && let Some((_, first)) = errors.first()
    {
        return error_reply(first.code(), first.details()).kind();
    }
    match error.kind() {
        Redis::AuthenticationFailed => ErrorKind::Denied,
        Redis::Io => ErrorKind::Unavailable,
        Redis::InvalidClientConfig => ErrorKind::InvalidConfig,
        Redis::Server(_) | Redis::Extension => {
            error_reply(error.code().unwrap_or(""), error.detail()).kind()
        }
        _ => ErrorKind::Protocol,
    }
}

/// The error for an error reply of the server.
pub(crate) fn error_reply(code: &str, detail: Option<&str>) -> Error {
    let (code, detail) = code_and_detail(code, detail);
    let detail = without_arguments(detail);
    let kind = match code {
        "DENIED" | "NOAUTH" | "NOPERM" | "WRONGPASS" => ErrorKind::Denied,
        "BUSY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "MISCONF" | "NOREPLICAS" | "OOM"
        | "READONLY" | "TRYAGAIN" | "UNBLOCKED" => ErrorKind::Unavailable,
        TOO_LARGE => ErrorKind::TooLarge,
        _ if detail.contains("max number of clients") => ErrorKind::Unavailable,
        // An ACL lets the user run scripts, but denies a command or key of this script. Redis up to 7.0 sends the first
        // text, later versions send the second.
        _ if detail.contains("user executing the script can't") => ErrorKind::Denied,
        _ if detail.starts_with("ACL failure in script: ") => ErrorKind::Denied,
        _ => ErrorKind::Protocol,
    };
    Error::new(kind, without_ids(&format!("{code} {detail}")))
}

/// As [`error_reply`], for a login. The server's text may repeat the password.
pub(crate) fn login_error_reply(info: &ConnectionInfo, error: &ServerError) -> Error {
    let refused = error_reply(error.code(), error.details());
    if repeats_login(info, &error.to_string()) {
        return Error::new(refused.kind(), LOGIN_REPEATED);
    }
    refused
}

/// Code and detail of an error reply, in the form of Redis 7. Redis 6.2 wraps the errors of commands inside a script:
/// `@user_script: 18: -OOM command not allowed ..`, or, if the script raises the error, `ERR Error running script (call
/// to f_..): @user_script:18: @user_script: 18: -OOM ..`. For some errors Redis 6.2 leaves out the code, where Redis 7
/// says `ERR`.
pub(crate) fn code_and_detail<'a>(code: &'a str, detail: Option<&'a str>) -> (&'a str, &'a str) {
    const MARK: &str = "@user_script:";
    let detail = detail.unwrap_or("");
    let wrapped = match code {
        MARK => Some(detail),
        "ERR" if detail.starts_with("Error running script (call to ") => {
            detail.rsplit_once(MARK).map(|(_, wrapped)| wrapped)
        }
        _ => None,
    };
    // Redis puts the line number of the script, then `: `, before the error.
    let Some((_, own)) = wrapped.and_then(|wrapped| wrapped.split_once(": ")) else {
        return (code, detail);
    };
    let (code, detail) = own.split_once(' ').unwrap_or((own, ""));
    match code.strip_prefix('-') {
        Some(code) => (code, detail),
        None if is_redis_code(code) => (code, detail),
        None => ("ERR", own),
    }
}

/// The type of a reply, for errors. They do not show the content, which may hold a lease id or another secret.
pub(crate) fn type_name(value: &Value) -> String {
    match value {
        Value::Nil => "nothing".to_owned(),
        Value::Int(number) => format!("the number {number}"),
        Value::BulkString(bytes) => format!("a string of {} bytes", bytes.len()),
        Value::Array(items) => format!("an array of {} items", items.len()),
        Value::SimpleString(_) | Value::Okay => "a status".to_owned(),
        Value::ServerError(error) => format!("the error {:?}", without_ids(error.code())),
        _ => "a reply of another type".to_owned(),
    }
}

/// Whether `word` has the form of an error code of Redis. The errors of a proxy begin with other words.
pub(crate) fn is_redis_code(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_uppercase())
}

/// The error of an attempt to connect to the server at `info`.
pub(super) fn connect_error(
    info: &ConnectionInfo,
    connect_timeout: Duration,
    error: RedisError,
) -> Error {
    let addr = address(info);
    let settings = info.redis_settings();
    let text = error.to_string();
    let about = |kind, what: &str| Error::new(kind, format!("{addr}: {what}"));
    let kind = match classify(&error) {
        ErrorKind::TooLarge => ErrorKind::Protocol,
        kind => kind,
    };
    if repeats_login(info, &text) {
        return about(kind, LOGIN_REPEATED);
    }
    let error = sanitized(error);
    match kind {
        // No request was sent yet, so no outcome is unknown.
        ErrorKind::Timeout => about(
            ErrorKind::Unavailable,
            &format!("no answer within {:?}", connect_timeout),
        ),
        ErrorKind::Denied => match settings.username() {
            // In a URL without a password, the user's name may be the password.
            Some(_) if settings.password().is_none_or(str::is_empty) => {
                about(kind, "no password was given")
            }
            user => {
                let user = user.unwrap_or("default");
                about(kind, &format!("user {user:?} is refused"))
            }
        },
        ErrorKind::Protocol => about(kind, "does not answer as Redis does"),
        _ => about(kind, &error.to_string()),
    }
    .with_source(error)
}

/// The message in place of a server's text that repeats the password.
const LOGIN_REPEATED: &str = "refuses the login with a text that repeats the login";

/// Whether the server's text repeats the password, or a user's name that may be the password.
fn repeats_login(info: &ConnectionInfo, text: &str) -> bool {
    let settings = info.redis_settings();
    let given = |secret: &&str| !secret.is_empty();
    let secret = settings.password().filter(given).or(settings.username());
    let text = without_arguments(text);
    // The server may have shown a line break or a quote in another way.
    let parts = secret
        .into_iter()
        .flat_map(|secret| secret.split(|c: char| !c.is_alphanumeric()));
    parts
        .filter(|part| part.len() > 3)
        .any(|part| text.contains(part))
        || secret.is_some_and(|secret| text.contains(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_replies_have_the_kind_for_their_code() {
        let cases = [
            ("OOM", ErrorKind::Unavailable),
            ("LOADING", ErrorKind::Unavailable),
            ("READONLY", ErrorKind::Unavailable),
            ("NOPERM", ErrorKind::Denied),
            ("WRONGTYPE", ErrorKind::Protocol),
            ("ERR", ErrorKind::Protocol),
        ];
        for (code, kind) in cases {
            assert_eq!(error_reply(code, None).kind(), kind, "{code}");
        }
    }

    #[test]
    fn script_errors_have_one_kind_on_all_versions() {
        const RAISED: &str = "ERR Error running script (call to f_1f8f4c): @user_script:1: ";
        let raised = |error: &str| format!("{RAISED}{error}");
        let cases = [
            (
                ErrorKind::Denied,
                [
                    "@user_script: 1: The user executing the script can't run this command",
                    "ERR The user executing the script can't run this command or subcommand",
                    "ERR ACL failure in script: User x has no permissions to run the 'set' command",
                    "ERR ACL failure in script: No permissions to access a key",
                ]
                .map(str::to_owned)
                .to_vec(),
            ),
            (
                ErrorKind::Unavailable,
                vec![
                    "OOM command not allowed".to_owned(),
                    "@user_script: 33: -OOM command not allowed".to_owned(),
                    raised("@user_script: 1: -OOM command not allowed"),
                    "@user_script: 7: -READONLY You can't write".to_owned(),
                ],
            ),
            (
                ErrorKind::Protocol,
                vec![
                    raised("WRONGTYPE Operation against a key"),
                    raised("attempt to index a nil value"),
                    "ERR Error running script".to_owned(),
                ],
            ),
        ];
        for (kind, errors) in cases {
            for error in errors {
                let (code, detail) = error.split_once(' ').unwrap();
                assert_eq!(error_reply(code, Some(detail)).kind(), kind, "{error}");
            }
        }
        let wrongtype = raised("WRONGTYPE Operation against a key");
        let detail = wrongtype.strip_prefix("ERR ");
        assert_eq!(code_and_detail("ERR", detail).0, "WRONGTYPE");
    }
}
