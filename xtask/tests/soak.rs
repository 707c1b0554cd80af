//! The soak itself: it passes, and it finds what is planted into its records.

use std::process::{Command, Output};

fn soak(arguments: &[&str]) -> Output {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_xtask"));
    soak.args(["soak", "--no-install", "--minutes", "0.05"]);
    let output = soak.args(arguments).output();
    output.expect("this program can be started")
}

#[track_caller]
fn assert_finds(plant: &str, what: &str) {
    assert_finds_among(&[], plant, what);
}

/// Where no other faults are drawn than those of `only`.
#[track_caller]
fn assert_finds_among(only: &[&str], plant: &str, what: &str) {
    let arguments = [&["--plant", plant, "--seed", "7"], only].concat();
    let output = soak(&arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains(what), "{said}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.contains("cargo xtask soak --seed 7 --round 1"),
        "{told}"
    );
    // What is kept to be looked at is of no use here.
    let (_, folder) = said
        .split_once("are in \"")
        .expect("it says where records are");
    let (folder, _) = folder.split_once('"').expect("it is in quotes");
    std::fs::remove_dir_all(folder).expect("nobody uses it any more");
}

#[test]
fn a_soak_that_finds_nothing_says_so_and_its_seed() {
    let output = soak(&["--seed", "11"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("seed 11") && said.contains("All of it holds."),
        "{said}"
    );
}

#[test]
fn races_alone_find_nothing() {
    let output = soak(&["--seed", "12", "--only", "raced"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("Raced 1") || said.contains("Raced 2"),
        "{said}"
    );
    assert!(said.contains("Killed"), "{said}");
}

#[test]
fn a_lost_update_in_a_race_is_found() {
    assert_finds_among(
        &["--only", "raced"],
        "update",
        "updates made under the lock were lost",
    );
}

#[test]
fn racers_that_wait_for_nobodys_lock_are_found() {
    assert_finds_among(&["--only", "raced"], "nobody", "still races after");
}

#[test]
fn two_holders_at_a_time_are_found_in_the_records_of_processes() {
    assert_finds("overlap", "two believed in one lock");
}

#[test]
fn a_token_that_falls_is_found_in_the_records_of_processes() {
    assert_finds("token", "a token fell for who asked later");
}

#[test]
fn a_call_that_hangs_is_found_in_the_records_of_processes() {
    assert_finds("hang", "a call never ended");
}
