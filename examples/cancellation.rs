//! A program that is told to end while its worker waits for a lock.
//!
//! `lock()` waits for as long as others hold it. What ends the wait is a channel, so that any number of
//! waits can be ended at once, from a signal handler's thread or wherever else the end is decided.
//!
//! `cargo run --example cancellation`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::Duration;

use leasehold::crossbeam_channel::{Receiver, bounded};
use leasehold::{Client, ErrorKind};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = Client::open(&url)?;

    // Somebody else has the lock, and keeps it.
    let other = Client::open(&url)?;
    let held = other.mutex("example:import").lock()?;

    // Nothing is ever sent: that the sender has gone tells everybody who listens, now and later.
    let (stop, stopped) = bounded(0);
    let worker = thread::spawn({
        let client = client.clone();
        move || work(&client, stopped)
    });

    // The program is to end. With the crate `ctrlc` this would stand in the handler of Ctrl-C, which
    // owns `stop`.
    println!("told to stop");
    drop(stop);
    worker.join().expect("it does not panic")?;

    // Writes what is still to be written, and ends the client's threads.
    client.shutdown(Duration::from_secs(2))?;
    held.unlock()?; // still the other's: to give up waiting has taken nothing from it
    println!("ended");
    Ok(())
}

fn work(client: &Client, stopped: Receiver<()>) -> Result<(), leasehold::Error> {
    let mutex = client.mutex("example:import").cancelled_by(stopped);
    match mutex.lock() {
        Ok(guard) => guard.unlock().map(drop),
        // What the wait has left in Redis, its place in line, is taken back.
        Err(error) if error.kind() == ErrorKind::Cancelled => {
            println!("the worker gives up waiting: {error}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}
