//! A lock that a thread may take again while it has it. Counts, per thread; all else is left to the
//! plain [`Mutex`]. Never asks Redis about a lock that its thread has already.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::guard::MutexGuard;
use crate::loss::LossReason;
use crate::mutex::Mutex;
use crate::released::Released;
use crate::util::key::Key;

/// A lock that the thread that has it can take again, from [`Client::reentrant_mutex`] or
/// [`Mutex::reentrant`].
///
/// To take it again costs no round trip: the thread counts for itself, and lets go when the last of
/// its guards has gone, in whatever order. Others are kept out as by a [`Mutex`]: other threads of
/// this client too, and this thread if it asks with another client, or with a plain [`Mutex`].
/// Whichever value of one client and key it is taken with, the count is the same; the settings are
/// those it was taken with first.
///
/// A thread that ends without letting go (a guard that was forgotten or leaked) leaves work in a
/// state that nobody knows. The lock is then not let go, only renewed no more: it is lost with
/// [`ThreadEnded`](crate::LossReason::ThreadEnded) when its validity ends. As a leaked
/// [`MutexGuard`] does, such a guard keeps its client from ending by itself.
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
/// assert_eq!(deposit()?, 2, "taken again by a function that takes care of itself");
/// assert_eq!(outer.depth(), 1);
/// outer.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a mutex does nothing until it is locked"]
pub struct ReentrantMutex {
    mutex: Mutex,
}

/// Every method does what that of [`Mutex`] does, unless this thread has the lock: then it takes it
/// again at once, or fails with `LeaseLost` if it was lost meanwhile.
impl ReentrantMutex {
    pub(crate) fn new(mutex: Mutex) -> Self {
        Self { mutex }
    }

    /// The name of the lock, as it was given; empty if it was not a valid one.
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

    /// Waits for the lock, for as long as others hold it.
    ///
    /// # Errors
    /// Those of [`Mutex::lock`]; `LeaseLost` if this thread has the lock and lost it.
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
        Ok(guard.expect("to wait without end ends with the lock or an error"))
    }

    /// Takes the lock if it is free and no other thread of this client waits for it.
    ///
    /// # Errors
    /// Those of [`Mutex::try_lock`]; `LeaseLost` if this thread has the lock and lost it. Contention is
    /// `Ok(None)`.
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

    /// Waits for the lock for at most `timeout`.
    ///
    /// # Errors
    /// Those of [`Mutex::try_lock_for`]; `LeaseLost` if this thread has the lock and lost it.
    /// Contention is `Ok(None)`.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let held = client.mutex("k").lock()?;
    /// let guard = client.reentrant_mutex("k").try_lock_for(Duration::from_millis(10))?;
    /// assert!(guard.is_none(), "a plain lock is held by nobody in particular");
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

    /// Runs `work` while holding the lock.
    ///
    /// # Errors
    /// Those of [`lock`](Self::lock), and `LeaseLost` if the lock was lost before `work` returned.
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

    /// Runs `work` if the lock is free now, or this thread has it. `Ok(None)` if not; `work` is dropped then.
    ///
    /// # Errors
    /// Those of [`try_lock`](Self::try_lock) and of [`with`](Self::with).
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

    /// Waits for the lock for at most `timeout` and runs `work` under it. `Ok(None)` if others held the lock for all
    /// that time; `work` is dropped then.
    ///
    /// # Errors
    /// Those of [`try_lock_for`](Self::try_lock_for) and of [`with`](Self::with).
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

    /// As [`try_with_for`](Self::try_with_for), until `deadline`.
    ///
    /// # Errors
    /// Those of [`try_with_for`](Self::try_with_for).
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

/// Runs `work` under the lock, and gives `guard` up.
fn run_under<T>(
    guard: ReentrantGuard,
    work: impl FnOnce(&ReentrantGuard) -> T,
) -> Result<T, Error> {
    let value = guard.run(|| work(&guard));
    guard.unlock().map(|_| value)
}

/// A lock in hand, once more or for the first time; it is let go when the last guard of its thread
/// has gone.
///
/// All that a [`MutexGuard`] can be asked can be asked of it:
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
/// It stays on its thread, whose lock it is:
///
/// ```compile_fail,E0277
/// fn elsewhere(guard: leasehold::ReentrantGuard) {
///     std::thread::spawn(move || drop(guard));
/// }
/// ```
///
/// A release too many cannot be written: to let go takes a guard, and uses it up.
///
/// ```compile_fail,E0382
/// fn twice(guard: leasehold::ReentrantGuard) {
///     guard.unlock().unwrap();
///     guard.unlock().unwrap();
/// }
/// ```
#[must_use = "the lock is let go as soon as its last guard is dropped"]
pub struct ReentrantGuard {
    /// As many of them as guards.
    hold: Rc<Hold>,
}

impl ReentrantGuard {
    /// How many guards of this lock its thread has.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let mutex = client.reentrant_mutex("k");
    /// let outer = mutex.lock()?;
    /// let inner = mutex.lock()?;
    /// drop(outer);
    /// assert_eq!(inner.depth(), 1, "held still");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn depth(&self) -> usize {
        Rc::strong_count(&self.hold)
    }

    /// Gives this guard up. The last one releases the lock and waits for Redis to confirm it, as
    /// [`MutexGuard::unlock`] does; before that, this returns `None` and sends nothing.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost: another holder may have run at the same time. `Forked` in a child of the
    /// process that holds it.
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
        match Rc::try_unwrap(self.hold) {
            Ok(Hold { entry, guard }) => {
                drop(entry);
                guard.unlock().map(Some)
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

/// The guarded key, as that of a [`MutexGuard`].
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

/// A lock that a thread has, for as long as one of its guards is there.
struct Hold {
    // Goes first: to let go of a guard runs user code (events), which may take the lock anew.
    entry: Entry,
    guard: MutexGuard,
}

/// Which lock it is, in this process: clients have numbers that are not used twice.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Name {
    client: u64,
    key: Key,
}

/// What a thread has. A hold is its guards': here it is only found.
#[derive(Default)]
struct Holds(RefCell<HashMap<Name, Weak<Hold>>>);

/// A hold's place among those of its thread; dropped, it is not found there any more.
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
        // Fails while the thread ends: what is taken then is not taken twice.
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
        // Fails once the thread's list has gone, and this with it.
        let _ = HOLDS.try_with(|holds| holds.0.borrow_mut().remove(&self.0));
    }
}

impl Drop for Holds {
    /// At the end of the thread. No I/O, and nothing that may be gone already.
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
    fn nothing_is_remembered_of_what_was_let_go() {
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
