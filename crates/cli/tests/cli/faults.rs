//! `leasehold run` while Redis, the network, or one of the processes fails.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use leasehold_testbed::{Proxy, Server, eventually};
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};

#[cfg(target_os = "linux")]
use crate::support::full;
use crate::support::{
    Journal, LIMIT, Running, assert_ends, client, is_locked, is_running, is_stopped, result, run,
    server,
};

/// A shell that writes the time into the file `$1` until it is killed: a pipeline of two processes that ignore TERM.
const STUBBORN: &str = "trap '' TERM; echo $$; while :; do date +%s%N; done | cat >> \"$1\"";

/// The group of a process.
fn group_of(id: Pid) -> Pid {
    rustix::process::getpgid(Some(id)).expect("it runs")
}

/// Cuts a run off from Redis. Its command must be dead when the next holder's command begins. Returns the time between
/// both.
fn cut_off(ttl: &str, grace: &str) -> Duration {
    let server = server();
    let proxy = Proxy::start(server.port()).expect("a proxy can be started");
    let journal = Journal::new();
    let path = journal.path.to_str().expect("it is UTF-8");
    let mut first = Running::start(
        run(&proxy.url())
            .args([
                "--ttl", ttl, "--grace", grace, "k", "--", "sh", "-c", STUBBORN, "sh", path,
            ])
            .stderr(Stdio::null()),
    );
    let shell = first.process();
    let group = group_of(shell);
    journal.wait_until_longer_than(0);
    proxy.black_hole(true);
    let (code, started, errors) = result(run(&server.url()).args(["k", "date", "+%s%N"]));
    assert_eq!(code, 0, "{errors}");
    assert_eq!(first.code(), 75);
    assert!(
        test_kill_process_group(group).is_err(),
        "a process of the group is left"
    );
    let text = fs::read_to_string(&journal.path).expect("it is there");
    let times = text.lines().filter_map(|line| line.parse::<u128>().ok());
    let last = times.max().expect("the first command has written");
    let started: u128 = started.trim_end().parse().expect("date writes a number");
    assert!(
        last < started,
        "the first command wrote {} ns after the second one had begun",
        last - started
    );
    Duration::from_nanos(u64::try_from(started - last).expect("it is short"))
}

#[test]
fn i8_cut_off_from_redis_the_group_is_dead_before_the_next_holder() {
    cut_off("4s", "1500ms");
}

/// `cargo test --package leasehold-cli --test cli -- --ignored --nocapture i8` takes some minutes. The variable
/// `LEASEHOLD_RUNS` gives another number of runs.
#[test]
#[ignore = "1,000 runs take some minutes"]
fn i8_in_a_thousand_of_a_thousand_runs() {
    let runs = std::env::var("LEASEHOLD_RUNS").map_or(Ok(1_000), |runs| runs.parse());
    let runs: usize = runs.expect("it is a number");
    let left = AtomicUsize::new(runs);
    let worker = || -> Vec<Duration> {
        let take = || left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        std::iter::from_fn(|| take().ok().map(|_| cut_off("1500ms", "500ms"))).collect()
    };
    let mut gaps: Vec<Duration> = thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        let gaps = workers.into_iter().map(|worker| worker.join());
        gaps.flat_map(|gaps| gaps.expect("no run fails")).collect()
    });
    gaps.sort_unstable();
    println!(
        "{runs} of {runs} commands were dead before the next one began: {:?} before at least, {:?} in the middle",
        gaps[0],
        gaps[runs / 2]
    );
}

#[test]
fn i9_the_group_dies_with_leasehold() {
    let server = server();
    let journal = Journal::new();
    let mut running = Running::start(
        run(&server.url())
            .args(["k", "--", "sh", "-c", STUBBORN, "sh"])
            .arg(&journal.path),
    );
    let shell = running.process();
    let group = group_of(shell);
    journal.wait_until_longer_than(0);
    running.signal(Signal::KILL);
    assert_ends(shell);
    assert!(eventually(LIMIT, || test_kill_process_group(group).is_err()));
}

#[test]
fn i9_a_stopped_leasehold_does_not_protect_its_group() {
    let server = server();
    let mut running = Running::start(run(&server.url()).args([
        "--ttl",
        "4s",
        "k",
        "sh",
        "-c",
        "echo $$; exec sleep 1000",
    ]));
    let command = running.process();
    running.signal(Signal::STOP);
    assert_ends(command);
    running.signal(Signal::CONT);
    assert_eq!(running.code(), 75);
}

#[test]
fn i10_a_nested_run_sees_its_own_lock() {
    let server = server();
    let program = env!("CARGO_BIN_EXE_leasehold");
    let show = "echo $LEASEHOLD_KEY $LEASEHOLD_TOKEN";
    let script = format!(
        "{show}; \"$0\" run inner sh -c '{show}'; \"$0\" run --permits 2 permits sh -c '{show}'"
    );
    let (code, out, errors) =
        result(run(&server.url()).args(["outer", "sh", "-c", &script, program]));
    assert_eq!(code, 0, "{errors}");
    let lines: Vec<&str> = out.lines().collect();
    let token = |line: &str, key: &str| -> u64 {
        let (found, token) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
        assert_eq!(found, key);
        token.parse().expect("it is a number")
    };
    assert!(token(lines[1], "inner") > token(lines[0], "outer"));
    assert_eq!(lines[2], "permits", "a permit has no token");
}

#[test]
fn i11_a_stopped_run_that_lost_its_lock_does_not_go_on() {
    let server = server();
    let client = client(&server);
    let journal = Journal::new();
    let mut running = Running::start(
        run(&server.url())
            .args([
                "--ttl",
                "3s",
                "k",
                "sh",
                "-c",
                "echo $$; while :; do date >> \"$0\"; done",
            ])
            .arg(&journal.path)
            .stderr(Stdio::null()),
    );
    let shell = running.process();
    journal.wait_until_longer_than(0);
    running.signal(Signal::TSTP);
    let leasehold = Pid::from_child(&running.child);
    assert!(eventually(LIMIT, || is_stopped(shell) && is_stopped(leasehold)));
    // The ttl passes, so the next holder enters.
    let guard = client.mutex("k").lock().expect("the server runs");
    let length = journal.length();
    running.signal(Signal::CONT);
    assert_eq!(running.code(), 75);
    assert_ends(shell);
    assert_eq!(
        journal.length(),
        length,
        "the command has worked after its lock was lost"
    );
    guard.check().expect("the next holder keeps the lock");
}

#[test]
fn i11_a_stopped_run_that_has_its_lock_goes_on() {
    let server = server();
    let journal = Journal::new();
    let mut running = Running::start(
        run(&server.url())
            .args([
                "--ttl",
                "1h",
                "k",
                "sh",
                "-c",
                "echo $$; while :; do date >> \"$0\"; done",
            ])
            .arg(&journal.path),
    );
    let shell = running.process();
    running.signal(Signal::TSTP);
    let leasehold = Pid::from_child(&running.child);
    assert!(eventually(LIMIT, || is_stopped(shell) && is_stopped(leasehold)));
    let length = journal.length();
    running.signal(Signal::CONT);
    journal.wait_until_longer_than(length);
    running.signal(Signal::TERM);
    assert_eq!(running.code(), 128 + 15);
}

/// Starts a command whose lock the test then takes away.
fn until_forced(server: &Server, script: &str) -> (Running, Pid) {
    let mut command = run(&server.url());
    command
        .args(["--grace", "200ms", "k", "sh", "-c", script])
        .stderr(Stdio::piped());
    let mut running = Running::start(&mut command);
    let id = running.process();
    (running, id)
}

#[test]
fn i12_a_command_that_ignores_term_is_killed() {
    let server = server();
    let client = client(&server);
    let (mut running, shell) = until_forced(
        &server,
        "trap '' TERM; echo $$; while :; do sleep 0.05; done",
    );
    client
        .mutex("k")
        .force_unlock()
        .expect("the server runs")
        .expect("it is held");
    assert_eq!(running.code(), 75);
    assert!(!is_running(shell));
}

#[test]
fn i12_the_loss_of_one_of_several_keys_ends_the_command() {
    let server = server();
    let client = client(&server);
    let mut command = run(&server.url());
    command
        .args(["a", "b", "c", "--", "sh", "-c", "echo $$; exec sleep 1000"])
        .stderr(Stdio::piped());
    let mut running = Running::start(&mut command);
    let command = running.process();
    let taken = client.mutex("b").force_unlock();
    taken.expect("the server runs").expect("it is held");
    let errors = running.child.stderr.take().expect("it is piped");
    assert_eq!(running.code(), 75);
    assert!(!is_running(command));
    let errors = std::io::read_to_string(errors).expect("it is text");
    assert!(errors.contains(r#""b""#), "it names the key: {errors}");
    for key in ["a", "c"] {
        assert!(eventually(LIMIT, || !is_locked(&client, key)), "{key}");
    }
}

#[test]
fn i12_a_command_has_time_to_end_by_itself() {
    let server = server();
    let client = client(&server);
    let script = "trap 'echo cleaned; exit' TERM; echo $$; while :; do sleep 0.05; done";
    let mut command = run(&server.url());
    let mut running =
        Running::start(command.args(["--ttl", "80s", "--grace", "30s", "k", "sh", "-c", script]));
    let shell = running.process();
    client
        .mutex("k")
        .force_unlock()
        .expect("the server runs")
        .expect("it is held");
    assert_eq!(running.line(), "cleaned");
    assert_eq!(running.code(), 75);
    assert!(!is_running(shell));
}

/// TERM ends the shell at once, but the rest of its group needs some time.
#[test]
fn i12_the_whole_group_has_time_to_end() {
    let server = server();
    let client = client(&server);
    let slow = "trap 'sleep 0.3; echo cleaned; exit' TERM; echo $$; while :; do sleep 0.05; done";
    let script = "sh -c \"$0\" & exec sleep 1000";
    let mut command = run(&server.url());
    let mut running = Running::start(command.args([
        "--ttl", "80s", "--grace", "30s", "k", "sh", "-c", script, slow,
    ]));
    let inner = running.process();
    let taken = client.mutex("k").force_unlock();
    taken.expect("the server runs").expect("it is held");
    assert_eq!(running.line(), "cleaned");
    assert_eq!(running.code(), 75);
    assert!(!is_running(inner));
}

#[test]
#[cfg(target_os = "linux")]
fn i13_a_process_that_left_the_group_is_reported() {
    let server = server();
    // The rest of the group is killed. The process that has left the group runs on.
    let script = "sleep 1000 >/dev/null 2>&1 & \
                  setsid sh -c 'echo $$; exec sleep 1000' 2>/dev/null & read x; exit 0";
    let mut command = run(&server.url());
    command
        .args(["k", "-c", script])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = Running::start(&mut command);
    let left = running.process();
    drop(running.child.stdin.take());
    let errors = running.child.stderr.take().expect("it is piped");
    assert_eq!(running.code(), 0);
    let errors = std::io::read_to_string(errors).expect("it is text");
    assert!(
        errors.contains(&format!("process {} (s", left.as_raw_pid())),
        "{errors}"
    );
    assert!(is_running(left));
    kill_process(left, Signal::KILL).expect("it runs");
}

#[test]
#[cfg(target_os = "linux")]
fn i13_a_process_that_left_the_group_is_killed_at_a_loss() {
    let server = server();
    let client = client(&server);
    let (mut running, left) =
        until_forced(&server, "setsid sh -c 'echo $$; exec sleep 1000' & wait");
    assert!(eventually(LIMIT, || group_of(left) == left), "it has left");
    client
        .mutex("k")
        .force_unlock()
        .expect("the server runs")
        .expect("it is held");
    assert_eq!(running.code(), 75);
    assert!(!is_running(left));
}

#[test]
fn i13_what_a_command_leaves_in_its_group_ends_with_it() {
    let server = server();
    let client = client(&server);
    let mut running = Running::start(
        run(&server.url())
            .args(["k", "sh", "-c", "sleep 1000 & echo $!; exit 4"])
            .stderr(Stdio::piped()),
    );
    let left = running.process();
    let errors = running.child.stderr.take().expect("it is piped");
    assert_eq!(running.code(), 4);
    assert!(!is_running(left));
    let errors = std::io::read_to_string(errors).expect("it is text");
    let reported = format!("process {} (s", left.as_raw_pid());
    assert!(
        !cfg!(target_os = "linux") || errors.contains(&reported) && errors.contains("gets TERM"),
        "{errors}"
    );
    assert!(!is_locked(&client, "k"));
}

/// All processes are stopped and continued at the same time, as if the machine slept.
#[test]
fn i14_after_a_sleep_the_group_dies() {
    let server = server();
    let client = client(&server);
    let mut running = Running::start(
        run(&server.url())
            .args(["--ttl", "3s", "k", "sh", "-c", "echo $$; exec sleep 1000"])
            .stderr(Stdio::null()),
    );
    let command = running.process();
    let group = group_of(command);
    running.signal(Signal::STOP);
    kill_process_group(group, Signal::STOP).expect("it runs");
    assert!(eventually(LIMIT, || is_stopped(command)));
    drop(client.mutex("k").lock().expect("the server runs"));
    kill_process_group(group, Signal::CONT).expect("it is stopped");
    running.signal(Signal::CONT);
    assert_ends(command);
    assert_eq!(running.code(), 75);
}

/// The command ignores the signals that the caller ignores, as under `nohup`.
#[test]
#[cfg(target_os = "linux")]
fn an_ignored_signal_stays_ignored() {
    let server = server();
    let program = env!("CARGO_BIN_EXE_leasehold");
    let mut running = Running::start(
        Command::new("sh")
            .args([
                "-c",
                "trap '' HUP; exec \"$0\" run k -c 'echo $$; read x'",
                program,
            ])
            .env("LEASEHOLD_URL", server.url())
            .stdin(Stdio::piped()),
    );
    let shell = running.process();
    let status =
        fs::read_to_string(format!("/proc/{}/status", shell.as_raw_pid())).expect("it runs");
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .expect("the kernel tells");
    assert!(
        u64::from_str_radix(ignored.trim(), 16).expect("it is a mask") & 1 == 1,
        "{ignored}"
    );
    running.signal(Signal::HUP);
    drop(running.child.stdin.take());
    assert_eq!(running.code(), 1, "`read` has found the end of its input");
}

#[test]
fn a_redis_that_ends_ends_the_command_in_time() {
    let mut server = server();
    let journal = Journal::new();
    let mut running = Running::start(
        run(&server.url())
            .args(["--ttl", "4s", "k", "--", "sh", "-c", STUBBORN, "sh"])
            .arg(&journal.path)
            .stderr(Stdio::null()),
    );
    let shell = running.process();
    server.kill();
    assert_eq!(running.code(), 75);
    assert!(!is_running(shell));
}

/// A lost message must not change the exit code.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_standard_error_changes_no_exit_code() {
    let server = server();
    for (arguments, expected) in [
        (&["-v", "k", "-c", "exit 7"] as &[&str], 7),
        (&["k", "-c", "sleep 1000 & exit 4"], 4),
        (&["k"], 64),
    ] {
        let status = run(&server.url()).args(arguments).stderr(full()).status();
        let status = status.expect("it can be started");
        assert_eq!(status.code(), Some(expected), "{arguments:?}");
    }
}

/// The callers of programs may ignore or block signals.
#[test]
#[cfg(target_os = "linux")]
fn signals_that_the_caller_ignores_or_blocks_still_end_the_run() {
    let server = server();
    for option in ["--ignore-signal=CHLD", "--block-signal=CHLD,TERM"] {
        let mut command = Command::new("env");
        let mut running = Running::start(
            command
                .args([option, env!("CARGO_BIN_EXE_leasehold"), "run", "k", "-c"])
                .arg("trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done")
                .env("LEASEHOLD_URL", server.url()),
        );
        assert_eq!(running.line(), "ready");
        running.signal(Signal::TERM);
        let mut ended = None;
        assert!(eventually(LIMIT, || {
            ended = running.child.try_wait().expect("it is a child");
            ended.is_some()
        }));
        assert_eq!(ended.and_then(|status| status.code()), Some(3), "{option}");
    }
}

/// The lock is lost while the run waits for the name of `--once`, so the wait ends.
#[test]
fn a_command_does_not_start_without_its_lock() {
    let server = server();
    let client = client(&server);
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (begin, begun) = std::sync::mpsc::channel();
    let once = client.once("n");
    let other = thread::spawn(move || {
        let work = |_: &leasehold::MutexGuard| {
            begin.send(()).expect("the test waits");
            let _ = ended.recv();
            Err::<(), leasehold::Error>(leasehold::Client::open("").expect_err("it has no address"))
        };
        once.run(work).map(drop)
    });
    begun.recv().expect("the name is free");
    let mut command = run(&server.url());
    let mut running = Running::start(
        command
            .args(["-w", "60s", "--once", "n", "k", "echo", "started"])
            .stderr(Stdio::piped()),
    );
    assert!(eventually(LIMIT, || is_locked(&client, "k")));
    let taken = client.mutex("k").force_unlock();
    taken.expect("the server runs").expect("it is held");
    let errors = running.child.stderr.take().expect("it is piped");
    // The name has a holder until the end of this test.
    assert_eq!(running.code(), 75);
    let errors = std::io::read_to_string(errors).expect("it is text");
    assert!(errors.contains("the command was not started"), "{errors}");
    drop(end);
    let outcome = other.join().expect("it does not panic");
    outcome.expect_err("it fails");
}

/// `pkill -KILL leasehold` finds processes by their names and arguments.
#[test]
#[cfg(target_os = "linux")]
fn i9_the_keeper_has_another_name_than_leasehold() {
    let server = server();
    let mut running = Running::start(run(&server.url()).args(["k", "-c", "echo $$; sleep 1000"]));
    let keeper = group_of(running.process()).as_raw_pid();
    for file in ["comm", "cmdline"] {
        let name = fs::read_to_string(format!("/proc/{keeper}/{file}")).expect("it runs");
        assert!(name.starts_with("lock-keeper"), "{name:?}");
        assert!(!name.contains("leasehold"), "{name:?}");
    }
}

#[test]
fn i9_without_its_keeper_a_command_ends() {
    let server = server();
    let client = client(&server);
    let mut command = run(&server.url());
    let mut running = Running::start(
        command
            .args(["k", "sh", "-c", "echo $$; exec sleep 1000"])
            .stderr(Stdio::piped()),
    );
    let command = running.process();
    kill_process(group_of(command), Signal::KILL).expect("the keeper leads the group");
    let errors = running.child.stderr.take().expect("it is piped");
    assert_eq!(running.code(), 75);
    assert!(!is_running(command));
    let errors = std::io::read_to_string(errors).expect("it is text");
    assert!(errors.contains("keeper"), "{errors}");
    assert!(eventually(LIMIT, || !is_locked(&client, "k")));
}

/// The command kills its whole group, and with it the keeper.
#[test]
fn i9_a_group_that_kills_itself_has_lost_no_lock() {
    let server = server();
    let (code, _, errors) = result(run(&server.url()).args(["k", "-c", "kill -KILL 0"]));
    assert_eq!((code, &*errors), (128 + 9, ""));
}

/// `setsid` takes the command itself out of its group.
#[test]
#[cfg(target_os = "linux")]
fn i13_a_command_that_left_its_group_gets_signals() {
    let server = server();
    let client = client(&server);
    let script = "trap 'echo term; exit 3' TERM; echo $$; while :; do sleep 0.05; done";
    let start = || {
        let mut command = run(&server.url());
        let command = command.args(["--ttl", "80s", "--grace", "30s", "k", "--", "setsid"]);
        let mut running = Running::start(command.args(["sh", "-c", script]));
        let shell = running.process();
        assert_eq!(group_of(shell), shell, "it has left");
        running
    };
    let mut running = start();
    running.signal(Signal::TERM);
    assert_eq!((&*running.line(), running.code()), ("term", 3));
    let mut running = start();
    let taken = client.mutex("k").force_unlock();
    taken.expect("the server runs").expect("it is held");
    assert_eq!((&*running.line(), running.code()), ("term", 75));
}
