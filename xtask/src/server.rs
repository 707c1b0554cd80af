//! A private server for a command to show something on. Never touches one that is already running.

use anyhow::Context as _;
use leasehold_testbed::{Install, Server, find_server, provide_server};

/// Installs Redis first where there is none, unless that is forbidden.
pub fn private(no_install: bool) -> anyhow::Result<Server> {
    if find_server().is_none() {
        let install = if no_install {
            Install::Forbidden
        } else {
            Install::Allowed
        };
        provide_server(install).context("no Redis server to show it on")?;
    }
    Server::start().context("cannot start a private Redis server")
}
