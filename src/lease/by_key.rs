//! A map from keys to leases that stores no copy of the keys, since a client may hold a million leases.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

use crate::config::key::{Key, KeyHasher};
use crate::lease::Lease;

/// Leases by their keys, at most one lease for each key.
#[derive(Default)]
pub struct LeasesByKey(HashSet<ByKey, BuildHasherDefault<KeyHasher>>);

/// A lease that is hashed and compared by its key.
struct ByKey(Arc<Lease>);

impl LeasesByKey {
    pub fn get(&self, key: &Key) -> Option<&Arc<Lease>> {
        self.0.get(key).map(|found| &found.0)
    }

    /// Adds a lease, and returns the lease that had the same key.
    pub fn insert(&mut self, lease: Arc<Lease>) -> Option<Arc<Lease>> {
        self.0.replace(ByKey(lease)).map(|replaced| replaced.0)
    }

    /// Removes this lease. A lease with the same key and another id stays.
    pub fn remove(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let key = &lease.grant().key;
        let found = self.get(key)?;
        if !std::ptr::eq(&**found, lease) {
            return None;
        }
        self.0.take(key).map(|removed| removed.0)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.iter().map(|by_key| &by_key.0)
    }
}

impl Borrow<Key> for ByKey {
    fn borrow(&self) -> &Key {
        &self.0.grant().key
    }
}

impl Hash for ByKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.grant().key.hash(state);
    }
}

impl PartialEq for ByKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.grant().key == other.0.grant().key
    }
}

impl Eq for ByKey {}
