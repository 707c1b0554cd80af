//! `cargo xtask test --servers`, with fake servers and a fake cargo. Downloads nothing.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A target folder of its own, with the program in it.
struct Target(TempDir);

impl Target {
    fn new() -> Self {
        let target = Self(TempDir::new().unwrap());
        let built = Path::new(env!("CARGO_BIN_EXE_xtask"));
        fs::create_dir(target.path("debug")).unwrap();
        fs::hard_link(built, target.path("debug/xtask"))
            .or_else(|_| fs::copy(built, target.path("debug/xtask")).map(drop))
            .unwrap();
        target
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // A process of its own writes the file. A child that another test starts meanwhile would inherit a file that
        // this process has open, and a file that is open for writing cannot be executed.
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
        let mut shell = Command::new("/bin/sh");
        let written = shell.args(["-c", write, "sh", script]).arg(&path).status();
        assert!(written.unwrap().success());
    }

    fn server(&self, name: &str, says: &str) {
        let script = format!("echo '{says}'");
        self.program(&format!("servers/{name}/redis-server"), &script);
    }

    /// The command `test` with an empty PATH, so that it finds no other program.
    fn command(&self) -> Command {
        let mut command = Command::new(self.path("debug/xtask"));
        command.arg("test");
        command.env("CARGO", self.path("cargo")).env("PATH", "");
        // The tests themselves may run on a chosen server.
        command.env_remove("LEASEHOLD_REDIS_SERVER");
        command
    }

    fn test(&self, servers: &str) -> Output {
        let mut command = self.command();
        command.args(["--servers", servers]).output().unwrap()
    }

    /// A cargo that logs the server and its arguments, and then runs `script`.
    fn logging_cargo(&self, script: &str) {
        let log = self.path("log").display().to_string();
        let log = format!("echo \"$LEASEHOLD_REDIS_SERVER $*\" >>'{log}'\n{script}");
        self.program("cargo", &log);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

#[test]
fn later_servers_are_tested_after_a_failure() {
    let target = Target::new();
    target.server("redis-6.2", "Redis server v=6.2.14 sha=40305114:0");
    target.server("redis-8.0", "Redis server v=8.0.2 sha=00000000:0");
    target.server("valkey-8.1", "Valkey server v=8.1.1 sha=00000000:0");
    target.logging_cargo("case \"$LEASEHOLD_REDIS_SERVER $*\" in *redis-8.0*--lib*) exit 1;; esac");
    let output = target.test("redis-6.2,redis-8.0,valkey-8.1");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("`redis-8.0, unit tests` failed"), "{error}");
    for passed in ["6.2", "valkey", "integration"] {
        assert!(!error.contains(passed), "{error}");
    }
    let log = target.log();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 7, "{log}");
    assert!(lines[0].starts_with(" build ") && lines[0].ends_with(" --examples"));
    for (pair, name) in lines[1..]
        .chunks(2)
        .zip(["redis-6.2", "redis-8.0", "valkey-8.1"])
    {
        let program = target.path(&format!("servers/{name}/redis-server"));
        let program = program.display();
        assert_eq!(
            pair[0],
            format!("{program} test --locked --lib pipeline::tests")
        );
        let called = format!("{program} test --locked --test it -- ");
        assert!(pair[1].starts_with(&called), "{}", pair[1]);
    }
}

#[test]
fn an_unavailable_server_is_an_error_with_advice() {
    let target = Target::new();
    target.program(
        "cargo",
        &format!("echo called >>'{}'", target.path("log").display()),
    );
    // This server has another version, so the wanted one has to be downloaded. But no program for downloads is on PATH.
    target.server("redis-6.2", "Redis server v=7.0.15 sha=00000000:0");
    for (server, needs) in [("redis-6.2", "python3 with pip"), ("valkey-8.1", "apt-get")] {
        let output = target.test(server);
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        for part in [server, needs, "LEASEHOLD_REDIS_SERVER"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(!target.path(&format!("servers/{server}")).exists());
    }
    assert_eq!(target.log(), "", "nothing was tested");
    let output = target.test("redis-5.0");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.contains(
            "all, redis-6.2, redis-7.0, redis-8.0, redis-8.6, valkey-8.0, valkey-8.1, valkey-9"
        ),
        "{error}"
    );
}

#[test]
fn available_servers_are_tested_beside_unavailable_ones() {
    let target = Target::new();
    target.logging_cargo("");
    target.server("valkey-9", "Valkey server v=9.1.2 sha=00000000:0");
    let output = target.test("all");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    for name in [
        "redis-6.2",
        "redis-7.0",
        "redis-8.0",
        "valkey-8.0",
        "valkey-8.1",
    ] {
        assert!(
            error.contains(&format!("cannot download {name}:")),
            "{error}"
        );
    }
    let log = target.log();
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 3, "{log}");
    for line in &lines[1..] {
        assert!(
            line.contains("servers/valkey-9/redis-server test "),
            "{log}"
        );
    }
}

#[test]
fn each_server_of_the_machine_runs_the_conformance_suite_once() {
    let target = Target::new();
    target.logging_cargo("");
    target.server("redis-6.2", "Redis server v=6.2.14 sha=40305114:0");
    target.server("redis-7.0", "Redis server v=7.0.15 sha=00000000:0");
    // This version is not the one of the folder's name.
    target.server("redis-8.0", "Redis server v=7.2.0 sha=00000000:0");
    for (path, says) in [
        ("main", "Redis server v=7.0.15 sha=00000000:0"),
        ("path/redis-server", "Redis server v=7.0.15 sha=00000000:0"),
        ("path/valkey-server", "Valkey server v=8.1.1 sha=00000000:0"),
    ] {
        target.program(path, &format!("echo '{says}'"));
    }
    let mut command = target.command();
    command.arg("--no-install").env("PATH", target.path("path"));
    let output = command
        .env("LEASEHOLD_REDIS_SERVER", target.path("main"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let log = target.log();
    let suite = " test --locked --test it conformance::redis -- ";
    let runs: Vec<&str> = log.lines().filter(|line| line.contains(suite)).collect();
    let programs = ["servers/redis-6.2/redis-server", "path/valkey-server"];
    assert_eq!(runs.len(), programs.len(), "{log}");
    for (run, program) in runs.iter().zip(programs) {
        let program = target.path(program).display().to_string();
        assert!(run.starts_with(&program), "{run}");
    }
    let later = log.lines().find(|line| line.contains(" --doc")).unwrap();
    assert!(later.starts_with(&target.path("main").display().to_string()));
}
