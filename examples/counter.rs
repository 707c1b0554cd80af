//! A counter that is raised by a read and a write. The lock keeps other writers out between the two.
//!
//! Two clients stand for two processes here, and two threads share each client. Start the example several times at
//! once, on as many machines as you like: the counter keeps each update.
//!
//! Run `cargo run --example counter`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;

use leasehold::Client;
use leasehold::redis::{self, Commands};

const ROUNDS: u64 = 25;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let clients = [Client::open(&url)?, Client::open(&url)?];

    thread::scope(|scope| -> Result<(), Box<dyn Error + Send + Sync>> {
        // `clone` costs nothing: all clones share the connections and the watchdog.
        let threads: Vec<_> = clients
            .iter()
            .flat_map(|client| [client.clone(), client.clone()])
            .map(|client| scope.spawn(|| raise(client, &url)))
            .collect();
        for thread in threads {
            thread.join().expect("the thread does not panic")?;
        }
        Ok(())
    })?;

    let mut redis = redis::Client::open(url)?.get_connection()?;
    let total: u64 = redis.get("example:counter")?;
    println!("raised {} times, the counter is {total}", 4 * ROUNDS);
    Ok(())
}

fn raise(client: Client, url: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut redis = redis::Client::open(url)?.get_connection()?;
    for _ in 0..ROUNDS {
        // Waits for the lock, runs the closure, and releases the lock, even if the closure panics. The first `?` is for
        // errors of the lock: `LeaseLost` if the lock was lost before. The second `?` is for errors of the closure.
        client.with_lock("counter", || {
            let count: Option<u64> = redis.get("example:counter")?;
            redis.set::<_, _, ()>("example:counter", count.unwrap_or(0) + 1)
        })??;
    }
    Ok(())
}
