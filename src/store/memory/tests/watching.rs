//! Tracked keys: their listeners, and the end of the tracking of missing keys.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::histories::{holder, key};
use crate::error::Error;
use crate::store::command::{Command, GrantMessage, QueueMode};
use crate::store::memory::{MemoryNode, MemoryServer};
use crate::store::{Listener, Notifications, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::Key;
use crate::util::threads::ThreadGroup;

/// Tracks each changed key again, and records whether it exists.
#[derive(Default)]
struct TrackAll(Mutex<Vec<bool>>);

impl Listener for TrackAll {
    fn granted(&self, _: &Key, _: LeaseId, _: GrantMessage) {}

    fn near(&self, _: &Key, _: LeaseStart) {}

    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}

    fn changed(&self, key: &Key) -> Option<TrackedKey> {
        Some(tracked_key(key))
    }

    fn all_changed(&self) {}

    fn seen(&self, _: &TrackedKey, value: Option<&[u8]>) {
        self.0.lock().push(value.is_some());
    }

    fn clock_moved(&self) {}

    fn refused(&self, _: &Error) {}
}

fn tracked_key(key: &Key) -> TrackedKey {
    TrackedKey {
        key: key.clone(),
        lease: None,
    }
}

#[test]
fn a_key_is_tracked_while_it_exists() {
    let (server, key) = (MemoryServer::new(), key(0));
    let store = MemoryNode::plain(Arc::clone(&server), holder(0));
    let track_all = Arc::new(TrackAll::default());
    store
        .start(&ThreadGroup::new(), Arc::<TrackAll>::clone(&track_all))
        .unwrap();
    let count_tracked = || server.trackers.lock().len();
    let acquire = |ttl| {
        let command = Command::Acquire {
            key: key.clone(),
            lease: LeaseId::random(),
            ttl,
            queue_mode: QueueMode::None,
        };
        store.execute_one(command, MonotonicTime::now()).unwrap();
    };
    store.track(vec![tracked_key(&key)]);
    assert_eq!(
        (count_tracked(), &track_all.0.lock()[..]),
        (0, &[false][..])
    );
    for _ in 0..2 {
        track_all.0.lock().clear();
        acquire(Duration::from_secs(30));
        for _ in 0..2 {
            store.track(vec![tracked_key(&key)]);
            assert_eq!(count_tracked(), 1);
        }
        server.advance(Duration::from_secs(30));
        assert_eq!(&track_all.0.lock()[..], [true, true, false]);
        assert_eq!(count_tracked(), 0, "the key is missing");
    }
}
