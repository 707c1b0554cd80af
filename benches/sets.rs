//! Several keys at once: the time and the requests of a free set beside one lock and beside one lock after another, and
//! the waits of clients that compete for common keys.
//!
//! Ends with an error if a free set of eight keys takes more than two requests or more than 1.6 times the time of one
//! lock, if a client gets no grant, or if the longest wait is more than four times the fair one.

mod support;

use std::error::Error;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use leasehold::{Client, Mutex, Mutexes};
use leasehold_testbed::Server;

/// The most that a free set of eight keys may take, in times of one lock.
const SLOWEST_SET: f64 = 1.6;
/// The longest wait that is allowed, in fair waits.
const LONGEST_WAIT: f64 = 4.0;

/// During this time, the clients connect for notifications. Their turns do not count.
const WARM_UP: Duration = Duration::from_secs(2);

#[derive(Parser)]
struct Options {
    /// Number of rounds of the free sets
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Locks of each way in a round
    #[arg(long, default_value_t = 200)]
    locks: usize,
    /// Clients that lock random sets of 3 of 10 keys
    #[arg(long, default_value_t = 100)]
    clients: usize,
    /// How long clients compete
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn names(n: usize) -> impl Iterator<Item = String> {
    (0..n).map(|n| format!("key-{n}"))
}

/// A way to acquire free keys.
enum Way {
    Lock(Mutex),
    Set(Mutexes),
    /// One lock after another, in the same order.
    Each(Vec<Mutex>),
}

impl Way {
    fn run(&self) -> std::result::Result<(), leasehold::Error> {
        match self {
            Self::Lock(mutex) => mutex.lock()?.unlock().map(drop),
            Self::Set(set) => set.lock()?.unlock().map(drop),
            Self::Each(mutexes) => {
                let guards = mutexes.iter().map(Mutex::lock);
                let guards = guards.collect::<std::result::Result<Vec<_>, _>>()?;
                guards
                    .into_iter()
                    .try_for_each(|guard| guard.unlock().map(drop))
            }
        }
    }
}

fn requests(server: &Server) -> Result<u64> {
    let calls = |command| server.calls(command);
    Ok(calls("evalsha")? + calls("exec")? + calls("delex")?)
}

/// Measures free sets. Returns the time of a set of eight keys, in times of one lock.
fn free(server: &Server, options: &Options) -> Result<f64> {
    let client = Client::open(server.url())?;
    let mut ways = vec![("one lock".to_owned(), Way::Lock(client.mutex("key-0")))];
    for n in [1, 2, 8, 32] {
        ways.push((format!("set of {n}"), Way::Set(client.mutexes(names(n)))));
    }
    let each = names(8).map(|name| client.mutex(name)).collect();
    ways.push(("8 locks, one after another".to_owned(), Way::Each(each)));
    for (_, way) in &ways {
        way.run()?;
    }
    let rounds = if options.bench { options.rounds } else { 1 };
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); ways.len()];
    for turn in 0..rounds {
        for place in 0..ways.len() {
            let way = (turn + place) % ways.len();
            let began = Instant::now();
            for _ in 0..options.locks {
                ways[way].1.run()?;
            }
            times[way].push(began.elapsed().as_secs_f64() * 1e6 / options.locks as f64);
        }
    }
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect();
    let mut table = support::table([
        "way",
        "lock and unlock, µs",
        "times of one lock",
        "requests",
    ]);
    for ((name, way), time) in ways.iter().zip(&medians) {
        let before = requests(server)?;
        way.run()?;
        let sent = requests(server)? - before;
        table.add_row([
            name.clone(),
            format!("{time:.1}"),
            format!("{:.2}", time / medians[0]),
            sent.to_string(),
        ]);
        if name == "set of 8" && sent > 2 {
            return Err(format!("{sent} requests for a set of 8 keys").into());
        }
    }
    println!(
        "median of {rounds} rounds of {} each, in turn\n\n{table}\n",
        options.locks
    );
    Ok(medians[3] / medians[0])
}

/// Lets clients compete for `during`. `set` chooses the next set of a client. Returns the waits of each client.
fn compete(
    server: &Server,
    clients: usize,
    during: Duration,
    set: impl Fn(usize, &Client) -> Mutexes + Sync,
) -> Result<Vec<Vec<Duration>>> {
    let open = |_| Client::open(server.url());
    let open: Vec<Client> = (0..clients)
        .map(open)
        .collect::<std::result::Result<_, _>>()?;
    let begin = Barrier::new(clients);
    let waits = thread::scope(|scope| {
        let threads: Vec<_> = open
            .iter()
            .enumerate()
            .map(|(n, client)| {
                let (set, begin) = (&set, &begin);
                scope.spawn(move || {
                    begin.wait();
                    let start = Instant::now() + WARM_UP;
                    let end = start + during;
                    let mut waits = Vec::new();
                    while Instant::now() < end {
                        let asked = Instant::now();
                        let guard = set(n, client).lock()?;
                        if asked >= start {
                            waits.push(asked.elapsed());
                        }
                        drop(guard);
                    }
                    Ok::<_, leasehold::Error>(waits)
                })
            })
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("no panics");
        threads
            .into_iter()
            .map(join)
            .collect::<std::result::Result<Vec<_>, _>>()
    });
    Ok(waits?)
}

/// Prints what the clients got. Returns the longest wait in fair waits, or an error if a client got nothing.
fn report(what: &str, waits: &[Vec<Duration>], during: Duration) -> Result<f64> {
    let counts = waits.iter().map(Vec::len);
    let (least, most) = (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0));
    let mut all: Vec<Duration> = waits.iter().flatten().copied().collect();
    all.sort();
    if least == 0 {
        return Err(format!("{what}: a client got no grant").into());
    }
    let fair = during.as_secs_f64() * waits.len() as f64 / all.len() as f64;
    let wait = |share: f64| all[((all.len() - 1) as f64 * share) as usize].as_secs_f64();
    let longest = wait(1.0);
    println!(
        "{what}: {:.0} grants/s, {least} to {most} per client, longest wait {:.1} ms; in times of the fair wait of \
         {:.1} ms: p50 {:.2}, p99 {:.2}, p99.9 {:.2}, longest {:.2}",
        all.len() as f64 / during.as_secs_f64(),
        longest * 1e3,
        fair * 1e3,
        wait(0.5) / fair,
        wait(0.99) / fair,
        wait(0.999) / fair,
        longest / fair,
    );
    Ok(longest / fair)
}

/// Three different keys of ten.
fn random_three() -> Vec<String> {
    let mut keys: Vec<String> = names(10).collect();
    let mut chosen = Vec::new();
    while chosen.len() < 3
        && let Some(index) = support::index(keys.len())
    {
        chosen.push(keys.swap_remove(index));
    }
    chosen
}

fn main() -> Result<()> {
    let options = Options::parse();
    let server = Server::start()?;
    println!("{}", support::machine(&server)?);
    let _loops = options.busy.start()?;
    let times = free(&server, &options)?;
    let (clients, during) = match options.bench {
        true => (options.clients, Duration::from_secs(options.seconds)),
        false => (10, Duration::from_secs(1)),
    };
    let philosophers = compete(&server, 5, during / 6, |n, client| {
        client.mutexes([format!("fork-{n}"), format!("fork-{}", (n + 1) % 5)])
    })?;
    report(
        "five philosophers with two forks",
        &philosophers,
        during / 6,
    )?;
    let random = compete(&server, clients, during, |_, client| {
        client.mutexes(random_three())
    })?;
    let wait = report("random 3 of 10 keys", &random, during)?;
    let is_measured = options.bench && !options.busy.busy;
    if is_measured && times > SLOWEST_SET {
        return Err(format!("a set of 8 keys takes {times:.2} times one lock").into());
    }
    if is_measured && wait > LONGEST_WAIT {
        return Err(format!("the longest wait is {wait:.2} times the fair one").into());
    }
    Ok(())
}
