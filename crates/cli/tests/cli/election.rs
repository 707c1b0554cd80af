//! `leasehold elect` and `leasehold observe`.

use std::process::Stdio;

use leasehold::{ErrorKind, LeaderInfo};
use leasehold_testbed::eventually;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{LIMIT, Running, at, client, is_running, result, server, url_without};

const WORK: &str = "echo $$ $LEASEHOLD_KEY $LEASEHOLD_TOKEN; read x";

#[test]
fn leaders_follow_one_another() {
    let server = server();
    let client = client(&server);
    let election = client.election("n");
    let leader = || election.leader().expect("the server runs");
    let start = |value: &str| {
        Running::start(
            at(&server.url())
                .args(["elect", "n", value, "--", "sh", "-c", WORK])
                .stdin(Stdio::piped()),
        )
    };
    let lead = |running: &mut Running, value: &str| -> LeaderInfo {
        let line = running.line();
        let leader = leader().expect("the command runs only while it leads");
        assert_eq!(leader.value(), Some(value.as_bytes()));
        let end = format!(" n {}", leader.fencing_token());
        assert!(line.ends_with(&end), "{line}: {end}");
        leader
    };
    let mut first = start("10.0.0.7:80");
    let term = lead(&mut first, "10.0.0.7:80");

    for (arguments, expected) in [
        (&["-n", "n", "b", "true"] as &[&str], 1),
        (&["-w", "1.5", "-E", "7", "n", "b", "true"], 7),
    ] {
        let (code, _, errors) = result(at(&server.url()).arg("elect").args(arguments));
        assert_eq!((code, errors.as_str()), (expected, ""), "{arguments:?}");
    }
    let mut second = start("10.0.0.8:80");
    let queue = || client.mutex("n").inspect().expect("the server runs");
    assert!(eventually(LIMIT, || queue()
        .is_some_and(|lock| lock.clients_waiting() == 1)));
    drop(first.child.stdin.take());
    assert_eq!(first.code(), 1, "`read` has found the end of its input");
    let next = lead(&mut second, "10.0.0.8:80");
    assert!(next.fencing_token() > term.fencing_token());
    drop(second.child.stdin.take());
    second.code();
    assert_eq!(leader(), None);
    let mut last = at(&server.url());
    assert_eq!(result(last.args(["elect", "n", "c", "-c", "exit 9"])).0, 9);
}

#[test]
fn a_deposed_leader_ends() {
    let server = server();
    let client = client(&server);
    let mut running = Running::start(
        at(&server.url())
            .args(["elect", "n", "a", "sh", "-c", "echo $$; exec sleep 1000"])
            .stderr(Stdio::piped()),
    );
    let command = running.process();
    let taken = client.mutex("n").force_unlock();
    taken.expect("the server runs").expect("it is held");
    assert_eq!(running.code(), 75);
    assert!(!is_running(command));
}

#[test]
fn bad_arguments_of_elect_are_usage_errors() {
    let url = "redis://127.0.0.1:1";
    for arguments in [
        &["n"] as &[&str],
        &["n", "a"],
        &["n", "--", "true"],
        &["n", "-n", "true"],
        &["n", "a", "-x", "true"],
        &["-s", "n", "a", "true"],
        &["", "a", "true"],
    ] {
        let (code, _, errors) = result(at(url).arg("elect").args(arguments));
        assert_eq!(code, 64, "{arguments:?}: {errors}");
    }
    assert_eq!(result(at(url).arg("observe")).0, 64);
    let quorum = [url, "redis://127.0.0.1:2", "redis://127.0.0.1:3"].join(" ");
    let (code, _, errors) = result(at(&quorum).args(["elect", "n", "a", "true"]));
    assert_eq!(code, 64, "{:?}: {errors}", ErrorKind::Unsupported);
}

#[test]
fn observers_write_each_state() {
    let mut server = server();
    let client = client(&server);
    let election = client.election("n");
    let start = |arguments: &[&str]| {
        Running::start(
            at(&server.url())
                .args(["observe", "--ttl", "5s"])
                .args(arguments)
                .stderr(Stdio::null()),
        )
    };
    let mut texts = start(&["n"]);
    let mut objects = start(&["--json", "n"]);
    let mut states = move || {
        let object: Value = serde_json::from_str(&objects.line()).expect("it is JSON");
        assert_eq!(object["key"], "n");
        (texts.line(), object)
    };

    let (text, object) = states();
    assert_eq!(
        (&*text, &object["state"]),
        ("n has no leader", &"vacant".into())
    );
    let term = election.campaign("two\nlines").expect("the server runs");
    let (holder, token) = (client.holder_id(), term.fencing_token());
    let (text, object) = states();
    assert_eq!(
        text,
        format!(r#"n is led by {holder} with token {token}: "two\nlines""#)
    );
    assert_eq!(object["state"], "leader");
    assert_eq!(object["value"], "two\nlines");
    assert_eq!(object["holder"], holder.as_str());
    assert_eq!(object["fencing_token"], token.to_string());
    assert!(object["expires_in_ms"].as_u64() > Some(0), "{object}");
    term.proclaim("b").expect("the server runs");
    assert_eq!(states().1["value"], "b");
    term.resign().expect("it leads");
    assert_eq!(states().1["state"], "vacant");
    server.kill();
    let (text, object) = states();
    assert_eq!(text, "n may have another leader: Redis does not answer");
    assert_eq!(object["state"], "unknown");
}

/// Without this error, the election would look like one on a server that does not answer.
#[test]
fn an_election_that_may_not_be_read_is_an_error() {
    let server = server();
    let url = url_without(&server, "getrange");
    let (code, _, errors) = result(at(&url).args(["observe", "n"]));
    assert_eq!(code, 77, "{errors}");
    assert!(errors.contains("getrange"), "{errors}");
}

#[test]
fn a_signal_ends_the_observation() {
    let server = server();
    let mut running = Running::start(at(&server.url()).args(["observe", "n"]));
    running.line();
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 0);
}
