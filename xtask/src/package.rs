//! `cargo xtask package`: builds and tests the package that `cargo package` would publish, with the lowest
//! and with the highest redis that its users may have, and with the oldest Rust. Publishes nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::cargo::{cargo, run_to_end, target_folder, workspace_root};
use leasehold_tools::stop::Stop;

pub fn run(stop: &Stop) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let package = unpacked(folder.path(), stop)?;
    let package = Package {
        folder: &package,
        stop,
    };

    let lowest = lowest_redis(&fs::read_to_string(workspace_root()?.join("Cargo.toml"))?)?;
    println!("--> redis {lowest}, the lowest");
    package.cargo(&["update", "--package", "redis", "--precise", &lowest])?;
    package.test()?;
    package.cargo(&["update", "--package", "redis"])?;
    let highest = locked_redis(&package.folder.join("Cargo.lock"))?;
    if highest == locked_redis(&workspace_root()?.join("Cargo.lock"))? {
        println!("--> redis {highest}, the highest: the other tests run with it");
    } else {
        println!("--> redis {highest}, the highest");
        package.test()?;
    }
    package.check_with_oldest_rust()
}

/// Makes the package, including uncommitted changes, and unpacks it below `folder`; returns its own folder.
fn unpacked(folder: &Path, stop: &Stop) -> anyhow::Result<PathBuf> {
    let mut package = cargo()?;
    package
        .args(["package", "--quiet", "--locked", "--no-verify"])
        .args(["--allow-dirty", "--package", "leasehold"])
        .arg("--target-dir")
        .arg(folder);
    succeed(&mut package, stop)?;
    let archive = entry(&folder.join("package"), ".crate")?;
    let unpacked = folder.join("unpacked");
    fs::create_dir(&unpacked)?;
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(archive).arg("-C").arg(&unpacked);
    succeed(&mut tar, stop)?;
    entry(&unpacked, "")
}

/// The path in `folder` that ends with `end`.
fn entry(folder: &Path, end: &str) -> anyhow::Result<PathBuf> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(end) {
            return Ok(path);
        }
    }
    bail!("nothing in {} ends with {end:?}", folder.display())
}

/// The package in its own folder, outside of the workspace.
struct Package<'a> {
    folder: &'a Path,
    stop: &'a Stop,
}

impl Package<'_> {
    fn test(&self) -> anyhow::Result<()> {
        self.cargo(&["check", "--quiet", "--lib"])?;
        self.cargo(&[
            "test",
            "--quiet",
            "--lib",
            "--features",
            "tls",
            "--",
            "--test-threads=4",
        ])
    }

    fn cargo(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let mut cargo = cargo()?;
        cargo.current_dir(self.folder).args(arguments);
        // Dependencies that the workspace uses, too, are built already.
        cargo.env("CARGO_TARGET_DIR", target_folder()?);
        succeed(&mut cargo, self.stop)
    }

    /// Checks the package with the Rust that Cargo.toml names in `rust-version`, if rustup has it.
    fn check_with_oldest_rust(&self) -> anyhow::Result<()> {
        const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");
        let used = Command::new("rustc").arg("--version").output()?;
        if String::from_utf8_lossy(&used.stdout).starts_with(&format!("rustc {OLDEST}.")) {
            println!("--> Rust {OLDEST}, the oldest: the tests above ran with it");
            return Ok(());
        }
        let rustup = |arguments: &[&str]| {
            let mut rustup = Command::new("rustup");
            rustup.args(["run", OLDEST, "cargo"]).args(arguments);
            rustup.current_dir(self.folder);
            rustup
        };
        let mut asked = rustup(&["--version"]);
        asked.stdout(Stdio::null()).stderr(Stdio::null());
        if !asked.status().is_ok_and(|status| status.success()) {
            println!("--> Rust {OLDEST}: skipped, it is not installed");
            return Ok(());
        }
        println!("--> Rust {OLDEST}, the oldest");
        let mut check = rustup(&[
            "check",
            "--quiet",
            "--lib",
            "--features",
            "tracing,metrics,tls",
        ]);
        check.env("CARGO_TARGET_DIR", target_folder()?.join("oldest-rust"));
        succeed(&mut check, self.stop)
    }
}

fn succeed(command: &mut Command, stop: &Stop) -> anyhow::Result<()> {
    let status = run_to_end(command, stop)?;
    ensure!(status.success(), "failed ({status}): {command:?}");
    Ok(())
}

/// The version of redis in a `Cargo.lock`.
fn locked_redis(lock: &Path) -> anyhow::Result<String> {
    let text = fs::read_to_string(lock)?;
    let (_, package) = text
        .split_once("\nname = \"redis\"\nversion = \"")
        .with_context(|| format!("no redis in {}", lock.display()))?;
    let version = package.split('"').next();
    Ok(version.unwrap_or_default().to_owned())
}

/// The version in the workspace's requirement of redis, which is the lowest that it accepts.
fn lowest_redis(manifest: &str) -> anyhow::Result<String> {
    let lines = manifest.lines();
    let mut requirements = lines.filter_map(|line| {
        line.strip_prefix("redis = { version = \"")?
            .split('"')
            .next()
    });
    let lowest = requirements
        .next()
        .context("Cargo.toml has no requirement of redis")?;
    let is_version = lowest.split('.').count() == 3 && lowest.starts_with(|c: char| c.is_numeric());
    ensure!(
        is_version,
        "redis = \"{lowest}\" is not a caret requirement of a whole version"
    );
    Ok(lowest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_redis_is_the_required_version() {
        let manifest = "a = \"1\"\nredis = { version = \"1.2.3\", features = [] }\n";
        assert_eq!(lowest_redis(manifest).expect("it is there"), "1.2.3");
        for exact in ["=1.8.1", "1", "*", "~1.2.3", ">=1.0.0, <2"] {
            let manifest = format!("redis = {{ version = \"{exact}\" }}");
            assert!(lowest_redis(&manifest).is_err(), "{exact}");
        }
    }
}
