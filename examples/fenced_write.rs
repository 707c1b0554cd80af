//! A write that comes after the lock was lost, and a storage that refuses it.
//!
//! A process can be stopped (by its garbage collector, its hypervisor, a debugger) after it has checked its lock and
//! before it writes. When it continues, another process may hold the lock. A lock cannot prevent this write. The
//! storage can refuse it if every write carries the fencing token of the lock.
//!
//! Run `cargo run --example fenced_write`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::time::Duration;

use leasehold::{Client, ErrorKind};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let (one, two) = (Client::open(&url)?, Client::open(&url)?);
    let total = "example:invoice:42:total";

    // The first holder has the lock for 100 ms, and does nothing until the lock is lost.
    let mutex = one.mutex("example:invoice:42");
    let late = mutex.fixed_ttl(Duration::from_millis(100)).lock()?;
    let reason = late.lost_signal().recv()?;

    // The next holder acquires the lock, and writes.
    let guard = two.mutex("example:invoice:42").lock()?;
    two.fenced_value(total).write(guard.fencing_token(), "17")?;

    // The first holder continues, and writes late. (`late.check()` would report the loss. But a process that is stopped
    // between the check and the write does not see it.)
    println!("the first holder lost its lock: {reason}");
    match one.fenced_value(total).write(late.fencing_token(), "4") {
        Err(error) if error.kind() == ErrorKind::StaleToken => println!("refused: {error}"),
        other => println!("this must not happen: {other:?}"),
    }
    let value = two.fenced_value(total).read()?.unwrap_or_default();
    println!("the total is {}", String::from_utf8(value)?);

    // The same check in a database, in the statement that writes:
    //
    //     ALTER TABLE invoice ADD COLUMN token BIGINT NOT NULL DEFAULT 0;
    //
    //     UPDATE invoice SET total = :total, token = :token
    //      WHERE id = 42 AND token <= :token;
    //
    // If one row changed, the write was accepted. If no row changed, a holder with a greater token wrote before, so
    // stop. (`<=` since one holder may write several times. A token fits into a signed 64-bit column.)
    Ok(())
}
