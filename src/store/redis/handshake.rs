//! The requests of a new connection: the login, and the scripts that the server does not know.

use std::time::Duration;

use redis::{
    ConnectionInfo, Pipeline, ProtocolVersion, RedisConnectionInfo, RedisError, ServerError, Value,
};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::Connection;
use crate::store::redis::errors::{connect_error, error_reply, login_error_reply};
use crate::store::redis::scripts::ScriptKind;
use crate::store::redis::url::address;
use crate::util::clock::MonotonicTime;

/// The commands of a login: `HELLO` (RESP3) or `AUTH` (RESP2), and `SELECT`, each only if it is needed.
pub(super) struct Login {
    pub(super) commands: Pipeline,
    /// The first command is `HELLO` or `AUTH`.
    authenticates: bool,
    /// The last command is `SELECT`.
    selects: bool,
}

impl Login {
    /// `name`: a name for the connection, which only `HELLO` sets.
    pub(super) fn new(
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
pub(super) struct Handshake<'a> {
    pub(super) info: &'a ConnectionInfo,
    pub(super) connection: &'a mut Connection,
    pub(super) connect_timeout: Duration,
    pub(super) deadline: MonotonicTime,
}

impl Handshake<'_> {
    /// Logs in, selects the database and names this library, as redis-rs does.
    pub(super) fn log_in(&mut self) -> Result<(), Error> {
        let protocol = self.info.redis_settings().protocol();
        let mut login = Login::new(self.info.redis_settings(), protocol, None);
        let library = [
            ("LIB-NAME", "leasehold"),
            ("LIB-VER", env!("CARGO_PKG_VERSION")),
        ];
        for (field, value) in library {
            let command = login.commands.cmd("CLIENT").arg("SETINFO");
            command.arg(field).arg(value);
        }
        let mut replies = self.send_and_receive(&login.commands)?.into_iter();
        if login.authenticates
            && let Some(Value::ServerError(error)) = replies.next()
        {
            return Err(self.login_error(protocol, error));
        }
        if login.selects
            && let Some(Value::ServerError(error)) = replies.next()
        {
            return Err(self.select_error(error));
        }
        // The other replies are ignored: Redis before 7.2 refuses `CLIENT SETINFO`.
        Ok(())
    }

    /// Asks by hash which scripts the server knows, and loads only the others: hashes are much shorter than texts.
    /// Fails if the server does not reply as Redis does.
    pub(super) fn load_missing_scripts(&mut self) -> Result<(), Error> {
        let mut exists = redis::pipe();
        let hashes = ScriptKind::ALL.map(ScriptKind::hash);
        exists.cmd("SCRIPT").arg("EXISTS").arg(&hashes);
        let mut replies = self.send_and_receive(&exists)?;
        let known = match replies.pop().unwrap_or_default() {
            // An ACL or a proxy may allow SCRIPT LOAD without SCRIPT EXISTS. Any other error comes again as the reply
            // to SCRIPT LOAD.
            Value::ServerError(_) => [false; ScriptKind::ALL.len()],
            reply => redis::from_redis_value(reply).map_err(|e| self.error(e.into()))?,
        };
        let missing = ScriptKind::ALL
            .into_iter()
            .filter(|kind| !known[*kind as usize]);
        let missing: Vec<ScriptKind> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let mut load = redis::pipe();
        for kind in &missing {
            load.cmd("SCRIPT").arg("LOAD").arg(kind.text());
        }
        let replies = self.send_and_receive(&load)?;
        for (kind, reply) in missing.iter().zip(replies) {
            match reply {
                Value::ServerError(error) => return Err(self.error(error.into())),
                Value::BulkString(hash) if hash == kind.hash().as_bytes() => {}
                _ => {
                    let message = format!("{}: does not answer as Redis does", address(self.info));
                    return Err(Error::new(ErrorKind::Protocol, message));
                }
            }
        }
        Ok(())
    }

    fn send_and_receive(&mut self, commands: &Pipeline) -> Result<Vec<Value>, Error> {
        let replies = self.connection.send_and_receive(commands, self.deadline);
        replies.map_err(|error| self.error(error))
    }

    fn login_error(&self, protocol: ProtocolVersion, error: ServerError) -> Error {
        let is_refused = protocol == ProtocolVersion::RESP2
            && error_reply(error.code(), error.details()).kind() == ErrorKind::Protocol;
        self.error(if is_refused {
            let what = "the server refused the login";
            (redis::ErrorKind::AuthenticationFailed, what).into()
        } else {
            error.into()
        })
    }

    fn select_error(&self, error: ServerError) -> Error {
        let reply = login_error_reply(self.info, &error);
        if reply.kind() != ErrorKind::Protocol {
            return self.error(error.into());
        }
        let (addr, db) = (address(self.info), self.info.redis_settings().db());
        let message = format!("url: {addr} has no database {db}");
        Error::new(ErrorKind::InvalidConfig, message).with_source(reply)
    }

    fn error(&self, error: RedisError) -> Error {
        connect_error(self.info, self.connect_timeout, error)
    }
}
