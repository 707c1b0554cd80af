//! Where grants are kept. The only way to Redis for the state of locks.

mod call;
pub(crate) mod command;
mod connect;
mod delay;
mod epoch;
mod lane;
#[cfg_attr(all(test, shuttle), path = "link/model.rs")]
mod link;
mod memory;
#[cfg(test)]
#[cfg(shuttle)]
pub(crate) mod model;
mod node;
mod pending;
mod replies;
mod script;
#[cfg(all(test, not(shuttle)))]
mod scripted;
mod session;
mod stream;
mod value;
mod wakeups;

use std::sync::Arc;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::thread::Crew;

pub(crate) use command::{
    Adoption, Command, FIRST_USUAL_PLACE, Grant, Held, Queued, Reply, Request, Standing, in_front,
};
pub(crate) use connect::{Endpoint, redacted};
pub(crate) use delay::{Delay, DelayHook};
pub(crate) use lane::MAX_RENEWALS;
pub(crate) use memory::{Memory, MemoryServer};
pub(crate) use node::{Node, RENEWAL_LANES};
#[cfg(feature = "__internals")]
pub(crate) use replies::{Limit, Replies};
#[cfg(feature = "__internals")]
pub(crate) use script::{Call, Kind, Names, encode};
#[cfg(all(test, not(shuttle)))]
pub(crate) use scripted::Scripted;
pub use session::TransactionConnection;
pub(crate) use session::{Written, read_failed};
pub(crate) use value::{LockValue, hand_offs_of, has_queue, holds, loss_of, micros_of};
pub(crate) use wakeups::{Listener, Watched};

/// Carries out commands. Every request gets an outcome of its own; none waits past its deadline for
/// longer than one command time-out.
///
/// By itself it owes nothing to anybody, and lends no connection.
pub(crate) trait Store: Send + Sync {
    /// Carries out all of `requests` and waits for the answers.
    fn execute(&self, requests: &mut [Request]);

    /// Carries out one command and waits for its answer.
    fn ask(&self, command: Command, deadline: Moment) -> Result<Reply, Error> {
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
    fn settle(&self) -> bool {
        false
    }

    /// How many releases are owed that could not be done yet, lane by lane.
    fn debts(&self) -> Vec<usize> {
        Vec::new()
    }

    /// A number that changes when notifications may have been missed: with each new connection for them, and
    /// with each flush.
    fn hearing(&self) -> u64 {
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
    fn flush(&self, _deadline: Moment) -> Result<(), Error> {
        Ok(())
    }

    /// Has `listener` told what happens to keys, once somebody wants to know.
    fn listen(&self, crew: &Crew, listener: Arc<dyn Listener>) -> Result<(), Error>;

    /// How a waiter should join the queue of its key.
    fn standing(&self) -> Standing;

    /// Somebody has to wait and wants to be told.
    fn want_wakeups(&self);

    /// Looks at keys, and from then on at every change of them, for the listener. False if that
    /// cannot be now: then the listener is told once it can.
    fn watch(&self, keys: Vec<Watched>) -> bool;

    /// Ends what [`listen`](Self::listen) began.
    fn stop_listening(&self);

    /// A connection for one transaction.
    fn lend(&self) -> Result<TransactionConnection, Error> {
        let message = "a transaction needs a Redis";
        Err(Error::new(ErrorKind::Unsupported, message))
    }
}

/// When the background work of a store is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chore {
    /// Within a tenth of a second: an answer is owed.
    Soon,
    /// At once: so much is owed that those who release no longer write themselves.
    Now,
}

/// Called by a store when [`Store::settle`] is wanted. Quick; never blocks.
pub(crate) type Bell = Box<dyn Fn(Chore) + Send + Sync>;
