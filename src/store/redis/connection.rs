//! How a connection to Redis is made, and what its errors mean. Knows nothing of locks but the
//! scripts that it loads.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{
    Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, ProtocolVersion,
    RedisConnectionInfo, RedisError, RedisResult, ServerError, Value,
};

use crate::config::DEFAULT_MAX_REPLY;
use crate::error::{Error, ErrorKind};
use crate::store::redis::epoch::{Epoch, MadeIn};
use crate::store::redis::replies::{Limit, TOO_LARGE};
use crate::store::redis::scripts::{self, Kind};
use crate::store::redis::socket::{self, Closer, Receiver, Sender};
use crate::util::clock::MonotonicTime;
use crate::util::text::{has_id, printable, without_ids};

/// The longest reply without a caller's values: to a batch of 128 commands, each answered with a few hundred bytes.
pub(crate) const LONGEST_REPLY: Limit = Limit::Fixed(256 * 1024);

/// Where Redis is and how long to wait for it.
pub(crate) struct Endpoint {
    info: ConnectionInfo,
    connect_timeout: Duration,
    /// Bytes of a reply to a command of the caller's own.
    max_reply: usize,
    last_error: Mutex<Option<Error>>,
    epoch: Arc<Epoch>,
    opening: Mutex<Opening>,
}

/// The connections that are being made.
#[derive(Default)]
struct Opening {
    /// The client has ended: no connection is made any more.
    closed: bool,
    sockets: Vec<Closer>,
}

impl Opening {
    fn check(&self) -> Result<(), Error> {
        if self.closed {
            return Err(Error::new(ErrorKind::Unavailable, "the client has ended"));
        }
        Ok(())
    }

    fn begin(&mut self, socket: Closer) -> Result<(), Error> {
        self.check()?;
        self.sockets.push(socket);
        Ok(())
    }
}

/// Longer texts of a server are cut. In bytes.
const LONGEST_SAID: usize = 300;

/// Query parameters that redis-rs reads; it ignores all others, we do not.
const TCP_OPTIONS: &[&str] = &["protocol"];
const UNIX_OPTIONS: &[&str] = &["db", "user", "pass", "protocol"];

impl Endpoint {
    pub(crate) fn new(url: &str, connect_timeout: Duration) -> Result<Self, Error> {
        let info = read_url(url)
            .map_err(|why| Error::new(ErrorKind::InvalidConfig, format!("url: {why}")))?;
        Ok(Self::of(info, connect_timeout))
    }

    /// For an address that redis-rs has read or that was put together in code.
    pub(crate) fn from_info(
        info: ConnectionInfo,
        connect_timeout: Duration,
    ) -> Result<Self, Error> {
        check_address(&info)
            .map_err(|why| Error::new(ErrorKind::InvalidConfig, format!("address: {why}")))?;
        Ok(Self::of(info, connect_timeout))
    }

    fn of(info: ConnectionInfo, connect_timeout: Duration) -> Self {
        Self {
            info,
            connect_timeout,
            max_reply: DEFAULT_MAX_REPLY,
            last_error: Mutex::new(None),
            epoch: Arc::default(),
            opening: Mutex::default(),
        }
    }

    pub(crate) fn with_max_reply(self, max_reply: usize) -> Self {
        Self { max_reply, ..self }
    }

    /// For debug output: without user and password.
    pub(crate) fn address(&self) -> String {
        address(&self.info)
    }

    /// Connects, logs in and loads the scripts that the server does not know, all within the connect time-out. Only the
    /// resolver of host names has time-outs of its own. Fails at once after [`close`](Self::close).
    pub(crate) fn open(&self) -> Result<Connection, Error> {
        self.check_open()?;
        let made_in = self.epoch.now();
        let deadline = MonotonicTime::now().after(self.connect_timeout);
        let connected = socket::connect(self.info.addr(), deadline);
        let (sender, receiver) = connected.map_err(|e| self.explain(e.into()))?;
        let closer = sender.closer();
        self.opening.lock().begin(closer.clone())?;
        let mut wire = Connection {
            sender,
            receiver,
            database: self.info.redis_settings().db(),
            max_reply: self.max_reply,
            password: self.password_to_hide(),
            broken: false,
            made_in,
            epoch: Arc::clone(&self.epoch),
        };
        let loaded = self.log_in(&mut wire, deadline);
        let loaded = loaded.and_then(|()| self.load_missing(&mut wire, deadline));
        let mut opening = self.opening.lock();
        opening.sockets.retain(|other| !other.is_same(&closer));
        drop(opening);
        loaded.map(|()| wire)
    }

    /// The password, unless it is so short that it may stand in any text.
    fn password_to_hide(&self) -> Option<Box<str>> {
        let password = self.info.redis_settings().password();
        password.filter(|it| it.len() > 3).map(Box::from)
    }

    /// Makes no connection from now on, and closes the sockets of those that are being made. Called when the client has
    /// ended: until an attempt to connect fails, its thread keeps the pool, which then schedules the next attempt.
    pub(crate) fn close(&self) {
        let mut opening = self.opening.lock();
        opening.closed = true;
        opening.sockets.drain(..).for_each(|socket| socket.close());
    }

    /// An error once the client has ended.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        self.opening.lock().check()
    }

    /// Logs in, selects the database and names this library, as redis-rs does.
    fn log_in(&self, wire: &mut Connection, deadline: MonotonicTime) -> Result<(), Error> {
        let settings = self.info.redis_settings();
        let mut commands = redis::pipe();
        let has_login = if settings.protocol() == ProtocolVersion::RESP2 {
            if let Some(password) = settings.password() {
                let login = commands.cmd("AUTH");
                settings.username().into_iter().for_each(|user| {
                    login.arg(user);
                });
                login.arg(password);
            }
            settings.password().is_some()
        } else {
            commands.add_command(hello(settings));
            true
        };
        let selects = settings.db() != 0;
        if selects {
            commands.cmd("SELECT").arg(settings.db());
        }
        let about = [
            ("LIB-NAME", "leasehold"),
            ("LIB-VER", env!("CARGO_PKG_VERSION")),
        ];
        for (what, value) in about {
            commands.cmd("CLIENT").arg("SETINFO").arg(what).arg(value);
        }
        let replies = wire.converse(&commands, deadline);
        let mut replies = replies.map_err(|e| self.explain(e))?.into_iter();
        if has_login && let Some(Value::ServerError(error)) = replies.next() {
            let is_refused = settings.protocol() == ProtocolVersion::RESP2
                && refusal(error.code(), error.details()).kind() == ErrorKind::Protocol;
            return Err(self.explain(if is_refused {
                let what = "the server refused the login";
                (redis::ErrorKind::AuthenticationFailed, what).into()
            } else {
                error.into()
            }));
        }
        if selects && let Some(Value::ServerError(error)) = replies.next() {
            let (addr, db) = (address(&self.info), settings.db());
            let refusal = login_refusal(&self.info, &error);
            return Err(match refusal.kind() {
                ErrorKind::Protocol => {
                    let message = format!("url: {addr} has no database {db}");
                    Error::new(ErrorKind::InvalidConfig, message).with_source(refusal)
                }
                _ => self.explain(error.into()),
            });
        }
        // Before 7.2 Redis does not know `CLIENT SETINFO`.
        Ok(())
    }

    /// Asks which scripts the server knows and loads the others: hashes are much shorter than texts. Refuses a
    /// server that does not answer as Redis does.
    fn load_missing(&self, wire: &mut Connection, deadline: MonotonicTime) -> Result<(), Error> {
        let refused = |e: RedisError| self.explain(e);
        let mut exists = redis::pipe();
        exists
            .cmd("SCRIPT")
            .arg("EXISTS")
            .arg(&Kind::ALL.map(Kind::hash));
        let known = wire.converse(&exists, deadline).map_err(refused)?;
        let known = match known.into_iter().next().unwrap_or_default() {
            // An ACL or a proxy may allow SCRIPT LOAD without SCRIPT EXISTS. SCRIPT LOAD meets any other error again.
            Value::ServerError(_) => [false; Kind::ALL.len()],
            reply => redis::from_redis_value(reply).map_err(|e| refused(e.into()))?,
        };
        let missing = Kind::ALL.into_iter().filter(|kind| !known[*kind as usize]);
        let missing: Vec<Kind> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mut load = redis::pipe();
        for kind in &missing {
            load.cmd("SCRIPT").arg("LOAD").arg(kind.text());
        }
        let replies = wire.converse(&load, deadline).map_err(refused)?;
        for (kind, reply) in missing.iter().zip(replies) {
            match reply {
                Value::ServerError(error) => return Err(refused(error.into())),
                Value::BulkString(hash) if hash == kind.hash().as_bytes() => {}
                _ => {
                    let message = format!("{}: does not answer as Redis does", address(&self.info));
                    return Err(Error::new(ErrorKind::Protocol, message));
                }
            }
        }
        Ok(())
    }

    /// Says which of the connections made here are suspect.
    pub(crate) fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    pub(crate) fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    /// Why the last attempt to connect failed, where the last one did.
    pub(crate) fn last_error(&self) -> Option<Error> {
        self.last_error.lock().clone()
    }

    fn explain(&self, error: RedisError) -> Error {
        let addr = address(&self.info);
        let settings = self.info.redis_settings();
        let said = error.to_string();
        let about = |kind, what: &str| Error::new(kind, format!("{addr}: {what}"));
        let kind = match classify(&error) {
            ErrorKind::TooLarge => ErrorKind::Protocol,
            kind => kind,
        };
        if repeats_login(&self.info, &said) {
            return about(kind, LOGIN_REPEATED);
        }
        let error = plain(error);
        match kind {
            // Nothing was asked yet, so no outcome is unknown: it just cannot be reached.
            ErrorKind::Timeout => about(
                ErrorKind::Unavailable,
                &format!("no answer within {:?}", self.connect_timeout),
            ),
            ErrorKind::Denied => match settings.username() {
                // In a URL without a password, the user's name may be the password.
                Some(_) if settings.password().is_none_or(str::is_empty) => {
                    about(kind, "no password was given")
                }
                user => {
                    let user = user.unwrap_or("default");
                    about(kind, &format!("user {user:?} is refused"))
                }
            },
            ErrorKind::Protocol => about(kind, "does not answer as Redis does"),
            _ => about(kind, &error.to_string()),
        }
        .with_source(error)
    }
}

/// What the pool makes connections with. Keeps why the last attempt failed, typed: the pool itself
/// keeps its text only.
pub(crate) struct Connector(pub(crate) Arc<Endpoint>);

impl r2d2::ManageConnection for Connector {
    type Connection = Connection;
    type Error = Error;

    fn connect(&self) -> Result<Connection, Error> {
        let opened = self.0.open();
        *self.0.last_error.lock() = opened.as_ref().err().cloned();
        opened
    }

    /// Never asked: a PING at each checkout doubles the cost of a command.
    fn is_valid(&self, _: &mut Connection) -> Result<(), Error> {
        Ok(())
    }

    fn has_broken(&self, wire: &mut Connection) -> bool {
        wire.broken
    }
}

/// The kind of content of a reply. It decides how large the reply may be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplyContents {
    /// Values that this library made, or numbers.
    Own,
    /// This many values of the caller's.
    Values(usize),
    /// One of the replies to a pipeline, which count as one value together: those before it had this size.
    MoreOfOne { so_far: usize },
}

/// A connection that marks itself broken after any error.
pub(crate) struct Connection {
    sender: Sender,
    receiver: Receiver,
    database: i64,
    max_reply: usize,
    /// Left out of the errors of the server.
    password: Option<Box<str>>,
    broken: bool,
    made_in: MadeIn,
    epoch: Arc<Epoch>,
}

impl Connection {
    pub(crate) fn send(&mut self, bytes: &[u8], deadline: MonotonicTime) -> Result<(), Error> {
        self.put(bytes, deadline).map_err(no_answer)
    }

    /// The next reply, if all of it is there by `deadline`.
    pub(crate) fn receive(
        &mut self,
        deadline: MonotonicTime,
        of: ReplyContents,
    ) -> Result<Value, Error> {
        self.take(deadline, of).map_err(no_answer)
    }

    /// The next reply, which is due by `due`. Nothing if it is not there by `until`, before it is due: then the next
    /// call goes on with it.
    pub(crate) fn receive_until(
        &mut self,
        until: MonotonicTime,
        due: MonotonicTime,
        of: ReplyContents,
    ) -> Result<Option<Value>, Error> {
        let limit = self.limit_of(of);
        let received = self.receiver.receive_reply(until, limit);
        match received {
            Err(error) if until < due && error.is_timeout() => Ok(None),
            received => self.accept(received).map(Some).map_err(no_answer),
        }
    }

    /// As [`send`](Self::send), with the error as redis-rs has it.
    pub(crate) fn put(&mut self, bytes: &[u8], deadline: MonotonicTime) -> RedisResult<()> {
        let sent = self.sender.send(bytes, deadline);
        sent.inspect_err(|_| self.broke())?;
        Ok(())
    }

    /// As [`receive`](Self::receive), with the error as redis-rs has it.
    pub(crate) fn take(
        &mut self,
        deadline: MonotonicTime,
        of: ReplyContents,
    ) -> RedisResult<Value> {
        let limit = self.limit_of(of);
        let received = self.receiver.receive_reply(deadline, limit);
        self.accept(received)
    }

    fn accept(&mut self, received: RedisResult<Value>) -> RedisResult<Value> {
        let mut value = received.inspect_err(|_| self.broke())?;
        if let Some(password) = &self.password {
            hide_password(&mut value, password);
        }
        if scripts::is_out_of_place(&value) {
            self.epoch.suspect();
        }
        Ok(value)
    }

    fn limit_of(&self, contents: ReplyContents) -> Limit {
        let max_reply_bytes = self.max_reply;
        let bytes = match contents {
            ReplyContents::Own => return LONGEST_REPLY,
            ReplyContents::Values(count) => max_reply_bytes.saturating_mul(count),
            ReplyContents::MoreOfOne { so_far } => max_reply_bytes.saturating_sub(so_far),
        };
        Limit::Set {
            bytes,
            max_reply_bytes,
        }
    }

    /// Size of the last reply, as it counts towards its limit.
    pub(crate) fn last_size(&self) -> usize {
        self.receiver.last_size()
    }

    /// Sends `commands` and reads their replies, while the connection is being made.
    fn converse(
        &mut self,
        commands: &Pipeline,
        deadline: MonotonicTime,
    ) -> RedisResult<Vec<Value>> {
        self.sender
            .send(&commands.get_packed_pipeline(), deadline)?;
        let reply = |_| self.receiver.receive_reply(deadline, LONGEST_REPLY);
        (0..commands.len()).map(reply).collect()
    }

    /// Marks the connection as not to be used again.
    pub(crate) fn discard(&mut self) {
        self.broken = true;
    }

    /// As [`discard`](Self::discard), for a reply of an unexpected shape: other connections of the client may lead
    /// to the same server, so they become suspect.
    pub(crate) fn distrust(&mut self) {
        self.broken = true;
        self.epoch.suspect();
    }

    /// Whether to replace this connection before the next write.
    pub(crate) fn is_stale(&self) -> bool {
        self.epoch.is_stale(&self.made_in)
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.broken
    }

    /// The number of the database it is for.
    pub(crate) fn database(&self) -> i64 {
        self.database
    }

    fn broke(&mut self) {
        self.broken = true;
        self.epoch.broke();
    }
}

/// `HELLO` of a connection that speaks RESP3.
pub(crate) fn hello(settings: &RedisConnectionInfo) -> Cmd {
    let mut hello = redis::cmd("HELLO");
    hello.arg("3");
    if let Some(password) = settings.password() {
        let user = settings.username().unwrap_or("default");
        hello.arg("AUTH").arg(user).arg(password);
    }
    hello
}

/// The error of a connection that gave no reply.
pub(crate) fn no_answer(error: RedisError) -> Error {
    by_redis(classify(&error), error)
}

/// An error of this kind with the text of redis-rs.
pub(crate) fn by_redis(kind: ErrorKind, error: RedisError) -> Error {
    let error = plain(error);
    Error::new(kind, error.to_string()).with_source(error)
}

/// The codes of errors that mean something to this library. They are shown whatever the password is.
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
    "READONLY",
    "TOOLARGE",
    "TRYAGAIN",
    "UNBLOCKED",
    "WRONGPASS",
    "WRONGTYPE",
];

/// Puts `<password>` in place of the password in each error of a reply.
fn hide_password(reply: &mut Value, password: &str) {
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

/// The error without the password. Nothing if it does not hold the password, or if the password is a part of the words
/// by which the library knows the error.
fn without_password(error: &ServerError, password: &str) -> Option<Value> {
    let (code, detail) = (error.code(), error.details().unwrap_or(""));
    let hide = |text: &str| text.replace(password, "<password>");
    let said = format!("{code} {detail}");
    let shown = match CODES.contains(&code) {
        true => format!("{code} {}", hide(detail)),
        false => hide(&said),
    };
    let line = format!("-{}\r\n", shown.replace(['\r', '\n'], " "));
    let hidden = redis::parse_redis_value(line.as_bytes()).ok();
    hidden.filter(|hidden| {
        let kind = |error: &ServerError| refusal(error.code(), error.details()).kind();
        shown != said && matches!(hidden, Value::ServerError(hidden) if kind(hidden) == kind(error))
    })
}

/// `error` with its text made [`printable`], without lease ids, and without the arguments that Redis quotes: they may be
/// secrets.
pub(crate) fn plain(error: RedisError) -> RedisError {
    let text = error.to_string();
    let shown = without_arguments(&text);
    let is_clean = shown == text && !has_id(shown);
    if is_clean && matches!(printable(shown, LONGEST_SAID), Cow::Borrowed(_)) {
        return error;
    }
    let detail = without_arguments(error.detail().unwrap_or(&text));
    let detail = printable(&without_ids(detail), LONGEST_SAID).into_owned();
    match (error.kind(), error.code()) {
        (redis::ErrorKind::Extension, Some(code)) => {
            let code = printable(&without_ids(code), LONGEST_SAID).into_owned();
            redis::make_extension_error(code, Some(detail))
        }
        (kind, _) => (kind, "the other side said", detail).into(),
    }
}

/// An error of the server without the arguments that Redis quotes of a command that it does not know: a password,
/// or a lease id.
fn without_arguments(said: &str) -> &str {
    said.split(", with args beginning with")
        .next()
        .unwrap_or(said)
}

/// What an error of redis-rs means to a caller.
pub(crate) fn classify(error: &RedisError) -> ErrorKind {
    use redis::ErrorKind as Redis;
    if error.is_timeout() {
        return ErrorKind::Timeout;
    }
    if let Some(errors) = error.clone().into_server_errors()
        && let Some((_, first)) = errors.first()
    {
        return refusal(first.code(), first.details()).kind();
    }
    match error.kind() {
        Redis::AuthenticationFailed => ErrorKind::Denied,
        Redis::Io => ErrorKind::Unavailable,
        Redis::InvalidClientConfig => ErrorKind::InvalidConfig,
        Redis::Server(_) | Redis::Extension => {
            refusal(error.code().unwrap_or(""), error.detail()).kind()
        }
        _ => ErrorKind::Protocol,
    }
}

/// What an error reply of the server means to a caller.
pub(crate) fn refusal(code: &str, detail: Option<&str>) -> Error {
    let (code, detail) = own_words(code, detail);
    let detail = without_arguments(detail);
    let kind = match code {
        "DENIED" | "NOAUTH" | "NOPERM" | "WRONGPASS" => ErrorKind::Denied,
        "BUSY" | "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "MISCONF" | "NOREPLICAS" | "OOM"
        | "READONLY" | "TRYAGAIN" | "UNBLOCKED" => ErrorKind::Unavailable,
        TOO_LARGE => ErrorKind::TooLarge,
        _ if detail.contains("max number of clients") => ErrorKind::Unavailable,
        // An ACL lets the user run scripts, but not a command or key that this script uses.
        // First the words of Redis up to 7.0, then those of later ones.
        _ if detail.contains("user executing the script can't") => ErrorKind::Denied,
        _ if detail.starts_with("ACL failure in script: ") => ErrorKind::Denied,
        _ => ErrorKind::Protocol,
    };
    Error::new(kind, without_ids(&format!("{code} {detail}")))
}

/// As [`refusal`], while a connection is made: the words of the server may repeat the login.
pub(crate) fn login_refusal(info: &ConnectionInfo, error: &ServerError) -> Error {
    let refused = refusal(error.code(), error.details());
    if repeats_login(info, &error.to_string()) {
        return Error::new(refused.kind(), LOGIN_REPEATED);
    }
    refused
}

/// Code and detail of an error, as Redis 7 words them. Redis 6.2 wraps the errors of commands inside a script:
/// `@user_script: 18: -OOM command not allowed ..`, or if the script raises them,
/// `ERR Error running script (call to f_..): @user_script:18: @user_script: 18: -OOM ..`. It leaves out the code
/// of some, for which Redis 7 says `ERR`.
pub(crate) fn own_words<'a>(code: &'a str, detail: Option<&'a str>) -> (&'a str, &'a str) {
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
        None if is_code(code) => (code, detail),
        None => ("ERR", own),
    }
}

/// The kind of a reply, for errors. Its content may hold a lease id or another secret.
pub(crate) fn shape(value: &Value) -> String {
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

/// Whether an error of Redis may begin with `word`. Errors of a proxy in between begin otherwise.
pub(crate) fn is_code(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_uppercase())
}

/// Where `url` leads and how to log in there, or why it cannot be used. The reasons quote nothing of it: in a malformed
/// URL, any part may belong to the password.
fn read_url(url: &str) -> Result<ConnectionInfo, String> {
    const SHAPE: &str = "must be redis://user:password@host:port/database or unix:///path, with other characters \
        than letters, digits and -._~ percent-encoded in user and password";
    let parsed = redis::parse_redis_url(url).ok_or(SHAPE)?;
    let known = match parsed.scheme() {
        "rediss" | "valkeys" => return Err(NO_TLS.to_owned()),
        "redis" | "valkey" => TCP_OPTIONS,
        _ => UNIX_OPTIONS,
    };
    if parsed.fragment().is_some() {
        return Err(format!("has a part behind a #, but {SHAPE}"));
    }
    if parsed
        .query_pairs()
        .any(|(name, _)| !known.contains(&&*name))
    {
        return Err(format!(
            "has an unknown option; known are {}",
            known.join(", ")
        ));
    }
    let info = parsed
        .into_connection_info()
        .map_err(|error| match error.detail() {
            Some(_) => "has an unknown version in its option protocol".to_owned(),
            None => format!("{error}; it {SHAPE}"),
        })?;
    match info.addr() {
        // `redis://user:password%40host`: the host would be shown.
        ConnectionAddr::Tcp(host, _) if host.contains('%') => {
            Err(format!("has a % in the host, but {SHAPE}"))
        }
        _ => Ok(info),
    }
}

const NO_TLS: &str = "TLS is not supported by this build";

/// Why this client cannot connect to an address, if it cannot. Quotes nothing of it: redis-rs may have taken a part of
/// a password for the host.
fn check_address(info: &ConnectionInfo) -> Result<(), &'static str> {
    match info.addr() {
        ConnectionAddr::Tcp(host, _) if host.is_empty() => Err("has no host"),
        ConnectionAddr::Tcp(host, _) if host.contains(['%', '@', '/']) => {
            Err("has a %, an @ or a / in the host")
        }
        ConnectionAddr::Tcp(..) => Ok(()),
        ConnectionAddr::Unix(_) if cfg!(unix) => Ok(()),
        ConnectionAddr::Unix(_) => Err("Unix sockets are not supported on this system"),
        ConnectionAddr::TcpTls { .. } => Err(NO_TLS),
        _ => Err("is of a kind that this version does not know"),
    }
}

/// An address without user and password, for debug output.
pub(crate) fn redacted_info(info: &ConnectionInfo) -> String {
    check_address(info).map_or_else(|_| "***".to_owned(), |()| address(info))
}

/// A URL without user, password and options, for debug output.
pub(crate) fn redacted(url: &str) -> String {
    read_url(url).map_or_else(|_| "***".to_owned(), |info| address(&info))
}

/// The address for messages: `host:port`, or the path of a socket up to where a misplaced option may begin.
pub(crate) fn address(info: &ConnectionInfo) -> String {
    let addr = info.addr().to_string();
    if matches!(info.addr(), ConnectionAddr::Tcp(..)) {
        return addr;
    }
    match addr.split_once(['?', '&', ';', '=', '@', '%']) {
        Some((path, _)) => format!("{path}.."),
        None => addr,
    }
}

/// Stands for an error of the server that repeats the password.
const LOGIN_REPEATED: &str = "refuses the login, in words that repeat it";

/// Whether the server's words repeat the password, or a user's name that may be one.
fn repeats_login(info: &ConnectionInfo, said: &str) -> bool {
    let settings = info.redis_settings();
    let given = |secret: &&str| !secret.is_empty();
    let secret = settings.password().filter(given).or(settings.username());
    let said = without_arguments(said);
    // The server may have shown a line break or a quote in another way.
    let parts = secret
        .into_iter()
        .flat_map(|secret| secret.split(|c: char| !c.is_alphanumeric()));
    parts
        .filter(|part| part.len() > 3)
        .any(|part| said.contains(part))
        || secret.is_some_and(|secret| said.contains(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(url: &str) -> Result<Endpoint, Error> {
        let second = Duration::from_secs(1);
        Endpoint::new(url, second)
    }

    #[test]
    fn urls_are_read_as_redis_rs_reads_them() {
        let e = endpoint("redis://user:pa%20ss@host:7000/3?protocol=resp2").unwrap();
        let settings = e.info.redis_settings();
        assert_eq!(settings.username(), Some("user"));
        assert_eq!(settings.password(), Some("pa ss"));
        assert_eq!(settings.db(), 3);
        assert!(endpoint("unix:///run/redis.sock?db=2&pass=x").is_ok());
        assert!(endpoint("valkey://host").is_ok());
    }

    #[test]
    fn a_bad_url_is_named_without_its_password() {
        for url in [
            "redis://user:secret@host:badport/0",
            "redis://:se/secret@host",
            "http://u:secret@host",
            "redis:secret@host",
            "rediss://:secret@host",
            "redis://:secret@host/notanumber",
            "redis://:secret@host/0?timeout=5",
            "unix:///x?db=0&pass=secret&user=me&shard=1",
            "unix:///x?pass=secret&db=zero",
            "redis://:secret@host?protocol=9",
        ] {
            let error = endpoint(url).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{url}");
            let text = format!("{error} {error:?}");
            assert!(text.contains("url"), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
        let error = endpoint("redis://h/0?timeout=5").err().unwrap().to_string();
        assert!(error.ends_with("has an unknown option; known are protocol"));
    }

    #[cfg(not(shuttle))]
    mod slow {
        use std::net::{SocketAddr, TcpStream};

        use super::*;
        use crate::store::redis::fake_server::{self, Stall};

        const TIMEOUT: Duration = Duration::from_millis(200);
        /// A busy machine may be late by that.
        const MARGIN: Duration = Duration::from_secs(5);

        #[track_caller]
        fn assert_ends_in_time(address: SocketAddr) {
            let endpoint = Endpoint::new(&format!("redis://{address}"), TIMEOUT).unwrap();
            let started = MonotonicTime::now();
            let error = endpoint.open().err().unwrap();
            let took = MonotonicTime::now().since(started);
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(took >= TIMEOUT / 2 && took < TIMEOUT + MARGIN, "{took:?}");
        }

        #[test]
        fn an_unanswered_attempt_ends_with_the_time_out() {
            let (_listener, address) = fake_server::accepts_nothing();
            let attempt = || TcpStream::connect_timeout(&address, TIMEOUT);
            let _accepted: Vec<TcpStream> = std::iter::from_fn(|| attempt().ok()).collect();
            assert_ends_in_time(address);
        }

        #[test]
        fn each_step_of_a_connection_ends_with_the_time_out() {
            const LOGIN: &str = "+OK\r\n+OK\r\n";
            let no_script = format!("*7\r\n{}", ":0\r\n".repeat(7));
            for answers in ["", LOGIN, &format!("{LOGIN}{no_script}")] {
                for stall in Stall::ALL {
                    assert_ends_in_time(fake_server::stalling(answers.as_bytes(), stall));
                }
            }
        }
    }

    #[test]
    #[cfg(not(shuttle))]
    fn a_closed_endpoint_ends_its_logins_and_connects_no_more() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let endpoint = Endpoint::new(&url, Duration::from_secs(600)).unwrap();
        std::thread::scope(|scope| {
            let logins = [(); 3].map(|()| scope.spawn(|| endpoint.open().err().unwrap()));
            // Their logins have come, and get no answer.
            let _accepted = [(); 3].map(|()| listener.accept().unwrap());
            while endpoint.opening.lock().sockets.len() < 3 {
                std::thread::yield_now();
            }
            endpoint.close();
            for login in logins {
                assert_eq!(login.join().unwrap().kind(), ErrorKind::Unavailable);
            }
        });
        assert!(endpoint.opening.lock().sockets.is_empty());
        listener.set_nonblocking(true).unwrap();
        assert_eq!(
            endpoint.open().err().unwrap().kind(),
            ErrorKind::Unavailable
        );
        let accepted = listener.accept();
        assert_eq!(accepted.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    #[cfg(not(shuttle))]
    fn a_finished_login_is_not_closed_later() {
        let server = leasehold_testbed::Server::start().unwrap();
        let endpoint = endpoint(&server.url()).unwrap();
        let mut connection = endpoint.open().unwrap();
        endpoint.close();
        let deadline = MonotonicTime::now().after(Duration::from_secs(10));
        let pong = redis::cmd("PING").get_packed_command();
        connection.send(&pong, deadline).unwrap();
        let reply = connection.receive(deadline, ReplyContents::Own);
        assert_eq!(reply.unwrap(), Value::SimpleString("PONG".to_owned()));
    }

    #[test]
    fn refusals_are_sorted_by_what_a_caller_can_do() {
        let cases = [
            ("OOM", ErrorKind::Unavailable),
            ("LOADING", ErrorKind::Unavailable),
            ("READONLY", ErrorKind::Unavailable),
            ("NOPERM", ErrorKind::Denied),
            ("WRONGTYPE", ErrorKind::Protocol),
            ("ERR", ErrorKind::Protocol),
        ];
        for (code, kind) in cases {
            assert_eq!(refusal(code, None).kind(), kind, "{code}");
        }
    }

    #[test]
    fn errors_inside_scripts_mean_the_same_on_every_version() {
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
                assert_eq!(refusal(code, Some(detail)).kind(), kind, "{error}");
            }
        }
        let wrongtype = raised("WRONGTYPE Operation against a key");
        let detail = wrongtype.strip_prefix("ERR ");
        assert_eq!(own_words("ERR", detail).0, "WRONGTYPE");
    }
}
