//! A held lock that passes from one client to another by a ticket: nobody comes in between, and a
//! ticket is good once.

mod faults;
pub mod processes;
mod terms;
mod tickets;

use leasehold::{Client, Error, MutexGuard};

use crate::steady::handing_off as client;
use crate::support::lock;

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
