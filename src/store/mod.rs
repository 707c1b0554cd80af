//! The interface to the server that keeps the locks. All requests that read or change locks go through [`Store`].

pub(crate) mod command;
mod late_release;
mod memory;
#[cfg(test)]
#[cfg(shuttle)]
pub(crate) mod model;
pub(crate) mod redis;
#[cfg(all(test, not(shuttle)))]
mod scripted;
mod value;

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::threads::ThreadGroup;

pub(crate) use command::{
    Adoption, Command, FIRST_USUAL_PLACE, GrantMessage, Held, QueueMode, Queued, Reply, Request,
    front_place,
};
pub(crate) use late_release::{LateRelease, LateReleaseHook};
pub(crate) use memory::{MemoryNode, MemoryServer};
pub(crate) use redis::connection::Endpoint;
pub(crate) use redis::notifications::{Listener, TrackedKey};
pub(crate) use redis::pipeline::MAX_RENEWALS;
#[cfg(leasehold_internals)]
pub(crate) use redis::replies::{Limit, Replies};
#[cfg(leasehold_internals)]
pub(crate) use redis::scripts::{ScriptContext, ScriptKind, ScriptRef, encode};
pub use redis::session::TransactionConnection;
pub(crate) use redis::session::{TransactionOutcome, read_failed, reply_unread};
pub(crate) use redis::url::{redacted, redacted_info};
pub(crate) use redis::{Node, RENEWAL_PIPELINES};
#[cfg(all(test, not(shuttle)))]
pub(crate) use scripted::Scripted;
pub(crate) use value::{
    LockValue, MAX_TOKEN, hand_offs_of, has_queue, is_held_by, loss_reason, micros_of,
};

/// Carries out commands on the server, or servers, that keep the locks. Every request gets an outcome of its own, at
/// the latest one command time-out after its deadline.
///
/// The default methods do nothing, so a store without background work, notifications or transactions implements only
/// the others.
pub(crate) trait Store: Send + Sync {
    /// Sends all of `requests` and waits for their replies.
    fn execute(&self, requests: &mut [Request]);

    /// Sends one command and waits for its reply.
    fn execute_one(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        let mut request = [Request::new(command, deadline)];
        self.execute(&mut request);
        let [request] = request;
        request.into_outcome()
    }

    /// Asks the server for a sign of life. Returns how long the reply took.
    fn ping(&self) -> Result<Duration, Error> {
        Ok(Duration::ZERO)
    }

    /// Writes a release to the socket, or queues it for the background, and returns without waiting for the reply.
    /// The background retries it. Never connects, and blocks for one write at most.
    fn send_release(&self, release: Command);

    /// Reads replies that no caller waits for, and writes queued releases. Returns true if work is left for later.
    fn run_maintenance(&self) -> bool {
        false
    }

    /// How many releases failed and wait to be retried, by pipeline.
    fn failed_releases(&self) -> Vec<usize> {
        Vec::new()
    }

    /// A number that changes when notifications may have been missed: with each new notification connection, and with
    /// each flush of the server.
    fn notification_epoch(&self) -> u64 {
        0
    }

    /// Marks all connections as suspect, since they may lead to a server that is no longer the primary. Each is
    /// replaced before its next use, but not within the first second of its life.
    fn suspect_connections(&self) {}

    /// Whether a request has to confirm what a notification says about a held lease. It may come from another server
    /// than the replies, or from another user.
    fn must_confirm_losses(&self) -> bool {
        false
    }

    /// Reports each late release that is still queued as given up. Called when the client ends.
    fn report_given_up_releases(&self) {}

    /// Waits until all releases that were sent are done, until `deadline` at the latest.
    fn flush(&self, _deadline: MonotonicTime) -> Result<(), Error> {
        Ok(())
    }

    /// Calls `listener` for each notification from now on. Connects only after
    /// [`request_notifications`](Self::request_notifications) or [`track`](Self::track).
    fn start_notifications(
        &self,
        threads: &ThreadGroup,
        listener: Arc<dyn Listener>,
    ) -> Result<(), Error>;

    /// How a waiter should join the queue of its key.
    fn queue_mode(&self) -> QueueMode;

    /// Has the background connect for notifications, unless it has done so already.
    fn request_notifications(&self);

    /// Reads keys, and from then on reports each change of them to the listener. Returns false if notifications are
    /// not connected: the listener is called once they are (`all_changed`).
    fn track(&self, keys: Vec<TrackedKey>) -> bool;

    /// Ends the calls to the listener, and closes the notification connection.
    fn stop_notifications(&self);

    /// The client has ended: makes no connection from now on.
    fn close(&self) {}

    /// Takes a connection for one transaction out of the pool, or connects.
    fn transaction_connection(&self) -> Result<TransactionConnection, Error> {
        let message = "a transaction needs a Redis";
        Err(Error::new(ErrorKind::Unsupported, message))
    }
}

/// How soon a store needs [`Store::run_maintenance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Within a tenth of a second: a reply has to be read, or a release retried.
    Soon,
    /// At once: a queued release can be written now.
    Now,
}

/// Called by a store that needs [`Store::run_maintenance`]. Quick; never blocks.
pub(crate) type MaintenanceHook = Box<dyn Fn(Urgency) + Send + Sync>;
