//! The loop of `MutexGuard::transaction`, which changes data in Redis only while a lock is held. The store sends the
//! commands. A transaction never changes the lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use redis::{FromRedisValue, Pipeline, RedisError, RedisResult, Value};
use smallvec::SmallVec;

use crate::config::key::Key;
use crate::lease::{Lease, ONLY_GUARD};
use crate::process::fork::Process;
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::slot::Redirect;
use crate::watchdog::Watchdog;
use crate::wire::session::{
    TransactionConnection, TransactionOutcome, Transactions, read_failed, reply_unread,
};

/// The outcome of a transaction that Redis has carried out, from
/// [`MutexGuard::transaction`](crate::MutexGuard::transaction) and
/// [`MutexGuard::try_transaction`](crate::MutexGuard::try_transaction). If a call returns it, everything was written.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::redis::Commands;
///
/// let guard = client.mutex("accounts").lock()?;
/// let paid = guard.transaction(|conn, pipe| {
///     let before: Option<i64> = conn.get("account:b")?;
///     pipe.decr("account:a", 50).ignore().incr("account:b", 50);
///     Ok(before)
/// })?;
/// assert_eq!(paid.value, None);
/// // One reply for each command without `ignore`:
/// let (balance,): (i64,) = paid.replies()?;
/// assert_eq!(balance, 50);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct Committed<T> {
    /// The value that the closure returned.
    pub value: T,
    replies: RedisResult<Value>,
    key: Key,
}

impl<T> Committed<T> {
    /// The replies to the commands in the pipeline that are not marked with `ignore`, in the order of the commands. `R`
    /// is what [`redis::Pipeline::query`] could return: a tuple with one member for each reply, or a `Vec` of replies
    /// of one type.
    ///
    /// # Errors
    /// Everything was written in any case. `Protocol` if the replies cannot be converted to `R`. `TooLarge` if a reply
    /// is longer than [`max_reply_bytes`](crate::Builder::max_reply_bytes).
    pub fn replies<R: FromRedisValue>(&self) -> Result<R, Error> {
        let replies = self.replies.as_ref().map_err(Clone::clone);
        let read = replies.and_then(|value| Ok(redis::from_redis_value_ref(value)?));
        read.map_err(|error| reply_unread(error).with_key(self.key.name()))
    }
}

impl<T: fmt::Debug> fmt::Debug for Committed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committed")
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}

/// Why a transaction was not carried out.
pub(crate) enum TransactionFailure<E> {
    /// The closure returned this error.
    Body(E),
    Other(Error),
}

impl<E> From<Error> for TransactionFailure<E> {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl<E> TransactionFailure<E> {
    /// The error for the caller: that of the closure, or an error of this library with `key`, converted to `E`.
    pub(crate) fn into_error(self, key: &str) -> E
    where
        E: From<Error>,
    {
        match self {
            Self::Body(error) => error,
            Self::Other(error) => error.or_with_key(key).into(),
        }
    }
}

impl TransactionFailure<RedisError> {
    /// The error for a caller whose closure returns errors of redis-rs.
    pub(crate) fn into_read_failed(self, key: &str) -> Error {
        match self {
            Self::Body(error) => read_failed(error).with_key(key),
            Self::Other(error) => error.or_with_key(key),
        }
    }
}

/// How many conflicts in a row end a transaction with an error.
const MAX_TRIES: u32 = 100;
/// How many nodes of a Cluster may redirect a transaction before it begins.
const MAX_REDIRECTS: u32 = 3;

/// Runs the transactions of a client, and bounds how many run at a time, since each has a connection.
pub(crate) struct TransactionRunner {
    /// An error if the client has no transactions.
    transactions: Result<Arc<dyn Transactions>, Error>,
    /// The process of the client.
    process: Process,
    watchdog: Arc<Watchdog>,
    /// A channel with one message for each running transaction. Its capacity is the largest number of transactions at a
    /// time.
    begin: Sender<()>,
    end: Receiver<()>,
    /// How long one try waits for the end of another transaction and for connections, together.
    connect_timeout: Duration,
}

/// The permission to run a transaction. Its drop removes a message from the channel.
struct Permit<'a>(&'a Receiver<()>);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_recv();
    }
}

impl TransactionRunner {
    pub(crate) fn new(
        transactions: Result<Arc<dyn Transactions>, Error>,
        watchdog: Arc<Watchdog>,
        max_running: usize,
        connect_timeout: Duration,
    ) -> Self {
        let (begin, end) = bounded(max_running);
        Self {
            transactions,
            process: Process::current(),
            watchdog,
            begin,
            end,
            connect_timeout,
        }
    }

    /// Runs `body`, and executes the commands that `body` put into the pipeline if all `leases` are still held. Repeats
    /// both steps as long as watched keys change in between, up to [`MAX_TRIES`] times. The leases' keys share a slot.
    pub(crate) fn run<T, E>(
        &self,
        leases: &[&Arc<Lease>],
        mut body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> Result<T, E>,
    ) -> Result<Committed<T>, TransactionFailure<E>> {
        // Declared before the connection, so that the connection is dropped first.
        let mut connect_by = self.connect_by();
        let permit = self.permit(leases[0])?;
        let mut connection = None;
        for _ in 0..MAX_TRIES {
            let mut conn = self.watching_connection(leases, connection.take(), connect_by)?;
            let mut pipe = Pipeline::new();
            let read = body(&mut conn, &mut pipe).map_err(TransactionFailure::Body);
            if let Err(forked) = self.process.check() {
                // The connection and the permit belong to the parent, which still uses them.
                std::mem::forget((conn, permit));
                return Err(forked.into());
            }
            // After the end of the validity, the transaction is not written, even if Redis still has the key.
            match self
                .check(leases)
                .map_err(TransactionFailure::Other)
                .and(read)
            {
                Ok(value) => {
                    let written = conn.exec(&mut pipe).map_err(|error| {
                        // The commands may still reach Redis. A hand-off does not change the lock's key, so Redis would
                        // execute them while another thread holds the lock.
                        leases.iter().for_each(|lease| lease.forbid_hand_off());
                        self.handle_failure(&leases[0].grant().key, &error);
                        redirected(error, conn.address())
                    })?;
                    if let TransactionOutcome::Committed(replies) = written {
                        let key = leases[0].grant().key.clone();
                        return Ok(Committed {
                            value,
                            replies,
                            key,
                        });
                    }
                }
                Err(error) => {
                    conn.unwatch();
                    return Err(error);
                }
            }
            connection = Some(conn);
            connect_by = self.connect_by();
        }
        // If the lock was lost, the caller gets this error instead of the conflict.
        self.watching_connection(leases, connection, connect_by)?
            .unwatch();
        let message = format!(
            "watched keys changed {MAX_TRIES} times in a row: let their other writers take the lock, too, or try again"
        );
        Err(Error::new(ErrorKind::Conflict, message).into())
    }

    /// The time by which a try that begins now has to be connected.
    fn connect_by(&self) -> MonotonicTime {
        MonotonicTime::now().after(self.connect_timeout)
    }

    /// Returns a connection that watches the locks' keys, after it has read that the leases hold them. If `connection`
    /// is `None`, connects until `connect_by`.
    fn watching_connection(
        &self,
        leases: &[&Arc<Lease>],
        connection: Option<TransactionConnection>,
        connect_by: MonotonicTime,
    ) -> Result<TransactionConnection, Error> {
        self.check(leases)?;
        let first = &leases[0].grant().key;
        let watched = leases
            .iter()
            .map(|lease| (&lease.grant().key, lease.grant().id));
        let watched: SmallVec<[(&Key, LeaseId); 1]> = watched.collect();
        let mut conn = match connection {
            Some(conn) => conn,
            None => self.connection(first, connect_by)?,
        };
        let mut seen = conn.watch_and_check(&watched);
        let is_dead = |error: &Error| error.kind() == ErrorKind::Unavailable;
        if conn.is_broken() && seen.as_ref().is_err_and(is_dead) {
            // The connection may have broken while it was idle. It is replaced by a new connection.
            drop(conn);
            conn = self.connection(first, connect_by)?;
            seen = conn.watch_and_check(&watched);
        }
        for _ in 0..MAX_REDIRECTS {
            match &seen {
                // The slot of the keys has moved to another node.
                Err(error) if error.redirect().is_some() => self.handle_failure(first, error),
                _ => break,
            }
            drop(conn);
            conn = self.connection(first, connect_by)?;
            seen = conn.watch_and_check(&watched);
        }
        let Some(lost) = seen.map_err(|error| as_unavailable(error, conn.address()))? else {
            return Ok(conn);
        };
        conn.unwatch();
        // This connection may lead to an old primary, so a pipeline has to confirm the loss.
        let lost = leases[lost];
        let confirmed = self.watchdog.confirm(lost);
        confirmed.map_err(|error| error.with_key(lost.grant().key.name()))?;
        let message = "the connection of the transaction does not lead to the primary, and is replaced; try \
                       again";
        Err(Error::new(ErrorKind::Unavailable, message))
    }

    fn handle_failure(&self, key: &Key, error: &Error) {
        if let Ok(transactions) = &self.transactions {
            transactions.handle_failure(key, error);
        }
    }

    fn connection(
        &self,
        key: &Key,
        connect_by: MonotonicTime,
    ) -> Result<TransactionConnection, Error> {
        let transactions = self.transactions.as_ref().map_err(Clone::clone)?;
        transactions.transaction_connection(key, connect_by)
    }

    fn check(&self, leases: &[&Arc<Lease>]) -> Result<(), Error> {
        let now = self.watchdog.now();
        let lost = leases
            .iter()
            .find_map(|lease| Some((lease, lease.loss(now)?)));
        lost.map_or(Ok(()), |(lease, reason)| {
            Err(Error::lost(reason).with_key(lease.grant().key.name()))
        })
    }

    fn permit(&self, lease: &Lease) -> Result<Permit<'_>, Error> {
        if self.begin.try_send(()).is_ok() {
            return Ok(Permit(&self.end));
        }
        let (_keep, lost) = lease.loss_channel(self.watchdog.now(), ONLY_GUARD);
        select! {
            send(self.begin, ()) -> _ => Ok(Permit(&self.end)),
            recv(lost) -> reason => Err(Error::lost(reason.unwrap_or(LossReason::Shutdown))),
            default(self.connect_timeout) => {
                let limit = self.begin.capacity().unwrap_or_default();
                let waited = self.connect_timeout;
                let message = format!(
                    "all {limit} transactions of the client (`max_transactions`) were still running after {waited:?}; \
                     raise that setting, or let closures take less time"
                );
                Err(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }
}

/// Turns a redirect of the Cluster's node at `address` into `Unavailable`, since the transaction was not written. An
/// error for `CLUSTERDOWN` has this kind already.
fn redirected(error: Error, address: &str) -> Error {
    if matches!(error.redirect(), None | Some(Redirect::ClusterDown)) {
        return error;
    }
    let message = format!(
        "{address}: the slot of the lock's key moves to another node of the Cluster; nothing was written; try again"
    );
    Error::new(ErrorKind::Unavailable, message).with_source(error)
}

/// Does the same as [`redirected`], and turns `Timeout` into `Unavailable`: the transaction has only read until now, so
/// its outcome is known.
fn as_unavailable(error: Error, address: &str) -> Error {
    let error = redirected(error, address);
    match error.kind() {
        ErrorKind::Timeout => {
            Error::new(ErrorKind::Unavailable, error.message()).with_source_of(&error)
        }
        _ => error,
    }
}
