//! The commands of a quorum to one of its nodes: a node grants a key, holds it for a lease, or tells its clock.

use std::time::Duration;

use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Grants a key to the lease on one node of a quorum: a free key, or with `from` a key of that lease. The token is the
/// proposal if the node has granted no greater one.
#[derive(Clone, Debug)]
pub struct Propose {
    pub key: Key,
    pub lease: LeaseId,
    /// With `from`, a ttl is never shortened.
    pub ttl: Duration,
    /// The µs part of the proposed token.
    pub micros: u64,
    /// After this time of its clock, in µs, the node replies `TooLate`: the client has given the proposal up.
    pub until: u64,
    pub from: Option<TicketLease>,
}

/// The lease whose key an adoption takes over on a node of a quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketLease {
    pub lease: LeaseId,
    /// The µs part of the ticket's token. A node refuses a time that neither its clock nor its fence counter has
    /// reached, since it has granted no such token.
    pub micros: u64,
}

/// Makes one node of a quorum hold the key for the lease, with the full ttl and at least this token, unless another lease
/// holds the key.
#[derive(Clone, Debug)]
pub struct Hold {
    pub key: Key,
    pub lease: LeaseId,
    pub ttl: Duration,
    /// The µs part of the token.
    pub micros: u64,
    /// The node sets a missing key until its clock shows these µs, and then replies
    /// [`TooLate`](crate::command::Reply::TooLate). After this time, the reply is `TooLate`.
    /// `None`: a missing key is not set, and the reply is `Missing`.
    pub sets_missing: Option<u64>,
}

/// Reads the clock of one node of a quorum.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The key of the node's mark.
    pub mark: Key,
}
