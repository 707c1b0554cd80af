//! Tests that the load generator measures correctly. They run its quick form, without the competitors and without
//! optimization, and check no speed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use leasehold_load::{Assignment, Keys, Round, Way, nanoseconds};
use leasehold_testbed::{Server, eventually};
use serde_json::{Value, json};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"));
    command.args(["--json", "--quick", "--as-built", "--no-install"]);
    command.args(arguments).output().expect("it is there")
}

fn rows(cases: &[&str]) -> Vec<Value> {
    let output = bench(cases);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    let lines = String::from_utf8(output.stdout).expect("JSON is text");
    let row = |line| serde_json::from_str(line).expect("every line is a JSON object");
    lines.lines().map(row).collect()
}

fn row<'a>(rows: &'a [Value], name: &str) -> &'a Value {
    let named = rows.iter().find(|row| row["name"] == name);
    named.unwrap_or_else(|| panic!("no row {name:?} in {rows:?}"))
}

fn figure(row: &Value, of: &str) -> f64 {
    let figure = row[of].as_f64();
    figure.unwrap_or_else(|| panic!("no figure {of:?} in {row}"))
}

#[test]
fn every_row_has_a_name_and_a_ratio_to_the_raw_commands() {
    let rows = rows(&["1-thread-one-core", "4-processes-one-key-held"]);
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str()).collect();
    let of = |case: &str, ways: &[&str]| -> Vec<String> {
        ways.iter().map(|way| format!("{case}/{way}")).collect()
    };
    let own = of(
        "1-thread-one-core",
        &["raw", "raw-piped", "limit", "drop", "unlock"],
    );
    let own_busy = of(
        "1-thread-one-core-busy",
        &["raw", "limit", "drop", "unlock"],
    );
    let held = ["raw", "drop", "unlock"];
    let one = of("4-processes-one-key-held-1ms", &held);
    let one_busy = of("4-processes-one-key-held-1ms-busy", &held);
    let wanted = [&own, &own_busy, &one, &one_busy].into_iter().flatten();
    let wanted = wanted.map(|name| Some(name.as_str()));
    // The lines after the rows are the goals, which have no name: three on the quiet machine, and two for each of two
    // ways beside busy loops.
    let goals = [None; 3 + 4];
    assert_eq!(names, wanted.chain(goals).collect::<Vec<_>>());
    let (rows, goals) = rows.split_at(rows.len() - goals.len());
    for (at, goal) in goals.iter().enumerate() {
        let case = ["1-thread-one-core", "1-thread-one-core-busy"][usize::from(at >= 3)];
        assert_eq!(goal["case"], case, "{goal}");
        assert!(figure(goal, "measured") >= 0.0, "{goal}");
    }
    for row in rows {
        assert!(figure(row, "ratio") >= 0.0, "{row}");
        assert!(figure(row, "pairs_per_second") >= 0.0, "{row}");
    }
    assert_eq!(figure(&rows[0], "ratio"), 1.0);
    // A lock and its release are two requests. (If a lock is held for long on a busy machine, its key is tracked, which
    // takes a few more.)
    for way in &own {
        let requests = figure(row(rows, way), "requests_per_pair");
        assert!((1.9..3.0).contains(&requests), "{way}: {requests}");
    }
    // Each hold takes a millisecond. So a hundred holds fit into the window, and one more that begins at its end.
    for row in &rows[own.len() + own_busy.len()..] {
        assert!(figure(row, "pairs_per_second") <= 1010.0, "{row}");
    }
}

#[test]
fn the_goals_need_few_ways_and_no_fixed_rate() {
    let rows = rows(&["--goals", "16-threads-one-key", "4-processes"]);
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str()).collect();
    let ways = ["raw", "fair-mutex", "fair-queue", "with_lock"]
        .map(|way| format!("16-threads-one-key/{way}"));
    let busy = ["raw", "with_lock"].map(|way| format!("16-threads-one-key-busy/{way}"));
    let wanted = ways.iter().chain(&busy).map(|name| Some(name.as_str()));
    assert_eq!(names, wanted.chain([None; 4]).collect::<Vec<_>>());
    let (rows, goals) = rows.split_at(ways.len() + busy.len());
    assert!(rows.iter().all(|row| row["paced"].is_null()));
    let figures = goals.iter().map(|goal| goal["figure"].as_str());
    let wanted = [
        "pairs/s: with_lock / fair-mutex",
        "pairs/s: with_lock / fair-queue",
        "pairs/s: with_lock / with_lock without the loops",
        "pairs/s: with_lock / raw",
    ];
    assert_eq!(figures.collect::<Vec<_>>(), wanted.map(Some));
    for without_redis in &ways[1..3] {
        assert_eq!(figure(row(rows, without_redis), "requests_per_pair"), 0.0);
    }
}

#[test]
fn an_unknown_case_lists_the_known_ones() {
    let output = bench(&["no-such-case"]);
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("256-threads"), "{errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_load_process_ends_with_its_input() {
    let server = Server::start().expect("Redis is installed");
    let mut process = Command::new(env!("CARGO_BIN_EXE_leasehold-bench"))
        .arg("--process")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let assignment = Assignment {
        url: server.url(),
        way: Way::Raw,
        process: 0,
        threads: 1,
        keys: Keys::Own,
        hold: Duration::ZERO,
        core: None,
    };
    let round = Round {
        start: nanoseconds(),
        window: Duration::from_secs(3600),
        pace: None,
    };
    let mut input = process.stdin.take().expect("it is piped");
    writeln!(input, "{}\n{}", json!(assignment), json!(round)).expect("it accepts its assignment");
    let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
    let mut connected = String::new();
    output
        .read_line(&mut connected)
        .expect("it sends a message");
    assert!(connected.starts_with(r#"@ {"Ok":"#), "{connected}");

    drop(input);
    let ended = || process.try_wait().is_ok_and(|status| status.is_some());
    let has_ended = eventually(Duration::from_secs(60), ended);
    let _ = process.kill();
    assert!(has_ended, "it goes on without its parent");
}

#[test]
fn shared_locks_have_rows_of_their_own() {
    let rows = rows(&["rw-95-1ms", "rw-beside-10", "semaphore-of-one"]);
    let names: Vec<_> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    // `rw-beside-10` is the start of two other names.
    let both = ["raw", "leasehold"];
    let of = |case: &str, ways: &[&str]| -> Vec<String> {
        ways.iter().map(|way| format!("{case}/{way}")).collect()
    };
    let wanted = [
        of("rw-95-1ms", &both),
        of("rw-beside-10", &both),
        of("rw-beside-100", &both),
        of("rw-beside-1000", &both),
        of("semaphore-of-one", &["mutex", "leasehold", "raw"]),
    ];
    assert_eq!(names, wanted.concat());
    for row in &rows {
        assert!(figure(row, "grants_per_second") >= 0.0, "{row}");
        assert!(figure(row, "server_cpu_per_grant") > 0.0, "{row}");
    }
    for beside in ["rw-beside-10", "rw-beside-1000"] {
        let row = row(&rows, &format!("{beside}/leasehold"));
        // An acquire and a release. Readers that follow one another may share a grant.
        assert!(figure(row, "requests_per_grant") <= 2.2, "{row}");
        assert!(row["second_wait"].is_null(), "{row}");
    }
    let mixed = row(&rows, "rw-95-1ms/leasehold");
    assert!(mixed["longest_to_fair"].is_null(), "{mixed}");
    let one = row(&rows, "semaphore-of-one/leasehold");
    assert!(figure(one, "longest_to_fair") > 0.0, "{one}");
}
