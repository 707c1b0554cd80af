//! Leases, found by their key: one for each. Keeps no copy of a key, since a client may have a million of
//! them. Knows nothing of what they are kept for.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::Arc;

use crate::lease::Lease;
use crate::util::key::{Key, KeyHasher};

#[derive(Default)]
pub(crate) struct LeasesByKey(HashSet<ByKey, BuildHasherDefault<KeyHasher>>);

/// A lease that is told from others by its key.
struct ByKey(Arc<Lease>);

impl LeasesByKey {
    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Lease>> {
        self.0.get(key).map(|found| &found.0)
    }

    /// Returns the one that had its place.
    pub(crate) fn insert(&mut self, lease: Arc<Lease>) -> Option<Arc<Lease>> {
        self.0.replace(ByKey(lease)).map(|before| before.0)
    }

    /// Takes out this very lease, if it is there.
    pub(crate) fn remove(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let key = &lease.grant().key;
        let found = self.get(key)?;
        if !std::ptr::eq(&**found, lease) {
            return None;
        }
        self.0.take(key).map(|removed| removed.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.iter().map(|one| &one.0)
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
