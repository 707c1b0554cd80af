//! How a lease holds its key: alone, or as one of several shares.

use std::fmt;

use crate::util::id::{HolderId, LeaseId};

/// How a lease holds its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(dead_code, reason = "no public type has shares yet")]
pub enum Mode {
    /// No other lease holds the key.
    #[default]
    Exclusive,
    /// Other readers hold the key, too.
    Read,
    /// The lease has `weight` permits of a semaphore with `limit` permits.
    Permits { weight: u32, limit: u32 },
}

impl Mode {
    pub fn is_exclusive(self) -> bool {
        self == Self::Exclusive
    }

    /// The first member of the key's sorted set, by which a share of this mode is found; `None` for an exclusive lease.
    pub fn member(self, lease: LeaseId, holder: &HolderId) -> Option<String> {
        let kind = match self {
            Self::Exclusive => return None,
            Self::Read => "r 1 1 0".to_owned(),
            Self::Permits { weight, limit } => format!("p 1 {weight} {limit}"),
        };
        Some(format!("lh1 {lease} {kind} {holder}"))
    }
}

/// The mode in requests and in entries of queues; empty for an exclusive lease.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => Ok(()),
            Self::Read => f.write_str("r"),
            Self::Permits { weight, limit } => write!(f, "p{weight}/{limit}"),
        }
    }
}
