//! A lock that services with the Go library rueidislock respect, and whose holders this program respects.
//!
//! rueidislock keeps the lock `job` in three keys, `rueidislock:0:job` to `rueidislock:2:job`, and a holder has at
//! least two of them. A client with the first two keys excludes all its holders, so two nested guards are the lock.
//! (If the Go services set `KeyMajority` to n, take the first n keys.) A plain connection plays the Go service here.
//!
//! Run `cargo run --example rueidislock`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::time::Duration;

use leasehold::redis::{self, Connection};
use leasehold::{Client, MutexGuard, OtherLibrary};

const JOB: &str = "example";

/// A held lock. Rust drops the fields in this order, so the inner lock is released first.
struct Both {
    inner: MutexGuard,
    outer: MutexGuard,
}

impl Both {
    /// Waits for the lock. The outer key is the one that rueidislock tries first, so no two programs wait for each
    /// other.
    fn lock(client: &Client, name: &str) -> Result<Self, leasehold::Error> {
        let outer = client.mutex(format!("0:{name}")).lock()?;
        let inner = client.mutex(format!("1:{name}")).lock()?;
        Ok(Self { inner, outer })
    }

    /// Waits for each key for at most `limit`.
    fn try_lock_for(
        client: &Client,
        name: &str,
        limit: Duration,
    ) -> Result<Option<Self>, leasehold::Error> {
        let Some(outer) = client.mutex(format!("0:{name}")).try_lock_for(limit)? else {
            return Ok(None);
        };
        let inner = client.mutex(format!("1:{name}")).try_lock_for(limit)?;
        Ok(inner.map(|inner| Self { inner, outer }))
    }

    /// Fails if one of the keys was lost. Sends no request.
    fn check(&self) -> Result<(), leasehold::Error> {
        self.inner.check()?;
        self.outer.check()
    }
}

/// Takes one of the keys as rueidislock does. Returns whether it was free.
fn set(go_service: &mut Connection, number: u8) -> redis::RedisResult<bool> {
    let mut set = redis::cmd("SET");
    set.arg(format!("rueidislock:{number}:{JOB}"))
        .arg("24 random bytes")
        .arg("NX")
        .arg("PX")
        .arg(5_000);
    set.query(go_service)
}

fn delete(go_service: &mut Connection, number: u8) -> redis::RedisResult<()> {
    redis::cmd("DEL")
        .arg(format!("rueidislock:{number}:{JOB}"))
        .query(go_service)
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let mut go_service = redis::Client::open(url.as_str())?.get_connection()?;
    let client = Client::builder(&url)
        .prefix("rueidislock:")
        .compatible_with(OtherLibrary::PlainKeys)
        .build()?;
    let soon = Duration::from_millis(100);

    for number in 0..3 {
        assert!(set(&mut go_service, number)?, "another program uses {JOB}");
    }
    let taken = Both::try_lock_for(&client, JOB, soon)?.is_none();
    println!("the Go service holds the lock, and keeps us out: {taken}");

    // A holder that has lost a key still has a majority.
    delete(&mut go_service, 0)?;
    let taken = Both::try_lock_for(&client, JOB, soon)?.is_none();
    println!("the Go service holds two of three keys, and keeps us out: {taken}");

    for number in 1..3 {
        delete(&mut go_service, number)?;
    }
    let both = Both::lock(&client, JOB)?;
    both.check()?;
    let refused = !set(&mut go_service, 0)?;
    println!("we hold the lock, and keep the Go service out: {refused}");
    drop(both);
    Ok(())
}
