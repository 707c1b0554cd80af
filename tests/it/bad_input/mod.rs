//! Bad input of every kind causes a typed error in bounded time. No text of an error contains a password.

mod addresses;
mod credentials;
mod forged;
mod login;
pub mod messages;
mod names;
mod servers;
mod settings;
pub mod unfinished;
mod urls;
mod values;

use std::time::Duration;

use leasehold::{Builder, Client, Error, ErrorKind};

use crate::support::{Task, millis, secs, texts_of};

/// The limit for a call that would otherwise hang: many times the time-outs of [`hasty`].
const BOUND: Duration = Duration::from_secs(15);

/// A builder with short time-outs, so that a test can have many cases.
fn hasty(url: &str) -> Builder {
    Client::builder(url)
        .connect_timeout(secs(2))
        .command_timeout(secs(2))
        .outage_timeout(millis(2_200))
        .ttl(secs(3))
}

/// The errors of all calls that connect to a server: `build`, and `lock`, `try_lock` and `try_lock_for` of a client
/// that was built without connecting. Fails unless each comes within [`BOUND`].
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

/// Fails unless all calls that connect to the server return this kind of error.
#[track_caller]
fn assert_all_fail(kind: ErrorKind, url: &str) {
    for (what, error) in errors_of(url) {
        assert_eq!(error.kind(), kind, "{what}: {}", all_texts(&error));
        let key = (what != "open").then_some("k");
        assert_eq!(error.key(), key, "{what} of {url}: {error}");
    }
}

/// All texts of an error and its sources: `Display` and `Debug`.
fn all_texts(error: &Error) -> String {
    format!("{}\n{error:#?}", texts_of(error).join("\n"))
}
