//! Two workers that lock the same name: one with leasehold, and one with the other library. This process measures the
//! times, so they include the way of orders and reports through pipes.

use std::time::{Duration, Instant};

use anyhow::ensure;
use leasehold_testbed::{Process, Server};
use leasehold_tools::environment;
use leasehold_tools::stop::Stop;
use redis::{Cmd, Connection, FromRedisValue};

use crate::install::Installed;
use crate::library::Library;
use crate::messages::{Assignment, Order, Report};

/// How long a report may take: two ttls, and a machine that stands still for a while.
const SILENCE: Duration = Duration::from_secs(60);
/// The time in which a waiter begins to wait.
const SETTLE: Duration = Duration::from_millis(40);

/// Which worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Ours,
    Theirs,
}

impl Side {
    pub fn other(self) -> Self {
        match self {
            Self::Ours => Self::Theirs,
            Self::Theirs => Self::Ours,
        }
    }
}

pub struct Pair<'a> {
    pub library: Library,
    pub stop: &'a Stop,
    installed: &'a Installed,
    url: String,
    ours: Process<Report>,
    theirs: Process<Report>,
    redis: Connection,
}

impl<'a> Pair<'a> {
    pub fn start(
        library: Library,
        installed: &'a Installed,
        server: &Server,
        stop: &'a Stop,
    ) -> anyhow::Result<Self> {
        let url = server.url();
        let redis = environment::connect(&redis::Client::open(url.as_str())?)?;
        let ours = start(Side::Ours, library, installed, &url)?;
        let theirs = start(Side::Theirs, library, installed, &url)?;
        let pair = Self {
            library,
            stop,
            installed,
            url,
            ours,
            theirs,
            redis,
        };
        pair.report(Side::Ours)?;
        pair.report(Side::Theirs)?;
        Ok(pair)
    }

    /// Kills the worker. [`restart`](Self::restart) must follow.
    pub fn kill(&mut self, side: Side) -> anyhow::Result<()> {
        self.process(side).kill()
    }

    pub fn restart(&mut self, side: Side) -> anyhow::Result<()> {
        let process = start(side, self.library, self.installed, &self.url)?;
        *self.process(side) = process;
        self.report(side)?;
        Ok(())
    }

    /// Replaces both workers and frees the lock, after a case that failed.
    pub fn begin_anew(&mut self) -> anyhow::Result<()> {
        for side in [Side::Ours, Side::Theirs] {
            self.kill(side)?;
        }
        // No other program uses the server. A library whose name contains this library's name runs no case now.
        let pattern = format!("*{}*", self.library.name);
        let keys: Vec<String> = self.redis(redis::cmd("KEYS").arg(pattern))?;
        if !keys.is_empty() {
            let () = self.redis(redis::cmd("DEL").arg(keys))?;
        }
        for side in [Side::Ours, Side::Theirs] {
            self.restart(side)?;
        }
        Ok(())
    }

    /// Gives an order without waiting for the report.
    pub fn order(&mut self, side: Side, order: Order) -> anyhow::Result<()> {
        self.process(side).order(&order)
    }

    /// The next report.
    pub fn report(&self, side: Side) -> anyhow::Result<Report> {
        let process = match side {
            Side::Ours => &self.ours,
            Side::Theirs => &self.theirs,
        };
        self.stop.message(process, SILENCE)
    }

    /// Gives an order, and waits for the report.
    pub fn ask(&mut self, side: Side, order: Order) -> anyhow::Result<Report> {
        self.order(side, order)?;
        self.report(side)
    }

    /// Gives an order that must succeed.
    pub fn must(&mut self, side: Side, order: Order) -> anyhow::Result<()> {
        let report = self.ask(side, order)?;
        ensure!(report.done, "{side:?}: {order:?} failed");
        Ok(())
    }

    /// Makes `waiter` ask for the lock that the other side holds, and gives it time to begin its wait.
    pub fn wait_behind(&mut self, waiter: Side, order: Order) -> anyhow::Result<()> {
        self.order(waiter, order)?;
        self.stop.pause(SETTLE)?;
        Ok(())
    }

    /// Waits for the report of a waiter that must get the lock. Returns when it came.
    pub fn granted(&self, waiter: Side) -> anyhow::Result<Instant> {
        let report = self.report(waiter)?;
        let at = Instant::now();
        ensure!(report.done, "{waiter:?}: the waiter has no lock");
        Ok(at)
    }

    /// A command on a plain connection.
    pub fn redis<T: FromRedisValue>(&mut self, command: &Cmd) -> anyhow::Result<T> {
        let reply = command.query(&mut self.redis);
        Ok(reply?)
    }

    /// The rest of the ttl of the lock's key, in ms: -1 without a ttl, and -2 without the key.
    pub fn pttl(&mut self, key: &str) -> anyhow::Result<i64> {
        self.redis(redis::cmd("PTTL").arg(key))
    }

    fn process(&mut self, side: Side) -> &mut Process<Report> {
        match side {
            Side::Ours => &mut self.ours,
            Side::Theirs => &mut self.theirs,
        }
    }
}

fn start(
    side: Side,
    library: Library,
    installed: &Installed,
    url: &str,
) -> anyhow::Result<Process<Report>> {
    let assignment = Assignment::new(url.to_owned(), library.name, library.name);
    match side {
        Side::Ours => Process::again(
            format!("leasehold beside {library}"),
            &["--process"],
            &assignment,
        ),
        Side::Theirs => {
            let mut worker = installed.worker(library)?;
            Process::start(library.name, &mut worker, &assignment)
        }
    }
}
