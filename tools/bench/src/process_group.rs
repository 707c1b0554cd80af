//! The processes that use one kind of lock in a case, and what Redis did for them. Compares nothing.

use std::time::Duration;

use leasehold_load::{Assignment, Pace, Round, ServerStats, Tally, Way, nanoseconds, sum};
use leasehold_testbed::{Process, Server};
use leasehold_tools::stop::Stop;

use crate::cases::{Case, Form};
use crate::programs::Programs;

/// The time from the start order to the start of a round, in which a process receives the order and starts its threads.
const NOTICE: Duration = Duration::from_millis(20);
const NOTICE_PER_THREAD: Duration = Duration::from_micros(200);
/// The factor by which these times are longer if each core also has a busy loop.
const BESIDE_LOOPS: u32 = 3;
/// The length of a round that is not measured, in which scripts are loaded and connections are made.
const WARM_UP: Duration = Duration::from_millis(60);
/// How long a process may be silent, including the time of its work.
const SILENCE: Duration = Duration::from_secs(60);

pub struct ProcessGroup {
    pub way: Way,
    processes: Vec<Process<Tally>>,
    notice: Duration,
    /// The number of connections that stay open, in all processes together.
    pub connections: u64,
}

/// One round of a group.
pub struct Measured {
    /// The sum over all processes.
    pub tally: Tally,
    pub stats: ServerStats,
    window: Duration,
}

impl Measured {
    /// The locks of the thread that got the fewest, divided by those of the thread that got the most.
    pub fn fairness(&self) -> f64 {
        self.tally.least as f64 / self.tally.most.max(1) as f64
    }

    /// CPU time of the server per pair, in µs. Not a number without a pair.
    pub fn server_cpu_per_pair(&self) -> f64 {
        self.stats.cpu.as_secs_f64() * 1e6 / self.tally.pairs as f64
    }

    /// The longest wait for a lock, in ns. Not a number without a wait.
    pub fn longest_wait(&self) -> f64 {
        let waits = self.tally.waits.iter().map(|&(wait, _)| wait);
        waits.max().map_or(f64::NAN, |longest| longest as f64)
    }

    /// Locks acquired per second, within the window.
    pub fn rate(&self) -> f64 {
        self.tally.in_time as f64 / self.window.as_secs_f64()
    }
}

impl ProcessGroup {
    pub fn start(
        case: &Case,
        form: Form,
        way: Way,
        core: Option<usize>,
        server: &Server,
        programs: &Programs,
        stop: &Stop,
    ) -> anyhow::Result<Self> {
        let before = ServerStats::until_now(server)?.connections;
        let mut processes = Vec::new();
        for process in 0..case.processes {
            let assignment = Assignment {
                url: server.url(),
                way,
                process,
                threads: case.threads,
                keys: case.keys,
                hold: case.hold,
                core,
            };
            let name = format!("load process {process}");
            let program = &mut programs.load(way);
            processes.push(Process::start(name, program, &assignment)?);
        }
        // Each process sends an empty tally once it has connected.
        for process in &processes {
            stop.message(process, SILENCE)?;
        }
        let notice = NOTICE + NOTICE_PER_THREAD * case.seats() as u32;
        let mut group = Self {
            way,
            processes,
            notice: match form {
                Form::Quiet => notice,
                Form::Busy => BESIDE_LOOPS * notice,
            },
            connections: 0,
        };
        group.round(server, WARM_UP, None, stop)?;
        let after = ServerStats::until_now(server)?.connections;
        group.connections = after.saturating_sub(before);
        Ok(group)
    }

    pub fn round(
        &mut self,
        server: &Server,
        window: Duration,
        pace: Option<Pace>,
        stop: &Stop,
    ) -> anyhow::Result<Measured> {
        let before = ServerStats::until_now(server)?;
        let start = nanoseconds() + self.notice.as_nanos() as u64;
        let round = Round {
            start,
            window,
            pace,
        };
        for process in &mut self.processes {
            process.order(&round)?;
        }
        let processes = self.processes.iter();
        let tallies = processes.map(|process| stop.message(process, SILENCE));
        let tally = sum(&tallies.collect::<anyhow::Result<Vec<_>>>()?)?;
        let stats = ServerStats::until_now(server)?.since(&before);
        Ok(Measured {
            tally,
            stats,
            window,
        })
    }
}
