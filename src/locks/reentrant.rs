//! A lock that its holder's thread can lock again. Each thread has a list of the locks that it holds; the first guard
//! of a lock comes from a plain [`Mutex`], and further guards need no request to Redis.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crate::locks::guard::MutexGuard;
use crate::locks::mutex::Mutex;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::report::released::Released;
use crate::util::key::Key;

/// A lock that the thread that holds it can lock again, from [`Client::reentrant_mutex`] or [`Mutex::reentrant`].
///
/// Locking again takes no round trip: the guards of a thread share one hold. The lock is released when the last of
/// these guards is dropped, in whatever order. For other threads the lock is a plain [`Mutex`].
///
/// The holding thread cannot lock the lock again through another client, or through a plain [`Mutex`] of the same key.
/// Several `ReentrantMutex` values of one client with the same key are one lock, with the settings of the call that
/// acquired it.
///
/// A thread of a work-stealing pool, such as rayon's, may begin a second job while its first job waits for other jobs.
/// If the first job holds the lock, the second job enters it, too, and a plain [`Mutex`] waits for its own thread until
/// the deadline of the call. So do not wait for jobs of the pool while you hold a lock.
///
/// If a thread ends while it holds the lock (a guard was forgotten or leaked), the state of its work is unknown. The
/// client then does not release the lock, and only stops renewing it: the lock is lost with
/// [`ThreadEnded`](crate::LossReason::ThreadEnded) when its validity ends. Like a leaked [`MutexGuard`], a leaked guard
/// keeps the client alive.
///
/// [`Client::reentrant_mutex`]: crate::Client::reentrant_mutex
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let account = client.reentrant_mutex("account:7");
/// let deposit = || account.with(|guard| guard.depth());
///
/// let outer = account.lock()?;
/// assert_eq!(deposit()?, 2, "a function that locks for itself has locked it again");
/// assert_eq!(outer.depth(), 1);
/// outer.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a mutex does nothing until it is locked"]
pub struct ReentrantMutex {
    mutex: Mutex,
}

/// Each method does the same as the method of [`Mutex`] with this name, unless this thread holds the lock. In that
/// case, the method locks again at once, or fails with `LeaseLost` if the lock was lost meanwhile.
impl ReentrantMutex {
    pub(crate) fn new(mutex: Mutex) -> Self {
        Self { mutex }
    }

    /// The name of the lock, as it was given; empty if it is not a valid key.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// assert_eq!(client.reentrant_mutex("k").key(), "k");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn key(&self) -> &str {
        self.mutex.key()
    }

    /// Waits for the lock, for as long as other holders have it.
    ///
    /// # Errors
    /// The errors of [`Mutex::lock`]; `LeaseLost` if this thread held the lock and lost it.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let (outer, inner) = (mutex.lock()?, mutex.lock()?);
    /// assert_eq!(outer.fencing_token(), inner.fencing_token(), "one grant");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lock(&self) -> Result<ReentrantGuard, Error> {
        let guard = self.take(|mutex| mutex.lock().map(Some))?;
        Ok(guard.expect("a wait without a deadline ends with a guard or an error"))
    }

    /// Acquires the lock if it is free now and no other thread of this client waits for it, or if this thread holds it.
    /// Otherwise returns `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`Mutex::try_lock`]; `LeaseLost` if this thread held the lock and lost it.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let guard = mutex.try_lock()?;
    /// assert!(guard.is_some() && mutex.try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock(&self) -> Result<Option<ReentrantGuard>, Error> {
        self.take(Mutex::try_lock)
    }

    /// Waits for the lock for at most `timeout`; returns `Ok(None)` if it was not free within that time.
    ///
    /// # Errors
    /// The errors of [`Mutex::try_lock_for`]; `LeaseLost` if this thread held the lock and lost it.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let held = client.mutex("k").lock()?;
    /// let guard = client.reentrant_mutex("k").try_lock_for(Duration::from_millis(10))?;
    /// assert!(guard.is_none(), "a plain lock does not belong to a thread");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock_for(&self, timeout: Duration) -> Result<Option<ReentrantGuard>, Error> {
        self.take(|mutex| mutex.try_lock_for(timeout))
    }

    /// Waits for the lock until `deadline`, as [`try_lock_for`](Self::try_lock_for) does.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::{Duration, Instant};
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// assert!(client.reentrant_mutex("k").try_lock_until(deadline)?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_lock_until(&self, deadline: Instant) -> Result<Option<ReentrantGuard>, Error> {
        self.take(|mutex| mutex.try_lock_until(deadline))
    }

    /// Waits for the lock, runs `work` with its guard, and gives the guard up.
    ///
    /// # Errors
    /// The errors of [`lock`](Self::lock), and `LeaseLost` if the lock was lost before `work` returned.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let depth = mutex.with(|_| mutex.with(|guard| guard.depth()))??;
    /// assert_eq!(depth, 2);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn with<T>(&self, work: impl FnOnce(&ReentrantGuard) -> T) -> Result<T, Error> {
        run_under(self.lock()?, work)
    }

    /// Runs `work` under the lock if [`try_lock`](Self::try_lock) acquires it. Otherwise drops `work` and returns
    /// `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`try_lock`](Self::try_lock) and of [`with`](Self::with).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let depth = mutex.try_with(|_| mutex.try_with(|guard| guard.depth()))?;
    /// assert_eq!(depth.transpose()?.flatten(), Some(2));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with<T>(&self, work: impl FnOnce(&ReentrantGuard) -> T) -> Result<Option<T>, Error> {
        let guard = self.try_lock()?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    /// Waits for the lock for at most `timeout`, and runs `work` under it. If the lock was not free within that time,
    /// drops `work` and returns `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`try_lock_for`](Self::try_lock_for) and of [`with`](Self::with).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let mutex = client.reentrant_mutex("k");
    /// assert_eq!(mutex.try_with_for(Duration::from_millis(250), |_| 42)?, Some(42));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_for<T>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&ReentrantGuard) -> T,
    ) -> Result<Option<T>, Error> {
        let guard = self.try_lock_for(timeout)?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    /// Waits for the lock until `deadline`, and runs `work` under it, as [`try_with_for`](Self::try_with_for) does.
    ///
    /// # Errors
    /// The errors of [`try_with_for`](Self::try_with_for).
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::{Duration, Instant};
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// let mutex = client.reentrant_mutex("k");
    /// assert_eq!(mutex.try_with_until(deadline, |_| 42)?, Some(42));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_with_until<T>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&ReentrantGuard) -> T,
    ) -> Result<Option<T>, Error> {
        let guard = self.try_lock_until(deadline)?;
        guard.map(|guard| run_under(guard, work)).transpose()
    }

    fn take(
        &self,
        lock: impl FnOnce(&Mutex) -> Result<Option<MutexGuard>, Error>,
    ) -> Result<Option<ReentrantGuard>, Error> {
        let (client, key) = self.mutex.identity()?;
        let name = Name { client, key };
        if let Some(hold) = Hold::of_this_thread(&name) {
            hold.guard.check()?;
            return Ok(Some(ReentrantGuard { hold }));
        }
        let guard = lock(&self.mutex)?;
        Ok(guard.map(|guard| ReentrantGuard {
            hold: Hold::begin(name, guard),
        }))
    }
}

fn run_under<T>(
    guard: ReentrantGuard,
    work: impl FnOnce(&ReentrantGuard) -> T,
) -> Result<T, Error> {
    let value = guard.run(|| work(&guard));
    guard.end_with(MutexGuard::finish).map(|_| value)
}

/// A guard of a [`ReentrantMutex`]. The lock is released when the last guard of its thread is dropped.
///
/// A `ReentrantGuard` dereferences to a [`MutexGuard`], so it has the same methods:
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.reentrant_mutex("invoice:42").lock()?;
/// guard.check()?;
/// assert!(guard.fencing_token() > 0);
/// guard.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// The guard stays on its thread, since the lock belongs to the thread:
///
/// ```compile_fail,E0277
/// fn elsewhere(guard: leasehold::ReentrantGuard) {
///     std::thread::spawn(move || drop(guard));
/// }
/// ```
///
/// A program cannot release the lock too often, since each release consumes a guard:
///
/// ```compile_fail,E0382
/// fn twice(guard: leasehold::ReentrantGuard) {
///     guard.unlock().unwrap();
///     guard.unlock().unwrap();
/// }
/// ```
#[must_use = "the lock is released as soon as its last guard is dropped"]
pub struct ReentrantGuard {
    /// Each guard has one `Rc`, so their number is the depth.
    hold: Rc<Hold>,
}

impl ReentrantGuard {
    /// The number of guards that this thread has of this lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let outer = mutex.lock()?;
    /// let inner = mutex.lock()?;
    /// drop(outer);
    /// assert_eq!(inner.depth(), 1, "still held");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn depth(&self) -> usize {
        Rc::strong_count(&self.hold)
    }

    /// Gives this guard up. The last guard of the thread releases the lock and waits for Redis to confirm it, as
    /// [`MutexGuard::unlock`] does. While the thread has other guards, this returns `None` and sends no request.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost: another holder may have run at the same time. `Forked` in a child of the
    /// process that holds the lock.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let (outer, inner) = (mutex.lock()?, mutex.lock()?);
    /// assert!(inner.unlock()?.is_none(), "`outer` still holds it");
    /// assert!(outer.unlock()?.is_some_and(|released| released.is_confirmed()));
    /// assert!(client.mutex("k").try_lock()?.is_some(), "free");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn unlock(self) -> Result<Option<Released>, Error> {
        self.end_with(MutexGuard::unlock)
    }

    /// Gives this guard up. If it is the last guard of the thread, ends the hold with `end`; otherwise returns `None`.
    fn end_with<T>(
        self,
        end: impl FnOnce(MutexGuard) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        match Rc::try_unwrap(self.hold) {
            Ok(Hold { entry, guard }) => {
                drop(entry);
                end(guard).map(Some)
            }
            Err(hold) => hold.guard.check().map(|()| None),
        }
    }
}

impl Deref for ReentrantGuard {
    type Target = MutexGuard;

    fn deref(&self) -> &MutexGuard {
        &self.hold.guard
    }
}

/// Shows the key of the lock, as a [`MutexGuard`] does.
impl fmt::Display for ReentrantGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.hold.guard, f)
    }
}

impl fmt::Debug for ReentrantGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReentrantGuard")
            .field("depth", &self.depth())
            .field("guard", &self.hold.guard)
            .finish()
    }
}

/// A lock that a thread holds. All guards that the thread has of this lock own the `Hold` together.
struct Hold {
    // Dropped first: dropping the guard calls event handlers, which may lock the same key again.
    entry: Entry,
    guard: MutexGuard,
}

/// The identity of a lock within this process. No two clients have the same number.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    client: u64,
    key: Key,
}

/// The holds of a thread, by name. The guards own the holds; this map only finds them.
#[derive(Default)]
struct Holds(RefCell<HashMap<Name, Weak<Hold>>>);

/// Removes a [`Hold`] from the map of its thread when it is dropped.
struct Entry(Name);

thread_local! {
    static HOLDS: Holds = Holds::default();
}

impl Hold {
    fn begin(name: Name, guard: MutexGuard) -> Rc<Self> {
        let hold = Rc::new(Self {
            entry: Entry(name.clone()),
            guard,
        });
        // Fails if the thread is ending and has dropped its map. A lock that is acquired so late cannot be locked
        // again: no nested call finds the hold.
        let _ = HOLDS.try_with(|holds| holds.0.borrow_mut().insert(name, Rc::downgrade(&hold)));
        hold
    }

    fn of_this_thread(name: &Name) -> Option<Rc<Self>> {
        let found = HOLDS.try_with(|holds| holds.0.borrow().get(name).and_then(Weak::upgrade));
        found.ok().flatten()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Fails if the thread is ending and has dropped its map, and the entry with it.
        let _ = HOLDS.try_with(|holds| holds.0.borrow_mut().remove(&self.0));
    }
}

impl Drop for Holds {
    /// Runs when the thread ends. Does no I/O, and uses no other thread-local value, which may be dropped already.
    fn drop(&mut self) {
        for hold in self.0.get_mut().values().filter_map(Weak::upgrade) {
            hold.guard.stop_renewing(LossReason::ThreadEnded);
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::client::Client;

    fn known() -> usize {
        HOLDS.with(|holds| holds.0.borrow().len())
    }

    #[test]
    fn released_locks_leave_no_entry() {
        for unlocked in [true, false] {
            let client = Client::memory().unwrap();
            let guards = ["a", "b"].map(|key| client.reentrant_mutex(key).lock().unwrap());
            let again = client.reentrant_mutex("a").lock().unwrap();
            assert_eq!(known(), 2);
            for guard in guards {
                if unlocked {
                    guard.unlock().unwrap();
                }
            }
            assert_eq!(known(), 1);
            drop(again);
            assert_eq!(known(), 0);
        }
    }
}
