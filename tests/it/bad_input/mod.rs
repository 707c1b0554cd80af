//! Bad input of every kind: each a typed error in bounded time, and never a password in its text.

mod addresses;
mod credentials;
mod forged;
mod login;
pub mod messages;
mod names;
mod servers;
mod settings;
mod urls;
mod values;

use std::time::Duration;

use leasehold::{Builder, Client, Error, ErrorKind};

use crate::support::{Task, millis, secs, texts_of};

/// Long enough for every time-out below several times over, on the busiest of machines.
const BOUND: Duration = Duration::from_secs(15);

/// Short time-outs, so that many cases fit into a test.
fn hasty(url: &str) -> Builder {
    Client::builder(url)
        .connect_timeout(millis(300))
        .command_timeout(millis(300))
        .outage_timeout(millis(600))
        .ttl(secs(3))
}

/// The error of every way to come upon a server: `open`, `lock`, `try_lock`, `try_lock_for`, the
/// latter on a client that was built without connecting. Each within [`BOUND`].
#[track_caller]
fn errors_of(url: &str) -> [(&'static str, Error); 4] {
    let (a, b, c, d) = (
        url.to_owned(),
        url.to_owned(),
        url.to_owned(),
        url.to_owned(),
    );
    let lazy = |url: &str| hasty(url).build_lazy().unwrap().mutex("k");
    let tasks = [
        ("open", Task::start(move || hasty(&a).build().map(drop))),
        ("lock", Task::start(move || lazy(&b).lock().map(drop))),
        (
            "try_lock",
            Task::start(move || lazy(&c).try_lock().map(drop)),
        ),
        (
            "try_lock_for",
            Task::start(move || lazy(&d).try_lock_for(millis(500)).map(drop)),
        ),
    ];
    tasks.map(|(what, task)| match task.within(BOUND, what) {
        Ok(()) => panic!("{what} succeeded with {url}"),
        Err(error) => (what, error),
    })
}

/// Fails unless every way to come upon the server says this kind of error.
#[track_caller]
fn assert_all_say(kind: ErrorKind, url: &str) {
    for (what, error) in errors_of(url) {
        assert_eq!(error.kind(), kind, "{what}: {}", everything_said(&error));
        let key = (what != "open").then_some("k");
        assert_eq!(error.key(), key, "{what} of {url}: {error}");
    }
}

/// All that an error says, itself and what it was caused by, as text and as debug text.
fn everything_said(error: &Error) -> String {
    format!("{}\n{error:#?}", texts_of(error).join("\n"))
}
