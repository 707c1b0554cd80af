//! Where grants are kept. The only way to Redis for the state of locks.

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

use crate::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::threads::ThreadGroup;

pub(crate) use command::{
    Adoption, Command, FIRST_USUAL_PLACE, GrantMessage, Held, QueueMode, Queued, Reply, Request,
    in_front,
};
pub(crate) use late_release::{Delay, DelayHook};
pub(crate) use memory::{MemoryNode, MemoryServer};
pub(crate) use redis::connection::{Endpoint, redacted, redacted_info};
pub(crate) use redis::notifications::{Listener, TrackedKey};
pub(crate) use redis::pipeline::MAX_RENEWALS;
#[cfg(leasehold_internals)]
pub(crate) use redis::replies::{Limit, Replies};
#[cfg(leasehold_internals)]
pub(crate) use redis::scripts::{Kind, ScriptContext, ScriptRef, encode};
pub use redis::session::TransactionConnection;
pub(crate) use redis::session::{Written, read_failed, reply_unread};
pub(crate) use redis::{Node, RENEWAL_PIPELINES};
#[cfg(all(test, not(shuttle)))]
pub(crate) use scripted::Scripted;
pub(crate) use value::{LockValue, MAX_TOKEN, hand_offs_of, has_queue, holds, loss_of, micros_of};

/// Carries out commands. Every request gets an outcome of its own; none waits past its deadline for
/// longer than one command time-out.
///
/// By itself it owes nothing to anybody, and lends no connection.
pub(crate) trait Store: Send + Sync {
    /// Carries out all of `requests` and waits for the answers.
    fn execute(&self, requests: &mut [Request]);

    /// Carries out one command and waits for its answer.
    fn ask(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        let mut request = [Request::new(command, deadline)];
        self.execute(&mut request);
        let [request] = request;
        request.into_outcome()
    }

    /// Writes a release, or keeps it to be written soon, and returns without waiting for an answer.
    /// It is seen through in the background. Never connects, never blocks longer than one write.
    fn post(&self, release: Command);

    /// Sees to what is owed: answers nobody waits for, releases that could not be written. True if
    /// something is left for later.
    fn run_maintenance(&self) -> bool {
        false
    }

    /// How many releases are owed that could not be done yet, pipeline by pipeline.
    fn retries(&self) -> Vec<usize> {
        Vec::new()
    }

    /// A number that changes when notifications may have been missed: with each new connection for them, and
    /// with each flush.
    fn notification_epoch(&self) -> u64 {
        0
    }

    /// Makes all connections suspect, since they may lead to a server that is no longer the primary: each is
    /// replaced before it is used again, once it is a second old.
    fn suspect_connections(&self) {}

    /// Whether notifications may come from another server than the answers to requests, or from other users: then
    /// what they say of held leases has to be confirmed.
    fn may_hear_others(&self) -> bool {
        false
    }

    /// At the end of the client: reports late releases that still wait to be written as given up.
    fn end_delays(&self) {}

    /// Waits until all posted releases are done, until `deadline` at the latest.
    fn flush(&self, _deadline: MonotonicTime) -> Result<(), Error> {
        Ok(())
    }

    /// Has `listener` told what happens to keys, once somebody wants to know.
    fn listen(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error>;

    /// How a waiter should join the queue of its key.
    fn queue_mode(&self) -> QueueMode;

    /// Somebody has to wait and wants to be told.
    fn want_notifications(&self);

    /// Looks at keys, and from then on at every change of them, for the listener. False if that
    /// cannot be now: then the listener is told once it can.
    fn track(&self, keys: Vec<TrackedKey>) -> bool;

    /// Ends what [`listen`](Self::listen) began.
    fn stop_listening(&self);

    /// The client has ended: makes no connection from now on.
    fn close(&self) {}

    /// A connection for one transaction.
    fn transaction_connection(&self) -> Result<TransactionConnection, Error> {
        let message = "a transaction needs a Redis";
        Err(Error::new(ErrorKind::Unsupported, message))
    }
}

/// When the background work of a store is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Within a tenth of a second: an answer is owed.
    Soon,
    /// At once: so much is owed that those who release no longer write themselves.
    Now,
}

/// Called by a store when [`Store::run_maintenance`] is wanted. Quick; never blocks.
pub(crate) type MaintenanceHook = Box<dyn Fn(Urgency) + Send + Sync>;
