//! Servers are really started, stopped, killed and restarted, and none outlives its program.

#![allow(clippy::unwrap_used)]

#[path = "../../../tests/it/child.rs"]
mod child;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{
    Install, OwnClock, Reply, Server, eventually, find_server, provide_server,
};
use rustix::process::{Pid, test_kill_process};

use child::{Child, Parent};

/// The limit for what takes milliseconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(20);
/// The limit for starting a process on a busy machine.
const START: Duration = Duration::from_secs(120);

fn exists(pid: u32) -> bool {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    test_kill_process(pid).is_ok()
}

fn text(server: &Server, args: &[&str]) -> String {
    server.command(args).unwrap().to_string()
}

/// The directory of a server, as the server itself reports it.
fn directory(server: &Server) -> PathBuf {
    let Reply::Array(pair) = server.command(&["CONFIG", "GET", "dir"]).unwrap() else {
        panic!("CONFIG GET answers with a pair");
    };
    PathBuf::from(pair[1].as_text().unwrap())
}

#[test]
fn a_started_server_answers_and_leaves_nothing_behind() {
    let server = Server::start().unwrap();
    assert_eq!(server.url(), format!("redis://127.0.0.1:{}", server.port()));
    assert_eq!(server.unix_url(), None);
    assert_eq!(text(&server, &["PING"]), "PONG");
    assert_eq!(text(&server, &["SET", "k", "a \r\n b"]), "OK");
    assert_eq!(
        server.command(&["GET", "k"]).unwrap().as_text(),
        Some("a \r\n b")
    );
    assert_eq!(server.command(&["INCR", "n"]).unwrap().as_int(), Some(1));
    assert_eq!(server.command(&["GET", "none"]).unwrap(), Reply::Nil);
    assert!(matches!(
        server.command(&["NONSENSE"]).unwrap(),
        Reply::Error(_)
    ));
    let (pid, directory) = (server.pid(), directory(&server));
    assert!(exists(pid) && directory.is_dir());
    drop(server);
    assert!(!exists(pid) && !directory.exists());
}

#[test]
fn nothing_is_persisted_and_the_port_stays() {
    let mut server = Server::start().unwrap();
    let (port, pid) = (server.port(), server.pid());
    text(&server, &["SET", "k", "v"]);
    server.kill();
    assert!(!exists(pid));
    let error = server.command(&["PING"]).unwrap_err().to_string();
    assert!(error.contains(&port.to_string()), "{error}");
    server.kill();
    server.restart().unwrap();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    assert_eq!(server.command(&["GET", "k"]).unwrap(), Reply::Nil);
    let second = server.pid();
    server.restart().unwrap();
    assert!(!exists(second) && exists(server.pid()));
}

#[test]
fn a_stopped_server_answers_after_it_is_resumed() {
    let server = Server::start().unwrap();
    server.stop();
    thread::scope(|scope| {
        let late = scope.spawn(|| server.command(&["INCR", "n"]));
        // No event shows that a stopped process stays silent, so the test sleeps.
        thread::sleep(Duration::from_millis(50));
        assert!(!late.is_finished());
        server.resume();
        assert_eq!(late.join().unwrap().unwrap(), Reply::Int(1));
    });
}

#[test]
fn a_stopped_server_can_be_killed_restarted_and_dropped() {
    let mut server = Server::start().unwrap();
    server.stop();
    let first = server.pid();
    server.restart().unwrap();
    assert!(!exists(first));
    server.stop();
    let second = server.pid();
    drop(server);
    assert!(!exists(second));
}

#[test]
fn a_server_that_ends_by_itself_can_be_restarted() {
    let mut server = Server::start().unwrap();
    let pid = server.pid();
    let _ = server.command(&["SHUTDOWN", "NOSAVE"]);
    assert!(eventually(LIMIT, || !exists(pid)));
    server.restart().unwrap();
    assert_eq!(text(&server, &["PING"]), "PONG");
}

#[test]
fn password_directives_and_socket_are_applied() {
    let password = "p \"ss\\@:/%é";
    let server = Server::builder()
        .password(password)
        .arg("maxmemory", "2mb")
        .arg("client-output-buffer-limit", "pubsub 1mb 1mb 1")
        .unix_socket()
        .start()
        .unwrap();
    let login = "p%20%22ss%5C%40%3A%2F%25%C3%A9";
    assert_eq!(
        server.url(),
        format!("redis://:{login}@127.0.0.1:{}", server.port())
    );
    let limit = server.command(&["CONFIG", "GET", "maxmemory"]).unwrap();
    assert_eq!(limit.to_string(), "[maxmemory, 2097152]");

    let url = server.unix_url().unwrap();
    let path = url
        .strip_prefix("unix://")
        .unwrap()
        .strip_suffix(&format!("?pass={login}"));
    let mut stream = UnixStream::connect(Path::new(path.unwrap())).unwrap();
    stream.write_all(b"PING\r\n").unwrap();
    let mut answer = [0; 7];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"-NOAUTH", "the password is required");
}

#[test]
fn a_wrong_directive_fails_with_the_servers_message() {
    let start = Instant::now();
    let error = Server::builder()
        .arg("no-such-directive", "1")
        .start()
        .err()
        .unwrap();
    assert!(error.to_string().contains("no-such-directive"), "{error}");
    assert!(start.elapsed() < LIMIT);
    let error = Server::builder()
        .arg("maxmemory", "1\nport 1")
        .start()
        .err()
        .unwrap();
    assert!(error.to_string().contains("line feed"), "{error}");
}

#[test]
fn many_start_at_the_same_time() {
    let ports: Vec<u16> = thread::scope(|scope| {
        let starts: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| Server::start().unwrap()))
            .collect();
        let servers: Vec<_> = starts
            .into_iter()
            .map(|start| start.join().unwrap())
            .collect();
        servers.iter().map(Server::port).collect()
    });
    let mut distinct = ports.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), ports.len());
}

/// Runs the bodies of processes that tests start; see `child`.
#[test]
fn a_child_process_runs_the_named_body() {
    let bodies = child::bodies![
        child::echo,
        hold_servers,
        lack_a_server,
        start_what_is_no_server,
    ];
    if !child::run_body(&bodies) {
        let child = Child::start(child::echo, "redis://echo");
        assert_eq!(child.receive::<String>(START), "redis://echo");
        child.finish(START);
    }
}

fn lack_a_server(parent: &Parent) {
    assert_eq!(find_server(), None);
    parent.tell(Server::start().err().unwrap().to_string());
    parent.tell(provide_server(Install::Forbidden).unwrap_err().to_string());
}

#[test]
fn a_missing_server_is_an_error_with_advice() {
    let lines = |variable: &str, value: &str| -> [String; 2] {
        let child = child_with(variable, value, lack_a_server);
        let lines = [(); 2].map(|()| child.receive(START));
        child.finish(START);
        lines
    };
    for line in lines("LEASEHOLD_REDIS_SERVER", "/nowhere/redis-server") {
        assert!(
            line.contains("LEASEHOLD_REDIS_SERVER is set to \"/nowhere/redis-server\""),
            "{line}"
        );
    }
    for line in lines("PATH", "/nowhere") {
        assert!(line.contains("Install it with `"), "{line}");
    }
}

fn start_what_is_no_server(parent: &Parent) {
    parent.tell(Server::start().err().unwrap().to_string());
}

#[test]
fn a_program_that_is_no_server_is_reported() {
    let child = child_with(
        "LEASEHOLD_REDIS_SERVER",
        "/bin/cat",
        start_what_is_no_server,
    );
    let text: String = child.receive(START);
    assert!(text.contains("/bin/cat on port"), "{text}");
    child.finish(START);
}

/// Starts `body` with this environment variable instead of the variable that names the server.
fn child_with<F: Fn(&Parent)>(variable: &str, value: &str, body: F) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env_remove("LEASEHOLD_REDIS_SERVER")
        .env(variable, value);
    Child::start_by(command, body, "")
}

/// Starts two servers, stops one, and waits to be killed.
fn hold_servers(parent: &Parent) {
    let (running, stopped) = (Server::start().unwrap(), Server::start().unwrap());
    let directories = [directory(&running), directory(&stopped)];
    stopped.stop();
    for (server, directory) in [&running, &stopped].into_iter().zip(directories) {
        parent.tell((server.pid(), directory));
    }
    parent.wait_for_end();
}

/// Sends `signal` to a process that holds servers; returns their ids and directories.
fn servers_of_a_process_ended_by(signal: rustix::process::Signal) -> Vec<(u32, PathBuf)> {
    // A shell makes its background processes ignore Ctrl-C, and their programs inherit that.
    let mut command = Command::new("env");
    command
        .arg("--default-signal=INT")
        .arg(std::env::current_exe().unwrap());
    let mut child = Child::start_by(command, hold_servers, "");
    let held: [(u32, PathBuf); 2] = [(); 2].map(|()| child.receive(START));
    assert!(
        held.iter()
            .all(|(pid, directory)| exists(*pid) && directory.is_dir())
    );
    child.signal(signal);
    assert_eq!(child.status(START).signal(), Some(signal.as_raw()));
    held.into()
}

#[test]
fn no_server_outlives_a_program_killed_by_sigkill() {
    for (pid, directory) in servers_of_a_process_ended_by(rustix::process::Signal::KILL) {
        assert!(
            eventually(LIMIT, || !exists(pid)),
            "server {pid} is still there"
        );
        assert!(
            eventually(LIMIT, || !directory.exists()),
            "{directory:?} is still there"
        );
    }
}

#[test]
fn no_server_outlives_a_program_ended_by_ctrl_c() {
    for (pid, directory) in servers_of_a_process_ended_by(rustix::process::Signal::INT) {
        assert!(
            eventually(LIMIT, || !exists(pid)),
            "server {pid} is still there"
        );
        assert!(
            eventually(LIMIT, || !directory.exists()),
            "{directory:?} is still there"
        );
    }
}

/// The time of the server, in µs since 1970.
fn micros(server: &Server) -> i64 {
    let Reply::Array(time) = server.command(&["TIME"]).unwrap() else {
        panic!("TIME answers with a pair");
    };
    time[0].as_int().unwrap() * 1_000_000 + time[1].as_int().unwrap()
}

#[test]
fn a_server_with_a_clock_of_its_own_follows_its_steps() {
    let Some(clock) = OwnClock::find() else {
        eprintln!("the package faketime is not installed");
        return;
    };
    let mut server = Server::builder().own_clock(&clock).start().unwrap();
    let other = Server::start().unwrap();
    let hour = 3_600_000_000;
    for offset in [0, hour, -hour] {
        server.set_clock_offset(offset).unwrap();
        for _ in 0..2 {
            let (before, own, after) = (micros(&other), micros(&server), micros(&other));
            assert!(
                (before + offset..=after + offset).contains(&own),
                "{offset}"
            );
            server.restart().unwrap();
        }
    }
    // A step expires keys.
    assert_eq!(text(&server, &["SET", "k", "v", "EX", "3000"]), "OK");
    server.set_clock_offset(0).unwrap();
    assert_eq!(text(&server, &["GET", "k"]), "(nil)");
}
