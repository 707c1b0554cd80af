//! A held lock of any kind, as the supervisor of a command sees it.

use std::time::Duration;

use leasehold::{
    Error, Leader, MutexGuard, MutexesGuard, Released, RwLockReadGuard, SemaphorePermit,
};

/// A held lock, or several that were acquired together.
pub trait Hold {
    /// The keys, each with its fencing token. A permit has no token, since the holders of permits overlap.
    fn tokens(&self) -> Vec<(&str, Option<u64>)>;

    /// The rest of the validity.
    fn remaining(&self) -> Duration;

    fn check(&self) -> Result<(), Error>;

    /// Asks Redis whether the lock is still held, and sets its full ttl.
    fn extend(&self, ttl: Duration) -> Result<(), Error>;

    /// Calls `report` when the lock is lost.
    fn report_loss(&self, report: Box<dyn FnOnce() + Send>);

    fn unlock(self: Box<Self>) -> Result<Released, Error>;
}

/// Several keys that were acquired together.
pub struct Set {
    pub guard: MutexesGuard,
    /// In the order of the arguments.
    pub keys: Vec<String>,
}

/// The term of a leader.
pub struct Term {
    pub leader: Leader,
}

macro_rules! hold {
    ($Hold:ty $(, by $guard:ident)?; $tokens:expr, $unlock:expr) => {
        impl Hold for $Hold {
            fn tokens(&self) -> Vec<(&str, Option<u64>)> {
                let tokens: fn(&$Hold) -> Vec<(&str, Option<u64>)> = $tokens;
                tokens(self)
            }

            fn remaining(&self) -> Duration {
                self$(.$guard)?.remaining()
            }

            fn check(&self) -> Result<(), Error> {
                self$(.$guard)?.check()
            }

            fn extend(&self, ttl: Duration) -> Result<(), Error> {
                self$(.$guard)?.extend(ttl)
            }

            fn report_loss(&self, report: Box<dyn FnOnce() + Send>) {
                self$(.$guard)?.on_lost(|_| report());
            }

            fn unlock(self: Box<Self>) -> Result<Released, Error> {
                let unlock: fn($Hold) -> Result<Released, Error> = $unlock;
                unlock(*self)
            }
        }
    };
}

hold!(
    MutexGuard;
    |guard| vec![(guard.key(), Some(guard.fencing_token()))],
    MutexGuard::unlock
);
hold!(
    RwLockReadGuard;
    |guard| vec![(guard.key(), Some(guard.fencing_token()))],
    RwLockReadGuard::unlock
);
hold!(
    SemaphorePermit;
    |guard| vec![(guard.key(), None)],
    SemaphorePermit::unlock
);
hold!(
    Set, by guard;
    |set| set.keys.iter().map(|key| (key.as_str(), set.guard.token(key))).collect(),
    |set| set.guard.unlock()
);

hold!(
    Term, by leader;
    |term| vec![(term.leader.key(), Some(term.leader.fencing_token()))],
    |term| term.leader.resign()
);

/// Names locks in a message.
pub fn names<'a>(keys: impl IntoIterator<Item = &'a str>) -> String {
    let keys: Vec<&str> = keys.into_iter().collect();
    match keys[..] {
        [key] => format!("the lock {key}"),
        _ => format!("the locks {}", keys.join(", ")),
    }
}
