//! The cost of a Cluster to its client: CPU time of a lock and its release, on one server and on a Cluster of three
//! masters. A third way uses three single servers, each through a client of its own. It shows which part of the
//! difference comes from three connections, and not from the Cluster.
//!
//! Each round measures all ways in turn, so that other load on the machine affects all alike.

mod support;

use std::error::Error;
use std::time::Duration;

use clap::Parser;
use leasehold::{Client, Mutex};
use leasehold_load::{cores_by_preference, pin};
use leasehold_testbed::{Cluster, Server};

/// The keys that each way uses in turn.
const KEYS: usize = 999;
const WAYS: usize = 3;

#[derive(Parser)]
struct Options {
    /// Number of rounds
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Pin the servers to the client's core, not to another one
    #[arg(long)]
    one_core: bool,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

fn dropped(mutex: &Mutex) {
    drop(mutex.lock().expect("nobody else wants the lock"));
}

fn unlocked(mutex: &Mutex) {
    let guard = mutex.lock().expect("nobody else wants the lock");
    guard.unlock().expect("the server runs");
}

/// The CPU time of this process for each pair.
fn cost(mutexes: &[Mutex], pair: fn(&Mutex)) -> Duration {
    let before = support::own_cpu();
    mutexes.iter().for_each(pair);
    (support::own_cpu() - before) / KEYS as u32
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let rounds = if options.bench { options.rounds } else { 1 };
    let servers = [(); 4].map(|()| Server::start());
    let [single, first, second, third] = servers;
    let (single, three) = (single?, [first?, second?, third?]);
    let cluster = Cluster::builder().without_replicas().start()?;
    println!("{}", support::machine(&single)?);
    let _loops = options.busy.start()?;
    let mutexes = |clients: &[Client]| -> Vec<Mutex> {
        let mutex = |key: usize| clients[key % clients.len()].mutex(format!("k{key}"));
        (0..KEYS).map(mutex).collect()
    };
    let of_three: Vec<Client> = three
        .iter()
        .map(|server| Client::open(server.url()))
        .collect::<Result<_, _>>()?;
    let ways: [(&str, Vec<Mutex>); WAYS] = [
        ("one server", mutexes(&[Client::open(single.url())?])),
        ("three servers, three clients", mutexes(&of_three)),
        (
            "Cluster of three masters",
            mutexes(&[Client::open(cluster.url())?]),
        ),
    ];
    let cores = cores_by_preference()?;
    if let Some(own) = cores.first().copied() {
        let other = cores.get(1).copied().filter(|_| !options.one_core);
        let theirs = other.unwrap_or(own);
        let running = [&single].into_iter().chain(&three).chain(cluster.nodes());
        for server in running {
            pin(server.pid(), theirs)?;
        }
        pin(std::process::id(), own)?;
        println!("client pinned to core {own}, servers to core {theirs}");
    }
    let mut table = support::table(["way", "CPU of the client, µs", "ratio to one server"]);
    for (name, pair) in [
        ("guard dropped", dropped as fn(&Mutex)),
        ("unlock()", unlocked),
    ] {
        for (_, mutexes) in &ways {
            cost(mutexes, pair);
        }
        let mut costs = [const { Vec::new() }; WAYS];
        let mut ratios = [const { Vec::new() }; WAYS];
        for turn in 0..rounds {
            let mut round = [0.0; WAYS];
            for place in 0..WAYS {
                let way = (turn + place) % WAYS;
                round[way] = cost(&ways[way].1, pair).as_secs_f64() * 1e6;
            }
            for (way, cost) in round.into_iter().enumerate() {
                costs[way].push(cost);
                ratios[way].push(cost / round[0]);
            }
        }
        for (way, (servers, _)) in ways.iter().enumerate() {
            table.add_row([
                format!("{name}, {servers}"),
                format!("{:.1}", median(&mut costs[way])),
                format!("{:.3}", median(&mut ratios[way])),
            ]);
        }
    }
    println!("median of {rounds} rounds of {KEYS} pairs of each way, in turn\n\n{table}");
    Ok(())
}
