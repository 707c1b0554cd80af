//! The connection on which Redis speaks without being unanswered: RESP3, with tracking of all that is read
//! on it and a channel of this client's own. Knows nothing of who wants to handle what.

use std::io;
use std::time::Duration;

use redis::{ConnectionInfo, Value};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::{
    LONGEST_REPLY, address, hello, login_refusal, no_answer, shape,
};
use crate::store::redis::socket::{self, Closer, Receiver, Sender};
use crate::util::clock::MonotonicTime;

/// The half that reads.
pub(super) struct Subscription {
    receiver: Receiver,
    timeout: Duration,
    /// When the first part of the next value had come in.
    begun: Option<MonotonicTime>,
}

impl Subscription {
    /// Connects, logs in, turns tracking on and subscribes to `channel`, all within `timeout`. `any_key` is one that
    /// this client may read. `connected` gets the means to end that from another thread.
    ///
    /// An error of the kind `Unavailable` or `Timeout` is worth another try soon; any other means
    /// that the server does not offer this.
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
        let settings = info.redis_settings();
        let mut commands = redis::pipe();
        commands.add_command(hello(settings));
        commands.arg("SETNAME").arg("leasehold-notifications");
        if settings.db() != 0 {
            commands.cmd("SELECT").arg(settings.db());
        }
        // Each command that will be used, once: a refusal shows here.
        commands.cmd("PING");
        commands.cmd("GETRANGE").arg(any_key).arg("0").arg("255");
        // Clients of a user that may not publish cannot tell one another of their grants: they would miss their
        // turns, and suspect their connections. An empty message is ignored.
        commands.cmd("PUBLISH").arg(channel).arg("");
        commands.cmd("CLIENT").arg("TRACKING").arg("ON");
        // Last: scripts take a subscribed client for one that listens, and messages may follow at once.
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(channel);
        for commands in [commands, subscribe] {
            let packed = commands.get_packed_pipeline();
            sender.send(&packed, deadline).map_err(unavailable)?;
            for _ in 0..commands.len() {
                let reply = receiver.receive(deadline, LONGEST_REPLY);
                check(info, &reply.map_err(no_answer)?)?;
            }
        }
        let subscription = Self {
            receiver,
            timeout,
            begun: None,
        };
        Ok((subscription, sender))
    }

    /// The next value, whatever it is. `before_waiting` is called when all that has come in so far
    /// has been returned, and says how long to wait for more. `Timeout` if nothing came until then;
    /// it may be called again. Once a part of a value has come in, the rest has to come within the time-out.
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
            if self.receiver.is_amid_reply() {
                let whole_by = self.begun.get_or_insert(now).after(self.timeout);
                if whole_by <= now {
                    let message = "a notification comes too slowly";
                    return Err(Error::new(ErrorKind::Unavailable, message));
                }
                deadline = deadline.min(whole_by);
            }
            let waited = self.receiver.wait(deadline, LONGEST_REPLY);
            waited.map_err(|e| no_answer(e.into()))?;
        }
    }

    fn received(&mut self) -> Result<Option<Value>, Error> {
        let received = self.receiver.received(LONGEST_REPLY);
        received.map_err(no_answer)
    }
}

/// Whether a command was carried out.
fn check(info: &ConnectionInfo, reply: &Value) -> Result<(), Error> {
    match reply {
        // `any_key` may hold anything.
        Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(()),
        Value::ServerError(error) => Err(login_refusal(info, error)),
        Value::BulkString(_) => Ok(()),
        Value::Push { .. } | Value::Map(_) | Value::Array(_) => Ok(()),
        Value::SimpleString(_) | Value::Okay | Value::Int(_) => Ok(()),
        other => {
            let message = format!("unexpected answer to a subscription: {}", shape(other));
            Err(Error::new(ErrorKind::Protocol, message))
        }
    }
}
