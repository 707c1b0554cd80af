//! A load process as its parent sees it: rounds in, tallies out. In a process group of its own: Ctrl-C is
//! for the parent. Dropped, it is killed.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use crossbeam_channel::{Receiver, unbounded};
use leasehold_load::{Assignment, Round, Tally};
use serde::Serialize;

use crate::stop::Stop;

/// How long it may be silent, beyond what it was told to take.
const SILENCE: Duration = Duration::from_secs(60);

pub struct Process {
    child: Child,
    input: ChildStdin,
    tallies: Receiver<anyhow::Result<Tally>>,
}

impl Process {
    /// Starts it; its first tally, an empty one, says that it has connected.
    pub fn start(command: &mut Command, assignment: &Assignment) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let input = child.stdin.take().expect("its input is piped");
        let tallies = listen(child.stdout.take().expect("its output is piped"));
        let mut process = Self {
            child,
            input,
            tallies,
        };
        process.write(assignment)?;
        Ok(process)
    }

    pub fn begin(&mut self, round: &Round) -> anyhow::Result<()> {
        self.write(round)
    }

    pub fn tally(&self, stop: &Stop) -> anyhow::Result<Tally> {
        let tally = stop.receive(&self.tallies, SILENCE)?;
        tally.context("a load process has hung")?
    }

    fn write(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_string(value)?;
        line.push('\n');
        let written = self.input.write_all(line.as_bytes());
        // Why it ended is in what it said last.
        written.map_err(|error| match self.tallies.recv_timeout(SILENCE) {
            Ok(Err(reason)) => reason,
            _ => error.into(),
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(output: ChildStdout) -> Receiver<anyhow::Result<Tally>> {
    let (sender, tallies) = unbounded();
    thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let tally = line.map_err(anyhow::Error::from).and_then(|line| {
                let said: Result<Tally, String> = serde_json::from_str(&line)?;
                said.map_err(|why| anyhow!("a load process failed: {why}"))
            });
            if sender.send(tally).is_err() {
                return;
            }
        }
        // The parent may have stopped listening: then nobody misses this.
        let _ = sender.send(Err(anyhow!("a load process has ended by itself")));
    });
    tallies
}
