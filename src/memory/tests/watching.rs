//! Tests of tracked keys, and of requests that hang in an outage.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::histories::{holder, key};
use crate::command::{Acquire, Command, GrantMessage, Mode, QueueMode, Reply};
use crate::config::key::Key;
use crate::memory::{MemoryNode, MemoryServer};
use crate::process::threads::ThreadGroup;
use crate::report::error::ErrorKind;
use crate::store::completion::Submitted;
use crate::store::{KeyState, Listener, Notifications, Reports, ServerId, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};

/// Tracks each changed key again, and records whether it exists.
#[derive(Default)]
struct TrackAll(Mutex<Vec<bool>>);

impl Listener for TrackAll {
    fn granted(&self, _: ServerId, _: &Key, _: LeaseId, _: GrantMessage) {}

    fn near(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn called(&self, _: ServerId, _: &Key, _: LeaseStart) {}

    fn forced(&self, _: ServerId, _: &Key, _: LeaseStart, _: HolderId) {}

    fn changed(&self, _: ServerId, key: &Key) -> Option<TrackedKey> {
        Some(tracked_key(key))
    }

    fn all_changed(&self, _: ServerId) {}
    fn moved(&self, _: &dyn Fn(&Key) -> bool) {}

    fn seen(&self, _: ServerId, _: &TrackedKey, state: KeyState<'_>) {
        self.0.lock().push(state.is_present());
    }

    fn clock_moved(&self) {}
}

fn tracked_key(key: &Key) -> TrackedKey {
    TrackedKey {
        key: key.clone(),
        lease: None,
    }
}

#[test]
fn a_key_is_tracked_until_it_changes() {
    let (server, key) = (MemoryServer::new(), key(0));
    let store = MemoryNode::new(Arc::clone(&server), holder(0), Reports::default());
    let track_all = Arc::new(TrackAll::default());
    store
        .start(&ThreadGroup::new(), Arc::<TrackAll>::clone(&track_all))
        .unwrap();
    let acquire = |ttl| {
        let command = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease: LeaseId::random(),
            ttl,
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        store.execute_one(command, MonotonicTime::now()).unwrap();
    };
    // A missing key is tracked, too, as by Redis.
    for _ in 0..2 {
        store.track(vec![tracked_key(&key)]);
    }
    for _ in 0..2 {
        acquire(Duration::from_secs(30));
        server.advance(Duration::from_secs(30));
    }
    let expected = [false, false, true, false, true, false];
    assert_eq!(&track_all.0.lock()[..], expected);
    assert_eq!(server.trackers.lock().len(), 1);
}

#[test]
fn a_submitted_request_hangs_until_the_outage_ends() {
    let server = MemoryServer::new();
    let store = MemoryNode::new(Arc::clone(&server), holder(0), Reports::default());
    let submit = |key| {
        let (submitted, mut completions) = Submitted::new(1);
        let command = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key,
            lease: LeaseId::random(),
            ttl: Duration::from_secs(30),
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        store.submit(vec![(command, completions.remove(0))]);
        submitted
    };
    let outcome = |submitted: &Submitted| submitted.outcomes().remove(0);
    let granted = outcome(&submit(key(0)));
    assert!(
        matches!(granted, Some(Ok(Reply::Granted { .. }))),
        "{granted:?}"
    );
    server.hang();
    let hanging = submit(key(1));
    assert!(outcome(&hanging).is_none());
    server.recover();
    let error = outcome(&hanging).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    server.fail(ErrorKind::Denied);
    let error = outcome(&submit(key(1))).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
}
