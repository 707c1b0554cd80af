//! The lock that one holder has at a time, and its guard.

use std::fmt;
use std::time::Duration;

use redis::{Pipeline, RedisResult};

use crate::acquire::Until;
use crate::client::Client;
use crate::locks::guard::{Guard, guard};
use crate::locks::held::{HolderKind, LockInfo};
use crate::locks::lock::{Lock, calls, settings};
use crate::locks::transaction::Committed;
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::wire::session::TransactionConnection;

/// The lock with a given key, and the settings to acquire it. From [`Client::mutex`].
///
/// Making or cloning a mutex does no I/O, and a clone is the same lock. A mutex holds no connection, and keeps its
/// client alive. A mutex is not reentrant: see [`reentrant`](Self::reentrant).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use std::time::Duration;
///
/// let mutex = client.mutex("invoice:42");
/// let guard = mutex.lock()?;
/// assert!(mutex.try_lock()?.is_none(), "this thread holds it, and it is not reentrant");
/// guard.unlock()?;
/// assert!(mutex.try_lock_for(Duration::from_millis(250))?.is_some());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a mutex does nothing until it is locked"]
pub struct Mutex {
    pub(crate) lock: Lock,
}

settings!(Mutex, client.mutex("k"), lock, MutexGuard::extend);
calls! {
    impl Mutex by acquire -> MutexGuard, "the lock", client.mutex("k");
    lock try_lock try_lock_for try_lock_until
    with try_with try_with_for try_with_until
}

impl Mutex {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        Self {
            lock: Lock::new(client, key),
        }
    }

    fn acquire(&self, until: Until) -> Result<Option<MutexGuard>, Error> {
        Ok(self.lock.acquire(until)?.map(MutexGuard::new))
    }

    /// Keeps the lock taken for at least `min_hold` from each grant, by the clock of Redis, even if its holder releases
    /// it earlier or crashes. So the lock is granted at most once in each `min_hold`. Use it for work that must not run
    /// too often. Waiting clients get the lock when the time has passed. 10 ms to
    /// [`Builder::max_ttl`](crate::Builder::max_ttl).
    ///
    /// After the release, [`inspect`](Self::inspect) still shows the former holder, and
    /// [`force_unlock`](Self::force_unlock) ends the rest of the time. The client never hands such a lock off to
    /// another of its threads. A [ticket](MutexGuard::into_ticket) does not contain the setting, so the adopter's
    /// release frees the lock at once. On a [quorum](Client::quorum), and beside python-redis-lock and Redisson
    /// ([`Builder::compatible_with`](crate::Builder::compatible_with)), the calls fail with `Unsupported`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let client = memory.client()?;
    /// let cleanup = client.mutex("cleanup").min_hold(Duration::from_secs(60));
    /// cleanup.with(|_| println!("done within a second"))?;
    /// assert!(cleanup.try_lock()?.is_none());
    /// memory.advance(Duration::from_secs(61));
    /// assert!(cleanup.try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.lock.min_hold = min_hold;
        self
    }

    /// The holder of the lock according to Redis, and the number of waiting clients; `None` if the lock is free. If
    /// leases share the key, lists all of them: readers of a [`RwLock`](crate::RwLock), or permits of a
    /// [`Semaphore`](crate::Semaphore). For diagnosis only: the result may be out of date when you read it.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `InvalidKey`; `Protocol` if the value under the key is not a
    /// lock. With [`Builder::compatible_with`](crate::Builder::compatible_with), such a value is a holder instead, of
    /// the kind [`HolderKind::OtherLibrary`].
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.mutex("k");
    /// assert!(mutex.inspect()?.is_none());
    /// let guard = mutex.lock()?;
    /// assert_eq!(mutex.inspect()?.unwrap().holder(), client.holder_id());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn inspect(&self) -> Result<Option<LockInfo>, Error> {
        Ok(LockInfo::new(self.lock.inspect()?))
    }

    /// Whether the lock has a holder, according to Redis. The result may be out of date when you read it: to acquire
    /// the lock if it is free, call [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// assert!(!client.mutex("k").is_locked()?);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn is_locked(&self) -> Result<bool, Error> {
        self.inspect().map(|found| found.is_some())
    }

    /// Takes the lock away from its holder, and returns that holder. The next waiter then gets the lock. Returns `None`
    /// if the lock was free, or was released at the same moment.
    ///
    /// For operators only: the holder may still be working, and continues until its client detects the loss. A client
    /// that is subscribed to notifications reports [`LossReason::ForceUnlocked`] within milliseconds. A client without
    /// notifications detects the loss at its next renewal at the latest, and reports `Deleted` or `TakenOver`. Fencing
    /// tokens refuse the late writes of the holder.
    ///
    /// Sends one more request than [`inspect`](Self::inspect). If the holder's client is not subscribed yet, this call
    /// waits for it for up to a second, unless the grant is older than that. A client subscribes when it has held a
    /// lock for 30 ms or has to wait for a lock. (If the lock was free when it was acquired, its value usually contains
    /// no time, and the grant counts as new.)
    ///
    /// # Errors
    /// The errors of [`inspect`](Self::inspect); `Protocol` if leases share the key: name one of them with
    /// [`RwLock::force_unlock`](crate::RwLock::force_unlock). `Unsupported` if another library holds the lock
    /// ([`Builder::compatible_with`](crate::Builder::compatible_with)): its client would not learn of the loss. After
    /// `Timeout` or `Unavailable` it is unknown whether the lock was taken away: call [`inspect`](Self::inspect).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let stuck = client.mutex("k").lock()?;
    /// let operator = leasehold::Client::open(&server.url())?;
    /// let taken_from = operator.mutex("k").force_unlock()?.unwrap();
    /// assert_eq!(taken_from.holder(), client.holder_id());
    /// assert!(stuck.unlock().unwrap_err().is_lease_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn force_unlock(&self) -> Result<Option<LockInfo>, Error> {
        let Some(found) = self.inspect()? else {
            return Ok(None);
        };
        let holder = &found.holders()[0];
        if matches!(
            holder.kind(),
            HolderKind::Reader | HolderKind::Permits { .. }
        ) {
            let message = "leases share the key: name one of them to the `force_unlock` of a RwLock or Semaphore";
            return Err(Error::new(ErrorKind::Protocol, message).with_key(self.lock.name()));
        }
        Ok(self.lock.force(holder)?.then_some(found))
    }
}

/// A held lock. Its drop releases the lock: it writes the release to Redis, and does not wait for the reply.
///
/// A guard has no lifetime, so it can be stored in a struct, and moved to and dropped on another thread. If a thread of
/// the same client waits for the lock, the drop hands the lock off to that thread and does not release it. If the reply
/// to the release shows that the lock was lost while it was held, the client calls
/// [`EventHandler::lost`](crate::EventHandler::lost). [`unlock`](Self::unlock) waits for the reply. If Redis is away, a
/// thread of the client repeats the release until the ttl has ended.
///
/// A lock in Redis is a lease. Even if it is renewed, it can be lost, for example by a pause of the whole process or by
/// a fail-over. The holder learns of a loss in three ways: it asks ([`is_lost`](Self::is_lost),
/// [`check`](Self::check)), waits for a channel ([`lost_signal`](Self::lost_signal)), or registers a callback
/// ([`on_lost`](Self::on_lost)). Writes that must be correct even after a loss need the
/// [`fencing_token`](Self::fencing_token).
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
    guard: Guard,
}

guard!(MutexGuard, client.mutex("k").lock());

impl MutexGuard {
    pub(crate) fn new(guard: Guard) -> Self {
        Self { guard }
    }

    pub(crate) fn into_guard(self) -> Guard {
        self.guard
    }

    /// Stops renewal: the lock is lost for `reason` when its validity ends.
    pub(crate) fn stop_renewing(&self, reason: LossReason) {
        self.guard.stop_renewing(reason);
    }

    /// Ends this guard without a release, and returns a ticket with which another process can
    /// [adopt](Client::adopt) the lock, once.
    ///
    /// The new holder gets the ttl, the time between renewals and the rest of `max_hold`. First, this call sets the
    /// full ttl again, unless the ttl is fixed. That takes at most two command time-outs; if Redis does not reply, the
    /// lock keeps the rest of its ttl. Then the client stops renewing the lock: unless another client adopts it, it is
    /// free when the ttl ends. `max_hold` does not count the time until the adoption.
    ///
    /// The adopter gets a greater token, and once the adopter has written with it, writes with your token are refused.
    /// So wait for the replies to your own writes before you send the ticket. A check
    /// ([`renew_while`](crate::Mutex::renew_while)) is not part of the ticket: the adopter of such a lock gets it
    /// without renewal, and has to extend it or finish within the ttl.
    ///
    /// The ticket is one line of text. Any client that has it can take the lock, so keep it secret.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before. `Unsupported` on a [quorum](Client::quorum) and beside Redisson: the
    /// guard is dropped, which releases the lock, so another process can acquire it at once.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let ticket = client.mutex("k").lock()?.into_ticket()?;
    /// assert!(client.mutex("k").is_locked()?, "no other client can get it in between");
    /// let guard = client.adopt(&ticket)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn into_ticket(self) -> Result<String, Error> {
        self.guard.into_ticket()
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
        self.guard.lease.grant().token
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

    /// Changes data in the same Redis server, only if the lock is held at that moment.
    ///
    /// `body` reads on `conn`, and puts the commands that write into `pipe`. Redis then executes all commands of `pipe`
    /// in one step (`MULTI`, `EXEC`), provided that the lock's key has not changed since before `body` began (`WATCH`).
    /// So a holder that lost the lock cannot write, even if it has not noticed the loss. `body` may `WATCH` more keys
    /// on `conn` before it reads them: then Redis also drops the writes if one of these keys has changed.
    ///
    /// If a watched key has changed and the lock is still held, `body` runs again with an empty pipeline, up to 100
    /// times. That happens when the lock is renewed, when the first waiter joins its queue, or when another client
    /// writes to a key that `body` watches. So `body` should only read and fill `pipe`: its other effects, and writes
    /// on `conn`, are not undone. If `pipe` stays empty, the transaction only reads, and everything that `body` read
    /// was read while the lock was held. [`Committed`] has the value that `body` returned, and the replies to the
    /// commands in `pipe`.
    ///
    /// `body` returns errors of redis-rs. For other error types, use [`try_transaction`](Self::try_transaction).
    ///
    /// `body` uses the full names of keys in Redis; the client adds no prefix. Each command waits for its reply for one
    /// [`command_timeout`](crate::Builder::command_timeout) at most. At most
    /// [`Builder::max_transactions`](crate::Builder::max_transactions) transactions run at a time, each on a connection
    /// of its own: a slow `body` does not delay renewals and other locks. If `body` panics, the transaction is not
    /// written. On a [`MemoryStore`](crate::MemoryStore), on a [quorum](Client::quorum) and beside Redisson,
    /// transactions fail with `Unsupported`.
    ///
    /// # Errors
    /// After all errors but `Timeout` and `Protocol`, the transaction was not written.
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
    /// - `Timeout` if all commands were sent and the reply is missing. Redis executes either all of them or none. Redis
    ///   may still execute them later, as long as no watched key changes and this guard holds the lock. If a repeated
    ///   write would do harm, `WATCH` a key that the transaction itself changes, and read it before you try again.
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
        let transactions = &self.guard.live()?.transactions;
        let result = transactions.run(&[&self.guard.lease], body);
        result.map_err(|failed| failed.into_read_failed(self.key()))
    }

    /// Does the same as [`transaction`](Self::transaction), with a closure that has its own error type:
    /// `anyhow::Error`, `Box<dyn Error>`, or an enum with a variant for [`Error`] and, if `body` uses `?` on reads, a
    /// variant for [`redis::RedisError`]. If `body` returns an error, the transaction is not written, and the caller
    /// gets that error unchanged.
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
        let transactions = &self.guard.live()?.transactions;
        let result = transactions.run(&[&self.guard.lease], body);
        result.map_err(|failed| failed.into_error(self.key()))
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexGuard")
            .field("key", &self.key())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish()
    }
}
