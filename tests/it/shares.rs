//! Readers and permits on a server: their requests, and processes that are killed. `conformance::shares` and
//! `conformance::rw_lock` have the behaviour on every kind of store.

use std::time::Duration;

use leasehold::{Client, ErrorKind, RwLock};
use leasehold_testbed::{Reply, Server, eventually};
use rustix::process::Signal;

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, in_redis, millis, notified_clients, queue, server};

/// The ttl of a reader that is stopped for longer.
const SHORT_TTL: Duration = Duration::from_secs(2);

fn client(url: &str) -> Client {
    steady(url).ttl(LONG_TTL).build().unwrap()
}

#[track_caller]
fn wait_for_queue(lock: &RwLock, of: usize) {
    let waiting = || lock.inspect().unwrap().clients_waiting();
    assert!(eventually(SOON, || waiting() == of), "{} queued", waiting());
}

/// Waits to write, in a child process.
pub fn wait_to_write(parent: &Parent) {
    let client = client(&parent.url);
    parent.tell(client.holder_id().as_str());
    let _guard = client.rw_lock("k").write().unwrap();
    parent.wait_for_end();
}

#[test]
fn readers_enter_after_a_waiting_writer_is_killed() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    let _reader = one.rw_lock("k").read().unwrap();
    // Before its connection for notifications is open, a client does not join the queue.
    let warm = two.rw_lock("warm").read().unwrap();
    assert!(eventually(SOON, || notified_clients(&server) == 2));
    drop(warm);
    let mut writer = Child::start(wait_to_write, &server.url());
    let holder: String = writer.receive(6 * SOON);
    let lock = two.rw_lock("k");
    wait_for_queue(&lock, 1);
    // The writer is notified, so only its death takes it out of the queue.
    let channel = in_redis("~to:") + &holder;
    let listens = || match ask(&server, &["PUBSUB", "NUMSUB", &channel]) {
        Reply::Array(found) => found[1] != Reply::Int(0),
        other => panic!("{other:?}"),
    };
    assert!(eventually(SOON, listens), "{channel}");
    // Until its next request, the writer's entry says that it polls.
    let polls = || queue(&server, "k")[0].contains(",0,");
    assert!(eventually(SOON, || !polls()), "{:?}", queue(&server, "k"));
    writer.kill();
    assert!(eventually(SOON, || !listens()), "{channel}");
    // A call without time to wait sends one request.
    let reader = lock.try_read_for(Duration::ZERO).unwrap();
    reader.expect("its first request").unlock().unwrap();
}

/// Reads. After each signal of the parent, reports whether the lock was lost, and whether a write under its token is
/// refused.
pub fn read_until_stopped(parent: &Parent) {
    let client = steady(&parent.url).ttl(SHORT_TTL).build().unwrap();
    let guard = client.rw_lock("k").read().unwrap();
    parent.tell("reads");
    parent.wait_to_proceed();
    let lost = guard.is_lost();
    let cache = client.fenced_value("cache");
    let late = cache.write(guard.fencing_token(), "the old data");
    let is_stale = late.is_err_and(|error| error.kind() == ErrorKind::StaleToken);
    parent.tell((lost, is_stale));
    parent.wait_for_end();
}

/// A reader's process is stopped for longer than its ttl, and a writer enters. When the reader continues, it detects
/// the loss, and its late write is refused.
#[test]
fn a_stopped_readers_late_write_is_refused() {
    let server = server();
    let other = client(&server.url());
    let mut reader = Child::start(read_until_stopped, &server.url());
    let _: String = reader.receive(6 * SOON);
    reader.signal(Signal::STOP);
    let writer = other.rw_lock("k").try_write_for(6 * SOON).unwrap().unwrap();
    let cache = other.fenced_value("cache");
    cache.write(writer.fencing_token(), "the new data").unwrap();
    reader.signal(Signal::CONT);
    reader.proceed();
    assert_eq!(reader.receive::<(bool, bool)>(6 * SOON), (true, true));
    assert_eq!(cache.read().unwrap().unwrap(), b"the new data");
    writer.unlock().unwrap();
}

/// The number of commands that Redis has run, including those of scripts, and the µs that the scripts took.
fn work(server: &Server) -> (u64, u64) {
    let stats = ask(server, &["INFO", "commandstats"]);
    let (mut calls, mut micros) = (0, 0);
    for line in stats.as_text().unwrap().lines() {
        let Some((command, fields)) = line
            .strip_prefix("cmdstat_")
            .and_then(|line| line.split_once(':'))
        else {
            continue;
        };
        let field = |name: &str| -> u64 {
            let found = fields.split(',').find_map(|field| field.strip_prefix(name));
            found.map_or(0, |number| number.parse().unwrap())
        };
        if command.starts_with("eval") {
            micros += field("usec=");
        } else if ["time", "pttl", "exists", "type"].contains(&command)
            || command.starts_with(['z', 'p'])
        {
            calls += field("calls=");
        }
    }
    (calls, micros)
}

/// A read lock and its release cost Redis as much beside 1,000 other readers as beside one.
#[test]
fn a_reader_costs_the_same_beside_a_thousand_others() {
    const PAIRS: u64 = 50;
    let server = server();
    let (one, other) = (client(&server.url()), client(&server.url()));
    let lock = one.rw_lock("k");
    // A client's readers share a lease, so each further reader asks with other settings.
    let beside = |n: u64| {
        other
            .rw_lock("k")
            .fixed_ttl(LONG_TTL + millis(n))
            .read()
            .unwrap()
    };
    let mut others = vec![beside(0)];
    let costs = [1, 1_000].map(|readers| {
        others.extend((others.len() as u64..readers).map(beside));
        assert_eq!(
            u64::from(lock.inspect().unwrap().readers_in_total()),
            readers
        );
        // Uses the shortest time of several parts, since other processes may delay the server.
        let parts = (0..20).map(|_| {
            let before = work(&server);
            for _ in 0..PAIRS {
                lock.read().unwrap().unlock().unwrap();
            }
            let after = work(&server);
            (after.0 - before.0, after.1 - before.1)
        });
        let (calls, micros): (Vec<u64>, Vec<u64>) = parts.unzip();
        [calls, micros].map(|costs| costs.into_iter().min().unwrap())
    });
    let [[calls, micros], [many_calls, many_micros]] = costs;
    assert!(
        many_calls <= calls + PAIRS / 10,
        "{many_calls} commands, not {calls}"
    );
    assert!(
        many_micros <= micros * 3 / 2,
        "{many_micros} us, not {micros}"
    );
}
