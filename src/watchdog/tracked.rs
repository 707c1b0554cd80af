//! The leases whose keys are tracked: Redis notifies this client of changes of these keys.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;

use crate::config::key::Key;
use crate::lease::{Lease, LeasesByKey};
use crate::store::TrackedKey;
use crate::util::sync::Mutex;

/// The largest number of leases that one client tracks, and of elections whose keys it tracks for observers. Redis
/// tracks a million keys for all clients together (`tracking-table-max-keys`), and drops random keys beyond that. Also,
/// each renewal of a tracked key costs a notification and a read of the key.
pub const MAX_TRACKED: usize = 10_000;

/// The tracked leases of a client, by key.
#[derive(Default)]
pub struct TrackedLeases(Mutex<LeasesByKey>);

impl TrackedLeases {
    /// Adds a lease. Returns false if there is no room for another key.
    pub fn insert(&self, lease: &Arc<Lease>) -> bool {
        let mut leases = self.0.lock();
        if leases.len() >= MAX_TRACKED && leases.get(&lease.grant().key).is_none() {
            return false;
        }
        let replaced = leases.insert(Arc::clone(lease));
        drop(leases);
        drop(replaced);
        true
    }

    pub fn remove(&self, lease: &Lease) {
        let removed = self.0.lock().remove(lease);
        drop(removed);
    }

    pub fn get(&self, key: &Key) -> Option<Arc<Lease>> {
        self.0.lock().get(key).cloned()
    }

    /// The tracked keys for which `is_wanted` returns true.
    pub fn keys(&self, is_wanted: &dyn Fn(&Key) -> bool) -> Vec<TrackedKey> {
        let mut keys: Vec<_> = self
            .0
            .lock()
            .iter()
            .map(|lease| tracked_key(lease))
            .collect();
        keys.retain(|tracked| is_wanted(&tracked.key));
        keys
    }

    /// How many more leases can be tracked.
    pub fn room(&self) -> usize {
        MAX_TRACKED.saturating_sub(self.0.lock().len())
    }
}

/// The key of `lease`, as the store tracks it.
pub fn tracked_key(lease: &Lease) -> TrackedKey {
    TrackedKey {
        key: lease.grant().key.clone(),
        lease: Some(lease.grant().id),
    }
}
