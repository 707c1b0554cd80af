//! Who is told of changes, and that nothing is kept for keys that have gone.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::histories::{holder, key};
use crate::error::Error;
use crate::store::command::{Command, GrantMessage, QueueMode};
use crate::store::memory::{MemoryNode, MemoryServer};
use crate::store::{Listener, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::Key;
use crate::util::threads::ThreadGroup;

/// Always wants to know more; notes whether there was such a key.
#[derive(Default)]
struct Curious(Mutex<Vec<bool>>);

impl Listener for Curious {
    fn granted(&self, _: &Key, _: LeaseId, _: GrantMessage) {}

    fn near(&self, _: &Key, _: LeaseStart) {}

    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}

    fn changed(&self, key: &Key) -> Option<TrackedKey> {
        Some(look_at(key))
    }

    fn all_changed(&self) {}

    fn seen(&self, _: &TrackedKey, value: Option<&[u8]>) {
        self.0.lock().push(value.is_some());
    }

    fn clock_moved(&self) {}

    fn refused(&self, _: &Error) {}
}

fn look_at(key: &Key) -> TrackedKey {
    TrackedKey {
        key: key.clone(),
        lease: None,
    }
}

#[test]
fn a_key_is_watched_as_long_as_it_is_there() {
    let (server, key) = (MemoryServer::new(), key(0));
    let store = MemoryNode::new(Arc::clone(&server), holder(0));
    let curious = Arc::new(Curious::default());
    store
        .start_notifications(&ThreadGroup::new(), Arc::<Curious>::clone(&curious))
        .unwrap();
    let tracked = || server.watchers.lock().len();
    let acquire = |ttl| {
        let command = Command::Acquire {
            key: key.clone(),
            lease: LeaseId::random(),
            ttl,
            queue_mode: QueueMode::None,
        };
        store.execute_one(command, MonotonicTime::now()).unwrap();
    };
    store.track(vec![look_at(&key)]);
    assert_eq!((tracked(), &curious.0.lock()[..]), (0, &[false][..]));
    for _ in 0..2 {
        curious.0.lock().clear();
        acquire(Duration::from_secs(30));
        for _ in 0..2 {
            store.track(vec![look_at(&key)]);
            assert_eq!(tracked(), 1);
        }
        server.advance(Duration::from_secs(30));
        assert_eq!(&curious.0.lock()[..], [true, true, false]);
        assert_eq!(tracked(), 0, "it has gone, and is told so");
    }
}
