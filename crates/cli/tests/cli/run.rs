//! `leasehold run` while nothing fails.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold::{Error, Run};
use leasehold_testbed::eventually;
use rustix::process::Signal;

use crate::support::{
    LIMIT, Running, assert_ends, client, is_locked, output, result, run, server, url_without,
};

#[test]
fn i1_runs_and_releases() {
    let server = server();
    let client = client(&server);
    let mut running = Running::start(
        run(&server.url())
            .args([
                "k",
                "sh",
                "-c",
                "echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN $LEASEHOLD_DEADLINE; read x",
            ])
            .stdin(Stdio::piped()),
    );
    let line = running.line();
    let [key, token, deadline] = line.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    assert_eq!(key, "k");
    let token: u64 = token.parse().expect("it is a number");
    let deadline: u128 = deadline.parse().expect("it is a number");
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.expect("the clock is right").as_millis();
    assert!(
        (now - 10_000..=now + 30_000).contains(&deadline),
        "the default ttl is 30 s: {deadline} at {now}"
    );
    assert!(is_locked(&client, "k"));
    drop(running.child.stdin.take());
    running.code();
    let guard = client
        .mutex("k")
        .try_lock()
        .expect("the server runs")
        .expect("it is free");
    assert!(guard.fencing_token() > token);
}

#[test]
fn i1_several_keys_are_held_together() {
    let server = server();
    let client = client(&server);
    let show = "echo \"$LEASEHOLD_KEY\"; echo \"$LEASEHOLD_TOKEN\"; read x";
    let mut running = Running::start(
        run(&server.url())
            .args(["b", "a", "b c", "--", "sh", "-c", show])
            .stdin(Stdio::piped()),
    );
    let keys = ["b", "a", "b c"];
    assert_eq!(keys.map(|_| running.line()), keys, "in the order given");
    let tokens = keys.map(|_| running.line().parse::<u64>().expect("it is a number"));
    // Another set that has one key in common is refused, and leaves nothing behind.
    let mut other = run(&server.url());
    other.args(["-n", "-v", "d", "a", "--", "true"]);
    let (code, _, errors) = result(&mut other);
    assert_eq!(code, 1);
    assert!(
        errors.contains("one of the locks d, a has another holder"),
        "{errors}"
    );
    assert!(!is_locked(&client, "d"));
    drop(running.child.stdin.take());
    running.code();
    for (key, token) in keys.into_iter().zip(tokens) {
        let guard = client.mutex(key).try_lock().expect("the server runs");
        let later = guard.expect("it is free").fencing_token();
        assert!(later > token, "{key}: {token}, then {later}");
    }
    assert_eq!(result(&mut other).0, 0);
}

#[test]
fn i2_bad_arguments_are_usage_errors() {
    for arguments in [
        &[] as &[&str],
        &["k"],
        &["k", "--"],
        &["-n", "-w", "1", "k", "true"],
        &["-w", "1y", "k", "true"],
        &["-s", "-x", "k", "true"],
        &["-s", "--permits", "2", "k", "true"],
        &["--permits", "0", "k", "true"],
        &["--grace", "12.1s", "--ttl", "30s", "k", "true"],
        &["-E", "256", "k", "true"],
        &["--no-such-option", "k", "true"],
        &["k", "-c", "true", "more"],
        &["k", "-n", "true"],
        &["~k", "true"],
        &["a", "a", "--", "true"],
        &["-s", "a", "b", "--", "true"],
        &["--permits", "2", "a", "b", "--", "true"],
        &["--min-hold", "1s", "a", "b", "--", "true"],
        &["k", "sh", "-c", "true", "--", "word"],
        &["k", "sh", "script", "--", "true"],
        &["k", "/bin/sh", "script", "--", "true"],
        &["-k", "k"],
        &["-k", "k", "--"],
        &["-k", "", "true"],
        &["-s", "-k", "a", "-k", "b", "true"],
        &["--", "--", "true"],
        &["", "true"],
        &["--ttl", "0", "k", "true"],
    ] {
        let (code, _, errors) = result(run("redis://127.0.0.1:1").args(arguments));
        assert_eq!(code, 64, "{arguments:?}: {errors}");
        assert!(!errors.is_empty(), "{arguments:?}");
    }
}

/// The first `--` ends the keys, so a command that contains `--` could be taken for keys.
#[test]
fn i2_a_command_is_not_taken_for_keys() {
    let (code, _, errors) =
        result(run("redis://127.0.0.1:1").args(["deploy", "sh", "script", "--", "file"]));
    assert_eq!(code, 64, "{errors}");
    for advice in [
        "sh is also a program",
        "`run deploy -- sh ..`",
        "`run --key deploy --key sh ..`",
    ] {
        assert!(errors.contains(advice), "{errors}");
    }
    let server = server();
    let show = "echo $LEASEHOLD_KEY: $*";
    for (arguments, expected) in [
        (
            &["a", "--", "sh", "-c", show, "sh", "--", "file"] as &[&str],
            "a: -- file\n",
        ),
        (
            &["-k", "a", "sh", "-c", show, "sh", "--", "file"],
            "a: -- file\n",
        ),
        (
            &[
                "-k", "a", "--key", "sh", "--", "sh", "-c", show, "sh", "file",
            ],
            "a sh: file\n",
        ),
        (&["-k", "sh", "-c", show], "sh:\n"),
        (
            &["a", "b/sh", "--", "sh", "-c", show, "sh", "file"],
            "a b/sh: file\n",
        ),
    ] {
        let (code, out, errors) = result(run(&server.url()).args(arguments));
        assert_eq!((code, &*out), (0, expected), "{arguments:?}: {errors}");
    }
}

#[test]
fn i3_a_lock_with_another_holder_is_a_conflict() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().expect("it is free");
    for (arguments, expected, wait) in [
        (&["-n", "k", "true"] as &[&str], 1, 0),
        (&["-w", "0", "k", "true"], 1, 0),
        (&["-w", "1.5", "k", "true"], 1, 1_500),
        (&["--wait", "1500ms", "-E", "7", "k", "true"], 7, 1_500),
        (&["-n", "-E", "0", "k", "false"], 0, 0),
    ] {
        let started = Instant::now();
        let (code, _, errors) = result(run(&server.url()).args(arguments));
        assert_eq!((code, errors.as_str()), (expected, ""), "{arguments:?}");
        assert!(
            started.elapsed() >= Duration::from_millis(wait),
            "{arguments:?}"
        );
    }
    let (_, _, errors) = result(run(&server.url()).args(["-v", "-n", "k", "true"]));
    assert!(errors.contains("another holder"), "{errors}");
    let waiting = run(&server.url()).args(["-w", "60", "k", "true"]).spawn();
    let mut waiting = waiting.expect("it can be started");
    let queue = || client.mutex("k").inspect().expect("the server runs");
    assert!(eventually(LIMIT, || queue()
        .is_some_and(|lock| lock.clients_waiting() == 1)));
    drop(guard);
    assert!(waiting.wait().expect("it is a child").success());
}

#[test]
fn i3_a_signal_ends_the_wait() {
    let server = server();
    let client = client(&server);
    let _guard = client.mutex("k").lock().expect("it is free");
    let mut waiting = Running::start(run(&server.url()).args(["k", "true"]));
    let queued = || {
        client
            .mutex("k")
            .inspect()
            .expect("the server runs")
            .map(|lock| lock.clients_waiting())
    };
    assert!(eventually(LIMIT, || queued() == Some(1)));
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.code(), 128 + 15);
    assert!(
        eventually(LIMIT, || queued() == Some(0)),
        "it has left the queue"
    );
}

#[test]
fn i4_readers_and_permits_share() {
    let server = server();
    let start = |arguments: &[&str]| {
        let mut running = Running::start(
            run(&server.url())
                .args(arguments)
                .args(["sh", "-c", "echo in; read x"])
                .stdin(Stdio::piped()),
        );
        assert_eq!(running.line(), "in");
        running
    };
    let code = |arguments: &[&str]| result(run(&server.url()).args(arguments).arg("true")).0;
    let readers = [start(&["-s", "k"]), start(&["-s", "k"])];
    assert_eq!(code(&["-n", "-x", "k"]), 1);
    assert_eq!(code(&["-n", "-s", "k"]), 0);
    drop(readers);
    let permits = [
        start(&["--permits", "2", "p"]),
        start(&["--permits", "2", "p"]),
    ];
    assert_eq!(code(&["-n", "--permits", "2", "p"]), 1);
    assert_eq!(code(&["-n", "--permits", "3", "p"]), 0);
    drop(permits);
}

#[test]
fn i5_exit_codes_are_those_of_the_command() {
    let server = server();
    let folder = tempfile::tempdir().expect("the system has a folder for temporary files");
    let [file, script] = ["data", "script"].map(|name| folder.path().join(name));
    std::fs::write(&file, "no program").expect("it can be written");
    // As by `flock(1)`, the shell runs a script without `#!`.
    std::fs::write(&script, "test $LEASEHOLD_KEY = k && exit $1").expect("it can be written");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, mode).expect("it is there");
    let [file, script] = [&file, &script].map(|path| path.to_str().expect("it is UTF-8"));
    for (command, expected) in [
        (&["true"] as &[&str], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["-c", "exit 9"], 9),
        (&["--", "sh", "-c", "kill -TERM $$"], 128 + 15),
        (&["sh", "-c", "kill -KILL $$"], 128 + 9),
        (&["/no/such/program"], 127),
        (&[file], 126),
        (&[script, "6"], 6),
    ] {
        let (code, _, errors) = result(run(&server.url()).arg("k").args(command));
        assert_eq!(code, expected, "{command:?}: {errors}");
    }
    let client = client(&server);
    assert!(!is_locked(&client, "k"));
}

#[test]
fn i5_signals_reach_the_whole_group() {
    let server = server();
    // The shell waits for its child, and each of them has a trap of its own.
    let script = "trap 'echo outer; wait; exit 3' USR1; \
                  sh -c 'trap \"echo inner; exit\" USR1; echo $$; while :; do sleep 0.05; done' & wait";
    let mut running = Running::start(run(&server.url()).args(["k", "sh", "-c", script]));
    let inner = running.process();
    running.signal(Signal::USR1);
    let mut lines = [running.line(), running.line()];
    lines.sort();
    assert_eq!(lines, ["inner", "outer"]);
    assert_eq!(running.code(), 3);
    assert_ends(inner);
}

#[test]
fn i5_each_signal_is_passed_on() {
    let server = server();
    let signals = [
        ("HUP", Signal::HUP),
        ("INT", Signal::INT),
        ("QUIT", Signal::QUIT),
        ("TERM", Signal::TERM),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("WINCH", Signal::WINCH),
    ];
    let traps = signals.map(|(name, _)| format!("trap 'echo {name}' {name}; "));
    let script = traps.concat() + "echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(run(&server.url()).args(["k", "sh", "-c", &script]));
    assert_eq!(running.line(), "ready");
    for (name, signal) in signals {
        running.signal(signal);
        assert_eq!(running.line(), name);
    }
}

#[test]
fn i6_arguments_pass_unchanged() {
    let server = server();
    let odd: [&[u8]; 7] = [
        b"",
        b"a b",
        b"$HOME *",
        b"'\"\\",
        b"x\ny",
        b"--help",
        b"\xff\xfe",
    ];
    let output = output(
        run(&server.url())
            .args(["k", "--", "printf", "<%s>"])
            .args(odd.map(OsStr::from_bytes)),
    );
    let expected = odd.map(|argument| [b"<", argument, b">"].concat()).concat();
    assert_eq!(output.stdout, expected);
}

#[test]
fn i7_standard_input_passes() {
    let server = server();
    let mut running = Running::start(run(&server.url()).args(["k", "cat"]).stdin(Stdio::piped()));
    let mut stdin = running.child.stdin.take().expect("it is piped");
    stdin.write_all(b"one\n").expect("it reads");
    assert_eq!(running.line(), "one");
    drop(stdin);
    assert_eq!(running.code(), 0);
}

#[test]
fn a_once_runs_once() {
    let server = server();
    let start = |command: &str| {
        result(run(&server.url()).args(["-v", "--once", "n:1", "k", "-c", command]))
    };
    let (code, out, _) = start("exit 5");
    assert_eq!((code, &*out), (5, ""), "a failure leaves no record");
    assert_eq!(start("echo ran").1, "ran\n");
    let (code, out, errors) = start("echo again");
    assert_eq!((code, &*out), (0, ""));
    assert!(errors.contains("n:1 has run before"), "{errors}");
}

/// The lock is deleted during the wait for the name, and the program does not notice it before the release.
#[test]
fn a_lock_lost_before_a_once_that_does_not_run_is_reported() {
    let server = server();
    let client = client(&server);
    let url = url_without(&server, "client|tracking");
    let start = |key: &str, wait: &str| {
        let mut command = run(&url);
        command.args(["--ttl", "1h", "-w", wait, "--once", "n:1", key, "true"]);
        let task = thread::spawn(move || result(&mut command));
        assert!(eventually(LIMIT, || is_locked(&client, key)));
        let delete = ["DEL", &format!("leasehold:{key}")];
        server.command(&delete).expect("the server runs");
        task
    };
    let mut waiting = Vec::new();
    // Another program runs the work. The first run waits for too short a time, and the second one until it is done.
    let ran = client.once("n:1").run(|_| {
        waiting.push(start("a", "5"));
        assert!(eventually(LIMIT, || waiting[0].is_finished()));
        waiting.push(start("b", "1h"));
        Ok::<_, Error>(())
    });
    assert_eq!(ran.expect("the server runs"), Run::Ran(()));
    for task in waiting {
        let (code, _, errors) = task.join().expect("the program ends");
        assert_eq!(code, 75, "{errors}");
        assert!(errors.contains("the command was not started"), "{errors}");
    }
}

#[test]
fn min_hold_keeps_the_lock_taken() {
    let server = server();
    let mut start = run(&server.url());
    let start = start.args(["-n", "--min-hold", "1h", "k", "true"]);
    assert_eq!(result(start).0, 0);
    assert_eq!(result(start).0, 1);
}
