//! The store of one node of a quorum: a server, or a server in memory.

use crate::command::{Command, Outcome, Release};
use crate::memory::MemoryNode;
use crate::store::completion::Completion;
use crate::store::{Notifications, Store};
use crate::util::clock::MonotonicTime;
use crate::wire::Node;
use crate::wire::pipeline::SentRequest;

/// The store of one node. Adds functions for a quorum to those of [`Store`] and [`Notifications`].
pub trait QuorumNode: Store + Notifications {
    /// The earliest time that the node's clock may show at `now`, in µs. `None` if the client has not connected to the
    /// node yet. The arguments of type `MonotonicTime` are times of the client's clock.
    fn micros_at(&self, now: MonotonicTime) -> Option<u64>;

    /// The latest time that the node's clock may show at `now`: see [`micros_at`](Self::micros_at).
    fn latest_micros_at(&self, now: MonotonicTime) -> Option<u64>;

    /// Records that the node's clock showed `micros` at some time between `sent` and `seen`.
    fn record_micros(&self, micros: u64, sent: MonotonicTime, seen: MonotonicTime);

    /// Writes a request on this thread if the connection is free, and returns it: the caller then reads the reply, so a
    /// quick reply wakes no other thread. Otherwise submits the request, and returns `None`.
    fn send(&self, command: Command, completion: Completion) -> Option<SentRequest<'_>> {
        self.submit(vec![(command, completion)]);
        None
    }

    /// Queues an undo: the release of a lease whose key a late request may still set.
    fn queue_undo(&self, release: Release);

    /// The number of queued releases without a caller: not written yet, refused, or to be repeated. A shutdown takes a
    /// smaller number for progress, although the number also falls when ttls end.
    fn queued_releases(&self) -> usize;

    /// Closes the connections of requests for good when the client ends, since callers no longer wait. Keys that the
    /// node has not released expire with their ttl.
    fn disconnect(&self);

    /// Adds the server's address to the error of `outcome`, if the caller's deadline came before a reply.
    fn naming_the_server(&self, outcome: Outcome) -> Outcome;
}

impl QuorumNode for Node {
    fn micros_at(&self, now: MonotonicTime) -> Option<u64> {
        self.clock()?.at(now)
    }

    fn latest_micros_at(&self, now: MonotonicTime) -> Option<u64> {
        self.clock()?.latest_at(now)
    }

    fn record_micros(&self, micros: u64, sent: MonotonicTime, seen: MonotonicTime) {
        if let Some(clock) = self.clock() {
            clock.record(micros, sent, seen);
        }
    }

    fn send(&self, command: Command, completion: Completion) -> Option<SentRequest<'_>> {
        Self::send(self, command, completion)
    }

    fn queue_undo(&self, release: Release) {
        Self::queue_undo(self, release);
    }

    fn queued_releases(&self) -> usize {
        Self::queued_releases(self)
    }

    fn disconnect(&self) {
        Self::disconnect(self);
    }

    fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        Self::naming_the_server(self, outcome)
    }
}

impl QuorumNode for MemoryNode {
    fn micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Some(Self::micros_at(self, now))
    }

    fn latest_micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Some(Self::micros_at(self, now))
    }

    /// Does nothing: this store reads the node's clock directly.
    fn record_micros(&self, _: u64, _: MonotonicTime, _: MonotonicTime) {}

    fn queue_undo(&self, release: Release) {
        self.send_release(release);
    }

    fn queued_releases(&self) -> usize {
        self.failed_releases()
    }

    fn disconnect(&self) {
        self.drop_releases();
    }

    fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        outcome
    }
}
