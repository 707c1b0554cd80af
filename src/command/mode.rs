//! How a lease holds its key: alone, or as one of several shares.

use std::fmt;

use crate::util::id::{HolderId, LeaseId};

/// The greatest number of readers or permits of a key.
const MOST: u32 = 10_000;

/// How a lease holds its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

    pub fn is_read(self) -> bool {
        self == Self::Read
    }

    /// How many readers or permits the lease counts as.
    pub fn weight(self) -> u32 {
        match self {
            Self::Permits { weight, .. } => weight,
            Self::Exclusive | Self::Read => 1,
        }
    }

    /// How many readers or permits may have the key at the same time.
    pub fn limit(self) -> u32 {
        match self {
            Self::Exclusive => 1,
            Self::Read => MOST,
            Self::Permits { limit, .. } => limit,
        }
    }

    /// The first member of a share in the key's sorted set (lua/shares.lua). Scripts find the share by this member.
    /// `None` for an exclusive lease.
    pub fn member(self, lease: LeaseId, holder: &HolderId) -> Option<String> {
        let kind = match self {
            Self::Exclusive => return None,
            Self::Read => "r 1 1 0".to_owned(),
            Self::Permits { weight, limit } => format!("p 1 {weight} {limit}"),
        };
        Some(format!("lh1 {lease} {kind} {holder}"))
    }

    /// Reads the first member of a share: its lease, its mode and its holder.
    pub fn from_member(member: &str) -> Option<(LeaseId, Self, HolderId)> {
        let words: Vec<&str> = member.split(' ').collect();
        let ["lh1", lease, kind, "1", weight, limit, holder] = words[..] else {
            return None;
        };
        let mode = match kind {
            "r" => Self::Read,
            "p" => Self::Permits {
                weight: weight.parse().ok()?,
                limit: limit.parse().ok()?,
            },
            _ => return None,
        };
        Some((LeaseId::decode(lease)?, mode, HolderId::decode(holder)?))
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
