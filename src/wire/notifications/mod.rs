//! The notification connection of a client, and the thread that reads from it. The thread connects when the first
//! caller has to wait, or when a lock is tracked. Keys are read on this connection only to track them; scripts run on
//! other connections.
//!
//! # Two kinds of notifications
//!
//! A script publishes a *message* about one lease of this client on the client's channel:
//!
//! | message | meaning |
//! |---|---|
//! | `<lease> <µs> <key>` | the lease was granted the key, under the token of these µs. `?` before them asks the client to confirm the grant |
//! | `<start> ~ <key>` | the lease is now one of the first in the queue (lua/near.lua) |
//! | `<start> = <key>` | the lease has to send a request at once, or it loses its place (lua/roll_call.lua) |
//! | `<start> !<holder> <key>` | the client `<holder>` took the lock away by force |
//!
//! `<start>` is the first half of the lease id. The key comes last, because it may contain spaces.
//!
//! The server reports a *change* (`CLIENT TRACKING`) when a key that was read on this connection is written, deleted,
//! evicted or expires. Afterwards the key is not tracked until it is read again. The client tracks the keys of leases
//! that it has held for some time, and the keys in whose queue it is one of the first two. Each further client that
//! tracked a key would cost one request for each change.
//!
//! Both kinds are hints, because every wait has a bound and other users may publish messages, too. Only the message of
//! a grant is a proof: it contains the whole lease id, which was secret until the grant. `acquire::notify` decides what
//! a notification means for a lock.
//!
//! # Changes
//!
//! The thread reads the first 256 bytes of a changed key, which tracks the key again. Then it wakes the first waiter,
//! or reports a loss. Beside another library, whose lock may be an empty string, the thread asks with a second command
//! whether a key that reads as empty exists. In a lock of Redisson, the thread looks for the field of the lease. An old
//! primary or a replica may have answered this read, so a renewal worker confirms each loss through a pipeline before
//! the lease ends. After a flush of Redis, and on a new connection, the thread wakes the first waiter of every key and
//! reads all held keys.
//!
//! # Servers that refuse
//!
//! If the server refuses tracking or RESP3, the connection has messages only: renewals find losses. If it refuses
//! subscriptions, waiters poll. A server that closes several connections in a row at the same stage counts as one that
//! refuses. Waiters of a quorum, and beside another library, need changes, so a server without tracking counts as one
//! that refuses.

pub mod message;
pub mod subscription;
#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use redis::{PushKind, Value};

use crate::command::{QueueMode, redisson};
use crate::config::key::{Key, channel, fence_counter};
use crate::config::other_library::OtherLibrary;
use crate::process::threads::ThreadGroup;
use crate::report::error::{Error, ErrorKind};
use crate::store::{KeyState, Listener, Report, ServerId, TrackedKey};
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::wire::connect::connection::REPLACE_AGAIN;
use crate::wire::connect::epoch::ConnectionEpoch;
use crate::wire::endpoint::Endpoint;
use crate::wire::net::refusal::refuses_command;
use crate::wire::net::replies::TOO_LARGE;
use crate::wire::net::socket::{Closer, Sender, Sockets};
use crate::wire::scripts;

use message::{Message, MessageKind};
use subscription::Subscription;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A connection with a shorter life does not reset the pause. Otherwise a server or a proxy that closes each connection
/// at once would get a new connection every few milliseconds.
const SHORTEST_LIFE: Duration = Duration::from_secs(1);
/// A proxy may close the connection at a command that it does not know. After this many such ends in a row, the command
/// counts as refused, and the pauses grow to [`REFUSED_PAUSE`]. (A server may also close a connection because too many
/// bytes wait on it. So after fewer such ends, the pauses stay short.)
const MOST_CLOSED_LATE: u32 = 3;
/// The effect of a server that refuses notifications, for the event.
const REFUSED: &str = "until then, waiters poll, and renewals find lost locks";
/// The effect of a server that sends messages, but does not report changes of keys.
const UNTRACKED: &str =
    "until then, waiters are notified of their grants, but only renewals find lost locks";
/// The pause after a server has refused notifications.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// A PING checks a connection that was silent for this long, or for half of `max_connection_idle`. A thousand waiting
/// clients send a hundred PINGs per second.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// The least time between two reads of changed keys. If the server's tracking table is too small, each read causes
/// another report of a change.
const BETWEEN_READS: Duration = Duration::from_millis(10);
/// The index of the last byte of a key that is read. Values of locks are shorter. But another user may write a value of
/// 512 MB, and Redis closes a subscribed connection on which 32 MB wait.
const LAST_BYTE: &str = "255";
/// The most keys read by one write.
const MAX_KEYS: usize = 256;
/// At most this many writes have no reply. Beyond that, the client closes the connection, and waiters poll until the
/// next one is open.
const MAX_UNANSWERED: usize = 16_384;
/// At most this many keys have an unsent read, or a read without a reply. Beyond that, the client closes the
/// connection. A server that reports changes of one key without end reaches this bound.
const MAX_KEYS_UNANSWERED: usize = 65_536;

/// The notification connection of a client.
pub struct NotificationConnection {
    server: ServerId,
    endpoint: Arc<Endpoint>,
    channel: String,
    /// The shard channel of the server, if it is a node of a Cluster: see `ScriptContext::set_shard_slot`.
    shard_channel: Mutex<Option<String>>,
    prefix: String,
    /// Set if the locks are those of Redisson: the holder, which their fields name.
    redisson_holder: Option<HolderId>,
    timeout: Duration,
    /// One of the stages below. It is read without the mutex of `state`.
    stage: AtomicU8,
    /// See `Notifications::epoch`.
    epoch: AtomicU64,
    /// Locked during writes to the socket, so that replies come in the order of `unanswered`.
    state: Mutex<ConnectionState>,
    changed: Condvar,
    /// Set when the client suspects this connection, until a PING is written. If another thread has locked `state`,
    /// that thread writes the PING when it unlocks `state`: see [`StateGuard`].
    is_ping_wanted: AtomicBool,
    /// The sockets to servers, which `stop` and a switch close. They have their own mutex, because a thread whose write
    /// blocks has locked `state`, and only the close of its socket ends the write.
    sockets: Mutex<ServerSockets>,
    /// The sockets to sentinels.
    queries: Sockets,
}

#[derive(Default)]
struct ServerSockets {
    stopped: bool,
    open: Vec<(Closer, ConnectionEpoch)>,
}

/// The locked state. The drop unlocks it, and then writes the PING that a suspicion has asked for in the meantime. So a
/// suspicion never waits for the write of another thread.
struct StateGuard<'a> {
    notifications: &'a NotificationConnection,
    /// `None` in the drop only.
    state: Option<MutexGuard<'a, ConnectionState>>,
}

impl Deref for StateGuard<'_> {
    type Target = ConnectionState;

    fn deref(&self) -> &ConnectionState {
        self.state.as_ref().expect("unlocked in the drop only")
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut ConnectionState {
        self.state.as_mut().expect("unlocked in the drop only")
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        drop(self.state.take());
        self.notifications.write_wanted_ping();
    }
}

/// Stage: the first connection is being made, or was not needed yet.
const NOT_CONNECTED_YET: u8 = 0;
/// Stage: the connection is open and trusted.
const LISTENING: u8 = 1;
/// Stage: the server refuses notifications, or the connection is broken or suspect.
const AWAY: u8 = 2;

#[derive(Default)]
struct ConnectionState {
    is_wanted: bool,
    stopped: bool,
    sender: Option<Sender>,
    /// Whether the server reports changes of the keys that are read. If not, keys are not read.
    tracks: bool,
    /// When the connection of `sender` was opened.
    opened_at: Option<MonotonicTime>,
    /// The writes without a reply and when each was sent, in the order in which the replies come.
    unanswered: VecDeque<(MonotonicTime, SentCommand)>,
    /// How many keys the writes in `unanswered` read.
    keys_unanswered: usize,
    /// Keys to read with the next write, at most `MAX_KEYS_UNANSWERED`. Redis reports a change of a key once, and then
    /// only after the key was read again.
    to_read: Vec<TrackedKey>,
    /// When changed keys were last read.
    read_at: Option<MonotonicTime>,
}

impl ConnectionState {
    fn has_room(&self) -> bool {
        self.unanswered.len() < MAX_UNANSWERED
            && self.keys_unanswered + self.to_read.len() <= MAX_KEYS_UNANSWERED
    }

    /// Takes the command that the next reply belongs to.
    fn take_answered(&mut self) -> Option<ExpectedReply> {
        let (_, command) = self.unanswered.front_mut()?;
        let answered = match command {
            SentCommand::Read(keys) => {
                self.keys_unanswered -= 1;
                ExpectedReply::Read(keys.pop_front()?)
            }
            SentCommand::Ping => ExpectedReply::Ping,
            SentCommand::Subscribe => ExpectedReply::Subscribe,
        };
        if command.keys() == 0 {
            self.unanswered.pop_front();
        }
        Some(answered)
    }

    /// How long ago the last connection was opened.
    fn open_for(&self) -> Duration {
        let opened_at = self.opened_at;
        opened_at.map_or(Duration::ZERO, |at| MonotonicTime::now().since(at))
    }

    /// How long ago the oldest command without a reply was sent.
    fn unanswered_for(&self) -> Option<Duration> {
        let (at, _) = self.unanswered.front()?;
        Some(MonotonicTime::now().since(*at))
    }

    fn forget_commands(&mut self) {
        self.unanswered.clear();
        self.keys_unanswered = 0;
        self.to_read.clear();
    }
}

/// Why `listen` returned.
enum ListenEnd {
    Broken,
    /// The connection works, but may lead to an old primary.
    Suspect,
    /// The connection works, but is older than `max_connection_age`.
    Old,
}

enum SentCommand {
    /// Keys, each with a command of its own.
    Read(VecDeque<TrackedKey>),
    Ping,
    /// A subscription to a shard channel, which the server may refuse.
    Subscribe,
}

/// The command that a reply belongs to.
enum ExpectedReply {
    Read(TrackedKey),
    Ping,
    Subscribe,
}

impl SentCommand {
    fn keys(&self) -> usize {
        match self {
            Self::Read(keys) => keys.len(),
            Self::Ping | Self::Subscribe => 0,
        }
    }
}

impl NotificationConnection {
    pub fn new(
        server: ServerId,
        endpoint: Arc<Endpoint>,
        holder: &HolderId,
        prefix: &str,
        timeout: Duration,
    ) -> Self {
        let other = endpoint.other_library;
        let is_for_redisson = other.is_some_and(OtherLibrary::is_redisson);
        Self {
            server,
            endpoint,
            channel: channel(prefix, holder),
            shard_channel: Mutex::default(),
            prefix: prefix.to_owned(),
            redisson_holder: is_for_redisson.then(|| holder.clone()),
            timeout,
            stage: AtomicU8::new(NOT_CONNECTED_YET),
            epoch: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            is_ping_wanted: AtomicBool::new(false),
            sockets: Mutex::default(),
            queries: Sockets::default(),
        }
    }

    /// Starts the thread, which connects after [`request_connection`](Self::request_connection) or
    /// [`track`](Self::track).
    pub fn start(
        self: &Arc<Self>,
        threads: &ThreadGroup,
        listener: Arc<dyn Listener>,
    ) -> Result<(), Error> {
        let notifications = Arc::clone(self);
        threads.spawn("leasehold-notifications", move || {
            notifications.run(&*listener)
        })
    }

    /// How a waiter joins a queue. If the connection is open, Redis notifies the waiter of its grant.
    pub fn queue_mode(&self) -> QueueMode {
        match self.stage.load(Ordering::Acquire) {
            LISTENING => QueueMode::Notified,
            // The first connection will be open soon, so the waiter joins the queue with its next request.
            NOT_CONNECTED_YET => QueueMode::None,
            _ => QueueMode::Polling,
        }
    }

    /// Counts connections and reported flushes: see `Notifications::epoch`.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Makes the thread open the first connection.
    pub fn request_connection(&self) {
        if self.stage.load(Ordering::Acquire) == NOT_CONNECTED_YET {
            self.set_wanted(&mut self.lock_state());
        }
    }

    /// Writes reads of the keys in `tracked` to the socket. The server then reports changes of these keys, unless it
    /// refuses tracking. Returns false if there is no connection: [`Listener::all_changed`] is called once there is
    /// one.
    pub fn track(&self, tracked: Vec<TrackedKey>) -> bool {
        let mut state = self.lock_state();
        if state.sender.is_none() {
            self.set_wanted(&mut state);
            return false;
        }
        if !state.tracks {
            return true;
        }
        state.to_read.extend(tracked);
        self.send_reads(&mut state);
        state.sender.is_some()
    }

    fn lock_state(&self) -> StateGuard<'_> {
        StateGuard {
            notifications: self,
            state: Some(self.state.lock()),
        }
    }

    /// Marks the connection as suspect, and writes a PING, which wakes the thread. Waiters poll until the thread has
    /// replaced the connection. A connection to an old primary, which may be frozen, is closed. Never waits for a
    /// write: if another thread writes, that thread then writes the PING.
    pub fn suspect(&self) {
        let trusted =
            self.stage
                .compare_exchange(LISTENING, AWAY, Ordering::SeqCst, Ordering::SeqCst);
        let epoch = self.endpoint.epoch();
        for (socket, made_in) in &self.sockets.lock().open {
            if epoch.is_outdated(made_in) {
                // The close ends a write that blocks, and wakes the thread.
                socket.close();
            }
        }
        if trusted.is_ok() {
            // The reply to the PING wakes the thread.
            self.is_ping_wanted.swap(true, Ordering::SeqCst);
            self.write_wanted_ping();
        }
    }

    /// Writes a PING if `is_ping_wanted` is set and the state is not locked.
    ///
    /// `suspect` calls this after it has set `is_ping_wanted`, and each [`StateGuard`] calls it after its unlock. Both
    /// write the atomic: either `suspect` comes later and finds the state unlocked, or the guard comes later and finds
    /// `is_ping_wanted` set.
    fn write_wanted_ping(&self) {
        while self.is_ping_wanted.fetch_or(false, Ordering::SeqCst) {
            let Some(mut state) = self.state.try_lock() else {
                return;
            };
            if self.is_ping_wanted.swap(false, Ordering::SeqCst) && state.sender.is_some() {
                // A frozen server does not read, so this write must not wait.
                self.ping(&mut state, MonotonicTime::now());
            }
        }
    }

    /// Sets the shard channel of the server. The client stays subscribed to earlier shard channels until their slots
    /// move away.
    pub fn set_shard_channel(&self, channel: Option<String>) {
        let mut state = self.lock_state();
        let mut current = self.shard_channel.lock();
        if *current != channel {
            *current = channel;
            drop(current);
            self.subscribe_to_shard(&mut state);
        }
    }

    /// Subscribes to the shard channel, if there is one. Without it, messages come on the plain channel.
    fn subscribe_to_shard(&self, state: &mut ConnectionState) {
        let channel = self.shard_channel.lock().clone();
        if let Some(channel) = channel.filter(|_| state.sender.is_some()) {
            let mut bytes = Vec::new();
            scripts::encode_words(&mut bytes, "SSUBSCRIBE", [&*channel].into_iter());
            self.send(state, &bytes, SentCommand::Subscribe);
        }
    }

    fn ping(&self, state: &mut ConnectionState, deadline: MonotonicTime) {
        let mut bytes = Vec::new();
        scripts::encode_words(&mut bytes, "PING", std::iter::empty());
        self.send_by(deadline, state, &bytes, SentCommand::Ping);
    }

    /// Ends the thread and closes its sockets, so that only an attempt to connect can delay its end.
    pub fn stop(&self) {
        self.queries.close();
        let mut sockets = self.sockets.lock();
        sockets.stopped = true;
        sockets
            .open
            .drain(..)
            .for_each(|(socket, _)| socket.close());
        drop(sockets);
        let mut state = self.lock_state();
        state.stopped = true;
        self.disconnect(&mut state);
        self.changed.notify_all();
    }

    fn set_wanted(&self, state: &mut ConnectionState) {
        if !state.is_wanted {
            state.is_wanted = true;
            self.changed.notify_all();
        }
    }

    /// Closes the connection and forgets its commands.
    fn disconnect(&self, state: &mut ConnectionState) {
        if let Some(sender) = state.sender.take() {
            sender.closer().close();
        }
        state.forget_commands();
        self.stage.store(AWAY, Ordering::Release);
    }

    /// Writes reads of the keys that have changed, unless such reads were written less than [`BETWEEN_READS`] ago.
    /// Returns how long to wait for further notifications, at most until the connection has to be replaced.
    fn send_due_reads(&self, made_in: &ConnectionEpoch, heartbeat: Duration) -> Duration {
        let mut state = self.lock_state();
        let now = MonotonicTime::now();
        let replace_at = self.endpoint.epoch().replace_at(made_in);
        let heartbeat = replace_at.map_or(heartbeat, |at| {
            at.since(now).clamp(Duration::from_millis(1), heartbeat)
        });
        if state.to_read.is_empty() {
            return heartbeat;
        }
        let due = state.read_at.map_or(now, |at| at.after(BETWEEN_READS));
        if now < due {
            return due.since(now).max(Duration::from_millis(1));
        }
        state.read_at = Some(now);
        self.send_reads(&mut state);
        heartbeat
    }

    /// Writes reads of all keys in `to_read`.
    fn send_reads(&self, state: &mut ConnectionState) {
        while !state.to_read.is_empty() {
            let n = state.to_read.len().min(MAX_KEYS);
            let keys: Vec<TrackedKey> = state.to_read.drain(..n).collect();
            self.send_read(state, keys);
        }
    }

    /// Reads each key with its own command, so that a key that an ACL forbids does not affect the other keys.
    fn send_read(&self, state: &mut ConnectionState, keys: Vec<TrackedKey>) {
        let mut bytes = Vec::with_capacity(128 * keys.len());
        for tracked in &keys {
            let key = tracked.key.in_redis();
            match (&self.redisson_holder, tracked.lease) {
                (None, _) => {
                    let words = [key, "0", LAST_BYTE];
                    scripts::encode_words(&mut bytes, "GETRANGE", words.into_iter());
                }
                (Some(_), None) => {
                    scripts::encode_words(&mut bytes, "EXISTS", [key].into_iter());
                }
                (Some(holder), Some(lease)) => {
                    let field = redisson::field(&lease.to_string(), holder).concat();
                    scripts::encode_words(&mut bytes, "HEXISTS", [key, &field].into_iter());
                }
            }
        }
        self.send(state, &bytes, SentCommand::Read(keys.into()));
    }

    /// Asks whether a key exists, which also tracks it.
    fn send_exists(&self, tracked: TrackedKey) {
        let mut bytes = Vec::new();
        scripts::encode_words(&mut bytes, "EXISTS", [tracked.key.in_redis()].into_iter());
        let command = SentCommand::Read([tracked].into());
        self.send(&mut self.lock_state(), &bytes, command);
    }

    /// Writes a command to the socket. If that fails, or if too many commands have no reply, closes the connection.
    fn send(&self, state: &mut ConnectionState, bytes: &[u8], command: SentCommand) {
        let deadline = MonotonicTime::now().after(self.timeout);
        self.send_by(deadline, state, bytes, command);
    }

    fn send_by(
        &self,
        deadline: MonotonicTime,
        state: &mut ConnectionState,
        bytes: &[u8],
        command: SentCommand,
    ) {
        let has_room = state.has_room();
        let Some(sender) = &mut state.sender else {
            state.to_read.clear();
            return;
        };
        let now = MonotonicTime::now();
        if has_room && sender.send(bytes, deadline).is_ok() {
            state.keys_unanswered += command.keys();
            state.unanswered.push_back((now, command));
        } else {
            self.disconnect(state);
        }
    }

    /// Registers the socket of a connection that was begun at `made_in`, so that `stop` and `suspect` can close it.
    /// After `stop` or a switch, closes the socket and returns an error.
    fn register_socket(&self, socket: Closer, made_in: &ConnectionEpoch) -> Result<(), Error> {
        let mut sockets = self.sockets.lock();
        // A later switch finds the registered socket.
        if sockets.stopped || self.endpoint.epoch().is_outdated(made_in) {
            socket.close();
            let message = "the connection is not needed any more";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        sockets.open.retain(|(open, _)| open.is_open());
        sockets.open.push((socket, *made_in));
        Ok(())
    }

    fn run(&self, listener: &dyn Listener) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut is_reported = false;
        let mut closed_late = 0;
        // This connection is used until the next one is open.
        let mut old: Option<(Subscription, ConnectionEpoch)> = None;
        while self.wait_until_wanted() {
            let opened = Subscription::open(
                &self.endpoint,
                &self.channel,
                &fence_counter(&self.prefix),
                self.timeout,
                &self.queries,
                |socket, made_in| self.register_socket(socket, made_in),
            );
            let now = MonotonicTime::now();
            let (mut subscription, made_in, replace_at) = match (opened, old.take()) {
                (Ok(opened), _) => {
                    let tracks = opened.untracked.is_none();
                    if !self.install(opened.sender, &opened.made_in, tracks) {
                        return;
                    }
                    closed_late = 0;
                    // Reported before the first notification is handled, so the event comes before that of a loss.
                    match opened.untracked {
                        None => is_reported = false,
                        Some(error) if !std::mem::replace(&mut is_reported, true) => {
                            self.report_refusal(error.followed_by(UNTRACKED));
                        }
                        Some(_) => {}
                    }
                    listener.all_changed(self.server);
                    let replace_at = self.endpoint.limits.replace_at(now);
                    (opened.subscription, opened.made_in, replace_at)
                }
                (Err(_), Some((subscription, made_in))) => {
                    (subscription, made_in, now.after(REPLACE_AGAIN))
                }
                (Err(failure), None) => {
                    self.disconnect(&mut self.lock_state());
                    self.endpoint.epoch().call_failure_hook();
                    closed_late = if failure.is_closed_late {
                        closed_late + 1
                    } else {
                        0
                    };
                    let is_refused = !failure.error.is_unavailable();
                    let counts_as_refused = is_refused || closed_late >= MOST_CLOSED_LATE;
                    if counts_as_refused && !std::mem::replace(&mut is_reported, true) {
                        self.report_refusal(failure.error.followed_by(REFUSED));
                    }
                    if is_refused {
                        self.sleep(REFUSED_PAUSE);
                    } else if counts_as_refused {
                        self.sleep(backoff.next_within(REFUSED_PAUSE));
                    } else {
                        self.sleep(backoff.next());
                    }
                    continue;
                }
            };
            let ended = self.listen(&mut subscription, &made_in, replace_at, listener);
            if self.lock_state().open_for() >= SHORTEST_LIFE {
                backoff.reset();
            }
            match ended {
                ListenEnd::Broken => {
                    self.disconnect(&mut self.lock_state());
                    self.sleep(backoff.next());
                }
                // The suspect connection stays open until the next one is open, so that scripts on its server always
                // find a subscriber.
                ListenEnd::Suspect => {}
                ListenEnd::Old => old = Some((subscription, made_in)),
            }
        }
    }

    fn report_refusal(&self, error: Error) {
        let refused = Report::NotificationsRefused(error);
        self.endpoint.reports.send(refused);
    }

    /// Sleeps until a connection is needed. Returns false once stopped.
    fn wait_until_wanted(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_wanted && !state.stopped {
            self.changed.wait(&mut state);
        }
        !state.stopped
    }

    fn sleep(&self, pause: Duration) {
        let is_running = |state: &mut ConnectionState| !state.stopped;
        self.changed
            .wait_while_for(&mut self.state.lock(), is_running, pause);
    }

    /// Makes `sender` the current connection, and closes the suspect or old one that it replaces. Returns false after
    /// `stop`.
    fn install(&self, sender: Sender, made_in: &ConnectionEpoch, tracks: bool) -> bool {
        let mut state = self.lock_state();
        if state.stopped {
            return false;
        }
        if let Some(replaced) = state.sender.replace(sender) {
            replaced.closer().close();
        }
        state.opened_at = Some(MonotonicTime::now());
        state.tracks = tracks;
        // No further replies come on the replaced connection. `all_changed` makes the listener track its keys again.
        state.forget_commands();
        self.subscribe_to_shard(&mut state);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        self.stage.store(LISTENING, Ordering::SeqCst);
        // Finds a suspicion from before LISTENING was set. For a later one, `suspect` sets AWAY.
        if self.endpoint.epoch().replace_at(made_in).is_some() {
            self.stage.store(AWAY, Ordering::SeqCst);
        }
        true
    }

    /// Handles notifications until the connection breaks or has to be replaced, because of a suspicion or at
    /// `replace_at`.
    fn listen(
        &self,
        subscription: &mut Subscription,
        made_in: &ConnectionEpoch,
        replace_at: MonotonicTime,
        listener: &dyn Listener,
    ) -> ListenEnd {
        let epoch = self.endpoint.epoch();
        // The thread wakes in each tick, so it finds a suspicion within this time.
        let tick = (2 * self.timeout).clamp(Duration::from_secs(1), HEARTBEAT);
        // Keeps the network from forgetting the connection.
        let heartbeat = HEARTBEAT.min(self.endpoint.limits.max_idle / 2);
        let mut last_received = MonotonicTime::now();
        while !epoch.is_due(made_in) {
            if replace_at <= MonotonicTime::now() {
                return ListenEnd::Old;
            }
            let next = subscription.next(|| {
                let old_in = replace_at.since(MonotonicTime::now());
                let longest = tick.min(heartbeat);
                let longest = old_in.clamp(Duration::from_millis(1), longest);
                self.send_due_reads(made_in, longest)
            });
            match next {
                Ok(value) => {
                    last_received = MonotonicTime::now();
                    let is_not_primary = scripts::is_refused_by_non_primary(&value);
                    let is_refused = matches!(value, Value::ServerError(_));
                    if !self.handle(value, listener) {
                        if is_not_primary || !is_refused {
                            epoch.suspect();
                        }
                        return ListenEnd::Broken;
                    }
                    // Also checked after notifications: a server may send these, but no replies.
                    if self.lock_state().unanswered_for() > Some(3 * tick) {
                        return ListenEnd::Broken;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    if epoch.replace_at(made_in).is_some() {
                        continue;
                    }
                    let mut state = self.lock_state();
                    if !state.to_read.is_empty() {
                        continue;
                    }
                    match state.unanswered_for() {
                        Some(time) if time >= tick => return ListenEnd::Broken,
                        None if MonotonicTime::now().since(last_received) >= heartbeat => {
                            self.ping(&mut state, MonotonicTime::now().after(self.timeout))
                        }
                        _ => {}
                    }
                }
                Err(_) => return ListenEnd::Broken,
            }
        }
        ListenEnd::Suspect
    }

    /// Handles a notification or a reply. Returns false if `value` is unexpected: the connection must not be used
    /// again.
    fn handle(&self, value: Value, listener: &dyn Listener) -> bool {
        match value {
            Value::Push { kind, data } => match kind {
                PushKind::Invalidate => self.handle_invalidation(data, listener),
                PushKind::Message | PushKind::SMessage => self.handle_message(&data, listener),
                PushKind::SSubscribe => {
                    matches!(
                        self.lock_state().take_answered(),
                        Some(ExpectedReply::Subscribe)
                    )
                }
                _ => true,
            },
            value => {
                let answered = self.lock_state().take_answered();
                match (answered, value) {
                    (Some(ExpectedReply::Read(tracked)), value) => {
                        self.handle_read(tracked, &value, listener)
                    }
                    (Some(ExpectedReply::Ping), Value::SimpleString(_) | Value::Okay) => true,
                    // The error shows that the server is alive.
                    (Some(ExpectedReply::Ping), Value::ServerError(error)) => {
                        refuses_command(&error)
                    }
                    // The server is too old or does not serve the channel's slot, or an ACL forbids the subscription.
                    (Some(ExpectedReply::Subscribe), Value::ServerError(_)) => true,
                    _ => false,
                }
            }
        }
    }

    /// Handles the reply to the read of a key.
    fn handle_read(&self, tracked: TrackedKey, reply: &Value, listener: &dyn Listener) -> bool {
        let is_beside = self.endpoint.other_library.is_some();
        let state = match reply {
            // GETRANGE returns '' for a missing key, too. The lock of another library may be an empty string.
            Value::BulkString(bytes) if bytes.is_empty() => {
                if is_beside && tracked.lease.is_none() {
                    self.send_exists(tracked);
                    return true;
                }
                KeyState::Missing
            }
            Value::BulkString(bytes) => KeyState::Text(bytes),
            Value::Int(found) if is_beside => match (found, tracked.lease) {
                (0, _) => KeyState::Missing,
                (_, Some(lease)) => KeyState::HeldBy(lease),
                (_, None) => KeyState::Other,
            },
            Value::ServerError(error) => match error.code() {
                "WRONGTYPE" => KeyState::Other,
                // This key's value stays unknown, but other keys can be read.
                "NOPERM" => return true,
                // The key's slot has moved to another node of the Cluster. The client reads the key there after it has
                // a new slot map.
                "MOVED" | "ASK" => {
                    self.endpoint.epoch().call_failure_hook();
                    return true;
                }
                _ => return false,
            },
            _ => return false,
        };
        listener.seen(self.server, &tracked, state);
        true
    }

    fn handle_invalidation(&self, data: Vec<Value>, listener: &dyn Listener) -> bool {
        match data.into_iter().next() {
            Some(Value::Array(keys)) => {
                for key in &keys {
                    let Some(key) = self.key_of(key) else {
                        continue;
                    };
                    if let Some(tracked) = listener.changed(self.server, &key) {
                        // `send_due_reads` reads all changed keys together, after the notifications that have come so
                        // far.
                        let mut state = self.lock_state();
                        state.to_read.push(tracked);
                        if !state.has_room() {
                            return false;
                        }
                    }
                }
                true
            }
            Some(Value::Nil) => {
                self.epoch.fetch_add(1, Ordering::AcqRel);
                listener.all_changed(self.server);
                true
            }
            _ => false,
        }
    }

    fn handle_message(&self, data: &[Value], listener: &dyn Listener) -> bool {
        let message = match data {
            [_, Value::BulkString(message)] => message,
            // The reply parser puts this error in place of a message that is too long. Scripts publish no such message.
            [_, Value::ServerError(error)] => return error.code() == TOO_LARGE,
            _ => return false,
        };
        if let Some(Message { kind, key }) = Message::parse(&self.prefix, message) {
            match kind {
                MessageKind::Granted(lease, grant) => {
                    listener.granted(self.server, &key, lease, grant)
                }
                MessageKind::Near(lease) => listener.near(self.server, &key, lease),
                MessageKind::Called(lease) => listener.called(self.server, &key, lease),
                MessageKind::Forced(lease, by) => listener.forced(self.server, &key, lease, by),
            }
        }
        true
    }

    fn key_of(&self, value: &Value) -> Option<Key> {
        let Value::BulkString(bytes) = value else {
            return None;
        };
        Key::from_full(&self.prefix, std::str::from_utf8(bytes).ok()?)
    }
}
