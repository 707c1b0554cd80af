//! The settings that tell the program where Redis is, and the secrecy of passwords.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use leasehold_testbed::Server;

use crate::support::{Running, program, result, run};

#[test]
fn the_address_comes_from_arguments_a_file_or_the_environment() {
    let server = Server::builder()
        .password("s3cret")
        .start()
        .expect("a server can be started");
    let with_password = server.url();
    let folder = tempfile::tempdir().expect("the system has a folder for temporary files");
    let file = folder.path().join("settings");
    fs::write(
        &file,
        format!("LEASEHOLD_URL={with_password}\nLEASEHOLD_PREFIX=file:\n"),
    )
    .expect("it can be written");
    let config = ["--config", file.to_str().expect("it is UTF-8")];

    let (code, _, errors) = result(program().args(["run", "--url", &with_password, "k", "true"]));
    assert_eq!(code, 64);
    assert!(
        errors.contains("LEASEHOLD_URL") && errors.contains("--config"),
        "{errors}"
    );
    assert!(!errors.contains("s3cret"), "{errors}");

    assert_eq!(result(run(&with_password).args(["k", "true"])).0, 0);
    assert_eq!(
        result(program().arg("run").args(config).args(["k", "true"])).0,
        0
    );
    let (code, _, errors) = result(program().args(["run", "k", "true"]));
    assert_eq!(code, 64);
    assert!(errors.contains("LEASEHOLD_URL"), "{errors}");
    // The file has the prefix and the address, and replaces the environment.
    let mut held = Running::start(run("redis://127.0.0.1:1").args(config).args([
        "k",
        "sh",
        "-c",
        "echo in; exec sleep 1000",
    ]));
    assert_eq!(held.line(), "in");
    assert_eq!(result(run(&with_password).args(["-n", "k", "true"])).0, 0);
    assert_eq!(
        result(run(&with_password).args(["-n", "--prefix", "file:", "k", "true"])).0,
        1
    );
}

/// If the program ignored it, the locks would have other keys.
#[test]
fn a_setting_that_is_not_utf_8_is_refused() {
    let mut command = run("redis://127.0.0.1:1");
    let prefix = OsStr::from_bytes(b"app\xff:");
    let (code, _, errors) = result(command.env("LEASEHOLD_PREFIX", prefix).args(["k", "true"]));
    assert_eq!(code, 64);
    assert!(errors.contains("LEASEHOLD_PREFIX"), "{errors}");
}

#[test]
fn an_outage_is_no_conflict() {
    let mut command = run("redis://127.0.0.1:1");
    let (code, _, errors) = result(
        command
            .env("LEASEHOLD_OUTAGE_TIMEOUT", "0")
            .args(["-n", "k", "true"]),
    );
    assert_eq!(code, 69, "{errors}");
    let server = Server::builder()
        .password("s3cret")
        .start()
        .expect("a server can be started");
    let without = format!("redis://127.0.0.1:{}", server.port());
    let (code, _, errors) = result(run(&without).args(["k", "true"]));
    assert_eq!(code, 77, "{errors}");
    let foreign = ["SET", "leasehold:k", "a value of another program"];
    server.command(&foreign).expect("the server runs");
    let (code, _, errors) = result(run(&server.url()).args(["-n", "k", "true"]));
    assert_eq!(code, 76, "{errors}");
}

#[test]
fn a_lock_of_another_library_is_a_conflict() {
    let server = Server::start().expect("a server can be started");
    let set = |key: &str| {
        server
            .command(&["SET", key, "theirs"])
            .expect("it can be set")
    };
    let url = server.url();
    let run_beside =
        |arguments: &[&str]| result(run(&url).args(arguments).args(["-n", "k", "true"]));
    let plain = ["--compatible-with", "plain-keys", "--prefix", ""];
    assert_eq!(run_beside(&plain).0, 0);
    let java = ["--compatible-with", "redisson-fenced", "--prefix", ""];
    assert_eq!(run_beside(&java).0, 0);
    set("k");
    let (code, _, errors) = run_beside(&plain);
    assert_eq!(code, 1, "{errors}");
    let inspect = ["--url", &url, "--json", "inspect", "k"];
    let (_, shown, errors) = result(program().args(inspect).args(plain));
    assert!(
        shown.contains(r#""kind":"other_library""#),
        "{shown}{errors}"
    );
    let python = ["--compatible-with", "python-redis-lock"];
    assert_eq!(run_beside(&python).0, 0);
    // A variable may set the empty prefix, too.
    let mut beside = run(&url);
    beside
        .envs([
            ("LEASEHOLD_PREFIX", ""),
            ("LEASEHOLD_COMPATIBLE_WITH", "plain-keys"),
        ])
        .args(["-n", "k", "true"]);
    assert_eq!(result(&mut beside).0, 1);
    // Without a library, both empty values count as unset.
    beside.env("LEASEHOLD_COMPATIBLE_WITH", "");
    assert_eq!(result(&mut beside).0, 0);
    set("lock:k");
    assert_eq!(run_beside(&python).0, 1);
    for (library, part) in [("plain-keys", "prefix"), ("redis", "python-redis-lock")] {
        let (code, _, errors) = run_beside(&["--compatible-with", library]);
        assert_ne!(code, 0);
        assert!(errors.contains(part), "{errors}");
    }
}

#[test]
fn several_addresses_are_a_quorum() {
    let servers = [(); 3].map(|()| Server::start().expect("a server can be started"));
    let mut command = program();
    command
        .arg("run")
        .env("LEASEHOLD_MAX_TTL", "2s")
        .args(["--ttl", "2s"]);
    for server in &servers {
        command.args(["--url", &server.url()]);
    }
    // The nodes are new, so they do not vote before one `max_ttl` has passed.
    let (code, out, errors) = result(command.args(["-w", "60", "k", "echo", "in"]));
    assert_eq!((code, &*out), (0, "in\n"), "{errors}");
}
