//! Kills the primary of a group under sentinels, and measures the time until the next grant, and the time until the
//! sentinels publish the new primary. Two clients acquire and release one lock all the time.
//!
//! Exits with an error if a call fails for another reason than a lost lease.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use leasehold::Client;
use leasehold_testbed::SentinelGroup;

/// How long a fail-over may take before the bench fails.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Options {
    /// Number of fail-overs
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
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

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut group = SentinelGroup::start()?;
    let published = listen(&group)?;
    let done = Arc::new(AtomicBool::new(false));
    let (grant, granted) = channel();
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let client = Client::builder(group.url())
                .ttl(Duration::from_secs(3))
                .outage_timeout(LIMIT)
                .build()?;
            let (done, grant) = (Arc::clone(&done), grant.clone());
            Ok(thread::spawn(move || work(&client, &done, &grant)))
        })
        .collect::<Result<_, leasehold::Error>>()?;
    let (mut sentinels, mut grants, mut behind) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        let primary = group.primary().ok_or("the sentinels do not agree")?;
        granted.try_iter().for_each(drop);
        published.try_iter().for_each(drop);
        let killed = Instant::now();
        group.server_mut(primary).kill();
        let at = next_grant(&granted, killed)?;
        let switched = published.recv_timeout(LIMIT)?;
        sentinels.push(switched - killed);
        grants.push(at - killed);
        behind.push(at.saturating_duration_since(switched));
        println!(
            "fail-over {round}: published after {:?}, granted after {:?}",
            switched - killed,
            at - killed
        );
        group.wait_for_switch(primary)?;
        group.server_mut(primary).restart()?;
        group.wait_until_whole()?;
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
    show("kill to +switch-master of the first sentinel", sentinels);
    show("kill to the next grant", grants);
    show("+switch-master to the next grant", behind);
    Ok(())
}
