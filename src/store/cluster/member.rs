//! One master of a Cluster, with its `Node` and the thread that runs the node's maintenance.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, ErrorKind};
use crate::store::cluster::slot_map::Address;
use crate::store::redis::Node;
use crate::store::{ServerId, Store, Urgency};
use crate::util::clock::MonotonicTime;

/// The delay of a maintenance that is not urgent.
const MAINTENANCE_DELAY: Duration = Duration::from_millis(100);

/// Numbers the masters of all clients, so that no two have the same number.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// A master. Its node is opened when the first request needs it.
pub(super) struct Member {
    id: ServerId,
    address: Address,
    serial: u64,
    opened: OnceLock<Opened>,
    opening: Mutex<()>,
    /// A request has timed out, and no reply has come since then.
    is_silent: AtomicBool,
}

struct Opened {
    node: Arc<Node>,
    requests: Arc<MaintenanceRequests>,
}

impl Member {
    pub(super) fn new(id: ServerId, address: Address) -> Self {
        Self {
            id,
            address,
            serial: NEXT_SERIAL.fetch_add(1, Ordering::Relaxed),
            opened: OnceLock::new(),
            opening: Mutex::new(()),
            is_silent: AtomicBool::new(false),
        }
    }

    pub(super) fn id(&self) -> ServerId {
        self.id
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The node, if it is open.
    pub(super) fn node(&self) -> Option<&Arc<Node>> {
        self.opened.get().map(|opened| &opened.node)
    }

    /// The node. Calls `open` first if there is none yet.
    pub(super) fn node_or_open(
        &self,
        open: impl FnOnce() -> Result<(Arc<Node>, Arc<MaintenanceRequests>), Error>,
    ) -> Result<&Arc<Node>, Error> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.node);
        }
        let _guard = self.opening.lock();
        if self.opened.get().is_none() {
            let (node, requests) = open()?;
            let _ = self.opened.set(Opened { node, requests });
        }
        let node = self.node();
        node.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the node was not opened"))
    }

    /// The notification epoch for keys of this master, from the epoch `of_node`. It differs from that of any other
    /// master.
    pub(super) fn notification_epoch(&self, of_node: u64) -> u64 {
        (self.serial << 32).wrapping_add(of_node)
    }

    /// Whether a request has timed out, and no reply has come since then.
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }

    /// Notes whether the last request had a reply.
    pub(super) fn note_reply(&self, has_replied: bool) {
        if self.is_silent() == has_replied {
            self.is_silent.store(!has_replied, Ordering::Relaxed);
        }
    }

    /// Ends the thread of the node.
    pub(super) fn stop(&self) {
        if let Some(opened) = self.opened.get() {
            opened.requests.stop();
        }
    }
}

/// Requests for the maintenance of one node. They wake the thread that runs it.
#[derive(Default)]
pub(super) struct MaintenanceRequests {
    state: Mutex<RequestState>,
    changed: Condvar,
}

#[derive(Default)]
struct RequestState {
    requested: Option<Urgency>,
    is_stopped: bool,
}

impl MaintenanceRequests {
    /// Requests the maintenance of the node. Does not block.
    pub(super) fn request(&self, urgency: Urgency) {
        let mut state = self.state.lock();
        // Nearly every dropped guard calls this, so only the first call wakes the thread.
        let is_sooner = match state.requested {
            None => true,
            Some(before) => before == Urgency::Soon && urgency == Urgency::Now,
        };
        if is_sooner {
            state.requested = Some(urgency);
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_one();
    }

    /// Runs the maintenance of `node` at each request, until `stop` is called or the node is dropped.
    pub(super) fn run(&self, node: &Weak<Node>) {
        while self.wait() {
            let Some(node) = node.upgrade() else {
                return;
            };
            if node.run_maintenance() {
                self.request(Urgency::Soon);
            }
        }
    }

    /// Waits until maintenance is due. Returns false after `stop`.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let mut due = None;
        loop {
            if state.is_stopped {
                return false;
            }
            let left = match state.requested {
                None => {
                    self.changed.wait(&mut state);
                    continue;
                }
                Some(Urgency::Now) => Duration::ZERO,
                Some(Urgency::Soon) => {
                    let now = MonotonicTime::now();
                    due.get_or_insert(now.after(MAINTENANCE_DELAY)).since(now)
                }
            };
            if left.is_zero() {
                state.requested = None;
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn an_urgent_request_ends_the_delay() {
        let requests = MaintenanceRequests::default();
        requests.request(Urgency::Now);
        requests.request(Urgency::Soon);
        let begun = MonotonicTime::now();
        assert!(requests.wait());
        // One maintenance serves both requests.
        assert_eq!(requests.state.lock().requested, None);
        requests.request(Urgency::Soon);
        assert!(requests.wait());
        assert!(MonotonicTime::now().since(begun) >= MAINTENANCE_DELAY);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| requests.wait());
            requests.request(Urgency::Soon);
            requests.request(Urgency::Now);
            assert!(waiting.join().unwrap());
        });
        requests.stop();
        assert!(!requests.wait());
    }
}
