//! `cargo xtask interop` as a user runs it, in its short form. Installs the libraries into the target folder.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::process::Command;

use leasehold_testbed::find_server;
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold-interop");

/// The libraries of Python and Node.
const LIBRARIES: [&str; 4] = ["redis-py", "python-redis-lock", "redlock-4", "redlock-5"];

#[test]
fn locks_of_python_and_node_exclude_ours() {
    let ran = Command::new(PROGRAM)
        .args(["--short", "--json"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}\n{ran:?}");
    let results: Value = serde_json::from_str(&said).expect("one JSON object");
    let list = |field: &str| results[field].as_array().expect("a list").clone();

    let mut seen = BTreeSet::new();
    for left_out in list("left_out") {
        // Not `println!`, whose output a test that passes does not show.
        let line = format!(
            "interop: {} is left out: {}\n",
            left_out["runtime"], left_out["reason"]
        );
        io::stderr().write_all(line.as_bytes()).expect("it is open");
        let names = left_out["libraries"].as_array().expect("a list");
        seen.extend(
            names
                .iter()
                .map(|name| name.as_str().expect("a name").to_owned()),
        );
    }
    for outcome in list("outcomes") {
        let name = outcome["library"].as_str().expect("a name");
        seen.insert(name.to_owned());
        assert_eq!(outcome["overlaps"], 0, "{name}");
        assert_eq!(outcome["grants"], 100, "{name}");
        let caught = &outcome["control"];
        assert_ne!(
            caught["overlaps"], 0,
            "{name}: a worker without the lock is caught"
        );
        let passed = outcome["passed"].as_array().expect("a list");
        assert!(passed.len() >= 9, "{name}: {passed:?}");
    }
    assert_eq!(seen, LIBRARIES.map(str::to_owned).into());
}

#[test]
fn a_missing_runtime_is_named_with_its_package() {
    let folder = TempDir::new().expect("there is room");
    let ran = Command::new(PROGRAM)
        .args(["--only", "redlock-4"])
        // No program is there.
        .env("PATH", folder.path())
        .env(
            "LEASEHOLD_REDIS_SERVER",
            find_server().expect("Redis is installed"),
        )
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success(), "{said}");
    assert!(
        said.contains("left out: Node (redlock-4): `node` is missing"),
        "{said}"
    );
    assert!(said.contains("nodejs and npm"), "{said}");
}
