//! Where a command shows something: on a private server, or on the user's own, under one prefix. Never
//! touches a server that is already running unless it is told to.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use leasehold_testbed::{Install, Server, provide_server};

use crate::space::Space;
use crate::stop::Stop;

/// Names the user's own server, as `--url` does, without showing a password in the list of processes.
const URL_VARIABLE: &str = "LEASEHOLD_URL";

/// For commands that start servers of their own.
#[derive(clap::Args)]
pub struct Provision {
    /// Never install anything: say what is missing instead
    #[arg(long)]
    pub no_install: bool,
}

impl Provision {
    /// Installs Redis where there is none, unless that is forbidden. Its program.
    pub fn redis(&self) -> anyhow::Result<PathBuf> {
        let install = match self.no_install {
            true => Install::Forbidden,
            false => Install::Allowed,
        };
        provide_server(install).context("there is no Redis server to start")
    }
}

/// Where a command is told to show it.
#[derive(clap::Args)]
pub struct Place {
    /// Use this Redis or Valkey instead of a private server. All that is written there is under a prefix
    /// of its own and deleted at the end. All users of the machine can see arguments: give a URL with a
    /// password as the environment variable LEASEHOLD_URL instead
    #[arg(long)]
    url: Option<String>,
    #[command(flatten)]
    provision: Provision,
}

impl Place {
    fn url(&self) -> Option<String> {
        let given = || env::var(URL_VARIABLE).ok().filter(|url| !url.is_empty());
        self.url.clone().or_else(given)
    }
}

pub struct Stage {
    /// Dropped first: it is cleaned while its server still runs.
    pub space: Space,
    private: Option<Server>,
}

impl Stage {
    /// For the command `name`.
    pub fn open(place: &Place, name: &str, stop: &Stop) -> anyhow::Result<Stage> {
        let (private, url) = match place.url() {
            Some(url) => (None, url),
            None => {
                place.provision.redis()?;
                let server = Server::start().context("cannot start a private Redis server")?;
                let url = server.url();
                (Some(server), url)
            }
        };
        stop.check()?;
        let space = Space::open(&url, name)?;
        Ok(Stage { space, private })
    }

    pub fn is_private(&self) -> bool {
        self.private.is_some()
    }

    /// Deletes all that was written. On a private server nothing is left then, or the command wrote
    /// outside its prefix.
    pub fn close(mut self) -> anyhow::Result<()> {
        self.space.clean()?;
        if self.is_private() {
            let keys = self.space.keys_on_server()?;
            ensure!(
                keys == 0,
                "{keys} keys were written outside the command's own prefix"
            );
        }
        Ok(())
    }
}
