//! The public view of a quorum's nodes.

use std::fmt;
use std::time::Duration;

use crate::report::error::Error;
use crate::util::text::Shown;

/// One node of a quorum, as the requests and probes of a client found it: see
/// [`Client::nodes`](crate::Client::nodes).
///
/// ```
/// use leasehold::{MemoryQuorum, NodeHealth};
///
/// let client = MemoryQuorum::new(3).client()?;
/// client.with_lock("invoice:42", || ())?;
/// for node in client.nodes()?.iter().filter(|node| !node.is_up()) {
///     // For example: "10.0.0.7:6379: failing for 3.2s: Redis is unavailable: 10.0.0.7:6379 refuses connections; .."
///     println!("{}: {}", node.address(), node.health());
///     if let NodeHealth::Quarantined { remaining, .. } = node.health() {
///         println!("no vote for {} s", remaining.as_secs());
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NodeState {
    pub(crate) address: String,
    pub(crate) health: NodeHealth,
    pub(crate) clock: Option<NodeClock>,
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

    /// The node's clock beside those of the other nodes, as the last probes have read them. `None` until the clocks of
    /// a majority were read, and while the node does not vote. The clocks are read after the client's first request,
    /// and every 10 s while it sends requests.
    ///
    /// ```
    /// let client = leasehold::MemoryQuorum::new(3).client()?; // The clocks were not read yet.
    /// assert!(client.nodes()?[0].clock().is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn clock(&self) -> Option<&NodeClock> {
        self.clock.as_ref()
    }

    /// Whether the node has voted, and all later probes succeeded.
    pub fn is_up(&self) -> bool {
        matches!(self.health, NodeHealth::Up)
    }
}

/// How far the clock of a quorum's node differs from the median of the nodes' clocks.
///
/// Fencing tokens rise while the clocks of any two nodes differ by less than a bound:
/// [`max_ttl`](crate::Builder::max_ttl) minus a tenth of it, or minus 1 s if a tenth is longer. Two clocks keep this
/// bound if each is within half of it from the median.
///
/// ```
/// use leasehold::MemoryQuorum;
///
/// let client = MemoryQuorum::new(3).client()?;
/// client.with_lock("invoice:42", || ())?;
/// for node in client.nodes()? {
///     if let Some(clock) = node.clock().filter(|clock| !clock.is_within_bound()) {
///         println!("{}: {} µs ahead, ± {:?}", node.address(), clock.offset_micros(), clock.error());
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeClock {
    /// In µs.
    pub(crate) offset: i64,
    pub(crate) error: Duration,
    pub(crate) is_within_bound: bool,
}

impl NodeClock {
    /// How far the clock is ahead of the median, in µs; negative if it is behind.
    pub fn offset_micros(&self) -> i64 {
        self.offset
    }

    /// The greatest error of the offset: half the round trip of the probe that read this clock, plus half the longest
    /// round trip of the probes that read the other clocks. The reading may be 10 s old or older; the drift of the
    /// clocks since then is not included.
    pub fn error(&self) -> Duration {
        self.error
    }

    /// False if the offset exceeds half of the bound by more than the error.
    pub fn is_within_bound(&self) -> bool {
        self.is_within_bound
    }
}

/// Whether a node of a quorum votes. `Display` is one line for a log: `up`, `not asked yet`, `failing for 3.2s: ` and
/// the error, or `in quarantine for another 12.5s`.
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
    /// The node has not voted or abstained yet, and its probes have not failed.
    Unknown,
    /// The node has voted, and all later probes succeeded.
    Up,
    /// The last probe failed, or had no reply within 500 ms, or within four round trips if that is longer (2 s at
    /// most). A node that the client has never reached is failing only after four such probes. The client probes the
    /// node again within a second (2.4 s if a node is distant). Only a successful probe ends this state, since a probe
    /// also writes; a vote does not end it.
    #[non_exhaustive]
    Failing {
        /// The time since the client found the node failing.
        since: Duration,
        /// The reason why the last probe failed.
        error: Error,
    },
    /// The node does not vote, because it has lost its data or may have lost it: it was restarted or flushed less
    /// than one [`max_ttl`](crate::Builder::max_ttl) ago.
    #[non_exhaustive]
    Quarantined {
        /// The time until the node votes again.
        remaining: Duration,
    },
}

impl fmt::Display for NodeHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("not asked yet"),
            Self::Up => f.write_str("up"),
            Self::Failing { since, error } => write!(f, "failing for {}: {error}", Shown(*since)),
            Self::Quarantined { remaining } => {
                write!(f, "in quarantine for another {}", Shown(*remaining))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::error::ErrorKind;

    #[test]
    fn health_is_shown_as_text() {
        let error = Error::new(ErrorKind::Unavailable, "h:1 refuses connections");
        let since = Duration::from_micros(3_200_499);
        let remaining = Duration::from_millis(12_500);
        for (health, shown) in [
            (NodeHealth::Unknown, "not asked yet"),
            (NodeHealth::Up, "up"),
            (
                NodeHealth::Failing { since, error },
                "failing for 3.2s: Redis is unavailable: h:1 refuses connections",
            ),
            (
                NodeHealth::Quarantined { remaining },
                "in quarantine for another 12.5s",
            ),
        ] {
            assert_eq!(health.to_string(), shown);
        }
    }
}
