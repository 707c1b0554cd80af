//! The public view of a quorum's nodes.

use std::time::Duration;

use crate::error::Error;

/// One node of a quorum, as the last request or probe of a client found it: see [`Client::nodes`](crate::Client::nodes).
///
/// ```
/// use leasehold::{MemoryQuorum, NodeHealth};
///
/// let client = MemoryQuorum::new(3).client()?;
/// client.with_lock("invoice:42", || ())?;
/// for node in client.nodes()?.iter().filter(|node| !node.is_up()) {
///     match node.health() {
///         NodeHealth::Failing { since, error, .. } => {
///             println!("{} fails since {since:?}: {error}", node.address());
///         }
///         NodeHealth::Quarantined { remaining, .. } => {
///             println!("{} votes again in {remaining:?}", node.address());
///         }
///         other => println!("{}: {other:?}", node.address()),
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NodeState {
    pub(crate) address: String,
    pub(crate) health: NodeHealth,
}

impl NodeState {
    /// The address of the node, without user and password.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether the node votes, and if not, why.
    pub fn health(&self) -> &NodeHealth {
        &self.health
    }

    /// Whether the node has voted on the client's last request or probe.
    pub fn is_up(&self) -> bool {
        matches!(self.health, NodeHealth::Up)
    }
}

/// Whether a node of a quorum votes.
///
/// ```
/// use leasehold::{MemoryQuorum, NodeHealth};
///
/// let client = MemoryQuorum::new(3).client()?;
/// let is_failing = |health: &NodeHealth| matches!(health, NodeHealth::Failing { .. });
/// assert!(!client.nodes()?.iter().any(|node| is_failing(node.health())));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum NodeHealth {
    /// The client has not asked the node yet.
    Unknown,
    /// The node has voted on the client's last request or probe.
    Up,
    /// The last probe failed, or got no reply within 500 ms. The client probes the node again, at least once a second.
    #[non_exhaustive]
    Failing {
        /// How long ago the first of these probes failed.
        since: Duration,
        /// The reason why the last probe failed.
        error: Error,
    },
    /// The node does not vote, because it has lost its data or may have lost them: it was restarted or flushed less than
    /// one [`max_ttl`](crate::Builder::max_ttl) ago.
    #[non_exhaustive]
    Quarantined {
        /// The time until the node votes again.
        remaining: Duration,
    },
}
