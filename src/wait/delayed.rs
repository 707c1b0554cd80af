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
    /// The courier is handed its errands under this lock, so that it gets them in their order.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Keys and fencing tokens of those that are being written or read and were told of as late. The lanes
    /// know of those that wait to be written: bounded by what is in flight.
    open: HashSet<(Key, u64)>,
    /// From here on all count as open until their end is told.
    ending: bool,
    ended: bool,
}

impl DelayedReleases {
    pub(crate) fn new(courier: Arc<Courier>) -> Self {
        Self {
            courier,
            state: Mutex::default(),
        }
    }

    pub(crate) fn hear(&self, key: &Key, token: u64, delay: Delay) {
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        let release = (key.clone(), token);
        match delay {
            Delay::Began(error) => {
                state.open.insert(release);
                self.courier.report_later(key, token, move |events, lock| {
                    events.release_delayed(lock, &error);
                });
            }
            Delay::Ended { confirmed } => {
                state.open.remove(&release);
                self.tell_ended(release, confirmed);
            }
            Delay::Queued if state.ending => {}
            Delay::Queued => {
                state.open.remove(&release);
            }
            Delay::Taken => {
                state.open.insert(release);
            }
        }
    }

    /// The client ends: nobody sees to what is left, and nothing more is told. `end_queued` has those that
    /// wait to be written told of.
    pub(crate) fn end(&self, end_queued: impl FnOnce()) {
        self.state.lock().ending = true;
        end_queued();
        let mut state = self.state.lock();
        state.ended = true;
        for release in std::mem::take(&mut state.open) {
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
