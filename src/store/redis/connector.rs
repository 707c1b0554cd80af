//! Makes the connections of a client to one server, and keeps idle ones of transactions and pings.
//!
//! An r2d2 pool makes the connections, on threads of its own: the resolver of host names and the callback for
//! credentials have no time-outs, so a caller must be able to leave before its attempt has ended. The pool lives from
//! the first caller that needs a connection until no caller waits for one, so a connected client has none of its
//! threads. If the last caller leaves while an attempt is under way, the pool lives until that attempt has ended, and
//! its connection is kept for the next caller. A client that nobody uses begins no attempts.

#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, ErrorKind};
use crate::store::redis::connection::{Connection, Endpoint};
use crate::store::redis::errors;
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::util::sync::park_timeout;

/// The longest pause between attempts to connect while Redis is away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);
/// How long a caller waits for the pool at a time.
const POOL_WAIT: Duration = Duration::from_millis(20);
/// The pause between two checks whether a caller should give up.
const CHECK_PAUSE: Duration = Duration::from_millis(5);

/// Makes connections to one server.
pub(crate) struct Connector {
    manager: Manager,
    /// The most connections that the pool makes at a time.
    most: usize,
    pool: Arc<Mutex<PoolState>>,
    /// The idle connections of transactions and pings, as many as were in use at a time.
    idle: Mutex<Vec<Connection>>,
    /// Lets each start of a thread fail.
    #[cfg(test)]
    has_no_threads: std::sync::atomic::AtomicBool,
}

#[derive(Default)]
struct PoolState {
    /// How many callers wait for a connection.
    callers: usize,
    /// How many attempts are under way.
    running_attempts: usize,
    /// The connection of an attempt that ended after the last caller had left.
    kept: Option<Connection>,
    pool: Option<r2d2::Pool<Manager>>,
}

impl PoolState {
    /// Takes out the pool if nothing needs it any more. The caller drops the pool after the unlock, which closes its
    /// connections.
    fn take_unneeded(&mut self) -> Option<r2d2::Pool<Manager>> {
        let is_needed = self.callers > 0 || self.running_attempts > 0;
        self.pool.take_if(|_| !is_needed)
    }
}

impl Connector {
    /// Does not connect. `most`: the most connections that are made at a time, one for each caller that can wait.
    pub(crate) fn new(endpoint: &Arc<Endpoint>, most: usize) -> Arc<Self> {
        let pool = Arc::default();
        Arc::new(Self {
            manager: Manager {
                endpoint: Arc::clone(endpoint),
                pool: Arc::downgrade(&pool),
            },
            most,
            pool,
            idle: Mutex::default(),
            #[cfg(test)]
            has_no_threads: std::sync::atomic::AtomicBool::new(false),
        })
    }

    /// Makes a connection within `timeout`. Tries again after a failed attempt, unless its error
    /// [lasts](Error::is_lasting). Ends early once the server [is retired](Endpoint::is_retired), or the client has
    /// ended. If no thread can be started, makes one attempt on this thread, which may take one connect time-out.
    pub(crate) fn connect(&self, timeout: Duration) -> Result<Connection, Error> {
        let mut state = self.pool.lock();
        let kept = state.kept.take();
        if let Some(kept) = kept.filter(|kept| !kept.is_stale()) {
            return Ok(kept);
        }
        let caller = WaitingCaller::begin(self, state);
        let connected = match &caller.pool {
            Some(pool) => self.wait(pool, timeout),
            None => self.manager.endpoint.open_and_note(),
        };
        connected.map_err(|error| match self.manager.endpoint.is_retired() {
            // The caller may have to use another server.
            true => error.with_redirect(Some(Redirect::Retired)),
            false => error,
        })
    }

    fn wait(&self, pool: &r2d2::Pool<Manager>, timeout: Duration) -> Result<Connection, Error> {
        let until = MonotonicTime::now().after(timeout);
        let endpoint = &self.manager.endpoint;
        let failures = endpoint.failures();
        let is_over = || {
            endpoint.is_retired()
                || endpoint.is_refused_since(failures)
                || endpoint.check_open().is_err()
        };
        loop {
            // Each of these calls lets the pool begin one more attempt to connect, so there are few of them.
            let left = until.since(MonotonicTime::now());
            match pool.get_timeout(left.min(POOL_WAIT)).map(take) {
                Ok(Some(made)) if !made.is_stale() => return Ok(made),
                Ok(_) => continue,
                Err(timed_out) if left <= POOL_WAIT || is_over() => {
                    return Err(endpoint.last_error().unwrap_or_else(|| {
                        errors::no_connection(&endpoint.address_of_server(), timed_out)
                    }));
                }
                Err(_) => {}
            }
            let again = MonotonicTime::now().after(RECONNECT_PAUSE).min(until);
            while MonotonicTime::now() < again && !is_over() {
                if let Some(made) = pool.try_get().and_then(take)
                    && !made.is_stale()
                {
                    return Ok(made);
                }
                park_timeout(CHECK_PAUSE);
            }
        }
    }

    /// Takes an idle connection, or makes one, within `timeout`. One transaction or ping uses it.
    pub(crate) fn exclusive_connection(
        self: &Arc<Self>,
        timeout: Duration,
    ) -> Result<ExclusiveConnection, Error> {
        let deadline = MonotonicTime::now().after(timeout);
        loop {
            let idle = self.idle.lock().pop();
            let connection = match idle {
                Some(connection) => connection,
                None => self.connect(deadline.since(MonotonicTime::now()))?,
            };
            if !connection.is_stale() {
                return Ok(ExclusiveConnection {
                    connector: Arc::clone(self),
                    connection: Some(connection),
                });
            }
        }
    }

    /// Starts the pool. `None` if its threads cannot be started: r2d2 panics then. The panic hook still runs, and
    /// `panic = "abort"` ends the process.
    fn start_pool(&self) -> Option<r2d2::Pool<Manager>> {
        let builder = r2d2::Pool::builder()
            .max_size(self.most as u32)
            .min_idle(Some(0))
            .test_on_check_out(false)
            .idle_timeout(None)
            .max_lifetime(None)
            // The pool pauses for at most half of this time between attempts to connect. No caller waits for this
            // time-out.
            .connection_timeout(RECONNECT_PAUSE * 2)
            .error_handler(Box::new(r2d2::NopErrorHandler));
        catch_unwind(AssertUnwindSafe(|| {
            #[cfg(test)]
            assert!(
                !self
                    .has_no_threads
                    .load(std::sync::atomic::Ordering::Relaxed),
                "a test asked for this panic"
            );
            builder.build_unchecked(self.manager.clone())
        }))
        .ok()
    }
}

/// A caller that waits for a connection.
struct WaitingCaller<'a> {
    connector: &'a Connector,
    /// `None` if no thread could be started: the caller connects itself. A process at its limit of threads still has to
    /// renew its locks.
    pool: Option<r2d2::Pool<Manager>>,
}

impl<'a> WaitingCaller<'a> {
    fn begin(connector: &'a Connector, mut state: MutexGuard<'_, PoolState>) -> Self {
        state.callers += 1;
        if state.pool.is_none() {
            state.pool = connector.start_pool();
        }
        let pool = state.pool.clone();
        drop(state);
        Self { connector, pool }
    }
}

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        let mut state = self.connector.pool.lock();
        state.callers -= 1;
        let unneeded = state.take_unneeded();
        drop(state);
        drop(unneeded);
    }
}

/// Takes the connection out of the pool, which then forgets it. `None` if it was kept for the next caller.
fn take(mut made: r2d2::PooledConnection<Manager>) -> Option<Connection> {
    made.take()
}

/// Makes the pool's connections. Keeps the last error in the endpoint, since the pool keeps only the error's text.
#[derive(Clone)]
struct Manager {
    endpoint: Arc<Endpoint>,
    /// Weak: the state owns the pool, and the pool owns this manager.
    pool: Weak<Mutex<PoolState>>,
}

impl r2d2::ManageConnection for Manager {
    /// `None` once a caller has taken it, and if it is kept for the next caller.
    type Connection = Option<Connection>;
    type Error = Error;

    fn connect(&self) -> Result<Option<Connection>, Error> {
        // The pool tries again after a failed attempt, also if its callers have left.
        let attempt = RunningAttempt::begin(&self.pool).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "no caller waits for a connection")
        })?;
        let connection = self.endpoint.open_and_note()?;
        Ok(attempt.keep_without_callers(connection))
    }

    /// Does nothing. The pool is set not to call it, since a `PING` at each checkout would double the cost of a
    /// command.
    fn is_valid(&self, _: &mut Option<Connection>) -> Result<(), Error> {
        Ok(())
    }

    fn has_broken(&self, connection: &mut Option<Connection>) -> bool {
        connection.is_none()
    }
}

/// Counts an attempt until it has ended, also by a panic.
struct RunningAttempt(Arc<Mutex<PoolState>>);

impl RunningAttempt {
    /// `None` if no caller waits, or the connector is dropped.
    fn begin(pool: &Weak<Mutex<PoolState>>) -> Option<Self> {
        let pool = pool.upgrade()?;
        let mut state = pool.lock();
        if state.callers == 0 {
            return None;
        }
        state.running_attempts += 1;
        drop(state);
        Some(Self(pool))
    }

    /// Keeps the connection for the next caller if no caller waits. Otherwise returns it.
    fn keep_without_callers(&self, connection: Connection) -> Option<Connection> {
        let mut state = self.0.lock();
        if state.callers > 0 {
            return Some(connection);
        }
        let replaced = state.kept.replace(connection);
        drop(state);
        drop(replaced);
        None
    }
}

impl Drop for RunningAttempt {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running_attempts -= 1;
        let unneeded = state.take_unneeded();
        drop(state);
        drop(unneeded);
    }
}

/// A connection that one transaction or ping uses. Its drop keeps it for later callers, unless it is discarded.
pub(crate) struct ExclusiveConnection {
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
        let usable = self.connection.take().filter(|it| !it.is_discarded());
        self.connector.idle.lock().extend(usable);
    }
}
