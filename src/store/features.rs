//! The features that not every client has. A store may lack some of them, and so may a client beside another library.

use crate::config::other_library::OtherLibrary;
use crate::report::error::{Error, ErrorKind};

/// A feature that a client may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Read-write locks.
    Readers,
    /// Semaphores.
    Permits,
    MinHold,
    /// `Once` and elections.
    Claims,
    Tickets,
}

/// Returns an error if a client beside the locks of `other` does not have `feature`.
pub fn check_beside(other: Option<OtherLibrary>, feature: Feature) -> Result<(), Error> {
    let Some(other) = other else {
        return Ok(());
    };
    let message = match feature {
        Feature::Readers => {
            "a client with compatible_with has no read-write locks; use a client without it, and other keys"
        }
        Feature::Permits => {
            "a client with compatible_with has no semaphores; use a client without it, and other keys"
        }
        Feature::Claims => {
            "a client with compatible_with has no `Once` and no elections; use a client without it, and other keys"
        }
        Feature::MinHold if other != OtherLibrary::PlainKeys => {
            "a client with compatible_with has no `min_hold` beside python-redis-lock and Redisson, since a key that \
             expires wakes none of their waiters: keep the guard for that time"
        }
        Feature::Tickets if other.is_redisson() => {
            "a lock of Redisson has no tickets; release the lock, and acquire it in the other process"
        }
        Feature::MinHold | Feature::Tickets => return Ok(()),
    };
    Err(Error::new(ErrorKind::Unsupported, message))
}
