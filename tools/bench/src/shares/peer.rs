//! Redisson's load process, a Java program that Maven builds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use leasehold_tools::cargo::{run_to_end, target_folder, workspace_root};
use leasehold_tools::stop::Stop;

/// The classes of the program and of the libraries that it needs.
pub struct Redisson {
    class_path: String,
}

impl Redisson {
    /// Builds the program. `None` if there is no Java or no Maven.
    pub fn build(stop: &Stop) -> anyhow::Result<Option<Self>> {
        if !is_installed("java", "-version") || !is_installed("mvn", "-version") {
            eprintln!("without Java and Maven, Redisson is left out");
            return Ok(None);
        }
        let project = workspace_root()?.join("crates/peers/redisson/pom.xml");
        let folder = target_folder()?.join("redisson");
        fs::create_dir_all(&folder)?;
        let list = folder.join("class-path");
        eprintln!("building Redisson's load process");
        let mut build = Command::new("mvn");
        build
            .args(["--quiet", "--batch-mode", "--file"])
            .arg(&project)
            .arg(format!("-Dfolder={}", folder.display()))
            .arg(format!("-Dmdep.outputFile={}", list.display()))
            .args(["compile", "dependency:build-classpath"])
            .stdout(Stdio::null());
        let status = run_to_end(&mut build, stop)?;
        ensure!(
            status.success(),
            "Redisson's load process cannot be built: {status}"
        );
        Ok(Some(Self {
            class_path: class_path(&folder, &list)?,
        }))
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new("java");
        command.args(["-Xmx1g", "-cp", &self.class_path, "Peer"]);
        command
    }
}

fn class_path(folder: &Path, list: &PathBuf) -> anyhow::Result<String> {
    let libraries = fs::read_to_string(list).context("Maven has listed no libraries")?;
    let own = folder.join("classes");
    Ok(format!("{}:{}", own.display(), libraries.trim()))
}

fn is_installed(program: &str, version: &str) -> bool {
    let mut command = Command::new(program);
    let silent = command
        .arg(version)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    silent.status().is_ok_and(|status| status.success())
}
