//! A quorum of five servers beside a single server: the time of a lock and its release, requests and CPU time, and what
//! stopped nodes (SIGSTOP) change.
//!
//! Each round measures all ways in turn, so that other load on the machine affects all alike. The raw way is the
//! published algorithm of Redlock, written with blocking connections: it asks one node after the other.

mod support;

use std::error::Error;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use hdrhistogram::Histogram;
use leasehold::{Client, ErrorKind, Mutex};
use leasehold_load::ServerStats;
use leasehold_testbed::Server;

const NODES: usize = 5;
/// The pairs that one way makes in a round.
const PAIRS: usize = 200;
const TTL: Duration = Duration::from_secs(2);
/// When two nodes are stopped, the first second is not counted: callers learn in it which nodes are silent.
const SETTLING: Duration = Duration::from_secs(1);
const MANY: usize = 64;
/// The script with which Redlock releases.
const DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

#[derive(Parser)]
struct Options {
    /// Number of rounds in which one thread uses all nodes
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Seconds for each case with stopped nodes, and for the same without
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way to lock and release.
trait Way {
    fn pair(&mut self);
}

impl Way for Mutex {
    fn pair(&mut self) {
        let guard = self.lock().expect("no other thread wants the lock");
        guard.unlock().expect("most nodes run");
    }
}

/// Redlock with one blocking connection to each node.
struct Raw {
    connections: Vec<redis::Connection>,
    /// The hash of the script that deletes the key if it has the value.
    delete: String,
    attempts: u64,
}

impl Raw {
    fn connect(nodes: &[Server]) -> Result<Self, Box<dyn Error>> {
        let connect = |node: &Server| redis::Client::open(node.url())?.get_connection();
        let mut connections: Vec<_> = nodes.iter().map(connect).collect::<Result<_, _>>()?;
        let mut delete = String::new();
        for connection in &mut connections {
            delete = redis::cmd("SCRIPT")
                .arg(&["LOAD", DELETE])
                .query(connection)?;
        }
        Ok(Self {
            connections,
            delete,
            attempts: 0,
        })
    }
}

impl Way for Raw {
    fn pair(&mut self) {
        self.attempts += 1;
        let value = format!("{:032x}", self.attempts);
        let mut granted = 0;
        for connection in &mut self.connections {
            let reply: Option<String> = redis::cmd("SET")
                .arg(&["raw", &value, "NX", "PX", "30000"])
                .query(connection)
                .expect("the node runs");
            granted += usize::from(reply.is_some());
        }
        assert_eq!(granted, self.connections.len(), "the key was free");
        for connection in &mut self.connections {
            let deleted: u64 = redis::cmd("EVALSHA")
                .arg(&[&self.delete, "1", "raw", &value])
                .query(connection)
                .expect("the node runs");
            assert_eq!(deleted, 1);
        }
    }
}

/// The figures of one way over all rounds.
struct Figures {
    times: Histogram<u64>,
    client_cpu: Duration,
    server_cpu: Duration,
    scripts: u64,
    pairs: u64,
}

fn measure(
    way: &mut dyn Way,
    servers: &[Server],
    into: &mut Figures,
) -> Result<(), Box<dyn Error>> {
    let before = servers.iter().map(ServerStats::until_now);
    let before = before.collect::<Result<Vec<_>, _>>()?;
    let cpu = support::own_cpu();
    for _ in 0..PAIRS {
        let start = Instant::now();
        way.pair();
        support::record(&mut into.times, start.elapsed());
    }
    into.client_cpu += support::own_cpu() - cpu;
    into.pairs += PAIRS as u64;
    for (server, before) in servers.iter().zip(before) {
        let stats = ServerStats::until_now(server)?.since(&before);
        into.server_cpu += stats.cpu;
        into.scripts += stats.scripts();
    }
    Ok(())
}

fn start(count: usize) -> Result<Vec<Server>, Box<dyn Error>> {
    Ok((0..count)
        .map(|_| Server::start())
        .collect::<Result<_, _>>()?)
}

fn quorum(nodes: &[Server]) -> Result<Client, Box<dyn Error>> {
    let urls = nodes.iter().map(Server::url);
    let client = Client::quorum_builder(urls).ttl(TTL).max_ttl(TTL).build()?;
    // New nodes do not vote before one `max_ttl` has passed.
    while client.mutex("first").try_lock().is_err() {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(client)
}

fn one_thread(rounds: usize) -> Result<(), Box<dyn Error>> {
    let (single, nodes) = (start(1)?, start(NODES)?);
    let mut raw = Raw::connect(&nodes)?;
    let mut of_one = Client::builder(single[0].url())
        .ttl(TTL)
        .build()?
        .mutex("k");
    let client = quorum(&nodes)?;
    let mut of_all = client.mutex("k");
    let mut ways: [(&str, &mut dyn Way, &[Server]); 3] = [
        ("one server", &mut of_one, &single),
        ("five nodes", &mut of_all, &nodes),
        ("five nodes, raw, one after the other", &mut raw, &nodes),
    ];
    let mut figures = [(); 3].map(|()| Figures {
        times: support::histogram(),
        client_cpu: Duration::ZERO,
        server_cpu: Duration::ZERO,
        scripts: 0,
        pairs: 0,
    });
    for (_, way, _) in &mut ways {
        (0..PAIRS).for_each(|_| way.pair());
    }
    for turn in 0..rounds {
        for place in 0..ways.len() {
            let at = (turn + place) % ways.len();
            let (_, way, servers) = &mut ways[at];
            measure(*way, servers, &mut figures[at])?;
        }
    }
    let mut table = support::table([
        "one thread, lock and unlock",
        "p50, ms",
        "p99, ms",
        "p50, ratio",
        "p99, ratio",
        "scripts per node and pair",
        "CPU of the client, µs",
        "CPU of all servers, µs",
    ]);
    let quantile = |of: &Figures, q: f64| of.times.value_at_quantile(q) as f64;
    for ((name, _, servers), of) in ways.iter().zip(&figures) {
        let ratio = |q: f64| quantile(of, q) / quantile(&figures[0], q);
        let per_pair = |cpu: Duration| cpu.as_secs_f64() * 1e6 / of.pairs as f64;
        table.add_row([
            (*name).to_owned(),
            format!("{:.3}", quantile(of, 0.5) / 1000.0),
            format!("{:.3}", quantile(of, 0.99) / 1000.0),
            format!("{:.2}", ratio(0.5)),
            format!("{:.2}", ratio(0.99)),
            format!(
                "{:.2}",
                of.scripts as f64 / of.pairs as f64 / servers.len() as f64
            ),
            format!("{:.0}", per_pair(of.client_cpu)),
            format!("{:.0}", per_pair(of.server_cpu)),
        ]);
    }
    println!("{rounds} rounds of {PAIRS} pairs of each way, in turn\n\n{table}\n");
    Ok(())
}

/// The times of `threads` that lock keys of their own for `window`, without those of the first `settling`.
fn times(client: &Client, threads: usize, settling: Duration, window: Duration) -> Histogram<u64> {
    let ready = Barrier::new(threads);
    let work = |thread: usize| {
        let mut mutex = client.mutex(format!("k{thread}"));
        let mut times = support::histogram();
        ready.wait();
        let begin = Instant::now();
        while begin.elapsed() < settling + window {
            let start = Instant::now();
            mutex.pair();
            if begin.elapsed() > settling {
                support::record(&mut times, start.elapsed());
            }
        }
        times
    };
    thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let mut all = support::histogram();
        for thread in running {
            all += thread.join().expect("its locks are granted");
        }
        all
    })
}

fn stopped_nodes(window: Duration) -> Result<(), Box<dyn Error>> {
    let nodes = start(NODES)?;
    let client = quorum(&nodes)?;
    let mut table = support::table(["lock and unlock, ms", "p50", "p99", "max", "count"]);
    let mut ratios = Vec::new();
    for threads in [1, MANY] {
        let healthy = times(&client, threads, Duration::ZERO, window);
        table.add_row(support::spread(
            &format!("{threads} threads, all nodes run"),
            &healthy,
        ));
        nodes[..2].iter().for_each(Server::stop);
        let degraded = times(&client, threads, SETTLING, window);
        nodes[..2].iter().for_each(Server::resume);
        table.add_row(support::spread(
            &format!("{threads} threads, 2 of 5 stopped"),
            &degraded,
        ));
        let p99 = |of: &Histogram<u64>| of.value_at_quantile(0.99) as f64;
        ratios.push(format!(
            "{threads} threads: {:.2}",
            p99(&degraded) / p99(&healthy)
        ));
        // The stopped nodes serve what was sent to them, before the next case begins.
        thread::sleep(SETTLING);
    }
    println!(
        "{table}\np99 with 2 of 5 stopped, ratio to all running: {}\n",
        ratios.join(", ")
    );

    nodes[..3].iter().for_each(Server::stop);
    let start = Instant::now();
    let refused = client.mutex("refused").try_lock();
    let took = start.elapsed();
    let kind = refused.as_ref().err().map(leasehold::Error::kind);
    if kind != Some(ErrorKind::NoQuorum) {
        return Err(format!("3 of 5 stopped, but: {refused:?}").into());
    }
    println!(
        "3 of 5 stopped: NoQuorum after {:.0} ms",
        took.as_secs_f64() * 1000.0
    );
    thread::sleep(TTL);
    for node in &nodes[3..] {
        if node.command(&["EXISTS", "leasehold:refused"])?.as_int() != Some(0) {
            return Err("a key is left on a running node after the ttl".into());
        }
    }
    nodes[..3].iter().for_each(Server::resume);
    let start = Instant::now();
    client.mutex("refused").lock()?.unlock()?;
    let took = start.elapsed().as_secs_f64() * 1000.0;
    println!("all 5 continue: the next grant after {took:.0} ms");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let (rounds, seconds) = match options.bench {
        true => (options.rounds, options.seconds),
        false => (1, options.seconds.min(0.2)),
    };
    println!("{}\n", support::machine(&Server::start()?)?);
    one_thread(rounds)?;
    stopped_nodes(Duration::from_secs_f64(seconds))
}
