//! A connection lent to one transaction: it looks at the lock, reads for the caller, and writes. Never
//! lets the caller end what it is_tracked, and never serves anybody else in between.

use std::io;
use std::time::Duration;

use r2d2::PooledConnection;
use redis::{ConnectionLike, Pipeline, RedisError, RedisResult, ServerError, Value};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::{
    Connector, ReplyContents, by_redis, classify, plain, refusal, shape,
};
use crate::store::redis::replies::TOO_LARGE;
use crate::store::redis::scripts::encode_words;
use crate::util::clock::MonotonicTime;
use crate::util::key::Key;

/// What would end the watching, or leave the connection in a state that its next user does not expect.
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

/// What a transaction reads with: see [`MutexGuard::transaction`](crate::MutexGuard::transaction).
///
/// All of [`redis::Commands`] works on it, and so does everything else that takes a
/// [`redis::ConnectionLike`]. `WATCH` may be used. Commands that would end the transaction or change the
/// state of the connection (`EXEC`, `UNWATCH`, `SELECT`, `CLIENT`, `SUBSCRIBE` ..) are refused, unsent,
/// and so are atomic pipelines. After a time-out or a broken connection every further command fails.
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
/// let sum = guard.transaction(|conn, _| Ok(balance(conn, "a")? + balance(conn, "b")?))?;
/// assert_eq!(sum, 0);
/// # Ok::<(), leasehold::Error>(())
/// ```
pub struct TransactionConnection {
    wire: PooledConnection<Connector>,
    timeout: Duration,
    /// Nothing is tracked and no answer is owed: somebody else may have it.
    at_rest: bool,
}

/// The outcome of a transaction whose reply came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TransactionOutcome {
    Committed,
    /// Nothing was written, since a watched key had changed.
    Aborted,
}

impl TransactionConnection {
    pub(crate) fn new(wire: PooledConnection<Connector>, timeout: Duration) -> Self {
        Self {
            wire,
            timeout,
            at_rest: true,
        }
    }

    /// Watches `key` from now on, and says what stands there.
    pub(crate) fn look(&mut self, key: &Key) -> Result<Option<Vec<u8>>, Error> {
        self.at_rest = false;
        let key = key.in_redis();
        let mut bytes = Vec::with_capacity(128);
        // An empty transaction first: were MULTI refused later, the writes behind it would be done
        // one by one, whoever has the lock.
        let commands: [(&str, &[&str]); 4] = [
            ("MULTI", &[]),
            ("EXEC", &[]),
            ("WATCH", &[key]),
            ("GET", &[key]),
        ];
        for (command, words) in commands {
            encode_words(&mut bytes, command, words.iter().copied());
        }
        let deadline = self.answers_by();
        self.wire.send(&bytes, deadline)?;
        for (command, _) in &commands[..3] {
            match self.wire.receive(deadline, ReplyContents::Own)? {
                Value::ServerError(error) => return Err(refused(&error)),
                Value::Okay | Value::Array(_) => {}
                other => return Err(self.unexpected(command, &other)),
            }
        }
        match self.wire.receive(deadline, ReplyContents::Own)? {
            Value::Nil => Ok(None),
            Value::BulkString(value) => Ok(Some(value)),
            // No string, so no lock of ours.
            Value::ServerError(error) if matches!(error.code(), "WRONGTYPE" | TOO_LARGE) => {
                Ok(Some(Vec::new()))
            }
            Value::ServerError(error) => Err(refused(&error)),
            other => Err(self.unexpected("GET", &other)),
        }
    }

    /// Does what `pipe` holds, all at once, unless something that is tracked has changed.
    pub(crate) fn exec(&mut self, pipe: &mut Pipeline) -> Result<TransactionOutcome, Error> {
        if self.is_broken() {
            let message = "the connection broke while it was read from";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        let bytes = pipe.atomic().get_packed_pipeline();
        let names = names(&bytes);
        let Some([_multi, own @ .., _exec]) = names.as_deref() else {
            return Err(not_allowed(NAMELESS));
        };
        if let Some(name) = own.iter().find_map(|name| forbidden(name)) {
            return Err(not_allowed(name));
        }
        let deadline = self.answers_by();
        let sent = self.wire.send(&bytes, deadline);
        sent.and_then(|()| self.receive_all(pipe.len(), deadline))
            .map_err(unanswered)?
    }

    /// The outer error: it was not answered. The inner one: it was, so.
    fn receive_all(
        &mut self,
        commands: usize,
        deadline: MonotonicTime,
    ) -> Result<Result<TransactionOutcome, Error>, Error> {
        let begun = self.wire.receive(deadline, ReplyContents::Own)?;
        let mut first_refused = None;
        for _ in 0..commands {
            if let Value::ServerError(error) = self.wire.receive(deadline, ReplyContents::Own)? {
                first_refused.get_or_insert(error);
            }
        }
        let done = self.wire.receive(deadline, ReplyContents::Values(1))?;
        if begun != Value::Okay {
            // Since it was tried at the look: then what tracked was done one by one.
            return Ok(Err(self.unexpected("MULTI", &begun)));
        }
        // However it ends, nothing is tracked any more.
        self.at_rest = true;
        Ok(match done {
            Value::Nil => Ok(TransactionOutcome::Aborted),
            Value::Array(answers) if answers.len() == commands => all_done(answers),
            Value::ServerError(error) => Err(refused(first_refused.as_ref().unwrap_or(&error))),
            other => Err(self.unexpected("EXEC", &other)),
        })
    }

    /// Watches nothing any more; nothing was written.
    pub(crate) fn leave(mut self) {
        if self.wire.is_discarded() {
            return;
        }
        let mut bytes = Vec::new();
        encode_words(&mut bytes, "UNWATCH", std::iter::empty());
        let deadline = self.answers_by();
        let sent = self.wire.send(&bytes, deadline);
        let answer = sent.and_then(|()| self.wire.receive(deadline, ReplyContents::Own));
        // Otherwise it is thrown away.
        self.at_rest = matches!(answer, Ok(Value::Okay));
    }

    /// An error of the network was seen on it.
    pub(crate) fn is_broken(&self) -> bool {
        self.wire.is_discarded()
    }

    /// The deadline of a request that is written now, and of its answers.
    fn answers_by(&self) -> MonotonicTime {
        MonotonicTime::now().after(self.timeout)
    }

    fn unexpected(&mut self, command: &str, answer: &Value) -> Error {
        self.wire.distrust();
        Error::new(ErrorKind::Protocol, format!("{command}: {}", shape(answer)))
    }

    fn ask(&mut self, packed: &[u8], skip: usize, count: usize) -> RedisResult<Vec<Value>> {
        let what = match names(packed) {
            None => Some(NAMELESS),
            Some(names) => names.iter().find_map(|name| forbidden(name)),
        };
        if let Some(what) = what {
            let why = "not allowed in a transaction";
            return Err((redis::ErrorKind::Client, why, what.to_owned()).into());
        }
        if self.wire.is_discarded() {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        let deadline = self.answers_by();
        self.wire.put(packed, deadline)?;
        let mut answers = Vec::with_capacity(count);
        let mut so_far = 0;
        for index in 0..skip + count {
            let answer = self
                .wire
                .take(deadline, ReplyContents::MoreOfOne { so_far })?;
            so_far += self.wire.last_size();
            if index >= skip {
                answers.push(answer);
            }
        }
        Ok(answers)
    }
}

impl Drop for TransactionConnection {
    /// By a panic, too: it may be in any state.
    fn drop(&mut self) {
        if !self.at_rest {
            self.wire.discard();
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
        let answer = self.ask(packed, 0, 1)?.pop();
        Ok(answer.expect("one was waited for"))
    }

    fn req_packed_commands(
        &mut self,
        packed: &[u8],
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        self.ask(packed, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.wire.database()
    }

    fn check_connection(&mut self) -> bool {
        redis::cmd("PING").exec(self).is_ok()
    }

    fn is_open(&self) -> bool {
        !self.wire.is_discarded()
    }
}

/// What an error of redis-rs in a closure means: nothing was written, so no outcome is unknown.
pub(crate) fn read_failed(error: RedisError) -> Error {
    let kind = match classify(&error) {
        ErrorKind::Timeout => ErrorKind::Unavailable,
        _ if error.kind() == redis::ErrorKind::Client => ErrorKind::Unsupported,
        kind => kind,
    };
    by_redis(kind, error)
}

fn refused(error: &ServerError) -> Error {
    let details = error.details();
    // What EXEC itself was refused for stands in its details.
    let reason = details.and_then(|text| text.strip_prefix("Transaction discarded because of: "));
    match reason.and_then(|reason| reason.split_once(' ')) {
        Some((code, detail)) => refusal(code, Some(detail)),
        None => refusal(error.code(), details),
    }
}

fn not_allowed(what: &str) -> Error {
    let message = format!("not allowed in a transaction: {what}");
    Error::new(ErrorKind::Unsupported, message)
}

/// It was sent, or a part of it.
fn unanswered(error: Error) -> Error {
    let message = "what was to be written may be written or not";
    Error::new(ErrorKind::Timeout, message).with_source(error)
}

/// Redis carries out the other commands if it refuses one. A command whose answer was too large is done: nobody reads
/// the answer.
fn all_done(answers: Vec<Value>) -> Result<TransactionOutcome, Error> {
    let of = answers.len();
    for (index, answer) in answers.into_iter().enumerate() {
        if matches!(&answer, Value::ServerError(error) if error.code() != TOO_LARGE)
            && let Err(refusal) = answer.extract_error()
        {
            let refusal = plain(refusal);
            let message = format!(
                "command {} of {of} was refused, what others did stays: {refusal}",
                index + 1
            );
            return Err(Error::new(ErrorKind::Protocol, message).with_source(refusal));
        }
    }
    Ok(TransactionOutcome::Committed)
}

fn forbidden(name: &[u8]) -> Option<&'static str> {
    let is_it = |one: &&str| name.eq_ignore_ascii_case(one.as_bytes());
    NOT_ALLOWED.into_iter().find(is_it)
}

/// The names of packed commands; nothing if that is not what they are.
fn names(mut packed: &[u8]) -> Option<Vec<&[u8]>> {
    let mut names = Vec::new();
    while !packed.is_empty() {
        let words = number(&mut packed, b'*')?;
        for index in 0..words {
            let len = number(&mut packed, b'$')?;
            let (word, rest) = packed.split_at_checked(len)?;
            packed = rest.strip_prefix(b"\r\n")?;
            if index == 0 {
                names.push(word);
            }
        }
        // Redis gives no answer to it.
        (words > 0).then_some(())?;
    }
    Some(names)
}

fn number(packed: &mut &[u8], sign: u8) -> Option<usize> {
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
    fn packed_commands_are_known_by_their_names() {
        let mut pipe = redis::pipe();
        pipe.cmd("GET")
            .arg("MULTI")
            .cmd("Set")
            .arg("a\r\nb")
            .arg(&b"\0\r\n*1"[..]);
        let bytes = pipe.get_packed_pipeline();
        assert_eq!(names(&bytes).unwrap(), [&b"GET"[..], b"Set"]);
        for bad in [
            "*0\r\n",
            "PING\r\n",
            "*1\r\n$9\r\nPING\r\n",
            "*1\r\n$-1\r\n",
        ] {
            assert_eq!(names(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn what_ends_a_transaction_is_forbidden_however_it_is_written() {
        for name in ["exec", "EXEC", "Multi", "unwatch", "select"] {
            assert!(forbidden(name.as_bytes()).is_some(), "{name}");
        }
        for name in ["WATCH", "get", "EXECUTE", ""] {
            assert_eq!(forbidden(name.as_bytes()), None, "{name}");
        }
    }
}
