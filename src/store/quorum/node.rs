//! The store of one node of a quorum: a server, or a server in memory.

use crate::store::command::Command;
use crate::store::completion::Outcome;
use crate::store::{MemoryNode, Node, Notifications, Store};
use crate::util::clock::MonotonicTime;

/// The store of one node. These functions are for a quorum only; the supertraits have requests and notifications.
pub(super) trait QuorumNode: Store + Notifications {
    /// The node's time at `now`, in µs; `None` if no connection to the node was made yet. `now` is a time of the
    /// client's clock.
    fn micros_at(&self, now: MonotonicTime) -> Option<u64>;

    /// Notes that the node's time was `micros` shortly before `now`, a time of the client's clock.
    fn note_micros(&self, micros: u64, now: MonotonicTime);

    /// Queues the release of a lease whose proposal has no reply: the proposal may still arrive.
    fn queue_undo(&self, release: Command);

    /// Adds the server's address to the error of `outcome`, if the error came from the server or its connection.
    fn naming_the_server(&self, outcome: Outcome) -> Outcome;
}

impl QuorumNode for Node {
    fn micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Self::micros_at(self, now)
    }

    fn note_micros(&self, micros: u64, now: MonotonicTime) {
        Self::note_micros(self, micros, now);
    }

    fn queue_undo(&self, release: Command) {
        Self::queue_undo(self, release);
    }

    fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        Self::naming_the_server(self, outcome)
    }
}

impl QuorumNode for MemoryNode {
    fn micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Some(Self::micros_at(self, now))
    }

    /// Does nothing: the store reads the node's own clock.
    fn note_micros(&self, _: u64, _: MonotonicTime) {}

    fn queue_undo(&self, release: Command) {
        self.send_release(release);
    }

    fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        outcome
    }
}
