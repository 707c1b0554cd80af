//! Opens the notification connection: subscribes to the client's channel, and turns on tracking of the keys that are
//! read. If the server refuses RESP3 or tracking, the connection has messages only.

use std::borrow::Cow;
use std::time::Duration;

use redis::{ConnectionInfo, Pipeline, ProtocolVersion, PushKind, ServerError, Value};

use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::wire::connect::connection::LONGEST_REPLY;
use crate::wire::connect::epoch::ConnectionEpoch;
use crate::wire::connect::errors::{ConnectErrors, NOT_REDIS, no_reply};
use crate::wire::connect::handshake::Login;
use crate::wire::connect::steps::Step;
use crate::wire::connect::url;
use crate::wire::endpoint::{Endpoint, FoundServer, NamedBy};
use crate::wire::net::error_replies::error_reply;
use crate::wire::net::refusal::{name_of, refuses_command};
use crate::wire::net::replies::field;
use crate::wire::net::socket::{Closer, Receiver, Sender, Sockets};

/// The reading half of the notification connection.
pub struct Subscription {
    receiver: Receiver,
    /// The server's address, for errors.
    address: String,
    timeout: Duration,
    /// When the first part of the next value was read.
    pub begun: Option<MonotonicTime>,
    /// Whether messages come as arrays, because the server refuses RESP3.
    is_resp2: bool,
}

/// A new notification connection.
pub struct OpenSubscription {
    pub subscription: Subscription,
    pub sender: Sender,
    pub made_in: ConnectionEpoch,
    /// Why the server reports no changes of keys. `None` if it tracks keys.
    pub untracked: Option<Error>,
}

/// A failed attempt to open a notification connection.
pub struct Failure {
    pub error: Error,
    /// Whether the server closed the connection after it had replied to an earlier command.
    pub is_closed_late: bool,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            error,
            is_closed_late: false,
        }
    }
}

impl Subscription {
    /// Connects, logs in, turns tracking on and subscribes to `channel`, all within `timeout`, plus the time of the
    /// credentials callback. `any_key` is a key that this client may read. Registers the sockets to sentinels in
    /// `queries`. Calls `connected` with a handle by which another thread can close the socket.
    ///
    /// After `Unavailable` or `Timeout`, the caller may try again soon. Any other error means that the server does not
    /// offer notifications to this client.
    pub fn open(
        endpoint: &Endpoint,
        channel: &str,
        any_key: &str,
        timeout: Duration,
        queries: &Sockets,
        connected: impl FnOnce(Closer, &ConnectionEpoch) -> Result<(), Error>,
    ) -> Result<OpenSubscription, Failure> {
        endpoint.pause(MonotonicTime::now().after(timeout), queries);
        let deadline = MonotonicTime::now().after(timeout);
        let found = endpoint.find_server(deadline, queries);
        let opened = found.map_err(Failure::from).and_then(|found| {
            let made_in = endpoint.begin_connection(&found)?;
            let FoundServer { info, named_by } = found;
            let connected = |socket| connected(socket, &made_in);
            let named_by = named_by.as_ref();
            let names = [channel, any_key];
            let opened = Self::open_server(
                endpoint, info, named_by, names, timeout, deadline, connected,
            );
            match opened {
                Ok((subscription, sender, untracked)) => Ok(OpenSubscription {
                    subscription,
                    sender,
                    made_in,
                    untracked,
                }),
                Err(failure) => Err(Failure {
                    error: endpoint.connect_failed(named_by, failure.error),
                    ..failure
                }),
            }
        });
        match &opened {
            // The server is available, and refuses notifications.
            Err(failure) if !failure.error.is_unavailable() => {}
            opened => {
                let failure = opened.as_ref().err();
                endpoint.record_attempt(failure.map(|failure| &failure.error));
            }
        }
        opened
    }

    fn open_server(
        endpoint: &Endpoint,
        info: Cow<'_, ConnectionInfo>,
        named_by: Option<&NamedBy>,
        [channel, any_key]: [&str; 2],
        timeout: Duration,
        deadline: MonotonicTime,
        connected: impl FnOnce(Closer) -> Result<(), Error>,
    ) -> Result<(Self, Sender, Option<Error>), Failure> {
        let setting = "`command_timeout`";
        let prefix = endpoint.dialer.prefix();
        let attempted = ConnectErrors::new(&info, timeout, setting, prefix);
        let attempted = attempted.announced_by(endpoint.announcer(named_by));
        let (sender, receiver) = endpoint.connect(attempted, deadline, connected)?;
        let (info, deadline) = endpoint.with_login(info, deadline)?;
        let mut set_up = SetUp {
            endpoint,
            attempted: ConnectErrors::new(&info, timeout, setting, prefix),
            named_by,
            sender,
            receiver,
            deadline,
            has_answered: false,
        };
        let (is_resp2, untracked) = match set_up.log_in_and_track(channel, any_key)? {
            Protocol::Resp3 { untracked } => (false, untracked),
            Protocol::Resp2 { untracked } => {
                set_up.log_in_without_hello(channel)?;
                (true, Some(untracked))
            }
        };
        // Waiters that are not queued in Redis only need the changes of keys.
        if let Some(error) = &untracked
            && (endpoint.data_check.is_some() || endpoint.other_library.is_some())
        {
            return Err(error.clone().into());
        }
        // SUBSCRIBE comes last: after it, scripts count this client as listening, and messages may come.
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(channel);
        let subscribed = set_up.exchange(&subscribe)?.pop().unwrap_or_default();
        set_up.check("SUBSCRIBE", &subscribed)?;
        let subscription = Self {
            receiver: set_up.receiver,
            address: url::address(&info),
            timeout,
            begun: None,
            is_resp2,
        };
        Ok((subscription, set_up.sender, untracked))
    }

    /// Returns the next reply or push message.
    ///
    /// If the socket's buffer has no whole value, calls `before_waiting`, which may write, and which returns how long
    /// to wait. Returns the error `Timeout` if nothing comes in that time; the caller may then call `next` again. After
    /// the first part of a value, the rest has to come within the time-out.
    pub fn next(&mut self, mut before_waiting: impl FnMut() -> Duration) -> Result<Value, Error> {
        loop {
            if let Some(value) = self.received()? {
                self.begun = None;
                return Ok(if self.is_resp2 { as_push(value) } else { value });
            }
            let pause = before_waiting();
            let now = MonotonicTime::now();
            let mut deadline = now.after(pause);
            if self.receiver.has_partial_reply() {
                let whole_by = self.begun.get_or_insert(now).after(self.timeout);
                if whole_by <= now {
                    let message = "a notification comes too slowly";
                    return Err(Error::new(ErrorKind::Unavailable, message));
                }
                deadline = deadline.min(whole_by);
            }
            let waited = self.receiver.wait(deadline, LONGEST_REPLY);
            waited.map_err(|error| no_reply(&self.address, None, error.into()))?;
        }
    }

    fn received(&mut self) -> Result<Option<Value>, Error> {
        let received = self.receiver.received(LONGEST_REPLY);
        received.map_err(|error| no_reply(&self.address, None, error))
    }
}

/// The protocol of a connection that has logged in.
enum Protocol {
    /// `untracked`: why the server reports no changes of keys.
    Resp3 { untracked: Option<Error> },
    /// The server refuses `HELLO`, so the connection has to log in again.
    Resp2 { untracked: Error },
}

/// A connection that is being set up.
struct SetUp<'a> {
    endpoint: &'a Endpoint,
    attempted: ConnectErrors<'a>,
    named_by: Option<&'a NamedBy>,
    sender: Sender,
    receiver: Receiver,
    deadline: MonotonicTime,
    /// Whether the server has replied to a command.
    has_answered: bool,
}

impl SetUp<'_> {
    /// Logs in with RESP3, and turns tracking on. Sends each command of later use once, to find a missing permission
    /// now.
    fn log_in_and_track(&mut self, channel: &str, any_key: &str) -> Result<Protocol, Failure> {
        let name = self
            .endpoint
            .dialer
            .connection_name("leasehold-notifications");
        let settings = self.attempted.info.redis_settings();
        let login = Login::new(settings, ProtocolVersion::RESP3, Some(&name));
        let mut commands = login.commands;
        let logins = commands.len();
        commands.cmd("PING");
        // Scripts publish grants with the user's permissions. If the user may not publish, clients would miss their
        // turns and suspect their connections. Clients ignore this empty message.
        commands.cmd("PUBLISH").arg(channel).arg("");
        commands.cmd("GETRANGE").arg(any_key).arg("0").arg("255");
        commands.cmd("CLIENT").arg("TRACKING").arg("ON");
        let mut replies = self.exchange(&commands)?.into_iter();
        let hello = replies.next().unwrap_or_default();
        if let Value::ServerError(error) = &hello
            && (error_of(error).kind() == ErrorKind::Protocol || refuses_command(error))
        {
            return Ok(Protocol::Resp2 {
                untracked: self.refused("HELLO", error),
            });
        }
        self.check("HELLO", &hello)?;
        if let (Some(by), Some(role)) = (self.named_by, field(&hello, b"role")) {
            self.endpoint.check_role(self.attempted, by, role)?;
        }
        for reply in replies.by_ref().take(logins - 1) {
            self.check("SELECT", &reply)?;
        }
        self.check_ping(&replies.next().unwrap_or_default())?;
        self.check("PUBLISH", &replies.next().unwrap_or_default())?;
        let mut untracked = None;
        for command in ["GETRANGE", "CLIENT TRACKING"] {
            match self.check(command, &replies.next().unwrap_or_default()) {
                Err(error) if !error.is_unavailable() => {
                    untracked.get_or_insert(error);
                }
                checked => checked?,
            }
        }
        Ok(Protocol::Resp3 { untracked })
    }

    /// Logs in with RESP2.
    fn log_in_without_hello(&mut self, channel: &str) -> Result<(), Failure> {
        // Channels are the same in all databases.
        let settings = self.attempted.info.redis_settings().clone().set_db(0);
        let login = Login::new(&settings, ProtocolVersion::RESP2, None);
        let mut commands = login.commands;
        let logins = commands.len();
        let name = self
            .endpoint
            .dialer
            .connection_name("leasehold-notifications");
        commands.cmd("CLIENT").arg("SETNAME").arg(name);
        commands.cmd("PING");
        commands.cmd("PUBLISH").arg(channel).arg("");
        if self.named_by.is_some() {
            commands.cmd("ROLE");
        }
        let mut replies = self.exchange(&commands)?.into_iter();
        for reply in replies.by_ref().take(logins) {
            self.check("AUTH", &reply)?;
        }
        let _name = replies.next();
        self.check_ping(&replies.next().unwrap_or_default())?;
        self.check("PUBLISH", &replies.next().unwrap_or_default())?;
        if let Some(by) = self.named_by {
            let reply = replies.next().unwrap_or_default();
            self.check("ROLE", &reply)?;
            let role = match &reply {
                Value::Array(parts) => parts.first(),
                _ => None,
            };
            match role {
                Some(Value::BulkString(role)) => {
                    self.endpoint.check_role(self.attempted, by, role)?;
                }
                _ => return Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS).into()),
            }
        }
        Ok(())
    }

    /// Sends `commands`, and returns their replies.
    fn exchange(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Failure> {
        let (attempted, step) = (self.attempted, Step::Subscribe);
        let sent = self
            .sender
            .send(&commands.get_packed_pipeline(), self.deadline);
        sent.map_err(|error| attempted.no_reply_error(step, None, error.into(), &[]))?;
        let mut replies = Vec::with_capacity(commands.len());
        for command in commands.cmd_iter() {
            match self.receiver.receive(self.deadline, LONGEST_REPLY) {
                Ok(reply) => replies.push(reply),
                Err(error) => {
                    let is_closed = error.kind() == redis::ErrorKind::Io && !error.is_timeout();
                    let tls = self.endpoint.dialer.tls_error(attempted, &self.receiver);
                    let command = name_of(command);
                    let received = self.receiver.unparsed();
                    return Err(Failure {
                        error: tls.unwrap_or_else(|| {
                            attempted.no_reply_error(step, Some(&command), error, received)
                        }),
                        is_closed_late: is_closed && self.has_answered,
                    });
                }
            }
            self.has_answered = true;
        }
        Ok(replies)
    }

    fn refused(&self, command: &str, error: &ServerError) -> Error {
        self.attempted
            .refused_error(Step::Subscribe, command, error)
    }

    /// Returns an error unless the reply to PING shows that the server is alive. An error that refuses PING shows this,
    /// too.
    fn check_ping(&self, reply: &Value) -> Result<(), Error> {
        match reply {
            Value::ServerError(error) if refuses_command(error) => Ok(()),
            reply => self.check("PING", reply),
        }
    }

    /// Returns an error if the server refused `command`.
    fn check(&self, command: &str, reply: &Value) -> Result<(), Error> {
        match reply {
            // `any_key` may hold a value of any type.
            Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(()),
            // Another node of the Cluster has `any_key`. Redis has checked the user's rights before it redirects.
            Value::ServerError(error) if error_of(error).redirect().is_some() => Ok(()),
            Value::ServerError(error) => Err(self.refused(command, error)),
            Value::BulkString(_) => Ok(()),
            Value::Push { .. } | Value::Map(_) | Value::Array(_) => Ok(()),
            Value::SimpleString(_) | Value::Okay | Value::Int(_) => Ok(()),
            _ => Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
        }
    }
}

/// Converts a value of RESP2 to RESP3: messages, and replies to PING, come as arrays.
fn as_push(value: Value) -> Value {
    let Value::Array(mut parts) = value else {
        return value;
    };
    let Some(Value::BulkString(word)) = parts.first() else {
        return Value::Array(parts);
    };
    let kind = match word.as_slice() {
        b"pong" => return Value::SimpleString("PONG".to_owned()),
        b"message" => PushKind::Message,
        b"smessage" => PushKind::SMessage,
        b"ssubscribe" => PushKind::SSubscribe,
        other => PushKind::Other(String::from_utf8_lossy(other).into_owned()),
    };
    let data = parts.split_off(1);
    Value::Push { kind, data }
}

fn error_of(error: &ServerError) -> Error {
    error_reply(error.code(), error.details())
}
