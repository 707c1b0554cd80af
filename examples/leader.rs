//! Leader election among several candidates. A leader that loses its term becomes a candidate again. So there is a new
//! leader soon after the old leader crashed, was cut off, or was deposed. An observer follows the election: it always
//! knows the address of the leader.
//!
//! Here the candidates are threads, each with its own client; in production they would be processes on several
//! machines. `main` plays an operator: it deposes three leaders, and then ends the election.
//!
//! Run `cargo run --example leader`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::Duration;

use leasehold::crossbeam_channel::{Receiver, bounded, select};
use leasehold::{Client, ErrorKind, LeaderState};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = || {
        Client::builder(&url)
            .ttl(Duration::from_secs(5)) // after a crash there is no leader for this long at most
            .build()
    };
    let (stop, stopped) = bounded(0);
    let mut candidates = Vec::new();
    for address in ["10.0.0.7:80", "10.0.0.8:80"] {
        let (client, stopped) = (client()?, stopped.clone());
        candidates.push(thread::spawn(move || stand(address, &client, &stopped)));
    }

    let operator = client()?;
    let mut last_token = 0;
    let mut deposed = 0;
    for state in operator.election("leader").observe()? {
        match state {
            LeaderState::Leader(leader) => {
                // A leader whose value has not been written yet has none.
                let Some(address) = leader.value().map(String::from_utf8_lossy) else {
                    continue;
                };
                assert!(leader.fencing_token() >= last_token, "tokens never fall");
                last_token = leader.fencing_token();
                println!("{address} is the leader");
                if deposed == 3 {
                    break;
                }
                println!("{address} is deposed");
                operator.mutex("leader").force_unlock()?;
                deposed += 1;
            }
            LeaderState::Vacant => println!("there is no leader"),
            LeaderState::Unknown => println!("Redis does not answer"),
        }
    }
    drop(stop);
    for candidate in candidates {
        candidate.join().expect("the candidate does not panic")?;
    }
    println!(
        "there is no leader: {:?}",
        operator.election("leader").leader()?
    );
    Ok(())
}

fn stand(
    address: &'static str,
    client: &Client,
    stopped: &Receiver<()>,
) -> Result<(), leasehold::Error> {
    let election = client.election("leader").cancelled_by(stopped.clone());
    loop {
        // Waits until this candidate leads. Candidates lead in the order in which they asked.
        let term = match election.campaign(address) {
            Err(error) if error.kind() == ErrorKind::Cancelled => return Ok(()),
            Err(error) if error.is_lease_lost() => continue, // deposed before its address was written
            term => term?,
        };
        println!("{address} leads, with token {}", term.fencing_token());
        let lost = term.lost_signal();
        loop {
            select! {
                // The channel is ready when the validity ends, at the latest, even if Redis cannot be reached. Until
                // then no other candidate can lead.
                recv(lost) -> reason => {
                    println!("{address} steps down: {}", reason.expect("the channel stays open"));
                    break;
                }
                recv(stopped) -> _ => {
                    term.resign()?; // the next candidate leads at once
                    return Ok(());
                }
                default(Duration::from_millis(50)) => {
                    // A small piece of the leader's work. Short pieces let the leader notice a loss soon.
                }
            }
        }
    }
}
