//! `leasehold watch` and `leasehold run` on a terminal, of which the program `script` is the other end.

use std::io::Write as _;
use std::process::{Child, ChildStdin, Command, Stdio};

use leasehold_testbed::{Server, eventually};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{CONNECT_TIMEOUT, LIMIT, Text, client, is_locked, is_stopped, server};

const OPEN: &str = "\x1b[?1049h";
const CLOSE: &str = "\x1b[?1049l";
/// A function of the shell that writes the settings of the terminal, as a line.
const LOOK: &str = r#"look() { stty -a | tail -n +2 | tr "\n" " "; echo; }; "#;
const SHOW_CURSOR: &str = "\x1b[?25h";

/// Runs a program in a PID namespace of its own, in which the groups and the session of its caller have no numbers.
const IN_NAMESPACE: &str = "unshare --user --map-root-user --pid --fork --kill-child --mount-proc";

/// A terminal, and the shell script that runs on it.
struct Terminal {
    script: Child,
    keys: ChildStdin,
    /// The output of the programs on the terminal.
    text: Text,
}

impl Terminal {
    /// Runs a shell script. The program `leasehold` is `$0`.
    fn start(server: &Server, script: &str) -> Self {
        Self::start_by("", server, script)
    }

    /// Runs a shell script. The words of `starter`, if there are any, are a command that starts the terminal.
    fn start_by(starter: &str, server: &Server, script: &str) -> Self {
        // By default, Ctrl-C and Ctrl-Z also discard the output that this process has not read yet.
        let script = format!("stty noflsh; {LOOK}{script}").replace('\'', r"'\''");
        let shell = format!("sh -c '{script}' '{}'", env!("CARGO_BIN_EXE_leasehold"));
        let mut words: Vec<&str> = starter.split_whitespace().collect();
        words.extend(["script", "-qec", &shell, "/dev/null"]);
        let mut script = Command::new(words[0])
            .args(&words[1..])
            .env("LEASEHOLD_URL", server.url())
            .env("LEASEHOLD_CONNECT_TIMEOUT", CONNECT_TIMEOUT)
            .env("SHELL", "/bin/sh")
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be started");
        Self {
            keys: script.stdin.take().expect("it is piped"),
            text: Text::of(script.stdout.take().expect("it is piped")),
            script,
        }
    }

    /// Waits until a program has written this text. Returns what it has written before.
    fn wait_for(&mut self, expected: &str) -> String {
        self.text.until(expected)
    }

    /// The next line.
    fn line(&mut self) -> String {
        self.wait_for("\r\n")
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("it is open");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn watch_leaves_the_terminal_as_it_was() {
    let server = server();
    let client = client(&server);
    let _guard = client.mutex("job:a").lock().expect("it is free");
    let script = "stty cols 100 rows 20; look; \
                  sh -c 'echo $$; exec \"$0\" watch' \"$0\"; echo code $?; look";
    for end in ["q", "\x03", "TERM"] {
        let mut terminal = Terminal::start(&server, script);
        let settings = terminal.line();
        let id = terminal.line().parse().ok().and_then(Pid::from_raw);
        terminal.wait_for(OPEN);
        terminal.wait_for("job:a");
        // The shell has no job control, so Ctrl-Z has no effect.
        terminal.press("\x1a");
        match end {
            "TERM" => kill_process(id.expect("it is an id"), Signal::TERM).expect("it runs"),
            key => terminal.press(key),
        }
        terminal.wait_for(CLOSE);
        let rest = terminal.wait_for("code 0\r\n");
        assert!(rest.contains(SHOW_CURSOR), "{end}: {rest:?}");
        assert_eq!(terminal.line(), settings, "{end}");
    }
}

#[test]
fn watch_draws_again_after_a_new_size_and_after_a_stop() {
    let server = server();
    let client = client(&server);
    let _guard = client.mutex("job:a").lock().expect("it is free");
    // In a shell with job control, Ctrl-Z stops the program, and `fg` continues it.
    let script = "stty cols 100 rows 20; tty; look; set -m; \
                  sh -c 'echo $$; exec \"$0\" watch' \"$0\"; look; read x; fg >/dev/null; \
                  echo code $?; look";
    let mut terminal = Terminal::start(&server, script);
    let (name, settings) = (terminal.line(), terminal.line());
    let id = terminal.line().parse().ok().and_then(Pid::from_raw);
    terminal.wait_for("job:a");
    let resized = Command::new("stty")
        .args(["-F", &name, "cols", "60", "rows", "10"])
        .status();
    assert!(resized.expect("it can be started").success());
    terminal.wait_for("job:a");
    terminal.press("\x1a");
    terminal.wait_for(CLOSE);
    assert!(terminal.wait_for(&settings).contains(SHOW_CURSOR));
    let id = id.expect("it is an id");
    assert!(eventually(LIMIT, || is_stopped(id)));
    terminal.press("\n");
    terminal.wait_for(OPEN);
    terminal.wait_for("job:a");
    terminal.press("q");
    terminal.wait_for("code 0\r\n");
    assert_eq!(terminal.line(), settings);
}

/// A command that reads a line from the terminal.
const READER: &str = "sh -c 'echo ready; read x; echo \"got $x\"'";

/// Ctrl-Z reaches the inner command. Each `leasehold` then stops, from the inside to the outside.
#[test]
fn ctrl_z_stops_nested_runs() {
    let server = server();
    let script = format!(
        "set -m; \"$0\" run a -- \"$0\" run b -- {READER}; echo stopped; read y; fg >/dev/null; \
         echo code $?"
    );
    let mut terminal = Terminal::start(&server, &script);
    terminal.wait_for("ready");
    terminal.press("\x1a");
    terminal.wait_for("stopped");
    terminal.press("\n");
    terminal.press("word\n");
    terminal.wait_for("got word");
    terminal.wait_for("code 0");
}

/// The command reads from the terminal, and Ctrl-C ends it. The script that has started `leasehold` gets the signal, too.
#[test]
fn i7_the_command_gets_the_terminal() {
    let server = server();
    let script = "trap 'echo interrupted' INT; \
                  \"$0\" run k -- sh -c 'echo ready; read x; echo \"got $x\"; exec sleep 1000'; \
                  echo code $?";
    let mut terminal = Terminal::start(&server, script);
    terminal.wait_for("ready");
    terminal.press("word\n");
    terminal.wait_for("got word");
    terminal.press("\x03");
    terminal.wait_for("interrupted");
    terminal.wait_for("code 130");
}

/// Ctrl-Z stops no program that no shell could continue.
fn assert_ctrl_z_has_no_effect(starter: &str) {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().expect("it is free");
    let script = format!("echo begin; \"$0\" run k {READER}");
    let mut terminal = Terminal::start_by(starter, &server, &script);
    terminal.wait_for("begin");
    let queue = || client.mutex("k").inspect().expect("the server runs");
    assert!(eventually(LIMIT, || queue()
        .is_some_and(|lock| lock.clients_waiting() == 1)));
    // The terminal writes these characters after it has sent the signal.
    terminal.press("\x1a");
    terminal.wait_for("^Z");
    drop(guard);
    terminal.wait_for("ready");
    terminal.press("\x1a");
    terminal.wait_for("^Z");
    terminal.press("word\n");
    terminal.wait_for("got word");
}

#[test]
fn without_job_control_ctrl_z_has_no_effect() {
    assert_ctrl_z_has_no_effect("");
}

/// Whether this user may make a PID namespace.
fn can_make_namespace() -> bool {
    let mut words = IN_NAMESPACE.split_whitespace().chain(["true"]);
    let mut trial = Command::new(words.next().expect("the name of the program"));
    let may = trial
        .args(words)
        .status()
        .is_ok_and(|status| status.success());
    if !may {
        println!("skipped: this user may not make a PID namespace");
    }
    may
}

#[test]
fn without_job_control_ctrl_z_has_no_effect_in_a_namespace() {
    if can_make_namespace() {
        assert_ctrl_z_has_no_effect(IN_NAMESPACE);
    }
}

/// The script ends with the message that the command gets this signal, and the lock is released.
#[track_caller]
fn assert_hung_up(script: &str, signal: &str) {
    let server = server();
    let mut terminal = Terminal::start(&server, script);
    terminal.wait_for(&format!("the command gets {signal}\r\n"));
    let client = client(&server);
    assert!(eventually(LIMIT, || !is_locked(&client, "k")), "{signal}");
}

/// The shell that has started the job is gone, so nothing could give the terminal to the command.
#[test]
fn a_command_that_can_never_get_the_terminal_ends() {
    for (trap, signal) in [(":", "HUP"), ("trap '' HUP", "KILL")] {
        for (input, of_command) in [("</dev/tty", ""), ("</dev/null", "</dev/tty")] {
            let script = format!(
                "sh -c 'set -m; \"$0\" run k \"$@\" {input} &' \"$0\" \
                 sh -c \"{trap}; exec {of_command}; read x; read x; sleep 1000\"; exec sleep 1000"
            );
            assert_hung_up(&script, signal);
        }
    }
}

/// A program cannot give the terminal back to a group that has no number.
#[test]
fn a_command_gets_no_terminal_from_another_namespace() {
    if can_make_namespace() {
        for first in ["", "sh -c '\"$@\"; :' sh"] {
            let script = format!("{IN_NAMESPACE} {first} \"$0\" run k {READER}");
            assert_hung_up(&script, "HUP");
        }
    }
}

/// The pager of `leasehold run k git log | less` reads from the terminal, too.
#[test]
fn another_program_of_a_pipeline_keeps_the_terminal() {
    let server = server();
    let pager = "sh -c 'read line; read word </dev/tty; echo \"$line $word\"'";
    let script = format!("set -m; \"$0\" run k -- sh -c 'echo out; exec sleep 1000' | {pager}");
    let mut terminal = Terminal::start(&server, &script);
    let client = client(&server);
    let is_held = || client.mutex("k").is_locked().expect("the server runs");
    assert!(eventually(LIMIT, is_held));
    terminal.press("word\n");
    terminal.wait_for("out word");
}

/// An editor that is killed leaves such settings behind.
#[test]
fn a_loss_restores_the_settings_of_the_terminal() {
    let server = server();
    let client = client(&server);
    let script = "look; \"$0\" run k -- sh -c 'stty raw -echo; echo ready; exec sleep 1000'; \
                  echo code $?; look";
    let mut terminal = Terminal::start(&server, script);
    let settings = terminal.line();
    terminal.wait_for("ready");
    let taken = client.mutex("k").force_unlock();
    taken.expect("the server runs").expect("it is held");
    terminal.wait_for("code 75\r\n");
    assert_eq!(terminal.line(), settings);
}
