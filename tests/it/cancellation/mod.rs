//! `Mutex::cancelled_by`: a wait ends at once, in each of its stages, and leaves nothing behind.

mod grants;
pub mod leaks;
mod waits;

use std::time::Duration;

use leasehold::crossbeam_channel::Sender;
use leasehold::{Client, Error, ErrorKind};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::LONG_TTL;

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Cancels one wait. Returns the sender if it must live on, because dropping it would cancel again.
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
