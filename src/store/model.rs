//! The store of those models that are not about the lanes: carries out each command at once, on a
//! server in memory, and brings each client the news that Redis would bring it.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use crate::clock::Moment;
use crate::error::Error;
use crate::id::{HolderId, LeaseId};
use crate::key::{Key, KeyMap};
use crate::store::link::{Faults, Server as Memory};
use crate::store::memory::News;
use crate::store::{Command, Listener, Reply, Request, Standing, Store, Watched};
use crate::sync::model::step;
use crate::sync::{Condvar, Mutex};
use crate::thread::Crew;

/// The server that several clients of a model share.
#[derive(Clone)]
pub(crate) struct Server(Arc<Shared>);

struct Shared {
    memory: Arc<Memory>,
    notices: Mutex<Notices>,
    changed: Condvar,
}

/// Messages on their way to clients.
#[derive(Default)]
struct Notices {
    sent: VecDeque<(HolderId, Notice)>,
    /// Clients that looked at a key, each told once when it changes.
    watchers: KeyMap<Vec<HolderId>>,
    over: bool,
}

enum Notice {
    News(News),
    /// The client asked to look at a key.
    Look(Watched),
    /// The connection was lost, and what was on its way with it; there is a new one.
    Reconnected,
}

impl Server {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            memory: Memory::new(Faults::default()),
            notices: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    pub(crate) fn give(&self, key: &Key, lease: LeaseId, until: Moment) {
        self.0.memory.give(key, lease, until);
    }

    pub(crate) fn take_back(&self, key: &Key, lease: LeaseId) {
        self.0.memory.take_back(key, lease);
        self.notify();
    }

    /// Ends `lease` by the will of `by`.
    pub(crate) fn force(&self, key: &Key, lease: LeaseId, by: &HolderId) {
        let key = key.clone();
        self.serve(by, &Command::ForceUnlock { key, lease });
    }

    /// Deletes `key`; its queue stays.
    pub(crate) fn delete(&self, key: &Key) {
        self.0.memory.delete(key);
        self.notify();
    }

    pub(crate) fn holder(&self, key: &Key) -> Option<LeaseId> {
        self.0.memory.holder(key)
    }

    /// There will be no more news.
    pub(crate) fn end(&self) {
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
        for news in self.0.memory.news() {
            let to = match &news {
                News::Granted { to, .. } | News::Near { to, .. } | News::Forced { to, .. } => {
                    vec![to.clone()]
                }
                News::Changed(key) => notices.watchers.remove(key).unwrap_or_default(),
            };
            for to in to {
                notices.sent.push_back((to, Notice::News(news.clone())));
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

/// One client's way to it.
pub(crate) struct Direct {
    server: Server,
    standing: Standing,
    holder: HolderId,
    /// Leases that were given back: nothing is to be asked under them.
    given_back: parking_lot::Mutex<HashSet<LeaseId>>,
}

impl Direct {
    pub(crate) fn new(server: &Server, standing: Standing) -> Self {
        Self {
            server: server.clone(),
            standing,
            holder: HolderId::of_this_process(),
            given_back: parking_lot::Mutex::default(),
        }
    }

    /// Brings `listener` its news until there will be no more.
    pub(crate) fn hear(&self, listener: &dyn Listener) {
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
            Notice::News(News::Granted {
                key, lease, grant, ..
            }) => listener.granted(&key, lease, grant),
            Notice::News(News::Near { key, lease, .. }) => listener.near(&key, lease),
            Notice::News(News::Forced { key, lease, by, .. }) => listener.forced(&key, lease, by),
            Notice::News(News::Changed(key)) => {
                if let Some(watched) = listener.changed(&key) {
                    self.look(listener, &watched);
                }
            }
            Notice::Look(watched) => self.look(listener, &watched),
            Notice::Reconnected => listener.all_changed(),
        }
    }

    fn look(&self, listener: &dyn Listener, watched: &Watched) {
        let mut notices = self.server.0.notices.lock();
        let watchers = notices.watchers.entry(watched.key.clone()).or_default();
        watchers.push(self.holder.clone());
        let value = self.server.0.memory.text(&watched.key);
        drop(notices);
        listener.seen(watched, value.as_deref().map(str::as_bytes));
    }

    /// Loses the connection that brings the news, and gets another one.
    pub(crate) fn reconnect(&self) {
        let mut notices = self.server.0.notices.lock();
        notices.sent.retain(|(to, _)| *to != self.holder);
        for watchers in notices.watchers.values_mut() {
            watchers.retain(|watcher| *watcher != self.holder);
        }
        drop(notices);
        self.server.send(&self.holder, Notice::Reconnected);
    }
}

impl Store for Direct {
    fn execute(&self, requests: &mut [Request]) {
        for request in requests {
            if let Command::Acquire { lease, .. } = &request.command {
                step();
                let is_given_back = self.given_back.lock().contains(lease);
                assert!(!is_given_back, "its release may come after its grant");
            }
            let reply = self.server.serve(&self.holder, &request.command);
            request.outcome = Some(Ok(reply));
        }
        step();
    }

    fn post(&self, release: Command) {
        if let Command::Release {
            lease, held: None, ..
        } = &release
        {
            self.given_back.lock().insert(*lease);
        }
        self.server.serve(&self.holder, &release);
    }

    fn listen(&self, _: &Crew, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn standing(&self) -> Standing {
        self.standing
    }

    fn want_wakeups(&self) {}

    fn watch(&self, keys: Vec<Watched>) -> bool {
        for watched in keys {
            self.server.send(&self.holder, Notice::Look(watched));
        }
        true
    }

    fn stop_listening(&self) {}
}
