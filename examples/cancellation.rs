//! A program that ends while its worker waits for a lock.
//!
//! `lock()` waits for as long as another holder has the lock. A channel cancels the wait. One channel can cancel any
//! number of waits, for example from the thread of a signal handler.
//!
//! Run `cargo run --example cancellation`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::Duration;

use leasehold::crossbeam_channel::{Receiver, bounded};
use leasehold::{Client, ErrorKind};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = Client::open(&url)?;

    // Another client holds the lock.
    let other = Client::open(&url)?;
    let held = other.mutex("example:import").lock()?;

    // Dropping the sender cancels all waits, the present and the later ones. No message is ever sent.
    let (stop, stopped) = bounded(0);
    let worker = thread::spawn({
        let client = client.clone();
        move || work(&client, stopped)
    });

    // The program ends now, so it drops `stop`. With the crate `ctrlc`, the handler of Ctrl-C would own `stop` and drop
    // it.
    println!("stopping");
    drop(stop);
    worker.join().expect("the worker does not panic")?;

    // Waits until Redis has confirmed all releases, and ends the client's threads.
    client.shutdown(Duration::from_secs(2))?;
    held.unlock()?; // the cancelled wait has not affected the holder
    println!("ended");
    Ok(())
}

fn work(client: &Client, stopped: Receiver<()>) -> Result<(), leasehold::Error> {
    let mutex = client.mutex("example:import").cancelled_by(stopped);
    match mutex.lock() {
        Ok(guard) => guard.unlock().map(drop),
        // The client has left the queue of the lock in Redis.
        Err(error) if error.kind() == ErrorKind::Cancelled => {
            println!("the worker stops waiting: {error}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}
