//! The results of shared locks, as tables.

use std::time::Duration;

use leasehold_load::{ServerStats, Waits};
use serde::Serialize;

use super::cases::{Case, Way};
use super::run::Measured;
use crate::statistics::Spread;
use crate::table::{in_markdown, in_terminal};

/// The results of a case.
pub struct Outcome {
    pub name: String,
    pub title: String,
    pub machine: String,
    pub rows: Vec<Row>,
}

/// The results of one way in a case. All times are in µs.
#[derive(Serialize)]
pub struct Row {
    /// The names of the case and the way.
    pub name: String,
    /// Grants per second, in the median round.
    pub grants_per_second: f64,
    /// The waits of the first kind of requests: readers, or permits of weight 1.
    pub first_wait: Option<Wait>,
    /// The waits of writers, or of heavier permits.
    pub second_wait: Option<Wait>,
    /// The longest wait, divided by the time in which each thread has one turn at this rate. `None` if threads share a
    /// client, because such threads hand the lock off to each other.
    pub longest_to_fair: Option<f64>,
    pub requests_per_grant: f64,
    /// CPU time of Redis.
    pub server_cpu_per_grant: f64,
    /// The time that scripts took, according to `INFO commandstats`. On a busy machine, it exceeds their CPU time.
    pub in_scripts_per_grant: f64,
    pub client_cpu_per_grant: f64,
}

/// Quantiles of waits.
#[derive(Clone, Copy, Serialize)]
pub struct Wait {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl Wait {
    fn of(rounds: &[Measured], kind: usize) -> anyhow::Result<Option<Self>> {
        let mut waits = Waits::new()?;
        for round in rounds {
            waits.add(&round.tallies[kind].waits)?;
        }
        let at = |quantile| waits.quantile(quantile).map(micros);
        let all = || {
            Some(Self {
                p50: at(0.5)?,
                p99: at(0.99)?,
                max: at(1.0)?,
            })
        };
        Ok(all())
    }
}

/// The commands that clients send. Redis counts the commands of scripts, too, and they are not requests.
const REQUESTS: [&str; 11] = [
    "eval",
    "evalsha",
    "exec",
    "ping",
    "client|tracking",
    "client|caching",
    "subscribe",
    "unsubscribe",
    "ssubscribe",
    "sunsubscribe",
    "script|load",
];

fn requests(stats: &ServerStats) -> u64 {
    let calls = REQUESTS.iter().filter_map(|name| stats.calls.get(*name));
    calls.sum()
}

impl Row {
    pub fn new(case: &Case, way: Way, rounds: &[Measured]) -> anyhow::Result<Self> {
        let in_time = |round: &Measured| round.tallies.iter().map(|of| of.in_time).sum::<u64>();
        let rates = rounds
            .iter()
            .map(|round| in_time(round) as f64 / round.window.as_secs_f64());
        let rate = Spread::of(rates).median;
        let tallies = rounds.iter().flat_map(|round| &round.tallies);
        let grants = tallies.map(|tally| tally.pairs).sum::<u64>().max(1) as f64;
        let per_grant = |figure: &dyn Fn(&Measured) -> f64| {
            let all: f64 = rounds.iter().map(figure).sum();
            all / grants
        };
        let waits = [Wait::of(rounds, 0)?, Wait::of(rounds, 1)?];
        let longest = waits.iter().flatten().map(|wait| wait.max);
        let longest = longest.fold(0.0, f64::max);
        let fair = case.seats() as f64 / rate * 1e6;
        let is_fair = case.own_clients && rate > 0.0;
        Ok(Self {
            name: format!("{}/{}", case.name, way.name()),
            grants_per_second: rate,
            first_wait: waits[0],
            second_wait: waits[1],
            longest_to_fair: is_fair.then_some(longest / fair),
            requests_per_grant: per_grant(&|round| requests(&round.stats) as f64),
            server_cpu_per_grant: per_grant(&|round| micros(round.stats.cpu)),
            in_scripts_per_grant: per_grant(&|round| micros(round.stats.in_scripts)),
            client_cpu_per_grant: per_grant(&|round| micros(round.tallies[0].cpu)),
        })
    }

    pub fn way(&self) -> &str {
        let (_, way) = self.name.split_once('/').expect("made with a slash");
        way
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

const HEADER: [&str; 9] = [
    "",
    "grants/s",
    "readers or permits wait, ms",
    "writers or weight 5 wait, ms",
    "longest to fair",
    "requests",
    "server CPU, µs",
    "time in scripts, µs",
    "client CPU, µs",
];

pub fn terminal(outcome: &Outcome) -> String {
    let table = in_terminal(&HEADER, 1, outcome.rows.iter().map(cells));
    format!("{}: {}\n{table}", outcome.name, outcome.title)
}

pub fn markdown(outcome: &Outcome) -> String {
    in_markdown(&HEADER, 1, outcome.rows.iter().map(cells))
}

fn cells(row: &Row) -> [String; HEADER.len()] {
    let wait = |wait: Option<Wait>| match wait {
        Some(wait) => [wait.p50, wait.p99, wait.max]
            .map(|micros| format!("{:.3}", micros / 1000.0))
            .join(" / "),
        None => "-".to_owned(),
    };
    let ratio = row.longest_to_fair;
    [
        row.way().to_owned(),
        format!("{:.0}", row.grants_per_second),
        wait(row.first_wait),
        wait(row.second_wait),
        ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
        format!("{:.2}", row.requests_per_grant),
        format!("{:.1}", row.server_cpu_per_grant),
        format!("{:.1}", row.in_scripts_per_grant),
        format!("{:.1}", row.client_cpu_per_grant),
    ]
}

/// Describes the measurements in the document.
pub const METHOD: &str = "Readers, writers and permits of one key, and sets of several keys. `raw`: two scripts, no \
    library, on a connection per thread, with a pause of 1 ms before the next attempt; nothing keeps an order. \
    `redisson`: `RReadWriteLock`, `RPermitExpirableSemaphore` and `RedissonMultiLock` of Redisson (Java), one client \
    per process. A set of keys counts as one grant, and a wait of Redisson for a set ends 10 s after its round. \
    `mutex`: leasehold's `Mutex`. *wait*: p50 / p99 / max from the request to the grant. *longest to fair*: the \
    longest wait, divided by the time in which each thread has one turn; only where each thread has a client of its \
    own. *requests*, *CPU*: per grant; threads of one client that read at the same time share a grant of Redis, and \
    each of them counts as a grant. Rounds are measured once a round has made no connection: a client connects for \
    notifications when it first waits.";
