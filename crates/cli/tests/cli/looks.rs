//! The commands that show, free and check locks: their text, their JSON and their exit codes.

use std::process::Stdio;
use std::time::Duration;

use leasehold_testbed::{Server, eventually};
use rustix::process::Signal;
use serde_json::Value;

#[cfg(target_os = "linux")]
use crate::support::{
    LIMIT, Running, at, client, full, is_locked, program, result, server, url_without,
};

/// The objects that the program writes with `--json`, and its exit code. On a busy machine, a request may take longer than
/// the default time-outs.
fn objects(url: &str, arguments: &[&str]) -> (i32, Vec<Value>) {
    let mut command = at(url);
    for name in ["LEASEHOLD_CONNECT_TIMEOUT", "LEASEHOLD_COMMAND_TIMEOUT"] {
        command.env(name, "30s");
    }
    let (code, text, _) = result(command.arg("--json").args(arguments));
    let object = |line: &str| serde_json::from_str(line).expect("it is JSON");
    (code, text.lines().map(object).collect())
}

#[test]
fn a_held_lock_is_shown_with_its_holder() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().expect("the server runs");
    let holder = client.holder_id();
    let (code, text, _) = result(at(&server.url()).args(["inspect", "k"]));
    assert_eq!(code, 0);
    assert!(text.starts_with("k: one holder, 0 clients wait"), "{text}");
    assert!(text.contains(holder.as_str()), "{text}");
    let (code, shown) = objects(&server.url(), &["inspect", "k"]);
    assert_eq!((code, shown.len()), (0, 1));
    assert_eq!(shown[0]["key"], "k");
    assert_eq!(shown[0]["kind"], "exclusive");
    let shown = &shown[0]["holders"][0];
    assert_eq!(shown["holder"], holder.as_str());
    assert!(shown["expires_in_ms"].as_u64() > Some(0), "{shown}");
    drop(guard);
    assert!(eventually(LIMIT, || !is_locked(&client, "k")));
    let (code, text, _) = result(at(&server.url()).args(["inspect", "k"]));
    assert_eq!((code, &*text), (1, "k is free\n"));
}

#[test]
fn the_locks_with_a_beginning_are_listed() {
    let server = server();
    let client = client(&server);
    let _alone = client.mutex("job:a").lock().expect("the server runs");
    let readers = client.rw_lock("job:b");
    let _reader = readers.read().expect("the server runs");
    let _other = client.mutex("other").lock().expect("the server runs");
    let (code, mut listed) = objects(&server.url(), &["list", "job:"]);
    listed.sort_by_key(|lock| lock["key"].to_string());
    let listed: Vec<_> = listed
        .iter()
        .map(|lock| (&lock["key"], &lock["kind"]))
        .collect();
    let (a, b) = (Value::from("job:a"), Value::from("job:b"));
    let (alone, reader) = (Value::from("exclusive"), Value::from("readers"));
    assert_eq!((code, listed), (0, vec![(&a, &alone), (&b, &reader)]));
    let (code, text, _) = result(at(&server.url()).arg("list"));
    assert_eq!(
        (code, text.lines().count()),
        (0, 4),
        "a header and three locks"
    );
    let (_, listed) = objects(&server.url(), &["list", "--max", "1"]);
    assert_eq!(listed.len(), 1);
    let (code, listed) = objects(&server.url(), &["list", "--held-longer", "1h"]);
    assert_eq!((code, listed), (0, Vec::new()));
}

#[test]
fn a_lock_is_freed_by_force_only() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().expect("the server runs");
    assert_eq!(result(at(&server.url()).args(["unlock", "k"])).0, 64);
    assert!(is_locked(&client, "k"));
    let (code, freed) = objects(&server.url(), &["unlock", "--force", "k"]);
    assert_eq!(code, 0);
    assert_eq!(freed[0]["taken_from"][0], client.holder_id().as_str());
    assert!(!is_locked(&client, "k"));
    assert!(eventually(LIMIT, || guard.is_lost()));
    let (code, freed) = objects(&server.url(), &["unlock", "--force", "k"]);
    assert_eq!(code, 1);
    assert_eq!(freed[0]["taken_from"], Value::Array(Vec::new()));
}

#[test]
fn each_change_of_a_lock_is_written() {
    let server = server();
    let client = client(&server);
    let mut command = at(&server.url());
    command.args(["--json", "watch", "--interval", "50ms", "job:"]);
    let mut watching = Running::start(command.stderr(Stdio::null()));
    // The watch begins at some time, so the first lock may be there already.
    let guard = client.mutex("job:a").lock().expect("the server runs");
    let mut change = || -> Value { serde_json::from_str(&watching.line()).expect("it is JSON") };
    let acquired = change();
    assert_eq!(acquired["event"], "acquired");
    assert_eq!(acquired["key"], "job:a");
    assert_eq!(acquired["holder"], client.holder_id().as_str());
    guard.unlock().expect("it is held");
    assert_eq!(change()["event"], "released");
    watching.signal(Signal::TERM);
    assert_eq!(watching.code(), 0);
}

#[test]
fn the_doctor_checks_each_part_and_leaves_little_behind() {
    let server = server();
    let (code, checks) = objects(&server.url(), &["doctor"]);
    assert_eq!(code, 0, "{checks:?}");
    for name in [
        "connection",
        "locks",
        "shared locks",
        "once",
        "list",
        "notifications",
    ] {
        let check = checks.iter().find(|check| check["check"] == name);
        assert_eq!(check.expect("it is checked")["level"], "ok", "{name}");
    }
    let keys = server
        .command(&["KEYS", "*"])
        .expect("the server runs")
        .to_string();
    for key in keys.split_whitespace().filter(|key| key.contains("doctor")) {
        let key = key.trim_matches(['[', ']', '"', ',']);
        let left = server
            .command(&["PTTL", key])
            .expect("the server runs")
            .to_string();
        let left: i64 = left.parse().expect("it is a number");
        assert!((0..=60_000).contains(&left), "{key} stays for {left} ms");
    }
}

#[test]
fn the_doctor_names_the_rights_that_are_missing() {
    let server = server();
    let url = url_without(&server, "hset");
    let (code, checks) = objects(&url, &["doctor"]);
    let once = checks.iter().find(|check| check["check"] == "once");
    let once = once.expect("it is checked");
    assert_eq!((code, &once["level"]), (0, &"warning".into()));
    assert!(once["text"].to_string().contains("fenced-values"), "{once}");
}

#[test]
fn the_doctor_fails_without_redis() {
    let (code, _, errors) = result(at("redis://127.0.0.1:1").arg("doctor"));
    assert_eq!(code, 69, "{errors}");
}

#[test]
fn the_manual_and_the_completions_name_each_command() {
    for arguments in [&["man"][..], &["completions", "bash"]] {
        let (code, text, _) = result(program().args(arguments));
        assert_eq!(code, 0);
        for command in [
            "run", "elect", "observe", "inspect", "list", "watch", "unlock", "doctor",
        ] {
            assert!(text.contains(command), "{arguments:?} without {command}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_no_success() {
    let server = server();
    let client = client(&server);
    let _guard = client.mutex("k").lock().expect("the server runs");
    for command in [&["list"] as &[&str], &["--json", "inspect", "k"], &["man"]] {
        let status = at(&server.url()).args(command).stdout(full()).status();
        assert_eq!(status.expect("it can be started").code(), Some(71));
    }
}

/// An inspection shows at most a hundred holders.
#[test]
fn a_lock_with_many_holders_is_freed() {
    let server = server();
    let [client, late] = [client(&server), client(&server)];
    let semaphore = client.semaphore("k", 300);
    let permits: Vec<_> = (0..150)
        .map(|_| semaphore.acquire().expect("one is free"))
        .collect();
    let last = late.semaphore("k", 300).ttl(Duration::from_secs(60));
    let last = last.acquire().expect("one is free");
    let unlock = || {
        let mut command = at(&server.url());
        command.args(["--json", "unlock", "--force", "k"]);
        command
    };
    let (code, _, errors) = result(unlock().args(["--holder", late.holder_id().as_str()]));
    assert_eq!(code, 1);
    assert!(errors.contains("more holders than the 100"), "{errors}");
    let (code, text, errors) = result(&mut unlock());
    assert_eq!((code, &*errors), (0, ""));
    let freed: Value = serde_json::from_str(&text).expect("it is JSON");
    assert_eq!(freed["taken_from"].as_array().map(Vec::len), Some(151));
    assert!(!is_locked(&client, "k"));
    assert!(eventually(LIMIT, || last.is_lost()
        && permits.iter().all(|one| one.is_lost())));
}

/// Other users of Redis may write values that look like locks, and names that would change a terminal.
#[test]
fn odd_values_and_names_hide_no_other_lock() {
    let server = server();
    let client = client(&server);
    let _guard = client.mutex("k").lock().expect("the server runs");
    let lease = "0123456789abcdef0123456789abcdef";
    let member = format!("lh1 {lease} p 1 1 2 h\u{1b}");
    let field = format!("{lease}:h\u{1b}");
    for command in [
        &["ZADD", "leasehold:zset", "9999999999999", &member] as &[&str],
        &["SET", "leasehold:text", &format!("lh1 {lease} 0 h\u{1b}")],
        &["HSET", "leasehold:hash", &field, "1"],
        &["SET", "leasehold:\u{1b}[31m", &format!("lh1 {lease} 0 h")],
    ] {
        server.command(command).expect("it can be written");
    }
    let (code, listed) = objects(&server.url(), &["list"]);
    let names: Vec<&Value> = listed.iter().map(|lock| &lock["key"]).collect();
    assert_eq!((code, names), (0, vec![&Value::from("k")]));
    for key in ["zset", "text", "hash"] {
        let (code, _, errors) = result(at(&server.url()).args(["inspect", key]));
        assert_eq!(code, 76, "{errors}");
        assert!(errors.contains("no lock of this library"), "{errors}");
    }
    let connection = redis_client(&server);
    let mut connection = connection.get_connection().expect("the server runs");
    for key in ["leasehold:bytes", "leasehold:\u{ff}"] {
        let field = [lease.as_bytes(), b":\xff"].concat();
        let mut write = leasehold::redis::cmd("HSET");
        let written = write.arg(key).arg(field).arg("1").exec(&mut connection);
        written.expect("it can be written");
    }
    let beside = ["--compatible-with", "redisson", "--prefix", "leasehold:"];
    let mut list = beside.to_vec();
    list.push("list");
    let (code, listed) = objects(&server.url(), &list);
    assert_eq!(code, 0);
    let names: Vec<_> = listed
        .iter()
        .filter_map(|lock| lock["key"].as_str())
        .collect();
    assert_eq!(names, ["bytes", "hash", "k", "text", "zset", "\u{ff}"]);
}

fn redis_client(server: &Server) -> leasehold::redis::Client {
    leasehold::redis::Client::open(server.url()).expect("it is valid")
}

#[test]
fn the_doctor_checks_notifications_in_each_way() {
    let server = server();
    let notifications = |url: &str, options: &[&str]| {
        let (_, checks) = objects(url, &[options, &["doctor"]].concat());
        let mut found = checks.iter();
        let check = found.find(|check| check["check"] == "notifications");
        let check = check.unwrap_or_else(|| panic!("not checked: {checks:?}"));
        (check["level"].clone(), check["text"].to_string())
    };
    let redisson = ["--compatible-with", "redisson-fenced", "--prefix", "app:"];
    for _ in 0..2 {
        let (level, text) = notifications(&server.url(), &redisson);
        assert_eq!(level, "ok", "{text}");
    }
    let counters = server.command(&["KEYS", "redisson_lock_token:*"]);
    let counters = counters.expect("the server runs").to_string();
    let count = counters.matches("redisson_lock_token").count();
    assert_eq!(count, 2, "they never expire: {counters}");
    // Messages come, but no changes of keys.
    let url = url_without(&server, "client|tracking");
    let (level, text) = notifications(&url, &[]);
    assert_eq!(level, "warning", "{text}");
    assert!(text.contains("tracking"), "{text}");
}
