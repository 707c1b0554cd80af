//! The connection of one transaction, from `WATCH` to `EXEC`: a `WATCH` holds for its own connection only. This
//! connection refuses the caller's commands that would end the `WATCH`.
//!
//! 1. An empty transaction, `MULTI` and `EXEC`: Redis refuses a user without the right to these commands before
//!    anything is written. `WATCH` and `GET` of the lock's key follow, and the value is compared with the lease.
//! 2. The caller's closure reads, and fills a pipeline.
//! 3. The validity of the lease is checked once more.
//! 4. `MULTI`, the pipeline, `EXEC`. Redis carries out all of it, or none of it if a watched key has changed.
//!
//! If a watched key has changed, step 1 of the next try shows the reason. If the lock is gone, a pipeline confirms that
//! and the lease is lost. Otherwise the closure runs again: the lock was renewed, the first waiter joined the queue, or
//! a key that the closure watches has changed.
//!
//! - An `EXEC` without a reply ends in a `Timeout`, and so does one whose reply came from an old primary. The `EXEC`
//!   may still arrive, and Redis carries it out only if the lock's key is unchanged. A hand-off would leave the key
//!   unchanged, so the lease is never handed off afterwards. Before the `EXEC` is sent, each failure has a known
//!   outcome: the transaction was not written.
//! - On a Cluster, a node checks the slots of the commands in step 4 only. So step 4 begins with an `EXISTS` of the
//!   lock's key.
//! - The client keeps the connection for later transactions only if it watches no keys and all replies were read.
//! - A transaction takes its permit (`max_transactions`) before its connection, and returns the permit after the
//!   connection.

use std::io;
use std::time::Duration;

use redis::{ConnectionLike, Pipeline, RedisError, RedisResult, ServerError, Value};

use crate::command::value::is_held_by;
use crate::config::key::{Key, KeyLayout};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::slot::Redirect;
use crate::wire::connect::connection::ReplyContents;
use crate::wire::endpoint::connector::ExclusiveConnection;
use crate::wire::net::error_replies::{
    classify, error_reply, sanitized, unexpected_reply, with_code,
};
use crate::wire::net::refusal::command_refused;
use crate::wire::net::replies::TOO_LARGE;
use crate::wire::scripts::encode_words;

/// Lends connections for transactions. A store implements this trait only if it keeps locks on the server of the
/// transactions' data.
pub trait Transactions: Send + Sync {
    /// Takes an idle connection to the server of `key`, the lock's key, or connects until `deadline`.
    fn transaction_connection(
        &self,
        key: &Key,
        deadline: MonotonicTime,
    ) -> Result<TransactionConnection, Error>;

    /// Handles an error of a transaction's connection: a redirect corrects the slot map, for example.
    fn handle_failure(&self, _key: &Key, _error: &Error) {}
}

/// Commands that would end the `WATCH`, or change the state of the connection for its next user.
const NOT_ALLOWED: [&str; 19] = [
    "MULTI",
    "EXEC",
    "DISCARD",
    "UNWATCH",
    "RESET",
    "QUIT",
    "SELECT",
    "AUTH",
    "HELLO",
    "CLIENT",
    "MONITOR",
    "SYNC",
    "PSYNC",
    "SUBSCRIBE",
    "PSUBSCRIBE",
    "SSUBSCRIBE",
    "UNSUBSCRIBE",
    "PUNSUBSCRIBE",
    "SUNSUBSCRIBE",
];

const NAMELESS: &str = "a command without a name";

/// The connection on which a transaction reads: see [`MutexGuard::transaction`](crate::MutexGuard::transaction).
///
/// All methods of [`redis::Commands`] work on this type, and all functions that take a [`redis::ConnectionLike`].
/// `WATCH` is allowed. Commands that would end the transaction or change the state of the connection (`EXEC`,
/// `UNWATCH`, `SELECT`, `CLIENT`, `SUBSCRIBE` ..) and atomic pipelines fail before anything is sent. After a time-out,
/// or when the connection has broken, every further command fails.
///
/// A drop of this value during a transaction closes the connection.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::TransactionConnection;
/// use leasehold::redis::{Commands, RedisResult};
///
/// fn balance(conn: &mut TransactionConnection, account: &str) -> RedisResult<i64> {
///     Ok(conn.get::<_, Option<i64>>(account)?.unwrap_or(0))
/// }
///
/// let guard = client.mutex("accounts").lock()?;
/// let read = guard.transaction(|conn, _| Ok(balance(conn, "a")? + balance(conn, "b")?))?;
/// assert_eq!(read.value, 0);
/// # Ok::<(), leasehold::Error>(())
/// ```
pub struct TransactionConnection {
    connection: ExclusiveConnection,
    timeout: Duration,
    /// Whether the connection watches no keys and misses no replies. Later callers may then use it.
    is_clean: bool,
    is_in_cluster: bool,
    /// The lock's key, if the server is a node of a Cluster: all keys of the transaction have to be in its slot.
    slot_of: Option<Key>,
}

/// The outcome of a transaction whose reply has come.
pub(crate) enum TransactionOutcome {
    /// The replies to the commands that the caller does not ignore, as an array.
    Committed(RedisResult<Value>),
    /// The transaction was not written, since a watched key had changed.
    Aborted,
}

impl TransactionConnection {
    pub(crate) fn new(
        connection: ExclusiveConnection,
        timeout: Duration,
        layout: KeyLayout,
    ) -> Self {
        Self {
            connection,
            timeout,
            is_clean: true,
            is_in_cluster: layout != KeyLayout::Single,
            slot_of: None,
        }
    }

    /// Sends `WATCH` for the keys of some leases, all in one slot, and `GET` for each key. Returns the place of the
    /// first lease that does not hold its key; `None` if all do.
    pub(crate) fn watch_and_check(
        &mut self,
        leases: &[(&Key, LeaseId)],
    ) -> Result<Option<usize>, Error> {
        let seen = self.try_watch_and_check(leases);
        seen.map_err(|error| self.named(error))
    }

    fn try_watch_and_check(&mut self, leases: &[(&Key, LeaseId)]) -> Result<Option<usize>, Error> {
        self.is_clean = false;
        let first = leases.first().filter(|_| self.is_in_cluster);
        self.slot_of = first.map(|(key, _)| (*key).clone());
        let mut bytes = Vec::with_capacity(128);
        // An empty transaction comes first. If the server refuses MULTI, it would later carry out the writes one by
        // one, even if the lock is lost.
        encode_words(&mut bytes, "MULTI", std::iter::empty());
        encode_words(&mut bytes, "EXEC", std::iter::empty());
        let keys = leases.iter().map(|(key, _)| key.in_redis());
        encode_words(&mut bytes, "WATCH", keys.clone());
        for key in keys {
            encode_words(&mut bytes, "GET", std::iter::once(key));
        }
        let deadline = self.reply_deadline();
        self.connection.send(&bytes, deadline)?;
        let contents = ReplyContents::Internal;
        for command in ["MULTI", "EXEC", "WATCH"] {
            match self.connection.receive(command, deadline, contents)? {
                Value::ServerError(error) => return Err(self.refused(command, &error)),
                Value::Okay | Value::Array(_) => {}
                other => return Err(self.unexpected(command, &other)),
            }
        }
        let mut lost = None;
        for (place, (_, lease)) in leases.iter().enumerate() {
            let is_held = match self.connection.receive("GET", deadline, contents)? {
                Value::Nil => false,
                Value::BulkString(value) => is_held_by(&value, *lease),
                // A lock's value is a short string, so this key holds no lock.
                Value::ServerError(error) if matches!(error.code(), "WRONGTYPE" | TOO_LARGE) => {
                    false
                }
                Value::ServerError(error) => return Err(self.refused("GET", &error)),
                other => return Err(self.unexpected("GET", &other)),
            };
            if !is_held {
                lost.get_or_insert(place);
            }
        }
        Ok(lost)
    }

    /// Carries out the commands of `pipe` in one transaction, unless a watched key has changed.
    pub(crate) fn exec(&mut self, pipe: &mut Pipeline) -> Result<TransactionOutcome, Error> {
        if self.is_broken() {
            let message = "the connection broke during a read; nothing was written";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.connection.check_primary()?;
        self.check_after_pause()?;
        let bytes = pipe.atomic().get_packed_pipeline();
        let names = command_names(&bytes);
        let Some([_multi, own @ .., _exec]) = names.as_deref() else {
            return Err(not_allowed_error(NAMELESS));
        };
        if let Some(name) = own.iter().find_map(|name| forbidden_command(name)) {
            return Err(not_allowed_error(name));
        }
        let with_key = self.slot_of.as_ref().map(|key| with_key(&bytes, key));
        let deadline = self.reply_deadline();
        let sent = self
            .connection
            .send(with_key.as_ref().unwrap_or(&bytes), deadline);
        let received = sent.and_then(|()| self.receive_all(pipe, deadline));
        let outcome = received.map_err(outcome_unknown).flatten();
        outcome.map_err(|error| self.named(error))
    }

    /// Returns an error if the network has forgotten the connection while the caller's closure sent nothing: the
    /// outcome of an `EXEC` on it would be unknown.
    fn check_after_pause(&mut self) -> Result<(), Error> {
        if !self.connection.was_idle() {
            return Ok(());
        }
        // Any reply shows that the connection works.
        let mut bytes = Vec::new();
        encode_words(&mut bytes, "PING", std::iter::empty());
        let deadline = self.reply_deadline();
        let sent = self.connection.send(&bytes, deadline);
        let received = sent.and_then(|()| {
            self.connection
                .receive("PING", deadline, ReplyContents::Internal)
        });
        received.map(drop).map_err(|error| {
            let message = "the connection was idle for longer than `max_connection_idle` during the closure, and is \
                           dead; nothing was written; send a read meanwhile, or let the closure take less time";
            Error::new(ErrorKind::Unavailable, message).with_source(error)
        })
    }

    /// The server's address, for errors.
    pub(crate) fn address(&self) -> &str {
        &self.connection.address
    }

    /// Adds the server's address to an error of the server or the network.
    fn named(&self, error: Error) -> Error {
        let address = &self.connection.address;
        match error.kind() {
            ErrorKind::Denied
            | ErrorKind::Unavailable
            | ErrorKind::Timeout
            | ErrorKind::Unsupported
                if !error.names(address) =>
            {
                error.at(address)
            }
            _ => error,
        }
    }

    /// Reads the replies of a transaction. The outer error means that the outcome is unknown: a reply did not come,
    /// could not be read, or came from an old primary. The inner error comes from a reply.
    fn receive_all(
        &mut self,
        pipe: &Pipeline,
        deadline: MonotonicTime,
    ) -> Result<Result<TransactionOutcome, Error>, Error> {
        let own = usize::from(self.slot_of.is_some());
        let commands = own + pipe.len();
        let contents = ReplyContents::Internal;
        let begun = self.connection.receive("MULTI", deadline, contents)?;
        let mut first_error = None;
        for _ in 0..commands {
            if let Value::ServerError(error) =
                self.connection.receive("EXEC", deadline, contents)?
            {
                first_error.get_or_insert(error);
            }
        }
        let done = self
            .connection
            .receive("EXEC", deadline, ReplyContents::Values(1))?;
        if begun != Value::Okay {
            // The server accepted MULTI in `watch_and_check`, and has refused it now. So it has carried out the
            // commands one by one.
            return Ok(Err(self.unexpected("MULTI", &begun)));
        }
        // EXEC ends the WATCH, even if its reply is an error.
        self.is_clean = true;
        Ok(match done {
            Value::Nil => Ok(TransactionOutcome::Aborted),
            Value::Array(mut replies) if replies.len() == commands => {
                // An old primary has written everything, and the new primary may lack it.
                self.connection.check_primary()?;
                replies.drain(..own);
                command_outcomes(pipe, replies)
            }
            Value::ServerError(error) => {
                let error = first_error.as_ref().unwrap_or(&error);
                Err(match &self.slot_of {
                    Some(key) if is_of_other_slot(error, key) => cross_slot(key),
                    _ => error_of(error),
                })
            }
            other => Err(self.unexpected("EXEC", &other)),
        })
    }

    /// Sends `UNWATCH`, and keeps the connection for later callers. If `UNWATCH` fails, closes the connection.
    pub(crate) fn unwatch(mut self) {
        if self.connection.broken || self.connection.was_idle() {
            return;
        }
        let mut bytes = Vec::new();
        encode_words(&mut bytes, "UNWATCH", std::iter::empty());
        let deadline = self.reply_deadline();
        let sent = self.connection.send(&bytes, deadline);
        let contents = ReplyContents::Internal;
        let reply = sent.and_then(|()| self.connection.receive("UNWATCH", deadline, contents));
        self.is_clean = matches!(reply, Ok(Value::Okay));
    }

    /// Whether the connection has failed.
    pub(crate) fn is_broken(&self) -> bool {
        self.connection.broken
    }

    /// The deadline of a request that is written now, and of its replies.
    fn reply_deadline(&self) -> MonotonicTime {
        MonotonicTime::now().after(self.timeout)
    }

    /// The error for the error reply to a command of this library.
    fn refused(&self, command: &str, error: &ServerError) -> Error {
        command_refused(command, reason_of(error), &self.connection.prefix)
    }

    fn unexpected(&mut self, command: &str, reply: &Value) -> Error {
        self.connection.discard_and_suspect_all();
        unexpected_reply(command, reply).at(&self.connection.address)
    }

    fn send_and_receive(
        &mut self,
        packed: &[u8],
        skip: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        let what = match command_names(packed) {
            None => Some(NAMELESS),
            Some(names) => names.iter().find_map(|name| forbidden_command(name)),
        };
        if let Some(what) = what {
            let why = "not allowed in a transaction";
            return Err((redis::ErrorKind::Client, why, what.to_owned()).into());
        }
        if self.connection.broken {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        let deadline = self.reply_deadline();
        self.connection.send_raw(packed, deadline)?;
        let mut replies = Vec::with_capacity(count);
        let mut so_far = 0;
        for index in 0..skip + count {
            let reply = self
                .connection
                .receive_raw(deadline, ReplyContents::PartOfValue { so_far })?;
            so_far += self.connection.last_size();
            if index >= skip {
                replies.push(self.with_slot_rule(reply));
            }
        }
        Ok(replies)
    }
}

impl TransactionConnection {
    /// Replaces the error of a read whose key is on another node. The new error names the keys that a transaction may
    /// use.
    fn with_slot_rule(&self, reply: Value) -> Value {
        match (&reply, &self.slot_of) {
            (Value::ServerError(error), Some(key)) if is_of_other_slot(error, key) => {
                let line = format!("-{CROSSSLOT} {}\r\n", slot_rule(key));
                redis::parse_redis_value(line.as_bytes()).unwrap_or(reply)
            }
            _ => reply,
        }
    }
}

impl Drop for TransactionConnection {
    /// Closes the connection if it is not clean, for example after a panic.
    fn drop(&mut self) {
        if !self.is_clean {
            self.connection.discard();
        }
    }
}

impl std::fmt::Debug for TransactionConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransactionConnection")
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}

impl ConnectionLike for TransactionConnection {
    fn req_packed_command(&mut self, packed: &[u8]) -> RedisResult<Value> {
        let reply = self.send_and_receive(packed, 0, 1)?.pop();
        Ok(reply.expect("`count` is one"))
    }

    fn req_packed_commands(
        &mut self,
        packed: &[u8],
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        self.send_and_receive(packed, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.database
    }

    fn check_connection(&mut self) -> bool {
        redis::cmd("PING").exec(self).is_ok()
    }

    fn is_open(&self) -> bool {
        !self.connection.broken
    }
}

/// The error for an error of redis-rs in a caller's closure. The transaction was not written, so the outcome is known.
pub(crate) fn read_failed(error: RedisError) -> Error {
    let kind = match classify(&error) {
        ErrorKind::Timeout => ErrorKind::Unavailable,
        // `with_slot_rule` has replaced the errors for keys of other slots.
        _ if matches!(error.code(), Some("MOVED" | "ASK")) => ErrorKind::Unavailable,
        _ if error.code() == Some(CROSSSLOT) => ErrorKind::CrossSlot,
        _ if error.kind() == redis::ErrorKind::Client => ErrorKind::Unsupported,
        kind => kind,
    };
    let error = sanitized(error);
    let message = match (kind, error.detail()) {
        (ErrorKind::Unsupported, Some(what)) => format!("not allowed in a transaction: {what}"),
        (ErrorKind::CrossSlot, Some(rule)) => format!("the closure has failed: {rule}"),
        (ErrorKind::TooLarge, what) => match what {
            Some(what) => format!("the closure has failed: {what}"),
            // This error contains several errors of a pipeline in its text, so it needs no source.
            None => return Error::new(kind, format!("the closure has failed: {error}")),
        },
        _ => with_code("the closure has failed", &error),
    };
    Error::new(kind, message).with_source(error)
}

/// The error for unreadable replies to a transaction. The transaction was written.
pub(crate) fn reply_unread(error: RedisError) -> Error {
    let kind = match classify(&error) {
        ErrorKind::TooLarge => ErrorKind::TooLarge,
        _ => ErrorKind::Protocol,
    };
    let error = sanitized(error);
    let message = match kind {
        ErrorKind::TooLarge => {
            let what = error.detail().unwrap_or_default();
            format!("everything was written, but its replies cannot be read: {what}")
        }
        _ => with_code(
            "everything was written, but its replies cannot be read",
            &error,
        ),
    };
    Error::new(kind, message).with_source(error)
}

/// The code of the error for keys of several slots.
const CROSSSLOT: &str = "CROSSSLOT";

/// Whether a node of a Cluster refused a command because its key is in another slot than `key`. False if the slot of
/// `key` itself has moved.
fn is_of_other_slot(error: &ServerError, key: &Key) -> bool {
    match Redirect::parse(error.code(), error.details().unwrap_or_default()) {
        Some(Redirect::Moved(place) | Redirect::Ask(place)) => place.slot != key.slot(),
        _ => error.code() == CROSSSLOT,
    }
}

fn slot_rule(key: &Key) -> String {
    format!(
        "a key of the transaction is not in slot {} of the lock's key; give both the same hash tag, such as \
         {{user1}}:cart and {{user1}}:orders",
        key.slot().number()
    )
}

fn cross_slot(key: &Key) -> Error {
    Error::new(ErrorKind::CrossSlot, slot_rule(key))
}

/// Adds a command with `key` to a packed transaction, behind its `MULTI`. This makes a node of a Cluster refuse the
/// transaction if another key has another slot, even if the node serves both slots now.
fn with_key(transaction: &[u8], key: &Key) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(transaction.len() + key.in_redis().len() + 64);
    encode_words(&mut bytes, "MULTI", std::iter::empty());
    let multi = bytes.len();
    encode_words(&mut bytes, "EXISTS", std::iter::once(key.in_redis()));
    bytes.extend_from_slice(&transaction[multi..]);
    bytes
}

fn error_of(error: &ServerError) -> Error {
    let (code, detail) = reason_of(error);
    error_reply(code, detail)
}

/// The code and the detail of the error that made a command fail.
fn reason_of(error: &ServerError) -> (&str, Option<&str>) {
    let details = error.details();
    // The details of EXEC's error contain the reason.
    let reason = details.and_then(|text| text.strip_prefix("Transaction discarded because of: "));
    match reason.and_then(|reason| reason.split_once(' ')) {
        Some((code, detail)) => (code, Some(detail)),
        None => (error.code(), details),
    }
}

fn not_allowed_error(what: &str) -> Error {
    let message = format!("not allowed in a transaction: {what}");
    Error::new(ErrorKind::Unsupported, message)
}

/// The error of a transaction that was sent, at least in part. Its reply did not come, or came from an old primary.
fn outcome_unknown(error: Error) -> Error {
    let message = "no reply to EXEC that counts: either everything was or will be written, or nothing; \
                   read what the transaction would have written";
    Error::new(ErrorKind::Timeout, message).with_source(error)
}

/// The outcome of a transaction, from the replies to its commands. If Redis refuses one command, it still carries out
/// the others. The command of a reply that is too large was carried out, although the reply cannot be read.
fn command_outcomes(pipe: &Pipeline, replies: Vec<Value>) -> Result<TransactionOutcome, Error> {
    let of = replies.len();
    for (index, reply) in replies.iter().enumerate() {
        if let Value::ServerError(error) = reply
            && error.code() != TOO_LARGE
        {
            let refusal = sanitized(error.clone().into());
            let what = format!(
                "command {} of {of} was refused, and what other commands wrote stays",
                index + 1
            );
            let message = with_code(&what, &refusal);
            return Err(Error::new(ErrorKind::Protocol, message).with_source(refusal));
        }
    }
    // redis-rs leaves out the replies to commands that the caller marked with `ignore`.
    Ok(TransactionOutcome::Committed(
        pipe.query(&mut Replies(replies)),
    ))
}

/// Passes the replies of a transaction to redis-rs, which reads the results from them.
struct Replies(Vec<Value>);

impl ConnectionLike for Replies {
    fn req_packed_command(&mut self, _: &[u8]) -> RedisResult<Value> {
        Err((
            redis::ErrorKind::Client,
            "only the replies to a transaction",
        )
            .into())
    }

    fn req_packed_commands(&mut self, _: &[u8], _: usize, _: usize) -> RedisResult<Vec<Value>> {
        Ok(vec![Value::Array(std::mem::take(&mut self.0))])
    }

    fn get_db(&self) -> i64 {
        0
    }

    fn check_connection(&mut self) -> bool {
        false
    }

    fn is_open(&self) -> bool {
        false
    }
}

fn forbidden_command(name: &[u8]) -> Option<&'static str> {
    let is_it = |one: &&str| name.eq_ignore_ascii_case(one.as_bytes());
    NOT_ALLOWED.into_iter().find(is_it)
}

/// The names of packed commands; `None` if `packed` is malformed.
fn command_names(mut packed: &[u8]) -> Option<Vec<&[u8]>> {
    let mut names = Vec::new();
    while !packed.is_empty() {
        let words = read_number(&mut packed, b'*')?;
        for index in 0..words {
            let len = read_number(&mut packed, b'$')?;
            let (word, rest) = packed.split_at_checked(len)?;
            packed = rest.strip_prefix(b"\r\n")?;
            if index == 0 {
                names.push(word);
            }
        }
        // Redis does not reply to an empty command.
        (words > 0).then_some(())?;
    }
    Some(names)
}

fn read_number(packed: &mut &[u8], sign: u8) -> Option<usize> {
    let rest = packed.strip_prefix(&[sign])?;
    let end = rest.iter().position(|byte| *byte == b'\r')?;
    let number = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
    *packed = rest[end..].strip_prefix(b"\r\n")?;
    Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_packed_commands_are_read() {
        let mut pipe = redis::pipe();
        pipe.cmd("GET")
            .arg("MULTI")
            .cmd("Set")
            .arg("a\r\nb")
            .arg(&b"\0\r\n*1"[..]);
        let bytes = pipe.get_packed_pipeline();
        assert_eq!(command_names(&bytes).unwrap(), [&b"GET"[..], b"Set"]);
        for bad in [
            "*0\r\n",
            "PING\r\n",
            "*1\r\n$9\r\nPING\r\n",
            "*1\r\n$-1\r\n",
        ] {
            assert_eq!(command_names(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn forbidden_commands_are_found_in_any_case() {
        for name in ["exec", "EXEC", "Multi", "unwatch", "select"] {
            assert!(forbidden_command(name.as_bytes()).is_some(), "{name}");
        }
        for name in ["WATCH", "get", "EXECUTE", ""] {
            assert_eq!(forbidden_command(name.as_bytes()), None, "{name}");
        }
    }
}
