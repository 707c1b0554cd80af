//! The loop of `MutexGuard::transaction`, which changes data in Redis only while a lock is held. The store sends the
//! commands. A transaction never changes the lock.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use redis::{Pipeline, RedisResult};

use crate::error::{Error, ErrorKind};
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::store::{Store, TransactionConnection, Written, holds, read_failed};
use crate::util::fork::Process;
use crate::watchdog::Watchdog;

/// How many conflicts in a row end a transaction with an error.
const MAX_TRIES: u32 = 100;

/// Runs the transactions of a client, and bounds how many run at a time, since each has a connection.
pub(crate) struct Transactions {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    /// A channel with one message for each running transaction. Its capacity is the most at a time.
    begin: Sender<()>,
    end: Receiver<()>,
    /// How long to wait until another transaction ends.
    outage_timeout: Duration,
}

/// The permission to run a transaction. Its drop removes a message from the channel.
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

    /// Runs `body`, and executes the commands that it put into the pipeline if `lease` is still held. Repeats both as
    /// long as other clients change watched keys, at most [`MAX_TRIES`] times.
    pub(crate) fn run<T>(
        &self,
        lease: &Lease,
        process: Process,
        mut body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> RedisResult<T>,
    ) -> Result<T, Error> {
        // The permit is dropped after the connection.
        let permit = self.permit(lease)?;
        let mut connection = None;
        for _ in 0..MAX_TRIES {
            let mut conn = self.look(lease, connection.take())?;
            let mut pipe = Pipeline::new();
            let read = body(&mut conn, &mut pipe).map_err(read_failed);
            if let Err(forked) = process.check() {
                // The connection and the permit belong to the parent, which still uses them.
                std::mem::forget((conn, permit));
                return Err(forked);
            }
            // After the end of validity nothing is written, even if Redis still has the key.
            match self.check(lease).and(read) {
                Ok(value) => {
                    let written = conn.exec(&mut pipe).inspect_err(|_| {
                        // The commands may still reach Redis, so no other holder may get the lock before its key
                        // changes.
                        lease.forbid_hand_off();
                    })?;
                    if written == Written::All {
                        return Ok(value);
                    }
                }
                Err(error) => {
                    conn.leave();
                    return Err(error);
                }
            }
            connection = Some(conn);
        }
        // If the lock was lost, return that error and not the conflict.
        self.look(lease, connection)?.leave();
        let message = format!("watched keys changed {MAX_TRIES} times in a row");
        Err(Error::new(ErrorKind::Conflict, message))
    }

    /// A connection that watches the lock's key, after it has read that the lease is held.
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
        let mut seen = conn.look(&grant.key);
        let is_dead = |error: &Error| error.kind() == ErrorKind::Unavailable;
        if conn.is_broken() && seen.as_ref().is_err_and(is_dead) {
            // The connection may have broken while it was idle. The pool replaces it with a new one.
            drop(conn);
            conn = self.store.transaction_connection()?;
            seen = conn.look(&grant.key);
        }
        let value = seen.map_err(nothing_asked)?;
        if value.as_ref().is_some_and(|value| holds(value, grant.id)) {
            return Ok(conn);
        }
        conn.leave();
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
        let (_keep, lost) = lease.loss_channel(self.watchdog.now());
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

/// Turns `Timeout` into `Unavailable`: so far the transaction has only read, so no outcome is unknown.
fn nothing_asked(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Timeout => {
            Error::new(ErrorKind::Unavailable, "no reply in time").with_source(error)
        }
        _ => error,
    }
}
