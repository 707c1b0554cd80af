//! The requests of a new connection: the login, and the scripts that the server does not know.
//!
//! Scripts are called by their hashes, which the client computes. A new connection asks with one `SCRIPT EXISTS` which
//! scripts the server knows, and loads the others. If the server refuses `SCRIPT EXISTS`, the client loads all scripts.
//! If the server refuses `SCRIPT LOAD`, too, an `EVAL` checks that the server runs scripts. A call that gets `NOSCRIPT`
//! is repeated with the text of the script; an acquire behind a release that got `NOSCRIPT` is repeated after the
//! release. For ten minutes after the server has refused `EVALSHA`, all calls contain the text.

use redis::{Pipeline, ProtocolVersion, RedisConnectionInfo, RedisError, ServerError, Value};

use crate::command::script::Script;
use crate::command::{SCRIPTS, script_beside};
use crate::config::key::fence_counter;
use crate::config::other_library::OtherLibrary;
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::wire::connect::connection::Connection;
use crate::wire::connect::data_check::DataCheck;
use crate::wire::connect::dial::Dialer;
use crate::wire::connect::errors::{ConnectErrors, NOT_REDIS};
use crate::wire::connect::steps::Step;
use crate::wire::connect::url;
use crate::wire::net::error_replies::{error_reply, has_too_many_clients};
use crate::wire::net::refusal::name_of;
use crate::wire::net::replies::field;

/// The commands of a login: `HELLO` (RESP3) or `AUTH` (RESP2), and `SELECT`, each only if it is needed.
pub struct Login {
    pub commands: Pipeline,
    /// Whether the first command is `HELLO` or `AUTH`.
    authenticates: bool,
    /// Whether the last command is `SELECT`.
    selects: bool,
}

impl Login {
    /// Makes the commands of a login. `HELLO` also sets the connection's name to `name`. With RESP2, `name` is ignored.
    pub fn new(
        settings: &RedisConnectionInfo,
        protocol: ProtocolVersion,
        name: Option<&str>,
    ) -> Self {
        let mut commands = redis::pipe();
        let (user, password) = (settings.username(), settings.password());
        if protocol == ProtocolVersion::RESP2 {
            if let Some(password) = password {
                commands.cmd("AUTH").arg(user).arg(password);
            }
        } else {
            commands.cmd("HELLO").arg("3");
            if let Some(password) = password {
                commands.arg("AUTH").arg(user.unwrap_or("default"));
                commands.arg(password);
            }
            if let Some(name) = name {
                commands.arg("SETNAME").arg(name);
            }
        }
        let authenticates = !commands.is_empty();
        let selects = settings.db() != 0;
        if selects {
            commands.cmd("SELECT").arg(settings.db());
        }
        Self {
            commands,
            authenticates,
            selects,
        }
    }
}

/// A connection that is being made.
pub struct Handshake<'a> {
    pub dialer: &'a Dialer,
    /// Whether the server has to be a node of a Cluster. If false, it must not be one.
    pub is_in_cluster: bool,
    /// `None` unless the server is a node of a quorum.
    pub data_check: Option<&'a DataCheck>,
    /// The library whose locks the client also excludes and waits for.
    pub other_library: Option<OtherLibrary>,
    pub attempted: ConnectErrors<'a>,
    pub connection: &'a mut Connection,
    pub deadline: MonotonicTime,
}

impl Handshake<'_> {
    /// Logs in, selects the database, and sets the names of this library (as redis-rs does) and of the connection.
    /// Returns the reply to `HELLO`.
    pub fn log_in(&mut self) -> Result<Value, Error> {
        let settings = self.attempted.info.redis_settings();
        let protocol = settings.protocol();
        let mut login = Login::new(settings, protocol, None);
        let library = [
            ("LIB-NAME", "leasehold"),
            ("LIB-VER", env!("CARGO_PKG_VERSION")),
        ];
        for (field, value) in library {
            let command = login.commands.cmd("CLIENT").arg("SETINFO");
            command.arg(field).arg(value);
        }
        let name = self.dialer.connection_name("leasehold");
        let set_name = login.commands.cmd("CLIENT").arg("SETNAME");
        set_name.arg(name);
        // The reply shows whether this is a single server. `HELLO` without a protocol version changes nothing.
        login.commands.cmd("HELLO");
        let mut replies = self.send_and_receive(Step::LogIn, &login.commands)?;
        // `NOAUTH` is an error here. All other errors of `CLIENT SETINFO`, `CLIENT SETNAME` and this `HELLO` are
        // ignored: Redis before 7.2 does not know `SETINFO`, an ACL may forbid `SETNAME`, and some proxies refuse
        // `HELLO`.
        let server = replies.pop().unwrap_or_default();
        self.check_mode(&server)?;
        let mut replies = replies.into_iter();
        if login.authenticates
            && let Some(Value::ServerError(error)) = replies.next()
        {
            let command = match protocol {
                ProtocolVersion::RESP2 => "AUTH",
                _ => "HELLO",
            };
            return Err(self.attempted.refused_error(Step::LogIn, command, &error));
        }
        if login.selects
            && let Some(Value::ServerError(error)) = replies.next()
        {
            return Err(self.attempted.refused_error(Step::LogIn, "SELECT", &error));
        }
        match server {
            Value::ServerError(error) if error.code() == "NOAUTH" => {
                Err(self.attempted.refused_error(Step::LogIn, "HELLO", &error))
            }
            server => Ok(server),
        }
    }

    /// The role of the server: `master` or another role. `server` is its reply to `HELLO`.
    pub fn role(&mut self, server: Value) -> Result<Vec<u8>, Error> {
        if let Some(role) = field(&server, b"role") {
            return Ok(role.to_vec());
        }
        // The server has not reported its role: a proxy may refuse `HELLO`, or `rename-command` may have removed it.
        let mut commands = redis::pipe();
        commands.cmd("ROLE");
        match self.send_and_receive(Step::LogIn, &commands)?.pop() {
            Some(Value::ServerError(error)) => {
                Err(self.attempted.refused_error(Step::LogIn, "ROLE", &error))
            }
            Some(Value::Array(parts)) => match parts.into_iter().next() {
                Some(Value::BulkString(role)) => Ok(role),
                _ => Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
            },
            _ => Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
        }
    }

    /// Returns an error if the reply to `HELLO` comes from a node of a Cluster, or from a Sentinel.
    fn check_mode(&self, server: &Value) -> Result<(), Error> {
        let what = match field(server, b"mode") {
            Some(b"cluster") if self.is_in_cluster => return Ok(()),
            Some(b"standalone") if self.is_in_cluster => {
                "is no node of a Redis Cluster; use redis:// (with TLS rediss://) instead of \
                 redis+cluster://"
            }
            Some(b"cluster") => {
                let url = url::cluster_url(self.attempted.info);
                let what = format!("is a node of a Redis Cluster; use the URL {url}");
                return Err(self.attempted.about(ErrorKind::InvalidConfig, what));
            }
            Some(b"sentinel") => {
                "is a sentinel; use redis+sentinel://host:port/name, with the name of the group that \
                 it watches"
            }
            _ => return Ok(()),
        };
        Err(self.attempted.about(ErrorKind::InvalidConfig, what))
    }

    /// Asks for the scripts by their hashes, which are much shorter than the scripts, and loads only those that the
    /// server does not know. If the server, a proxy or an ACL refuses `SCRIPT LOAD`, the first call of each script has
    /// its text. Returns an error if the server does not reply as Redis does.
    pub fn load_missing_scripts(&mut self) -> Result<(), Error> {
        let mut exists = redis::pipe();
        let is_in_quorum = self.data_check.is_some();
        let needed = SCRIPTS
            .into_iter()
            .filter(|script| is_in_quorum || !script.only_on_quorum);
        let needed = needed.map(|script| script_beside(self.other_library, script));
        let needed: Vec<&Script> = needed.collect();
        let hashes: Vec<&str> = needed.iter().map(|script| script.hash()).collect();
        exists.cmd("SCRIPT").arg("EXISTS").arg(&hashes);
        let mut replies = self.send_and_receive(Step::LoadScripts, &exists)?;
        let known = match replies.pop().unwrap_or_default() {
            // An ACL or a proxy may forbid SCRIPT EXISTS and allow SCRIPT LOAD. If the error has another cause, SCRIPT
            // LOAD fails, too.
            Value::ServerError(_) => vec![false; needed.len()],
            reply => redis::from_redis_value::<Vec<bool>>(reply)
                .ok()
                .filter(|known| known.len() == needed.len())
                .ok_or_else(|| self.attempted.about(ErrorKind::Protocol, NOT_REDIS))?,
        };
        let missing = needed.into_iter().zip(known);
        let missing = missing.filter_map(|(script, is_known)| (!is_known).then_some(script));
        let missing: Vec<&Script> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mut load = redis::pipe();
        for script in &missing {
            load.cmd("SCRIPT").arg("LOAD").arg(script.text());
        }
        let replies = self.send_and_receive(Step::LoadScripts, &load)?;
        for (script, reply) in missing.iter().zip(replies) {
            match reply {
                Value::ServerError(error) => return self.check_eval(&error),
                Value::BulkString(hash) if hash == script.hash().as_bytes() => {}
                _ => return Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
            }
        }
        Ok(())
    }

    /// Returns an error unless the server runs a script that is sent as text. If `not_loaded`, the reply to `SCRIPT
    /// LOAD`, has a temporary cause, returns that error.
    fn check_eval(&mut self, not_loaded: &ServerError) -> Result<(), Error> {
        let step = Step::LoadScripts;
        let error = self
            .attempted
            .refused_error(step, "SCRIPT LOAD", not_loaded);
        if error.kind() == ErrorKind::Unavailable {
            return Err(error);
        }
        let mut eval = redis::pipe();
        // Some proxies choose the server by the first key.
        let key = fence_counter(self.attempted.prefix);
        eval.cmd("EVAL").arg("return 1").arg(1).arg(key);
        match self.send_and_receive(step, &eval)?.pop() {
            Some(Value::Int(1)) => Ok(()),
            Some(Value::ServerError(error)) => {
                let reply = error_reply(error.code(), error.details());
                // A redirect is no refusal: another node of the Cluster has the key.
                match reply.redirect() {
                    Some(_) => Ok(()),
                    None => Err(self.attempted.refused_error(step, "EVAL", &error)),
                }
            }
            _ => Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
        }
    }

    /// Calls lua/data.lua on a node of a quorum, so that a new process begins its quarantine. Does nothing on other
    /// servers.
    pub fn check_data(&mut self) -> Result<(), Error> {
        let Some(check) = self.data_check else {
            return Ok(());
        };
        let sent = MonotonicTime::now();
        match self.send_and_receive(Step::CheckData, &check.call())?.pop() {
            Some(Value::ServerError(error)) => {
                Err(self
                    .attempted
                    .refused_error(Step::CheckData, "EVAL", &error))
            }
            Some(reply) if check.read(&reply, sent) => Ok(()),
            _ => Err(self.attempted.about(ErrorKind::Protocol, NOT_REDIS)),
        }
    }

    fn send_and_receive(&mut self, step: Step, commands: &Pipeline) -> Result<Vec<Value>, Error> {
        self.attempted.enter(step);
        let mut replies = Vec::new();
        let received = self
            .connection
            .send_and_receive(commands, self.deadline, &mut replies);
        match received {
            Ok(()) => Ok(replies),
            Err(error) => Err(self
                .refused_at_accept(step, &error, replies.first())
                .unwrap_or_else(|| {
                    let command = commands.cmd_iter().nth(replies.len()).map(name_of);
                    self.error(step, command.as_deref(), error)
                })),
        }
    }

    /// The error of a server that refuses the connection itself, because it has too many clients or is in protected
    /// mode. Such a server sends this error without reading a command, and closes the connection. Returns `None` for an
    /// error that is the reply to a command.
    fn refused_at_accept(
        &self,
        step: Step,
        error: &RedisError,
        first: Option<&Value>,
    ) -> Option<Error> {
        let Some(Value::ServerError(refusal)) = first else {
            return None;
        };
        let is_closed = error.kind() == redis::ErrorKind::Io && !error.is_timeout();
        let of_accept = match refusal.code() {
            "DENIED" => true,
            _ => has_too_many_clients(refusal.details()),
        };
        (is_closed && of_accept).then(|| self.attempted.refused_error(step, "CONNECT", refusal))
    }

    fn error(&self, step: Step, command: Option<&str>, error: RedisError) -> Error {
        let receiver = &self.connection.receiver;
        let tls = self.dialer.tls_error(self.attempted, receiver);
        tls.unwrap_or_else(|| {
            self.attempted
                .no_reply_error(step, command, error, receiver.unparsed())
        })
    }
}
