//! Calls of a service that allows five calls in each 200 ms, from all processes together.
//!
//! A semaphore with `min_hold` keeps each of its permits taken for 200 ms after the grant, even if the call has ended
//! earlier or the process has crashed. Callers beyond the limit wait in the order in which they asked. (Without
//! `min_hold`, the semaphore limits how many calls run at a time.)
//!
//! Run `cargo run --example rate_limit`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::Client;

const WINDOW: Duration = Duration::from_millis(200);
const CALLS: u32 = 3;

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    // Each thread has its own client, as a process of its own would.
    let clients = [(); 4].map(|()| Client::open(&url));
    let started = Instant::now();
    let mut processes = Vec::new();
    for client in clients {
        let client = client?;
        processes.push(thread::spawn(move || work(&client)));
    }
    for process in processes {
        process.join().expect("the process does not panic")?;
    }
    // The first five calls are made at once, and the next five a window later.
    let is_limited = started.elapsed() >= 2 * WINDOW;
    println!("12 calls took two windows at least: {is_limited}");
    Ok(())
}

fn work(client: &Client) -> Result<(), leasehold::Error> {
    let calls = client.semaphore("example:mail-api", 5).min_hold(WINDOW);
    for _ in 0..CALLS {
        calls.with(|permit| {
            // Here the process calls the service. A permit has no fencing token, so a long call checks it now and then.
            permit.check()
        })??;
    }
    Ok(())
}
