//! The programs in examples/, run as a reader would run them. `cargo test` and `cargo build --examples` build them.
//! `cargo test --test it` does not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use leasehold_testbed::Reply;

use crate::support::{SOON, ask, held_keys, server, within};

/// Runs an example on the server at `url`; returns its output. The example must succeed soon.
#[track_caller]
fn run(example: &str, arguments: &[&str], url: &str) -> String {
    let mut command = Command::new(program(example));
    command.args(arguments).env("REDIS_URL", url);
    let output = within(3 * SOON, example, move || command.output().unwrap());
    let printed = String::from_utf8(output.stdout).unwrap();
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {printed}{failed}");
    printed
}

/// The examples are beside this program: target/<profile>/deps/it-.. and target/<profile>/examples/..
#[track_caller]
fn program(example: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.ancestors().nth(2).unwrap();
    let program = profile.join("examples").join(example);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let source = sources.join(example).with_extension("rs");
    assert!(
        written_at(&program) >= written_at(&source),
        "{example} is not built, or is older than its source: cargo build --examples"
    );
    program
}

/// When the file was written. `None`, which is less than any time, if there is no such file.
fn written_at(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|file| file.modified()).ok()
}

#[track_caller]
fn assert_lines(printed: &str, lines: &[&str]) {
    for line in lines {
        assert!(printed.contains(line), "{line:?} is not in:\n{printed}");
    }
}

fn count(printed: &str, part: &str) -> usize {
    printed.lines().filter(|line| line.contains(part)).count()
}

#[test]
fn counter_loses_no_update() {
    let server = server();
    for total in [100, 200] {
        let printed = run("counter", &[], &server.url());
        let line = format!("raised 100 times, the counter is {total}\n");
        assert_lines(&printed, &[&line]);
    }
    assert!(held_keys(&server).is_empty());
}

#[test]
fn transfers_keep_the_sum() {
    let server = server();
    let printed = run("transfer", &[], &server.url());
    assert_lines(&printed, &["the sum is 500, as before\n"]);
}

#[test]
fn leader_is_deposed_and_replaced() {
    let server = server();
    let printed = run("leader", &[], &server.url());
    assert!(count(&printed, " leads, with token ") >= 4, "{printed}");
    assert_eq!(count(&printed, " is deposed"), 3);
    assert!(count(&printed, " steps down: ") >= 1, "{printed}");
    assert!(count(&printed, " is the leader") >= 4, "{printed}");
    assert_lines(&printed, &["there is no leader: None\n"]);
}

#[test]
fn daily_job_is_done_once_a_day() {
    let server = server();
    for (day, sent) in [("20000", 1), ("20000", 0), ("20001", 1), ("20000", 0)] {
        let printed = run("daily_job", &[day], &server.url());
        assert_eq!(count(&printed, "sends the report"), sent, "{printed}");
        assert_eq!(count(&printed, " is done by "), 3 - sent, "{printed}");
        assert_eq!(count(&printed, "sent 2 mails"), sent, "{printed}");
    }
}

#[test]
fn catalog_is_refreshed_by_one_reader() {
    let server = server();
    for _ in 0..2 {
        let printed = run("catalog", &[], &server.url());
        assert_lines(&printed, &["and 1 of them refreshed it\n"]);
    }
    assert!(held_keys(&server).is_empty());
}

#[test]
fn rate_limit_delays_the_calls_beyond_it() {
    let printed = run("rate_limit", &[], &server().url());
    assert_lines(&printed, &["12 calls took two windows at least: true\n"]);
}

#[test]
fn reentrant_methods_call_one_another() {
    let printed = run("reentrant", &[], &server().url());
    let lines = [
        "+10, with the lock taken 1 times",
        "+100, with the lock taken 2 times",
        "-2, with the lock taken 2 times",
        "the balance rose by 108",
    ];
    assert_lines(&printed, &lines);
}

#[test]
fn fenced_write_refuses_the_late_write() {
    let printed = run("fenced_write", &[], &server().url());
    let lines = [
        "lost its lock: its validity ended",
        "refused: ",
        "the total is 17",
    ];
    assert_lines(&printed, &lines);
}

#[test]
fn transfer_reaches_the_child_under_a_greater_token() {
    let printed = run("hand_over", &[], &server().url());
    let token = |who: &str| {
        let line = printed.lines().find(|line| line.starts_with(who));
        line.and_then(|line| line.rsplit(' ').next())
            .map(str::to_owned)
    };
    let number = |who: &str| token(who).and_then(|token| token.parse::<u64>().ok());
    let of_parent = number("parent: begins").expect("it says so");
    assert!(number("child: goes on") > Some(of_parent), "{printed}");
    assert_lines(&printed, &["the lock is free: true\n"]);
}

#[test]
fn cancellation_ends_the_wait() {
    let server = server();
    let printed = run("cancellation", &[], &server.url());
    assert_lines(
        &printed,
        &["stops waiting: the wait was cancelled", "ended\n"],
    );
    assert!(held_keys(&server).is_empty());
}

#[test]
fn transaction_moves_money_only_while_the_lock_is_held() {
    let printed = run("transaction", &[], &server().url());
    let lines = [
        "first: Some(10)\n",
        "second: None\n",
        "third: the lock was lost (\"example:money\")",
        "10 here, 50 there",
    ];
    assert_lines(&printed, &lines);
}

#[test]
fn two_guards_and_rueidislock_exclude_each_other() {
    let server = server();
    let printed = run("rueidislock", &[], &server.url());
    let lines = [
        "the Go service holds the lock, and keeps us out: true\n",
        "the Go service holds two of three keys, and keeps us out: true\n",
        "we hold the lock, and keep the Go service out: true\n",
    ];
    assert_lines(&printed, &lines);
    assert_eq!(
        ask(&server, &["KEYS", "*:example"]),
        Reply::Array(Vec::new())
    );
}

#[test]
fn unit_testing_needs_no_server() {
    let printed = run("unit_testing", &[], "nowhere");
    assert_lines(&printed, &["all as it should be\n"]);
}
