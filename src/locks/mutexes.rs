//! A set: several keys that are locked together, and their guard.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex as PlainMutex;
use redis::{Pipeline, RedisResult};

use crate::acquire::Until;
use crate::client::Client;
use crate::config::key::{Key, KeyLayout};
use crate::lease::Lease;
use crate::locks::guard::{Guard, LostSignal};
use crate::locks::lock::{ClosureGuard, Lock, calls, settings};
use crate::locks::transaction::{Committed, TransactionRunner};
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::{LossReason, LostKey};
use crate::report::released::Released;
use crate::util::text::printable;
use crate::wire::session::TransactionConnection;

/// The greatest number of keys in a set.
const MAX_KEYS: usize = 128;

/// Several keys that are locked together, and the settings to acquire them. From [`Client::mutexes`].
///
/// All clients acquire the keys of a set in the same order, so sets with common keys do not deadlock. Each key is the
/// same lock as a [`Mutex`](crate::Mutex) with this name, with its own queue and its own fencing tokens. While a call
/// waits for a key, it holds the keys before it in the order, and the client renews them. So small sets cannot starve a
/// large one.
///
/// On one server, a free set costs one request to acquire and one to release it, whatever the number of its keys. On a
/// Cluster, it costs these two requests for each slot. Each key that is taken adds one request.
///
/// A set is not reentrant. A thread that holds a guard and waits for a set can deadlock with another thread, as with
/// any two locks: lock all keys in one set, or use [`try_lock_for`](Self::try_lock_for).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let both = client.mutexes(["account:2", "account:1"]).lock()?;
/// for key in both.keys() {
///     println!("{key} under token {}", both.token(key).unwrap());
/// }
/// both.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "the keys are not locked until a call locks them"]
pub struct Mutexes {
    /// The settings, and the first key.
    lock: Lock,
    /// In the order in which they are acquired. Empty if a name is not a valid key.
    keys: Arc<[Key]>,
}

settings!(settings of Mutexes, client.mutexes(["k"]), lock, MutexesGuard::extend);
calls! {
    /// A time limit counts for the whole call. If the call fails, ends at its limit or is cancelled, it has released
    /// all keys when it returns; in an outage, a thread of the client releases them later. With
    /// [`replicas`](Self::replicas), a call that fails waits for the releases for at most one
    /// [`command_timeout`](crate::Builder::command_timeout).
    ///
    /// [`fixed_ttl`](Self::fixed_ttl), [`max_hold`](Self::max_hold) and the checks of
    /// [`renew_while`](Self::renew_while) begin with the grant of the last key. Until then, the client renews the keys
    /// that it has. If acquiring the keys took more than one request, the call then sets the ttl of all keys once more.
    impl Mutexes by acquire -> MutexesGuard, "all keys", client.mutexes(["k"]);
    lock try_lock try_lock_for try_lock_until
    with try_with try_with_for try_with_until
}

impl Mutexes {
    pub(crate) fn new(client: Client, names: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let config = client.config();
        let keys = names
            .into_iter()
            .map(|name| Key::new(&config.prefix, name.as_ref(), config.max_key_bytes));
        let keys: Result<Vec<Key>, Error> = keys.collect();
        let (key, keys) = match keys.and_then(sorted) {
            Ok(keys) => (Ok(keys[0].clone()), keys),
            Err(error) => (Err(error), Arc::default()),
        };
        Self {
            lock: Lock {
                key,
                ..Lock::new(client, "")
            },
            keys,
        }
    }

    /// The names of the keys, in the order in which they are acquired. Empty if a name is not a valid key.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert_eq!(client.mutexes(["b", "a"]).keys().count(), 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.iter().map(Key::name)
    }

    fn acquire(&self, until: Until) -> Result<Option<MutexesGuard>, Error> {
        let (client, first) = self.lock.prepare()?;
        let leases = client.acquirer.acquire_set(&first, &self.keys, until)?;
        Ok(leases.map(|leases| {
            let guard = |lease| Guard::new(lease, self.lock.client.clone());
            let guards = leases.into_iter().map(guard).collect();
            MutexesGuard { guards }
        }))
    }
}

/// The keys in the order in which all clients acquire them: by slot, and by their names in Redis.
fn sorted(mut keys: Vec<Key>) -> Result<Arc<[Key]>, Error> {
    if !(1..=MAX_KEYS).contains(&keys.len()) {
        let wanted = format!("1 to {MAX_KEYS}");
        return Err(Error::invalid("the number of keys", &wanted, keys.len()));
    }
    keys.sort_by_cached_key(|key| (key.slot(), key.in_redis().to_owned()));
    if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
        let error = Error::new(ErrorKind::InvalidKey, "the set has this key twice");
        return Err(error.with_key(twice[0].name()));
    }
    Ok(keys.into())
}

impl fmt::Debug for Mutexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut output = f.debug_struct("Mutexes");
        output.field("keys", &self.keys().collect::<Vec<_>>());
        self.lock.debug_fields(&mut output);
        output.finish()
    }
}

/// Several held keys. Its drop releases all of them: it writes the releases to Redis, and does not wait for the
/// replies.
///
/// A key can be lost while the others are held. After the first loss, [`check`](Self::check) fails, and
/// [`lost_signal`](Self::lost_signal) becomes ready; both name the key. The other keys stay held until the guard is
/// dropped, so the holder can stop or undo its work under them.
///
/// A set has no ticket.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let items = client.mutexes(["item:7", "item:9"]).lock()?;
/// for key in items.keys() {
///     items.check()?;
///     println!("{key}, and {:?} left even without renewal", items.remaining());
/// }
/// items.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the keys are released as soon as their guard is dropped"]
pub struct MutexesGuard {
    /// In the order in which the keys were acquired. Empty only during the drop.
    guards: Vec<Guard>,
}

/// # After a fork
///
/// In a child of the process that holds the keys, calls that return a `Result` fail with
/// [`Forked`](crate::ErrorKind::Forked), and the drop of the guard has no effect.
impl MutexesGuard {
    /// Releases all keys and waits for Redis to confirm it, for at most one
    /// [`command_timeout`](crate::Builder::command_timeout).
    ///
    /// Fails only if a key was lost. If Redis does not confirm the release of a key, this returns
    /// [`Released::Unconfirmed`](crate::Released::Unconfirmed), and a thread of the client repeats that release.
    ///
    /// # Errors
    /// `LeaseLost` with the name of the first key that was lost. The other keys are released.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// assert!(guard.unlock()?.is_confirmed());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn unlock(mut self) -> Result<Released, Error> {
        Guard::unlock_all(std::mem::take(&mut self.guards))
    }

    /// The names of the keys, in the order in which they were acquired.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// assert!(guard.keys().any(|key| key == "a"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.guards.iter().map(Guard::key)
    }

    /// The fencing token of a key; `None` if the set does not have this key. Compare a token with tokens of the same
    /// key only. [`MutexGuard::fencing_token`](crate::MutexGuard::fencing_token) explains its use.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutexes(["item:7", "item:9"]).lock()?;
    /// let token = guard.token("item:7").unwrap();
    /// client.fenced_value("item:7").write(token, "sold")?;
    /// assert_eq!(guard.token("item:8"), None);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn token(&self, key: &str) -> Option<u64> {
        let mut guards = self.guards.iter();
        let guard = guards.find(|guard| guard.key() == key)?;
        Some(guard.lease.grant().token)
    }

    /// The rest of the validity of all keys: that of the key that ends first. Zero once a key is lost. Sends no
    /// request.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let client = memory.client()?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// assert!(guard.remaining() > Duration::from_secs(29));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn remaining(&self) -> Duration {
        let remaining = self.guards.iter().map(Guard::remaining);
        remaining.min().unwrap_or_default()
    }

    /// Whether a key was lost. Sends no request.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// assert!(!guard.is_lost());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn is_lost(&self) -> bool {
        self.guards.iter().any(Guard::is_lost)
    }

    /// Returns an error if a key was lost, for use with `?`. Sends no request.
    ///
    /// # Errors
    /// `LeaseLost`, with the first key that was lost and the reason.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// guard.check()?;
    /// client.mutex("b").force_unlock()?;
    /// guard.lost_signal().recv().unwrap();
    /// assert_eq!(guard.check().unwrap_err().key(), Some("b"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn check(&self) -> Result<(), Error> {
        Guard::first_lost(&self.guards).map_or(Ok(()), Guard::check)
    }

    /// A channel that receives the first key that is lost, and the reason. A release never makes the channel ready.
    /// Each call makes a new channel.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::crossbeam_channel::{after, select};
    /// use std::time::Duration;
    ///
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// let lost = guard.lost_signal();
    /// select! {
    ///     recv(lost) -> lost => println!("lost: {}", lost.unwrap()),
    ///     recv(after(Duration::from_millis(20))) -> _ => println!("next piece of work"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lost_signal(&self) -> LostSignal<LostKey> {
        Guard::lost_signal_of_all(&self.guards)
    }

    /// Runs `callback` once, when the first key is lost. Otherwise does the same as
    /// [`MutexGuard::on_lost`](crate::MutexGuard::on_lost).
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// guard.on_lost(|lost| eprintln!("lost {lost}"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn on_lost(&self, callback: impl FnOnce(LostKey) + Send + 'static) {
        let callback = Arc::new(PlainMutex::new(Some(callback)));
        let first = Guard::first_lost(&self.guards);
        for guard in first.into_iter().chain(&self.guards) {
            let (callback, key) = (Arc::clone(&callback), guard.key().to_owned());
            guard.on_lost(move |reason: LossReason| {
                let callback = callback.lock().take();
                if let Some(callback) = callback {
                    callback(LostKey { key, reason });
                }
            });
        }
    }

    /// Extends all keys, so they last for at least `duration` from this call. Never shortens a ttl. On one server,
    /// sends one request; on a Cluster, one for each slot.
    ///
    /// # Errors
    /// The errors of [`MutexGuard::extend`](crate::MutexGuard::extend), with the name of the key. Other keys may have
    /// been extended.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// # use std::time::Duration;
    /// let guard = client.mutexes(["a", "b"]).lock()?;
    /// guard.extend(Duration::from_secs(60))?;
    /// assert!(guard.remaining() > Duration::from_secs(55));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn extend(&self, duration: Duration) -> Result<(), Error> {
        Guard::extend_all(&self.guards, duration)
    }

    /// Changes data in the same Redis server, only if all keys are held at that moment. Otherwise does the same as
    /// [`MutexGuard::transaction`](crate::MutexGuard::transaction): Redis executes all commands of `pipe` in one step
    /// if the keys of all locks are unchanged (`WATCH`). So a holder that lost one of the keys writes nothing, even if
    /// it has not noticed the loss. Use it to move money between two accounts that each have their own lock.
    ///
    /// # Errors
    /// The errors of [`MutexGuard::transaction`](crate::MutexGuard::transaction). On a Cluster, also `CrossSlot` if the
    /// keys have different slots: give them a common hash tag, such as `{bank}:1` and `{bank}:2`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::redis::Commands;
    ///
    /// let both = client.mutexes(["account:1", "account:2"]).lock()?;
    /// let moved = both.transaction(|conn, pipe| {
    ///     let balance: Option<i64> = conn.get("balance:1")?;
    ///     let is_enough = balance.unwrap_or(0) >= 50;
    ///     if is_enough {
    ///         pipe.decr("balance:1", 50).incr("balance:2", 50);
    ///     }
    ///     Ok(is_enough)
    /// })?;
    /// assert!(!moved.value, "the account is empty");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn transaction<T>(
        &self,
        body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> RedisResult<T>,
    ) -> Result<Committed<T>, Error> {
        let (transactions, leases) = self.for_transaction()?;
        let result = transactions.run(&leases, body);
        result.map_err(|failed| failed.into_read_failed(self.guards[0].key()))
    }

    /// Does the same as [`transaction`](Self::transaction), with a closure that has its own error type, as
    /// [`MutexGuard::try_transaction`](crate::MutexGuard::try_transaction) does.
    ///
    /// # Errors
    /// The error of `body`; otherwise the errors of [`transaction`](Self::transaction), converted to `E`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let both = client.mutexes(["account:1", "account:2"]).lock()?;
    /// let paid = both.try_transaction(|_, pipe| {
    ///     pipe.decr("balance:1", 50).incr("balance:2", 50);
    ///     Ok::<_, leasehold::Error>(50)
    /// })?;
    /// assert_eq!(paid.value, 50);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_transaction<T, E: From<Error>>(
        &self,
        body: impl FnMut(&mut TransactionConnection, &mut Pipeline) -> Result<T, E>,
    ) -> Result<Committed<T>, E> {
        let (transactions, leases) = self.for_transaction()?;
        let result = transactions.run(&leases, body);
        result.map_err(|failed| failed.into_error(self.guards[0].key()))
    }

    /// The runner of transactions and the leases of all keys. Fails if the keys are in several slots of a Cluster.
    fn for_transaction(&self) -> Result<(&TransactionRunner, Vec<&Arc<Lease>>), Error> {
        let client = self.guards[0].live()?;
        let leases: Vec<&Arc<Lease>> = self.guards.iter().map(|guard| &guard.lease).collect();
        let slot_of = |lease: &Arc<Lease>| lease.grant().key.slot();
        let first = slot_of(leases[0]);
        if client.config.layout != KeyLayout::Single
            && let Some(other) = leases.iter().find(|lease| slot_of(lease) != first)
        {
            let message = "the keys of the set have several slots, and a transaction has one; give the keys a common \
                           hash tag";
            let error = Error::new(ErrorKind::CrossSlot, message);
            return Err(error.with_key(other.grant().key.name()));
        }
        Ok((&client.transactions, leases))
    }
}

impl Drop for MutexesGuard {
    fn drop(&mut self) {
        Guard::drop_all(std::mem::take(&mut self.guards));
    }
}

impl ClosureGuard for MutexesGuard {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.guards[0].run(work)
    }

    fn finish(mut self) -> Result<(), Error> {
        Guard::finish_all(std::mem::take(&mut self.guards))
    }
}

impl fmt::Debug for MutexesGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = self.keys().map(|key| (key, self.token(key)));
        f.debug_struct("MutexesGuard")
            .field("tokens", &tokens.collect::<Vec<_>>())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// Shows the keys of the set, printable on one line of a log.
impl fmt::Display for MutexesGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<&str> = self.keys().collect();
        f.write_str(&printable(&keys.join(", "), usize::MAX))
    }
}
