//! Tells of guards' releases that could not be done at once. Each that was told of as delayed is told
//! of as ended, at the end of the client if not before. Does no I/O and runs no user code.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::event::EventLock;
use crate::key::Key;
use crate::lease::Courier;
use crate::store::Delay;

pub(crate) struct DelayedReleases {
    courier: Arc<Courier>,
    /// Keys and fencing tokens of those that have not ended; nothing once the client has. The courier
    /// is handed its errands under this lock, so that it gets them in their order.
    open: Mutex<Option<HashSet<(Key, u64)>>>,
}

impl DelayedReleases {
    pub(crate) fn new(courier: Arc<Courier>) -> Self {
        Self {
            courier,
            open: Mutex::new(Some(HashSet::new())),
        }
    }

    pub(crate) fn hear(&self, key: &Key, token: u64, delay: Delay) {
        let mut open = self.open.lock();
        let Some(open) = &mut *open else { return };
        let release = (key.clone(), token);
        match delay {
            Delay::Began(error) => {
                open.insert(release);
                self.courier.report_later(key, token, move |events, lock| {
                    events.release_delayed(lock, &error);
                });
            }
            Delay::Ended { confirmed } => {
                open.remove(&release);
                self.tell_ended(release, confirmed);
            }
        }
    }

    /// The client ends: nobody sees to what is left, and nothing more is told.
    pub(crate) fn end(&self) {
        for release in self.open.lock().take().into_iter().flatten() {
            self.tell_ended(release, false);
        }
    }

    fn tell_ended(&self, (key, fencing_token): (Key, u64), confirmed: bool) {
        self.courier.tell_later(move |events| {
            let key = key.name();
            events.release_ended(EventLock { key, fencing_token }, confirmed);
        });
    }
}
