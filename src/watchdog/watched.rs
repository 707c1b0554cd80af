//! The leases whose keys Redis was asked to tell about: those held for longer than a moment.

use std::sync::Arc;

use crate::key::{Key, KeyMap};
use crate::lease::Lease;
use crate::store::Watched;
use crate::sync::Mutex;

#[derive(Default)]
pub(crate) struct WatchedLeases(Mutex<KeyMap<Arc<Lease>>>);

impl WatchedLeases {
    pub(crate) fn insert(&self, lease: &Arc<Lease>) {
        let key = lease.terms().key.clone();
        let before = self.0.lock().insert(key, Arc::clone(lease));
        drop(before);
    }

    pub(crate) fn remove(&self, lease: &Lease) {
        let mut leases = self.0.lock();
        let key = &lease.terms().key;
        let is_it = leases
            .get(key)
            .is_some_and(|one| std::ptr::eq(&**one, lease));
        let removed = is_it.then(|| leases.remove(key));
        drop(leases);
        drop(removed);
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<Lease>> {
        self.0.lock().get(key).cloned()
    }
}

pub(crate) fn watched(lease: &Lease) -> Watched {
    Watched {
        key: lease.terms().key.clone(),
        lease: Some(lease.terms().id),
    }
}
