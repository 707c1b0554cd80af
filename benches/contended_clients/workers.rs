//! The worker processes: starts them in steps, kills and replaces them, stops and ends them.

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::Process;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::events::Turns;
use crate::support;
use crate::worker::{Assignment, GATE, Order};

/// How many processes are started before the first of them must be ready.
const STEP: usize = 8;
/// How long a process may take to connect.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long all processes may take to end.
const END_LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(1);

/// The settings of all workers.
pub struct Setup {
    pub url: String,
    pub hold: Duration,
    pub ttl: Duration,
}

struct Worker {
    number: usize,
    process: Process<()>,
    is_stopped: bool,
}

/// The work of a worker, and how it ended.
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

    /// Starts `count` workers, which connect and wait for [`go`](Self::go).
    pub fn start(&mut self, count: usize, show: impl Fn(usize)) -> Result<(), Box<dyn Error>> {
        while self.running.len() < count {
            let step = STEP.min(count - self.running.len());
            for _ in 0..step {
                self.spawn()?;
            }
            let new = self.running.len() - step;
            for worker in &mut self.running[new..] {
                worker.process.message(START_LIMIT)?;
            }
            show(self.running.len());
        }
        Ok(())
    }

    /// Starts the work of all workers.
    pub fn go(&mut self) -> Result<(), Box<dyn Error>> {
        let mut workers = self.running.iter_mut();
        Ok(workers.try_for_each(|worker| worker.process.order(&Order::Go))?)
    }

    /// Kills a random worker that is not stopped, and starts another.
    pub fn replace(&mut self) -> Result<(), Box<dyn Error>> {
        let Some(at) = self.random() else {
            return Ok(());
        };
        let mut worker = self.running.swap_remove(at);
        let now = support::nanoseconds();
        worker.process.kill()?;
        let career = self.career(&worker, Some(now))?;
        self.careers.push(career);
        self.spawn()?;
        let new = self.running.last_mut().expect("it was just started");
        new.process.order(&Order::Go)?;
        Ok(())
    }

    /// Stops a random waiting worker for the rest of the run. (A stopped holder would keep the gate.)
    pub fn stop(&mut self) -> Result<(), Box<dyn Error>> {
        loop {
            let at = self.random().ok_or("no worker is left to be stopped")?;
            let worker = &mut self.running[at];
            worker.process.signal(Signal::STOP)?;
            thread::sleep(PAUSE);
            let log = log(self.folder.path(), worker.number);
            if !Turns::read(&log)?.is_holding() {
                worker.is_stopped = true;
                return Ok(());
            }
            worker.process.signal(Signal::CONT)?;
            thread::sleep(PAUSE);
        }
    }

    /// Ends all workers, and returns what every worker of the run did.
    pub fn end(mut self) -> Result<Vec<Career>, Box<dyn Error>> {
        for worker in &mut self.running {
            match worker.is_stopped {
                true => worker.process.kill()?,
                false => worker.process.order(&Order::End)?,
            }
        }
        let start = Instant::now();
        for mut worker in std::mem::take(&mut self.running) {
            let left = END_LIMIT.saturating_sub(start.elapsed());
            let status = worker.process.status(left)?;
            if !worker.is_stopped && !status.success() {
                return Err(format!("{} failed: {status}", worker.process.name()).into());
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

    fn spawn(&mut self) -> Result<(), Box<dyn Error>> {
        let number = self.started;
        self.started += 1;
        let assignment = Assignment {
            url: self.setup.url.clone(),
            folder: self.folder.path().to_owned(),
            number,
            hold: self.setup.hold,
            ttl: self.setup.ttl,
        };
        let name = format!("worker {number}");
        self.running.push(Worker {
            number,
            process: Process::again(name, &["worker"], &assignment)?,
            is_stopped: false,
        });
        Ok(())
    }

    fn career(&self, worker: &Worker, killed: Option<u64>) -> Result<Career, Box<dyn Error>> {
        let log = log(self.folder.path(), worker.number);
        // A worker that was killed at once has no log.
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

fn log(folder: &Path, number: usize) -> PathBuf {
    folder.join(number.to_string())
}
