//! A held lock passes from one client to another by a ticket: no other client gets it in between, and a
//! ticket is valid once.

mod faults;
mod options;
pub mod processes;
mod tickets;

use leasehold::{Client, Error, MutexGuard};

use crate::steady::handing_off as client;
use crate::support::lock;

/// Adopts the ticket of a held lock.
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
