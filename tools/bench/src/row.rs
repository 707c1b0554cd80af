//! The results of one way of locking in a case. Most figures are per pair of lock and release.

use std::time::Duration;

use anyhow::Context as _;
use leasehold_load::{Waits, Way};
use serde::Serialize;

use crate::cases::{scripted, way_name};
use crate::process_group::{Measured, ProcessGroup};
use crate::statistics::{Spread, compare};

#[derive(Serialize)]
pub struct Row {
    /// The names of the case and the way.
    pub name: String,
    /// Pairs per second, divided by those of the raw commands in the same rounds: the median round.
    pub ratio: f64,
    /// The middle half of the rounds' ratios.
    pub ratio_low: f64,
    pub ratio_high: f64,
    /// Pairs per second, in the median round.
    pub pairs_per_second: f64,
    /// The locks of the thread that got the fewest, divided by those of the thread that got the most: the
    /// median round.
    pub fairness: f64,
    /// The waits from request to lock at full speed: each thread requests a lock as soon as it has released one. `None`
    /// if no lock was acquired.
    pub wait: Option<Quantiles>,
    /// The waits at a rate that is the same for all ways. `None` if this way cannot keep the rate.
    pub paced: Option<Paced>,
    /// Connections that stay open, of all processes together.
    pub connections: u64,
    pub requests_per_pair: f64,
    pub reads_per_pair: f64,
    pub bytes_per_pair: f64,
    /// CPU time, in µs.
    pub client_cpu_per_pair: f64,
    pub server_cpu_per_pair: f64,
    /// CPU time of the server per pair, divided by that of the raw commands in the same rounds: the median round.
    /// `None` if no round of the raw commands had a pair.
    pub server_cpu_ratio: Option<f64>,
    /// The rounds at full speed, to compare this way with others than the raw commands.
    #[serde(skip)]
    pub rounds: Rounds,
}

/// Figures of each round at full speed.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// Pairs per second.
    pub rates: Vec<f64>,
    /// CPU time of the server per pair, in µs.
    pub server_cpu: Vec<f64>,
    /// The longest wait, in ns. Not a number without a wait.
    pub longest: Vec<f64>,
}

impl Rounds {
    pub fn of(rounds: &[Measured]) -> Self {
        Self {
            rates: rounds.iter().map(Measured::rate).collect(),
            server_cpu: rounds.iter().map(Measured::server_cpu_per_pair).collect(),
            longest: rounds.iter().map(Measured::longest_wait).collect(),
        }
    }
}

/// The waits at a fixed rate.
#[derive(Serialize)]
pub struct Paced {
    /// Requested pairs per second.
    pub rate: f64,
    pub wait: Quantiles,
}

/// Quantiles of waits, in µs.
#[derive(Clone, Copy, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Quantiles {
    /// The quantiles over all rounds together. `None` if there was no wait.
    pub fn of(rounds: &[Measured]) -> anyhow::Result<Option<Self>> {
        let mut waits = Waits::new()?;
        for round in rounds {
            waits.add(&round.tally.waits)?;
        }
        let micros = |quantile| waits.quantile(quantile).map(micros);
        let all = || {
            Some(Self {
                p50: micros(0.5)?,
                p99: micros(0.99)?,
                p999: micros(0.999)?,
                max: micros(1.0)?,
            })
        };
        Ok(all())
    }

    pub fn all(&self) -> [f64; 4] {
        [self.p50, self.p99, self.p999, self.max]
    }
}

impl Row {
    pub fn new(
        case: &str,
        group: &ProcessGroup,
        rounds: &[Measured],
        raw: &Rounds,
    ) -> anyhow::Result<Self> {
        let own = Rounds::of(rounds);
        let ratio = compare(&own.rates, &raw.rates).context("the raw commands got no lock")?;
        let server_cpu = compare(&own.server_cpu, &raw.server_cpu);
        let pairs: u64 = rounds.iter().map(|round| round.tally.pairs).sum();
        let per_pair = |figure: fn(&Measured, Way) -> f64| {
            let all: f64 = rounds.iter().map(|round| figure(round, group.way)).sum();
            all / pairs as f64
        };
        Ok(Self {
            name: format!("{case}/{}", way_name(group.way)),
            ratio: ratio.median,
            ratio_low: ratio.low,
            ratio_high: ratio.high,
            pairs_per_second: Spread::of(own.rates.iter().copied()).median,
            fairness: Spread::of(rounds.iter().map(Measured::fairness)).median,
            wait: Quantiles::of(rounds)?,
            paced: None,
            connections: group.connections,
            requests_per_pair: per_pair(|round, way| round.stats.requests(scripted(way)) as f64),
            reads_per_pair: per_pair(|round, _| round.stats.reads as f64),
            bytes_per_pair: per_pair(|round, _| round.stats.bytes() as f64),
            client_cpu_per_pair: per_pair(|round, _| micros(round.tally.cpu)),
            server_cpu_per_pair: per_pair(|round, _| micros(round.stats.cpu)),
            server_cpu_ratio: server_cpu.map(|ratio| ratio.median),
            rounds: own,
        })
    }

    /// A row without figures but those of `rounds`, and with 5 connections.
    #[cfg(test)]
    pub fn for_tests(case: &str, way: Way, rounds: Rounds) -> Self {
        Self {
            name: format!("{case}/{}", way_name(way)),
            ratio: 1.0,
            ratio_low: 1.0,
            ratio_high: 1.0,
            pairs_per_second: 1.0,
            fairness: 1.0,
            wait: None,
            paced: None,
            connections: 5,
            requests_per_pair: 1.0,
            reads_per_pair: 1.0,
            bytes_per_pair: 1.0,
            client_cpu_per_pair: 1.0,
            server_cpu_per_pair: 1.0,
            server_cpu_ratio: None,
            rounds,
        }
    }

    pub fn way(&self) -> &str {
        let (_, way) = self.name.split_once('/').expect("made with a slash");
        way
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
