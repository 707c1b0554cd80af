//! Injects the faults of the run, and reads the key meanwhile. Counts its own commands, to subtract them from those of
//! the workers.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{Reply, Server};

use crate::monitor::Requests;
use crate::support;
use crate::worker::KEY;
use crate::workers::Workers;

const CONNECTION_NAME: &str = "leasehold-notifications";
/// How long a list of connections is used. Redis takes some ms to list 1,000.
const LIST_AGE: Duration = Duration::from_secs(5);
const SAMPLE_PERIOD: Duration = Duration::from_millis(50);
const TICK: Duration = Duration::from_millis(50);
/// The first and the last byte, for GETRANGE, of the part of a value with `lh1`, a space, and the lease id.
const LEASE: [&str; 2] = ["0", "35"];

/// How often each fault happens; `None` means never.
#[derive(Clone, Copy)]
pub struct Plan {
    pub kill_period: Option<Duration>,
    pub cut_period: Option<Duration>,
}

pub struct Faults<'a> {
    server: &'a Server,
    kills: Option<Timer>,
    cuts: Option<Timer>,
    samples: Option<Timer>,
    notification_connections: Vec<String>,
    listed: Instant,
    grant: Option<(String, Instant)>,
    /// The longest time for which the key had the same lease.
    pub longest_lease: Duration,
    pub killed: u64,
    pub cut: u64,
    /// The commands of this process.
    pub requests: Requests,
    /// Bytes of the replies to them.
    pub bytes: u64,
}

struct Timer {
    period: Duration,
    next: Instant,
}

impl<'a> Faults<'a> {
    /// `sampled`: whether to read the key regularly, which costs requests.
    pub fn new(server: &'a Server, plan: Plan, sampled: bool) -> Self {
        Self {
            server,
            kills: plan.kill_period.map(Timer::new),
            cuts: plan.cut_period.map(Timer::new),
            samples: sampled.then(|| Timer::new(SAMPLE_PERIOD)),
            notification_connections: Vec::new(),
            listed: Instant::now(),
            grant: None,
            longest_lease: Duration::ZERO,
            killed: 0,
            cut: 0,
            requests: Requests::new(),
            bytes: 0,
        }
    }

    /// Injects faults until `end`.
    pub fn inject(
        &mut self,
        workers: &mut Workers,
        end: Instant,
        show: impl Fn(),
    ) -> Result<(), Box<dyn Error>> {
        while Instant::now() < end {
            if self.kills.as_mut().is_some_and(Timer::is_due) {
                workers.replace()?;
                self.killed += 1;
            }
            if self.cuts.as_mut().is_some_and(Timer::is_due) {
                self.cut_one()?;
            }
            if self.samples.as_mut().is_some_and(Timer::is_due) {
                self.sample()?;
            }
            show();
            let timers = [&self.kills, &self.cuts, &self.samples];
            let next = timers.into_iter().flatten().map(|timer| timer.next).min();
            let now = Instant::now();
            let next = next.map_or(end, |next| next.min(end)).min(now + TICK);
            thread::sleep(next.saturating_duration_since(now));
        }
        Ok(())
    }

    /// Closes the notification connection of a random client.
    fn cut_one(&mut self) -> Result<(), Box<dyn Error>> {
        if self.notification_connections.is_empty() || self.listed.elapsed() > LIST_AGE {
            self.list()?;
        }
        while let Some(at) = support::index(self.notification_connections.len()) {
            let id = self.notification_connections.swap_remove(at);
            if self.command(&["CLIENT", "KILL", "ID", &id])? == Reply::Int(1) {
                self.cut += 1;
                break;
            }
        }
        Ok(())
    }

    fn list(&mut self) -> Result<(), Box<dyn Error>> {
        let list = self.command(&["CLIENT", "LIST", "TYPE", "pubsub"])?;
        let list = list.as_text().ok_or("CLIENT LIST answers no text")?;
        let name = format!(" name={CONNECTION_NAME}:");
        let lines = list.lines().filter(|line| line.contains(&name));
        let ids = lines.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
        self.notification_connections = ids.map(str::to_owned).collect();
        self.listed = Instant::now();
        Ok(())
    }

    fn sample(&mut self) -> Result<(), Box<dyn Error>> {
        let key = in_redis();
        let asked = Instant::now();
        let reply = self.command(&["GETRANGE", &key, LEASE[0], LEASE[1]])?;
        let lease = reply.as_text().filter(|lease| !lease.is_empty());
        match (lease, &self.grant) {
            (Some(lease), Some((seen, since))) if lease == seen => {
                self.longest_lease = self.longest_lease.max(asked - *since);
            }
            // The time counts from the reply, so the result is never too long.
            (lease, _) => self.grant = lease.map(|lease| (lease.to_owned(), Instant::now())),
        }
        Ok(())
    }

    fn command(&mut self, args: &[&str]) -> Result<Reply, Box<dyn Error>> {
        let reply = self.server.command(args)?;
        *self
            .requests
            .entry(args[0].to_ascii_lowercase())
            .or_default() += 1;
        self.bytes += reply.as_text().map_or(0, str::len) as u64;
        Ok(reply)
    }
}

impl Timer {
    fn new(period: Duration) -> Self {
        Self {
            period,
            next: Instant::now() + period,
        }
    }

    /// Whether the fault is due. A late fault does not make up for missed ones.
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = now >= self.next;
        if is_due {
            self.next = (self.next + self.period).max(now);
        }
        is_due
    }
}

/// All keys except the fence counter.
pub fn keys_left(server: &Server) -> Result<Vec<String>, Box<dyn Error>> {
    let Reply::Array(keys) = server.command(&["KEYS", "*"])? else {
        return Err("KEYS answers no array".into());
    };
    let keys = keys.iter().filter_map(Reply::as_text);
    Ok(keys
        .filter(|key| *key != "leasehold:~fence")
        .map(str::to_owned)
        .collect())
}

fn in_redis() -> String {
    format!("leasehold:{KEY}")
}
