//! Waits given up from outside: at once, wherever they stand, and without a trace.

mod at_once;
mod grants;
pub mod traces;

use std::time::Duration;

use leasehold::crossbeam_channel::Sender;
use leasehold::{Client, Error, ErrorKind};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::LONG_TTL;

/// For as much work as a test does, on the busiest of machines.
const WORK: Duration = Duration::from_secs(120);

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Cancels one wait; gives back what has to be kept so that no more is said.
type Way = fn(Sender<()>) -> Option<Sender<()>>;

const WAYS: [Way; 2] = [
    |stop| {
        stop.send(()).unwrap();
        Some(stop)
    },
    |stop| {
        drop(stop);
        None
    },
];

#[track_caller]
fn assert_cancelled<T>(outcome: Result<T, Error>) {
    let Err(error) = outcome else {
        panic!("it was not cancelled");
    };
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    assert_eq!(error.key(), Some("k"));
}
