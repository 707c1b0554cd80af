//! The keys that this client watches: the fenced value of each `Once` whose work another caller runs, and the keys of
//! observed elections ([`leaders`](crate::acquire::leaders)). The server reports a change of a watched key only if the
//! key was read after the last report.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::config::key::{Key, KeyMap};
use crate::store::{KeyState, TrackedKey};
use crate::util::sync::{Either, Mutex, either, try_send};

/// Receives the reports about one watched key. The notification thread calls these methods, so they must return
/// quickly.
pub trait Watcher: Send + Sync {
    /// The key has changed, and is not tracked any more. Returns whether the client should read the key, which tracks
    /// it again.
    fn changed(&self) -> bool;

    /// The key was read, and is tracked.
    fn seen(&self, state: KeyState<'_>);

    /// Changes may have been missed, and the key is not tracked any more. Returns whether the client should read the
    /// key, which tracks it again.
    fn missed(&self) -> bool;

    /// The client has ended, or a test has moved its clock.
    fn wake(&self);
}

/// The watchers of a client, by key.
#[derive(Default)]
pub struct Watches(Mutex<KeyMap<Vec<Arc<dyn Watcher>>>>);

impl Watches {
    pub fn add(&self, key: &Key, watcher: Arc<dyn Watcher>) {
        let mut watches = self.0.lock();
        watches.entry(key.clone()).or_default().push(watcher);
    }

    pub fn remove(&self, key: &Key, watcher: &Arc<dyn Watcher>) {
        let mut watches = self.0.lock();
        if let Some(of_key) = watches.get_mut(key) {
            of_key.retain(|other| !Arc::ptr_eq(other, watcher));
            if of_key.is_empty() {
                watches.remove(key);
            }
        }
    }

    fn of(&self, key: &Key) -> Vec<Arc<dyn Watcher>> {
        self.0.lock().get(key).cloned().unwrap_or_default()
    }

    /// Reports a change of `key`. Returns whether to read the key.
    pub fn changed(&self, key: &Key) -> bool {
        let watchers = self.of(key);
        // All watchers are told, not only those up to the first that returns true.
        watchers.iter().filter(|watcher| watcher.changed()).count() > 0
    }

    /// Reports the result of a read of `key`.
    pub fn seen(&self, key: &Key, state: KeyState<'_>) {
        self.of(key).iter().for_each(|watcher| watcher.seen(state));
    }

    /// Reports that changes of the keys for which `keys` returns true may have been missed. Returns the keys to read.
    pub fn missed(&self, keys: &dyn Fn(&Key) -> bool) -> Vec<TrackedKey> {
        let watched: Vec<_> = {
            let watches = self.0.lock();
            let watched = watches.iter().filter(|(key, _)| keys(key));
            watched
                .map(|(key, of_key)| (key.clone(), of_key.clone()))
                .collect()
        };
        let wanted = watched
            .into_iter()
            .filter(|(_, watchers)| watchers.iter().filter(|watcher| watcher.missed()).count() > 0);
        wanted
            .map(|(key, _)| TrackedKey { key, lease: None })
            .collect()
    }

    #[cfg(test)]
    #[cfg(not(shuttle))]
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Wakes all watchers.
    pub fn wake_all(&self) {
        let all: Vec<_> = self.0.lock().values().flatten().cloned().collect();
        all.iter().for_each(|watcher| watcher.wake());
    }
}

/// Wakes the thread that waits for a watched key: when the key changes, or if it exists when the server begins to track
/// it.
pub struct Bell {
    tracking: Mutex<Tracking>,
    ring: Sender<()>,
    rung: Receiver<()>,
}

/// The reason why a wait for a bell ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    Rung,
    Cancelled,
    TimedOut,
}

/// Whether the server reports the next change of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracking {
    No,
    /// A read of the key was asked for.
    Asked,
    Yes,
}

impl Bell {
    pub fn new() -> Self {
        let (ring, rung) = bounded(1);
        Self {
            tracking: Mutex::new(Tracking::No),
            ring,
            rung,
        }
    }

    /// Returns true if the caller has to track the key now.
    pub fn begin_tracking(&self) -> bool {
        let mut tracking = self.tracking.lock();
        let is_untracked = *tracking == Tracking::No;
        if is_untracked {
            *tracking = Tracking::Asked;
        }
        is_untracked
    }

    /// Whether the server reports the next change of the key.
    pub fn is_tracked(&self) -> bool {
        *self.tracking.lock() == Tracking::Yes
    }

    /// Sleeps until the bell rings or `cancel` is ready, at most for `timeout`.
    pub fn wait(&self, timeout: Duration, cancel: Option<&Receiver<()>>) -> Woken {
        let never = crossbeam_channel::never();
        match either(&self.rung, cancel.unwrap_or(&never), timeout) {
            Some(Either::First) => Woken::Rung,
            Some(Either::Second) => Woken::Cancelled,
            None => Woken::TimedOut,
        }
    }
}

impl Watcher for Bell {
    fn changed(&self) -> bool {
        *self.tracking.lock() = Tracking::No;
        try_send(&self.ring);
        // The thread then sends a claim, and tracks the key again only if it still has to wait.
        false
    }

    fn seen(&self, state: KeyState<'_>) {
        let mut tracking = self.tracking.lock();
        // If the thread of this bell has not asked for a read, its claim is under way. That claim may be older than
        // this read, which another thread has asked for.
        if *tracking == Tracking::Asked {
            *tracking = Tracking::Yes;
            // Redis does not report changes from before the read.
            if state.is_present() {
                try_send(&self.ring);
            }
        }
    }

    fn missed(&self) -> bool {
        let mut tracking = self.tracking.lock();
        if *tracking == Tracking::Yes {
            *tracking = Tracking::No;
            try_send(&self.ring);
        }
        *tracking == Tracking::Asked
    }

    fn wake(&self) {
        try_send(&self.ring);
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn watched() -> (Watches, Key, Arc<Bell>) {
        let (watches, bell) = (Watches::default(), Arc::new(Bell::new()));
        let key = Key::new("", "k", 16).unwrap();
        watches.add(&key, Arc::<Bell>::clone(&bell) as _);
        (watches, key, bell)
    }

    #[test]
    fn a_bell_rings_once_its_key_exists_or_changes() {
        let (watches, key, bell) = watched();
        assert!(bell.begin_tracking() && !bell.begin_tracking());
        watches.seen(&key, KeyState::Missing);
        assert!(bell.is_tracked());
        assert_eq!(bell.wait(NOW, None), Woken::TimedOut);
        // The thread sends a claim, so the notification thread does not read the key.
        assert!(!watches.changed(&key));
        assert_eq!(bell.wait(NOW, None), Woken::Rung);
        assert!(bell.begin_tracking());
        watches.seen(&key, KeyState::Other);
        assert_eq!(bell.wait(NOW, None), Woken::Rung);
        // A second read of a tracked key brings no news.
        watches.seen(&key, KeyState::Other);
        assert_eq!(bell.wait(NOW, None), Woken::TimedOut);
    }

    /// A second thread of the client watches the key. Its claim may have run before the first thread's read.
    #[test]
    fn the_read_of_another_thread_tracks_no_key() {
        let (watches, key, first) = watched();
        first.begin_tracking();
        let second = Arc::new(Bell::new());
        watches.add(&key, Arc::<Bell>::clone(&second) as _);
        watches.seen(&key, KeyState::Other);
        assert!(first.is_tracked() && !second.is_tracked());
        assert!(second.begin_tracking());
        watches.seen(&key, KeyState::Other);
        assert_eq!(second.wait(NOW, None), Woken::Rung);
    }

    #[test]
    fn a_new_connection_tracks_what_was_asked_for_and_rings_for_the_rest() {
        let (watches, key, bell) = watched();
        assert!(
            watches.missed(&|_| true).is_empty(),
            "nothing was asked for"
        );
        bell.begin_tracking();
        assert!(
            watches.missed(&|_| false).is_empty(),
            "the key is elsewhere"
        );
        assert_eq!(watches.missed(&|_| true).len(), 1);
        assert_eq!(bell.wait(NOW, None), Woken::TimedOut);
        watches.seen(&key, KeyState::Missing);
        assert!(watches.missed(&|_| true).is_empty());
        assert_eq!(bell.wait(NOW, None), Woken::Rung);
        assert!(bell.begin_tracking());
    }

    #[test]
    fn removed_watchers_are_forgotten() {
        let (watches, key, bell) = watched();
        let (again, watcher) = (Arc::new(Bell::new()), Arc::<Bell>::clone(&bell) as _);
        watches.add(&key, Arc::<Bell>::clone(&again) as _);
        watches.remove(&key, &watcher);
        watches.wake_all();
        assert_eq!(bell.wait(NOW, None), Woken::TimedOut);
        assert_eq!(again.wait(NOW, None), Woken::Rung);
        watches.remove(&key, &(again as _));
        assert!(watches.is_empty());
    }
}
