//! `leasehold watch`: lists the locks in Redis at intervals. On a terminal, it shows a table. Otherwise it writes a
//! line for each change.

mod screen;
mod view;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::crossbeam_channel::{Receiver, RecvError, bounded, select};
use serde::Serialize;
use signal_hook::iterator::Signals;

use crate::args::{Connection, List, Watch};
use crate::connection::Settings;
use crate::exit::{Failure, SYSTEM};
use crate::locks::{self, Lock};
use crate::output::{Output, json, line, message};
use crate::run::signals::{FATAL, unblock};

/// The pause between two lists is at least this many times as long as it takes to read a list. So lists of very many
/// keys slow other clients by at most 5 %.
const PAUSE_FACTOR: u32 = 19;

/// A change of a lock. docs/cli.md documents the fields.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Change<'a> {
    event: Event,
    key: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<&'a str>,
    clients_waiting: usize,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    /// The lock was free, and now has a holder.
    Acquired,
    /// The holders have changed.
    Passed,
    /// The number of waiting clients has changed.
    Waiting,
    /// The lock is now free.
    Released,
}

impl fmt::Display for Change<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            clients_waiting,
            ..
        } = self;
        let holder = self.holder.unwrap_or("several holders");
        match self.event {
            Event::Acquired => write!(f, "{key} acquired by {holder}")?,
            Event::Passed => write!(f, "{key} passed to {holder}")?,
            Event::Waiting => write!(f, "{key} held by {holder}")?,
            Event::Released => return write!(f, "{key} released"),
        }
        match clients_waiting {
            0 => Ok(()),
            waiting => write!(f, ", {waiting} waiting"),
        }
    }
}

/// The result of a read: the locks, and whether the list is complete.
type ListResult = Result<(Vec<Lock>, bool), Failure>;

pub fn run(connection: &Connection, options: &Watch, output: Output) -> Result<ExitCode, Failure> {
    let builder = Settings::read(connection, None)?.builder()?;
    let ended = end_signal()?;
    let lists = read_lists(builder.build()?, options)?;
    if output == Output::Text && io::stdout().is_terminal() {
        screen::show(&lists, &ended, options)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut before = BTreeMap::new();
    let mut was_complete = true;
    loop {
        select! {
            recv(lists) -> read => match received(read)? {
                Ok((locks, is_complete)) => {
                    // In a list that ends at the limit, unchanged locks can come and go.
                    if was_complete && !is_complete {
                        message(locks::more_locks(options.max));
                    }
                    was_complete = is_complete;
                    let now = by_key(locks);
                    for change in changes(&before, &now) {
                        match output {
                            Output::Json => json(&change),
                            Output::Text => line(change),
                        }
                    }
                    before = now;
                }
                // An outage is reported, but does not end the program: the next list may succeed.
                Err(failure) => message(failure.message),
            },
            recv(ended) -> _ => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// Reads the locks at intervals on a thread, so an outage does not delay keys and signals. The thread reads the next list
/// when the last one was received.
fn read_lists(client: Client, options: &Watch) -> io::Result<Receiver<ListResult>> {
    let (sender, lists) = bounded(0);
    let list = List {
        start: options.start.clone(),
        held_longer: None,
        max: options.max,
    };
    let interval = options.interval;
    let read = move || {
        loop {
            let started = Instant::now();
            let read = locks::read_list(&client, &list);
            let pause = pause_after(&read, started.elapsed(), interval);
            if sender.send(read).is_err() {
                return;
            }
            thread::park_timeout(pause);
        }
    };
    thread::Builder::new()
        .name("lists".to_owned())
        .spawn(read)?;
    Ok(lists)
}

/// The pause after a read that has taken this time. A failed read takes the time of a time-out, but has listed few keys:
/// in an outage, the next read must not wait for many time-outs.
fn pause_after(read: &ListResult, took: Duration, interval: Duration) -> Duration {
    let factor = if read.is_ok() { PAUSE_FACTOR } else { 1 };
    interval.max(factor * took)
}

/// The last result of the reading thread.
fn received(read: Result<ListResult, RecvError>) -> Result<ListResult, Failure> {
    // The thread ends only by a panic, whose message it has written.
    read.map_err(|_| Failure::new(SYSTEM, "the locks are no longer read"))
}

/// Becomes ready when a signal asks the program to end.
pub fn end_signal() -> Result<Receiver<i32>, Failure> {
    let mut signals = Signals::new(FATAL)?;
    unblock(&FATAL)?;
    let (sender, ended) = bounded(1);
    let wait = move || {
        for signal in signals.forever() {
            // The channel has room for one signal, which is enough.
            let _ = sender.try_send(signal);
        }
    };
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)?;
    Ok(ended)
}

fn by_key(locks: Vec<Lock>) -> BTreeMap<String, Lock> {
    locks
        .into_iter()
        .map(|lock| (lock.key().to_owned(), lock))
        .collect()
}

/// The changes between two lists, sorted by key.
fn changes<'a>(
    before: &'a BTreeMap<String, Lock>,
    now: &'a BTreeMap<String, Lock>,
) -> Vec<Change<'a>> {
    let mut keys: Vec<&String> = before.keys().chain(now.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let change = |key: &'a String| {
        let event = match (before.get(key), now.get(key)) {
            (None, Some(_)) => Event::Acquired,
            (Some(_), None) => Event::Released,
            (Some(old), Some(new)) if !old.has_same_holders(new) => Event::Passed,
            (Some(old), Some(new)) if old.clients_waiting() != new.clients_waiting() => {
                Event::Waiting
            }
            _ => return None,
        };
        let lock = now.get(key);
        Some(Change {
            event,
            key,
            holder: lock.and_then(Lock::only_holder),
            clients_waiting: lock.map_or(0, Lock::clients_waiting),
        })
    };
    keys.into_iter().filter_map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_list_slows_the_next_one() {
        let (interval, second) = (Duration::from_secs(2), Duration::from_secs(1));
        let listed = Ok((Vec::new(), true));
        assert_eq!(pause_after(&listed, second, interval), 19 * second);
        assert_eq!(pause_after(&listed, second / 100, interval), interval);
        let failed = Err(Failure::new(SYSTEM, "Redis is away"));
        assert_eq!(pause_after(&failed, second, interval), interval);
        assert_eq!(pause_after(&failed, 3 * second, interval), 3 * second);
    }

    #[test]
    fn changes_are_those_between_two_lists() {
        let client = leasehold::Client::memory().expect("threads can be started");
        let options = List {
            start: String::new(),
            held_longer: None,
            max: 10,
        };
        let look = || {
            by_key(
                locks::read_list(&client, &options)
                    .expect("the store works")
                    .0,
            )
        };
        let events = |before: &BTreeMap<_, _>, now: &BTreeMap<_, _>| -> Vec<(String, Event)> {
            let changes = changes(before, now);
            changes
                .iter()
                .map(|change| (change.key.to_owned(), change.event))
                .collect()
        };
        let empty = look();
        let (a, _b) = (client.mutex("a").lock(), client.mutex("b").lock());
        let both = look();
        assert_eq!(
            events(&empty, &both),
            [
                ("a".to_owned(), Event::Acquired),
                ("b".to_owned(), Event::Acquired)
            ]
        );
        assert!(events(&both, &look()).is_empty());
        drop(a);
        assert_eq!(events(&both, &look()), [("a".to_owned(), Event::Released)]);
        let _permit = client.semaphore("a", 2).acquire().expect("it is free");
        let one = look();
        let _other = client.semaphore("a", 2).acquire().expect("one is free");
        assert_eq!(events(&one, &look()), [("a".to_owned(), Event::Passed)]);
    }
}
