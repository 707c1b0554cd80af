//! Data in Redis changed only while a lock is held: the loop of `MutexGuard::transaction`. What it
//! sends, and how, is the store's; it never touches the lock itself.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use redis::{Pipeline, RedisResult};

use crate::error::{Error, ErrorKind};
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::store::{Store, TransactionConnection, TransactionOutcome, is_held_by, read_failed};
use crate::util::fork::Process;
use crate::watchdog::Watchdog;

/// Conflicts in a row until it is given up.
const MAX_TRIES: u32 = 100;

/// The transactions of a client: so many at a time, since each has a connection.
pub(crate) struct Transactions {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    /// Holds as many messages as there are transactions under way, and has room for no more than may be.
    begin: Sender<()>,
    end: Receiver<()>,
    /// How long to wait for another one to end.
    outage_timeout: Duration,
}

/// The right to use a connection.
struct Permit<'a>(&'a Receiver<()>);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_recv();
    }
}

impl Transactions {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        at_once: usize,
        outage_timeout: Duration,
    ) -> Self {
        let (begin, end) = bounded(at_once);
        Self {
            store,
            watchdog,
            begin,
            end,
            outage_timeout,
        }
    }

    /// Runs `body` until what it put into the pipeline was written while `lease` was held.
    pub(crate) fn run<T>(
        &self,
        lease: &Lease,
        process: Process,
        mut body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> RedisResult<T>,
    ) -> Result<T, Error> {
        // Before the connection, so that it ends after it.
        let permit = self.permit(lease)?;
        let mut connection = None;
        for _ in 0..MAX_TRIES {
            let mut conn = self.look(lease, connection.take())?;
            let mut pipe = Pipeline::new();
            let read = body(&mut conn, &mut pipe).map_err(read_failed);
            if let Err(forked) = process.check() {
                // They are the parent's, which goes on with them.
                std::mem::forget((conn, permit));
                return Err(forked);
            }
            // Past its validity nothing is written, even if Redis still has the key.
            match self.check(lease).and(read) {
                Ok(value) => {
                    let written = conn.exec(&mut pipe).inspect_err(|_| {
                        // It may arrive yet: until the key has changed, nobody else may have the lock.
                        lease.forbid_hand_off();
                    })?;
                    if written == TransactionOutcome::Committed {
                        return Ok(value);
                    }
                }
                Err(error) => {
                    conn.unwatch();
                    return Err(error);
                }
            }
            connection = Some(conn);
        }
        // A lost lock says so, not that others wrote.
        self.look(lease, connection)?.unwatch();
        let message = format!("{MAX_TRIES} times in a row something changed that was tracked");
        Err(Error::new(ErrorKind::Conflict, message))
    }

    /// A connection that is_tracked the lock, which is still ours.
    fn look(
        &self,
        lease: &Lease,
        connection: Option<TransactionConnection>,
    ) -> Result<TransactionConnection, Error> {
        self.check(lease)?;
        let grant = lease.grant();
        let mut conn = match connection {
            Some(conn) => conn,
            None => self.store.transaction_connection()?,
        };
        let mut seen = conn.watch_and_get(&grant.key);
        let is_dead = |error: &Error| error.kind() == ErrorKind::Unavailable;
        if conn.is_broken() && seen.as_ref().is_err_and(is_dead) {
            // It may have died while nobody used it. The next one is new, and has its place in the pool.
            drop(conn);
            conn = self.store.transaction_connection()?;
            seen = conn.watch_and_get(&grant.key);
        }
        let value = seen.map_err(nothing_asked)?;
        if value
            .as_ref()
            .is_some_and(|value| is_held_by(value, grant.id))
        {
            return Ok(conn);
        }
        conn.unwatch();
        // This connection may lead to an old primary, so a pipeline has to confirm the loss.
        self.watchdog.confirm(lease)?;
        let message = "its connection does not lead to the primary";
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    fn check(&self, lease: &Lease) -> Result<(), Error> {
        let lost = lease.loss(self.watchdog.now());
        lost.map_or(Ok(()), |reason| Err(Error::lost(reason)))
    }

    fn permit(&self, lease: &Lease) -> Result<Permit<'_>, Error> {
        if self.begin.try_send(()).is_ok() {
            return Ok(Permit(&self.end));
        }
        let (_keep, lost) = lease.signal(self.watchdog.now());
        select! {
            send(self.begin, ()) -> _ => Ok(Permit(&self.end)),
            recv(lost) -> reason => Err(Error::lost(reason.unwrap_or(LossReason::Shutdown))),
            default(self.outage_timeout) => {
                let limit = self.begin.capacity().unwrap_or_default();
                let outage_timeout = self.outage_timeout;
                let message = format!("all {limit} transactions of the client are busy after {outage_timeout:?}");
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }
}

/// Redis was asked for nothing yet whose outcome could be unknown.
fn nothing_asked(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Timeout => {
            Error::new(ErrorKind::Unavailable, "no answer in time").with_source(error)
        }
        _ => error,
    }
}
