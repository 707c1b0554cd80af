//! Makes the connections of a client to one server, and keeps idle ones of transactions and pings.
//!
//! Each attempt to connect has its own thread, because the resolver of host names and the callback for credentials have
//! no time-outs: a caller must be able to leave before its attempt has ended. Only callers begin attempts, and the
//! thread ends with the attempt. So neither an unused client nor a connected one has such threads. If an attempt ends
//! after its caller has left, the connector keeps the new connection for the next caller.
//!
//! The connector uses r2d2's interface for connections, but not r2d2's pool, which panics if the system starts no
//! thread.

#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use r2d2::ManageConnection;

use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::wire::connect::connection::{Condition, Connection};
use crate::wire::endpoint::{Endpoint, REPLACE_WAIT};

/// The longest pause between attempts of one caller to connect while Redis is away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// At most this many attempts are under way at a time.
const MAX_ATTEMPTS: usize = 3;
/// The pauses after which a waiting caller checks whether it has to leave. They double: callers that check often would
/// take processor time from the attempts that they wait for.
const FIRST_CHECK: Duration = Duration::from_millis(5);
const LONGEST_CHECK: Duration = Duration::from_millis(100);

/// Makes connections to one server.
pub struct Connector {
    manager: Manager,
    attempts: Arc<Attempts>,
    /// The idle connections of transactions and pings: as many as were in use at the same time.
    idle: Mutex<Vec<Connection>>,
    /// Lets each start of a thread fail.
    #[cfg(test)]
    has_no_threads: std::sync::atomic::AtomicBool,
    /// How often callers have checked whether they have to leave.
    #[cfg(test)]
    checks: std::sync::atomic::AtomicUsize,
}

/// The attempts to connect, and the connections that they have made.
#[derive(Default)]
struct Attempts {
    state: Mutex<State>,
    /// Notified when an attempt ends, and when the client ends.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// How many callers wait for a connection.
    callers: usize,
    /// How many attempts are under way.
    running: usize,
    /// How many attempts have ended without a connection, wrapping.
    failed: u64,
    /// The connections that wait for a caller: at most one for each waiting caller, or one without waiting callers.
    made: Vec<Connection>,
}

impl State {
    /// If there are too many connections, takes out the oldest. Its drop closes it, so the caller drops it after the
    /// unlock.
    fn take_surplus(&mut self) -> Option<Connection> {
        let has_surplus = self.made.len() > self.callers.max(1);
        has_surplus.then(|| self.made.remove(0))
    }
}

impl Connector {
    /// Makes a connector without connecting.
    pub fn new(endpoint: &Arc<Endpoint>) -> Arc<Self> {
        Arc::new(Self {
            manager: Manager(Arc::clone(endpoint)),
            attempts: Arc::default(),
            idle: Mutex::default(),
            #[cfg(test)]
            has_no_threads: std::sync::atomic::AtomicBool::new(false),
            #[cfg(test)]
            checks: std::sync::atomic::AtomicUsize::new(0),
        })
    }

    /// Wakes the waiting callers, so that they leave at once. Called when the client has ended.
    pub fn wake_callers(&self) {
        // A caller checks under this mutex, so it sees the end of the client, or waits when it is notified.
        let _state = self.attempts.state.lock();
        self.attempts.ended.notify_all();
    }

    /// Makes a connection within `timeout`. Tries again after a failed attempt, unless its error
    /// [lasts](Error::is_lasting). Ends early if the server [is retired](Endpoint::is_retired) or the client has ended.
    /// If no thread can be started, makes one attempt on this thread, which may take one connect time-out.
    pub fn connect(&self, timeout: Duration) -> Result<Connection, Error> {
        let until = MonotonicTime::now().after(timeout);
        self.attempts.state.lock().callers += 1;
        let _caller = WaitingCaller(&self.attempts);
        self.wait(until)
            .map_err(|error| match self.manager.0.is_retired() {
                // The caller may have to use another server.
                true => error.with_redirect(Some(Redirect::Retired)),
                false => error,
            })
    }

    fn wait(&self, until: MonotonicTime) -> Result<Connection, Error> {
        let Self {
            manager, attempts, ..
        } = self;
        let endpoint = &manager.0;
        let failures = endpoint.failures();
        let is_over = || {
            endpoint.is_retired()
                || endpoint.is_refused_since(failures)
                || endpoint.check_open().is_err()
        };
        let (mut again_at, mut failed) = (MonotonicTime::now(), 0);
        let mut checks = Backoff::new(FIRST_CHECK, LONGEST_CHECK);
        loop {
            #[cfg(test)]
            self.checks
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let mut state = attempts.state.lock();
            if let Some(made) = state.made.pop() {
                drop(state);
                if !made.is_stale() {
                    return Ok(made);
                }
                continue;
            }
            let now = MonotonicTime::now();
            if now >= until || is_over() {
                drop(state);
                return Err(endpoint.no_connection());
            }
            // Another caller may have taken the connection of this caller's attempt.
            let is_missing = state.failed == failed && state.running < state.callers;
            // The caller begins further attempts, because its first attempt may hang.
            if state.running < MAX_ATTEMPTS && (now >= again_at || is_missing) {
                (again_at, failed) = (now.after(RECONNECT_PAUSE), state.failed);
                state.running += 1;
                drop(state);
                if !self.begin_attempt() {
                    // A process at its limit of threads has to renew its locks, too.
                    return manager.connect();
                }
                continue;
            }
            let mut pause = checks.next().min(until.since(now));
            if again_at > now {
                // The next attempt begins in time.
                pause = pause.min(again_at.since(now));
            }
            attempts.ended.wait_for(&mut state, pause);
        }
    }

    /// Begins an attempt, which the state counts already. Returns false if the system starts no thread.
    fn begin_attempt(&self) -> bool {
        let attempt = RunningAttempt {
            attempts: Arc::clone(&self.attempts),
            has_connected: false,
        };
        #[cfg(test)]
        if self
            .has_no_threads
            .load(std::sync::atomic::Ordering::Relaxed)
        {
            return false;
        }
        let manager = self.manager.clone();
        let thread = thread::Builder::new().name("leasehold-connect".to_owned());
        thread.spawn(move || attempt.run(&manager)).is_ok()
    }

    /// Takes an idle connection, or makes one, within `timeout`. One transaction or ping uses it.
    pub fn exclusive_connection(
        self: &Arc<Self>,
        timeout: Duration,
    ) -> Result<ExclusiveConnection, Error> {
        let deadline = MonotonicTime::now().after(timeout);
        loop {
            let idle = self.idle.lock().pop();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect(deadline.since(MonotonicTime::now()))?,
            };
            let condition = connection.condition();
            if condition == Condition::Old {
                match self.connect(REPLACE_WAIT) {
                    Ok(new) => connection = new,
                    Err(_) => connection.postpone_replacement(),
                }
            }
            if condition != Condition::Stale {
                return Ok(ExclusiveConnection {
                    connector: Arc::clone(self),
                    connection: Some(connection),
                });
            }
        }
    }
}

/// A caller that waits for a connection.
struct WaitingCaller<'a>(&'a Attempts);

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.callers -= 1;
        let surplus = state.take_surplus();
        drop(state);
        drop(surplus);
    }
}

/// Makes connections, and checks which of them can be used again.
#[derive(Clone)]
struct Manager(Arc<Endpoint>);

impl ManageConnection for Manager {
    type Connection = Connection;
    type Error = Error;

    fn connect(&self) -> Result<Connection, Error> {
        self.0.open_and_record()
    }

    /// Does no I/O: a `PING` at each checkout would double the cost of a command.
    fn is_valid(&self, connection: &mut Connection) -> Result<(), Error> {
        match connection.is_stale() {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::Unavailable,
                "the connection is stale",
            )),
        }
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.broken
    }
}

/// Counts an attempt as running. The drop, even by a panic, ends it.
struct RunningAttempt {
    attempts: Arc<Attempts>,
    has_connected: bool,
}

impl RunningAttempt {
    fn run(mut self, manager: &Manager) {
        // The endpoint has recorded the error.
        if let Ok(connection) = manager.connect() {
            self.has_connected = true;
            let mut state = self.attempts.state.lock();
            state.made.push(connection);
            let surplus = state.take_surplus();
            drop(state);
            drop(surplus);
        }
    }
}

impl Drop for RunningAttempt {
    fn drop(&mut self) {
        let mut state = self.attempts.state.lock();
        state.running -= 1;
        state.failed = state.failed.wrapping_add(u64::from(!self.has_connected));
        drop(state);
        self.attempts.ended.notify_all();
    }
}

/// A connection for one transaction or ping. The drop keeps it for later callers, unless it was discarded.
pub struct ExclusiveConnection {
    connector: Arc<Connector>,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
}

impl Deref for ExclusiveConnection {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection.as_ref().expect("only the drop takes it")
    }
}

impl DerefMut for ExclusiveConnection {
    fn deref_mut(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("only the drop takes it")
    }
}

impl Drop for ExclusiveConnection {
    fn drop(&mut self) {
        let Connector { manager, idle, .. } = &*self.connector;
        if let Some(mut connection) = self.connection.take()
            && !manager.has_broken(&mut connection)
        {
            idle.lock().push(connection);
        }
    }
}
