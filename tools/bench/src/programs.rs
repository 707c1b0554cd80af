//! The programs that put locks under load, built with optimization. The competitors have a program of their
//! own, so that their dependencies are not leasehold's.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use leasehold_load::Way;
use leasehold_tools::cargo::optimized;
use leasehold_tools::stop::Stop;

use crate::shares::{Redisson, cases};

pub struct Programs {
    own: PathBuf,
    peers: Option<PathBuf>,
    redisson: Option<Redisson>,
}

impl Programs {
    /// Uses this program as it is, and no competitors.
    pub fn as_built() -> anyhow::Result<Self> {
        let own = env::current_exe().context("cannot find this program's own file")?;
        Ok(Self {
            own,
            peers: None,
            redisson: None,
        })
    }

    /// Builds what is missing or out of date.
    pub fn optimized(with_peers: bool, with_redisson: bool, stop: &Stop) -> anyhow::Result<Self> {
        let own = optimized("leasehold-bench", &[], stop)?;
        let peers =
            with_peers.then(|| optimized("leasehold-peers", &["--features", "peers"], stop));
        Ok(Self {
            own,
            peers: peers.transpose()?,
            redisson: match with_redisson {
                true => Redisson::build(stop)?,
                false => None,
            },
        })
    }

    /// Whether there is a program for a way to share a key.
    pub fn can_share(&self, way: cases::Way) -> bool {
        self.redisson.is_some() || way != cases::Way::Redisson
    }

    pub fn share_load(&self, way: cases::Way) -> Command {
        match (&self.redisson, way) {
            (Some(redisson), cases::Way::Redisson) => redisson.command(),
            _ => {
                let mut command = Command::new(&self.own);
                command.arg("--share-process");
                command
            }
        }
    }

    /// Whether there is a program for a way.
    pub fn can_run(&self, way: Way) -> bool {
        self.peers.is_some() || !is_peer(way)
    }

    pub fn load(&self, way: Way) -> Command {
        match (&self.peers, is_peer(way)) {
            (Some(peers), true) => Command::new(peers),
            _ => {
                let mut command = Command::new(&self.own);
                command.arg("--process");
                command
            }
        }
    }
}

fn is_peer(way: Way) -> bool {
    matches!(way, Way::Rslock { .. } | Way::Redlock { .. })
}
