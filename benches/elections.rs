//! Elections: the time from a resignation to the next leader, the time until observers know of it, and the requests of
//! an election without changes.
//!
//! Ends with an error if the median hand-over takes more than 6 ms, if observers learn of a change more than 50 ms after
//! it (p99), or if an idle observer costs more than 3.5 requests for each ttl.

mod support;

use std::error::Error;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use leasehold::{Client, LeaderState, Observer};
use leasehold_testbed::Server;

/// The most that a hand-over may take: the bound is 5 ms and a round trip.
const SLOWEST_HAND_OVER: Duration = Duration::from_millis(6);
const SLOWEST_OBSERVER: Duration = Duration::from_millis(50);
/// The requests of an idle observer for each ttl: three, and a renewal at each edge of the count.
const MOST_REQUESTS: f64 = 3.5;
/// The ttl of the idle election. Its requests are counted during four ttls.
const TTL: Duration = Duration::from_secs(3);

#[derive(Parser)]
struct Options {
    /// Number of resignations
    #[arg(long, default_value_t = 500)]
    terms: usize,
    /// Observers of the election
    #[arg(long, default_value_t = 1_000)]
    observers: usize,
    /// Clients that share the observers
    #[arg(long, default_value_t = 4)]
    clients: usize,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The calls of scripts and transactions so far, and the reads of keys.
fn requests(server: &Server) -> Result<[u64; 2]> {
    let calls = |command| server.calls(command);
    let scripts = calls("eval")? + calls("evalsha")?;
    Ok([
        scripts + calls("exec")? + calls("delex")?,
        calls("getrange")?,
    ])
}

/// Waits for the leader with this value. Returns the time at which its state came.
fn wait_for(states: &Observer, value: &str) -> Instant {
    let leads = |state: &LeaderState| matches!(state, LeaderState::Leader(leader) if leader.value() == Some(value.as_bytes()));
    while let Ok(state) = states.recv() {
        if leads(&state) {
            break;
        }
    }
    Instant::now()
}

/// Two clients lead in turn. Each one begins to wait while the other one leads.
fn hand_over(server: &Server, terms: usize) -> Result<hdrhistogram::Histogram<u64>> {
    let clients = [Client::open(server.url())?, Client::open(server.url())?];
    let mut times = support::histogram();
    let mut term = clients[0].election("terms").campaign("0")?;
    for n in 1..=terms {
        let election = clients[n % 2].election("terms");
        let mutex = clients[n % 2].mutex("terms");
        let next = thread::scope(|scope| {
            let value = n.to_string();
            let next = scope.spawn(move || (election.campaign(value), Instant::now()));
            while mutex
                .inspect()?
                .is_some_and(|lock| lock.clients_waiting() == 0)
            {
                thread::yield_now();
            }
            let resigned = Instant::now();
            term.resign()?;
            let (next, elected) = next.join().expect("no panics");
            support::record(&mut times, elected.duration_since(resigned));
            next
        });
        term = next?;
    }
    Ok(times)
}

/// Many observers learn of each new value of a leader.
fn observe(
    server: &Server,
    options: &Options,
    changes: usize,
) -> Result<hdrhistogram::Histogram<u64>> {
    let leader = Client::open(server.url())?;
    let term = leader.election("observed").campaign("begin")?;
    let mut times = support::histogram();
    let (told, learned) = channel();
    let share = options.observers.div_ceil(options.clients);
    let mut tell = Vec::new();
    let mut threads = Vec::new();
    for _ in 0..options.clients {
        let client = Client::open(server.url())?;
        let observers = (0..share).map(|_| client.election("observed").observe());
        let observers: Vec<Observer> = observers.collect::<std::result::Result<_, _>>()?;
        let (order, orders) = channel::<String>();
        let told = told.clone();
        tell.push(order);
        threads.push(thread::spawn(move || {
            for value in orders {
                let times: Vec<Instant> = observers
                    .iter()
                    .map(|states| wait_for(states, &value))
                    .collect();
                if told.send(times).is_err() {
                    return;
                }
            }
        }));
    }
    for n in 0..=changes {
        let value = n.to_string();
        for order in &tell {
            order.send(value.clone())?;
        }
        let changed = Instant::now();
        term.proclaim(&value)?;
        for _ in 0..options.clients {
            let times_of_client = learned.recv()?;
            // With the first change, the observers get their first states.
            if n > 0 {
                for time in times_of_client {
                    support::record(&mut times, time.duration_since(changed));
                }
            }
        }
    }
    drop(tell);
    for thread in threads {
        thread.join().expect("no panics");
    }
    Ok(times)
}

/// The requests of an idle observer for each ttl, without those of the leader's client.
fn idle(server: &Server) -> Result<f64> {
    let open = || Client::builder(server.url()).ttl(TTL).build();
    let (leader, observing) = (open()?, open()?);
    let term = leader.election("idle").campaign("a")?;
    let count = || -> Result<[f64; 2]> {
        thread::sleep(TTL);
        let before = requests(server)?;
        thread::sleep(4 * TTL);
        let after = requests(server)?;
        Ok([0, 1].map(|at| (after[at] - before[at]) as f64 / 4.0))
    };
    let of_leader = count()?;
    let states = observing.election("idle").observe()?;
    wait_for(&states, "a");
    let of_both = count()?;
    term.resign()?;
    // A script that reads the key counts as a call and as a read.
    let own = [0, 1].map(|at| of_both[at] - of_leader[at]);
    Ok(own[0].max(own[1]))
}

fn main() -> Result<()> {
    let options = Options::parse();
    let server = Server::start()?;
    println!("{}", support::machine(&server)?);
    let _loops = options.busy.start()?;
    let (terms, changes) = match options.bench {
        true => (options.terms, 100),
        false => (5, 2),
    };
    let mut table = support::table(["ms", "median", "p99", "max", "count"]);
    let next = hand_over(&server, terms)?;
    table.add_row(support::spread("resignation to the next leader", &next));
    let learned = observe(&server, &options, changes)?;
    let what = format!("change to {} observers", options.observers);
    table.add_row(support::spread(&what, &learned));
    println!("{table}\n");
    if !options.bench {
        return Ok(());
    }
    let requests = idle(&server)?;
    println!("idle observer: {requests:.2} requests and reads for each ttl");
    if options.busy.busy {
        return Ok(());
    }
    let median = Duration::from_micros(next.value_at_quantile(0.5));
    if median > SLOWEST_HAND_OVER {
        return Err(format!("the next leader leads after {median:?}").into());
    }
    let p99 = Duration::from_micros(learned.value_at_quantile(0.99));
    if p99 > SLOWEST_OBSERVER {
        return Err(format!("observers learn of a change after {p99:?} (p99)").into());
    }
    if requests > MOST_REQUESTS {
        return Err(format!("{requests:.2} requests of an idle observer for each ttl").into());
    }
    Ok(())
}
