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

/// How long after a request the maintenance runs, if it is not urgent.
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
    /// A request has timed out, and there was no reply since.
    is_silent: AtomicBool,
}

struct Opened {
    node: Arc<Node>,
    bell: Arc<Bell>,
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
        open: impl FnOnce() -> Result<(Arc<Node>, Arc<Bell>), Error>,
    ) -> Result<&Arc<Node>, Error> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.node);
        }
        let _alone = self.opening.lock();
        if self.opened.get().is_none() {
            let (node, bell) = open()?;
            let _ = self.opened.set(Opened { node, bell });
        }
        let node = self.node();
        node.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the node was not opened"))
    }

    /// The epoch of notifications about keys of this master: two masters never have the same.
    pub(super) fn notification_epoch(&self, of_node: u64) -> u64 {
        (self.serial << 32).wrapping_add(of_node)
    }

    /// Whether a request has timed out, and there was no reply since.
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
            opened.bell.stop();
        }
    }
}

/// Wakes the thread that runs the maintenance of one node.
#[derive(Default)]
pub(super) struct Bell {
    state: Mutex<BellState>,
    changed: Condvar,
}

#[derive(Default)]
struct BellState {
    asked: Option<Urgency>,
    is_stopped: bool,
}

impl Bell {
    /// Asks for the maintenance of the node. Does not block.
    pub(super) fn ring(&self, urgency: Urgency) {
        let mut state = self.state.lock();
        // Nearly every dropped guard rings: only the first one wakes the thread.
        let is_news = match state.asked {
            None => true,
            Some(before) => before == Urgency::Soon && urgency == Urgency::Now,
        };
        if is_news {
            state.asked = Some(urgency);
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_one();
    }

    /// Runs the maintenance of `node` whenever the bell rings, until it is stopped or the node is gone.
    pub(super) fn run(&self, node: &Weak<Node>) {
        while self.wait() {
            let Some(node) = node.upgrade() else {
                return;
            };
            if node.run_maintenance() {
                self.ring(Urgency::Soon);
            }
        }
    }

    /// Waits until maintenance is due. Returns false once stopped.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let mut due = None;
        loop {
            if state.is_stopped {
                return false;
            }
            let left = match state.asked {
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
                state.asked = None;
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
    fn an_urgent_ring_ends_the_delay() {
        let bell = Bell::default();
        bell.ring(Urgency::Now);
        bell.ring(Urgency::Soon);
        let begun = MonotonicTime::now();
        assert!(bell.wait());
        // The second ring was not lost in the first one: it asked for the same maintenance.
        assert_eq!(bell.state.lock().asked, None);
        bell.ring(Urgency::Soon);
        assert!(bell.wait());
        assert!(MonotonicTime::now().since(begun) >= MAINTENANCE_DELAY);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| bell.wait());
            bell.ring(Urgency::Soon);
            bell.ring(Urgency::Now);
            assert!(waiting.join().unwrap());
        });
        bell.stop();
        assert!(!bell.wait());
    }
}
