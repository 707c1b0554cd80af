//! Data in Redis that changes only while the lock is held. Nothing is written after a loss, and a transaction disturbs
//! no other request.

mod concurrency;
mod conflicts;
mod faults;
mod large;
mod losses;
pub mod money;
mod refused;
mod results;

use leasehold::redis::{Commands, RedisResult};
use leasehold::{Client, Error, MutexGuard, TransactionConnection};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::{LONG_TTL, ask};

/// The key that the transactions write.
const DATA: &str = "data";

/// A client whose locks are not renewed during a test: the first renewal is due after 20 s.
fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// A server that notifies no client of losses. So if a client finds a loss, it has read the key.
pub fn silent_server() -> Server {
    let builder = Server::builder().arg("rename-command", "HELLO \"\"");
    builder.start().unwrap()
}

fn data(server: &Server) -> Option<String> {
    ask(server, &["GET", DATA]).as_text().map(str::to_owned)
}

fn set(server: &Server, value: &str) {
    ask(server, &["SET", DATA, value]);
}

fn watch(conn: &mut TransactionConnection, key: &str) -> RedisResult<()> {
    redis::cmd("WATCH").arg(key).exec(conn)
}

/// Writes in a transaction. Runs `before` between the read and the end of the closure. Also returns the number of runs.
fn write(guard: &MutexGuard, mut before: impl FnMut(usize)) -> (usize, Result<(), Error>) {
    let mut runs = 0;
    let result = guard.transaction(|conn, pipe| {
        runs += 1;
        let _: Option<String> = conn.get(DATA)?;
        pipe.set(DATA, format!("written in run {runs}"));
        before(runs);
        Ok(())
    });
    (runs, result.map(|committed| committed.value))
}

/// Fails unless a transaction without a fault is done at once.
#[track_caller]
fn assert_writes(server: &Server, guard: &MutexGuard) {
    let (runs, result) = write(guard, |_| ());
    result.unwrap();
    assert_eq!(runs, 1);
    assert_eq!(data(server).as_deref(), Some("written in run 1"));
}
