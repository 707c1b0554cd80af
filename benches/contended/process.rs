//! This program again, in one of its hidden roles: lines in, lines out. Knows nothing of locks.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// How long a process may say nothing, beyond what it was told to take.
const SILENCE: Duration = Duration::from_secs(60);

/// A process in a role. Dropped, it is killed.
pub struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    /// Starts a process in `role`, and waits until it says that it is ready.
    pub fn start(role: &[&str]) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().expect("it was just piped");
        let lines = lines_of(output);
        let process = Self { child, lines };
        match process.told()?.as_str() {
            "ready" => Ok(process),
            other => Err(format!("a process in role {role:?} said {other:?} first").into()),
        }
    }

    pub fn tell(&mut self, line: &str) -> io::Result<()> {
        let input = self.child.stdin.as_mut().expect("it stays open");
        input.write_all(format!("{line}\n").as_bytes())
    }

    /// The next line that it says.
    pub fn told(&self) -> Result<String, Box<dyn Error>> {
        let line = self.lines.recv_timeout(SILENCE);
        line.map_err(|_| "a process has ended, or said nothing for a minute".into())
    }

    /// Ends it with SIGKILL; returns once it is gone.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails when it has ended, which is as well.
        let _ = self.kill();
    }
}

/// The pipe is emptied at once, however long the lines.
fn lines_of(output: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

/// In a role: tells the parent that all is set up.
pub fn ready() {
    println!("ready");
}

/// In a role: the parent's next line; nothing once the parent has gone.
pub fn next_line() -> io::Result<Option<String>> {
    let mut line = String::new();
    let length = io::stdin().lock().read_line(&mut line)?;
    Ok((length > 0).then(|| line.trim_end().to_owned()))
}
