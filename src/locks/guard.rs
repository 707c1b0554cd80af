//! The guard of a held lock. Its drop releases the lock.

use std::fmt;
use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use redis::{Pipeline, RedisResult};

use crate::acquire::Dropped;
use crate::client::Client;
use crate::lease::Lease;
use crate::locks::transaction::Committed;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::report::observe;
use crate::report::released::Released;
use crate::util::clock::MonotonicTime;
use crate::util::fork::Process;
use crate::util::text::{Shown, printable};
use crate::wire::session::TransactionConnection;

/// A held lock. Dropping the guard releases the lock, on any thread.
///
/// A guard borrows nothing, so it can be stored in a struct and moved to another thread. Its drop hands the lock off to
/// a waiting thread of the same client, or writes the release without waiting for the reply. If the reply shows that the
/// lock was lost while it was held, the client calls [`EventHandler::lost`](crate::EventHandler::lost).
/// [`unlock`](Self::unlock) waits for the reply. If Redis is away, the client repeats the release in the background until
/// the ttl has ended.
///
/// A lock in Redis is a lease. Even if it is renewed, it can be lost: by a pause of the whole process, by a fail-over.
/// The holder learns of a loss in three ways: it asks ([`is_lost`](Self::is_lost), [`check`](Self::check)), waits for a
/// channel ([`lost_signal`](Self::lost_signal)), or registers a callback ([`on_lost`](Self::on_lost)). Writes that must
/// be correct even after a loss need the [`fencing_token`](Self::fencing_token).
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
#[must_use = "the lock is released as soon as its guard is dropped"]
pub struct MutexGuard {
    lease: Arc<Lease>,
    client: Client,
    /// `None` if no listener receives the duration of the hold.
    granted_at: Option<MonotonicTime>,
    observed: observe::HoldSpan,
    release: bool,
}

/// The examples of [`MutexGuard`] use every method that has no example of its own.
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
    /// [`command_timeout`](crate::Builder::command_timeout).
    ///
    /// Fails only if the lock was lost. If Redis does not confirm the release, the lock was still held until now, so
    /// the work is finished: this returns [`Released::Unconfirmed`], and the client repeats the release in the
    /// background. If Redis lost the key just before it became unreachable, that loss is not detected.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before: another holder may have run at the same time. A loss that only this call
    /// finds is reported as any other: the callbacks of [`on_lost`](Self::on_lost) run, and the signals become ready.
    /// `Forked` in a child of the process that holds the lock.
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
        self.report_released(outcome, outcome == "released");
        match result {
            Ok(Released::Unconfirmed(error)) => {
                Ok(Released::Unconfirmed(error.with_key(self.key())))
            }
            Ok(Released::Confirmed) => Ok(Released::Confirmed),
            Err(error) => Err(error.with_key(self.key())),
        }
    }

    /// Ends the hold of a closure: hands the lock off to a waiting thread of this client, as a drop does, or releases
    /// it as [`unlock`](Self::unlock) does. A lock that is known to be lost is never handed off.
    pub(crate) fn finish(mut self) -> Result<(), Error> {
        self.check_process()?;
        if self.client.handle().acquirer.hand_off(&self.lease) {
            self.release = true;
            self.report_released("handed_off", false);
            return Ok(());
        }
        self.unlock().map(drop)
    }

    /// Ends this guard without a release, and returns a ticket with which another process can
    /// [adopt](Client::adopt) the lock, once.
    ///
    /// The new holder gets the ttl, the time between renewals and the rest of `max_hold`. First, this call sets the
    /// full ttl again, unless the ttl is fixed. That takes at most two command time-outs; if Redis does not reply, the
    /// lock has the rest of its ttl. The client does not renew the lock from then on: if no client adopts the lock, it
    /// is free when the ttl ends. `max_hold` does not count the time until the adoption.
    ///
    /// The adopter gets a greater token, and once the adopter has written with it, writes with your token are refused.
    /// So wait for the replies to your own writes before you send the ticket. A check
    /// ([`renew_while`](crate::Mutex::renew_while)) is not part of the ticket: the adopter of such a lock gets it
    /// without renewal, and has to extend it or finish within the ttl.
    ///
    /// The ticket is one line of text. Any client that has it can take the lock, so keep it secret.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before. `Forked` in a child of the process that holds the lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let ticket = client.mutex("k").lock()?.into_ticket()?;
    /// assert!(client.mutex("k").is_locked()?, "no other client can get it in between");
    /// let guard = client.adopt(&ticket)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn into_ticket(mut self) -> Result<String, Error> {
        self.check_process()?;
        self.release = true;
        let result = self.client.handle().acquirer.transfer_out(&self.lease);
        let result = result.map_err(|error| error.with_key(self.key()));
        let outcome = if result.is_ok() {
            "transferred"
        } else {
            "lost"
        };
        self.report_released(outcome, result.is_ok());
        result.map(|ticket| ticket.to_string())
    }

    /// The name of the lock.
    pub fn key(&self) -> &str {
        self.lease.grant().key.name()
    }

    /// The fencing token: a number greater than the token of every earlier grant of this lock. Send it with each write,
    /// and let the storage refuse a token smaller than the greatest that it has seen. Then a holder that lost the lock,
    /// and has not noticed yet, cannot overwrite the data of the next holder.
    ///
    /// Tokens have 61 bits now, since they contain a time in µs, and never more than 63. JavaScript and many JSON
    /// parsers round numbers of more than 53 bits, so two tokens can become equal: write tokens into JSON as strings.
    /// For databases there is [`fencing_token_i64`](Self::fencing_token_i64).
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
        i64::try_from(self.fencing_token()).expect("no token is greater than MAX_TOKEN")
    }

    /// The rest of the validity: for how long the lock is held if no renewal succeeds from now on. Zero once the lock
    /// is lost. The validity is the ttl in Redis less 1 % and 2 ms, which allow for the drift of two clocks. Sends no
    /// request.
    pub fn remaining(&self) -> Duration {
        if self.client.is_forked() {
            return Duration::ZERO;
        }
        self.lease.remaining(self.now())
    }

    /// Whether the lock was lost. Sends no request: at the end of its validity the lock is lost, even if Redis still
    /// has the key.
    pub fn is_lost(&self) -> bool {
        self.client.is_forked() || self.lease.loss(self.now()).is_some()
    }

    /// Returns an error if the lock was lost, for use with `?`. Sends no request, as [`is_lost`](Self::is_lost).
    ///
    /// # Errors
    /// `LeaseLost`, with the reason; `Forked` in a child of the process that holds the lock.
    pub fn check(&self) -> Result<(), Error> {
        self.check_process()?;
        match self.lease.loss(self.now()) {
            Some(reason) => Err(Error::lost(reason).with_key(self.key())),
            None => Ok(()),
        }
    }

    /// A channel that receives the reason when the lock is lost. A release never makes the channel ready. Each call
    /// makes a new channel. In a forked child, a new channel has [`LossReason::Forked`] at once; a channel made before
    /// the fork never becomes ready there.
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
    ///     recv(lost) -> reason => println!("no longer the leader: {reason:?}"),
    ///     recv(after(Duration::from_millis(20))) -> _ => println!("next piece of work"),
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

    /// Runs `callback` when the lock is lost, after [`is_lost`](Self::is_lost) returns true and all channels are ready.
    /// If the lock is lost already, `callback` runs as soon as possible. It never runs after the lock was released,
    /// after the client was shut down, or in a forked child.
    ///
    /// Callbacks run one after another on the client's callback thread, and may use the client. Their panics are
    /// caught.
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

    /// Extends the lock, so it lasts for at least `duration` from now. Never shortens it. Takes one
    /// [`command_timeout`](crate::Builder::command_timeout) at most, also while a renewal is under way.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost; `InvalidConfig` if `duration` is out of the bounds of a ttl or goes beyond
    /// `max_hold`. `Timeout` or `Unavailable` if Redis did not reply: the lock is held for as long as before, and Redis
    /// may keep the key for longer. `Denied` or `Protocol` if Redis refuses the request, or the key has a
    /// foreign value; `Forked` in a child of the process that holds the lock.
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
                let wanted = format!("at most {}, which is left of max_hold", Shown(left));
                let given = format_args!("{duration:?}");
                return Err(attach(Error::invalid("extend", &wanted, given)));
            }
        }
        client
            .watchdog
            .extend(&self.lease, duration)
            .map_err(attach)
    }

    /// Stops renewal: the lock is lost for `reason` when its validity ends.
    pub(crate) fn stop_renewing(&self, reason: LossReason) {
        if !self.client.is_forked() {
            self.lease.stop_renewing(reason);
        }
    }

    fn check_process(&self) -> Result<(), Error> {
        let checked = self.client.check_process();
        checked.map_err(|error| error.with_key(self.key()))
    }

    /// Changes data in the same Redis server, only if the lock is held at that moment.
    ///
    /// `body` reads on `conn`, and puts the commands that write into `pipe`. Redis then executes all commands of `pipe`
    /// in one step (`MULTI`, `EXEC`), provided that the lock's key has not changed since before `body` began (`WATCH`).
    /// So a holder that lost the lock writes nothing, even if it has not noticed the loss. `body` may `WATCH` more keys
    /// on `conn` before it reads them: then Redis also writes nothing if one of these keys has changed.
    ///
    /// If a watched key has changed and the lock is still held, `body` runs again with an empty pipeline, up to
    /// 100 times. That happens when the lock is renewed, when the first waiter joins its queue, or when another client
    /// writes to a key that `body` watches. So `body` should only read and fill `pipe`: its other effects, and writes
    /// on `conn`, are not undone. If `pipe` stays empty, nothing is written, and everything that `body` read was read
    /// while the lock was held. [`Committed`] has the value that `body` returned, and the replies to the commands in
    /// `pipe`.
    ///
    /// `body` returns errors of redis-rs. For other error types, use [`try_transaction`](Self::try_transaction).
    ///
    /// `body` uses the full names of keys in Redis; the client adds no prefix. Each command waits for its reply for one
    /// [`command_timeout`](crate::Builder::command_timeout) at most. At most
    /// [`Builder::max_transactions`](crate::Builder::max_transactions) transactions run at a time, each on a connection
    /// of its own: a slow `body` delays no renewal and no other lock. If `body` panics, nothing is written. On a
    /// [`MemoryStore`](crate::MemoryStore), transactions fail with `Unsupported`.
    ///
    /// # Errors
    /// After all errors but `Timeout` and `Protocol`, nothing was written.
    ///
    /// - `LeaseLost` if the lock was lost.
    /// - The error of `body` as `source()`, with the kind that suits it.
    /// - `Conflict` if watched keys changed in each of 100 tries.
    /// - `Unavailable` if Redis cannot be reached or refuses all writes, or if all transactions of the client are busy
    ///   for longer than [`connect_timeout`](crate::Builder::connect_timeout).
    /// - `Denied` if the user may not use one of the commands; `Unsupported` if a command would end the transaction;
    ///   on a Cluster, `CrossSlot` if a key has another slot than the lock's key.
    /// - `TooLarge` if the reply to a command or pipeline of `body` is larger than
    ///   [`max_reply_bytes`](crate::Builder::max_reply_bytes).
    /// - `Timeout` if all commands were sent and no reply came. Either Redis executes all of them or none. Redis may
    ///   still execute them later, as long as no watched key changes and this guard holds the lock. If a repeated write
    ///   would do harm, `WATCH` a key that the transaction itself changes, and read it before you try again.
    /// - `Protocol` if Redis refused one of the writes because of the data, such as a list where a number was expected.
    ///   The other writes were carried out, since Redis does not roll back. The message names the refused command. (If
    ///   Redis does not know one of the commands, it executes none.)
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
    /// assert!(!move_50()?.value, "the account is empty");
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

    /// Changes data as [`transaction`](Self::transaction) does, with a closure that has its own error type:
    /// `anyhow::Error`, `Box<dyn Error>`, or an enum with a variant for [`Error`] and, if `body` uses `?` on reads, a
    /// variant for [`redis::RedisError`]. If `body` returns an error, nothing is written, and the caller gets that
    /// error unchanged.
    ///
    /// After an error of `body`, the client does not ask Redis whether the lock is still held, or whether the data that
    /// `body` read has changed. If the client knows that the lock was lost, it returns `LeaseLost` instead. To have
    /// Redis confirm a refusal, return the refusal as a value, and leave the pipeline empty.
    ///
    /// # Errors
    /// The error of `body`; otherwise those of [`transaction`](Self::transaction), converted to `E`.
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

    /// Runs `work` in the span of this hold.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.observed.run(work)
    }

    /// Reports that the guard ended, to the span, the metrics and the event handler.
    fn report_released(&mut self, outcome: &'static str, confirmed: bool) {
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
        // In a forked child the lock belongs to the parent. The client is leaked there, and everything that it owns.
        if self.client.is_forked() {
            self.observed.forget();
            return;
        }
        if self.release {
            return;
        }
        let outcome = match self.client.handle().acquirer.release(&self.lease) {
            Dropped::HandedOff => "handed_off",
            Dropped::Sent => "dropped",
            Dropped::Lost => "lost",
        };
        self.report_released(outcome, false);
    }
}

// The comment at `Client` says why this is right. As with `parking_lot`, a panic under the lock does not poison the
// lock: the library cannot know whether the work was half done.
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

/// Shows the key of the lock, printable on one line of a log.
impl fmt::Display for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(self.key(), usize::MAX))
    }
}

/// A channel that receives the reason when a lock is lost, from [`MutexGuard::lost_signal`].
///
/// A `LostSignal` dereferences to a [`Receiver`]: use it in `select!`, or with `recv_timeout`. Keep this value itself,
/// not a clone of the receiver: once this value is dropped, a release disconnects the channel, which makes it ready.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let lost = guard.lost_signal();
/// guard.unlock()?;
/// assert!(lost.try_recv().is_err(), "released, not lost");
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
            // The channel has mutexes. A thread of the parent may have held one of them at the fork.
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
    fn a_signal_of_another_process_is_leaked() {
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
