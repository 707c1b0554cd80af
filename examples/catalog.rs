//! A catalog that many processes read, and that one of them refreshes when it is out of date.
//!
//! Readers share a lock, and a writer has it alone. A reader that finds the catalog out of date becomes the writer: if
//! it is the only reader, what it has found still holds. Otherwise it releases the lock, waits for its turn as a writer,
//! and looks again, since another process may have refreshed the catalog in between.
//!
//! Run `cargo run --example catalog`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::thread;
use std::time::SystemTime;

use leasehold::{Client, FencedValue, RwLock};

struct Catalog {
    lock: RwLock,
    version: FencedValue,
}

impl Catalog {
    fn new(client: &Client) -> Self {
        Self {
            lock: client.rw_lock("example:catalog"),
            version: client.fenced_value("example:catalog"),
        }
    }

    fn has(&self, version: &str) -> Result<bool, leasehold::Error> {
        Ok(self.version.read()?.as_deref() == Some(version.as_bytes()))
    }

    /// Reads the catalog in this version. Returns true if this call has refreshed it.
    fn read(&self, version: &str) -> Result<bool, leasehold::Error> {
        let reader = self.lock.read()?;
        if self.has(version)? {
            // Here the process reads the catalog, beside other readers.
            return Ok(false);
        }
        let writer = match reader.try_upgrade()? {
            Ok(writer) => writer,
            Err(reader) => {
                // There are other readers. The call for the writer's lock would wait for this reader, too.
                drop(reader);
                let writer = self.lock.write()?;
                if self.has(version)? {
                    return Ok(false);
                }
                writer
            }
        };
        // If this process lost the lock, and a later writer has written, Redis refuses this write.
        self.version.write(writer.fencing_token(), version)?;
        // The waiting readers enter now, and writers stay out while this process reads what it has written.
        let reader = writer.downgrade()?;
        reader.unlock()?;
        Ok(true)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let version = format!("version {}", now.as_nanos());

    // Each thread has its own client, as a process of its own would.
    let mut processes = Vec::new();
    for _ in 0..4 {
        let (catalog, version) = (Catalog::new(&Client::open(&url)?), version.clone());
        processes.push(thread::spawn(move || catalog.read(&version)));
    }
    let mut refreshed = 0;
    for process in processes {
        if process.join().expect("the reader does not panic")? {
            refreshed += 1;
        }
    }
    println!("4 processes read the catalog, and {refreshed} of them refreshed it");
    Ok(())
}
