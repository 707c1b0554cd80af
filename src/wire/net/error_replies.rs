//! Turns error replies of a server into errors of this library. Long texts are cut, and secrets are removed.

use std::borrow::Cow;
use std::fmt;

use redis::{RedisError, ServerError, Value};

use crate::report::error::{Error, ErrorKind};
use crate::util::slot::Redirect;
use crate::util::text::{has_id, printable, without_ids};
use crate::wire::net::replies::TOO_LARGE;

/// The most bytes of a server's text in an error. A longer text is cut.
const LONGEST_TEXT: usize = 300;

/// Returns `what`, with the code of an error reply in parentheses if there is one. The error's source shows the text of
/// the reply.
pub fn with_code(what: &str, error: &RedisError) -> String {
    match error.code().filter(|code| is_redis_code(code)) {
        Some(code) => format!("{what} ({})", printable(code, LONGEST_TEXT)),
        None => what.to_owned(),
    }
}

/// The error codes of Redis and of this library's scripts. They are shown even if they contain the password.
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
    "QUARANTINE",
    "READONLY",
    "TOOLARGE",
    "TRYAGAIN",
    "UNBLOCKED",
    "WRONGPASS",
    "WRONGTYPE",
];

/// Puts `<password>` in place of the password in each error of a reply.
pub fn hide_password(reply: &mut Value, password: &str) {
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

/// Removes the password from an error. Returns `None` if the error does not contain the password, or if the removal
/// would change the kind of the error or its redirect.
fn without_password(error: &ServerError, password: &str) -> Option<Value> {
    let (code, detail) = (error.code(), error.details().unwrap_or(""));
    let hide = |text: &str| text.replace(password, "<password>");
    let received = format!("{code} {detail}");
    let shown = match CODES.contains(&code) {
        true => format!("{code} {}", hide(detail)),
        false => hide(&received),
    };
    let line = format!("-{}\r\n", shown.replace(['\r', '\n'], " "));
    let hidden = redis::parse_redis_value(line.as_bytes()).ok();
    hidden.filter(|hidden| {
        let kind = |error: &ServerError| error_reply(error.code(), error.details()).kind();
        // The address of a redirect may contain the password.
        let redirect =
            |error: &ServerError| Redirect::parse(error.code(), error.details().unwrap_or(""));
        let is_same = |hidden: &ServerError| {
            kind(hidden) == kind(error) && redirect(hidden) == redirect(error)
        };
        shown != received && matches!(hidden, Value::ServerError(hidden) if is_same(hidden))
    })
}

/// Makes the text of `error` [`printable`], and removes what may be secret: lease ids, and arguments that Redis quotes.
pub fn sanitized(error: RedisError) -> RedisError {
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

/// Cuts the arguments that Redis quotes from an unknown command: one of them may be a password or a lease id.
pub fn without_arguments(text: &str) -> &str {
    text.split(", with args beginning with")
        .next()
        .unwrap_or(text)
}

/// The kind of error of this library for an error of redis-rs.
pub fn classify(error: &RedisError) -> ErrorKind {
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
pub fn error_reply(code: &str, detail: Option<&str>) -> Error {
    let (code, detail) = code_and_detail(code, detail);
    let detail = without_arguments(detail);
    let kind = match code {
        "DENIED" | "NOAUTH" | "NOPERM" | "WRONGPASS" => ErrorKind::Denied,
        "BUSY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "MISCONF" | "NOREPLICAS" | "OOM"
        | "READONLY" | "TRYAGAIN" | "UNBLOCKED" => ErrorKind::Unavailable,
        TOO_LARGE => ErrorKind::TooLarge,
        _ if has_too_many_clients(Some(detail)) => ErrorKind::Unavailable,
        // The ACL lets the user run scripts, but denies a command or key of this script.
        _ if is_denied_in_script(detail) => ErrorKind::Denied,
        _ => ErrorKind::Protocol,
    };
    let text = match next_step(kind, code) {
        Some(next) => format!("{}; {next}", server_text(code, detail)),
        None => without_ids(&format!("{code} {detail}")).into_owned(),
    };
    Error::new(kind, text).with_redirect(Redirect::parse(code, detail))
}

/// Whether an ACL denies a command or a key to a script. Redis up to 7.0 sends the first text; later versions send the
/// second.
pub fn is_denied_in_script(detail: &str) -> bool {
    detail.contains("user executing the script can't")
        || detail.starts_with("ACL failure in script: ")
}

/// The server's own text, for the middle of a message: without a full stop, and without parts that may be secret.
pub fn server_text(code: &str, detail: &str) -> String {
    let detail = without_arguments(detail);
    let text = without_ids(&format!("{code} {detail}")).into_owned();
    let text = printable(&text, LONGEST_TEXT);
    text.trim_end_matches(['.', ' ']).to_owned()
}

/// The next step of an operator after an error reply. `None` if the reply itself is enough.
pub fn next_step(kind: ErrorKind, code: &str) -> Option<&'static str> {
    match (kind, code) {
        (ErrorKind::Denied, "NOAUTH" | "WRONGPASS") => Some("check user and password"),
        (ErrorKind::Denied, "DENIED") => Some("set a password there, or bind it to one address"),
        (ErrorKind::Denied, _) => Some("allow what docs/redis.md lists under Rights"),
        (ErrorKind::Unavailable, "ERR") => {
            Some("close some connections, or raise its `maxclients`")
        }
        (_, "OOM") => Some("raise `maxmemory`, or delete other data"),
        (_, "READONLY") => Some(USE_PRIMARY),
        (_, "LOADING") => Some("wait until the server has read its data"),
        (_, "MASTERDOWN") => Some("check the primary, and the link to it"),
        (_, "NOREPLICAS") => Some("check the replicas, and `min-replicas-to-write`"),
        (_, "BUSY") => Some("wait for the script that runs there, or end it"),
        (_, "MISCONF") => Some("check the disk and the log of the server"),
        (_, "CLUSTERDOWN") => Some("check the nodes with CLUSTER INFO"),
        (_, "TRYAGAIN") => Some("try again when the slot has moved"),
        (_, "UNBLOCKED") => Some("try again"),
        _ => None,
    }
}

/// The next step if a server is not the primary. With sentinels and on a Cluster, the client itself finds the new
/// primary.
const USE_PRIMARY: &str =
    "use the URL of the primary; with sentinels or on a Cluster, try again after the fail-over";

/// Whether this is the error of a server that accepts no more connections: `ERR max number of clients reached`.
pub fn has_too_many_clients(detail: Option<&str>) -> bool {
    detail.is_some_and(|detail| detail.contains("max number of clients"))
}

/// The error for an error reply to `WAIT`: `Denied` by an ACL, `Unsupported` (by a proxy, for example), or
/// `Unavailable` on a server that is no longer the primary.
pub fn wait_refused(code: &str, detail: Option<&str>) -> Error {
    let kind = match error_reply(code, detail).kind() {
        ErrorKind::Protocol if detail.is_some_and(|text| text.contains("replica instances")) => {
            ErrorKind::Unavailable
        }
        ErrorKind::Protocol => ErrorKind::Unsupported,
        kind => kind,
    };
    let text = server_text(code, detail.unwrap_or(""));
    let next = match kind {
        ErrorKind::Denied => "allow `replicas` of `leasehold acl`",
        ErrorKind::Unsupported => {
            "leave out `replicas`, or, if this is a proxy, use the URL of the server behind it"
        }
        _ => USE_PRIMARY,
    };
    Error::new(
        kind,
        format!("WAIT, which `replicas` needs, is refused: {text}; {next}"),
    )
}

/// The error for a reply that `command` never has.
pub fn unexpected_reply(command: impl fmt::Display, reply: &Value) -> Error {
    let message = format!(
        "unexpected reply to {command}, {}; check whether a proxy answers there",
        type_name(reply)
    );
    Error::new(ErrorKind::Protocol, message)
}

/// The code and the detail of an error reply, in the form of Redis 7. Redis 6.2 wraps the errors of commands in
/// scripts: `@user_script: 18: -OOM command not allowed ..`, or, if the script raises the error, `ERR Error running
/// script (call to f_..): @user_script:18: @user_script: 18: -OOM ..`. Redis 6.2 sends some errors without a code, for
/// which Redis 7 sends `ERR`.
pub fn code_and_detail<'a>(code: &'a str, detail: Option<&'a str>) -> (&'a str, &'a str) {
    const MARK: &str = "@user_script:";
    let detail = detail.unwrap_or("");
    let wrapped = match code {
        MARK => Some(detail),
        "ERR" if detail.starts_with("Error running script (call to ") => {
            detail.rsplit_once(MARK).map(|(_, wrapped)| wrapped)
        }
        _ => None,
    };
    // Before the error, Redis puts the line number of the script and `: `.
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

/// The type of a reply, for errors. The content is left out, since it may contain a lease id or another secret.
pub fn type_name(value: &Value) -> String {
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

pub fn is_error(value: &Value) -> bool {
    matches!(value, Value::ServerError(_))
}

/// Whether `code` has the form of an error code of Redis. Errors of proxies often begin with another word.
pub fn is_redis_code(code: &str) -> bool {
    code.bytes().all(|byte| byte.is_ascii_uppercase())
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
    fn a_redirect_keeps_its_address() {
        for (line, hidden) in [
            ("-MOVED 7 redis-1:7000", "-MOVED 7 redis-1:7000"),
            ("-ASK 7 h:redis", "-ASK 7 h:<password>"),
            ("-ERR redis is wrong", "-ERR <password> is wrong"),
        ] {
            let read = |line: &str| redis::parse_redis_value(format!("{line}\r\n").as_bytes());
            let mut reply = read(line).unwrap();
            hide_password(&mut reply, "redis");
            assert_eq!(reply, read(hidden).unwrap(), "{line}");
        }
    }

    #[test]
    fn lease_ids_are_left_out_of_short_errors() {
        let detail = "no lease 0123456789abcdef0123456789abcdef here".to_owned();
        let error = sanitized(redis::make_extension_error("ERR".to_owned(), Some(detail)));
        assert_eq!(error.detail(), Some("no lease <id> here"));
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

    #[test]
    fn error_replies_name_the_next_step() {
        for code in [
            "BUSY",
            "CLUSTERDOWN",
            "DENIED",
            "LOADING",
            "MASTERDOWN",
            "MISCONF",
            "NOAUTH",
            "NOPERM",
            "NOREPLICAS",
            "OOM",
            "READONLY",
            "TRYAGAIN",
            "UNBLOCKED",
            "WRONGPASS",
        ] {
            let shown = error_reply(code, Some("some text.")).to_string();
            let (_, next) = shown.split_once("some text; ").expect(code);
            assert!(!next.is_empty(), "{shown}");
        }
        let too_many = error_reply("ERR", Some("max number of clients reached"));
        assert_eq!(
            too_many.to_string(),
            "Redis is unavailable: ERR max number of clients reached; close some connections, or raise its `maxclients`"
        );
        let read_only = error_reply("READONLY", Some("You can't write against a replica."));
        assert_eq!(
            read_only.at("h:1").to_string(),
            "Redis is unavailable: h:1: READONLY You can't write against a replica; use the URL of the primary; with \
             sentinels or on a Cluster, try again after the fail-over"
        );
        for (code, detail, next) in [
            (
                "NOPERM",
                "no permissions",
                "; allow `replicas` of `leasehold acl`",
            ),
            (
                "ERR",
                "unknown command 'WAIT'",
                "; leave out `replicas`, or, if",
            ),
            (
                "ERR",
                "WAIT cannot be used with replica instances.",
                "instances; use the URL of the primary; with sentinels",
            ),
        ] {
            let shown = wait_refused(code, Some(detail)).to_string();
            assert!(shown.contains(next), "{shown}");
        }
    }
}
