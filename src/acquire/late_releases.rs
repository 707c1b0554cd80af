//! Reports late releases to the event handler. Each release that was reported as delayed is later reported as ended, at
//! the latest when the client ends. Also reports a lock as lost if its release did not find it and no caller gets that
//! reply: the guard was dropped, or its `unlock` had ended before. Does no I/O; queues callbacks.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lease::CallbackExecutor;
use crate::report::event::EventLock;
use crate::store::LateRelease;
use crate::util::key::Key;

pub struct LateReleases {
    callbacks: Arc<CallbackExecutor>,
    /// Events are queued under this mutex, so that they keep their order.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The late releases that are in flight, by key and fencing token. The requests in flight are bounded, so this set
    /// is bounded, too. Late releases that are not in flight are in the queues of the pipelines. On a quorum, this set
    /// also has the late releases in the nodes' queues, which are bounded.
    open: HashSet<(Key, u64)>,
    /// The client is ending. Now a release that goes back to a pipeline's queue stays in `open`, so that its end is
    /// reported.
    ending: bool,
    ended: bool,
}

impl LateReleases {
    pub fn new(callbacks: Arc<CallbackExecutor>) -> Self {
        Self {
            callbacks,
            state: Mutex::default(),
        }
    }

    /// Records what a pipeline reports about a late release, and queues the events.
    pub fn note(&self, key: &Key, token: u64, delay: LateRelease) {
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
            LateRelease::Lost(reason) => self.callbacks.queue_loss(key, token, reason),
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

    /// Reports all late releases as given up when the client ends, and reports nothing afterwards. `end_queued` makes
    /// the pipelines report the late releases that wait to be written.
    pub fn end(&self, end_queued: impl FnOnce()) {
        self.state.lock().ending = true;
        end_queued();
        let mut state = self.state.lock();
        state.ended = true;
        for release in std::mem::take(&mut state.open) {
            self.queue_ended_event(release, false);
        }
    }

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
    use crate::report::error::{Error, ErrorKind};
    use crate::report::event::EventHandler;
    use crate::util::threads::ThreadGroup;

    const ENDED: LateRelease = LateRelease::Ended { confirmed: false };

    struct Listener(Mutex<Sender<u64>>);

    impl EventHandler for Listener {
        fn release_ended(&self, lock: EventLock<'_>, _: bool) {
            self.0.lock().send(lock.fencing_token).unwrap();
        }
    }

    fn late_releases() -> (LateReleases, Receiver<u64>) {
        let (sender, events) = channel();
        let listener = Arc::new(Listener(Mutex::new(sender)));
        let callbacks = CallbackExecutor::start(&ThreadGroup::new(), Some(listener)).unwrap();
        (LateReleases::new(callbacks), events)
    }

    fn note_all(
        releases: &LateReleases,
        token: u64,
        delays: impl IntoIterator<Item = LateRelease>,
    ) {
        let key = Key::new("", "k", 16).unwrap();
        for delay in delays {
            releases.note(&key, token, delay);
        }
    }

    fn delayed() -> LateRelease {
        LateRelease::Delayed(Error::new(ErrorKind::Unavailable, ""))
    }

    #[test]
    fn queued_releases_take_no_room() {
        let (releases, events) = late_releases();
        let open = || releases.state.lock().open.len();
        for token in 0..1000 {
            note_all(&releases, token, [delayed(), LateRelease::Queued]);
        }
        assert_eq!(open(), 0);
        note_all(&releases, 0, [LateRelease::Dequeued]);
        assert_eq!(open(), 1);
        note_all(&releases, 0, [ENDED]);
        assert_eq!(
            (open(), events.recv_timeout(Duration::from_secs(20))),
            (0, Ok(0))
        );
        releases.callbacks.stop();
    }

    #[test]
    fn shutdown_reports_each_open_release_once() {
        let (releases, events) = late_releases();
        for token in [1, 2] {
            note_all(&releases, token, [delayed(), LateRelease::Queued]);
        }
        for token in [3, 4, 5] {
            note_all(&releases, token, [delayed()]);
        }
        releases.end(|| {
            // Before the pipeline reports its queue, release 1 leaves the queue, release 3 enters it, and release 4
            // ends.
            note_all(&releases, 1, [LateRelease::Dequeued]);
            note_all(&releases, 3, [LateRelease::Queued]);
            note_all(&releases, 4, [ENDED]);
            for queued in [2, 3] {
                note_all(&releases, queued, [ENDED]);
            }
            // Release 5 enters the queue after the pipeline has reported it.
            note_all(&releases, 5, [LateRelease::Queued]);
        });
        note_all(&releases, 5, [LateRelease::Dequeued, ENDED]);
        releases.callbacks.stop();
        drop(releases);
        let mut ended: Vec<u64> = events.iter().collect();
        ended.sort_unstable();
        assert_eq!(ended, [1, 2, 3, 4, 5]);
    }
}
