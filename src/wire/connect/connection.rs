//! A connection to one server: reading and writing with deadlines, and whether it may be used again.

use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionInfo, Pipeline, RedisResult, ServerError, Value, from_redis_value_ref};
use socket2::Socket;

use crate::report::error::{Error, ErrorKind};
use crate::store::scan::KEYS_AT_A_TIME;
use crate::store::{Scan, ScannedKeys};
use crate::util::clock::MonotonicTime;
use crate::wire::connect::epoch::{ConnectionEpoch, Epoch};
use crate::wire::connect::errors::no_reply;
use crate::wire::net::error_replies::{hide_password, unexpected_reply};
use crate::wire::net::refusal::command_refused;
use crate::wire::net::replies::Limit;
use crate::wire::net::socket::{Receiver, Sender};
use crate::wire::scripts;

/// The largest size of a reply without values of the caller. The replies to a batch of 128 commands have a few hundred
/// bytes each, so they fit.
pub const LONGEST_REPLY: Limit = Limit::Fixed(256 * 1024);
/// The largest size of a Cluster's slot map. The greatest possible one, with a master and three replicas for each slot,
/// has some 26 MiB.
const LONGEST_SLOT_MAP: Limit = Limit::Fixed(32 * 1024 * 1024);

/// The pause after the client has failed to replace an old connection.
pub const REPLACE_AGAIN: Duration = Duration::from_secs(5);

/// Whether a connection may be used for the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Fit,
    /// The connection works, but is older than `max_connection_age`. It is used until a new connection is open.
    Old,
    /// The connection must not be used.
    Stale,
}

/// The password to remove from error replies. `None` for a password of less than four bytes, which other text may
/// contain by chance.
pub fn password_to_hide(info: &ConnectionInfo) -> Option<Box<str>> {
    let password = info.redis_settings().password();
    password
        .filter(|password| password.len() > 3)
        .map(Box::from)
}

/// The kind of content of a reply, which decides how large the reply may be.
#[derive(Clone, Copy, Debug)]
pub enum ReplyContents {
    /// Only numbers, and values that this library wrote.
    Internal,
    /// This many values of the caller, each of at most `max_reply_bytes`.
    Values(usize),
    /// One of several replies that together may be as large as one value. The earlier replies have `so_far` bytes.
    PartOfValue { so_far: usize },
    /// The slot map of a Cluster.
    SlotMap,
}

/// A connection to Redis that reads and writes with deadlines. After any error it must not be used again.
pub struct Connection {
    pub sender: Sender,
    pub receiver: Receiver,
    /// The server's address, for errors.
    pub address: Box<str>,
    /// The number of the selected database.
    pub database: i64,
    pub max_reply_bytes: usize,
    /// The prefix of the client's keys, for errors.
    pub prefix: Arc<str>,
    /// The password that is left out of error replies, from [`password_to_hide`].
    pub password: Option<Box<str>>,
    /// Whether the connection must not be used again.
    pub broken: bool,
    pub max_idle: Duration,
    /// When to replace this connection because of its age.
    pub replace_at: MonotonicTime,
    pub made_in: ConnectionEpoch,
    pub epoch: Arc<Epoch>,
}

impl Connection {
    pub fn socket(&self) -> Arc<Socket> {
        self.receiver.socket()
    }

    /// Writes all of `bytes` by `deadline`.
    pub fn send(&mut self, bytes: &[u8], deadline: MonotonicTime) -> Result<(), Error> {
        self.sender.send(bytes, deadline).map_err(|error| {
            self.mark_broken();
            no_reply(&self.address, None, error.into())
        })
    }

    /// Reads the next reply: the reply to the command `awaited`. Returns an error if the reply is not complete by
    /// `deadline`.
    pub fn receive(
        &mut self,
        awaited: &str,
        deadline: MonotonicTime,
        contents: ReplyContents,
    ) -> Result<Value, Error> {
        let received = self.receive_raw(deadline, contents);
        received.map_err(|error| no_reply(&self.address, Some(awaited), error))
    }

    /// Reads the next reply: the reply to the command `awaited`. Returns `None` at `until` if the reply is not
    /// complete; the next call reads on. Returns an error if the reply is not complete at `due`.
    pub fn receive_until(
        &mut self,
        awaited: &str,
        until: MonotonicTime,
        due: MonotonicTime,
        contents: ReplyContents,
    ) -> Result<Option<Value>, Error> {
        let limit = self.limit_of(contents);
        let received = self.receiver.receive_reply(until, limit);
        match received {
            Err(error) if until < due && error.is_timeout() => Ok(None),
            received => {
                let accepted = self.accept(received).map(Some);
                accepted.map_err(|error| no_reply(&self.address, Some(awaited), error))
            }
        }
    }

    /// Sends a command, and returns its reply. Returns an error if the reply is an error, or does not come by
    /// `deadline`.
    pub fn ask(
        &mut self,
        command: &str,
        words: &[&str],
        deadline: MonotonicTime,
        contents: ReplyContents,
    ) -> Result<Value, Error> {
        let mut bytes = Vec::new();
        scripts::encode_words(&mut bytes, command, words.iter().copied());
        self.send(&bytes, deadline)?;
        match self.receive(command, deadline, contents)? {
            Value::ServerError(error) => Err(self.refused(command, &error)),
            reply => Ok(reply),
        }
    }

    fn refused(&self, command: &str, error: &ServerError) -> Error {
        let reply = (error.code(), error.details());
        command_refused(command, reply, &self.prefix).at(&self.address)
    }

    /// Sends `PING` and returns the round-trip time. Returns an error if the reply does not come within `timeout`.
    pub fn ping(&mut self, timeout: Duration) -> Result<Duration, Error> {
        let mut bytes = Vec::new();
        scripts::encode_words(&mut bytes, "PING", std::iter::empty());
        let sent_at = MonotonicTime::now();
        let deadline = sent_at.after(timeout);
        self.send(&bytes, deadline)?;
        match self.receive("PING", deadline, ReplyContents::Internal)? {
            Value::SimpleString(pong) if pong == "PONG" => Ok(MonotonicTime::now().since(sent_at)),
            Value::ServerError(error) => Err(self.refused("PING", &error)),
            other => {
                self.discard_and_suspect_all();
                Err(unexpected_reply("PING", &other).at(&self.address))
            }
        }
    }

    /// Returns a part of the server's keys. Leaves out keys that are not UTF-8.
    pub fn scan(&mut self, scan: &Scan, deadline: MonotonicTime) -> Result<ScannedKeys, Error> {
        let (cursor, count) = (scan.cursor.to_string(), KEYS_AT_A_TIME.to_string());
        let words = [&cursor, "MATCH", &scan.pattern(), "COUNT", &count];
        let reply = self.ask("SCAN", &words, deadline, ReplyContents::Values(1))?;
        let Ok((next, keys)) = from_redis_value_ref::<(u64, Vec<Value>)>(&reply) else {
            self.discard_and_suspect_all();
            return Err(unexpected_reply("SCAN", &reply).at(&self.address));
        };
        let keys = keys.into_iter().filter_map(|key| match key {
            Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
            _ => None,
        });
        Ok(ScannedKeys {
            keys: keys.collect(),
            next,
        })
    }

    /// Does the same as [`send`](Self::send), but returns the error of redis-rs.
    pub fn send_raw(&mut self, bytes: &[u8], deadline: MonotonicTime) -> RedisResult<()> {
        let sent = self.sender.send(bytes, deadline);
        sent.inspect_err(|_| self.mark_broken())?;
        Ok(())
    }

    /// Does the same as [`receive`](Self::receive), but returns the error of redis-rs. Makes all connections suspect if
    /// the reply shows that the server is not the primary.
    pub fn receive_raw(
        &mut self,
        deadline: MonotonicTime,
        contents: ReplyContents,
    ) -> RedisResult<Value> {
        let limit = self.limit_of(contents);
        let received = self.receiver.receive_reply(deadline, limit);
        self.accept(received)
    }

    fn accept(&mut self, received: RedisResult<Value>) -> RedisResult<Value> {
        let mut value = received.inspect_err(|_| self.mark_broken())?;
        if let Some(password) = &self.password {
            hide_password(&mut value, password);
        }
        if scripts::is_refused_by_non_primary(&value) {
            self.epoch.suspect();
        }
        Ok(value)
    }

    fn limit_of(&self, contents: ReplyContents) -> Limit {
        let max_reply_bytes = self.max_reply_bytes;
        let bytes = match contents {
            ReplyContents::Internal => return LONGEST_REPLY,
            ReplyContents::SlotMap => return LONGEST_SLOT_MAP,
            ReplyContents::Values(count) => max_reply_bytes.saturating_mul(count),
            ReplyContents::PartOfValue { so_far } => max_reply_bytes.saturating_sub(so_far),
        };
        Limit::Set {
            bytes,
            max_reply_bytes,
        }
    }

    /// The size of the last reply, as the limit counts it.
    pub fn last_size(&self) -> usize {
        self.receiver.last_size()
    }

    /// Sends `commands`, and adds their replies to `replies`. For the handshake only: an error does not mark the
    /// connection broken.
    pub fn send_and_receive(
        &mut self,
        commands: &Pipeline,
        deadline: MonotonicTime,
        replies: &mut Vec<Value>,
    ) -> RedisResult<()> {
        self.sender
            .send(&commands.get_packed_pipeline(), deadline)?;
        for _ in 0..commands.len() {
            replies.push(self.receiver.receive_reply(deadline, LONGEST_REPLY)?);
        }
        Ok(())
    }

    /// Marks the connection as broken: it must not be used again.
    pub fn discard(&mut self) {
        self.broken = true;
    }

    /// Marks the connection as broken, and makes all connections of the client suspect. Called after an unexpected
    /// reply, since other connections may lead to the same server.
    pub fn discard_and_suspect_all(&mut self) {
        self.broken = true;
        self.epoch.suspect();
    }

    /// Whether this connection must not be used for a new request, because it may be dead or lead to an old primary.
    /// The network may have forgotten a connection that was idle for long.
    pub fn is_stale(&self) -> bool {
        self.condition() == Condition::Stale
    }

    /// Whether the next request may use this connection.
    pub fn condition(&self) -> Condition {
        let now = MonotonicTime::now();
        if self.epoch.is_stale(&self.made_in) || self.was_idle_at(now) {
            Condition::Stale
        } else if self.replace_at <= now {
            Condition::Old
        } else {
            Condition::Fit
        }
    }

    /// Whether this connection was idle for longer than `max_connection_idle`.
    pub fn was_idle(&self) -> bool {
        self.was_idle_at(MonotonicTime::now())
    }

    fn was_idle_at(&self, now: MonotonicTime) -> bool {
        now.since(self.sender.used_at()) > self.max_idle
    }

    /// Makes this old connection usable for [`REPLACE_AGAIN`], because the client failed to open a new one.
    pub fn postpone_replacement(&mut self) {
        self.replace_at = MonotonicTime::now().after(REPLACE_AGAIN);
    }

    /// Returns an error if the sentinels have named another primary since this connection was made: this server may
    /// grant locks that the new primary does not know of.
    pub fn check_primary(&self) -> Result<(), Error> {
        if !self.epoch.is_outdated(&self.made_in) {
            return Ok(());
        }
        let message = format!(
            "the sentinels name another primary in place of {}, and the client connects to that",
            self.address
        );
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    /// Marks this connection as broken, and the client's older connections as stale.
    fn mark_broken(&mut self) {
        self.broken = true;
        self.epoch.count_break();
    }
}
