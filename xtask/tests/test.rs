//! `cargo xtask` with a fake cargo: which checks `test` runs and skips, and how it calls the tools.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use leasehold_testbed::find_server;
use tempfile::TempDir;

/// Runs all checks: see [`run_command`].
fn run_with(script: &str, home: &Path) -> (Output, String) {
    run_command(&["test", "--no-install"], script, home)
}

/// Runs a command with a cargo that logs its arguments, runs `script`, and succeeds. Returns the calls, one per line.
fn run_command(arguments: &[&str], script: &str, home: &Path) -> (Output, String) {
    let folder = TempDir::new().expect("there is room");
    let [program, log] = ["cargo", "log"].map(|name| folder.path().join(name));
    let text = format!("echo \"$*\" >>'{}'\n{script}", log.display());
    fs::write(&program, text).expect("there is room");
    // A program that was just written may not be executable yet, because the child of another test may have
    // it open.
    let cargo = folder.path().join("cargo.sh");
    let line = format!("#!/bin/sh\nexec /bin/sh '{}' \"$@\"\n", program.display());
    let written = Command::new("/bin/sh")
        .args([
            "-c",
            "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"",
            "sh",
            &line,
        ])
        .arg(&cargo)
        .status();
    assert!(written.expect("there is a shell").success());
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(arguments)
        .env("CARGO", &cargo)
        .env("CARGO_HOME", home)
        .env(
            "LEASEHOLD_REDIS_SERVER",
            find_server().expect("Redis is installed"),
        )
        .output()
        .expect("it runs");
    let asked = fs::read_to_string(&log).expect("cargo was called");
    (output, asked)
}

fn checks_of(asked: &str) -> Vec<&str> {
    let checks = asked.lines().filter_map(|line| line.split_once(" check "));
    checks.map(|(_, checks)| checks).collect()
}

#[test]
fn a_step_that_hangs_fails() {
    let home = TempDir::new().expect("there is room");
    let arguments = ["test", "--no-install", "--step-limit", "1"];
    let script = "case \"$1 $2\" in 'clippy --locked') exec sleep 1000;; esac";
    let (output, asked) = run_command(&arguments, script, home.path());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("`clippy` did not end within"), "{said}");
    assert!(!asked.contains("test --locked"), "{asked}");
}

#[test]
fn without_cargo_deny_the_other_checks_run() {
    let home = TempDir::new().expect("there is room");
    let (output, asked) = run_with("case \"$1\" in deny) exit 1;; esac", home.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("dependencies: skipped, cargo-deny is not installed"),
        "{said}"
    );
    assert_eq!(checks_of(&asked), [""; 0]);
    assert!(asked.contains("--doc"), "{asked}");
}

#[test]
fn unreachable_advisories_are_skipped() {
    let home = TempDir::new().expect("there is room");
    let script = "case \"$1 $2\" in 'deny fetch') exit 1;; esac";
    let (output, asked) = run_with(script, home.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("advisories: skipped"), "{said}");
    assert_eq!(checks_of(&asked), ["licenses bans sources"]);

    // An old copy is better than none.
    let copy = home
        .path()
        .join("advisory-dbs/advisory-db-3157b0e258782691/crates");
    fs::create_dir_all(copy).expect("there is room");
    let (output, asked) = run_with(script, home.path());
    assert!(output.status.success());
    assert_eq!(checks_of(&asked), ["licenses bans sources", "advisories"]);
}

#[test]
fn refused_dependencies_and_advisories_fail_the_test() {
    let home = TempDir::new().expect("there is room");
    for (refused, checks) in [("sources", 1), ("advisories", 2)] {
        let script = format!("case \"$*\" in *{refused}) exit 1;; esac");
        let (output, asked) = run_with(&script, home.path());
        assert!(!output.status.success());
        assert_eq!(checks_of(&asked).len(), checks, "{asked}");
        assert!(!asked.contains("--doc"), "{asked}");
    }
}

#[test]
fn a_tool_gets_its_arguments_and_gives_its_exit_code() {
    let home = TempDir::new().expect("there is room");
    for tool in ["bench", "demo", "interop", "market", "soak"] {
        let arguments = [tool, "--help", "case", "--minutes", "-1"];
        let (output, asked) = run_command(&arguments, "exit 7", home.path());
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let package = format!("run --quiet --locked --package leasehold-{tool} ");
        assert!(asked.starts_with(&package), "{asked}");
        assert!(asked.ends_with("-- --help case --minutes -1\n"), "{asked}");
    }
}
