//! Options that several commands have: whether Redis may be installed, and how long to run.

use std::path::PathBuf;

use anyhow::Context as _;
use leasehold_testbed::{Install, OwnClock, provide_server};

/// The option of commands that start servers of their own.
#[derive(Clone, Copy, Debug, clap::Args)]
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

/// Parses the option `--minutes`.
pub fn minutes(text: &str) -> Result<f64, String> {
    let minutes = text.parse::<f64>().map_err(|error| error.to_string())?;
    let is_possible = (0.05..=100_000.0).contains(&minutes);
    is_possible
        .then_some(minutes)
        .ok_or_else(|| "must be 0.05 to 100000".to_owned())
}
