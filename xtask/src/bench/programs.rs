//! The programs that put locks under load, built to be fast. The peers' is apart: what it depends on is
//! no dependency of ours.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use leasehold_load::Way;

use super::cases::Case;
use crate::cargo::{run_to_end, workspace_root};
use crate::stop::Stop;

pub struct Programs {
    own: PathBuf,
    peers: Option<PathBuf>,
}

impl Programs {
    /// This very program, and no peers.
    pub fn as_built() -> anyhow::Result<Self> {
        let own = env::current_exe().context("cannot find this program's own file")?;
        Ok(Self { own, peers: None })
    }

    /// Builds what is missing or out of date.
    pub fn optimized(with_peers: bool, stop: &Stop) -> anyhow::Result<Self> {
        let own = built("xtask", &[], stop)?;
        let peers = with_peers.then(|| built("leasehold-peers", &["--features", "peers"], stop));
        Ok(Self {
            own,
            peers: peers.transpose()?,
        })
    }

    /// Those of a case that there is a program for.
    pub fn ways(&self, case: &Case) -> impl Iterator<Item = Way> + use<> {
        let has_peers = self.peers.is_some();
        let ways = case.ways().iter().copied();
        ways.filter(move |way| has_peers || !is_peer(*way))
    }

    pub fn load(&self, way: Way) -> Command {
        match (&self.peers, is_peer(way)) {
            (Some(peers), true) => Command::new(peers),
            _ => {
                let mut command = Command::new(&self.own);
                command.arg("bench-process");
                command
            }
        }
    }
}

fn is_peer(way: Way) -> bool {
    matches!(way, Way::Rslock { .. } | Way::Redlock { .. })
}

fn built(package: &str, features: &[&str], stop: &Stop) -> anyhow::Result<PathBuf> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command
        .current_dir(workspace_root()?)
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "--package",
            package,
        ])
        .args(features)
        // Standard output is for results.
        .stdout(Stdio::null());
    eprintln!("building {package} (a minute when it is the first time)");
    let status = run_to_end(&mut command, stop)?;
    ensure!(status.success(), "{package} cannot be built: {status}");
    // Both profiles' folders lie side by side, wherever the target folder is.
    let own = env::current_exe().context("cannot find this program's own file")?;
    let target = own.parent().and_then(|folder| folder.parent());
    let target = target.context("this program lies in no target folder")?;
    let program = target.join("release").join(package);
    ensure!(program.exists(), "cargo has not made {}", program.display());
    Ok(program)
}
