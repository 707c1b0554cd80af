//! Wake-ups: what Redis tells a client without being asked. One connection and one thread per client,
//! opened when somebody first has to wait, or holds a lock for longer than a moment.
//!
//! Two kinds come in. A *message* is published by a script about one lease of this client: its key was granted
//! to it (lua/serve.lua), it is near the front of its queue (lua/near.lua), or it was ended by force
//! (lua/release.lua). A *change* is reported by the server (`CLIENT TRACKING`) when a key that was read here is
//! written, deleted, evicted or expires, by anyone; the key is not watched any more until it is read again.
//! Both are hints: nothing waits for them without a bound, and other users may publish messages, too. Only the message
//! of a grant is believed: it has a lease id that was a secret until then.
//!
//! Decides nothing about locks: a [`Listener`] does.

mod message;
mod subscription;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redis::{PushKind, Value};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::id::{HolderId, LeaseId, LeaseStart};
use crate::key::{Key, channel, fence_counter};
use crate::store::command::{Grant, Standing};
use crate::store::connect::Endpoint;
use crate::store::epoch::MadeIn;
use crate::store::replies::TOO_LARGE;
use crate::store::script;
use crate::store::stream::{Closer, Sender};
use crate::thread::Crew;

use message::{Message, What};
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
/// Between looks that changes lead to. A tracking table that is too small makes each look a change.
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
/// Keys looked at by one command.
const MAX_KEYS: usize = 256;
/// How many commands may be unanswered. With more the server is too slow: the connection is closed, and waiters
/// poll until there is another one.
const MOST_ASKED: usize = 16_384;
/// How many reads of keys may be unanswered or wait to be sent. With more the connection is closed: a server may report
/// changes of one key without end.
const MOST_KEYS: usize = 65_536;

/// A key to look at; with a lease, if it is one that should be found there.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) key: Key,
    pub(crate) lease: Option<LeaseId>,
}

/// Handles notifications. Called on their thread; quick; may ask for more keys to be watched.
pub(crate) trait Listener: Send + Sync {
    /// `key` was granted to `lease`, which was queued for it.
    fn granted(&self, key: &Key, lease: LeaseId, grant: Grant);
    /// `lease` is among the first waiters for `key`.
    fn near(&self, key: &Key, lease: LeaseStart);
    /// A message says that another client took `key` from `lease`. Any user can publish one.
    fn forced(&self, key: &Key, lease: LeaseStart, by: HolderId);
    /// Something happened to `key`. What to look at now, if it still matters.
    fn changed(&self, key: &Key) -> Option<Watched>;
    /// Anything may have happened: everything was flushed, or nothing could be heard for a while.
    /// All that matters is to be watched anew.
    fn all_changed(&self);
    /// What stands under a key that was watched; nothing, if there is no such key.
    fn seen(&self, watched: &Watched, value: Option<&[u8]>);
    /// The client's clock was moved ahead.
    fn clock_moved(&self);
    /// The server does not offer wake-ups to this client.
    fn refused(&self, error: &Error);
}

pub(crate) struct Wakeups {
    endpoint: Arc<Endpoint>,
    channel: String,
    prefix: String,
    timeout: Duration,
    /// One of the stages below, to be read without the mutex.
    stage: AtomicU8,
    /// See `Store::hearing`.
    hearing: AtomicU64,
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

/// Stages: nobody has asked for wake-ups, or the first connection is being made;
const AHEAD: u8 = 0;
/// they come in;
const LISTENING: u8 = 1;
/// they are refused, or the connection is broken, or suspect and about to be replaced.
const AWAY: u8 = 2;

#[derive(Default)]
struct State {
    wanted: bool,
    stopped: bool,
    sender: Option<Sender>,
    /// The unanswered commands and when each was sent, in the order in which the answers come.
    asked: VecDeque<(Moment, Asked)>,
    /// Keys in `asked`.
    keys_asked: usize,
    /// Keys to read with the next command, `MOST_KEYS` at most. Redis reports a change of a key once, until the key is
    /// read again.
    to_look_at: Vec<Watched>,
    looked_at: Option<Moment>,
}

impl State {
    fn has_room(&self) -> bool {
        self.asked.len() < MOST_ASKED && self.keys_asked + self.to_look_at.len() <= MOST_KEYS
    }

    fn answered(&mut self) -> Option<Asked> {
        let (_, asked) = self.asked.pop_front()?;
        self.keys_asked -= asked.keys();
        Some(asked)
    }

    /// For how long there has been no answer to the oldest command.
    fn unanswered_for(&self) -> Option<Duration> {
        let (at, _) = self.asked.front()?;
        Some(Moment::now().since(*at))
    }

    fn forget(&mut self) {
        self.asked.clear();
        self.keys_asked = 0;
        self.to_look_at.clear();
    }
}

/// Why `listen` returned.
#[derive(PartialEq)]
enum Ended {
    Broken,
    /// It works, and may lead to an old primary.
    Suspect,
}

enum Asked {
    Look(Vec<Watched>),
    Ping,
}

impl Asked {
    fn keys(&self) -> usize {
        match self {
            Self::Look(keys) => keys.len(),
            Self::Ping => 0,
        }
    }
}

impl Wakeups {
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
            stage: AtomicU8::new(AHEAD),
            hearing: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
            sockets: Mutex::default(),
        }
    }

    /// Starts the thread; it connects once somebody wants it to.
    pub(crate) fn start(
        self: &Arc<Self>,
        crew: &Crew,
        listener: Arc<dyn Listener>,
    ) -> Result<(), Error> {
        let wakeups = Arc::clone(self);
        crew.spawn("leasehold-wakeups", move || wakeups.run(&*listener))
    }

    /// How a waiter joins a queue: to be notified of its grant, if that can be.
    pub(crate) fn standing(&self) -> Standing {
        match self.stage.load(Ordering::Acquire) {
            LISTENING => Standing::Told,
            // There will be a first connection soon: the next request joins the queue.
            AHEAD => Standing::None,
            _ => Standing::Polling,
        }
    }

    /// Counts connections, and flushes that were heard: see `Store::hearing`.
    pub(crate) fn hearing(&self) -> u64 {
        self.hearing.load(Ordering::Acquire)
    }

    /// Somebody has to wait: connects, if that has not been done.
    pub(crate) fn want(&self) {
        if self.stage.load(Ordering::Acquire) == AHEAD {
            self.wanted(&mut self.state.lock());
        }
    }

    /// Looks at keys, and from then on at every change of them. False if that cannot be now; it
    /// will be asked for again, by [`Listener::all_changed`].
    pub(crate) fn watch(&self, watched: Vec<Watched>) -> bool {
        let mut state = self.state.lock();
        if state.sender.is_none() {
            self.wanted(&mut state);
            return false;
        }
        state.to_look_at.extend(watched);
        self.look(&mut state);
        state.sender.is_some()
    }

    /// Has the connection replaced, since it may lead to a server that is no longer the primary. Waiters poll
    /// until then.
    pub(crate) fn suspect(&self) {
        let trusted =
            self.stage
                .compare_exchange(LISTENING, AWAY, Ordering::SeqCst, Ordering::SeqCst);
        if trusted.is_ok() {
            // The answer, or its absence, makes the thread look at the suspicion.
            self.ping(&mut self.state.lock());
        }
    }

    fn ping(&self, state: &mut State) {
        let mut bytes = Vec::new();
        script::encode_words(&mut bytes, "PING", std::iter::empty());
        self.ask(state, &bytes, Asked::Ping);
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

    fn wanted(&self, state: &mut State) {
        if !state.wanted {
            state.wanted = true;
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
    fn look_again(&self, made_in: &MadeIn, heartbeat: Duration) -> Duration {
        let mut state = self.state.lock();
        let now = Moment::now();
        let replace_at = self.endpoint.epoch().replace_at(made_in);
        let heartbeat = replace_at.map_or(heartbeat, |at| {
            at.since(now).clamp(Duration::from_millis(1), heartbeat)
        });
        if state.to_look_at.is_empty() {
            return heartbeat;
        }
        let due = state.looked_at.map_or(now, |at| at.after(BETWEEN_LOOKS));
        if now < due {
            return due.since(now).max(Duration::from_millis(1));
        }
        state.looked_at = Some(now);
        self.look(&mut state);
        heartbeat
    }

    /// Writes what is to be looked at.
    fn look(&self, state: &mut State) {
        while !state.to_look_at.is_empty() {
            let n = state.to_look_at.len().min(MAX_KEYS);
            let keys: Vec<Watched> = state.to_look_at.drain(..n).collect();
            self.look_at(state, keys);
        }
    }

    fn look_at(&self, state: &mut State, keys: Vec<Watched>) {
        let mut bytes = Vec::with_capacity(64 * keys.len());
        let names = keys.iter().map(|watched| watched.key.in_redis());
        script::encode_words(&mut bytes, "MGET", names);
        self.ask(state, &bytes, Asked::Look(keys));
    }

    /// Reads each key with a command of its own, after an ACL has refused the read of one of them. That one is not
    /// reported.
    fn look_apart(&self, keys: Vec<Watched>) {
        if keys.len() > 1 {
            let mut state = self.state.lock();
            for watched in keys {
                self.look_at(&mut state, vec![watched]);
            }
        }
    }

    fn ask(&self, state: &mut State, bytes: &[u8], asked: Asked) {
        let has_room = state.has_room();
        let Some(sender) = &mut state.sender else {
            state.to_look_at.clear();
            return;
        };
        let now = Moment::now();
        if has_room && sender.send(bytes, now.after(self.timeout)).is_ok() {
            state.keys_asked += asked.keys();
            state.asked.push_back((now, asked));
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
                        let opened_at = Moment::now();
                        let ended = self.listen(subscription, &made_in, listener);
                        if Moment::now().since(opened_at) >= SHORTEST_LIFE {
                            pause = FIRST_PAUSE;
                        }
                        if ended == Ended::Suspect {
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

    /// Sleeps until somebody wants to hear; false once stopped.
    fn is_wanted(&self) -> bool {
        let mut state = self.state.lock();
        while !state.wanted && !state.stopped {
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
        let until = Moment::now().after(pause);
        let mut state = self.state.lock();
        while !state.stopped {
            let left = until.since(Moment::now());
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
        self.hearing.fetch_add(1, Ordering::AcqRel);
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
    ) -> Ended {
        let epoch = self.endpoint.epoch();
        // A suspicion may come at any time; the thread notices it within a tick.
        let tick = (2 * self.timeout).clamp(Duration::from_secs(1), HEARTBEAT);
        let mut heard_at = Moment::now();
        while !epoch.is_due(made_in) {
            let next = subscription.next(|| self.look_again(made_in, tick));
            match next {
                Ok(value) => {
                    heard_at = Moment::now();
                    let is_not_primary = script::is_out_of_place(&value);
                    let is_refused = matches!(value, Value::ServerError(_));
                    if !self.hear(value, listener) {
                        if is_not_primary || !is_refused {
                            epoch.suspect();
                        }
                        return Ended::Broken;
                    }
                    // Even if it sends other things.
                    if self.state.lock().unanswered_for() > Some(3 * tick) {
                        return Ended::Broken;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    if epoch.replace_at(made_in).is_some() {
                        continue;
                    }
                    let mut state = self.state.lock();
                    if !state.to_look_at.is_empty() {
                        continue;
                    }
                    match state.unanswered_for() {
                        Some(time) if time >= tick => return Ended::Broken,
                        None if Moment::now().since(heard_at) >= HEARTBEAT => self.ping(&mut state),
                        _ => {}
                    }
                }
                Err(_) => return Ended::Broken,
            }
        }
        Ended::Suspect
    }

    /// False if it makes no sense: the connection cannot be trusted.
    fn hear(&self, value: Value, listener: &dyn Listener) -> bool {
        match value {
            Value::Push { kind, data } => match kind {
                PushKind::Invalidate => self.hear_changes(data, listener),
                PushKind::Message => self.hear_news(&data, listener),
                _ => true,
            },
            value => {
                let asked = self.state.lock().answered();
                match (asked, value) {
                    (Some(Asked::Look(all)), Value::Array(values)) if values.len() == all.len() => {
                        for (watched, value) in all.iter().zip(values) {
                            match value {
                                Value::BulkString(bytes) => listener.seen(watched, Some(&bytes)),
                                _ => listener.seen(watched, None),
                            }
                        }
                        true
                    }
                    (Some(Asked::Look(all)), Value::ServerError(error))
                        if error.code() == "NOPERM" =>
                    {
                        self.look_apart(all);
                        true
                    }
                    (Some(Asked::Ping), Value::SimpleString(_) | Value::Okay) => true,
                    _ => false,
                }
            }
        }
    }

    fn hear_changes(&self, data: Vec<Value>, listener: &dyn Listener) -> bool {
        match data.into_iter().next() {
            Some(Value::Array(keys)) => {
                for key in &keys {
                    let Some(key) = self.key(key) else { continue };
                    if let Some(watched) = listener.changed(&key) {
                        // Looked at together, when all that came in has been heard.
                        let mut state = self.state.lock();
                        state.to_look_at.push(watched);
                        if !state.has_room() {
                            return false;
                        }
                    }
                }
                true
            }
            Some(Value::Nil) => {
                self.hearing.fetch_add(1, Ordering::AcqRel);
                listener.all_changed();
                true
            }
            _ => false,
        }
    }

    fn hear_news(&self, data: &[Value], listener: &dyn Listener) -> bool {
        let message = match data {
            [_, Value::BulkString(message)] => message,
            // Longer than any message of a script, in the place of which this stands.
            [_, Value::ServerError(error)] => return error.code() == TOO_LARGE,
            _ => return false,
        };
        if let Some(Message { what, key }) = Message::read(&self.prefix, message) {
            match what {
                What::Granted(lease, grant) => listener.granted(&key, lease, grant),
                What::Near(lease) => listener.near(&key, lease),
                What::Forced(lease, by) => listener.forced(&key, lease, by),
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
