//! Which process something was made by. A fork copies a client into a child, but none of its threads,
//! and its sockets are then shared: there it must not be used, nor even be taken apart. Mutexes may be
//! held for ever by threads that are not there; and for parking_lot's table of sleepers, which is copied
//! as well, those threads still sleep on what would be freed.

use crate::error::{Error, ErrorKind};

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
            "made in process {}, and this is its fork {}: make a new client after forking",
            self.0, current.0
        );
        Err(Error::new(ErrorKind::Forked, message))
    }
}
