//! Installs the other libraries into a folder below the target folder, from their package registries. Does not install
//! a missing runtime, but names its packages. Does nothing if the same versions are installed already.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::cargo::{run_within, target_folder, workspace_root};
use leasehold_tools::stop::Stop;

use crate::library::{Library, Runtime};

/// The time for one runtime. A cold build of the Go worker takes the longest.
const LIMIT: Duration = Duration::from_secs(900);
/// The last lines of a failed installation that are shown.
const SHOWN: usize = 5;
/// The version of Redisson from before `RFencedLock`. The pom has the newest one.
const OLD_REDISSON: &str = "3.17.7";
/// The version of the logger that fits this version of Redisson.
const OLD_SLF4J: &str = "1.7.36";

/// The libraries of one runtime, ready to use.
#[derive(Debug)]
pub struct Installed {
    runtime: Runtime,
    sources: PathBuf,
    folder: PathBuf,
}

impl Installed {
    /// Installs the libraries.
    ///
    /// # Errors
    /// The runtime is missing, or a registry cannot be reached. The error contains the next step.
    pub fn provide(runtime: Runtime, stop: &Stop) -> anyhow::Result<Self> {
        let lower = runtime.name().to_lowercase();
        let installed = Self {
            runtime,
            sources: workspace_root()?.join("crates/peers/interop").join(&lower),
            folder: target_folder()?.join("interop").join(lower),
        };
        let version = runtime.version()?;
        let stamp = installed.folder.join("installed");
        let wanted = format!("{version}\n{}", installed.manifest()?);
        if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
            return Ok(installed);
        }
        eprintln!("installing the libraries for {}", runtime.name());
        fs::create_dir_all(&installed.folder)?;
        // An installation that fails halfway must not count.
        if stamp.exists() {
            fs::remove_file(&stamp)?;
        }
        match runtime {
            Runtime::Python => installed.python(stop)?,
            Runtime::Node => installed.node(stop)?,
            Runtime::Go => installed.go(stop)?,
            Runtime::Java => installed.java(stop)?,
        }
        fs::write(stamp, wanted)?;
        Ok(installed)
    }

    /// A worker of `library`.
    pub fn worker(&self, library: Library) -> anyhow::Result<Command> {
        let mut command = match self.runtime {
            Runtime::Python => Command::new(self.folder.join("bin/python")),
            Runtime::Node => Command::new("node"),
            Runtime::Go => Command::new(self.folder.join("worker")),
            Runtime::Java => Command::new("java"),
        };
        match self.runtime {
            Runtime::Python => {
                command.arg("-B").arg(self.sources.join("worker.py"));
            }
            Runtime::Node => {
                command
                    .arg(self.sources.join("worker.js"))
                    .env("NODE_PATH", self.folder.join("node_modules"));
            }
            Runtime::Go => {}
            Runtime::Java => {
                let list = match library.name {
                    "redisson-3.17" => OLD_REDISSON,
                    _ => "newest",
                };
                let libraries = fs::read_to_string(self.folder.join(list))?;
                let classes = self.folder.join("classes");
                command
                    // The classes were compiled with the newest version, and are few.
                    .args([
                        "-Xmx256m",
                        "-XX:TieredStopAtLevel=1",
                        "-XX:+UseSerialGC",
                        "-cp",
                    ])
                    .arg(format!("{}:{}", classes.display(), libraries.trim()))
                    .arg("Worker");
            }
        }
        Ok(command)
    }

    /// The texts on which the installation depends.
    fn manifest(&self) -> anyhow::Result<String> {
        let files: &[&str] = match self.runtime {
            Runtime::Python => &["requirements.txt"],
            Runtime::Node => &["package.json", "package-lock.json"],
            Runtime::Go => &["go.mod", "go.sum", "main.go"],
            Runtime::Java => &["pom.xml", "src/main/java/Worker.java"],
        };
        let texts = files.iter().map(|file| {
            let path = self.sources.join(file);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        });
        Ok(texts.collect::<anyhow::Result<Vec<_>>>()?.join("\n"))
    }

    fn python(&self, stop: &Stop) -> anyhow::Result<()> {
        let mut venv = Command::new("python3");
        venv.args(["-m", "venv", "--clear"]).arg(&self.folder);
        self.run(&mut venv, stop).context(
            "Python cannot make a virtual environment; on Debian, install the package python3-venv",
        )?;
        let mut install = Command::new(self.folder.join("bin/python"));
        install
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ])
            .arg("--requirement")
            .arg(self.sources.join("requirements.txt"));
        self.run(&mut install, stop)
    }

    fn node(&self, stop: &Stop) -> anyhow::Result<()> {
        for file in ["package.json", "package-lock.json"] {
            fs::copy(self.sources.join(file), self.folder.join(file))?;
        }
        let mut install = Command::new("npm");
        install
            .args([
                "ci",
                "--ignore-scripts",
                "--no-audit",
                "--no-fund",
                "--cache",
            ])
            .arg(self.folder.join("cache"))
            .current_dir(&self.folder);
        self.run(&mut install, stop)
    }

    fn go(&self, stop: &Stop) -> anyhow::Result<()> {
        let mut build = Command::new("go");
        build
            .args(["build", "-o"])
            .arg(self.folder.join("worker"))
            .current_dir(&self.sources)
            // Without -modcacherw, the folder could not be deleted.
            .env("GOFLAGS", "-mod=readonly -modcacherw -buildvcs=false")
            .env("GOTOOLCHAIN", "local")
            .env("GOMODCACHE", self.folder.join("modules"))
            .env("GOCACHE", self.folder.join("cache"));
        self.run(&mut build, stop)
    }

    /// Compiles the worker with the newest version, and lists the libraries of both versions.
    fn java(&self, stop: &Stop) -> anyhow::Result<()> {
        let maven = |goals: &[&str], list: &str| {
            let mut maven = Command::new("mvn");
            maven
                .args(["--quiet", "--batch-mode", "--file"])
                .arg(self.sources.join("pom.xml"))
                .arg(format!("-Dfolder={}", self.folder.display()))
                .arg(format!(
                    "-Dmaven.repo.local={}",
                    self.folder.join("repository").display()
                ))
                .arg(format!(
                    "-Dmdep.outputFile={}",
                    self.folder.join(list).display()
                ))
                .args(goals);
            maven
        };
        let list = "dependency:build-classpath";
        self.run(&mut maven(&["compile", list], "newest"), stop)?;
        let mut old = maven(&[list], OLD_REDISSON);
        old.arg(format!("-Dredisson={OLD_REDISSON}"))
            .arg(format!("-Dslf4j={OLD_SLF4J}"));
        self.run(&mut old, stop)
    }

    /// Runs one step. Shows its output only if it fails.
    fn run(&self, command: &mut Command, stop: &Stop) -> anyhow::Result<()> {
        let program = Path::new(command.get_program()).display().to_string();
        let log = self.folder.with_extension("log");
        let output = File::create(&log)?;
        command.stdout(output.try_clone()?).stderr(output);
        let status = run_within(LIMIT, command, stop)?;
        let Some(status) = status else {
            bail!(
                "{program} was stopped after {LIMIT:?}: {}",
                last_lines(&log)
            );
        };
        ensure!(status.success(), "{program} failed: {}", last_lines(&log));
        Ok(())
    }
}

impl Runtime {
    /// The programs that are needed, with their versions.
    fn version(self) -> anyhow::Result<String> {
        let (programs, packages): (&[(&str, &str)], _) = match self {
            Self::Python => (&[("python3", "--version")], "python3 and python3-venv"),
            Self::Node => (
                &[("node", "--version"), ("npm", "--version")],
                "nodejs and npm",
            ),
            Self::Go => (&[("go", "version")], "golang-go (1.26 or newer)"),
            Self::Java => (
                &[
                    ("java", "-version"),
                    ("javac", "-version"),
                    ("mvn", "-version"),
                ],
                "default-jdk-headless (17 or newer) and maven",
            ),
        };
        let mut versions = Vec::new();
        for (program, option) in programs {
            let output = Command::new(program)
                .arg(option)
                .stdin(Stdio::null())
                .output();
            match output {
                Ok(output) if output.status.success() => {
                    let text = [output.stdout, output.stderr].concat();
                    versions.push(String::from_utf8_lossy(&text).into_owned());
                }
                _ => bail!("`{program}` is missing: install it (on Debian: {packages})"),
            }
        }
        Ok(versions.concat())
    }
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last = lines[lines.len().saturating_sub(SHOWN)..].join("; ");
    format!("{last} (all of it is in {})", log.display())
}
