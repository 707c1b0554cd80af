//! Notifications: what Redis tells a client without being unanswered. One connection and one thread per client,
//! opened when somebody first has to wait, or holds a lock for longer than a moment.
//!
//! Two kinds come in. A *message* is published by a script about one lease of this client: its key was granted
//! to it (lua/serve.lua), it is near the front of its queue (lua/near.lua), or it was ended by force
//! (lua/release.lua). A *change* is reported by the server (`CLIENT TRACKING`) when a key that was read here is
//! written, deleted, evicted or expires, by anyone; the key is not tracked any more until it is read again.
//! Both are hints: nothing waits for them without a bound, and other users may publish messages, too. Only the message
//! of a grant is believed: it has a lease id that was a secret until then.
//!
//! Decides nothing about locks: a [`Listener`] does.

mod message;
mod subscription;
#[cfg(all(test, feature = "__server_tests"))]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redis::{PushKind, Value};

use crate::error::{Error, ErrorKind};
use crate::store::command::{GrantMessage, QueueMode};
use crate::store::redis::connection::Endpoint;
use crate::store::redis::epoch::MadeIn;
use crate::store::redis::replies::TOO_LARGE;
use crate::store::redis::scripts;
use crate::store::redis::socket::{Closer, Sender};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::{Key, channel, fence_counter};
use crate::util::threads::ThreadGroup;

use message::{Message, MessageKind};
use subscription::Subscription;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A connection that breaks earlier does not shorten the next pause: a server or a proxy that accepts each connection and
/// closes it would get one every few milliseconds.
const SHORTEST_LIFE: Duration = Duration::from_secs(1);
/// How long a server that refuses is left alone.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);
/// How long a connection is silent before PING checks that it is alive. A thousand clients that wait for one
/// key then send a hundred PINGs a second.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Between looks that changes lead to. A tracking table that is too small makes each send_reads a change.
const BETWEEN_READS: Duration = Duration::from_millis(10);
/// The last byte of a key that is read, longer than the value of a lock. Another user may write 512 MB, and Redis closes a
/// subscribed connection that it owes 32 MB.
const LAST_BYTE: &str = "255";
/// Keys read by one write.
const MAX_KEYS: usize = 256;
/// How many writes may be unanswered. With more the server is too slow: the connection is closed, and waiters
/// poll until there is another one.
const MAX_UNANSWERED: usize = 16_384;
/// How many reads of keys may be unanswered or wait to be sent. With more the connection is closed: a server may report
/// changes of one key without end.
const MAX_KEYS_UNANSWERED: usize = 65_536;

/// A key to send_reads at; with a lease, if it is one that should be found there.
#[derive(Clone, Debug)]
pub(crate) struct TrackedKey {
    pub(crate) key: Key,
    pub(crate) lease: Option<LeaseId>,
}

/// Handles notifications. Called on their thread; quick; may ask for more keys to be tracked.
pub(crate) trait Listener: Send + Sync {
    /// `key` was granted to `lease`, which was queued for it.
    fn granted(&self, key: &Key, lease: LeaseId, grant: GrantMessage);
    /// `lease` is among the first waiters for `key`.
    fn near(&self, key: &Key, lease: LeaseStart);
    /// A message says that another client took `key` from `lease`. Any user can publish one.
    fn forced(&self, key: &Key, lease: LeaseStart, by: HolderId);
    /// Something happened to `key`. MessageKind to send_reads at now, if it still matters.
    fn changed(&self, key: &Key) -> Option<TrackedKey>;
    /// Anything may have happened: everything was flushed, or nothing could be heard for a while.
    /// All that matters is to be tracked anew.
    fn all_changed(&self);
    /// MessageKind stands under a key that was tracked; nothing, if there is no such key.
    fn seen(&self, tracked: &TrackedKey, value: Option<&[u8]>);
    /// The client's clock was moved ahead.
    fn clock_moved(&self);
    /// The server does not offer notifications to this client.
    fn refused(&self, error: &Error);
}

pub(crate) struct Notifications {
    endpoint: Arc<Endpoint>,
    channel: String,
    prefix: String,
    timeout: Duration,
    /// One of the stages below, to be read without the mutex.
    stage: AtomicU8,
    /// See `Store::notification_epoch`.
    notification_epoch: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
    /// The sockets that `stop` closes. Not in `state`, whose mutex is held during writes.
    sockets: Mutex<Sockets>,
}

#[derive(Default)]
struct Sockets {
    stopped: bool,
    closers: Vec<Closer>,
}

/// Stages: nobody has unanswered for notifications, or the first connection is being made;
const NOT_CONNECTED_YET: u8 = 0;
/// they come in;
const LISTENING: u8 = 1;
/// they are refused, or the connection is broken, or suspect and about to be replaced.
const AWAY: u8 = 2;

#[derive(Default)]
struct State {
    set_wanted: bool,
    stopped: bool,
    sender: Option<Sender>,
    /// The unanswered writes and when each was sent, in the order in which the answers come.
    unanswered: VecDeque<(MonotonicTime, Sent)>,
    /// Keys in `unanswered`.
    keys_unanswered: usize,
    /// Keys to read with the next command, `MAX_KEYS_UNANSWERED` at most. Redis reports a change of a key once, until the key is
    /// read again.
    to_read: Vec<TrackedKey>,
    read_at: Option<MonotonicTime>,
}

impl State {
    fn has_room(&self) -> bool {
        self.unanswered.len() < MAX_UNANSWERED
            && self.keys_unanswered + self.to_read.len() <= MAX_KEYS_UNANSWERED
    }

    /// Removes the oldest command.
    fn take_answered(&mut self) -> Option<Answered> {
        let (_, sent) = self.unanswered.front_mut()?;
        let answered = match sent {
            Sent::Read(keys) => {
                self.keys_unanswered -= 1;
                Answered::Read(keys.pop_front()?)
            }
            Sent::Ping => Answered::Ping,
        };
        if sent.keys() == 0 {
            self.unanswered.pop_front();
        }
        Some(answered)
    }

    /// For how long there has been no answer to the oldest command.
    fn unanswered_for(&self) -> Option<Duration> {
        let (at, _) = self.unanswered.front()?;
        Some(MonotonicTime::now().since(*at))
    }

    fn forget(&mut self) {
        self.unanswered.clear();
        self.keys_unanswered = 0;
        self.to_read.clear();
    }
}

/// Why `listen` returned.
#[derive(PartialEq)]
enum ListenEnd {
    Broken,
    /// It works, and may lead to an old primary.
    Suspect,
}

enum Sent {
    /// Keys, each with a command of its own.
    Read(VecDeque<TrackedKey>),
    Ping,
}

/// The command that a reply belongs to.
enum Answered {
    Read(TrackedKey),
    Ping,
}

impl Sent {
    fn keys(&self) -> usize {
        match self {
            Self::Read(keys) => keys.len(),
            Self::Ping => 0,
        }
    }
}

impl Notifications {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        holder: &HolderId,
        prefix: &str,
        timeout: Duration,
    ) -> Self {
        Self {
            endpoint,
            channel: channel(prefix, holder),
            prefix: prefix.to_owned(),
            timeout,
            stage: AtomicU8::new(NOT_CONNECTED_YET),
            notification_epoch: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            sockets: Mutex::default(),
        }
    }

    /// Starts the thread; it connects once somebody wants it to.
    pub(crate) fn start(
        self: &Arc<Self>,
        threads: &ThreadGroup,
        listener: Arc<dyn Listener>,
    ) -> Result<(), Error> {
        let notifications = Arc::clone(self);
        threads.spawn("leasehold-notifications", move || {
            notifications.run(&*listener)
        })
    }

    /// How a waiter joins a queue: to be notified of its grant, if that can be.
    pub(crate) fn queue_mode(&self) -> QueueMode {
        match self.stage.load(Ordering::Acquire) {
            LISTENING => QueueMode::Notified,
            // There will be a first connection soon: the next request joins the queue.
            NOT_CONNECTED_YET => QueueMode::None,
            _ => QueueMode::Polling,
        }
    }

    /// Counts connections, and flushes that were heard: see `Store::notification_epoch`.
    pub(crate) fn notification_epoch(&self) -> u64 {
        self.notification_epoch.load(Ordering::Acquire)
    }

    /// Somebody has to wait: connects, if that has not been done.
    pub(crate) fn request_connection(&self) {
        if self.stage.load(Ordering::Acquire) == NOT_CONNECTED_YET {
            self.set_wanted(&mut self.state.lock());
        }
    }

    /// Looks at keys, and from then on at every change of them. False if that cannot be now; it
    /// will be unanswered for again, by [`Listener::all_changed`].
    pub(crate) fn track(&self, tracked: Vec<TrackedKey>) -> bool {
        let mut state = self.state.lock();
        if state.sender.is_none() {
            self.set_wanted(&mut state);
            return false;
        }
        state.to_read.extend(tracked);
        self.send_reads(&mut state);
        state.sender.is_some()
    }

    /// Has the connection replaced, since it may lead to a server that is no longer the primary. Waiters poll
    /// until then.
    pub(crate) fn suspect(&self) {
        let trusted =
            self.stage
                .compare_exchange(LISTENING, AWAY, Ordering::SeqCst, Ordering::SeqCst);
        if trusted.is_ok() {
            // The answer, or its absence, makes the thread send_reads at the suspicion.
            self.ping(&mut self.state.lock());
        }
    }

    fn ping(&self, state: &mut State) {
        let mut bytes = Vec::new();
        scripts::encode_words(&mut bytes, "PING", std::iter::empty());
        self.send(state, &bytes, Sent::Ping);
    }

    /// Ends the thread: closes its connections, so that only an attempt to connect can delay its end.
    pub(crate) fn stop(&self) {
        let mut sockets = self.sockets.lock();
        sockets.stopped = true;
        sockets.closers.drain(..).for_each(|closer| closer.close());
        drop(sockets);
        let mut state = self.state.lock();
        state.stopped = true;
        self.disconnect(&mut state);
        self.changed.notify_all();
    }

    fn set_wanted(&self, state: &mut State) {
        if !state.set_wanted {
            state.set_wanted = true;
            self.changed.notify_all();
        }
    }

    fn disconnect(&self, state: &mut State) {
        if let Some(sender) = state.sender.take() {
            sender.closer().close();
        }
        state.forget();
        self.stage.store(AWAY, Ordering::Release);
    }

    /// Reads the keys that have changed, unless others were read just now. Returns how long to wait for more: no
    /// longer than until the connection is to be replaced.
    fn send_due_reads(&self, made_in: &MadeIn, heartbeat: Duration) -> Duration {
        let mut state = self.state.lock();
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

    /// Writes what is to be looked at.
    fn send_reads(&self, state: &mut State) {
        while !state.to_read.is_empty() {
            let n = state.to_read.len().min(MAX_KEYS);
            let keys: Vec<TrackedKey> = state.to_read.drain(..n).collect();
            self.send_read(state, keys);
        }
    }

    /// Reads each key with a command of its own: a key that an ACL forbids costs the others nothing.
    fn send_read(&self, state: &mut State, keys: Vec<TrackedKey>) {
        let mut bytes = Vec::with_capacity(128 * keys.len());
        for tracked in &keys {
            let words = [tracked.key.in_redis(), "0", LAST_BYTE];
            scripts::encode_words(&mut bytes, "GETRANGE", words.into_iter());
        }
        self.send(state, &bytes, Sent::Read(keys.into()));
    }

    fn send(&self, state: &mut State, bytes: &[u8], unanswered: Sent) {
        let has_room = state.has_room();
        let Some(sender) = &mut state.sender else {
            state.to_read.clear();
            return;
        };
        let now = MonotonicTime::now();
        if has_room && sender.send(bytes, now.after(self.timeout)).is_ok() {
            state.keys_unanswered += unanswered.keys();
            state.unanswered.push_back((now, unanswered));
        } else {
            self.disconnect(state);
        }
    }

    /// Has `stop` close a new connection. Closes it at once after `stop`.
    fn connected(&self, closer: Closer) {
        let mut sockets = self.sockets.lock();
        if sockets.stopped {
            closer.close();
            return;
        }
        sockets.closers.retain(Closer::is_open);
        sockets.closers.push(closer);
    }

    fn run(&self, listener: &dyn Listener) {
        let mut pause = FIRST_PAUSE;
        let mut told = false;
        while self.is_wanted() {
            let made_in = self.endpoint.epoch().now();
            let opened = Subscription::open(
                self.endpoint.info(),
                &self.channel,
                &fence_counter(&self.prefix),
                self.timeout,
                |closer| self.connected(closer),
            );
            match opened {
                Ok((subscription, sender)) => {
                    if self.install(sender, &made_in) {
                        told = false;
                        listener.all_changed();
                        let opened_at = MonotonicTime::now();
                        let ended = self.listen(subscription, &made_in, listener);
                        if MonotonicTime::now().since(opened_at) >= SHORTEST_LIFE {
                            pause = FIRST_PAUSE;
                        }
                        if ended == ListenEnd::Suspect {
                            // It stays open until the next one is there: scripts on its server find
                            // this client listening all the time.
                            continue;
                        }
                    }
                    self.disconnect(&mut self.state.lock());
                    self.rest_longer(&mut pause);
                }
                Err(error) => {
                    self.disconnect(&mut self.state.lock());
                    if error.is_unavailable() {
                        self.rest_longer(&mut pause);
                    } else {
                        if !std::mem::replace(&mut told, true) {
                            listener.refused(&error);
                        }
                        self.rest(REFUSED_PAUSE);
                    }
                }
            }
        }
    }

    /// Sleeps until somebody wants to handle; false once stopped.
    fn is_wanted(&self) -> bool {
        let mut state = self.state.lock();
        while !state.set_wanted && !state.stopped {
            self.changed.wait(&mut state);
        }
        !state.stopped
    }

    /// Rests for `pause`, and doubles it.
    fn rest_longer(&self, pause: &mut Duration) {
        self.rest(*pause);
        *pause = (*pause * 2).min(LONGEST_PAUSE);
    }

    fn rest(&self, pause: Duration) {
        let until = MonotonicTime::now().after(pause);
        let mut state = self.state.lock();
        while !state.stopped {
            let left = until.since(MonotonicTime::now());
            if left.is_zero() {
                return;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    fn install(&self, sender: Sender, made_in: &MadeIn) -> bool {
        let mut state = self.state.lock();
        if state.stopped {
            return false;
        }
        if let Some(suspect) = state.sender.replace(sender) {
            suspect.closer().close();
        }
        // Requests on the replaced connection get no answer; `all_changed` asks for what matters again.
        state.forget();
        self.notification_epoch.fetch_add(1, Ordering::AcqRel);
        self.stage.store(LISTENING, Ordering::SeqCst);
        // In this order: a suspicion after the check finds LISTENING and sets AWAY itself (`suspect`).
        if self.endpoint.epoch().replace_at(made_in).is_some() {
            self.stage.store(AWAY, Ordering::SeqCst);
        }
        true
    }

    /// Handles notifications until the connection ends, or is to be replaced.
    fn listen(
        &self,
        mut subscription: Subscription,
        made_in: &MadeIn,
        listener: &dyn Listener,
    ) -> ListenEnd {
        let epoch = self.endpoint.epoch();
        // A suspicion may come at any time; the thread notices it within a tick.
        let tick = (2 * self.timeout).clamp(Duration::from_secs(1), HEARTBEAT);
        let mut last_received = MonotonicTime::now();
        while !epoch.is_due(made_in) {
            let next = subscription.next(|| self.send_due_reads(made_in, tick));
            match next {
                Ok(value) => {
                    last_received = MonotonicTime::now();
                    let is_not_primary = scripts::is_out_of_place(&value);
                    let is_refused = matches!(value, Value::ServerError(_));
                    if !self.handle(value, listener) {
                        if is_not_primary || !is_refused {
                            epoch.suspect();
                        }
                        return ListenEnd::Broken;
                    }
                    // Even if it sends other things.
                    if self.state.lock().unanswered_for() > Some(3 * tick) {
                        return ListenEnd::Broken;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    if epoch.replace_at(made_in).is_some() {
                        continue;
                    }
                    let mut state = self.state.lock();
                    if !state.to_read.is_empty() {
                        continue;
                    }
                    match state.unanswered_for() {
                        Some(time) if time >= tick => return ListenEnd::Broken,
                        None if MonotonicTime::now().since(last_received) >= HEARTBEAT => {
                            self.ping(&mut state)
                        }
                        _ => {}
                    }
                }
                Err(_) => return ListenEnd::Broken,
            }
        }
        ListenEnd::Suspect
    }

    /// False if it makes no sense: the connection cannot be trusted.
    fn handle(&self, value: Value, listener: &dyn Listener) -> bool {
        match value {
            Value::Push { kind, data } => match kind {
                PushKind::Invalidate => self.handle_invalidation(data, listener),
                PushKind::Message => self.handle_message(&data, listener),
                _ => true,
            },
            value => {
                let answered = self.state.lock().take_answered();
                match (answered, value) {
                    (Some(Answered::Read(tracked)), Value::BulkString(bytes)) => {
                        // GETRANGE returns '' for a missing key, too.
                        listener.seen(&tracked, (!bytes.is_empty()).then_some(&*bytes));
                        true
                    }
                    (Some(Answered::Read(tracked)), Value::ServerError(error)) => {
                        match error.code() {
                            "WRONGTYPE" => listener.seen(&tracked, None),
                            // Nothing is known of this key, and others can be read.
                            "NOPERM" => {}
                            _ => return false,
                        }
                        true
                    }
                    (Some(Answered::Ping), Value::SimpleString(_) | Value::Okay) => true,
                    _ => false,
                }
            }
        }
    }

    fn handle_invalidation(&self, data: Vec<Value>, listener: &dyn Listener) -> bool {
        match data.into_iter().next() {
            Some(Value::Array(keys)) => {
                for key in &keys {
                    let Some(key) = self.key(key) else { continue };
                    if let Some(tracked) = listener.changed(&key) {
                        // Looked at together, when all that came in has been heard.
                        let mut state = self.state.lock();
                        state.to_read.push(tracked);
                        if !state.has_room() {
                            return false;
                        }
                    }
                }
                true
            }
            Some(Value::Nil) => {
                self.notification_epoch.fetch_add(1, Ordering::AcqRel);
                listener.all_changed();
                true
            }
            _ => false,
        }
    }

    fn handle_message(&self, data: &[Value], listener: &dyn Listener) -> bool {
        let message = match data {
            [_, Value::BulkString(message)] => message,
            // Longer than any message of a script, in the place of which this stands.
            [_, Value::ServerError(error)] => return error.code() == TOO_LARGE,
            _ => return false,
        };
        if let Some(Message { what, key }) = Message::read(&self.prefix, message) {
            match what {
                MessageKind::Granted(lease, grant) => listener.granted(&key, lease, grant),
                MessageKind::Near(lease) => listener.near(&key, lease),
                MessageKind::Forced(lease, by) => listener.forced(&key, lease, by),
            }
        }
        true
    }

    fn key(&self, value: &Value) -> Option<Key> {
        let Value::BulkString(bytes) = value else {
            return None;
        };
        Key::of_redis(&self.prefix, std::str::from_utf8(bytes).ok()?)
    }
}
