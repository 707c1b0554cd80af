//! Which process something was made by. A fork copies a client into a child, but none of its threads,
//! and its sockets are then shared: there it must not be used, nor even be taken apart. Mutexes may be
//! held for ever by threads that are not there; and for parking_lot's table of sleepers, which is copied
//! as well, those threads still sleep on what would be freed. A new client's threads would trip over them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind};

/// In the upper half the process that counts, in the lower its clients. (By the standard library's atomics: a model
/// has no fork.)
static CLIENTS: AtomicU64 = AtomicU64::new(0);
const COUNT: u64 = u32::MAX as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// One that never runs.
    #[cfg(test)]
    pub(crate) fn another() -> Self {
        Self(0)
    }

    /// Whether it is still the one that runs. A system call, so once per operation.
    pub(crate) fn is_current(self) -> bool {
        self == Self::current()
    }

    /// The error of every operation in a forked child.
    pub(crate) fn check(self) -> Result<(), Error> {
        let current = Self::current();
        if self == current {
            return Ok(());
        }
        let message = format!(
            "made in process {}, and this is its fork {}: fork first, then make clients",
            self.0, current.0
        );
        Err(Error::new(ErrorKind::Forked, message))
    }
}

/// One of the clients of a process, for as long as it or one of its threads lives.
pub(crate) struct ForkGuard(Process);

impl ForkGuard {
    /// `Forked` in a process that was forked off while its parent had clients.
    pub(crate) fn enter() -> Result<Arc<Self>, Error> {
        let current = Process::current();
        let here = u64::from(current.0) << 32;
        let entered = CLIENTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |clients| {
            match (clients & !COUNT, clients & COUNT) {
                (_, 0) => Some(here + 1),
                (counted_by, _) => (counted_by == here).then(|| clients + 1),
            }
        });
        match entered {
            Ok(_) => Ok(Arc::new(Self(current))),
            Err(clients) => {
                let message = format!(
                    "there were clients of process {} when {} was forked: fork first, or drop them before",
                    clients >> 32,
                    current.0
                );
                Err(Error::new(ErrorKind::Forked, message))
            }
        }
    }

    /// The process that it is one of.
    pub(crate) fn process(&self) -> Process {
        self.0
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        if self.0.is_current() {
            CLIENTS.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
