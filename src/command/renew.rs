//! Sets the ttl of a lease's key back to its full length.

use std::time::Duration;

use crate::config::Replicas;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Sets the ttl back to its full length, if the lease still holds the key.
#[derive(Clone, Debug)]
pub struct Renew {
    pub key: Key,
    pub lease: LeaseId,
    /// The token of the grant, for a quorum.
    pub token: u64,
    pub ttl: Duration,
    /// The replicas that have to acknowledge the ttl. Otherwise the outcome is `Unavailable`.
    pub replicas: Option<Replicas>,
}
