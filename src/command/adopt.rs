//! Moves a grant from the lease of a ticket to a new lease.

use std::time::Duration;

use crate::command::Release;
use crate::config::Replicas;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Moves the grant of another lease to `lease`.
#[derive(Clone, Debug)]
pub struct Adopt {
    pub key: Key,
    pub lease: LeaseId,
    pub grant: Box<Adoption>,
}

impl Adopt {
    /// The release that undoes this adoption. Redis may have carried the adoption out, or may do so later.
    pub fn undo(&self, now: MonotonicTime) -> Release {
        Release::undo(&self.key, self.lease, now.after(self.grant.longest))
    }
}

/// The grant that a ticket stands for, and its ttl after the adoption.
#[derive(Clone, Debug)]
pub struct Adoption {
    pub from: LeaseId,
    pub token: u64,
    /// The key's new ttl with `renew`. Without `renew`, the key keeps the rest of its ttl.
    pub ttl: Duration,
    /// An upper bound for the key's ttl after the adoption.
    pub longest: Duration,
    pub renew: bool,
    /// As for [`Acquire`](crate::command::Acquire).
    pub replicas: Option<Replicas>,
}
