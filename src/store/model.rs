//! The store of all models except the models of the pipelines. It carries out each command at once on a server in
//! memory, and delivers the notifications that Redis would send.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use std::time::Duration;

use crate::command::keyspace::Notification;
use crate::command::{Acquire, Command, ForceUnlock, QueueMode, Release, Reply, Request};
use crate::config::key::{Key, KeyMap};
use crate::process::threads::ThreadGroup;
use crate::report::error::Error;
use crate::store::{Completion, KeyState, Listener, Notifications, ServerId, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};
use crate::util::sync::model::step;
use crate::util::sync::{Condvar, Mutex};
use crate::wire::pipeline::connection::{Faults, Server as Memory};

/// The server that several clients of a model share.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

struct Shared {
    memory: Arc<Memory>,
    notices: Mutex<Notices>,
    changed: Condvar,
}

/// Notifications that were sent, but not delivered yet.
#[derive(Default)]
struct Notices {
    sent: VecDeque<(HolderId, Notice)>,
    /// The clients that track each key. A change of the key is reported once to each of them.
    trackers: KeyMap<Vec<HolderId>>,
    over: bool,
}

enum Notice {
    Notification(Notification),
    /// The client called `Notifications::track`.
    Track(TrackedKey),
    /// The connection was lost with the notifications on it, and the client has connected again.
    Reconnected,
}

impl Server {
    pub fn new() -> Self {
        Self(Arc::new(Shared {
            memory: Memory::new(Faults::default()),
            notices: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    pub fn give(&self, key: &Key, lease: LeaseId, until: MonotonicTime) {
        self.0.memory.give(key, lease, until);
    }

    pub fn take_back(&self, key: &Key, lease: LeaseId) {
        self.0.memory.take_back(key, lease);
        self.notify();
    }

    /// Takes `key` from `lease` by force, for `by`.
    pub fn force(&self, key: &Key, lease: LeaseId, by: &HolderId) {
        let key = key.clone();
        self.serve(
            by,
            &Command::ForceUnlock(ForceUnlock {
                key,
                lease,
                must_notify: false,
                share: None,
            }),
        );
    }

    /// Deletes `key`; its queue stays.
    pub fn delete(&self, key: &Key) {
        self.0.memory.delete(key);
        self.notify();
    }

    pub fn holder(&self, key: &Key) -> Option<LeaseId> {
        self.0.memory.holder(key)
    }

    /// Waits until a client is queued for `key`.
    pub fn wait_for_queue(&self, key: &Key) {
        let mut notices = self.0.notices.lock();
        while self.0.memory.queued(key) == 0 {
            self.0.changed.wait(&mut notices);
        }
    }

    /// Ends [`Direct::deliver_all`] once all notifications are delivered.
    pub fn end(&self) {
        self.0.notices.lock().over = true;
        self.0.changed.notify_all();
    }

    fn serve(&self, by: &HolderId, command: &Command) -> Reply {
        step();
        let reply = self.0.memory.serve(by, command);
        self.notify();
        reply
    }

    fn notify(&self) {
        let mut notices = self.0.notices.lock();
        for notification in self.0.memory.take_notifications() {
            let to = match &notification {
                Notification::Granted { to, .. }
                | Notification::Near { to, .. }
                | Notification::Called { to, .. }
                | Notification::Forced { to, .. } => {
                    vec![to.clone()]
                }
                Notification::Changed(key) => notices.trackers.remove(key).unwrap_or_default(),
            };
            for to in to {
                notices
                    .sent
                    .push_back((to, Notice::Notification(notification.clone())));
            }
        }
        drop(notices);
        self.0.changed.notify_all();
    }

    fn send(&self, to: &HolderId, notice: Notice) {
        let mut notices = self.0.notices.lock();
        notices.sent.push_back((to.clone(), notice));
        drop(notices);
        self.0.changed.notify_all();
    }
}

/// A client's store on the server.
pub struct Direct {
    server: Server,
    queue_mode: QueueMode,
    holder: HolderId,
    /// Leases that were released without a guard. Acquires must not use their ids.
    released: parking_lot::Mutex<HashSet<LeaseId>>,
}

impl Direct {
    pub fn new(server: &Server, queue_mode: QueueMode) -> Self {
        Self {
            server: server.clone(),
            queue_mode,
            holder: HolderId::of_this_process(),
            released: parking_lot::Mutex::default(),
        }
    }

    /// Delivers notifications to `listener` until [`Server::end`].
    pub fn deliver_all(&self, listener: &dyn Listener) {
        loop {
            let mut notices = self.server.0.notices.lock();
            let next = (notices.sent.iter()).position(|(to, _)| *to == self.holder);
            match next.and_then(|next| notices.sent.remove(next)) {
                Some((_, notice)) => {
                    drop(notices);
                    self.deliver(listener, notice);
                }
                None if notices.over => return,
                None => self.server.0.changed.wait(&mut notices),
            }
        }
    }

    fn deliver(&self, listener: &dyn Listener, notice: Notice) {
        match notice {
            Notice::Notification(Notification::Granted {
                key, lease, grant, ..
            }) => listener.granted(ServerId::ONLY, &key, lease, grant),
            Notice::Notification(Notification::Near { key, lease, .. }) => {
                listener.near(ServerId::ONLY, &key, lease)
            }
            Notice::Notification(Notification::Called { key, lease, .. }) => {
                listener.called(ServerId::ONLY, &key, lease)
            }
            Notice::Notification(Notification::Forced { key, lease, by, .. }) => {
                listener.forced(ServerId::ONLY, &key, lease, by)
            }
            Notice::Notification(Notification::Changed(key)) => {
                if let Some(tracked) = listener.changed(ServerId::ONLY, &key) {
                    self.read_and_track(listener, &tracked);
                }
            }
            Notice::Track(tracked) => self.read_and_track(listener, &tracked),
            Notice::Reconnected => listener.all_changed(ServerId::ONLY),
        }
    }

    fn read_and_track(&self, listener: &dyn Listener, tracked: &TrackedKey) {
        let mut notices = self.server.0.notices.lock();
        let trackers = notices.trackers.entry(tracked.key.clone()).or_default();
        trackers.push(self.holder.clone());
        let value = self.server.0.memory.text(&tracked.key);
        drop(notices);
        let state = value
            .as_deref()
            .map_or(KeyState::Missing, |text| KeyState::Text(text.as_bytes()));
        listener.seen(ServerId::ONLY, tracked, state);
    }

    /// Drops the notification connection and connects again.
    pub fn reconnect(&self) {
        let mut notices = self.server.0.notices.lock();
        notices.sent.retain(|(to, _)| *to != self.holder);
        for trackers in notices.trackers.values_mut() {
            trackers.retain(|tracker| *tracker != self.holder);
        }
        drop(notices);
        self.server.send(&self.holder, Notice::Reconnected);
    }
}

impl Store for Direct {
    fn ping(&self) -> Result<Duration, Error> {
        Ok(Duration::ZERO)
    }

    fn execute(&self, requests: &mut [Request]) {
        for request in requests {
            if let Command::Acquire(Acquire { lease, .. }) = &request.command {
                step();
                let is_released = self.released.lock().contains(lease);
                assert!(
                    !is_released,
                    "an acquire with a released lease id: the release may come after the grant"
                );
            }
            let reply = self.server.serve(&self.holder, &request.command);
            request.outcome = Some(Ok(reply));
        }
        step();
    }

    fn submit(&self, _: Vec<(Command, Completion)>) {
        unreachable!("no model above the stores submits");
    }

    fn send_release(&self, release: Release) {
        if release.held.is_none() {
            self.released.lock().insert(release.lease);
        }
        self.server.serve(&self.holder, &Command::Release(release));
    }
}

impl Notifications for Direct {
    fn start(&self, _: &ThreadGroup, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn queue_mode(&self, _: &Key) -> QueueMode {
        self.queue_mode
    }

    fn request(&self, _: &Key) {}

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        for tracked in keys {
            self.server.send(&self.holder, Notice::Track(tracked));
        }
        true
    }

    fn stop(&self) {}
}
