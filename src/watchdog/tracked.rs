//! The leases whose keys Redis was asked to tell about: those held for longer than a moment, as many as
//! there is room for.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;

use crate::lease::{Lease, LeasesByKey};
use crate::store::TrackedKey;
use crate::util::key::Key;
use crate::util::sync::Mutex;

/// Most leases of one client that are tracked. What Redis remembers of tracked keys is bounded for the whole
/// server (`tracking-table-max-keys`: a million, unless set otherwise): when it is full, it forgets keys at
/// random, of whichever client. And each renewal of a tracked key is told, and makes this client look again.
const MOST: usize = 10_000;

#[derive(Default)]
pub(crate) struct TrackedLeases(Mutex<LeasesByKey>);

impl TrackedLeases {
    /// False, and nothing done, if there is no room for it.
    pub(crate) fn insert(&self, lease: &Arc<Lease>) -> bool {
        let mut leases = self.0.lock();
        if leases.len() >= MOST && leases.get(&lease.grant().key).is_none() {
            return false;
        }
        let before = leases.insert(Arc::clone(lease));
        drop(leases);
        drop(before);
        true
    }

    pub(crate) fn remove(&self, lease: &Lease) {
        let removed = self.0.lock().remove(lease);
        drop(removed);
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<Lease>> {
        self.0.lock().get(key).cloned()
    }

    /// How many more there is room for.
    pub(crate) fn room(&self) -> usize {
        MOST.saturating_sub(self.0.lock().len())
    }
}

pub(crate) fn tracked(lease: &Lease) -> TrackedKey {
    TrackedKey {
        key: lease.grant().key.clone(),
        lease: Some(lease.grant().id),
    }
}
