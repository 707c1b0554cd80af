//! A store without a server, for tests: it keeps the locks of clients in one process. The caller's thread carries out
//! each command at once, and calls the listeners.
//!
//! The store runs the models in `command/`, which specify the scripts. A property test runs generated histories of all
//! commands on a `MemoryStore` and on a real Redis, and compares replies, values, ttls and notifications. Another test
//! plants differences in the scripts, and checks that the comparison finds each of them.
//!
//! Servers in memory can be the nodes of a quorum. They share one clock, which a test can move. Each command to such a
//! node first checks the mark of the node's data, as a new connection to Redis does.

pub mod outage;
#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::command::keyspace::{Entry, Keyspace, Notification, Step, clock_micros};
use crate::command::{Command, Link, QueueMode, Release, Reply, Request, SetProgress};
use crate::config::key::Key;
use crate::config::key::KeyMap;
use crate::config::other_library::OtherLibrary;
use crate::process::fork::Process;
use crate::process::threads::ThreadGroup;
use crate::report::error::{Error, ErrorKind};
use crate::store::late_release::ReleaseTracker;
use crate::store::{
    Completion, KeyState, Listener, Notifications, Reports, Scan, ScannedKeys, ServerId, Store,
    TrackedKey, Urgency,
};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::HolderId;

use outage::{Mode, Outage, PendingRelease};

/// The clock of a server can be ahead by at most this time, so that the µs of its tokens stay in range.
const LONGEST_AHEAD: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A server in memory. Clients share it.
pub struct MemoryServer {
    process: Process,
    /// The number of this server in its reports to the listeners.
    id: ServerId,
    clock: Clock,
    /// How far the time in replies is ahead of `clock`, in µs.
    ahead: AtomicU64,
    keyspace: Mutex<Keyspace>,
    listeners: Mutex<HashMap<HolderId, Arc<dyn Listener>>>,
    /// The clients that track each key. A change of the key is reported once to each of them.
    trackers: Mutex<KeyMap<Vec<HolderId>>>,
    outage: Outage,
    /// Rises at the end of each outage, because notifications were lost during the outage.
    notification_epoch: AtomicU64,
}

/// The servers of `memory://` URLs with a name. A server exists while a client uses it.
static NAMED: LazyLock<Mutex<HashMap<String, Weak<MemoryServer>>>> = LazyLock::new(Mutex::default);

impl MemoryServer {
    pub fn new() -> Arc<Self> {
        Self::of(ServerId::ONLY, Clock::movable())
    }

    /// Makes the nodes of a quorum. They share a clock, and their data is old enough to vote.
    pub fn nodes(count: usize) -> Vec<Arc<Self>> {
        let clock = Clock::movable();
        let node = |index| {
            let server = Self::of(ServerId(index as u8), clock.clone());
            server.keyspace.lock().mark_as_old_node();
            server
        };
        (0..count).map(node).collect()
    }

    fn of(id: ServerId, clock: Clock) -> Arc<Self> {
        Arc::new(Self {
            process: Process::current(),
            id,
            clock,
            ahead: AtomicU64::new(0),
            keyspace: Mutex::default(),
            listeners: Mutex::default(),
            trackers: Mutex::default(),
            outage: Outage::default(),
            notification_epoch: AtomicU64::new(0),
        })
    }

    /// Returns the server for the URL `memory://<name>`, or a new server for a URL without a name. `None` for other
    /// URLs.
    pub fn from_url(url: &str) -> Option<Result<Arc<Self>, Error>> {
        let name = url.strip_prefix("memory://")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if let Some(found) = name.chars().find(|c| !is_plain(*c)) {
            let wanted = "memory://<name>, with a name of letters, digits, '-', '_' and '.'";
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

    /// Returns the server, or the error `Forked` in a child of the process that made it: a child must not use the
    /// server.
    pub fn live(&self) -> Result<&Self, Error> {
        self.process.check().map(|()| self)
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Moves the clock of this server and its clients ahead. Expires keys and calls the listeners.
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.handle_moved_clock();
        for listener in self.listeners() {
            listener.clock_moved();
        }
    }

    /// Moves the clock of the nodes of a quorum and of their clients ahead.
    pub fn advance_all(nodes: &[Arc<Self>], by: Duration) {
        nodes[0].clock.advance(by);
        nodes.iter().for_each(|node| node.handle_moved_clock());
        // Each client has one listener for all nodes, so the listeners of the first node are those of all clients.
        for listener in nodes[0].listeners() {
            listener.clock_moved();
        }
    }

    fn handle_moved_clock(&self) {
        self.outage.clock_moved(self.clock.now());
        self.change(&HolderId::of_text(""), |keyspace, step| {
            keyspace.expire(step)
        });
    }

    /// Sets how far the time in replies is ahead, up to [`LONGEST_AHEAD`]. Keys still expire according to the clock
    /// that all nodes share.
    pub fn set_ahead(&self, by: Duration) {
        let micros = by.min(LONGEST_AHEAD).as_micros() as u64;
        self.ahead.store(micros, Ordering::Relaxed);
    }

    /// The time of the server's clock at `now`, in µs.
    fn micros_at(&self, now: MonotonicTime) -> u64 {
        clock_micros(now) + self.ahead.load(Ordering::Relaxed)
    }

    /// Simulates a restart of the server with its data. Calls the listeners, as if their connections had ended.
    pub fn restart(&self) {
        self.change(&HolderId::of_text(""), |keyspace, step| {
            keyspace.restart(step)
        });
        self.trackers.lock().clear();
        self.notification_epoch.fetch_add(1, Ordering::AcqRel);
        if !self.outage.is_on() {
            self.notify_all_changed();
        }
    }

    /// Deletes all locks and values, as a restart of Redis without persistence does. Calls the listeners.
    pub fn flush(&self) {
        self.change(&HolderId::of_text(""), |keyspace, step| {
            keyspace.flush(step)
        });
        self.trackers.lock().clear();
        if !self.outage.is_on() {
            self.notify_all_changed();
        }
    }

    /// Deletes the key with this name in Redis. Returns true if the key existed.
    pub fn delete(&self, name: &str) -> bool {
        let was_there = self.change(&HolderId::of_text(""), |keyspace, step| {
            keyspace.delete(name, step)
        });
        // Notifies all clients, since a new holder's key may not be tracked yet.
        if was_there && !self.outage.is_on() {
            self.notify_all_changed();
        }
        was_there
    }

    /// Sets the key with this name in Redis, as another library does.
    pub fn set_foreign(&self, name: &str, expires_in: Option<Duration>) {
        let key = Key::from_full("", name);
        self.change(&HolderId::of_text(""), |keyspace, step| {
            if let Some(key) = &key {
                keyspace.set_foreign(key, expires_in, step);
            }
        });
        // Notifies all clients, since a new holder's key may not be tracked yet.
        if !self.outage.is_on() {
            self.notify_all_changed();
        }
    }

    /// Begins an outage in which each request fails at once. Notifications are lost.
    pub fn fail(&self, kind: ErrorKind) {
        self.outage.begin(Mode::Fails(kind));
    }

    /// Begins an outage in which requests get no reply. Notifications are lost.
    pub fn hang(&self) {
        self.outage.begin(Mode::Hangs);
    }

    /// Ends the outage: carries out the releases that had to wait, and makes all clients track their keys again.
    pub fn recover(&self) {
        for release in self.outage.end(self.clock.now()) {
            self.carry_out_late(release);
        }
        self.trackers.lock().clear();
        self.notification_epoch.fetch_add(1, Ordering::AcqRel);
        self.notify_all_changed();
    }

    /// Returns an error during an outage, as an attempt to connect does.
    pub fn check_reachable(&self) -> Result<(), Error> {
        self.outage.wait(&self.clock, None).map_err(|error| {
            match error.kind() {
                // No request was sent, so this is `Unavailable` and not a time-out with an unknown outcome.
                ErrorKind::Timeout => {
                    Error::new(ErrorKind::Unavailable, "no answer in time").with_source(error)
                }
                _ => error,
            }
        })
    }

    fn carry_out_late(&self, release: PendingRelease) {
        release.carry_out(|holder, command| {
            let _ = self.change(holder, |keyspace, step| keyspace.execute(command, step));
        });
    }

    fn notify_all_changed(&self) {
        for listener in self.listeners() {
            listener.all_changed(self.id);
        }
    }

    /// All keys, as Redis would store them.
    fn keys(&self) -> Vec<String> {
        let keyspace = self.keyspace.lock();
        let keys = keyspace.entries.keys();
        keys.map(|key| key.in_redis().to_owned()).collect()
    }

    fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        self.listeners.lock().values().cloned().collect()
    }

    /// Changes the keyspace in the name of the client `by`, then passes the notifications to the listeners.
    fn change<T>(
        &self,
        by: &HolderId,
        change: impl FnOnce(&mut Keyspace, &mut Step<'_>) -> T,
    ) -> T {
        self.change_as_node(by, Duration::ZERO, change)
    }

    /// The same as [`change`](Self::change), on a node of a quorum with a quarantine of this length.
    fn change_as_node<T>(
        &self,
        by: &HolderId,
        quarantine: Duration,
        change: impl FnOnce(&mut Keyspace, &mut Step<'_>) -> T,
    ) -> T {
        let mut notifications = Vec::new();
        let mut step = Step {
            now: self.clock.now(),
            by,
            quarantine,
            ahead: self.ahead.load(Ordering::Relaxed),
            listens: &|holder| self.listeners.lock().contains_key(holder),
            notifications: &mut notifications,
        };
        let changed = change(&mut self.keyspace.lock(), &mut step);
        for notification in notifications {
            self.notify(notification);
        }
        changed
    }

    fn notify(&self, notification: Notification) {
        if self.outage.is_on() {
            return;
        }
        let listener = |holder: &HolderId| self.listeners.lock().get(holder).cloned();
        match notification {
            Notification::Granted {
                to,
                key,
                lease,
                grant,
            } => {
                if let Some(listener) = listener(&to) {
                    listener.granted(self.id, &key, lease, grant);
                }
            }
            Notification::Near { to, key, lease } => {
                if let Some(listener) = listener(&to) {
                    listener.near(self.id, &key, lease);
                }
            }
            Notification::Called { to, key, lease } => {
                if let Some(listener) = listener(&to) {
                    listener.called(self.id, &key, lease);
                }
            }
            Notification::Forced { to, key, lease, by } => {
                if let Some(listener) = listener(&to) {
                    listener.forced(self.id, &key, lease, by);
                }
            }
            Notification::Changed(key) => {
                let trackers = self.trackers.lock().remove(&key).unwrap_or_default();
                for holder in trackers {
                    let Some(listener) = listener(&holder) else {
                        continue;
                    };
                    if let Some(tracked) = listener.changed(self.id, &key) {
                        self.read_and_track(&holder, &*listener, &tracked);
                    }
                }
            }
        }
    }

    /// Reads a key for `holder`, tracks the key, and passes its value to the listener.
    fn read_and_track(&self, holder: &HolderId, listener: &dyn Listener, tracked: &TrackedKey) {
        let (value, is_fenced) = self.change(holder, |keyspace, step| {
            let value = keyspace.text(&tracked.key, step);
            // The keyspace is locked, so the key does not change in between.
            let mut trackers = self.trackers.lock();
            let of_key = trackers.entry(tracked.key.clone()).or_default();
            if !of_key.contains(holder) {
                of_key.push(holder.clone());
            }
            let entry = keyspace.entries.get(&tracked.key);
            (value, matches!(entry, Some(Entry::Fenced { .. })))
        });
        let state = match is_fenced {
            true => KeyState::Other,
            false => value
                .as_deref()
                .map_or(KeyState::Missing, |text| KeyState::Text(text.as_bytes())),
        };
        listener.seen(self.id, tracked, state);
    }
}

/// A client's store on a server in memory.
pub struct MemoryNode {
    server: Arc<MemoryServer>,
    holder: HolderId,
    reports: Reports,
    /// The length of a quarantine, if the server is a node of a quorum.
    quarantine: Duration,
    /// The library whose locks the client also excludes and waits for.
    other_library: Option<OtherLibrary>,
}

impl MemoryNode {
    pub fn new(server: Arc<MemoryServer>, holder: HolderId, reports: Reports) -> Self {
        Self {
            server,
            holder,
            reports,
            quarantine: Duration::ZERO,
            other_library: None,
        }
    }

    /// Makes the client exclude the locks of another library.
    pub fn beside(mut self, other_library: Option<OtherLibrary>) -> Self {
        self.other_library = other_library;
        self
    }

    /// Makes this store a node of a quorum.
    pub fn with_quarantine(mut self, quarantine: Duration) -> Self {
        self.quarantine = quarantine;
        self
    }

    /// The node's time at `now`, in µs.
    pub fn micros_at(&self, now: MonotonicTime) -> u64 {
        self.server.micros_at(now)
    }

    /// Drops the releases of this client that wait for the end of an outage.
    pub fn drop_releases(&self) {
        self.server.outage.drop_client(&self.holder);
    }

    /// Carries out `command`. During an outage in which requests hang, waits until `deadline` for the end of the
    /// outage. If the outage makes a release fail, the server keeps the release, and carries it out when the outage
    /// ends.
    fn carry_out(
        &self,
        command: &Command,
        deadline: Option<MonotonicTime>,
    ) -> Result<Reply, Error> {
        let reached = self.server.outage.wait(&self.server.clock, deadline);
        if let Err(error) = reached {
            if let Some(release) = command.as_release() {
                let release = release.clone();
                let release = PendingRelease::new(&self.holder, release, &error, &self.reports);
                match self.server.outage.keep(release) {
                    Some(release) => self.server.carry_out_late(release),
                    None => self.reports.need_maintenance(Urgency::Soon),
                }
            }
            return Err(error);
        }
        let votes = command.script().is_some_and(|script| script.only_on_quorum);
        let reply = self
            .server
            .change_as_node(&self.holder, self.quarantine, |keyspace, step| {
                if votes {
                    // Checks the node's data, as a new connection to Redis does.
                    keyspace.check_data(step);
                }
                let outcome = keyspace.execute(command, step);
                let asks = matches!(command, Command::Acquire(_) | Command::Inspect(_));
                let key = command
                    .key()
                    .filter(|_| asks && self.other_library.is_some());
                let foreign = key.and_then(|key| keyspace.foreign(key, step.now));
                foreign.map_or(outcome, |found| Ok(Reply::Foreign(found)))
            });
        let release = command.as_release();
        let tracker = release.and_then(|it| ReleaseTracker::new(&self.reports, it, false));
        if let Some(tracker) = tracker {
            let loss = reply.as_ref().ok().and_then(|reply| {
                let now = self.server.clock.now();
                command.as_release()?.loss(reply, now)
            });
            tracker.confirm(loss, deadline.is_some());
        }
        reply
    }
}

impl Drop for MemoryNode {
    fn drop(&mut self) {
        self.drop_releases();
    }
}

impl Store for MemoryNode {
    fn execute(&self, requests: &mut [Request]) {
        let mut progress = SetProgress::default();
        for place in 0..requests.len() {
            let Request {
                command, deadline, ..
            } = &requests[place];
            let link = match command {
                Command::Acquire(acquire) => acquire.link,
                _ => Link::Alone,
            };
            let outcome = match progress.begin(link) {
                true => self.carry_out(command, Some(*deadline)),
                false => Ok(Reply::Skipped),
            };
            for undone in progress.end(link, place, &outcome) {
                if let Some(undo) = requests[undone].command.undo(self.server.clock.now()) {
                    self.send_release(undo);
                }
                requests[undone].outcome = Some(Ok(Reply::Skipped));
            }
            requests[place].outcome = Some(outcome);
        }
    }

    fn submit(&self, requests: Vec<(Command, Completion)>) {
        for (command, completion) in requests {
            match self.carry_out(&command, None) {
                // The request has no outcome before the outage ends.
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    self.server.outage.hold(completion);
                }
                outcome => {
                    let undo = command.undo(self.server.clock.now());
                    if let (Err(Ok(_)), Some(undo)) = (completion.complete(outcome), undo) {
                        self.send_release(undo);
                    }
                }
            }
        }
    }

    fn ping(&self) -> Result<Duration, Error> {
        self.server.check_reachable().map(|()| Duration::ZERO)
    }

    /// Returns all keys in one part.
    fn scan(&self, _: ServerId, scan: &Scan) -> Result<ScannedKeys, Error> {
        self.server.check_reachable()?;
        let keys = self.server.keys();
        Ok(ScannedKeys {
            keys: keys
                .into_iter()
                .filter(|key| key.starts_with(&scan.start))
                .collect(),
            next: 0,
        })
    }

    fn send_release(&self, release: Release) {
        // Callers do not wait for the reply.
        let _ = self.carry_out(&Command::Release(release), None);
    }

    fn run_maintenance(&self) -> bool {
        self.server.outage.drop_expired(self.server.clock.now());
        self.server.outage.pending(&self.holder) > 0
    }

    fn failed_releases(&self) -> usize {
        self.server.outage.pending(&self.holder)
    }

    fn flush(&self, deadline: MonotonicTime) -> Result<(), Error> {
        let outage = &self.server.outage;
        if outage.wait_for_releases(&self.holder, deadline) {
            return Ok(());
        }
        let message = "releases wait for the end of an outage of the memory store";
        Err(Error::new(ErrorKind::Unavailable, message))
    }
}

impl Notifications for MemoryNode {
    fn start(&self, _: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        let holder = self.holder.clone();
        self.server.listeners.lock().insert(holder, listener);
        Ok(())
    }

    fn queue_mode(&self, _: &Key) -> QueueMode {
        match self.other_library {
            Some(_) => QueueMode::None,
            None => QueueMode::Notified,
        }
    }

    fn free_servers(&self) -> Option<usize> {
        self.other_library.map(|_| 1)
    }

    fn request(&self, _: &Key) {}

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        if self.server.outage.is_on() {
            // The listener tracks its keys again when the outage ends.
            return false;
        }
        let Some(listener) = self.server.listeners.lock().get(&self.holder).cloned() else {
            return false;
        };
        for tracked in keys {
            self.server
                .read_and_track(&self.holder, &*listener, &tracked);
        }
        true
    }

    fn epoch(&self, _: &Key) -> u64 {
        self.server.notification_epoch.load(Ordering::Acquire)
    }

    fn stop(&self) {
        let gone = self.server.listeners.lock().remove(&self.holder);
        drop(gone);
    }
}
