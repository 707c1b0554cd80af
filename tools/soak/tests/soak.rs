//! The soak itself: it passes, and it finds the violations that are injected into its records.
//!
//! A soak without `--seed` draws another seed each time. A failed test shows the seed in the output of the soak.

use std::process::{Command, Output};
use std::sync::{Condvar, Mutex};

/// How many soaks run at a time. Each has servers, processes and dozens of threads of its own, and needs CPU time to
/// reach what its test looks for.
const AT_A_TIME: usize = 4;

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// Runs a soak to its end, after some others if [`AT_A_TIME`] run already.
fn run(soak: &mut Command) -> Output {
    const HEALTHY: &str = "no test panics while it counts";
    let running = RUNNING.lock().expect(HEALTHY);
    let is_full = |running: &mut usize| *running >= AT_A_TIME;
    let mut running = ENDED.wait_while(running, is_full).expect(HEALTHY);
    *running += 1;
    drop(running);
    let output = soak.output();
    *RUNNING.lock().expect(HEALTHY) -= 1;
    ENDED.notify_one();
    output.expect("this program can be started")
}

fn soak(arguments: &[&str]) -> Output {
    soak_for("0.05", arguments)
}

fn soak_for(minutes: &str, arguments: &[&str]) -> Output {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_leasehold-soak"));
    soak.args(["--no-install", "--minutes", minutes]);
    run(soak.args(arguments))
}

#[track_caller]
fn assert_finds(defect: &str, what: &str) {
    assert_finds_among(&[], defect, what);
}

/// As [`assert_finds`], with only these faults.
#[track_caller]
fn assert_finds_among(only: &[&str], defect: &str, what: &str) {
    assert_finds_all("0.05", only, defect, &[what]);
}

/// As [`assert_finds_among`], in a soak of this length.
#[track_caller]
fn assert_finds_all(minutes: &str, only: &[&str], defect: &str, all: &[&str]) {
    let arguments = [&["--inject", defect, "--seed", "7"], only].concat();
    let output = soak_for(minutes, &arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    let says = |what: &&str| said.contains(*what);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && all.iter().all(says),
        "{said}{errors}"
    );
    assert!(
        errors.contains("cargo xtask soak --seed 7 --round 1"),
        "{errors}"
    );
    // The soak keeps the records of violations. This test does not need them.
    let (_, folder) = said
        .split_once("are in \"")
        .expect("the message says where the records are");
    let (folder, _) = folder.split_once('"').expect("it is in quotes");
    std::fs::remove_dir_all(folder).expect("the folder is no longer used");
}

#[test]
fn a_clean_soak_prints_its_seed() {
    for (minutes, arguments, seed) in [
        ("0.2", &[][..], "seed "),
        ("0.05", &["--seed", "11"], "seed 11"),
    ] {
        let output = soak_for(minutes, arguments);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(
            said.contains(seed) && said.contains("All of it holds."),
            "{said}"
        );
    }
}

#[test]
fn a_clean_soak_of_a_cluster_names_its_fail_overs() {
    let output = soak(&["--topology", "cluster", "--only", "failed-over"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.contains("faults: FailedOver") && said.contains("All of it holds."),
        "{said}"
    );
}

/// The soak draws its faults.
#[test]
fn a_clean_soak_of_a_cluster_holds_under_all_faults() {
    let output = soak_for("0.2", &["--topology", "cluster"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("All of it holds."), "{said}");
}

#[test]
fn a_clean_soak_of_a_quorum_counts_its_grants() {
    let mut soak = Command::new(env!("CARGO_BIN_EXE_leasehold-soak"));
    let soak = soak.args(["--no-install", "--quorum", "--rounds", "4"]);
    let output = run(soak);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(
        said.contains("fewest grants") && said.contains("All of it holds."),
        "{said}"
    );
}

#[test]
fn orphaned_locks_in_a_cluster_are_found() {
    // One of these locks has a token in its value, and the other has none. They have stayed too long after 6 s.
    assert_finds_all(
        "0.15",
        &["--topology", "cluster", "--only", "slot-moved"],
        "nobody",
        &[
            "has a ttl of",
            "leasehold:contended-63 stays for",
            "leasehold:race-64 stays for",
        ],
    );
}

#[test]
fn a_clean_soak_under_sentinels_names_its_fail_overs() {
    let output = soak_for("0.2", &["--topology", "sentinel"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(
        ["FailedOver", "MasterKilled"]
            .iter()
            .any(|kind| said.contains(kind))
            && said.contains("All of it holds."),
        "{said}"
    );
}

#[test]
fn orphaned_locks_under_sentinels_are_found() {
    // They have stayed too long after 6 s.
    assert_finds_all(
        "0.15",
        &["--topology", "sentinel"],
        "nobody",
        &[
            "leasehold:contended-63 stays for",
            "leasehold:race-64 stays for",
        ],
    );
}

#[test]
fn two_holders_in_a_cluster_are_found() {
    assert_finds_among(
        &["--topology", "cluster", "--only", "connections-killed"],
        "overlap",
        "two holders at the same time",
    );
}

#[test]
fn faults_of_another_topology_are_refused() {
    let output = soak(&["--topology", "cluster", "--only", "switched-over"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && told.contains("has no fault"),
        "{told}"
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
fn an_orphaned_lock_in_a_race_is_found() {
    assert_finds_among(&["--only", "raced"], "nobody", "still races after");
}

#[test]
fn two_holders_are_found_in_process_records() {
    assert_finds("overlap", "two holders at the same time");
}

#[test]
fn a_permit_too_many_is_found_in_process_records() {
    assert_finds("permit", "holders at the same time");
}

#[test]
fn a_falling_token_is_found_in_process_records() {
    assert_finds("token", "a later request got a smaller token");
}

#[test]
fn an_accepted_stale_write_is_found_in_process_records() {
    assert_finds("write", "a stale write was accepted");
}

#[test]
fn a_hanging_call_is_found_in_process_records() {
    assert_finds("hang", "a call never ended");
}

#[test]
fn two_holders_of_a_key_of_a_set_are_found() {
    assert_finds("set", "two holders at the same time");
}

#[test]
fn an_amount_that_gets_lost_between_accounts_is_found() {
    assert_finds("sum", "the sum of the accounts has changed");
}

#[test]
fn an_overwritten_transfer_is_found() {
    assert_finds("transfer", "two transfers read the same balances");
}

#[test]
fn a_second_run_of_work_is_found() {
    assert_finds("run", "work ran more than once");
}

#[test]
fn an_older_record_of_a_run_is_found() {
    assert_finds("record", "an older record of a run came back");
}

#[test]
fn a_second_leader_is_found() {
    assert_finds("leader", "two holders at the same time");
}

#[test]
fn an_observer_that_goes_back_is_found() {
    assert_finds("observer", "the token of a leader fell for an observer");
}
