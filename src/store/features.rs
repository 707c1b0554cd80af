//! The features that not every client has. A store refuses some of them.

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
