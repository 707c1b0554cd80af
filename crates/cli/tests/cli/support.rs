//! Starts the program, and watches the processes that it starts.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use leasehold_testbed::{Server, eventually};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT};
use signal_hook::flag;
use tempfile::TempDir;

/// The time limit for events that take no time on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(30);
/// The value of `LEASEHOLD_CONNECT_TIMEOUT`. On a busy machine, a new server can take longer than the default.
pub const CONNECT_TIMEOUT: &str = "30s";

/// The program, without settings from the environment of the tests.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("LEASEHOLD_")) {
        command.env_remove(name);
    }
    command.env("LEASEHOLD_CONNECT_TIMEOUT", CONNECT_TIMEOUT);
    command.stdin(Stdio::null());
    command
}

/// The program with this address of Redis.
pub fn at(url: &str) -> Command {
    let mut command = program();
    command.env("LEASEHOLD_URL", url);
    command
}

/// `leasehold run` with this address of Redis.
pub fn run(url: &str) -> Command {
    let mut command = at(url);
    command.arg("run");
    command
}

/// A process passes the signals that it ignores to its children, and a shell cannot trap them. A shell without job
/// control starts background processes with some of them, so that the tests may ignore them, too. Now this process handles
/// them, as by default, and its children do not ignore them.
fn notice_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [SIGHUP, SIGINT, SIGQUIT] {
            let always = Arc::new(AtomicBool::new(true));
            flag::register_conditional_default(signal, always).expect("the signal exists");
        }
    });
}

/// Runs the command to its end.
pub fn output(command: &mut Command) -> Output {
    command.output().expect("the program can be started")
}

/// The exit code of the command, and what it has written to standard output and standard error.
pub fn result(command: &mut Command) -> (i32, String, String) {
    let output = output(command);
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let code = output.status.code().expect("it ends by itself");
    (code, text(output.stdout), text(output.stderr))
}

pub fn server() -> Server {
    Server::start().expect("a server can be started")
}

/// Makes a user that has all rights except for one command. Returns the address of the server with this user.
pub fn url_without(server: &Server, command: &str) -> String {
    let denied = format!("-{command}");
    let rule = [
        "ACL", "SETUSER", "u", "on", ">s3cret", "~*", "&*", "+@all", &denied,
    ];
    server.command(&rule).expect("the server runs");
    server.url().replace("redis://", "redis://u:s3cret@")
}

pub fn client(server: &Server) -> Client {
    let builder = Client::builder(server.url()).connect_timeout(LIMIT);
    builder.build().expect("the server runs")
}

/// Whether the lock has a holder.
pub fn is_locked(client: &Client, key: &str) -> bool {
    client.mutex(key).is_locked().expect("the server runs")
}

/// The text that a program writes. A thread reads it, so that a wait for a part of it has a limit.
pub struct Text {
    parts: Receiver<Vec<u8>>,
    /// The bytes that were read, but not returned yet.
    rest: Vec<u8>,
}

impl Text {
    pub fn of(mut output: impl Read + Send + 'static) -> Self {
        let (sender, parts) = unbounded();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut bytes)
                && sender.send(bytes[..length].to_vec()).is_ok()
            {}
        });
        Self {
            parts,
            rest: Vec::new(),
        }
    }

    /// Waits until the program has written `expected`. Returns what it has written before.
    pub fn until(&mut self, expected: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let text = String::from_utf8_lossy(&self.rest).into_owned();
            if let Some((before, rest)) = text.split_once(expected) {
                self.rest = rest.as_bytes().to_vec();
                return before.to_owned();
            }
            match self.parts.recv_deadline(end) {
                Ok(part) => self.rest.extend(part),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the program has ended without {expected:?}: {text:?}")
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no {expected:?} in {LIMIT:?}: {text:?}\n{}", processes())
                }
            }
        }
    }
}

/// All processes, for the message of a test that has waited for one of them in vain.
fn processes() -> String {
    let columns = "pid,ppid,pgid,sid,tpgid,stat,wchan:20,args";
    let list = Command::new("ps").args(["axo", columns]).output();
    list.map_or_else(
        |error| format!("ps: {error}"),
        |list| String::from_utf8_lossy(&list.stdout).into_owned(),
    )
}

/// A running program. Its drop kills the program, whose keeper then kills the rest.
pub struct Running {
    pub child: Child,
    output: Text,
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        notice_signals();
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started");
        let output = Text::of(child.stdout.take().expect("it is piped"));
        Self { child, output }
    }

    /// The next line of standard output, without its end.
    pub fn line(&mut self) -> String {
        self.output.until("\n").trim_end().to_owned()
    }

    /// The next line: the id of a process of the command.
    pub fn process(&mut self) -> Pid {
        let line = self.line();
        let id = line.parse().ok().and_then(Pid::from_raw);
        id.unwrap_or_else(|| panic!("{line:?} is no id of a process"))
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the program runs");
    }

    /// Waits until the program has ended, and returns its exit code.
    pub fn code(&mut self) -> i32 {
        let mut status = None;
        let has_ended = eventually(LIMIT, || {
            status = self.child.try_wait().expect("it is a child");
            status.is_some()
        });
        assert!(has_ended, "the program runs on:\n{}", processes());
        let code = status.and_then(|status| status.code());
        code.expect("it ends by itself")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the process runs. A zombie (a process that has ended, and whose status was not collected) does not.
pub fn is_running(id: Pid) -> bool {
    match fs::read_to_string(format!("/proc/{}/stat", id.as_raw_pid())) {
        Ok(stat) => !matches!(state(&stat), 'Z' | 'X'),
        Err(_) if cfg!(target_os = "linux") => false,
        Err(_) => test_kill_process(id).is_ok(),
    }
}

/// Whether the process was stopped by a signal, or waits for a child that was stopped before its `exec`.
pub fn is_stopped(id: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", id.as_raw_pid()));
    stat.is_ok_and(|stat| matches!(state(&stat), 'T' | 'D'))
}

/// The state of a process: the letter after the name in `/proc/<id>/stat`.
fn state(stat: &str) -> char {
    let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    rest.chars().next().expect("the kernel writes a state")
}

/// Fails unless the process ends soon.
pub fn assert_ends(id: Pid) {
    assert!(
        eventually(LIMIT, || !is_running(id)),
        "process {id:?} runs on"
    );
}

/// A file that cannot be written because its disk is full.
#[cfg(target_os = "linux")]
pub fn full() -> fs::File {
    fs::File::create("/dev/full").expect("the system has it")
}

/// A file that commands append to.
pub struct Journal {
    _folder: TempDir,
    pub path: PathBuf,
}

impl Journal {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("the system has a folder for temporary files");
        let path = folder.path().join("journal");
        fs::write(&path, "").expect("it can be written");
        Self {
            _folder: folder,
            path,
        }
    }

    pub fn length(&self) -> u64 {
        fs::metadata(&self.path).expect("it is there").len()
    }

    pub fn wait_until_longer_than(&self, length: u64) {
        assert!(
            eventually(LIMIT, || self.length() > length),
            "nobody writes the journal"
        );
    }
}

impl AsRef<Path> for Journal {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}
