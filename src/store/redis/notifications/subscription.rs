//! The notification connection: RESP3, with tracking of all keys that are read on it, and subscribed to the client's
//! own channel.

use std::borrow::Cow;
use std::time::Duration;

use redis::{Arg, Cmd, ConnectionInfo, ProtocolVersion, ServerError, Value};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::{Endpoint, FoundServer, LONGEST_REPLY, NamedBy};
use crate::store::redis::epoch::MadeIn;
use crate::store::redis::errors::{Attempted, NOT_REDIS, Step, error_reply, no_reply};
use crate::store::redis::handshake::Login;
use crate::store::redis::replies::field;
use crate::store::redis::socket::{Closer, Receiver, Sender, Sockets};
use crate::store::redis::url;
use crate::util::clock::MonotonicTime;

/// The reading half of the notification connection.
pub(super) struct Subscription {
    receiver: Receiver,
    /// The server's address, for errors.
    address: String,
    timeout: Duration,
    /// When the first part of the next value was read.
    pub(super) begun: Option<MonotonicTime>,
}

impl Subscription {
    /// Connects, logs in, turns tracking on and subscribes to `channel`, all within `timeout`, not counting the
    /// time of the credentials callback. `any_key` is a key that this client may read. Registers the sockets to
    /// sentinels in `queries`. Calls `connected` with a handle, by which another thread can close the socket.
    ///
    /// After `Unavailable` or `Timeout`, the caller may try again soon. Any other error means that the server does not
    /// offer notifications to this client.
    pub(super) fn open(
        endpoint: &Endpoint,
        channel: &str,
        any_key: &str,
        timeout: Duration,
        queries: &Sockets,
        connected: impl FnOnce(Closer, &MadeIn) -> Result<(), Error>,
    ) -> Result<(Self, Sender, MadeIn), Error> {
        endpoint.pause(MonotonicTime::now().after(timeout), queries);
        let deadline = MonotonicTime::now().after(timeout);
        let found = endpoint.find_server(deadline, queries);
        let opened = found.and_then(|found| {
            let made_in = endpoint.begin_connection(&found)?;
            let FoundServer { info, named_by } = found;
            let connected = |socket| connected(socket, &made_in);
            let named_by = named_by.as_ref();
            let names = [channel, any_key];
            let opened = Self::open_server(
                endpoint, info, named_by, names, timeout, deadline, connected,
            );
            match opened {
                Ok((subscription, sender)) => Ok((subscription, sender, made_in)),
                Err(error) => Err(endpoint.connect_failed(named_by, error)),
            }
        });
        match &opened {
            // The server is there, and refuses notifications.
            Err(error) if !error.is_unavailable() => {}
            opened => {
                endpoint.note_attempt(opened.as_ref().err());
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
    ) -> Result<(Self, Sender), Error> {
        let setting = "`command_timeout`";
        let attempted = Attempted::new(&info, timeout, setting);
        let attempted = attempted.announced_by(endpoint.announcer(named_by));
        let (mut sender, mut receiver) = endpoint.connect(attempted, deadline, connected)?;
        let (info, deadline) = endpoint.with_login(info, deadline)?;
        let attempted = Attempted::new(&info, timeout, setting);
        let name = endpoint.connection_name("leasehold-notifications");
        let login = Login::new(info.redis_settings(), ProtocolVersion::RESP3, Some(&name));
        let mut commands = login.commands;
        // Each command that is used later is sent once, so that a missing permission is found here.
        commands.cmd("PING");
        commands.cmd("GETRANGE").arg(any_key).arg("0").arg("255");
        // Scripts publish grants with the user's permissions. Without the right to publish, clients would miss their
        // turns and suspect their connections. An empty message is ignored.
        commands.cmd("PUBLISH").arg(channel).arg("");
        commands.cmd("CLIENT").arg("TRACKING").arg("ON");
        // SUBSCRIBE comes last: from then on, scripts count this client as listening, and messages may come.
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(channel);
        let step = Step::Subscribe;
        for commands in [commands, subscribe] {
            let packed = commands.get_packed_pipeline();
            let sent = sender.send(&packed, deadline);
            sent.map_err(|error| attempted.no_reply_error(step, error.into(), &[]))?;
            for command in commands.cmd_iter() {
                let reply = receiver.receive(deadline, LONGEST_REPLY).map_err(|error| {
                    let tls = endpoint.tls_error(attempted, &receiver);
                    tls.unwrap_or_else(|| {
                        attempted.no_reply_error(step, error, receiver.unparsed())
                    })
                })?;
                check(attempted, &name_of(command), &reply)?;
                // Only the reply to `HELLO` has a role.
                if let (Some(by), Some(role)) = (named_by, field(&reply, b"role")) {
                    endpoint.check_role(attempted, by, role)?;
                }
            }
        }
        let subscription = Self {
            receiver,
            address: url::address(&info),
            timeout,
            begun: None,
        };
        Ok((subscription, sender))
    }

    /// Returns the next reply or push message.
    ///
    /// If no whole value has been read from the socket, calls `before_waiting`, which may write, and returns how long
    /// to wait. Fails with `Timeout` if nothing comes in that time; the caller may call `next` again. Once a part of a
    /// value has come, the rest has to come within the time-out.
    pub(super) fn next(
        &mut self,
        mut before_waiting: impl FnMut() -> Duration,
    ) -> Result<Value, Error> {
        loop {
            if let Some(value) = self.received()? {
                self.begun = None;
                return Ok(value);
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
            waited.map_err(|error| no_reply(&self.address, error.into()))?;
        }
    }

    fn received(&mut self) -> Result<Option<Value>, Error> {
        let received = self.receiver.received(LONGEST_REPLY);
        received.map_err(|error| no_reply(&self.address, error))
    }
}

/// The name of a command, with that of its subcommand: `CLIENT TRACKING`.
fn name_of(command: &Cmd) -> String {
    let words = command.args_iter().filter_map(|word| match word {
        Arg::Simple(word) => std::str::from_utf8(word).ok(),
        _ => None,
    });
    let mut words = words.take(2);
    match (words.next(), words.next()) {
        (Some("CLIENT"), Some(subcommand)) => format!("CLIENT {subcommand}"),
        (name, _) => name.unwrap_or_default().to_owned(),
    }
}

fn error_of(error: &ServerError) -> Error {
    error_reply(error.code(), error.details())
}

/// Fails if the server refused `command`.
fn check(attempted: Attempted<'_>, command: &str, reply: &Value) -> Result<(), Error> {
    match reply {
        // `any_key` may hold a value of any type.
        Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(()),
        // Another node of the Cluster has `any_key`. Redis checks the user's rights before it redirects.
        Value::ServerError(error) if error_of(error).redirect().is_some() => Ok(()),
        Value::ServerError(error) => Err(attempted.refused_error(Step::Subscribe, command, error)),
        Value::BulkString(_) => Ok(()),
        Value::Push { .. } | Value::Map(_) | Value::Array(_) => Ok(()),
        Value::SimpleString(_) | Value::Okay | Value::Int(_) => Ok(()),
        _ => Err(attempted.about(ErrorKind::Protocol, NOT_REDIS)),
    }
}
