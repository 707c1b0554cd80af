//! Leader election among several candidates. A leader that loses the lock becomes a candidate again. So there is a new
//! leader soon after the old leader crashed, was cut off, or was deposed.
//!
//! Here the candidates are threads, each with its own client; in production they would be processes on several
//! machines. `main` plays an operator: it deposes three leaders, and then ends the election.
//!
//! Run `cargo run --example leader`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::Duration;

use leasehold::Client;
use leasehold::crossbeam_channel::{Receiver, Sender, bounded, select, unbounded};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = || {
        Client::builder(&url)
            .ttl(Duration::from_secs(5)) // after a crash there is no leader for this long at most
            .build()
    };
    let (stop, stopped) = bounded(0);
    let (tell, elected) = unbounded();
    let mut candidates = Vec::new();
    for name in ["north", "south"] {
        let (client, stopped, tell) = (client()?, stopped.clone(), tell.clone());
        candidates.push(thread::spawn(move || stand(name, &client, &stopped, &tell)));
    }

    let operator = client()?;
    for _ in 0..3 {
        let name = elected.recv()?;
        println!("{name} is deposed");
        operator.mutex("leader").force_unlock()?;
    }
    elected.recv()?;
    drop(stop);
    for candidate in candidates {
        candidate.join().expect("the candidate does not panic")?;
    }
    println!(
        "the lock is free: {:?}",
        operator.mutex("leader").inspect()?
    );
    Ok(())
}

fn stand(
    name: &'static str,
    client: &Client,
    stopped: &Receiver<()>,
    tell: &Sender<&'static str>,
) -> Result<(), leasehold::Error> {
    let mutex = client.mutex("leader");
    loop {
        // `lock()` would return as soon as there is no leader. Polling instead leaves the thread free for other work.
        let Some(guard) = mutex.try_lock()? else {
            select! {
                recv(stopped) -> _ => return Ok(()),
                default(Duration::from_millis(200)) => continue,
            }
        };
        println!("{name} leads, with token {}", guard.fencing_token());
        let _ = tell.send(name);
        let lost = guard.lost_signal();
        loop {
            select! {
                // The channel is ready when the validity ends, at the latest, even if Redis cannot be reached. Until
                // then no other candidate can lead.
                recv(lost) -> reason => {
                    println!("{name} steps down: {}", reason.expect("the channel stays open"));
                    break;
                }
                recv(stopped) -> _ => return Ok(()), // dropping the guard releases the lock
                default(Duration::from_millis(50)) => {
                    // A small piece of the leader's work. Short pieces let the leader notice a loss soon.
                }
            }
        }
    }
}
