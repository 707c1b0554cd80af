//! A held lock that passes from one client to another by a ticket: nobody comes in between, and a
//! ticket is good once.

mod faults;
mod processes;
mod terms;
mod tickets;

use leasehold::{Client, Error, MutexGuard};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, within};

/// Hands off within itself for as long as any test takes.
fn client(server: &Server) -> Client {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let builder = builder.hand_offs(1023).hand_off_time(10 * SOON);
    builder.build().unwrap()
}

fn lock(client: &Client, key: &str) -> MutexGuard {
    let mutex = client.mutex(key);
    within(SOON, "locking", move || mutex.lock().unwrap())
}

/// The guard of whoever holds a ticket for a lock that is held.
#[track_caller]
fn adopt(client: &Client, ticket: &str) -> MutexGuard {
    match client.adopt(ticket) {
        Ok(guard) => guard,
        Err(error) => panic!("not adopted: {error} ({ticket})"),
    }
}

#[track_caller]
fn refused(client: &Client, ticket: &str) -> Error {
    match client.adopt(ticket) {
        Ok(guard) => panic!("adopted: {guard:?} ({ticket})"),
        Err(error) => error,
    }
}
