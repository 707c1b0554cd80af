//! The server of a command: a private one, or the user's own, under one prefix. Never touches a running
//! server unless the user names it.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use leasehold_testbed::{Install, OwnClock, Server, provide_server};

use crate::namespace::Namespace;
use crate::stop::Stop;

/// The variable that names the user's own server, as `--url` does, without showing a password in the list of
/// processes.
const URL_VARIABLE: &str = "LEASEHOLD_URL";

/// The option of commands that start servers of their own.
#[derive(clap::Args)]
pub struct Provision {
    /// Never install anything: fail with instructions instead
    #[arg(long)]
    pub no_install: bool,
}

impl Provision {
    /// The server program. Installs Redis if it is missing, unless that is forbidden.
    pub fn redis(&self) -> anyhow::Result<PathBuf> {
        provide_server(self.install()).context("there is no Redis server to start")
    }

    /// The library that gives servers clocks of their own. Installs it if it is missing, unless that is forbidden.
    pub fn own_clock(&self) -> Option<OwnClock> {
        OwnClock::provide(self.install())
    }

    fn install(&self) -> Install {
        match self.no_install {
            true => Install::Forbidden,
            false => Install::Allowed,
        }
    }
}

/// The options that choose a server.
#[derive(clap::Args)]
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
    /// Dropped before the server: the drop deletes keys.
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
