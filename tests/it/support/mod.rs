//! Code that the tests share: servers, clients, checks of exclusion that use no lock of the library, and ways to wait
//! for an event.

mod blocked;
mod recorder;
mod server;

use std::error::Error as _;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use leasehold::{Builder, Client, Error, LossReason, LostSignal, Mutex, MutexGuard, Released};
use leasehold_testbed::{Reply, Server, eventually};

pub use recorder::{Recorder, What};
pub use server::{
    bytes_received, bytes_sent, changes, channel_of, connections, connections_accepted,
    connections_made, info_number, lease_of, lock_requests, make_first_join_earlier, micros_now,
    monitored, notification_connection, notification_connections, notified_clients, queue, queued,
    reads, reads_by_connection, reads_during, script_calls, tracked, wait_for_queue, warm_up,
};

use crate::steady::steady;

/// The limit for what takes a moment on an idle machine.
pub const SOON: Duration = Duration::from_secs(10);
/// A ttl longer than any test. If a key becomes free before that, it was released.
pub const LONG_TTL: Duration = Duration::from_secs(60);
/// How long the clients of [`builder`] wait for a reply.
pub const TIMEOUT: Duration = Duration::from_millis(500);

pub fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A client that receives notifications.
pub fn notified_client(server: &Server, recorder: &Arc<Recorder>) -> Client {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder.event_handler(Arc::clone(recorder)).build().unwrap();
    let before = notified_clients(server);
    let guard = lock(&client, "warm");
    let is_notified = eventually(SOON, || notified_clients(server) > before);
    assert!(is_notified, "no notifications");
    guard.unlock().unwrap();
    client
}

/// Waits until the client has handled all messages that it received before. Messages come in order, so this sends one
/// more message and waits for its effect.
pub fn wait_for_messages(server: &Server, client: &Client) {
    let mark = lock(client, "mark");
    let operator = steady(&server.url()).build().unwrap();
    operator.mutex("mark").force_unlock().unwrap().unwrap();
    lost_within(SOON, &mark.lost_signal());
}

/// All texts of an error and of what caused it, as text and as debug text.
pub fn texts_of(error: &Error) -> Vec<String> {
    let mut texts = vec![error.to_string(), format!("{error:?}")];
    let mut source = error.source();
    while let Some(cause) = source {
        texts.extend([cause.to_string(), format!("{cause:?}")]);
        source = cause.source();
    }
    texts
}

pub fn server() -> Server {
    Server::start().unwrap()
}

/// Settings for tests: short time-outs, and a ttl longer than the stalls of a busy machine. The connect time-out is
/// longer, since connecting starts a thread and takes several steps. No check of the environment, since tests
/// count connections and calls.
pub fn builder(url: &str) -> Builder {
    Client::builder(url)
        .ttl(secs(6))
        .connect_timeout(4 * TIMEOUT)
        .command_timeout(TIMEOUT)
        .outage_timeout(secs(20))
        .environment_check(false)
}

/// The value of a call with a short wait. `None` if the server did not reply in time: the shortest waits have 100 ms for
/// a reply, which a busy machine may exceed.
#[track_caller]
pub fn in_time<T>(outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Err(error) if error.is_unavailable() => None,
        other => Some(other.unwrap()),
    }
}

/// Acquires the lock; fails the test if that takes long.
pub fn lock(client: &Client, key: &str) -> MutexGuard {
    let mutex = client.mutex(key);
    within(SOON, "locking", move || mutex.lock().unwrap())
}

/// Runs one command over a connection of its own; a refusal fails the test.
pub fn ask(server: &Server, args: &[&str]) -> Reply {
    match server.command(args).unwrap() {
        Reply::Error(error) => panic!("{args:?}: {error}"),
        reply => reply,
    }
}

/// The lock's key in Redis, with the default prefix.
pub fn in_redis(key: &str) -> String {
    format!("leasehold:{key}")
}

/// The value under the lock's key.
pub fn value_of(server: &Server, key: &str) -> Option<String> {
    ask(server, &["GET", &in_redis(key)])
        .as_text()
        .map(str::to_owned)
}

pub fn is_held(server: &Server, key: &str) -> bool {
    ask(server, &["EXISTS", &in_redis(key)]) == Reply::Int(1)
}

/// The remaining ttl of the lock's key; `None` when there is no such key.
pub fn expires_in(server: &Server, key: &str) -> Option<Duration> {
    let left = ask(server, &["PTTL", &in_redis(key)]).as_int().unwrap();
    u64::try_from(left).ok().map(Duration::from_millis)
}

/// All keys of locks in Redis, whoever holds them.
pub fn held_keys(server: &Server) -> Vec<String> {
    let Reply::Array(keys) = ask(server, &["KEYS", "leasehold:*"]) else {
        panic!("KEYS answers with an array");
    };
    keys.iter()
        .filter_map(|key| key.as_text()?.strip_prefix("leasehold:"))
        .filter(|name| !name.starts_with('~'))
        .map(str::to_owned)
        .collect()
}

/// Fails unless all locks become free soon, which is long before a [`LONG_TTL`] ends.
#[track_caller]
pub fn assert_all_become_free(server: &Server) {
    let free = eventually(SOON, || held_keys(server).is_empty());
    assert!(free, "leaked: {:?}", held_keys(server));
}

/// Closes every connection to the server, except that of this command.
pub fn kill_connections(server: &Server) {
    ask(
        server,
        &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"],
    );
}

/// The reason of a loss, which the signal must report within `limit`.
#[track_caller]
pub fn lost_within(limit: Duration, signal: &LostSignal) -> LossReason {
    match signal.recv_timeout(limit) {
        Ok(reason) => reason,
        Err(error) => panic!("no loss was reported within {limit:?}: {error}"),
    }
}

/// Work on a thread of its own. A wait for it has a limit, so that a hang fails the test.
pub struct Task<T> {
    outcome: Receiver<T>,
    thread: JoinHandle<()>,
}

impl<T: Send + 'static> Task<T> {
    pub fn start(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (done, outcome) = channel();
        let thread = thread::spawn(move || {
            // Nobody receives the result when the test has failed already.
            let _ = done.send(work());
        });
        Self { outcome, thread }
    }

    #[track_caller]
    pub fn within(self, limit: Duration, what: &str) -> T {
        match self.outcome.recv_timeout(limit) {
            Ok(value) => value,
            Err(RecvTimeoutError::Timeout) => panic!("{what}: not done after {limit:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                resume_unwind(self.thread.join().expect_err("only a panic sends nothing"))
            }
        }
    }

    pub fn is_done(&self) -> bool {
        self.thread.is_finished()
    }
}

/// Runs `work` on a thread of its own and fails if it takes longer than `limit`.
#[track_caller]
pub fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    Task::start(work).within(limit, what)
}

/// The reason why the release of a lock that was held until then could not be confirmed.
#[track_caller]
pub fn unconfirmed(unlocked: Result<Released, Error>) -> Error {
    match unlocked {
        Ok(Released::Unconfirmed(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Checks that the holders of one lock are inside one at a time, in the order of their tokens. It uses atomics, and no
/// lock of the library.
#[derive(Default)]
pub struct Witness {
    inside: AtomicUsize,
    entries: AtomicUsize,
    last_token: AtomicU64,
}

/// A holder that is inside; dropping it leaves.
#[must_use]
pub struct Inside<'a>(&'a Witness);

impl Witness {
    /// Fails if another holder is inside, or if an earlier holder had a greater token.
    #[track_caller]
    pub fn enter(&self, guard: &MutexGuard) -> Inside<'_> {
        let others = self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        assert_eq!(others, 0, "{others} others are inside with {guard:?}");
        self.entries.fetch_add(1, Ordering::SeqCst);
        let token = guard.fencing_token();
        let last = self.last_token.swap(token, Ordering::SeqCst);
        assert!(last < token, "{token} was granted after {last}");
        inside
    }

    /// Starts a thread that takes the lock `turns` times, and enters each time.
    pub fn start_turns(self: &Arc<Self>, mutex: Mutex, turns: usize) -> Task<()> {
        let witness = Arc::clone(self);
        Task::start(move || {
            for _ in 0..turns {
                let guard = mutex.lock().unwrap();
                drop(witness.enter(&guard));
            }
        })
    }

    /// The number of entries so far.
    pub fn entries(&self) -> usize {
        self.entries.load(Ordering::SeqCst)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A number in Redis that is raised by GET, then SET. If two threads do that at the same time, one update is lost.
pub struct Counter {
    connection: redis::Connection,
    name: String,
}

impl Counter {
    /// Opens a connection of its own to the server's counter of this name. Each thread needs one.
    pub fn open(server: &Server, name: &str) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let connection = client.get_connection_with_timeout(SOON).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        Self {
            connection,
            name: format!("counter:{name}"),
        }
    }

    pub fn raise(&mut self) {
        let next = self.read() + 1;
        let mut set = redis::cmd("SET");
        set.arg(&self.name).arg(next);
        set.exec(&mut self.connection).unwrap();
    }

    pub fn read(&mut self) -> usize {
        let mut get = redis::cmd("GET");
        get.arg(&self.name);
        let value: Option<usize> = get.query(&mut self.connection).unwrap();
        value.unwrap_or(0)
    }
}
