//! Turns errors of redis-rs and error replies of the server into errors of this library. Long texts are cut, and
//! secrets are removed.

use std::borrow::Cow;
use std::time::Duration;
use std::{fmt, io};

use redis::{ConnectionInfo, RedisError, ServerError, Value};

use crate::report::error::{Error, ErrorKind};
use crate::util::slot::Redirect;
use crate::util::text::{Shown, has_id, printable, without_ids};
use crate::wire::connect::refusal::{Refusal, command_refused};
use crate::wire::connect::steps::{Progress, Step};
use crate::wire::connect::url::{HostPort, address};
use crate::wire::net::replies::TOO_LARGE;
use crate::wire::net::socket::ConnectError;
#[cfg(feature = "tls")]
use crate::wire::net::tls;
#[cfg(feature = "tls")]
use crate::wire::net::tls::TlsError;

/// The most bytes of a server's text in an error. A longer text is cut.
const LONGEST_TEXT: usize = 300;

/// The error of a request on an open connection to `address`, if no reply has come. `awaited` is the command whose reply
/// is missing, if one is awaited.
pub fn no_reply(address: &str, awaited: Option<&str>, error: RedisError) -> Error {
    let kind = classify(&error);
    let message = match kind {
        ErrorKind::Timeout => timed_out(address, "`command_timeout`"),
        ErrorKind::Unavailable if error.kind() == redis::ErrorKind::Io => {
            let before = awaited.map(|command| format!(" before the reply to {command}"));
            let before = before.unwrap_or_default();
            format!(
                "the connection to {address} broke{before}; the client connects again by itself"
            )
        }
        // The message contains the whole text of `error`, so the new error needs no source.
        _ => return Error::new(kind, format!("{address}: {}", sanitized(error))),
    };
    Error::new(kind, message).with_source(sanitized(error))
}

fn timed_out(address: &str, limit: &str) -> String {
    format!("{address} did not reply within {limit}; check the server's load and the network")
}

/// Adds the address of the server to an error that was made from its reply (`Denied`, `Unavailable`, `Unsupported`),
/// unless the error has it.
pub fn of_reply(address: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Denied | ErrorKind::Unavailable | ErrorKind::Unsupported
            if !error.names(address) =>
        {
            error.at(address)
        }
        _ => error,
    }
}

/// Adds the address of the server to a time-out without a text: the caller's deadline came before the time-out of the
/// connection. Other errors name their server already, which may be another one after a fail-over.
pub fn at_server(address: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Timeout if error.message().is_empty() => {
            let limit = "`command_timeout` or the shorter limit of the call";
            Error::new(ErrorKind::Timeout, timed_out(address, limit))
        }
        _ => error,
    }
}

/// `what`, and the code of an error reply in parentheses. Without a code, `what` alone. The text of the reply is shown
/// by the error's source.
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

/// Returns the error without the password. Returns `None` if the error does not contain the password, or if removing
/// the password would change the kind of the error or its redirect.
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

/// Cuts the arguments that Redis quotes from an unknown command: an argument may be a password or a lease id.
fn without_arguments(text: &str) -> &str {
    text.split(", with args beginning with")
        .next()
        .unwrap_or(text)
}

/// The kind of the error of this library for an error of redis-rs.
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
        // An ACL lets the user run scripts, but denies a command or key of this script. Redis up to 7.0 sends the text
        // of the first arm, and later versions send that of the second.
        _ if detail.contains("user executing the script can't") => ErrorKind::Denied,
        _ if detail.starts_with("ACL failure in script: ") => ErrorKind::Denied,
        _ => ErrorKind::Protocol,
    };
    let text = match next_step(kind, code) {
        Some(next) => format!("{}; {next}", server_text(code, detail)),
        None => without_ids(&format!("{code} {detail}")).into_owned(),
    };
    Error::new(kind, text).with_redirect(Redirect::parse(code, detail))
}

/// The server's own text, for the middle of a message: without a full stop, and without what may be secret.
pub fn server_text(code: &str, detail: &str) -> String {
    let detail = without_arguments(detail);
    let text = without_ids(&format!("{code} {detail}")).into_owned();
    let text = printable(&text, LONGEST_TEXT);
    text.trim_end_matches(['.', ' ']).to_owned()
}

/// The next step of an operator after an error reply. `None` if the reply itself is enough.
fn next_step(kind: ErrorKind, code: &str) -> Option<&'static str> {
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

/// The next step if a server is no primary. With sentinels and on a Cluster, the client finds the new primary by
/// itself.
const USE_PRIMARY: &str =
    "use the URL of the primary; with sentinels or on a Cluster, try again after the fail-over";

/// Whether this is the error of a server that accepts no more connections: `ERR max number of clients reached`.
pub fn has_too_many_clients(detail: Option<&str>) -> bool {
    detail.is_some_and(|detail| detail.contains("max number of clients"))
}

/// The error for an error reply to `WAIT`: `Denied` by an ACL, `Unsupported` by a proxy for example, or `Unavailable`
/// on a server that is no primary any more.
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
        ErrorKind::Denied => "allow `replicas` of `cargo xtask acl`",
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

/// The error of a reply that `command` cannot have.
pub fn unexpected_reply(command: impl fmt::Display, reply: &Value) -> Error {
    let message = format!(
        "unexpected reply to {command}, {}; check whether a proxy answers there",
        type_name(reply)
    );
    Error::new(ErrorKind::Protocol, message)
}

/// The reason why the server's plain commands are not used for acquires.
pub fn plain_refused(reply: &Value, address: &str, prefix: &str) -> Error {
    let error = match reply {
        Value::ServerError(error) => {
            let reply = (error.code(), error.details());
            command_refused("a command of MULTI .. EXEC", reply, prefix)
        }
        other => unexpected_reply("EXEC", other),
    };
    error.at(address)
}

/// The reason why plain commands are not used for acquires: `count` connections ended before the reply to a trial.
pub fn lost_trials(address: &str, count: u32) -> Error {
    let message = format!(
        "{address} has closed {count} connections after MULTI; check whether a proxy answers there"
    );
    Error::new(ErrorKind::Unavailable, message)
}

/// The error of a caller that leaves before an attempt to connect has begun.
pub fn no_connection(address: &str) -> Error {
    let message = format!(
        "{address}: the time was too short to connect, so nothing was sent; use a longer time-out, or check the load of \
         this machine"
    );
    Error::new(ErrorKind::Unavailable, message)
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

/// The error of a caller that leaves while an attempt to connect to `address` is in `step`, since `lasted`.
pub fn unfinished(
    address: &str,
    step: Step,
    lasted: Duration,
    announced_by: Option<Announcer<'_>>,
) -> Error {
    let (lasted, next) = (Shown(lasted), step.next_action());
    let mut message =
        format!("{address}: {step} has not ended after {lasted}, so nothing was sent; {next}");
    if let (Step::LookUp | Step::Connect, Some(by)) = (step, announced_by) {
        message += &format!("; {by}");
    }
    Error::new(ErrorKind::Unavailable, message)
}

/// Makes the errors of an attempt to connect. Each names the address, what was attempted, and the next step.
#[derive(Clone, Copy)]
pub struct Attempted<'a> {
    pub info: &'a ConnectionInfo,
    /// The time-out of the whole attempt.
    timeout: Duration,
    /// The setting that the time-out comes from, as messages show it: with its name in backticks.
    setting: &'static str,
    /// The prefix of the client's keys.
    pub prefix: &'a str,
    /// Receives the steps of the attempt.
    progress: Option<&'a Progress<'a>>,
    /// `None` for an address of the user.
    announced_by: Option<Announcer<'a>>,
}

/// The server that has announced the address of another one.
#[derive(Clone, Copy)]
pub enum Announcer<'a> {
    /// This sentinel names the primary.
    Sentinel(&'a HostPort),
    /// A sentinel names another sentinel.
    OtherSentinel,
    /// This node of a Cluster names another node.
    Node(&'a HostPort),
}

impl fmt::Display for Announcer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const OWN_NETWORK: &str = "announces this address, which may be right only in its own network (Docker, NAT); \
             announce one that this client can reach";
        match self {
            Self::Sentinel(by) => write!(
                f,
                "the sentinel {by} {OWN_NETWORK} (`sentinel monitor`, `replica-announce-ip`)"
            ),
            Self::OtherSentinel => {
                write!(f, "another sentinel {OWN_NETWORK} (`sentinel announce-ip`)")
            }
            Self::Node(by) => write!(
                f,
                "the Cluster's node {by} {OWN_NETWORK} (`cluster-announce-ip`)"
            ),
        }
    }
}

impl<'a> Attempted<'a> {
    pub fn new(
        info: &'a ConnectionInfo,
        timeout: Duration,
        setting: &'static str,
        prefix: &'a str,
    ) -> Self {
        Self {
            info,
            timeout,
            setting,
            prefix,
            progress: None,
            announced_by: None,
        }
    }

    /// Adds the announcer of the address to the errors of addresses that cannot be connected to.
    pub fn announced_by(self, announced_by: Option<Announcer<'a>>) -> Self {
        Self {
            announced_by,
            ..self
        }
    }

    /// Tells `progress` the steps of the attempt.
    pub fn with_progress(self, progress: Option<&'a Progress<'a>>) -> Self {
        Self { progress, ..self }
    }

    /// Notes that a step of the attempt begins.
    pub fn enter(&self, step: Step) {
        if let Some(progress) = self.progress {
            progress.enter(step);
        }
    }

    /// An error whose message is the address, a blank, and `what`.
    pub fn about(&self, kind: ErrorKind, what: impl fmt::Display) -> Error {
        Error::new(kind, format!("{} {what}", address(self.info)))
    }

    /// The same as [`about`](Self::about), with the announcer of the address.
    fn about_address(&self, kind: ErrorKind, what: impl fmt::Display) -> Error {
        match self.announced_by {
            Some(by) => self.about(kind, format_args!("{what}; {by}")),
            None => self.about(kind, what),
        }
    }

    /// The error for a socket that could not be connected.
    pub fn connect_error(&self, error: ConnectError) -> Error {
        let error = match error {
            ConnectError::Resolve(error) => {
                let what =
                    "cannot be reached: its host name has no address; check the name, and DNS";
                let error = sanitized(error.into());
                return self
                    .about_address(ErrorKind::Unavailable, what)
                    .with_source(error);
            }
            ConnectError::SlowLookup(took) => {
                let (took, timeout, setting) = (Shown(took), Shown(self.timeout), self.setting);
                let what = format!(
                    "cannot be reached: the lookup of its host name took {took} of {timeout} ({setting}); check DNS"
                );
                return self.about_address(ErrorKind::Unavailable, what);
            }
            ConnectError::Connect(error) => error,
        };
        use io::ErrorKind::{
            ConnectionRefused, NotFound, PermissionDenied, TimedOut, Unsupported, WouldBlock,
        };
        let (timeout, setting) = (Shown(self.timeout), self.setting);
        let kind = match error.kind() {
            Unsupported => ErrorKind::InvalidConfig,
            _ => ErrorKind::Unavailable,
        };
        let what = match error.kind() {
            ConnectionRefused => "refuses connections; check that Redis runs there, and the port",
            TimedOut | WouldBlock => &format!(
                "accepts no connection within {timeout} ({setting}); check the address, and \
                 firewalls"
            ),
            NotFound => "does not exist; check the path of the socket, and that Redis runs",
            PermissionDenied => "may not be opened by this process; check the permissions",
            _ => "cannot be reached; check the address, and the network",
        };
        self.about_address(kind, what)
            .with_source(sanitized(error.into()))
    }

    /// The error for a handshake of TLS that failed.
    #[cfg(feature = "tls")]
    pub fn handshake_error(&self, server_name: &str, error: TlsError) -> Error {
        let (timeout, setting) = (Shown(self.timeout), self.setting);
        match error {
            TlsError::Refused(error) => self.tls_refused(server_name, &error),
            TlsError::Late { has_received: true } => self.about(
                ErrorKind::Unavailable,
                format_args!(
                    "did not end the TLS handshake within {timeout} ({setting}); check the \
                     server's load and the network"
                ),
            ),
            TlsError::Late {
                has_received: false,
            } => self.about(
                ErrorKind::Unavailable,
                format_args!(
                    "did not answer the TLS handshake within {timeout} ({setting}); use redis:// \
                     if this port is one without TLS"
                ),
            ),
            TlsError::Closed { has_received } => self.handshake_closed(has_received),
            TlsError::Io(error) => {
                let closed = self.handshake_closed(false);
                closed.with_source(sanitized(error.into()))
            }
        }
    }

    #[cfg(feature = "tls")]
    fn handshake_closed(&self, has_received: bool) -> Error {
        let next = if has_received {
            "check the server's log"
        } else {
            "use redis:// if this port is one without TLS"
        };
        self.about(
            ErrorKind::Unavailable,
            format_args!("closed the connection during the TLS handshake; {next}"),
        )
    }

    /// The error for a server whose certificate is not accepted, or that does not accept the client's.
    #[cfg(feature = "tls")]
    pub fn tls_refused(&self, server_name: &str, error: &rustls::Error) -> Error {
        let reason = tls::reason(error, server_name);
        let about = match tls::is_about_name(error) {
            true => self.about_address(ErrorKind::Tls, reason),
            false => self.about(ErrorKind::Tls, reason),
        };
        about.with_source(error.clone())
    }

    /// The error for a request without a reply to `command`, if it is known. `received` has the bytes that came in place
    /// of a reply.
    pub fn no_reply_error(
        &self,
        step: Step,
        command: Option<&str>,
        error: RedisError,
        received: &[u8],
    ) -> Error {
        let (timeout, setting) = (Shown(self.timeout), self.setting);
        let error = sanitized(error);
        let (kind, what) = match classify(&error) {
            // No request for a lock was sent yet, so no outcome is unknown.
            ErrorKind::Timeout => (
                ErrorKind::Unavailable,
                format!(
                    "did not answer {step} within {timeout} ({setting}); check the server's load \
                     and the network"
                ),
            ),
            ErrorKind::Unavailable => (
                ErrorKind::Unavailable,
                match command {
                    Some(command) => format!(
                        "closed the connection during {step}, after {command}; check the server's log, use rediss:// \
                         if this is its TLS port, or, if it is a proxy that does not know {command}, use the URL of \
                         the server behind it"
                    ),
                    None => format!(
                        "closed the connection during {step}; check the server's log, and use rediss:// if this is \
                         its TLS port"
                    ),
                },
            ),
            // These bytes begin a TLS record: an alert, or a part of a handshake.
            _ if matches!(received, [0x15 | 0x16, 3, ..]) => (
                ErrorKind::Tls,
                "answers in TLS; use rediss://, or the server's port without TLS".to_owned(),
            ),
            kind => {
                // These replies have a limit of the library, which the user cannot change.
                let kind = match kind {
                    ErrorKind::TooLarge => ErrorKind::Protocol,
                    kind => kind,
                };
                (kind, NOT_REDIS.to_owned())
            }
        };
        self.about(kind, what).with_source(error)
    }

    /// The error for an error reply to `command`.
    pub fn refused_error(&self, step: Step, command: &str, error: &ServerError) -> Error {
        // redis-rs shows some codes by names of its own.
        let (code, detail) = (error.code(), error.details().unwrap_or(""));
        let kind = match error_reply(code, Some(detail)).kind() {
            ErrorKind::Protocol if command == "SELECT" => ErrorKind::InvalidConfig,
            kind => kind,
        };
        if repeats_login(self.info, &format!("{code} {detail}")) {
            let what = format!(
                "refuses {command} during {step}, in words that repeat the password; send it with `redis-cli`"
            );
            return self.about(kind, what);
        }
        let text = server_text(code, detail);
        let with_source = |error: Error, source: &ServerError| {
            error.with_source(sanitized(source.clone().into()))
        };
        let next = match (kind, code) {
            (ErrorKind::Denied, "NOAUTH") => {
                let what = "refuses the login without a password; put it into the URL \
                            (redis://user:password@host), or give it with `Builder::credentials`";
                return with_source(self.about(kind, what), error);
            }
            (ErrorKind::Denied, "WRONGPASS") => {
                let user = self.user();
                let what = format!(
                    "refuses the login of {user}: user or password is wrong, or the user is disabled; check them"
                );
                return with_source(self.about(kind, what), error);
            }
            (ErrorKind::Denied, "DENIED") => {
                let what = "is in protected mode; set a password there, or bind it to one address";
                return with_source(self.about(kind, what), error);
            }
            (ErrorKind::Unavailable, _) if has_too_many_clients(error.details()) => {
                let what = "accepts no more connections; close some, or raise its `maxclients`";
                return with_source(self.about(kind, what), error);
            }
            (ErrorKind::Protocol, _) if command == "AUTH" => {
                let what = format!(
                    "refuses the login: {text}; check user and password, and that the server has them"
                );
                return self.about(ErrorKind::Denied, what);
            }
            (ErrorKind::InvalidConfig, _) => {
                let db = self.info.redis_settings().db();
                format!("use a database that the server has: the URL names {db}")
            }
            _ => match next_step(kind, code) {
                Some(next) => next.to_owned(),
                None => "check the host and the port, and whether a proxy answers there".to_owned(),
            },
        };
        let (kind, refused, next) = match Refusal::of(code, detail) {
            None => (kind, format!("refuses {command}"), next),
            Some(refusal) => {
                let next = refusal.next_step(command, self.prefix);
                match refusal {
                    Refusal::UnknownCommand => {
                        (ErrorKind::Unsupported, format!("refuses {command}"), next)
                    }
                    _ => {
                        let (user, denied) = (self.user(), refusal.denied(command));
                        (kind, format!("does not allow {user} {denied}"), next)
                    }
                }
            }
        };
        self.about(kind, format!("{refused} during {step}: {text}; {next}"))
    }

    /// The user, for messages. In a URL without a password, the user's name may be the password.
    fn user(&self) -> String {
        let settings = self.info.redis_settings();
        let has_password = settings.password().is_some_and(|it| !it.is_empty());
        match settings.username() {
            Some(_) if !has_password => "this user".to_owned(),
            user => format!("user {:?}", user.unwrap_or("default")),
        }
    }

    /// The error for the error reply of a sentinel to `command`.
    pub fn refused_by_sentinel(&self, command: &str, error: &ServerError) -> Error {
        // The error has no source, since the sentinel's text may repeat the password.
        let about = |kind, what: &str| self.about(kind, what);
        match error.code() {
            "NOAUTH" => about(
                ErrorKind::Denied,
                "refuses the login without a password; give it with `Builder::sentinel_credentials`",
            ),
            "WRONGPASS" => about(
                ErrorKind::Denied,
                "refuses the login: user or password of `Builder::sentinel_credentials` is wrong; check both",
            ),
            "ERR" if command != "AUTH" => about(
                ErrorKind::InvalidConfig,
                "is no sentinel; use the ports of the sentinels, or redis:// for a single server",
            ),
            _ => self.refused_error(Step::AskSentinel, command, error),
        }
    }
}

/// The rest of an error's message for a server that does not speak Redis' protocol.
pub const NOT_REDIS: &str = "does not answer as Redis does; check the host and the port";

/// Whether the server's text repeats the password, or a user's name that may be the password.
fn repeats_login(info: &ConnectionInfo, text: &str) -> bool {
    let settings = info.redis_settings();
    let is_set = |secret: &&str| !secret.is_empty();
    let secret = settings.password().filter(is_set).or(settings.username());
    let text = without_arguments(text);
    // The server may have escaped a line break or a quote, so the parts between such characters are searched, too.
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
        let info = redis::IntoConnectionInfo::into_connection_info("redis://h").unwrap();
        let attempted = Attempted::new(&info, Duration::from_secs(1), "`connect_timeout`", "p:");
        let Value::ServerError(loading) =
            redis::parse_redis_value(b"-LOADING Redis is loading.\r\n").unwrap()
        else {
            panic!("it is an error");
        };
        let error = attempted.refused_error(Step::LogIn, "HELLO", &loading);
        assert_eq!(
            error.to_string(),
            "Redis is unavailable: h:6379 refuses HELLO during the login: LOADING Redis is loading; wait until the server has read \
             its data"
        );
        for (code, detail, next) in [
            (
                "NOPERM",
                "no permissions",
                "; allow `replicas` of `cargo xtask acl`",
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

    #[test]
    fn an_unreachable_address_names_its_announcer() {
        let info = redis::IntoConnectionInfo::into_connection_info("redis://h").unwrap();
        let by = HostPort::new(b"s", b"7").unwrap();
        let text = |announced_by| {
            let attempted =
                Attempted::new(&info, Duration::from_nanos(1), "`connect_timeout`", "p:");
            let refused = ConnectError::Connect(io::ErrorKind::TimedOut.into());
            let attempted = attempted.announced_by(announced_by);
            attempted.connect_error(refused).message().to_owned()
        };
        let what = "h:6379 accepts no connection within 1ms (`connect_timeout`); check the address, and firewalls";
        assert_eq!(text(None), what);
        for (announcer, name, setting) in [
            (
                Announcer::Sentinel(&by),
                "the sentinel s:7",
                "`sentinel monitor`, `replica-announce-ip`",
            ),
            (
                Announcer::OtherSentinel,
                "another sentinel",
                "`sentinel announce-ip`",
            ),
            (
                Announcer::Node(&by),
                "the Cluster's node s:7",
                "`cluster-announce-ip`",
            ),
        ] {
            let shown = format!(
                "{what}; {name} announces this address, which may be right only in its own network (Docker, NAT); \
                 announce one that this client can reach ({setting})"
            );
            assert_eq!(text(Some(announcer)), shown);
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
    fn a_timeout_keeps_the_address_it_names() {
        let late = Error::new(ErrorKind::Timeout, timed_out("old:1", "1 s"));
        assert!(
            at_server("new:1", late)
                .to_string()
                .contains("old:1 did not")
        );
        let own = Error::new(ErrorKind::Timeout, "");
        assert!(
            at_server("new:1", own)
                .to_string()
                .contains("new:1 did not")
        );
    }

    #[test]
    fn an_error_of_connecting_names_one_server() {
        let text = "old:1 did not answer the login";
        let error = at_server("new:1", Error::new(ErrorKind::Unavailable, text));
        assert_eq!(error.message(), text);
    }

    #[test]
    fn an_error_of_a_reply_names_its_server_once() {
        let refused = || error_reply("NOPERM", Some("no permissions"));
        let once = of_reply("old:1", refused());
        assert!(once.message().starts_with("old:1: NOPERM "), "{once}");
        assert_eq!(of_reply("old:1", once.clone()).message(), once.message());
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
}
