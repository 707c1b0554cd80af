//! Money that is moved between two accounts in Redis, only while the lock is held.
//!
//! Data in the same Redis server as the lock needs no fencing token: when it writes, Redis itself checks that the lock
//! is still held, and writes everything or nothing.
//!
//! Run `cargo run --example transaction`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;

use leasehold::redis::{self, Commands, cmd};
use leasehold::{Client, MutexGuard};

/// Moves `amount` from account a to account b, and returns the rest in a; `None` if a has too little.
fn move_money(guard: &MutexGuard, amount: i64) -> Result<Option<i64>, leasehold::Error> {
    let moved = guard.transaction(|conn, pipe| {
        // This `WATCH` is for writers that do not take the lock. If such a writer changes the balance before Redis
        // executes `pipe`, this closure runs again. So the closure should only read and fill `pipe`.
        cmd("WATCH").arg("example:money:a").exec(conn)?;
        let balance: i64 = conn.get::<_, Option<i64>>("example:money:a")?.unwrap_or(0);
        if balance < amount {
            return Ok(false);
        }
        pipe.decr("example:money:a", amount);
        pipe.incr("example:money:b", amount).ignore();
        Ok(true)
    })?;
    if !moved.value {
        return Ok(None);
    }
    // The replies to the commands in `pipe` that are not marked with `ignore`.
    let (left,) = moved.replies()?;
    Ok(Some(left))
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let mut redis = redis::Client::open(url.as_str())?.get_connection()?;
    redis.mset::<_, _, ()>(&[("example:money:a", 60), ("example:money:b", 0)])?;

    let client = Client::open(&url)?;
    let guard = client.mutex("example:money").lock()?;
    println!("first: {:?}", move_money(&guard, 50)?);
    println!("second: {:?}", move_money(&guard, 50)?);

    // An operator takes the lock away. The transaction writes nothing, even if this client has not noticed the loss.
    client.mutex("example:money").force_unlock()?;
    match move_money(&guard, 5) {
        Err(error) if error.is_lease_lost() => println!("third: {error}"),
        other => println!("this must not happen: {other:?}"),
    }
    let (a, b): (i64, i64) = redis.mget(&["example:money:a", "example:money:b"])?;
    println!("{a} here, {b} there");
    Ok(())
}
