//! Scene five: a shell command runs under a lock by `leasehold run`. When the lock is taken away, `leasehold` ends all
//! processes of the command.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use crossbeam_channel::{Receiver, unbounded};
use leasehold_tools::cargo;
use leasehold_tools::environment::Namespace;
use leasehold_tools::stop::Stop;

use crate::{STEP_LIMIT, TTL};

const LOCK: &str = "shell";
/// Two processes that work until they are ended.
const SCRIPT: &str = "echo $LEASEHOLD_TOKEN; sleep 1000 & wait";
/// The exit code of `leasehold run` after a loss.
const LOST: i32 = 75;

pub fn show(namespace: &Namespace, stop: &Stop) -> anyhow::Result<()> {
    let program = cargo::command_line(stop)?;
    println!("\n5. leasehold run {LOCK} -c '{SCRIPT}'\n   The lock is taken away from it.");
    let mut command = Command::new(program);
    command
        .args(["run", "--prefix", &namespace.lock_prefix()])
        .args(["--ttl", &format!("{}ms", TTL.as_millis())])
        .args([LOCK, "-c", SCRIPT])
        // Every user of the machine can read arguments, and the URL may contain a password.
        .env("LEASEHOLD_URL", namespace.url());
    let mut run = Run::start(&mut command)?;
    let token = match stop.receive(&run.lines, STEP_LIMIT)? {
        Some(line) => line?,
        None => bail!("the command has not started: {}", run.kill()?),
    };
    let token: u64 = token.parse().context("the command has no fencing token")?;

    let client = namespace.client()?;
    let start = Instant::now();
    let taken = client.mutex(LOCK).force_unlock()?;
    ensure!(taken.is_some(), "the lock was free while its command ran");
    // `leasehold` and both processes have this output open, so it ends when all of them have ended.
    if let Some(line) = stop.receive(&run.lines, STEP_LIMIT)? {
        bail!("the command wrote {:?} after the loss", line?);
    }
    let took = start.elapsed();
    ensure!(
        took < STEP_LIMIT,
        "a process of the command still runs {took:.2?} after the loss"
    );
    let status = run.child.wait()?;
    ensure!(
        status.code() == Some(LOST),
        "leasehold ended with {status}, not with the exit code {LOST}"
    );
    println!(
        "   The command ran under fencing token {token}. All its processes had ended {took:.2?} after the loss.\n   \
         The exit code of leasehold is {LOST}: the lock was lost."
    );
    Ok(())
}

/// A running `leasehold run`. Its drop kills it, and the command ends with it.
struct Run {
    child: Child,
    /// The lines of its standard output.
    lines: Receiver<io::Result<String>>,
}

impl Run {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // The demo gets Ctrl-C, and ends its processes itself.
            .process_group(0)
            .spawn()
            .context("cannot start leasehold")?;
        let output = child.stdout.take().expect("its output is piped");
        let (sender, lines) = unbounded();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Ends the program. Returns its messages.
    fn kill(&mut self) -> io::Result<String> {
        self.child.kill()?;
        let mut text = String::new();
        let errors = self.child.stderr.take();
        errors.expect("it is piped").read_to_string(&mut text)?;
        Ok(text)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Both fail only for a process that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
