//! The thread that listens to one sentinel at a time, and notices a fail-over at once. It connects to sentinels only.
//!
//! From time to time, the thread also asks its own sentinel and one of the others for the primary. If its own sentinel
//! has missed a fail-over, the thread moves to the next one. If the old address in a message is not that of the last
//! known primary, the thread ignores the message, and asks the sentinel instead.

use std::sync::Arc;
use std::time::Duration;

use redis::{ProtocolVersion, PushKind, Value};

use crate::process::threads::ThreadGroup;
use crate::report::error::Error;
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::util::mailbox::Mailbox;
use crate::wire::connect::connection::LONGEST_REPLY;
use crate::wire::connect::errors::ConnectErrors;
use crate::wire::connect::url::HostPort;
use crate::wire::endpoint::Endpoint;
use crate::wire::net::socket::Sockets;
use crate::wire::sentinel::{
    CHANNEL, NamedPrimary, QUERY_COMMANDS, SentinelConnection, Sentinels, State as SentinelState,
};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A connection with a shorter life does not reset the pause.
const SHORTEST_LIFE: Duration = Duration::from_secs(1);
/// The time between two queries for the primary. They check that the sentinel is alive, and find a fail-over whose
/// message was lost.
const QUERY_INTERVAL: Duration = Duration::from_secs(5);
/// The time for the query of another sentinel. During the query, the thread does not read its own sentinel's messages.
const OTHER_TIMEOUT: Duration = Duration::from_millis(500);

/// The thread `leasehold-sentinels` of a client.
pub struct SentinelWatcher {
    endpoint: Arc<Endpoint>,
    /// The time-out of connecting and of each answer.
    timeout: Duration,
    /// The time-out of a query of another sentinel.
    pub other_timeout: Duration,
    pub sockets: Sockets,
    mailbox: Mailbox<()>,
}

impl SentinelWatcher {
    pub fn new(endpoint: Arc<Endpoint>, timeout: Duration) -> Self {
        Self {
            endpoint,
            timeout,
            other_timeout: timeout.min(OTHER_TIMEOUT),
            sockets: Sockets::default(),
            mailbox: Mailbox::default(),
        }
    }

    /// Starts the thread, if the endpoint has sentinels.
    pub fn start(self: &Arc<Self>, threads: &ThreadGroup) -> Result<(), Error> {
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

    /// Ends the thread, and closes its sockets. Only an attempt to connect can delay its end.
    pub fn stop(&self) {
        self.sockets.close();
        self.mailbox.stop(|()| ());
    }

    fn run(&self, sentinels: &Sentinels) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        while !self.mailbox.is_stopped() {
            let sentinel = sentinels.first();
            let mut listening_since = None;
            let _ = self.listen(sentinels, &sentinel, &mut listening_since);
            let lived =
                listening_since.map_or(Duration::ZERO, |since| MonotonicTime::now().since(since));
            if lived >= SHORTEST_LIFE {
                backoff.reset();
            }
            sentinels.put_last(&sentinel);
            self.mailbox.sleep(backoff.next());
        }
    }

    /// Listens to one sentinel until the connection breaks or an answer is late. Sets `since` to the time of the first
    /// answer. The caller treats an error and `Ok` in the same way.
    fn listen(
        &self,
        sentinels: &Sentinels,
        sentinel: &HostPort,
        since: &mut Option<MonotonicTime>,
    ) -> Result<(), Error> {
        let info = sentinels.info_of(sentinel)?;
        let prefix = self.endpoint.dialer.prefix();
        let attempted = ConnectErrors::new(&info, self.timeout, "`command_timeout`", prefix);
        let deadline = MonotonicTime::now().after(self.timeout);
        let connection = self
            .endpoint
            .dialer
            .connect(attempted, deadline, |socket| self.sockets.register(socket))?;
        let mut connection = SentinelConnection::new(&self.endpoint.dialer, attempted, connection);
        // With RESP3, the sentinel also answers queries on a connection with a subscription.
        connection.log_in(ProtocolVersion::RESP3, deadline)?;
        let mut subscribe = redis::pipe();
        subscribe.cmd("SUBSCRIBE").arg(CHANNEL);
        connection.send(&subscribe, deadline)?;
        connection.send(&sentinels.query(), deadline)?;
        let limits = self.endpoint.limits;
        // The queries also keep the network from forgetting the connection.
        let query_interval = QUERY_INTERVAL.min(limits.max_idle / 2);
        let replace_at = limits.replace_at(MonotonicTime::now());
        let mut queries = Queries::begin(deadline);
        let mut is_subscribe_answered = false;
        let mut others_asked = 0;
        loop {
            let now = MonotonicTime::now();
            if replace_at <= now {
                // The sentinel's name may lead to another sentinel now. The next connection begins with a query.
                return Ok(());
            }
            if queries.is_due(now) {
                let by = now.after(self.timeout);
                connection.send(&sentinels.query(), by)?;
                queries.answer_by = Some(by);
            }
            match connection.receiver.receive(queries.next(), LONGEST_REPLY) {
                Ok(Value::Push { kind, data }) => {
                    is_subscribe_answered |= kind == PushKind::Subscribe;
                    if kind == PushKind::Message && self.hear(sentinels, sentinel, &data) {
                        // Asks for the number of this fail-over.
                        queries.ask_again_at(now);
                    }
                }
                // If the user may not subscribe, only the queries find a fail-over.
                Ok(Value::ServerError(_)) if !is_subscribe_answered => is_subscribe_answered = true,
                Ok(reply) => {
                    if let Some(replies) = queries.add_reply(reply) {
                        let answer = sentinels.read_answer(attempted, replies)?;
                        let accepted =
                            sentinels.accept_if(sentinel, answer, SentinelState::is_current);
                        let Ok(named) = accepted else {
                            // This sentinel has missed a fail-over, so it may miss the next one, too.
                            return Ok(());
                        };
                        since.get_or_insert(now);
                        self.follow(&named);
                        queries.end(now, query_interval);
                        if self.other_knows_more(sentinels, sentinel, others_asked) {
                            return Ok(());
                        }
                        others_asked += 1;
                    }
                }
                Err(error) if error.is_timeout() && queries.answer_by.is_none() => {}
                Err(_) => return Ok(()),
            }
            // A sentinel that publishes without end may never answer.
            let answer_by = queries.answer_by;
            if answer_by.is_some_and(|by| by.after(self.timeout) < MonotonicTime::now()) {
                return Ok(());
            }
        }
    }

    /// Handles the fail-over in `message`. Returns false if the message is not about a fail-over of this group.
    fn hear(&self, sentinels: &Sentinels, sentinel: &HostPort, message: &[Value]) -> bool {
        let Some(switch) = sentinels.read_switch(message) else {
            return false;
        };
        if sentinels.apply_switch(sentinel, &switch) {
            self.endpoint.follow_switch();
        }
        true
    }

    fn follow(&self, named: &NamedPrimary) {
        if named.has_changed {
            self.endpoint.follow_switch();
        }
    }

    /// Asks another sentinel, because `sentinel` may be cut off. Returns true if the other sentinel knows of a later
    /// fail-over. The client then asks that sentinel first.
    fn other_knows_more(&self, sentinels: &Sentinels, sentinel: &HostPort, turn: usize) -> bool {
        let Some(other) = sentinels.other_than(sentinel, turn) else {
            return false;
        };
        let deadline = MonotonicTime::now().after(self.other_timeout);
        let answer = sentinels.ask(&self.endpoint.dialer, &other, deadline, &self.sockets);
        let newer =
            answer.map(|answer| sentinels.accept_if(&other, answer, SentinelState::is_older_than));
        let Ok(Ok(named)) = newer else {
            return false;
        };
        self.follow(&named);
        true
    }
}

/// The queries on one connection. At most one query at a time has no answer.
struct Queries {
    /// The replies to the current query so far.
    replies: Vec<Value>,
    /// The deadline of the current query's answer. `None` if no query is under way.
    answer_by: Option<MonotonicTime>,
    /// When to send the next query.
    ask_at: MonotonicTime,
    /// Whether the thread asks again after the current query: a message came, and the answer may be older than the
    /// message.
    asks_again: bool,
}

impl Queries {
    /// The state after the first query was sent. Its answer has to come by `answer_by`.
    fn begin(answer_by: MonotonicTime) -> Self {
        Self {
            replies: Vec::new(),
            answer_by: Some(answer_by),
            ask_at: answer_by,
            asks_again: false,
        }
    }

    fn is_due(&self, now: MonotonicTime) -> bool {
        self.answer_by.is_none() && self.ask_at <= now
    }

    /// The deadline of the current answer, or the time of the next query.
    fn next(&self) -> MonotonicTime {
        self.answer_by.unwrap_or(self.ask_at)
    }

    /// Makes the next query due at `now`, or when the current one has its answer.
    fn ask_again_at(&mut self, now: MonotonicTime) {
        self.ask_at = now;
        self.asks_again = self.answer_by.is_some();
    }

    /// Adds a reply. After the last reply to the current query, returns all of them.
    fn add_reply(&mut self, reply: Value) -> Option<Vec<Value>> {
        self.replies.push(reply);
        let is_complete = self.replies.len() == QUERY_COMMANDS;
        is_complete.then(|| std::mem::take(&mut self.replies))
    }

    /// Ends the current query, which was answered at `now`. The next one follows after `interval`, or at once.
    fn end(&mut self, now: MonotonicTime, interval: Duration) {
        self.answer_by = None;
        self.ask_at = match std::mem::take(&mut self.asks_again) {
            true => now,
            false => now.after(interval),
        };
    }
}
