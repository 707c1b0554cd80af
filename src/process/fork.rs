//! Detects that this process is a fork: another process, its parent, made the client.
//!
//! A fork copies a client into the child process, but none of its threads, and the child shares its sockets. So the
//! child must neither use nor drop the client. Mutexes that were locked at the fork by threads that the child lacks
//! stay locked. The fork also copies parking_lot's table of sleeping threads. The entries of this table point
//! into memory that a drop of the client would free. The threads of a new client would follow these pointers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::report::error::{Error, ErrorKind};

/// The number of clients of a process: the process id is in the upper half, and the number in the lower half. (This is
/// the standard library's atomic, since models have no forks.)
static CLIENTS: AtomicU64 = AtomicU64::new(0);
const COUNT: u64 = u32::MAX as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    pub fn current() -> Self {
        Self(std::process::id())
    }

    /// Makes the id of another process.
    #[cfg(test)]
    pub fn another() -> Self {
        Self(0)
    }

    /// Whether this is the current process. Each call is a system call, so call it once per operation.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }

    /// Fails with `Forked` if this is not the current process.
    pub fn check(self) -> Result<(), Error> {
        let current = Self::current();
        if self == current {
            return Ok(());
        }
        let message = format!(
            "the client was made in process {}, and this is its fork {}: fork first, then make clients",
            self.0, current.0
        );
        Err(Error::new(ErrorKind::Forked, message))
    }
}

/// Counts one client of this process. The client and each of its threads share the guard. The last of them drops it,
/// which takes the client off the count.
pub struct ForkGuard(Process);

impl ForkGuard {
    /// Counts a new client. Fails with `Forked` if the parent process had clients when it forked this process.
    pub fn enter() -> Result<Arc<Self>, Error> {
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
                    "process {} had clients when it forked process {}: fork first, or drop the clients before",
                    clients >> 32,
                    current.0
                );
                Err(Error::new(ErrorKind::Forked, message))
            }
        }
    }

    /// The process that made the client.
    pub fn process(&self) -> Process {
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
