//! A lock that its holder's thread can lock again. The first guard acquires the lock as a plain mutex does, so Redis
//! and other threads see one plain lock. Further guards send no request and never wait.
//!
//! Each thread has a list of the locks that it holds. The list is only an index: the guards own the lock, and the drop
//! of the last guard releases it. When a thread ends while locks are in its list, the client stops renewing these
//! locks. It does not release them, because the state of the work is unknown.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::rc::{Rc, Weak};

use crate::acquire::Until;
use crate::config::key::Key;
use crate::locks::lock::{ClosureGuard, Lock, calls, settings};
use crate::locks::mutex::{Mutex, MutexGuard};
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::report::released::Released;

/// A lock that its holding thread can lock again, from [`Client::reentrant_mutex`] or [`Mutex::reentrant`].
///
/// Locking again takes no round trip: the guards of a thread share one hold. The lock is released when the last of
/// these guards is dropped, in whatever order. For other threads the lock is a plain [`Mutex`].
///
/// The holding thread cannot lock the lock again through another client, or through a plain [`Mutex`] of the same key.
/// Several `ReentrantMutex` values of one client with the same key are one lock, with the settings of the call that
/// acquired it.
///
/// A thread of a work-stealing pool, such as rayon's, may begin a second job while its first job waits for other jobs.
/// If the first job holds a `ReentrantMutex`, the second job enters it, too. If the lock is a plain [`Mutex`], the
/// second job waits for its own thread until the deadline of the call. So do not wait for jobs of the pool while you
/// hold a lock.
///
/// If a thread ends while it holds the lock (a guard was forgotten or leaked), the state of its work is unknown. The
/// client then does not release the lock, and only stops renewing it: the lock is lost with
/// [`ThreadEnded`](crate::LossReason::ThreadEnded) when its validity ends. Like a leaked [`MutexGuard`], a leaked guard
/// keeps the client alive.
///
/// [`Client::reentrant_mutex`]: crate::Client::reentrant_mutex
/// [`Mutex`]: crate::Mutex
/// [`Mutex::reentrant`]: crate::Mutex::reentrant
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
#[derive(Clone)]
#[must_use = "a mutex does nothing until it is locked"]
pub struct ReentrantMutex {
    lock: Lock,
}

impl Mutex {
    /// The same lock with the same settings, as a lock that its holder's thread can lock again.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let mutex = client.mutex("k").max_hold(Duration::from_secs(60)).reentrant();
    /// let outer = mutex.lock()?;
    /// assert!(mutex.try_lock()?.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn reentrant(self) -> ReentrantMutex {
        ReentrantMutex::new(self.lock)
    }
}

settings!(
    ReentrantMutex,
    client.reentrant_mutex("k"),
    lock,
    MutexGuard::extend
);
calls! {
    /// If this thread holds the lock, each call locks it again at once, or fails with `LeaseLost` if the lock was lost.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let mutex = client.reentrant_mutex("k");
    /// let depth = mutex.with(|_| mutex.with(|guard| guard.depth()))??;
    /// assert_eq!(depth, 2);
    ///
    /// let (outer, inner) = (mutex.lock()?, mutex.try_lock()?.unwrap());
    /// assert_eq!(outer.fencing_token(), inner.fencing_token(), "one grant");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    impl ReentrantMutex by acquire -> ReentrantGuard, "the lock", client.reentrant_mutex("k");
    lock try_lock try_lock_for try_lock_until
    with try_with try_with_for try_with_until
}

impl ReentrantMutex {
    pub(crate) fn new(lock: Lock) -> Self {
        Self { lock }
    }

    fn acquire(&self, until: Until) -> Result<Option<ReentrantGuard>, Error> {
        let name = Name {
            client: self.lock.client.number(),
            key: self.lock.key.clone()?,
        };
        if let Some(hold) = Hold::find_on_thread(&name) {
            hold.guard.check()?;
            return Ok(Some(ReentrantGuard { hold }));
        }
        let guard = self.lock.acquire(until)?.map(MutexGuard::new);
        Ok(guard.map(|guard| ReentrantGuard {
            hold: Hold::begin(name, guard),
        }))
    }
}

/// A guard of a [`ReentrantMutex`]. The drop of the last guard of its thread writes the release to Redis.
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
    /// The guards of a thread share the hold, so the number of these references is the depth.
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

    /// Ends this guard. If it is the last guard of its thread, releases the lock and waits for Redis to confirm the
    /// release, as [`MutexGuard::unlock`] does. If the thread has other guards of the lock, returns `None` and sends no
    /// request.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost: another holder may have run at the same time.
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

    /// Drops this guard. If it was the last guard of the thread, ends the hold with `end`; otherwise returns `None`.
    fn end_with<T>(
        self,
        end: impl FnOnce(MutexGuard) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        match Rc::try_unwrap(self.hold) {
            Ok(Hold {
                registration,
                guard,
            }) => {
                drop(registration);
                end(guard).map(Some)
            }
            Err(hold) => hold.guard.check().map(|()| None),
        }
    }
}

impl ClosureGuard for ReentrantGuard {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.hold.guard.run(work)
    }

    fn finish(self) -> Result<(), Error> {
        self.end_with(MutexGuard::finish).map(drop)
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
    registration: Registration,
    guard: MutexGuard,
}

/// The identity of a lock within this process. Each client has a number of its own.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    client: u64,
    key: Key,
}

/// The holds of a thread, by name. The guards own the holds; this map only finds them.
#[derive(Default)]
struct Holds(RefCell<HashMap<Name, Weak<Hold>>>);

/// Removes a [`Hold`] from the map of its thread when it is dropped.
struct Registration(Name);

thread_local! {
    static HOLDS: Holds = Holds::default();
}

impl Hold {
    fn begin(name: Name, guard: MutexGuard) -> Rc<Self> {
        let hold = Rc::new(Self {
            registration: Registration(name.clone()),
            guard,
        });
        // Fails if the thread is ending and has dropped its map. A lock that is acquired so late cannot be locked
        // again, because nested calls do not find the hold.
        let _ = HOLDS.try_with(|holds| holds.0.borrow_mut().insert(name, Rc::downgrade(&hold)));
        hold
    }

    fn find_on_thread(name: &Name) -> Option<Rc<Self>> {
        let found = HOLDS.try_with(|holds| holds.0.borrow().get(name).and_then(Weak::upgrade));
        found.ok().flatten()
    }
}

impl Drop for Registration {
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
