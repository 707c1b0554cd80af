//! The worker processes: started in steps, killed and replaced, stopped, ended. Measures nothing.

use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::events::Turns;
use crate::support;
use crate::worker::GATE;

/// How many are started before the first of them must be ready.
const STEP: usize = 8;
/// How long all of them may take to end.
const END_LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(1);

/// The settings that all workers start with.
pub struct Setup {
    pub url: String,
    pub hold: Duration,
    pub ttl: Duration,
}

struct Worker {
    number: usize,
    child: Child,
    output: BufReader<ChildStdout>,
    is_stopped: bool,
}

/// The end of a worker.
pub struct Career {
    pub turns: Turns,
    /// When it was killed, in ns.
    pub killed: Option<u64>,
    pub was_stopped: bool,
}

pub struct Workers {
    setup: Setup,
    folder: TempDir,
    running: Vec<Worker>,
    careers: Vec<Career>,
    started: usize,
}

impl Workers {
    pub fn new(setup: Setup) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("leasehold-").tempdir()?;
        File::create(folder.path().join(GATE))?;
        Ok(Self {
            setup,
            folder,
            running: Vec::new(),
            careers: Vec::new(),
            started: 0,
        })
    }

    /// Starts `count` workers, which are connected then and wait for [`go`](Self::go).
    pub fn start(&mut self, count: usize, show: impl Fn(usize)) -> Result<(), Box<dyn Error>> {
        while self.running.len() < count {
            let step = STEP.min(count - self.running.len());
            for _ in 0..step {
                self.spawn()?;
            }
            let new = self.running.len() - step;
            for worker in &mut self.running[new..] {
                let mut line = String::new();
                worker.output.read_line(&mut line)?;
                if line != "ready\n" {
                    return Err(format!("a worker said {line:?} instead of being ready").into());
                }
            }
            show(self.running.len());
        }
        Ok(())
    }

    /// All of them begin.
    pub fn go(&mut self) -> io::Result<()> {
        self.running.iter_mut().try_for_each(Worker::go)
    }

    /// Kills a random worker that is not stopped, and starts another.
    pub fn replace(&mut self) -> Result<(), Box<dyn Error>> {
        let Some(at) = self.random() else {
            return Ok(());
        };
        let mut worker = self.running.swap_remove(at);
        let now = support::nanoseconds();
        worker.child.kill()?;
        worker.child.wait()?;
        let career = self.career(&worker, Some(now))?;
        self.careers.push(career);
        self.spawn()?;
        self.running.last_mut().expect("it was just started").go()?;
        Ok(())
    }

    /// Stops a random worker that waits, for the rest of the run. (A stopped holder would keep the gate.)
    pub fn stop(&mut self) -> Result<(), Box<dyn Error>> {
        loop {
            let at = self.random().ok_or("no worker is left to be stopped")?;
            let worker = &mut self.running[at];
            worker.signal(Signal::STOP)?;
            thread::sleep(PAUSE);
            let log = log(self.folder.path(), worker.number);
            if !Turns::read(&log)?.is_holding() {
                worker.is_stopped = true;
                return Ok(());
            }
            worker.signal(Signal::CONT)?;
            thread::sleep(PAUSE);
        }
    }

    /// Ends all of them, and returns what every worker did that ever ran.
    pub fn end(mut self) -> Result<Vec<Career>, Box<dyn Error>> {
        for worker in &mut self.running {
            if worker.is_stopped {
                worker.child.kill()?;
            }
            worker.child.stdin = None;
        }
        let start = Instant::now();
        for mut worker in std::mem::take(&mut self.running) {
            let status = loop {
                match worker.child.try_wait()? {
                    Some(status) => break status,
                    None if start.elapsed() < END_LIMIT => thread::sleep(PAUSE),
                    None => return Err(format!("a worker still runs after {END_LIMIT:?}").into()),
                }
            };
            if !worker.is_stopped && !status.success() {
                return Err(format!("a worker failed: {status}").into());
            }
            let career = self.career(&worker, None)?;
            self.careers.push(career);
        }
        Ok(self.careers)
    }

    fn random(&self) -> Option<usize> {
        let candidates: Vec<usize> = (0..self.running.len())
            .filter(|at| !self.running[*at].is_stopped)
            .collect();
        support::index(candidates.len()).map(|at| candidates[at])
    }

    fn spawn(&mut self) -> io::Result<()> {
        let number = self.started;
        self.started += 1;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .arg(&self.setup.url)
            .arg(self.folder.path())
            .arg(number.to_string())
            .arg(self.setup.hold.as_millis().to_string())
            .arg(self.setup.ttl.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().expect("it was just piped");
        self.running.push(Worker {
            number,
            child,
            output: BufReader::new(output),
            is_stopped: false,
        });
        Ok(())
    }

    fn career(&self, worker: &Worker, killed: Option<u64>) -> Result<Career, Box<dyn Error>> {
        let log = log(self.folder.path(), worker.number);
        // One that was killed at once has no log.
        let turns = match log.exists() {
            true => Turns::read(&log)?,
            false => Turns::default(),
        };
        Ok(Career {
            turns,
            killed,
            was_stopped: worker.is_stopped,
        })
    }
}

impl Worker {
    fn go(&mut self) -> io::Result<()> {
        let input = self.child.stdin.as_mut().expect("it stays open");
        input.write_all(b"go\n")
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(
            pid.expect("a process id is positive"),
            signal,
        )?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Fails when it has ended, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log(folder: &Path, number: usize) -> PathBuf {
    folder.join(number.to_string())
}
