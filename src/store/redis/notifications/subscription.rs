//! The notification connection: RESP3, with tracking of all keys that are read on it, and subscribed to the client's
//! own channel.

use std::io;
use std::time::Duration;

use redis::{ConnectionInfo, ProtocolVersion, Value};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::LONGEST_REPLY;
use crate::store::redis::errors::{login_error_reply, no_reply, type_name};
use crate::store::redis::handshake::Login;
use crate::store::redis::socket::{self, Closer, Receiver, Sender};
use crate::store::redis::url::address;
use crate::util::clock::MonotonicTime;

/// The reading half of the notification connection.
pub(super) struct Subscription {
    receiver: Receiver,
    timeout: Duration,
    /// When the first part of the next value was read.
    begun: Option<MonotonicTime>,
}

impl Subscription {
    /// Connects, logs in, turns tracking on and subscribes to `channel`, all within `timeout`. `any_key` is a key that
    /// this client may read. Passes `connected` a handle that closes the socket from another thread.
    ///
    /// An error of the kind `Unavailable` or `Timeout` may be retried soon. Any other error means that the server does
    /// not offer notifications to this client.
    pub(super) fn open(
        info: &ConnectionInfo,
        channel: &str,
        any_key: &str,
        timeout: Duration,
        connected: impl FnOnce(Closer),
    ) -> Result<(Self, Sender), Error> {
        let unavailable = |e: io::Error| {
            let kind = match e.kind() {
                io::ErrorKind::Unsupported => ErrorKind::InvalidConfig,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("{}: {e}", address(info)))
        };
        let deadline = MonotonicTime::now().after(timeout);
        let (mut sender, mut receiver) =
            socket::connect(info.addr(), deadline).map_err(unavailable)?;
        connected(sender.closer());
        let name = Some("leasehold-notifications");
        let login = Login::new(info.redis_settings(), ProtocolVersion::RESP3, name);
        let mut commands = login.commands;
        // Each command that is used later is sent once, so that a refusal of the server comes here.
        commands.cmd("PING");
        commands.cmd("GETRANGE").arg(any_key).arg("0").arg("255");
        // Scripts publish grants with the user's permissions. Without the right to publish, clients would miss their
        // turns and suspect their connections. An empty message is ignored.
        commands.cmd("PUBLISH").arg(channel).arg("");
        commands.cmd("CLIENT").arg("TRACKING").arg("ON");
        // SUBSCRIBE comes last: from then on, scripts count this client as listening, and messages may come.
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(channel);
        for commands in [commands, subscribe] {
            let packed = commands.get_packed_pipeline();
            sender.send(&packed, deadline).map_err(unavailable)?;
            for _ in 0..commands.len() {
                let reply = receiver.receive(deadline, LONGEST_REPLY);
                check(info, &reply.map_err(no_reply)?)?;
            }
        }
        let subscription = Self {
            receiver,
            timeout,
            begun: None,
        };
        Ok((subscription, sender))
    }

    /// Reads the next reply or push message. When all values that were read have been returned, calls `before_waiting`,
    /// which may write and returns how long to wait for more. Fails with `Timeout` if nothing comes in that time. The
    /// caller may call `next` again. Once a part of a value was read, the rest has to come within the time-out.
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
            waited.map_err(|e| no_reply(e.into()))?;
        }
    }

    fn received(&mut self) -> Result<Option<Value>, Error> {
        let received = self.receiver.received(LONGEST_REPLY);
        received.map_err(no_reply)
    }
}

/// Fails if the server refused a command.
fn check(info: &ConnectionInfo, reply: &Value) -> Result<(), Error> {
    match reply {
        // `any_key` may hold a value of any type.
        Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(()),
        Value::ServerError(error) => Err(login_error_reply(info, error)),
        Value::BulkString(_) => Ok(()),
        Value::Push { .. } | Value::Map(_) | Value::Array(_) => Ok(()),
        Value::SimpleString(_) | Value::Okay | Value::Int(_) => Ok(()),
        other => {
            let message = format!("unexpected answer to a subscription: {}", type_name(other));
            Err(Error::new(ErrorKind::Protocol, message))
        }
    }
}
