//! A store without a server: the locks of clients in one process, for tests. Every command is carried out at
//! once on the thread that asks, and so is the telling of what it changed.

mod keyspace;
#[cfg(all(test, feature = "__server_tests"))]
#[cfg(not(shuttle))]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Error;
use crate::store::command::{Command, QueueMode, Request};
use crate::store::{Listener, Store, TrackedKey};
use crate::util::clock::Clock;
use crate::util::fork::Process;
use crate::util::id::HolderId;
use crate::util::key::KeyMap;
use crate::util::threads::ThreadGroup;

pub(crate) use keyspace::{Keyspace, Notification, Step};

/// What the clients of one memory share.
pub(crate) struct MemoryServer {
    process: Process,
    clock: Clock,
    keyspace: Mutex<Keyspace>,
    listeners: Mutex<HashMap<HolderId, Arc<dyn Listener>>>,
    /// Who looked at a key, and is told once when it changes.
    watchers: Mutex<KeyMap<Vec<HolderId>>>,
}

/// Those that have a name, as long as somebody uses them.
static NAMED: LazyLock<Mutex<HashMap<String, Weak<MemoryServer>>>> = LazyLock::new(Mutex::default);

impl MemoryServer {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            process: Process::current(),
            clock: Clock::movable(),
            keyspace: Mutex::default(),
            listeners: Mutex::default(),
            watchers: Mutex::default(),
        })
    }

    /// The one that a URL names, `memory://<name>`; without a name, a new one.
    pub(crate) fn of_url(url: &str) -> Option<Result<Arc<Self>, Error>> {
        let name = url.strip_prefix("memory://")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if let Some(found) = name.chars().find(|c| !is_plain(*c)) {
            let wanted = "memory://<name>, the name of letters, digits, '-', '_' and '.'";
            return Some(Err(Error::invalid(
                "url",
                wanted,
                format_args!("{found:?}"),
            )));
        }
        if name.is_empty() {
            return Some(Ok(Self::new()));
        }
        let mut named = NAMED.lock();
        named.retain(|_, server| server.strong_count() > 0);
        let known = named.get(name).and_then(Weak::upgrade);
        Some(Ok(known.unwrap_or_else(|| {
            let server = Self::new();
            named.insert(name.to_owned(), Arc::downgrade(&server));
            server
        })))
    }

    /// The process that made it; in a fork of that nothing of it may be touched.
    pub(crate) fn process(&self) -> Process {
        self.process
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Lets time pass at once, for this server and all its clients.
    pub(crate) fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.change(&HolderId::of_text(""), |keyspace, step| {
            keyspace.expire(step)
        });
        for listener in self.listeners() {
            listener.clock_moved();
        }
    }

    /// Forgets all locks and values, as a Redis that restarts without a copy of them.
    pub(crate) fn flush(&self) {
        self.keyspace.lock().flush();
        self.watchers.lock().clear();
        for listener in self.listeners() {
            listener.all_changed();
        }
    }

    fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        self.listeners.lock().values().cloned().collect()
    }

    /// Changes something on behalf of `by`, then tells what there is to tell.
    fn change<T>(
        &self,
        by: &HolderId,
        change: impl FnOnce(&mut Keyspace, &mut Step<'_>) -> T,
    ) -> T {
        let mut news = Vec::new();
        let mut step = Step {
            now: self.clock.now(),
            by,
            listens: &|holder| self.listeners.lock().contains_key(holder),
            news: &mut news,
        };
        let changed = change(&mut self.keyspace.lock(), &mut step);
        for one in news {
            self.tell(one);
        }
        changed
    }

    fn tell(&self, news: Notification) {
        let listener = |holder: &HolderId| self.listeners.lock().get(holder).cloned();
        match news {
            Notification::Granted {
                to,
                key,
                lease,
                grant,
            } => {
                if let Some(listener) = listener(&to) {
                    listener.granted(&key, lease, grant);
                }
            }
            Notification::Near { to, key, lease } => {
                if let Some(listener) = listener(&to) {
                    listener.near(&key, lease);
                }
            }
            Notification::Forced { to, key, lease, by } => {
                if let Some(listener) = listener(&to) {
                    listener.forced(&key, lease, by);
                }
            }
            Notification::Changed(key) => {
                let watchers = self.watchers.lock().remove(&key).unwrap_or_default();
                for holder in watchers {
                    let Some(listener) = listener(&holder) else {
                        continue;
                    };
                    if let Some(tracked) = listener.changed(&key) {
                        self.look(&holder, &*listener, &tracked);
                    }
                }
            }
        }
    }

    fn look(&self, holder: &HolderId, listener: &dyn Listener, tracked: &TrackedKey) {
        let value = self.change(holder, |keyspace, step| {
            let value = keyspace.text(&tracked.key, step);
            // One that is not there is seen to be gone, and need not be told of again. Under the lock of
            // the keys: nothing changes in between.
            if value.is_some() {
                let mut watchers = self.watchers.lock();
                let of_key = watchers.entry(tracked.key.clone()).or_default();
                if !of_key.contains(holder) {
                    of_key.push(holder.clone());
                }
            }
            value
        });
        listener.seen(tracked, value.as_deref().map(str::as_bytes));
    }
}

/// One client's way to it.
pub(crate) struct MemoryNode {
    server: Arc<MemoryServer>,
    holder: HolderId,
}

impl MemoryNode {
    pub(crate) fn new(server: Arc<MemoryServer>, holder: HolderId) -> Self {
        Self { server, holder }
    }
}

impl Store for MemoryNode {
    fn execute(&self, requests: &mut [Request]) {
        for request in requests {
            let outcome = self.server.change(&self.holder, |keyspace, step| {
                keyspace.carry_out(&request.command, step)
            });
            request.outcome = Some(outcome);
        }
    }

    fn post(&self, release: Command) {
        // Nobody waits for its answer, and there is nothing that could keep it from being done.
        let _ = self.server.change(&self.holder, |keyspace, step| {
            keyspace.carry_out(&release, step)
        });
    }

    fn listen(&self, _: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        let holder = self.holder.clone();
        self.server.listeners.lock().insert(holder, listener);
        Ok(())
    }

    fn queue_mode(&self) -> QueueMode {
        QueueMode::Notified
    }

    fn want_notifications(&self) {}

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        let Some(listener) = self.server.listeners.lock().get(&self.holder).cloned() else {
            return false;
        };
        for tracked in keys {
            self.server.look(&self.holder, &*listener, &tracked);
        }
        true
    }

    fn stop_listening(&self) {
        let gone = self.server.listeners.lock().remove(&self.holder);
        drop(gone);
    }
}
