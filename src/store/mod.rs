//! The interface to the server, or servers, that keep the locks. Code above this interface knows neither connections
//! nor the number of servers.
//!
//! - [`Store`] carries out requests. [`Store::server_of`] names the server of a key, so an outage of one server ends
//!   only the waits for its own keys.
//! - [`Notifications`] reports what servers observe, and decides whether waiters queue in Redis. A report names its
//!   server.
//! - [`Backend`] is the pair of them.
//! - [`Reports`] receives the reports that a store sends by itself. A store gets its `Reports` when it is made.
//!
//! A caller submits a request to several servers ([`Store::submit`]) with a completion for each server. It leaves as
//! soon as it has enough outcomes, and takes those that have come. It releases the grants among them that it does not
//! use. The store undoes a grant that comes later.

pub mod completion;
pub mod features;
pub mod late_release;
pub mod maintenance;
#[cfg(test)]
#[cfg(shuttle)]
pub mod model;
pub mod observation;
pub mod reports;
pub mod scan;
#[cfg(all(test, not(shuttle)))]
pub mod scripted;

use std::sync::Arc;
use std::time::Duration;

use crate::command::{Command, QueueMode, Release, Reply, Request};
use crate::config::key::Key;
use crate::process::threads::ThreadGroup;
use crate::report::environment::EnvironmentFinding;
use crate::report::error::{Error, ErrorKind};
use crate::report::node_state::NodeState;
use crate::util::clock::MonotonicTime;

pub use completion::Completion;
pub use features::Feature;
pub use observation::{KeyState, Listener, ServerId, TrackedKey, Turn};
pub use reports::{LateRelease, Report, ReportedReleases, Reports};
pub use scan::{Scan, ScannedKeys};
#[cfg(all(test, not(shuttle)))]
pub use scripted::Scripted;

/// Carries out commands on the server, or servers, that keep the locks. Every request gets an outcome of its own, at
/// its deadline at the latest. (In a process that cannot start threads, a caller may connect for longer.)
///
/// The defaults of the methods suit a store of one server without background work.
pub trait Store: Send + Sync {
    /// Sends all of `requests` and waits for their replies.
    fn execute(&self, requests: &mut [Request]);

    /// Sends one command and waits for its reply.
    fn execute_one(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        let mut request = [Request::new(command, deadline)];
        self.execute(&mut request);
        let [request] = request;
        request.into_outcome()
    }

    /// Queues requests and returns at once: a thread of the store, or the leader of the pipeline, does the I/O. So one
    /// caller can ask several stores, and a server that does not answer delays none of the others. Requests of one call
    /// share round trips where that is possible.
    fn submit(&self, requests: Vec<(Command, Completion)>);

    /// The server that stores `key`. Only its outages concern the key.
    fn server_of(&self, _key: &Key) -> ServerId {
        ServerId::ONLY
    }

    /// Sends a PING, and returns how long the reply took.
    fn ping(&self) -> Result<Duration, Error>;

    /// Checks the settings of the servers, each on a connection of its own. Returns `None` if there is no server.
    fn check_environment(&self) -> Result<Option<Vec<EnvironmentFinding>>, Error> {
        Ok(None)
    }

    /// The nodes of a quorum; none for other stores.
    fn nodes(&self) -> Vec<NodeState> {
        Vec::new()
    }

    /// The servers that have to be scanned to find all keys.
    fn servers_to_scan(&self) -> Result<Vec<ServerId>, Error> {
        Ok(vec![ServerId::ONLY])
    }

    /// Returns a part of the keys of `server`.
    fn scan(&self, _server: ServerId, _scan: &Scan) -> Result<ScannedKeys, Error> {
        let message = "this store cannot list its locks";
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Writes a release to the socket, or queues it for the background, which repeats it if it fails. Does not wait for
    /// the reply. Never connects, and blocks for one write at most.
    fn send_release(&self, release: Release);

    /// Writes or queues several releases, as [`send_release`](Self::send_release) does, with as few writes as possible.
    fn send_releases(&self, releases: Vec<Release>) {
        for release in releases {
            self.send_release(release);
        }
    }

    /// Reads replies that callers do not wait for, and writes queued releases. Returns true if work is left for later.
    /// Only "the background" calls this method: the thread `leasehold-releases`, or the thread of a node.
    fn run_maintenance(&self) -> bool {
        false
    }

    /// The number of failed releases that wait to be repeated.
    fn failed_releases(&self) -> usize {
        0
    }

    /// How many threads renew leases, and how many renewals a thread sends at a time.
    fn renewal_limits(&self) -> RenewalLimits {
        RenewalLimits::USUAL
    }

    /// Whether a renewal sets a missing key. A renewal that overlaps with the release of its lease may then set the key
    /// again, so such a lease is released once more.
    fn renewals_set_keys(&self) -> bool {
        false
    }

    /// Returns an error if the store does not have this feature.
    fn check(&self, _feature: Feature) -> Result<(), Error> {
        Ok(())
    }

    /// Marks all connections to the server of `key` as suspect, since they may lead to a server that is no longer the
    /// primary. Each is replaced before its next use, but not within the first second of its life.
    fn suspect_connections(&self, _key: &Key) {}

    /// Makes the store refuse submitted requests. Called when the client ends, after the background has ended.
    fn end(&self) {}

    /// Waits until all sent releases are done, until `deadline` at the latest.
    fn flush(&self, _deadline: MonotonicTime) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the store open no more connections. Called when the client has ended.
    fn close(&self) {}
}

/// Reports to a [`Listener`] what happens to locks on the servers. All reports except grants are hints: every wait has
/// a bound without them.
pub trait Notifications: Send + Sync {
    /// Starts to call `listener` for each notification. Connects only after [`request`](Self::request) or
    /// [`track`](Self::track).
    fn start(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error>;

    /// Ends the calls to the listener, and closes the notification connections.
    fn stop(&self);

    /// Asks the background to connect for notifications about `key`, unless it has connected already.
    fn request(&self, key: &Key);

    /// Reads `keys`, and reports each later change of them to the listener. Returns false if the notification
    /// connection is not open: the store then calls `Listener::all_changed` once it is.
    fn track(&self, keys: Vec<TrackedKey>) -> bool;

    /// How a waiter joins the queue of `key` now. Stores without queues return `QueueMode::None`.
    fn queue_mode(&self, key: &Key) -> QueueMode;

    /// `None` if waiters queue on the server. Otherwise, on a quorum or beside another library, waiters watch the key,
    /// and ask again when this many servers have reported that the key is missing.
    fn free_servers(&self) -> Option<usize> {
        None
    }

    /// A number that changes when notifications about `key` may have been lost: with each new notification connection,
    /// with each flush of a server, and when another server begins to store the key.
    fn epoch(&self, _key: &Key) -> u64 {
        0
    }

    /// Whether `server` stores `key`, so that a report about all keys of the server includes this one.
    fn is_at(&self, _server: ServerId, _key: &Key) -> bool {
        true
    }

    /// Whether a request has to confirm a loss that a notification reports: the notification may come from another
    /// server than the replies, or from another user.
    fn must_confirm_losses(&self) -> bool {
        false
    }
}

/// A client's store, as its two interfaces.
#[derive(Clone)]
pub struct Backend {
    pub store: Arc<dyn Store>,
    pub notifications: Arc<dyn Notifications>,
}

impl Backend {
    pub fn new<S: Store + Notifications + 'static>(store: Arc<S>) -> Self {
        Self {
            notifications: Arc::<S>::clone(&store),
            store,
        }
    }
}

/// The numbers of threads and renewals that suit a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewalLimits {
    /// How many threads renew at the same time.
    pub threads: usize,
    /// How many renewals a thread sends at a time, if the renewals are late.
    pub at_a_time: usize,
    /// Whether a thread sends renewals of one slot together, since a script call has keys of one slot only.
    pub by_slot: bool,
}

impl RenewalLimits {
    /// The limits for one server. While one thread handles replies, the server works on the requests of the other
    /// thread. Large batches delay other requests by some ms, so they are sent only when renewals are late and locks
    /// may be lost.
    pub const USUAL: Self = Self {
        threads: 2,
        at_a_time: if cfg!(all(test, shuttle)) { 8 } else { 512 },
        by_slot: false,
    };
}

/// The delay of the maintenance after a request that is not urgent ([`Urgency::Soon`]).
pub const MAINTENANCE_DELAY: Duration = Duration::from_millis(100);

/// How soon a store needs [`Store::run_maintenance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Within [`MAINTENANCE_DELAY`]: a reply has to be read, or a release retried.
    Soon,
    /// At once: a queued release can be written now.
    Now,
}
