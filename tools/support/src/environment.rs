//! The server and the keys of a command: a private server, or the user's own under one random prefix. Touches a running
//! server only if the user names it, and no key outside the prefix.

use std::env;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use leasehold::Client;
use leasehold_testbed::Server;
use redis::{Cmd, Connection, FromRedisValue, IntoConnectionInfo as _};
use uuid::Uuid;

use crate::options::Provision;
use crate::stop::Stop;

/// The variable that names the user's own server, as `--url` does, without showing a password in the list of
/// processes.
const URL_VARIABLE: &str = "LEASEHOLD_URL";
const CONNECT_TIME_OUT: Duration = Duration::from_secs(3);
const COMMAND_TIME_OUT: Duration = Duration::from_secs(5);
/// Keys in one step of SCAN: keeps a user's server responsive.
const SCAN_STEP: usize = 1_000;

/// The options that choose a server.
#[derive(Debug, clap::Args)]
pub struct ServerOptions {
    /// Use this Redis or Valkey instead of a private server. Everything is written under a prefix of its own
    /// and deleted at the end. All users of the machine can see arguments: pass a URL with a password in the
    /// environment variable LEASEHOLD_URL instead
    #[arg(long)]
    url: Option<String>,
    #[command(flatten)]
    provision: Provision,
}

impl ServerOptions {
    fn url(&self) -> Option<String> {
        let given = || env::var(URL_VARIABLE).ok().filter(|url| !url.is_empty());
        self.url.clone().or_else(given)
    }
}

/// The server and the keys of a command.
pub struct Environment {
    // Dropped before the server: the drop deletes keys.
    /// The keys.
    pub namespace: Namespace,
    private: Option<Server>,
}

impl Environment {
    /// Opens the environment of the command `name`.
    pub fn open(options: &ServerOptions, name: &str, stop: &Stop) -> anyhow::Result<Environment> {
        let (private, url) = match options.url() {
            Some(url) => (None, url),
            None => {
                options.provision.redis()?;
                let server = Server::start().context("cannot start a private Redis server")?;
                let url = server.url();
                (Some(server), url)
            }
        };
        stop.check()?;
        let namespace = Namespace::open(&url, name)?;
        Ok(Environment { namespace, private })
    }

    /// Whether the command has started the server.
    pub fn is_private(&self) -> bool {
        self.private.is_some()
    }

    /// Deletes everything that was written. A private server must be empty then, or the command wrote outside
    /// its prefix.
    pub fn close(mut self) -> anyhow::Result<()> {
        self.namespace.clean()?;
        if self.is_private() {
            let keys = self.namespace.keys_on_server()?;
            ensure!(
                keys == 0,
                "{keys} keys were written outside the command's own prefix"
            );
        }
        Ok(())
    }
}

/// One random prefix on one server. Deletes all keys under it when it is dropped, and touches no others.
pub struct Namespace {
    url: String,
    redis: redis::Client,
    root: String,
    cleaned: bool,
}

impl Namespace {
    /// A new prefix that begins with `leasehold-<name>`. Connects once, so that a wrong URL fails here.
    pub fn open(url: &str, name: &str) -> anyhow::Result<Namespace> {
        let info = url.into_connection_info().context(
            "the URL is not one of a Redis server; write it like redis://127.0.0.1:6379 or \
             redis://user:password@host:6379/0",
        )?;
        // This refuses URLs whose host or path would show a part of the password.
        drop(Client::builder(url).build_lazy()?);
        let redis = redis::Client::open(info)?;
        let random = Uuid::new_v4().simple().to_string();
        let root = format!("leasehold-{name}:{random}:");
        // The command writes nothing before the server has replied, so until then there is nothing to delete.
        let mut namespace = Namespace {
            url: url.to_owned(),
            redis,
            root,
            cleaned: true,
        };
        let () = namespace.ask(&redis::cmd("PING"))?;
        namespace.cleaned = false;
        Ok(namespace)
    }

    /// The address without the password.
    pub fn address(&self) -> String {
        self.redis.get_connection_info().addr().to_string()
    }

    /// The address with the login.
    pub fn connection_info(&self) -> &redis::ConnectionInfo {
        self.redis.get_connection_info()
    }

    /// The prefix of all keys of the command.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// The library's prefix.
    pub fn lock_prefix(&self) -> String {
        format!("{}lock:", self.root)
    }

    /// The key in Redis of the lock `key`.
    pub fn lock_key(&self, key: &str) -> String {
        format!("{}{key}", self.lock_prefix())
    }

    /// A key of the command's own, apart from the library's.
    pub fn value_key(&self, name: &str) -> String {
        format!("{}value:{name}", self.root)
    }

    /// A client of this process.
    pub fn client(&self) -> anyhow::Result<Client> {
        client(&self.url, &self.lock_prefix())
    }

    /// The URL with its password: not for output, nor for a command line.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A plain connection, without the lock library.
    pub fn connect(&self) -> anyhow::Result<Connection> {
        connect(&self.redis)
    }

    /// One command on a plain connection, without the lock library.
    pub fn ask<T: FromRedisValue>(&self, command: &Cmd) -> anyhow::Result<T> {
        let answer = command.query(&mut self.connect()?);
        answer.map_err(|error| anyhow!("a command failed at {}: {error}", self.address()))
    }

    /// Deletes everything under the prefix. The drop deletes nothing afterwards.
    pub fn clean(&mut self) -> anyhow::Result<()> {
        self.cleaned = true;
        self.wipe()
    }

    /// Deletes everything under the prefix. Repeats that until nothing is found, since Redis may still execute a
    /// command of a killed process.
    pub fn wipe(&self) -> anyhow::Result<()> {
        let wipe = || {
            let mut connection = self.connect()?;
            while delete_found(&mut connection, &self.root)? > 0 {}
            anyhow::Ok(())
        };
        wipe().context("cannot delete the keys of this command")
    }

    /// The number of all keys in the server's database.
    pub fn keys_on_server(&self) -> anyhow::Result<u64> {
        self.ask(&redis::cmd("DBSIZE"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if self.cleaned {
            return;
        }
        if let Err(error) = self.clean() {
            eprintln!("keys may be left under {}: {error:#}", self.root);
        }
    }
}

/// Deletes the keys that begin with `prefix`. Returns their number.
fn delete_found(connection: &mut Connection, prefix: &str) -> anyhow::Result<usize> {
    let keys = keys_under(connection, prefix)?;
    for some in keys.chunks(SCAN_STEP) {
        // UNLINK, since DEL of a large key would stop a user's server for a moment.
        let () = redis::cmd("UNLINK").arg(some).query(connection)?;
    }
    Ok(keys.len())
}

/// The keys that begin with `prefix`, which must contain no character with a meaning in a pattern.
pub fn keys_under(connection: &mut Connection, prefix: &str) -> anyhow::Result<Vec<String>> {
    let (mut cursor, mut found) = (0_u64, Vec::new());
    loop {
        let keys: Vec<String>;
        (cursor, keys) = redis::cmd("SCAN")
            .arg(cursor)
            .arg("MATCH")
            .arg(format!("{prefix}*"))
            .arg("COUNT")
            .arg(SCAN_STEP)
            .query(connection)?;
        found.extend(keys);
        if cursor == 0 {
            break;
        }
    }
    // SCAN may return a key more than once.
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// A plain connection with time-outs.
pub fn connect(redis: &redis::Client) -> anyhow::Result<Connection> {
    let connection = redis
        .get_connection_with_timeout(CONNECT_TIME_OUT)
        .map_err(|error| {
            let address = redis.get_connection_info().addr();
            anyhow!("cannot use the Redis server at {address}: {error}")
        })?;
    connection.set_read_timeout(Some(COMMAND_TIME_OUT))?;
    connection.set_write_timeout(Some(COMMAND_TIME_OUT))?;
    Ok(connection)
}

/// A client of the lock library.
pub fn client(url: &str, prefix: &str) -> anyhow::Result<Client> {
    let client = Client::builder(url)
        .prefix(prefix)
        .connect_timeout(CONNECT_TIME_OUT)
        .build();
    client.context("the lock client cannot be built")
}
