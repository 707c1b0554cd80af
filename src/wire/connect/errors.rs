//! The errors of connections: of attempts to connect, and of requests without a reply.

use std::time::Duration;
use std::{fmt, io};

use redis::{ConnectionInfo, RedisError, ServerError};

use crate::report::error::{Error, ErrorKind};
use crate::util::text::Shown;
use crate::wire::connect::steps::{Progress, SLOW, Step};
use crate::wire::connect::url::{HostPort, address};
use crate::wire::net::error_replies::{
    classify, error_reply, has_too_many_clients, next_step, sanitized, server_text,
    without_arguments,
};
use crate::wire::net::refusal::Refusal;
use crate::wire::net::socket::ConnectError;
#[cfg(feature = "tls")]
use crate::wire::net::tls;
#[cfg(feature = "tls")]
use crate::wire::net::tls::TlsError;

/// The error of a request on an open connection to `address`, if no reply has come. `awaited` is the command whose
/// reply is missing. `None` if no reply is awaited.
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
    format!("{address} did not reply within {limit}; {SLOW}")
}

/// Adds the address of the server to an error that was made from its reply (`Denied`, `Unavailable`, `Unsupported`),
/// unless the error contains the address.
pub fn reply_error(address: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Denied | ErrorKind::Unavailable | ErrorKind::Unsupported
            if !error.names(address) =>
        {
            error.at(address)
        }
        _ => error,
    }
}

/// Adds `address`, the address of the server, to a time-out without a text, which ends a request at the caller's
/// deadline. Other errors already name their server. After a fail-over, `address` may be that of another server.
pub fn at_server(address: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Timeout if error.message().is_empty() => {
            let limit = "`command_timeout` or the shorter limit of the call";
            Error::new(ErrorKind::Timeout, timed_out(address, limit))
        }
        _ => error,
    }
}

/// The reason why acquires use the script only: `count` connections ended before the reply to a trial.
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

/// The error of a caller that leaves during an attempt to connect to `address`. The attempt has been in `step` for
/// `lasted`.
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
pub struct ConnectErrors<'a> {
    pub info: &'a ConnectionInfo,
    /// The time-out of the whole attempt.
    timeout: Duration,
    /// The setting of the time-out, in the form of messages: its name in backticks.
    setting: &'static str,
    /// The prefix of the client's keys.
    pub prefix: &'a str,
    /// Receives the steps of the attempt.
    progress: Option<&'a Progress<'a>>,
    /// The server that announced the address. `None` for an address of the user.
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

impl<'a> ConnectErrors<'a> {
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

    /// Adds the announcer of the address to the errors that are about the address.
    pub fn announced_by(self, announced_by: Option<Announcer<'a>>) -> Self {
        Self {
            announced_by,
            ..self
        }
    }

    /// Reports the steps of the attempt to `progress`.
    pub fn with_progress(self, progress: Option<&'a Progress<'a>>) -> Self {
        Self { progress, ..self }
    }

    /// Reports that a step of the attempt begins.
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

    /// The error of an attempt whose time-out has passed. `what` names what the server did not do in time.
    fn late(&self, what: impl fmt::Display, next: &str) -> Error {
        let (timeout, setting) = (Shown(self.timeout), self.setting);
        let what = format_args!("{what} within {timeout} ({setting}); {next}");
        self.about(ErrorKind::Unavailable, what)
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
        let handshake = Step::TlsHandshake;
        match error {
            TlsError::Refused(error) => self.tls_refused(server_name, &error),
            TlsError::Late { has_received } => match has_received {
                true => self.late(format_args!("did not end {handshake}"), SLOW),
                false => self.late(format_args!("did not answer {handshake}"), NO_TLS),
            },
            TlsError::Closed { has_received } => self.handshake_closed(has_received),
            TlsError::Io(error) => {
                let closed = self.handshake_closed(false);
                closed.with_source(sanitized(error.into()))
            }
        }
    }

    #[cfg(feature = "tls")]
    fn handshake_closed(&self, has_received: bool) -> Error {
        let next = match has_received {
            true => "check the server's log",
            false => NO_TLS,
        };
        let during = Step::TlsHandshake;
        let what = format_args!("closed the connection during {during}; {next}");
        self.about(ErrorKind::Unavailable, what)
    }

    /// The error for a server whose certificate is not accepted, or that does not accept the client's certificate.
    #[cfg(feature = "tls")]
    pub fn tls_refused(&self, server_name: &str, error: &rustls::Error) -> Error {
        let reason = tls::reason(error, server_name);
        let about = match tls::is_about_name(error) {
            true => self.about_address(ErrorKind::Tls, reason),
            false => self.about(ErrorKind::Tls, reason),
        };
        about.with_source(error.clone())
    }

    /// The error of a request without a reply; `command` is `None` if the command is unknown. `received` has the bytes
    /// that came in place of a reply.
    pub fn no_reply_error(
        &self,
        step: Step,
        command: Option<&str>,
        error: RedisError,
        received: &[u8],
    ) -> Error {
        let error = sanitized(error);
        let (kind, what) = match classify(&error) {
            // An attempt to connect sends no request for a lock. So all outcomes are known, and the error is
            // `Unavailable`.
            ErrorKind::Timeout => {
                let late = self.late(format_args!("did not answer {step}"), step.next_action());
                return late.with_source(error);
            }
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
                // The user cannot change the limit of these replies, so `TooLarge` would not help.
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
        // redis-rs has its own names for some codes.
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
        let has_password = settings
            .password()
            .is_some_and(|password| !password.is_empty());
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

/// The next action of an operator if no byte of a TLS handshake came back.
#[cfg(feature = "tls")]
const NO_TLS: &str = "use redis:// if this port is one without TLS";

/// The rest of an error's message for a server that does not speak Redis' protocol.
pub const NOT_REDIS: &str = "does not answer as Redis does; check the host and the port";

/// Whether the server's text repeats the password, or a user's name that may be the password.
fn repeats_login(info: &ConnectionInfo, text: &str) -> bool {
    let settings = info.redis_settings();
    let is_set = |secret: &&str| !secret.is_empty();
    let secret = settings.password().filter(is_set).or(settings.username());
    let text = without_arguments(text);
    // The server may have escaped a line break or a quote, so the search is for the parts between such characters.
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
    fn a_refused_login_names_the_next_step() {
        let info = redis::IntoConnectionInfo::into_connection_info("redis://h").unwrap();
        let attempted =
            ConnectErrors::new(&info, Duration::from_secs(1), "`connect_timeout`", "p:");
        let redis::Value::ServerError(loading) =
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
    }

    #[test]
    fn an_unreachable_address_names_its_announcer() {
        let info = redis::IntoConnectionInfo::into_connection_info("redis://h").unwrap();
        let by = HostPort::new(b"s", b"7").unwrap();
        let text = |announced_by| {
            let attempted =
                ConnectErrors::new(&info, Duration::from_nanos(1), "`connect_timeout`", "p:");
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
        let once = reply_error("old:1", refused());
        assert!(once.message().starts_with("old:1: NOPERM "), "{once}");
        assert_eq!(reply_error("old:1", once.clone()).message(), once.message());
    }
}
