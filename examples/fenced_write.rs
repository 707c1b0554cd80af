//! A holder that comes too late, and a storage that refuses it.
//!
//! A process can be stopped (by its garbage collector, its hypervisor, somebody's debugger) after it has
//! looked at its lock and before it writes. When it goes on, the lock may be another's. No lock can help
//! there; the storage can, if it is told the fencing token of the lock with every write.
//!
//! `cargo run --example fenced_write`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::time::Duration;

use leasehold::{Client, ErrorKind};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let (one, two) = (Client::open(&url)?, Client::open(&url)?);
    let total = "example:invoice:42:total";

    // The first holder takes the lock for a moment, and is "stopped" until that has passed.
    let mutex = one.mutex("example:invoice:42");
    let late = mutex.fixed_ttl(Duration::from_millis(100)).lock()?;
    let reason = late.lost_signal().recv()?;

    // The next one has the lock now, and writes.
    let guard = two.mutex("example:invoice:42").lock()?;
    two.fenced_value(total).write(guard.fencing_token(), "17")?;

    // The first one goes on where it was. (It could know better by now: `late.check()`. But whoever is
    // stopped between the check and the write does not.)
    println!("the late one has lost its lock: {reason}");
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
    // One row changed: written. None: somebody with a greater token was there before, so stop.
    // (`<=` and not `<`: one holder may write several times. A token fits a signed 64-bit column.)
    Ok(())
}
