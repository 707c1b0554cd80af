//! Kills the primary of a group under sentinels, or a master of a Cluster, and measures the time until the next grant.
//! Also measures the time until the sentinels publish the new primary, or until the Cluster accepts a write again. Two
//! clients acquire and release one lock all the time.
//!
//! Exits with an error if a call fails for another reason than a lost lease.

mod support;

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use leasehold::Client;
use leasehold_testbed::{Cluster, SentinelGroup};

/// How long a fail-over may take before the bench fails.
const LIMIT: Duration = Duration::from_secs(60);
/// Longer than a fail-over takes, so that a lock whose release was lost delays the next grant visibly.
const TTL: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, ValueEnum)]
enum Topology {
    Sentinel,
    Cluster,
}

#[derive(Parser)]
struct Options {
    /// The servers that fail over
    #[arg(long, value_enum, default_value = "sentinel")]
    topology: Topology,
    /// Number of fail-overs
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// Servers with replicas, and the key of a lock on one of them.
trait Servers {
    /// The report's name for the moment when the servers themselves have failed over.
    const SWITCH: &'static str;

    fn url(&self) -> String;

    /// Kills the server that has the lock. Returns when it was killed.
    fn kill(&mut self) -> Result<Instant, Box<dyn Error>>;

    /// Returns when the servers themselves had failed over. Called after the new server has granted the lock.
    fn switched(&mut self) -> Result<Instant, Box<dyn Error>>;

    /// Restarts the killed server, and waits until it is a replica.
    fn repair(&mut self) -> Result<(), Box<dyn Error>>;
}

struct UnderSentinels {
    group: SentinelGroup,
    published: Receiver<Instant>,
    killed: usize,
}

impl Servers for UnderSentinels {
    const SWITCH: &'static str = "+switch-master of the first sentinel";

    fn url(&self) -> String {
        self.group.url()
    }

    fn kill(&mut self) -> Result<Instant, Box<dyn Error>> {
        self.killed = self.group.primary().ok_or("the sentinels do not agree")?;
        self.published.try_iter().for_each(drop);
        let at = Instant::now();
        self.group.server_mut(self.killed).kill();
        Ok(at)
    }

    fn switched(&mut self) -> Result<Instant, Box<dyn Error>> {
        Ok(self.published.recv_timeout(LIMIT)?)
    }

    fn repair(&mut self) -> Result<(), Box<dyn Error>> {
        self.group.wait_for_switch(self.killed)?;
        self.group.server_mut(self.killed).restart()?;
        Ok(self.group.wait_until_whole()?)
    }
}

struct InCluster {
    cluster: Cluster,
    killed: usize,
    /// Reports when the replica has accepted a write in the slot of the lock.
    written: Option<thread::JoinHandle<Option<Instant>>>,
}

impl Servers for InCluster {
    const SWITCH: &'static str = "the next write that the Cluster accepts";

    fn url(&self) -> String {
        self.cluster.url()
    }

    fn kill(&mut self) -> Result<Instant, Box<dyn Error>> {
        // The lock's key has no hash tag, so the whole key decides its slot. This tag is that key, so both have one
        // slot.
        let key = "{leasehold:k}write";
        self.killed = self.cluster.master_of_key(key);
        let master = &self.cluster.nodes()[self.killed];
        let mut master = redis::Client::open(master.url())?.get_connection()?;
        // A replica that has just begun to follow its master may lack the last second.
        redis::cmd("SET").arg(key).arg("x").exec(&mut master)?;
        redis::cmd("WAIT").arg(1).arg(5000).exec(&mut master)?;
        let replica = &self.cluster.nodes()[self.cluster.replica_of(self.killed)];
        let mut replica = redis::Client::open(replica.url())?.get_connection()?;
        let at = Instant::now();
        self.cluster.node(self.killed).kill();
        self.written = Some(thread::spawn(move || {
            while at.elapsed() < LIMIT {
                // A replica answers MOVED.
                if redis::cmd("SET")
                    .arg(key)
                    .arg("x")
                    .exec(&mut replica)
                    .is_ok()
                {
                    return Some(Instant::now());
                }
                thread::sleep(Duration::from_millis(2));
            }
            None
        }));
        Ok(at)
    }

    fn switched(&mut self) -> Result<Instant, Box<dyn Error>> {
        let written = self.written.take().ok_or("no server was killed")?;
        let written = written.join().map_err(|_| "a thread panicked")?;
        written.ok_or_else(|| "the replica did not take over".into())
    }

    fn repair(&mut self) -> Result<(), Box<dyn Error>> {
        self.cluster.node(self.killed).restart()?;
        Ok(self.cluster.wait_until_ok()?)
    }
}

/// Reports when each sentinel publishes a fail-over.
fn listen(group: &SentinelGroup) -> Result<Receiver<Instant>, Box<dyn Error>> {
    let (publish, published) = channel();
    for sentinel in group.sentinels() {
        let client = redis::Client::open(sentinel.url())?;
        let mut connection = client.get_connection()?;
        let publish = publish.clone();
        let (ready, is_ready) = channel();
        thread::spawn(move || {
            let mut subscription = connection.as_pubsub();
            if subscription.subscribe("+switch-master").is_ok() {
                let _ = ready.send(());
            }
            while subscription.get_message().is_ok() {
                if publish.send(Instant::now()).is_err() {
                    return;
                }
            }
        });
        is_ready.recv()?;
    }
    Ok(published)
}

/// Acquires and releases the lock until `done`, and reports when each request for the lock began and when it was
/// granted.
fn work(
    client: &Client,
    done: &AtomicBool,
    granted: &Sender<(Instant, Instant)>,
) -> Result<(), leasehold::Error> {
    let mutex = client.mutex("k");
    while !done.load(Ordering::Relaxed) {
        let asked = Instant::now();
        let guard = mutex.lock()?;
        let _ = granted.send((asked, Instant::now()));
        thread::sleep(Duration::from_millis(2));
        match guard.unlock() {
            Err(error) if !error.is_lease_lost() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The first grant by the new primary. That is the first grant after a pause without grants, or the first one whose
/// request came after the kill.
fn next_grant(
    granted: &Receiver<(Instant, Instant)>,
    killed: Instant,
) -> Result<Instant, Box<dyn Error>> {
    loop {
        let (_, at) = granted.recv_timeout(LIMIT)?;
        // The last grants of the old primary arrive within moments of the kill.
        if at > killed + Duration::from_millis(200) {
            return Ok(at);
        }
    }
}

fn measure<S: Servers>(mut servers: S, rounds: usize) -> Result<(), Box<dyn Error>> {
    let done = Arc::new(AtomicBool::new(false));
    let (grant, granted) = channel();
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let client = Client::builder(servers.url())
                .ttl(TTL)
                .outage_timeout(LIMIT)
                .build()?;
            let (done, grant) = (Arc::clone(&done), grant.clone());
            Ok(thread::spawn(move || work(&client, &done, &grant)))
        })
        .collect::<Result<_, leasehold::Error>>()?;
    let (mut switches, mut grants, mut behind) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        granted.try_iter().for_each(drop);
        let killed = servers.kill()?;
        let at = next_grant(&granted, killed)?;
        let switched = servers.switched()?;
        switches.push(switched - killed);
        grants.push(at - killed);
        behind.push(at.saturating_duration_since(switched));
        println!(
            "fail-over {round}: switched after {:?}, granted after {:?}",
            switched - killed,
            at - killed
        );
        servers.repair()?;
    }
    done.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.join().map_err(|_| "a worker panicked")??;
    }
    let show = |what: &str, mut times: Vec<Duration>| {
        times.sort_unstable();
        let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
        println!("{what}: median {median:?}, maximum {most:?}");
    };
    show(&format!("kill to {}", S::SWITCH), switches);
    show("kill to the next grant", grants);
    show("the servers' own switch to the next grant", behind);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let _loops = options.busy.start()?;
    match options.topology {
        Topology::Sentinel => {
            let group = SentinelGroup::start()?;
            let published = listen(&group)?;
            let servers = UnderSentinels {
                group,
                published,
                killed: 0,
            };
            measure(servers, options.rounds)
        }
        Topology::Cluster => {
            // As in docs/topologies.md: `cluster-node-timeout 1000`.
            let cluster = Cluster::builder().node_timeout(Duration::from_secs(1));
            let cluster = cluster.start()?;
            let servers = InCluster {
                cluster,
                killed: 0,
                written: None,
            };
            measure(servers, options.rounds)
        }
    }
}
