//! A lock in hand: what its holder can ask and do. Dropped, it lets go.

use std::fmt;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use redis::{Pipeline, RedisResult};

use crate::client::Client;
use crate::error::Error;
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::observe;
use crate::released::Released;
use crate::store::TransactionConnection;
use crate::transaction::Committed;
use crate::util::clock::MonotonicTime;
use crate::util::fork::Process;
use crate::util::text::printable;

/// A held lock; it is let go when this is dropped, on whichever thread.
///
/// Keep it in objects as you like: it owns all it needs. Dropping passes the lock on to a thread of
/// the same client that waits for it, or writes the release, and does not wait for the answer;
/// [`unlock`](Self::unlock) does.
///
/// A lock in Redis is a lease: however well it is renewed, it can be lost (a pause of the whole
/// process, a fail-over). The holder is told in three ways: [`is_lost`](Self::is_lost) and
/// [`check`](Self::check) when asked, [`lost_signal`](Self::lost_signal) while waiting, and
/// [`on_lost`](Self::on_lost) by callback. What must be right even so carries the
/// [`fencing_token`](Self::fencing_token) along.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("invoice:42").lock()?;
/// println!("{} under token {}", guard.key(), guard.fencing_token());
/// for line in ["a", "b"] {
///     guard.check()?; // `is_lost()` with an error to return
///     println!("{line}, and {:?} left even without renewal", guard.remaining());
/// }
/// assert!(!guard.is_lost());
/// guard.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the lock is let go as soon as its guard is dropped"]
pub struct MutexGuard {
    lease: Arc<Lease>,
    client: Client,
    /// Nothing if nobody is told for how long it is held.
    granted_at: Option<MonotonicTime>,
    observed: observe::HoldSpan,
    release: bool,
}

/// Every method can be seen in use in the examples of [`MutexGuard`] or in its own.
impl MutexGuard {
    pub(crate) fn new(lease: Arc<Lease>, client: Client) -> Self {
        Self {
            granted_at: client
                .handle()
                .callbacks
                .has_listeners()
                .then(|| client.now()),
            observed: observe::HoldSpan::begin(lease.event_lock()),
            lease,
            client,
            release: false,
        }
    }

    /// Releases the lock and waits for Redis to confirm it, for at most one
    /// [`command_timeout`](crate::Builder::command_timeout) (and one
    /// [`connect_timeout`](crate::Builder::connect_timeout), where a connection has to be made).
    ///
    /// Fails only if the lock was lost. If Redis does not confirm the release, the work is finished all the same:
    /// this returns [`Released::Unconfirmed`], and the client repeats the release in the background. A loss of which
    /// only Redis knows (it has lost its memory, and does not answer) is not detected then.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before: another holder may have run at the same time. `Forked` in a child of
    /// the process that holds it.
    pub fn unlock(mut self) -> Result<Released, Error> {
        self.check_process()?;
        self.release = true;
        let acquirer = &self.client.handle().acquirer;
        let result = acquirer.release_confirmed(&self.lease);
        let outcome = match &result {
            Ok(Released::Confirmed) => "released",
            Ok(Released::Unconfirmed(_)) => "unconfirmed",
            Err(_) => "lost",
        };
        self.tell_released(outcome, outcome == "released");
        match result {
            Ok(Released::Unconfirmed(error)) => {
                Ok(Released::Unconfirmed(error.with_key(self.key())))
            }
            Ok(Released::Confirmed) => Ok(Released::Confirmed),
            Err(error) => Err(error.with_key(self.key())),
        }
    }

    /// Hands the lock over to another process: this guard is over, the lock stays held, and whoever
    /// is given the returned ticket can [adopt](Client::adopt) it, once. Token, ttl, renewal and what is left of
    /// `max_hold` go along. The ttl is put back first (unless it is fixed); nobody renews until it is
    /// adopted, and without that the lock is free when its ttl ends. What passes until then is not counted
    /// by `max_hold`.
    ///
    /// The old holder and the new one have the same token: have the answers to what you wrote under it
    /// before you hand over. Waits while the ttl is put back, for at most two command time-outs; if Redis
    /// does not answer, what is left of the ttl counts. A check ([`renew_while`](crate::Mutex::renew_while)) stays
    /// behind, so the adopter of such a lock gets it unrenewed, and extends it or is done within the ttl.
    ///
    /// The ticket is text without line breaks. Who knows it can take the lock: keep it as secret as
    /// the lock is worth.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before; `Forked` in a child of the process that holds it.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let ticket = client.mutex("k").lock()?.into_ticket()?;
    /// assert!(client.mutex("k").is_locked()?, "nobody can come in between");
    /// let guard = client.adopt(&ticket)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn into_ticket(mut self) -> Result<String, Error> {
        self.check_process()?;
        self.release = true;
        let acquirer = &self.client.handle().acquirer;
        let result = acquirer.transfer_out(&self.lease);
        let result = result.map_err(|error| error.with_key(self.key()));
        let outcome = if result.is_ok() {
            "transferred"
        } else {
            "lost"
        };
        self.tell_released(outcome, result.is_ok());
        result.map(|ticket| ticket.to_string())
    }

    /// The name of the lock.
    pub fn key(&self) -> &str {
        self.lease.grant().key.name()
    }

    /// A number greater than that of every earlier grant of this lock. Send it along with what you
    /// write, and let the storage refuse a smaller one than it has seen: then even a holder that
    /// does not know yet that it lost the lock can do no harm.
    ///
    /// Tokens have 61 bits or more, since they are made of a time in µs. JavaScript and many JSON parsers round numbers
    /// of more than 53 bits, so two tokens become equal: write tokens into JSON as strings. For databases there is
    /// [`fencing_token_i64`](Self::fencing_token_i64).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// let json = format!(r#"{{"total": 17, "token": "{}"}}"#, guard.fencing_token());
    /// # let _ = json;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fencing_token(&self) -> u64 {
        self.lease.grant().token
    }

    /// The [`fencing_token`](Self::fencing_token) for SQL: the same number in the type of a `BIGINT` column. Tokens are
    /// smaller than 2^63.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// // UPDATE invoice SET total = $1, token = $2 WHERE id = 42 AND token <= $2
    /// let parameters: (i64, i64) = (17, guard.fencing_token_i64());
    /// assert!(parameters.1 > 0);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn fencing_token_i64(&self) -> i64 {
        i64::try_from(self.fencing_token()).expect("MAX_TOKEN is that of an i64")
    }

    /// For how long the lock is still sure to be held if it were not renewed; zero once lost.
    /// Somewhat less than the ttl in Redis, to allow for the drift of two clocks.
    pub fn remaining(&self) -> Duration {
        if self.client.is_forked() {
            return Duration::ZERO;
        }
        self.lease.remaining(self.now())
    }

    /// Whether the lock was lost. Asks no server: past its validity it is lost, whatever Redis
    /// would say.
    pub fn is_lost(&self) -> bool {
        self.client.is_forked() || self.lease.loss(self.now()).is_some()
    }

    /// As [`is_lost`](Self::is_lost), for use with `?`.
    ///
    /// # Errors
    /// `LeaseLost`, with the reason; `Forked` in a child of the process that holds it.
    pub fn check(&self) -> Result<(), Error> {
        self.check_process()?;
        match self.lease.loss(self.now()) {
            Some(reason) => Err(Error::lost(reason).with_key(self.key())),
            None => Ok(()),
        }
    }

    /// A channel that becomes ready, with the reason, when the lock is lost, and never after it was
    /// let go. Each call gives one of its own. In a forked child it is ready at once, with
    /// [`LossReason::Forked`]; one made before the fork tells nothing there.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::crossbeam_channel::{after, select};
    /// use std::time::Duration;
    ///
    /// let guard = client.mutex("leader").lock()?;
    /// let lost = guard.lost_signal();
    /// select! {
    ///     recv(lost) -> reason => println!("not the leader any more: {reason:?}"),
    ///     recv(after(Duration::from_millis(20))) -> _ => println!("time for work"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lost_signal(&self) -> LostSignal {
        let (keep, receiver) = if self.client.is_forked() {
            let (sender, receiver) = bounded(1);
            let _ = sender.try_send(LossReason::Forked);
            (Arc::new(sender), receiver)
        } else {
            self.lease.loss_channel(self.now())
        };
        LostSignal {
            receiver,
            keep,
            process: Process::current(),
        }
    }

    /// Runs `callback` when the lock is lost, after [`is_lost`](Self::is_lost) and all signals say
    /// so; at once if it is lost already; never after it was let go, nor once the client has been
    /// shut down, nor in a forked child.
    ///
    /// Callbacks run one after another on a thread of the client's own; they may use the client. A
    /// panic in one is caught.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("k").lock()?;
    /// guard.on_lost(|reason| eprintln!("lost the lock: {reason}"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn on_lost(&self, callback: impl FnOnce(LossReason) + Send + 'static) {
        if self.client.is_forked() {
            return;
        }
        self.lease.on_lost(self.now(), Box::new(callback));
    }

    /// Makes the lock last for `duration` from now at least. Never shortens it.
    ///
    /// # Errors
    /// `LeaseLost` if it is not ours any more; `InvalidConfig` if `duration` is out of the bounds of
    /// a ttl or goes beyond `max_hold`; `Timeout` or `Unavailable` if Redis gave no answer: the
    /// lock is held as long as it was before.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let guard = client.mutex("k").lock()?;
    /// guard.extend(Duration::from_secs(60))?;
    /// assert!(guard.remaining() > Duration::from_secs(55));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn extend(&self, duration: Duration) -> Result<(), Error> {
        self.check_process()?;
        let client = self.client.handle();
        let attach = |error: Error| error.with_key(self.key());
        client
            .config
            .check_ttl("extend", duration)
            .map_err(attach)?;
        if let Some(hold_until) = self.lease.grant().hold_until() {
            let left = hold_until.since(self.now());
            if duration > left {
                let wanted = format!("at most {left:?}, which is left of max_hold");
                let given = format_args!("{duration:?}");
                return Err(attach(Error::invalid("extend", &wanted, given)));
            }
        }
        client
            .watchdog
            .extend(&self.lease, duration)
            .map_err(attach)
    }

    /// Lets the lock end with its validity, for `reason`.
    pub(crate) fn stop_renewing(&self, reason: LossReason) {
        if !self.client.is_forked() {
            self.lease.stop_renewing(reason);
        }
    }

    fn check_process(&self) -> Result<(), Error> {
        let checked = self.client.check_process();
        checked.map_err(|error| error.with_key(self.key()))
    }

    /// Changes data in this Redis, only if the lock is held at that very moment.
    ///
    /// `body` reads on `conn`, and puts what is to be written into `pipe`. That is then done all at once
    /// (`MULTI`, `EXEC`) by Redis itself, if the lock's key has not changed since before `body` began
    /// (`WATCH`): whoever has lost the lock writes nothing, even where the holder does not know of the
    /// loss yet, or slept through it. `body` may `WATCH` more keys on `conn`, before it reads them; then
    /// nothing is written if those have changed either, by whomever.
    ///
    /// If something has changed and the lock is still ours (it was renewed, somebody joined its line, a
    /// key that `body` is_tracked was written to), `body` runs again with an empty pipeline, up to a hundred
    /// times. So it should do nothing but read and fill `pipe`: what it does elsewhere, or writes on
    /// `conn`, is neither undone nor guarded. With an empty pipeline nothing is written, and all that was
    /// read was read while the lock was held. [`Committed`] has the value that `body` returned, and the replies to the
    /// commands in `pipe`.
    ///
    /// The errors of `body` are those of redis-rs; with [`try_transaction`](Self::try_transaction) they are the
    /// caller's own.
    ///
    /// Names of keys are those in Redis: no prefix is put before them. Each answer is waited for as long
    /// as [`command_timeout`](crate::Builder::command_timeout). [`Builder::max_transactions`](crate::Builder::max_transactions)
    /// can be under way at a time, on connections that serve nothing else: however long `body` takes, it
    /// holds up no renewal and no other lock. If it panics, nothing is written. A
    /// [`MemoryStore`](crate::MemoryStore) has none of it: `Unsupported`.
    ///
    /// # Errors
    /// - `LeaseLost` if the lock is lost: nothing was written, and the guard says lost from now on.
    /// - The error of `body`, as `source()`, with the kind that suits it: nothing was written.
    /// - `Conflict` after too many changes in a row: nothing was written.
    /// - `Unavailable` if Redis cannot be reached, refuses all writes, or all transactions of the client
    ///   are busy for longer than [`connect_timeout`](crate::Builder::connect_timeout); `Denied` if the
    ///   user may not use one of the commands; `Unsupported` if one of them would end the transaction:
    ///   nothing was written.
    /// - `TooLarge` if a command or pipeline of `body` is answered with more than
    ///   [`max_reply_bytes`](crate::Builder::max_reply_bytes): nothing was written.
    /// - `Timeout` if everything was sent and no answer came: all of it was written, or will be as long
    ///   as nothing tracked changes and this guard has the lock, or nothing. Watch what must not be
    ///   written twice.
    /// - `Protocol` if Redis refused one of the writes for what it found, such as a list where a number
    ///   should be: what the others wrote stays, as Redis takes nothing back. The message says which. (A
    ///   command that Redis does not know keeps all of them from being done.)
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::redis::Commands;
    ///
    /// let guard = client.mutex("accounts").lock()?;
    /// let move_50 = || {
    ///     guard.transaction(|conn, pipe| {
    ///         let balance: Option<i64> = conn.get("account:a")?;
    ///         let enough = balance.unwrap_or(0) >= 50;
    ///         if enough {
    ///             pipe.decr("account:a", 50).incr("account:b", 50);
    ///         }
    ///         Ok(enough)
    ///     })
    /// };
    /// assert!(!move_50()?.value, "nothing there");
    /// let added = guard.transaction(|_, pipe| {
    ///     pipe.incr("account:a", 60);
    ///     Ok(())
    /// })?;
    /// assert_eq!(added.replies::<(i64,)>()?, (60,));
    /// assert!(move_50()?.value);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn transaction<T>(
        &self,
        body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> RedisResult<T>,
    ) -> Result<Committed<T>, Error> {
        self.check_process()?;
        let transactions = &self.client.handle().transactions;
        let result = transactions.run(&self.lease, self.client.process(), body);
        result.map_err(|failed| failed.into_read_failed(self.key()))
    }

    /// As [`transaction`](Self::transaction), for a closure with an error type of the caller's own: `anyhow::Error`,
    /// `Box<dyn Error>`, or an enum with a variant for [`Error`] and, if `body` uses `?` on reads, one for
    /// [`redis::RedisError`]. If `body` returns an error, nothing is written, and the caller gets that very error.
    ///
    /// After an error of `body`, Redis is not asked whether what `body` read is still true, or whether the lock is still
    /// held. A loss that the client knows of comes first, as `LeaseLost`. To have a refusal confirmed, return it as a
    /// value, with an empty pipeline.
    ///
    /// # Errors
    /// The error of `body`; otherwise those of [`transaction`](Self::transaction), made an `E`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::redis::{Commands, RedisError};
    ///
    /// #[derive(Debug)]
    /// enum PayError {
    ///     Lacking(i64),
    ///     Lock(leasehold::Error),
    ///     Redis(RedisError),
    /// }
    /// # impl std::fmt::Display for PayError {
    /// #     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { write!(f, "{self:?}") }
    /// # }
    /// # impl std::error::Error for PayError {}
    /// impl From<leasehold::Error> for PayError {
    ///     fn from(error: leasehold::Error) -> Self {
    ///         Self::Lock(error)
    ///     }
    /// }
    /// impl From<RedisError> for PayError {
    ///     fn from(error: RedisError) -> Self {
    ///         Self::Redis(error)
    ///     }
    /// }
    ///
    /// let pay = |amount: i64| -> Result<i64, PayError> {
    ///     let guard = client.mutex("accounts").lock()?;
    ///     let paid = guard.try_transaction(|conn, pipe| {
    ///         let balance = conn.get::<_, Option<i64>>("account:a")?.unwrap_or(0);
    ///         if balance < amount {
    ///             return Err(PayError::Lacking(amount - balance));
    ///         }
    ///         pipe.decr("account:a", amount);
    ///         Ok(())
    ///     })?;
    ///     let (left,) = paid.replies()?;
    ///     Ok(left)
    /// };
    /// assert!(matches!(pay(50), Err(PayError::Lacking(50))));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_transaction<T, E: From<Error>>(
        &self,
        body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> Result<T, E>,
    ) -> Result<Committed<T>, E> {
        self.check_process()?;
        let transactions = &self.client.handle().transactions;
        let result = transactions.run(&self.lease, self.client.process(), body);
        result.map_err(|failed| failed.into_error(self.key()))
    }

    fn now(&self) -> MonotonicTime {
        self.client.now()
    }

    /// Runs what is done under the lock.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.observed.run(work)
    }

    fn tell_released(&mut self, outcome: &'static str, confirmed: bool) {
        let Some(granted_at) = self.granted_at else {
            return;
        };
        let held = self.now().since(granted_at);
        self.observed.ended(outcome, held);
        let callbacks = &self.client.handle().callbacks;
        callbacks.call_handler(|events| events.released(self.lease.event_lock(), held, confirmed));
    }
}

impl Drop for MutexGuard {
    fn drop(&mut self) {
        // In a forked child it is the parent's; what can still end of it is kept by the leaked client.
        if self.client.is_forked() {
            self.observed.forget();
            return;
        }
        if self.release {
            return;
        }
        let lost = self.client.handle().acquirer.release(&self.lease);
        self.tell_released(if lost { "lost" } else { "dropped" }, false);
    }
}

// As a client. Whether a panic left the work under the lock half done is not known here, as it is not for a
// `parking_lot` guard: locks are not poisoned.
impl UnwindSafe for MutexGuard {}
impl RefUnwindSafe for MutexGuard {}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexGuard")
            .field("key", &self.key())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// The guarded key, fit for a line of a log.
impl fmt::Display for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(self.key(), usize::MAX))
    }
}

/// Becomes ready when a lock is lost: see [`MutexGuard::lost_signal`].
///
/// A [`Receiver`] in all but name (it dereferences to one): use it in `select!`, or with
/// `recv_timeout`. Keep this value itself, not a clone of the receiver inside: it is what keeps the
/// channel from becoming ready when the lock is let go.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let lost = guard.lost_signal();
/// guard.unlock()?;
/// assert!(lost.try_recv().is_err(), "let go, not lost");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
pub struct LostSignal {
    receiver: Receiver<LossReason>,
    keep: Arc<Sender<LossReason>>,
    process: Process,
}

impl Drop for LostSignal {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // A channel has mutexes, too.
            std::mem::forget((self.receiver.clone(), Arc::clone(&self.keep)));
        }
    }
}

impl Deref for LostSignal {
    type Target = Receiver<LossReason>;

    fn deref(&self) -> &Self::Target {
        &self.receiver
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_another_process_is_not_taken_apart() {
        for (process, is_left) in [(Process::another(), true), (Process::current(), false)] {
            let (sender, receiver) = bounded(1);
            let keep = Arc::new(sender);
            let left = Arc::downgrade(&keep);
            drop(LostSignal {
                receiver,
                keep,
                process,
            });
            assert_eq!(left.strong_count() > 0, is_left);
        }
    }
}
