//! Data in Redis that is changed only while the lock is held: nothing is written after a loss, and
//! nothing of it gets in anybody's way.

mod apart;
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

/// What the transactions write.
const DATA: &str = "data";

/// Locks are renewed every twenty seconds: not while a test runs.
fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// A server that tells nobody of losses: who finds one has looked.
fn silent_server() -> Server {
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

/// Writes, doing `before` between what it reads and the end of the closure. With how often that ran.
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

/// Nothing is the matter: a transaction is done at once.
#[track_caller]
fn assert_writes(server: &Server, guard: &MutexGuard) {
    let (runs, result) = write(guard, |_| ());
    result.unwrap();
    assert_eq!(runs, 1);
    assert_eq!(data(server).as_deref(), Some("written in run 1"));
}
