//! Reports releases of guards that could not be done at once. Each release that is reported as delayed is reported as
//! ended later, at the latest when the client ends. Does no I/O; queues callbacks.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::event::EventLock;
use crate::lease::CallbackExecutor;
use crate::store::LateRelease;
use crate::util::key::Key;

pub(crate) struct LateReleases {
    callbacks: Arc<CallbackExecutor>,
    /// Events are queued under this mutex, so that they keep their order.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Keys and fencing tokens of late releases that are being written or read: bounded by what is in flight. The
    /// pipelines know of late releases that wait to be written.
    open: HashSet<(Key, u64)>,
    /// The client is about to end: a release that goes back to a pipeline's queue stays open until its end is reported.
    ending: bool,
    ended: bool,
}

impl LateReleases {
    pub(crate) fn new(callbacks: Arc<CallbackExecutor>) -> Self {
        Self {
            callbacks,
            state: Mutex::default(),
        }
    }

    /// Notes what a pipeline reports of a late release, and queues the events.
    pub(crate) fn note(&self, key: &Key, token: u64, delay: LateRelease) {
        let mut state = self.state.lock();
        if state.ended {
            return;
        }
        let release = (key.clone(), token);
        match delay {
            LateRelease::Delayed(error) => {
                state.open.insert(release);
                self.callbacks
                    .queue_lock_event(key, token, move |events, lock| {
                        events.release_delayed(lock, &error);
                    });
            }
            LateRelease::Ended { confirmed } => {
                state.open.remove(&release);
                self.queue_ended_event(release, confirmed);
            }
            LateRelease::Queued if state.ending => {}
            LateRelease::Queued => {
                state.open.remove(&release);
            }
            LateRelease::Dequeued => {
                state.open.insert(release);
            }
        }
    }

    /// Ends the reports when the client ends: reports all late releases as given up, and nothing after that. `end_queued`
    /// has the pipelines report those that wait to be written.
    pub(crate) fn end(&self, end_queued: impl FnOnce()) {
        self.state.lock().ending = true;
        end_queued();
        let mut state = self.state.lock();
        state.ended = true;
        for release in std::mem::take(&mut state.open) {
            self.queue_ended_event(release, false);
        }
    }

    /// Queues `EventHandler::release_ended`.
    fn queue_ended_event(&self, (key, fencing_token): (Key, u64), confirmed: bool) {
        self.callbacks.queue_event(move |events| {
            let key = key.name();
            events.release_ended(EventLock { key, fencing_token }, confirmed);
        });
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::error::{Error, ErrorKind};
    use crate::event::EventHandler;
    use crate::util::threads::ThreadGroup;

    const ENDED: LateRelease = LateRelease::Ended { confirmed: false };

    struct Listener(Mutex<Sender<u64>>);

    impl EventHandler for Listener {
        fn release_ended(&self, lock: EventLock<'_>, _: bool) {
            self.0.lock().send(lock.fencing_token).unwrap();
        }
    }

    fn delayed() -> (LateReleases, Receiver<u64>) {
        let (told, hears) = channel();
        let listener = Arc::new(Listener(Mutex::new(told)));
        let callbacks = CallbackExecutor::start(&ThreadGroup::new(), Some(listener)).unwrap();
        (LateReleases::new(callbacks), hears)
    }

    fn hear(delayed: &LateReleases, token: u64, delays: impl IntoIterator<Item = LateRelease>) {
        let key = Key::new("", "k", 16).unwrap();
        for delay in delays {
            delayed.note(&key, token, delay);
        }
    }

    fn began() -> LateRelease {
        LateRelease::Delayed(Error::new(ErrorKind::Unavailable, ""))
    }

    #[test]
    fn queued_releases_take_no_room() {
        let (delayed, hears) = delayed();
        let open = || delayed.state.lock().open.len();
        for token in 0..1000 {
            hear(&delayed, token, [began(), LateRelease::Queued]);
        }
        assert_eq!(open(), 0);
        hear(&delayed, 0, [LateRelease::Dequeued]);
        assert_eq!(open(), 1);
        hear(&delayed, 0, [ENDED]);
        assert_eq!(
            (open(), hears.recv_timeout(Duration::from_secs(20))),
            (0, Ok(0))
        );
        delayed.callbacks.stop();
    }

    #[test]
    fn shutdown_reports_each_open_release_once() {
        let (delayed, hears) = delayed();
        for token in [1, 2] {
            hear(&delayed, token, [began(), LateRelease::Queued]);
        }
        for token in [3, 4, 5] {
            hear(&delayed, token, [began()]);
        }
        delayed.end(|| {
            // Out of the queue, into it, and done, before the queue is looked through.
            hear(&delayed, 1, [LateRelease::Dequeued]);
            hear(&delayed, 3, [LateRelease::Queued]);
            hear(&delayed, 4, [ENDED]);
            for queued in [2, 3] {
                hear(&delayed, queued, [ENDED]);
            }
            // Into the queue after that.
            hear(&delayed, 5, [LateRelease::Queued]);
        });
        hear(&delayed, 5, [LateRelease::Dequeued, ENDED]);
        delayed.callbacks.stop();
        drop(delayed);
        let mut told: Vec<u64> = hears.iter().collect();
        told.sort_unstable();
        assert_eq!(told, [1, 2, 3, 4, 5]);
    }
}
