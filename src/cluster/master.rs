//! One master of a Cluster, with its `Node`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::report::error::{Error, ErrorKind};
use crate::store::ServerId;
use crate::store::maintenance::MaintenanceRequests;
use crate::wire::Node;
use crate::wire::connect::url::HostPort;

/// The serial number of the next master. All clients of this process share this counter.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// A master. Its node is opened when the first request needs it.
pub struct Master {
    id: ServerId,
    address: HostPort,
    serial: u64,
    opened: OnceLock<MasterNode>,
    opening: Mutex<()>,
    /// Whether the node has to connect for notifications when it is opened.
    wants_notifications: AtomicBool,
    /// Whether the last request timed out.
    is_silent: AtomicBool,
    /// Whether the master serves a slot.
    serves: AtomicBool,
    /// Whether the master has lost all of its slots to other masters. The endpoint shares this flag.
    is_retired: Arc<AtomicBool>,
    /// The node that first named this master, in its slot map or in a redirect. The endpoint shares this value.
    announced_by: Arc<OnceLock<HostPort>>,
}

struct MasterNode {
    node: Arc<Node>,
    requests: Arc<MaintenanceRequests>,
}

impl Master {
    pub fn new(id: ServerId, address: HostPort) -> Self {
        Self {
            id,
            address,
            serial: NEXT_SERIAL.fetch_add(1, Ordering::Relaxed),
            opened: OnceLock::new(),
            opening: Mutex::new(()),
            wants_notifications: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            serves: AtomicBool::new(false),
            is_retired: Arc::default(),
            announced_by: Arc::default(),
        }
    }

    pub fn id(&self) -> ServerId {
        self.id
    }

    pub fn address(&self) -> &HostPort {
        &self.address
    }

    /// The node, if it is open.
    pub fn node(&self) -> Option<&Arc<Node>> {
        self.opened.get().map(|opened| &opened.node)
    }

    /// Returns the node. Opens it by `open` if it is not open yet.
    pub fn node_or_open(
        &self,
        open: impl FnOnce() -> Result<(Arc<Node>, Arc<MaintenanceRequests>), Error>,
    ) -> Result<&Arc<Node>, Error> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.node);
        }
        let _guard = self.opening.lock();
        if self.opened.get().is_none() {
            let (node, requests) = open()?;
            let _ = self.opened.set(MasterNode { node, requests });
        }
        let node = self.node();
        node.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the node was not opened"))
    }

    /// The notification epoch for keys of this master, from the node's own epoch `of_node`. It contains the master's
    /// serial number, so epochs of different masters differ.
    pub fn notification_epoch(&self, of_node: u64) -> u64 {
        (self.serial << 32).wrapping_add(of_node)
    }

    /// Makes the node connect for notifications as soon as it is open, because the client tracks keys there.
    pub fn request_notifications(&self) {
        self.wants_notifications.store(true, Ordering::Relaxed);
    }

    /// Whether the node has to connect for notifications.
    pub fn wants_notifications(&self) -> bool {
        self.wants_notifications.load(Ordering::Relaxed)
    }

    /// Whether the last request timed out.
    pub fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }

    /// Records whether the last request got a reply.
    pub fn record_reply(&self, has_replied: bool) {
        if self.is_silent() == has_replied {
            self.is_silent.store(!has_replied, Ordering::Relaxed);
        }
    }

    /// Whether the master serves a slot.
    pub fn serves_slots(&self) -> bool {
        self.serves.load(Ordering::Relaxed)
    }

    /// Sets whether the master serves a slot. A master that has lost its last slot is retired.
    pub fn set_serves_slots(&self, serves: bool) {
        let has_served = self.serves.swap(serves, Ordering::Relaxed);
        if serves || has_served {
            self.is_retired.store(!serves, Ordering::Relaxed);
        }
    }

    /// Ends the retirement, because a redirect of another node has named this master: requests go to this master even
    /// if it has no slot in the slot map.
    pub fn reinstate(&self) {
        self.is_retired.store(false, Ordering::Relaxed);
    }

    /// The flag that the endpoint of this master shares.
    pub fn retired_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_retired)
    }

    /// Sets the node that has named this master. Keeps the first one.
    pub fn set_announcer(&self, by: &HostPort) {
        self.announced_by.get_or_init(|| by.clone());
    }

    /// The node that has named this master: see [`set_announcer`](Self::set_announcer).
    pub fn announced_by(&self) -> Arc<OnceLock<HostPort>> {
        Arc::clone(&self.announced_by)
    }

    /// Ends the node's maintenance thread.
    pub fn stop_maintenance(&self) {
        if let Some(opened) = self.opened.get() {
            opened.requests.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losing_its_last_slot_retires_a_master() {
        let host = "h".to_owned();
        let master = Master::new(ServerId::ONLY, HostPort { host, port: 1 });
        let flag = master.retired_flag();
        let is_retired = || flag.load(Ordering::Relaxed);
        master.set_serves_slots(false);
        assert!(!is_retired(), "its first slot is on the way");
        master.set_serves_slots(true);
        assert!(!is_retired() && master.serves_slots());
        for _ in 0..2 {
            master.set_serves_slots(false);
            assert!(is_retired() && !master.serves_slots());
        }
        // The Cluster is moving a slot to this master.
        master.reinstate();
        master.set_serves_slots(false);
        assert!(!is_retired());
    }
}
