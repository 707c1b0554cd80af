//! Who is told of changes, and that nothing is kept for keys that have gone.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::histories::{holder, key};
use crate::clock::Moment;
use crate::error::Error;
use crate::id::{HolderId, LeaseId, LeaseStart};
use crate::key::Key;
use crate::store::command::{Command, Grant, Standing};
use crate::store::memory::{Memory, MemoryServer};
use crate::store::{Listener, Store, Watched};
use crate::thread::Crew;

/// Always wants to know more; notes whether there was such a key.
#[derive(Default)]
struct Curious(Mutex<Vec<bool>>);

impl Listener for Curious {
    fn granted(&self, _: &Key, _: LeaseId, _: Grant) {}

    fn near(&self, _: &Key, _: LeaseStart) {}

    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}

    fn changed(&self, key: &Key) -> Option<Watched> {
        Some(look_at(key))
    }

    fn all_changed(&self) {}

    fn seen(&self, _: &Watched, value: Option<&[u8]>) {
        self.0.lock().push(value.is_some());
    }

    fn clock_moved(&self) {}

    fn refused(&self, _: &Error) {}
}

fn look_at(key: &Key) -> Watched {
    Watched {
        key: key.clone(),
        lease: None,
    }
}

#[test]
fn a_key_is_watched_as_long_as_it_is_there() {
    let (server, key) = (MemoryServer::new(), key(0));
    let store = Memory::new(Arc::clone(&server), holder(0));
    let curious = Arc::new(Curious::default());
    store
        .listen(&Crew::new(), Arc::<Curious>::clone(&curious))
        .unwrap();
    let watched = || server.watchers.lock().len();
    let acquire = |ttl| {
        let command = Command::Acquire {
            key: key.clone(),
            lease: LeaseId::random(),
            ttl,
            standing: Standing::None,
        };
        store.ask(command, Moment::now()).unwrap();
    };
    store.watch(vec![look_at(&key)]);
    assert_eq!((watched(), &curious.0.lock()[..]), (0, &[false][..]));
    for _ in 0..2 {
        curious.0.lock().clear();
        acquire(Duration::from_secs(30));
        for _ in 0..2 {
            store.watch(vec![look_at(&key)]);
            assert_eq!(watched(), 1);
        }
        server.advance(Duration::from_secs(30));
        assert_eq!(&curious.0.lock()[..], [true, true, false]);
        assert_eq!(watched(), 0, "it has gone, and is told so");
    }
}
