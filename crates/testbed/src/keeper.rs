//! The process that owns a server and never outlives its program: it ends the server on request, and when the program
//! that started it ends in any way.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The keeper. `$1` is the server's directory, and the other arguments are its command line.
///
/// A line on stdin ends the server. If stdin ends without a line, the program was killed, so the script also removes
/// the directory. The keeper ends when the server does.
///
/// The keeper ignores HUP. If the server is stopped (SIGSTOP) and the program dies, the kernel sends HUP to their
/// process group.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT
directory=$1
shift
orphaned=
exec 3<&0
"$@" </dev/null >"$directory/server.log" 2>&1 3<&- &
server=$!
echo "$server"
{
    read -r line || orphaned=yes
    trap '' TERM
    kill -KILL "$server"
    [ -z "$orphaned" ] || rm -rf "$directory"
} <&3 >/dev/null &
watch=$!
wait "$server"
kill -TERM "$watch"
wait "$watch"
"#;

/// Locked while a keeper starts. On macOS, a new pipe is not close-on-exec at first. So two keepers that start at the
/// same time would inherit each other's stdin, and would not notice the end of the program.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

pub(crate) struct Keeper {
    child: Child,
    stdin: Option<ChildStdin>,
    server_pid: u32,
}

impl Keeper {
    /// Starts `command`, a program and its arguments. Its output goes to `server.log` in `directory`.
    pub(crate) fn start(directory: &Path, command: &[&OsStr]) -> io::Result<Keeper> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = Command::new("/bin/sh")
            .arg("-c")
            .arg(SCRIPT)
            .arg("leasehold-keeper")
            .arg(directory)
            .args(command)
            .current_dir("/")
            // In a process group of its own, the keeper does not get a terminal's Ctrl-C. The program ends its servers
            // itself.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        drop(turn);
        let stdin = child.stdin.take();
        let mut keeper = Keeper {
            child,
            stdin,
            server_pid: 0,
        };
        keeper.server_pid = keeper.read_pid()?;
        Ok(keeper)
    }

    fn read_pid(&mut self) -> io::Result<u32> {
        let mut line = String::new();
        if let Some(stdout) = self.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let complaint =
            || io::Error::other(format!("/bin/sh wrote {line:?} instead of a process id"));
        line.trim().parse().map_err(|_| complaint())
    }

    pub(crate) fn server_pid(&self) -> u32 {
        self.server_pid
    }

    /// Whether the server has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Keeper {
    /// Ends the server by SIGKILL and waits for its end.
    fn drop(&mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // Fails if the server has ended by itself, and the keeper with it.
            let _ = stdin.write_all(b"end\n");
        }
        let _ = self.child.wait();
    }
}
