//! A quorum of five servers beside a single server: the time of a lock and its release, requests and CPU time, what
//! stopped nodes (SIGSTOP) change, and how fair the lock is to processes that want one key.
//!
//! Each round measures all ways in turn, so that other load on the machine affects all alike. The raw way is the
//! published algorithm of Redlock, written with blocking connections: it asks one node after the other. Other ways are
//! programs with the locks of other libraries, which `crates/peers/` has.

mod fairness;
#[path = "../support/mod.rs"]
mod support;

use std::convert::Infallible;
use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use hdrhistogram::Histogram;
use leasehold::{Client, ErrorKind, Mutex};
use leasehold_load::{ServerStats, Turns};
use leasehold_testbed::{Process, Server};

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
    /// Seconds for which processes want one key
    #[arg(long, default_value_t = 10.0)]
    contended_seconds: f64,
    /// Number of processes that want the key
    #[arg(long, default_value_t = 5)]
    processes: usize,
    /// Measure this program of `crates/peers/` on five nodes, too
    #[arg(long = "peer", value_name = "NAME=PROGRAM", value_parser = named_program)]
    peers: Vec<(String, String)>,
    /// Only measure how fair the lock is
    #[arg(long)]
    only_fairness: bool,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

fn named_program(text: &str) -> Result<(String, String), String> {
    let (name, program) = text.split_once('=').ok_or("it has no `=`")?;
    Ok((name.to_owned(), program.to_owned()))
}

/// How long a program of `crates/peers/` may take for its pairs.
const PEER: Duration = Duration::from_secs(60);

/// One way to lock and release.
trait Way {
    fn run(&mut self, pairs: usize) -> Result<Turns, Box<dyn Error>>;
}

fn pair(mutex: &Mutex) {
    let guard = mutex.lock().expect("no other thread wants the lock");
    guard.unlock().expect("most nodes run");
}

impl Way for Mutex {
    fn run(&mut self, pairs: usize) -> Result<Turns, Box<dyn Error>> {
        let done: Result<_, Infallible> = Turns::run(pairs, || {
            pair(self);
            Ok(())
        });
        Ok(done?)
    }
}

/// A program with the locks of another library.
struct Peer(Process<Turns>);

impl Peer {
    fn start(name: &str, program: &str, nodes: &[Server]) -> Result<Self, Box<dyn Error>> {
        let urls: Vec<String> = nodes.iter().map(Server::url).collect();
        let mut command = Command::new(program);
        let process = Process::start(name, command.arg("quorum"), &urls)?;
        process.message(PEER)?;
        Ok(Self(process))
    }
}

impl Way for Peer {
    fn run(&mut self, pairs: usize) -> Result<Turns, Box<dyn Error>> {
        self.0.order(&pairs)?;
        Ok(self.0.message(PEER)?)
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

impl Raw {
    fn pair(&mut self) -> Result<(), redis::RedisError> {
        self.attempts += 1;
        let value = format!("{:032x}", self.attempts);
        let mut granted = 0;
        for connection in &mut self.connections {
            let reply: Option<String> = redis::cmd("SET")
                .arg(&["raw", &value, "NX", "PX", "30000"])
                .query(connection)?;
            granted += usize::from(reply.is_some());
        }
        assert_eq!(granted, self.connections.len(), "the key was free");
        for connection in &mut self.connections {
            let deleted: u64 = redis::cmd("EVALSHA")
                .arg(&[&self.delete, "1", "raw", &value])
                .query(connection)?;
            assert_eq!(deleted, 1);
        }
        Ok(())
    }
}

impl Way for Raw {
    fn run(&mut self, pairs: usize) -> Result<Turns, Box<dyn Error>> {
        Ok(Turns::run(pairs, || self.pair())?)
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
    let turns = way.run(PAIRS)?;
    for micros in turns.micros {
        support::record(&mut into.times, Duration::from_micros(micros));
    }
    into.client_cpu += Duration::from_micros(turns.cpu_micros);
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

fn one_thread(rounds: usize, peers: &[(String, String)]) -> Result<(), Box<dyn Error>> {
    let (single, nodes) = (start(1)?, start(NODES)?);
    let mut raw = Raw::connect(&nodes)?;
    let mut of_one = Client::builder(single[0].url())
        .ttl(TTL)
        .build()?
        .mutex("k");
    let client = quorum(&nodes)?;
    let mut of_all = client.mutex("k");
    let mut started = Vec::new();
    for (name, program) in peers {
        let name = format!("five nodes, {name}");
        started.push((name, Peer::start(program, program, &nodes)?));
    }
    let mut ways: Vec<(&str, &mut dyn Way, &[Server])> = vec![
        ("one server", &mut of_one, &single),
        ("five nodes", &mut of_all, &nodes),
        ("five nodes, raw, one after the other", &mut raw, &nodes),
    ];
    for (name, peer) in &mut started {
        ways.push((name, peer, &nodes));
    }
    let figures = |_: &_| Figures {
        times: support::histogram(),
        client_cpu: Duration::ZERO,
        server_cpu: Duration::ZERO,
        scripts: 0,
        pairs: 0,
    };
    let mut figures: Vec<Figures> = ways.iter().map(figures).collect();
    for (_, way, _) in &mut ways {
        way.run(PAIRS)?;
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
        "CPU of the client, ratio",
        "CPU of all servers, ratio",
    ]);
    let quantile = |of: &Figures, q: f64| of.times.value_at_quantile(q) as f64;
    let share = |of: &Figures, cpu: fn(&Figures) -> Duration| {
        cpu(of).as_secs_f64() / cpu(&figures[1]).as_secs_f64()
    };
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
            format!("{:.2}", share(of, |one| one.client_cpu)),
            format!("{:.2}", share(of, |one| one.server_cpu)),
        ]);
    }
    println!(
        "{rounds} rounds of {PAIRS} pairs of each way, in turn. Times are compared with one server, CPU time with five \
         nodes.\n\n{table}\n"
    );
    Ok(())
}

/// The times of `threads` that lock keys of their own for `window`, without those of the first `settling`.
fn times(client: &Client, threads: usize, settling: Duration, window: Duration) -> Histogram<u64> {
    let ready = Barrier::new(threads);
    let work = |thread: usize| {
        let mutex = client.mutex(format!("k{thread}"));
        let mut times = support::histogram();
        ready.wait();
        let begin = Instant::now();
        while begin.elapsed() < settling + window {
            let start = Instant::now();
            pair(&mutex);
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

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some(fairness::ROLE) {
        return fairness::contend();
    }
    match measure_all(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_all(options: &Options) -> Result<(), Box<dyn Error>> {
    let (rounds, seconds, contended) = match options.bench {
        true => (options.rounds, options.seconds, options.contended_seconds),
        false => (1, options.seconds.min(0.2), 0.2),
    };
    println!("{}\n", support::machine(&Server::start()?)?);
    let _loops = options.busy.start()?;
    if !options.only_fairness {
        one_thread(rounds, &options.peers)?;
        stopped_nodes(Duration::from_secs_f64(seconds))?;
    }
    fairness::measure(options.processes, Duration::from_secs_f64(contended))
}
