//! How fair a quorum is to processes that want one key: how often each gets it, how long it waits, and how many
//! requests a grant takes. A quorum has no queue, so clients that split the votes try again after random pauses.

use std::error::Error;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use leasehold::Client;
use leasehold_load::ServerStats;
use leasehold_testbed::child::{self, say};
use leasehold_testbed::{Process, Server};
use serde::{Deserialize, Serialize};

use crate::support;

/// The first argument of a process that wants the key.
pub const ROLE: &str = "contend";
const NODES: usize = 3;
/// How long each grant is held, in ms: not at all, or for some round trips. And how many nodes are stopped (SIGSTOP).
const CASES: [(u64, usize); 4] = [(0, 0), (5, 0), (0, 1), (5, 1)];
const TTL: Duration = Duration::from_secs(2);
/// How long a process may be silent, beyond its time.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
struct Order {
    time: Duration,
    hold: Duration,
}

/// The waits of a process for its grants, in µs. The last one may have begun within the time and ended after it.
type Waits = Vec<u64>;

/// A process that wants the key.
pub fn contend() -> ExitCode {
    child::run(|urls: Vec<String>, orders: Receiver<Order>| {
        let client = Client::quorum_builder(urls).ttl(TTL).max_ttl(TTL).build()?;
        let mutex = client.mutex("wanted");
        say(&Waits::new())?;
        for Order { time, hold } in orders {
            let mut waits = Waits::new();
            let begin = Instant::now();
            while begin.elapsed() < time {
                let start = Instant::now();
                let guard = mutex.lock()?;
                waits.push(u64::try_from(start.elapsed().as_micros())?);
                if hold > Duration::ZERO {
                    thread::sleep(hold);
                }
                guard.unlock()?;
            }
            say(&waits)?;
        }
        Ok(())
    })
}

/// Measures `count` processes that want one key, for `time` in each case.
pub fn measure(count: usize, time: Duration) -> Result<(), Box<dyn Error>> {
    let nodes = super::start(NODES)?;
    // Waits until the nodes vote.
    drop(super::quorum(&nodes)?);
    let urls: Vec<String> = nodes.iter().map(Server::url).collect();
    let start = |n| Process::<Waits>::again(format!("process {n}"), &[ROLE], &urls);
    let mut processes: Vec<_> = (0..count).map(start).collect::<Result<_, _>>()?;
    for process in &processes {
        process.message(SILENCE)?;
    }
    let title = format!("{count} processes, one key, {NODES} nodes");
    let mut table = support::table([
        title.as_str(),
        "grants/s",
        "fewest and most of a process",
        "scripts per running node and grant",
        "wait: mean, ms",
        "p50",
        "p99",
        "max",
        "max / mean",
    ]);
    for (hold, stopped) in CASES {
        let hold = Duration::from_millis(hold);
        let (stopped, running) = nodes.split_at(stopped);
        if !stopped.is_empty() {
            stopped.iter().for_each(Server::stop);
            // Lets the clients find the stopped node first.
            run_processes(&mut processes, super::SETTLING, hold)?;
        }
        let before = running.iter().map(ServerStats::until_now);
        let before = before.collect::<Result<Vec<_>, _>>()?;
        let mut waits = support::histogram();
        let mut grants = Vec::new();
        for of_process in run_processes(&mut processes, time, hold)? {
            grants.push(of_process.len());
            for micros in of_process {
                waits.saturating_record(micros);
            }
        }
        let mut scripts = 0;
        for (node, before) in running.iter().zip(before) {
            scripts += ServerStats::until_now(node)?.since(&before).scripts();
        }
        let ms = |micros: f64| format!("{:.2}", micros / 1000.0);
        let quantile = |q: f64| ms(waits.value_at_quantile(q) as f64);
        let all = grants.iter().sum::<usize>() as f64;
        let [fewest, most] =
            [grants.iter().min(), grants.iter().max()].map(|one| one.unwrap_or(&0));
        table.add_row([
            match stopped.len() {
                0 => format!("held for {} ms", hold.as_millis()),
                n => format!("held for {} ms, {n} stopped", hold.as_millis()),
            },
            format!("{:.0}", all / time.as_secs_f64()),
            format!("{fewest} to {most}"),
            format!("{:.2}", scripts as f64 / all / running.len() as f64),
            ms(waits.mean()),
            quantile(0.5),
            quantile(0.99),
            ms(waits.max() as f64),
            format!("{:.1}", waits.max() as f64 / waits.mean()),
        ]);
        stopped.iter().for_each(Server::resume);
    }
    println!("{table}");
    Ok(())
}

/// Has all processes contend, and returns their waits.
fn run_processes(
    processes: &mut [Process<Waits>],
    time: Duration,
    hold: Duration,
) -> Result<Vec<Waits>, Box<dyn Error>> {
    for process in &mut *processes {
        process.order(&Order { time, hold })?;
    }
    let waits = processes
        .iter()
        .map(|process| process.message(SILENCE + time));
    Ok(waits.collect::<Result<_, _>>()?)
}
