//! One master of a Cluster, with its `Node`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind};
use crate::store::ServerId;
use crate::store::cluster::slot_map::Address;
use crate::store::maintenance::MaintenanceRequests;
use crate::store::redis::Node;

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
