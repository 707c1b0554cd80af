//! Runs cargo and other programs to their end, and finds what cargo has built. Does not read the output of programs.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use crossbeam_channel::{Receiver, bounded};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::stop::Stop;

/// How long cargo and its child processes may take to end on SIGINT.
const GRACE: Duration = Duration::from_secs(3);

/// The folder of the checkout that cargo runs this program in.
pub fn workspace_root() -> anyhow::Result<PathBuf> {
    let own = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let mut above = own.ancestors();
    let root = above.find(|folder| folder.join("Cargo.lock").is_file());
    let root = root.map(Path::to_owned);
    root.context("run this as `cargo xtask` in a checkout of leasehold")
}

/// The cargo that has started this program, in the workspace.
pub fn cargo() -> anyhow::Result<Command> {
    let mut command = Command::new(own_cargo());
    command.current_dir(workspace_root()?);
    Ok(command)
}

fn own_cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"))
}

/// The target folder of this program, wherever that is.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let own = env::current_exe().context("cannot find this program's own file")?;
    let target = own.ancestors().nth(2).map(Path::to_owned);
    target.context("this program is in no target folder")
}

/// The program of a package, built with optimization. Builds it if it is missing or out of date.
pub fn optimized(package: &str, features: &[&str], stop: &Stop) -> anyhow::Result<PathBuf> {
    let mut build = cargo()?;
    build
        .args(["build", "--quiet", "--release", "--locked"])
        .args(["--package", package])
        .args(features)
        // Standard output is for results.
        .stdout(Stdio::null());
    eprintln!("building {package} with optimization (this takes some minutes the first time)");
    let status = run_to_end(&mut build, stop)?;
    ensure!(status.success(), "{package} cannot be built: {status}");
    // The folders of both profiles have the same parent.
    let program = target_folder()?.join("release").join(package);
    ensure!(program.exists(), "cargo has not made {}", program.display());
    Ok(program)
}

/// The program `leasehold`. Builds it if it is missing or out of date.
pub fn command_line(stop: &Stop) -> anyhow::Result<PathBuf> {
    let mut build = cargo()?;
    build
        .args(["build", "--quiet", "--locked"])
        .args(["--package", "leasehold-cli"]);
    eprintln!("building leasehold-cli (this takes a minute the first time)");
    let status = run_to_end(&mut build, stop)?;
    ensure!(status.success(), "leasehold-cli cannot be built: {status}");
    Ok(target_folder()?.join("debug").join("leasehold"))
}

/// Replaces this process by the program of a package, which cargo builds first. Returns only if that fails.
pub fn become_program(package: &str, arguments: &[OsString]) -> anyhow::Error {
    let run = || {
        let manifest = workspace_root()?.join("Cargo.toml");
        let mut run = Command::new(own_cargo());
        run.args(["run", "--quiet", "--locked", "--package", package])
            .arg("--manifest-path")
            .arg(manifest)
            .arg("--")
            .args(arguments);
        anyhow::Ok(run.exec())
    };
    match run() {
        Ok(error) => anyhow::Error::new(error).context("cannot start cargo"),
        Err(error) => error,
    }
}

/// Runs `command` to its end. Its output goes to this program's output. The command gets a process group of its own, so
/// that its child processes can be stopped with it.
pub fn run_to_end(command: &mut Command, stop: &Stop) -> anyhow::Result<ExitStatus> {
    let ended = run_within(Duration::MAX, command, stop)?;
    ended.context("the time limit has passed")
}

/// The same as [`run_to_end`], but stops `command` at `limit`, and then returns `None`.
pub fn run_within(
    limit: Duration,
    command: &mut Command,
    stop: &Stop,
) -> anyhow::Result<Option<ExitStatus>> {
    stop.check()?;
    let child = command
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let group = Pid::from_child(&child);
    let ended = wait_beside(child);
    let outcome = stop.receive(&ended, limit);
    if let Ok(Some(status)) = outcome {
        return Ok(Some(status.context("cannot wait for it")?));
    }
    // An error means that the process has just ended.
    let _ = kill_process_group(group, Signal::INT);
    if ended.recv_timeout(GRACE).is_err() {
        let _ = kill_process_group(group, Signal::KILL);
    }
    outcome?;
    Ok(None)
}

fn wait_beside(mut child: Child) -> Receiver<std::io::Result<ExitStatus>> {
    let (sender, ended) = bounded(1);
    thread::spawn(move || sender.send(child.wait()));
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_stopped_at_its_limit() -> anyhow::Result<()> {
        // A process can have one handler, so only this test installs it.
        let stop = Stop::install()?;
        let shell = |script: &str, limit| {
            let mut command = Command::new("sh");
            run_within(limit, command.args(["-c", script]), &stop)
        };
        let ended =
            shell("exit 3", Duration::from_secs(60))?.context("the command ends by itself")?;
        assert_eq!(ended.code(), Some(3));
        let start = std::time::Instant::now();
        assert_eq!(shell("sleep 60", Duration::from_millis(50))?, None);
        assert!(start.elapsed() < Duration::from_secs(30));
        Ok(())
    }
}
