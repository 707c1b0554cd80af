//! The thread that listens to one sentinel at a time, and notices a fail-over at once. It then makes the client's
//! connections suspect. It connects to sentinels only.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use redis::{ProtocolVersion, PushKind, Value};

use crate::error::Error;
use crate::store::redis::connection::{Endpoint, LONGEST_REPLY};
use crate::store::redis::errors::Attempted;
use crate::store::redis::sentinel::{
    Answer, HostPort, Named, QUESTIONS, SentinelConnection, Sentinels,
};
use crate::store::redis::socket::Closer;
use crate::util::clock::MonotonicTime;
use crate::util::threads::ThreadGroup;

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A connection with a shorter life does not reset the pause.
const SHORTEST_LIFE: Duration = Duration::from_secs(1);
/// The time between two questions for the primary. They show that the sentinel is alive, and find a fail-over whose
/// message was lost.
const BETWEEN_QUESTIONS: Duration = Duration::from_secs(5);
/// How long the question to another sentinel may take. Messages of the first one are read later by this time.
const OTHER_TIMEOUT: Duration = Duration::from_millis(500);
/// The message of a sentinel once a fail-over is done: `<group> <old host> <old port> <new host> <new port>`.
const CHANNEL: &str = "+switch-master";

/// The thread `leasehold-sentinels` of a client.
pub(crate) struct SentinelWatcher {
    endpoint: Arc<Endpoint>,
    /// The time-out of connecting and of each answer.
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stopped: bool,
    socket: Option<Closer>,
}

impl SentinelWatcher {
    pub(crate) fn new(endpoint: Arc<Endpoint>, timeout: Duration) -> Self {
        Self {
            endpoint,
            timeout,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Starts the thread. Does nothing for an endpoint without sentinels.
    pub(crate) fn start(self: &Arc<Self>, threads: &ThreadGroup) -> Result<(), Error> {
        if self.endpoint.sentinels().is_none() {
            return Ok(());
        }
        let watcher = Arc::clone(self);
        threads.spawn("leasehold-sentinels", move || {
            if let Some(sentinels) = watcher.endpoint.sentinels() {
                watcher.run(sentinels);
            }
        })
    }

    /// Ends the thread, and closes its socket. Only an attempt to connect can delay its end.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        if let Some(socket) = state.socket.take() {
            socket.close();
        }
        self.changed.notify_all();
    }

    fn run(&self, sentinels: &Sentinels) {
        let mut pause = FIRST_PAUSE;
        while !self.state.lock().stopped {
            let sentinel = sentinels.first();
            let mut watching_since = None;
            let _ = self.watch(sentinels, &sentinel, &mut watching_since);
            let lived =
                watching_since.map_or(Duration::ZERO, |since| MonotonicTime::now().since(since));
            if lived >= SHORTEST_LIFE {
                pause = FIRST_PAUSE;
            }
            sentinels.put_last(&sentinel);
            self.sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    fn sleep(&self, pause: Duration) {
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

    /// Listens to one sentinel until the connection breaks, or an answer does not come in time. Sets `since` to the time
    /// of the first answer.
    fn watch(
        &self,
        sentinels: &Sentinels,
        sentinel: &HostPort,
        since: &mut Option<MonotonicTime>,
    ) -> Result<(), Error> {
        let info = sentinels.info_of(sentinel)?;
        let attempted = Attempted {
            info: &info,
            timeout: self.timeout,
            setting: "command_timeout",
        };
        let deadline = MonotonicTime::now().after(self.timeout);
        let connection = self.endpoint.connect(attempted, deadline, |socket| {
            let mut state = self.state.lock();
            if state.stopped {
                socket.close();
            }
            state.socket = Some(socket);
            Ok(())
        })?;
        let mut connection = SentinelConnection::new(&self.endpoint, attempted, connection);
        // With RESP3, the sentinel also answers questions on a connection with a subscription.
        connection.log_in(ProtocolVersion::RESP3, deadline)?;
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(CHANNEL);
        connection.send(&subscribe, deadline)?;
        connection.send(&sentinels.question(), deadline)?;
        let mut replies = Vec::new();
        let mut answer_by = Some(deadline);
        let mut ask_at = deadline;
        let mut has_subscribed = false;
        // A message came after the question, so the answer may be older than the message.
        let mut asks_again = false;
        let mut others_asked = 0;
        loop {
            let now = MonotonicTime::now();
            if answer_by.is_none() && ask_at <= now {
                let by = now.after(self.timeout);
                connection.send(&sentinels.question(), by)?;
                answer_by = Some(by);
            }
            let until = answer_by.unwrap_or(ask_at);
            let received = connection.receiver.receive(until, LONGEST_REPLY);
            match received {
                Ok(Value::Push { kind, data }) => {
                    has_subscribed |= kind == PushKind::Subscribe;
                    if kind == PushKind::Message
                        && let Some(primary) = sentinels.read_switch(&data)
                    {
                        sentinels.put_first(sentinel);
                        if sentinels.note_primary(&primary) {
                            self.endpoint.follow_switch();
                        }
                        // Ask for the number of this fail-over.
                        ask_at = now;
                        asks_again = answer_by.is_some();
                    }
                }
                // The user may not subscribe. The questions find a fail-over then.
                Ok(Value::ServerError(_)) if !has_subscribed => has_subscribed = true,
                Ok(reply) => {
                    replies.push(reply);
                    if replies.len() == QUESTIONS {
                        let answer =
                            sentinels.read_answer(attempted, std::mem::take(&mut replies))?;
                        if !sentinels.is_current(&answer) {
                            // This sentinel has missed a fail-over, so it may miss the next one, too.
                            return Ok(());
                        }
                        since.get_or_insert(now);
                        self.accept(sentinels, sentinel, answer);
                        answer_by = None;
                        let is_again = std::mem::take(&mut asks_again);
                        ask_at = if is_again {
                            now
                        } else {
                            now.after(BETWEEN_QUESTIONS)
                        };
                        if self.other_knows_more(sentinels, sentinel, others_asked) {
                            return Ok(());
                        }
                        others_asked += 1;
                    }
                }
                Err(error) if error.is_timeout() && answer_by.is_none() => {}
                Err(error) => return Err(connection.error(error)),
            }
            // A sentinel that publishes without end gives no answer either.
            if answer_by.is_some_and(|by| by.after(self.timeout) < MonotonicTime::now()) {
                let late =
                    redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
                return Err(connection.error(late));
            }
        }
    }

    fn accept(&self, sentinels: &Sentinels, by: &HostPort, answer: Answer) {
        let Named { has_changed, .. } = sentinels.accept(by, answer);
        if has_changed {
            self.endpoint.follow_switch();
        }
    }

    /// Asks one of the sentinels other than `sentinel`, which may be cut off from them. Returns true if the other one
    /// knows of a later fail-over. It is then asked first.
    fn other_knows_more(&self, sentinels: &Sentinels, sentinel: &HostPort, turn: usize) -> bool {
        let Some(other) = sentinels.other_than(sentinel, turn) else {
            return false;
        };
        let deadline = MonotonicTime::now().after(self.timeout.min(OTHER_TIMEOUT));
        match sentinels.ask(&self.endpoint, &other, deadline) {
            Ok(answer) if sentinels.is_newer(&answer) => {
                self.accept(sentinels, &other, answer);
                true
            }
            _ => false,
        }
    }
}

impl Sentinels {
    /// One of the sentinels other than `sentinel`, another one for each `turn`.
    fn other_than(&self, sentinel: &HostPort, turn: usize) -> Option<HostPort> {
        let state = self.state.lock();
        let others = || state.order.iter().filter(|it| *it != sentinel);
        others().nth(turn % others().count().max(1)).cloned()
    }

    /// Whether the answer is from after the last fail-over that this client knows of.
    fn is_newer(&self, answer: &Answer) -> bool {
        let known = self.state.lock().epoch;
        answer.epoch.is_some_and(|epoch| epoch > known)
    }

    /// The sentinel that is asked first.
    pub(super) fn first(&self) -> HostPort {
        self.state.lock().order[0].clone()
    }

    fn put_first(&self, sentinel: &HostPort) {
        self.state.lock().put_first(sentinel);
    }

    pub(crate) fn put_last(&self, sentinel: &HostPort) {
        self.state.lock().put_last(sentinel);
    }

    /// The new primary, if a message on [`CHANNEL`] is about this group.
    fn read_switch(&self, message: &[Value]) -> Option<HostPort> {
        let [Value::BulkString(channel), Value::BulkString(text)] = message else {
            return None;
        };
        let mut parts = text.split(|byte| *byte == b' ');
        let group = parts.next()?;
        if channel != CHANNEL.as_bytes() || group != self.group.as_bytes() {
            return None;
        }
        let [_, _, host, port] = parts.collect::<Vec<_>>()[..] else {
            return None;
        };
        HostPort::new(host, port)
    }
}
