//! One connection of a pipeline, and the batches in flight on it. The pipeline decides about retries on another
//! connection.

pub mod plain_calls;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use socket2::Socket;

use crate::command;
use crate::command::script::Script;
use crate::command::{Acquire, Command, Outcome, Release, Reply, SCRIPTS, acquire, release};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::{Caller, Few};
use crate::util::clock::MonotonicTime;
use crate::util::slot::Slot;
use crate::wire::connect::connection::{Condition, Connection, ReplyContents};
use crate::wire::connect::errors;
use crate::wire::endpoint::Endpoint;
use crate::wire::endpoint::connector::Connector;
use crate::wire::net::error_replies;
use crate::wire::pipeline::connection::plain_calls::ContendedKeys;
use crate::wire::pipeline::request;
use crate::wire::pipeline::request::{Next, PendingRequest};
use crate::wire::scripts;
use crate::wire::scripts::plain;
use crate::wire::scripts::plain::{CompareAndDelete, Deletes, ServerClock};
use crate::wire::scripts::{Decoded, ScriptContext, ScriptRef};

/// The greatest number of keys in one script call, because a call blocks Redis for all other clients. A larger batch
/// takes several calls.
const MAX_KEYS: usize = 128;

/// The number of empty vectors that are kept for the next batches. A vector with room for more than [`LONGEST_SPARE`]
/// requests is freed.
const SPARE: usize = 4;
const LONGEST_SPARE: usize = 256;

/// A reader waits beyond its own deadline for replies that are due within this time.
const GRACE: Duration = Duration::from_millis(10);

pub use crate::wire::net::socket::wait_for_any;

/// The socket of a connection, to wait for its bytes.
pub type SharedSocket = Arc<Socket>;

/// Makes the connections of pipelines.
pub type SharedConnector = Arc<Connector>;

/// Makes a connector without connecting.
pub fn connector(endpoint: &Arc<Endpoint>) -> SharedConnector {
    Connector::new(endpoint)
}

/// The slot of the command's key, in which all keys of its script call have to be.
fn slot(command: &Command) -> Option<Slot> {
    command.key().map(Key::slot)
}

/// A call on the wire. Its last reply has the outcome; [other replies](InFlightBatch::before) come before.
#[derive(Clone, Copy)]
enum Call {
    Script {
        script: &'static Script,
        /// Whether the call has the script's text instead of its hash.
        by_text: bool,
    },
    /// Acquires by plain commands: see [`plain`].
    Plain {
        /// The estimate of the time of Redis in µs.
        clock: u64,
        /// Whether the call asks for the time.
        asks_time: bool,
    },
    /// A transaction that reads the time of Redis, as a trial before the first acquires by plain commands.
    Trial,
    /// The release of one lock by a command instead of a script.
    Delete(CompareAndDelete),
    /// A trial of this command on the key of the batch's first release, sent behind that release.
    DeleteTrial(CompareAndDelete),
    /// `WAIT`, sent behind the script calls of a batch. Its reply is the number of replicas that have the writes of
    /// these calls.
    Wait(Replicas),
}

impl Call {
    /// A call of the script by its hash, or by its text if the server refuses calls by hash.
    fn script(context: &ScriptContext, script: &'static Script) -> Self {
        let by_text = !context.calls_by_hash.allow_now();
        let script = context.script(script);
        Self::Script { script, by_text }
    }

    /// The name of the awaited command, for errors. `is_first`: the call has several commands, and none of them has a
    /// reply yet.
    fn name(self, is_first: bool) -> &'static str {
        match self {
            Self::Script { by_text: true, .. } => "EVAL",
            Self::Script { by_text: false, .. } => "EVALSHA",
            Self::Plain { .. } | Self::Trial if is_first => "MULTI",
            Self::Plain { .. } | Self::Trial => "EXEC",
            Self::Delete(command) | Self::DeleteTrial(command) => command.name(),
            Self::Wait(_) => "WAIT",
        }
    }
}

/// A call without a reply yet, and its requests, which share the reply. `WAIT` and a trial have no requests.
struct InFlightBatch {
    call: Call,
    requests: Vec<PendingRequest>,
    /// How many replies come before the reply to the call: those to `ASKING`, or to the commands before `EXEC`.
    before: usize,
    /// Whether the first of these replies is an error. `None` before it is read.
    begins_with_error: Option<bool>,
    /// The first error among these replies.
    refusal: Option<Value>,
    /// The length of the call as it was written.
    bytes: usize,
}

impl InFlightBatch {
    /// The command whose reply is awaited, for errors.
    fn awaited(&self) -> &'static str {
        self.call
            .name(self.before > 0 && self.begins_with_error.is_none())
    }

    fn contents(&self) -> ReplyContents {
        match self.call {
            Call::Script { script, .. } if script.layout.limit => {
                ReplyContents::Values(self.requests.len())
            }
            _ => ReplyContents::Internal,
        }
    }

    /// Records a reply that comes before the reply to the call.
    fn record_early(&mut self, reply: Value) {
        self.before -= 1;
        let is_error = error_replies::is_error(&reply);
        self.begins_with_error.get_or_insert(is_error);
        if is_error {
            self.refusal.get_or_insert(reply);
        }
    }

    fn released_keys(&self) -> impl Iterator<Item = Key> {
        let commands = self.requests.iter().map(|request| &request.command);
        commands.filter_map(|command| match command {
            Command::Release(Release { key, .. }) => Some(key.clone()),
            _ => None,
        })
    }
}

/// Whether an acquire found its key taken only because the release before it has not taken effect and is sent again.
/// Such an acquire has changed nothing, so it can be sent again, too.
fn is_too_early(request: &PendingRequest, outcome: &Outcome, released_late: &[Key]) -> bool {
    let found_taken = matches!(outcome, Ok(Reply::Contended { queued: None, .. }));
    let Command::Acquire(Acquire { key, .. }) = &request.command else {
        return false;
    };
    found_taken && released_late.contains(key) && request.is_wanted()
}

/// The replicas that have to acknowledge some of these requests. One `WAIT` covers all of these requests.
fn replicas_of(requests: &[PendingRequest]) -> Option<Replicas> {
    let replicas = requests.iter().filter_map(|it| it.command.replicas());
    replicas.reduce(Replicas::and)
}

/// The error of a request that only `acknowledged` replicas have acknowledged.
fn too_few(acknowledged: u64, asked: Replicas) -> Error {
    let Replicas { count, timeout } = asked;
    let message = format!(
        "{acknowledged} of {count} replicas acknowledged within {timeout:?}; check the links of the \
         replicas (INFO replication)"
    );
    Error::new(ErrorKind::Unavailable, message)
}

/// A connection with its batches in flight.
pub struct PipelinedConnection {
    connection: Connection,
    in_flight: VecDeque<InFlightBatch>,
    /// The deadline of the replies to the calls in flight, except the last `behind` calls. The first read sets it, and
    /// so does a leader that leaves before it reads.
    pub reply_by: Option<MonotonicTime>,
    /// The number of calls that were written after `reply_by` was set. They are the last calls in flight.
    behind: usize,
    /// Requests that succeeded, and that replicas have to acknowledge. The next reply to a `WAIT` decides about them.
    unacknowledged: Vec<(PendingRequest, Reply)>,
    /// Keys whose releases had to be written again. A later acquire of such a key may be in flight already, before the
    /// repeated release.
    released_late: Vec<Key>,
    /// The calls that are written next.
    buffer: Vec<u8>,
    /// Empty vectors for the next batches.
    spare: Vec<Vec<PendingRequest>>,
    /// The time of Redis, for acquires by plain commands.
    clock: ServerClock,
    /// How to release a lock without a script.
    deletes: Deletes,
    /// When the script last carried out an acquire on this connection.
    last_script: Option<MonotonicTime>,
    /// Keys that the script acquires and releases for a while.
    contended: ContendedKeys,
    /// Whether the last write failed, perhaps in the middle of a command. Then no further command may be written.
    write_failed: bool,
}

impl PipelinedConnection {
    pub fn new(connection: Connection) -> Self {
        Self {
            connection,
            in_flight: VecDeque::new(),
            reply_by: None,
            behind: 0,
            unacknowledged: Vec::new(),
            released_late: Vec::new(),
            buffer: Vec::new(),
            spare: Vec::new(),
            clock: ServerClock::default(),
            deletes: Deletes::default(),
            last_script: None,
            contended: ContendedKeys::default(),
            write_failed: false,
        }
    }

    /// Makes the next acquires by plain commands ask for the time of Redis.
    #[cfg(test)]
    pub fn age_clock(&mut self) {
        self.clock.age();
    }

    /// Whether the script acquires this key, because the key, or another one with the same entry, was contended.
    #[cfg(test)]
    pub fn is_contended(&self, key: &Key) -> bool {
        self.contended.has(key, MonotonicTime::now())
    }

    /// Whether to replace the connection after its missing replies are read.
    pub fn is_stale(&self) -> bool {
        self.connection.is_stale()
    }

    /// Whether the connection works, but is older than `max_connection_age`.
    pub fn is_old(&self) -> bool {
        self.connection.condition() == Condition::Old
    }

    /// Whether new requests may be written, and the connection need not be replaced.
    pub fn is_fit(&self) -> bool {
        self.connection.condition() == Condition::Fit
    }

    /// Makes the connection usable for a while, although it is old.
    pub fn postpone_replacement(&mut self) {
        self.connection.postpone_replacement();
    }

    /// Whether the connection is stale and misses no reply, so that it can be replaced now.
    pub fn is_stale_and_idle(&self) -> bool {
        self.in_flight.is_empty() && self.is_stale()
    }

    /// The number of commands without a reply or an acknowledgement. `WAIT` counts as one.
    pub fn unanswered(&self) -> usize {
        let batches = self.in_flight.iter();
        let in_flight: usize = batches.map(|batch| batch.requests.len().max(1)).sum();
        in_flight + self.unacknowledged.len()
    }

    /// The length on the wire of the commands without a reply.
    pub fn unanswered_bytes(&self) -> usize {
        self.in_flight.iter().map(|batch| batch.bytes).sum()
    }

    /// Whether a leader has left before all replies were read. Its successor reads the rest before it writes awaited
    /// requests.
    pub fn is_half_read(&self) -> bool {
        self.reply_by.is_some()
    }

    pub fn socket(&self) -> SharedSocket {
        self.connection.socket()
    }

    pub fn has_socket(&self, socket: &SharedSocket) -> bool {
        Arc::ptr_eq(&self.socket(), socket)
    }

    /// Records that a leader leaves before it reads the replies, which are due at `due`.
    pub fn leave_unread(&mut self, due: MonotonicTime) {
        self.reply_by.get_or_insert(due);
    }

    /// Records that a reader leaves. If callers do not wait for the missing replies, the replies are read with those of
    /// the next batch. (A request whose caller has left keeps its completion: its late grant needs an undo.)
    pub fn leave_unawaited(&mut self) {
        let has_completion = |request: &PendingRequest| request.completion.is_some();
        if !self.requests().any(has_completion) {
            (self.reply_by, self.behind) = (None, 0);
        }
    }

    fn requests(&self) -> impl Iterator<Item = &PendingRequest> {
        let unacknowledged = self.unacknowledged.iter().map(|(request, _)| request);
        unacknowledged.chain(self.in_flight.iter().flat_map(|batch| &batch.requests))
    }

    /// After a reader has left: the first caller that waits for a request in flight and can lead.
    pub fn next_leader(&self) -> Option<&Arc<Caller>> {
        self.reply_by?;
        request::next_leader(self.requests())
    }

    /// Whether a reader has left while a caller waits for a request in flight.
    pub fn is_waited_for(&self) -> bool {
        self.is_half_read() && self.requests().any(PendingRequest::is_waited_for)
    }

    /// The keys of releases in flight that may grant their keys to other clients.
    pub fn keys_for_next_waiters(&self) -> impl Iterator<Item = &Key> {
        request::keys_for_next_waiters(self.requests())
    }

    /// An empty vector for the next batch.
    pub fn empty_batch(&mut self) -> Vec<PendingRequest> {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps an empty vector for a later batch.
    pub fn keep(&mut self, used: Vec<PendingRequest>) {
        debug_assert!(
            used.is_empty(),
            "the requests in the vector would be sent twice"
        );
        if self.spare.len() < SPARE && used.capacity() <= LONGEST_SPARE {
            self.spare.push(used);
        }
    }

    /// Writes a batch to the socket. Returns an error if bytes are left at `due`. The batch is in flight even after an
    /// error.
    pub fn write(
        &mut self,
        context: &ScriptContext,
        mut batch: Vec<PendingRequest>,
        due: MonotonicTime,
    ) -> Result<(), Error> {
        debug_assert!(self.buffer.is_empty(), "each read writes its repeats");
        if batch.is_empty() {
            self.keep(batch);
            return Ok(());
        }
        let mut by_script = SCRIPTS.map(|_| Vec::new());
        let replicas = replicas_of(&batch);
        for request in batch.drain(..) {
            if let Some(script) = request.command.script() {
                let of_script = &mut by_script[command::place(script)];
                if of_script.capacity() == 0 {
                    *of_script = self.empty_batch();
                }
                of_script.push(request);
            }
        }
        self.keep(batch);
        let before = self.in_flight.len();
        let mut needs_trial = false;
        for (script, mut requests) in SCRIPTS.into_iter().zip(by_script) {
            if requests.is_empty() {
                continue;
            }
            if script == &release::SCRIPT {
                self.enqueue_releases(context, requests);
                continue;
            }
            if script == &acquire::SCRIPT {
                needs_trial = self.enqueue_plain(context, &mut requests);
            }
            self.enqueue_all(context, Call::script(context, script), MAX_KEYS, requests);
        }
        self.enqueue_wait(context, replicas);
        // The trial comes last: a server may accept `MULTI` and then refuse `EXEC`, which makes the connection useless.
        if needs_trial {
            self.enqueue(context, Call::Trial, Vec::new());
        }
        if self.is_half_read() {
            self.behind += self.in_flight.len() - before;
        }
        self.send(due)
    }

    /// Appends a call to `buffer`, and records it as in flight.
    fn enqueue(&mut self, context: &ScriptContext, call: Call, requests: Vec<PendingRequest>) {
        let is_asking = requests.iter().any(|request| request.route.is_asking);
        let commands = requests.iter().map(|request| &request.command);
        let start = self.buffer.len();
        if is_asking {
            scripts::encode_words(&mut self.buffer, "ASKING", std::iter::empty());
        }
        let before = match call {
            Call::Script { script, by_text } => {
                let by = if by_text {
                    ScriptRef::Text(script.text())
                } else {
                    ScriptRef::Hash(script.hash())
                };
                scripts::encode(&mut self.buffer, by, script, context, commands);
                usize::from(is_asking)
            }
            Call::Plain { clock, asks_time } => {
                let buffer = &mut self.buffer;
                plain::encode_acquires(buffer, context, commands, clock, asks_time)
            }
            Call::Trial => plain::encode_trial(&mut self.buffer),
            Call::Delete(command) => {
                commands.for_each(|it| command.encode_release(&mut self.buffer, context, it));
                0
            }
            Call::DeleteTrial(command) => {
                let mut batches = self.in_flight.iter().rev();
                let key = batches.find_map(|batch| batch.released_keys().next());
                let key = key.expect("a trial follows a release");
                command.encode_trial(&mut self.buffer, &key);
                0
            }
            Call::Wait(Replicas { count, timeout }) => {
                let words = [count.to_string(), timeout.as_millis().to_string()];
                scripts::encode_words(&mut self.buffer, "WAIT", words.iter().map(String::as_str));
                0
            }
        };
        self.in_flight.push_back(InFlightBatch {
            call,
            requests,
            before,
            begins_with_error: None,
            refusal: None,
            bytes: self.buffer.len() - start,
        });
    }

    /// Enqueues a `WAIT` behind the calls of a batch if `replicas` have to acknowledge some of its requests.
    fn enqueue_wait(&mut self, context: &ScriptContext, replicas: Option<Replicas>) {
        if let Some(replicas) = replicas {
            self.enqueue(context, Call::Wait(replicas), Vec::new());
        }
    }

    /// Writes all of `buffer`. Returns an error if bytes are left at `due`.
    fn send(&mut self, due: MonotonicTime) -> Result<(), Error> {
        let written = self.connection.send(&self.buffer, due);
        self.write_failed = written.is_err();
        self.buffer.clear();
        self.buffer.shrink_to(64 * 1024);
        written
    }

    /// Reads all missing replies, oldest first, and passes the next step of each request to `deliver`. Writes calls
    /// that a reply makes necessary.
    ///
    /// Returns an error if a reply is missing at `due`, or at `reply_by` if that is earlier. Returns false at `until`
    /// if replies are missing and the next deadline is more than [`GRACE`] away. The next call then reads on.
    ///
    /// Also returns an error if the sentinels name another primary, which may not know what this server has granted.
    pub fn read(
        &mut self,
        context: &ScriptContext,
        until: Option<MonotonicTime>,
        due: MonotonicTime,
        deliver: &mut impl FnMut(Next),
    ) -> Result<bool, Error> {
        while let Some(batch) = self.in_flight.front() {
            let is_last = batch.before == 0;
            let Some(reply) = self.receive(until, due)? else {
                return Ok(false);
            };
            if is_last {
                self.finish_call(context, reply, deliver)?;
                self.clear_reply_by_if_read();
            } else if let Some(batch) = self.in_flight.front_mut() {
                batch.record_early(reply);
            }
        }
        (self.reply_by, self.behind) = (None, 0);
        self.released_late.clear();
        Ok(true)
    }

    /// Writes the calls that the last reply has made necessary, and reads the next reply to the oldest call in flight.
    /// Returns `None` at `until` if the reply is missing.
    fn receive(
        &mut self,
        until: Option<MonotonicTime>,
        due: MonotonicTime,
    ) -> Result<Option<Value>, Error> {
        let due = due.min(*self.reply_by.get_or_insert(due));
        if !self.buffer.is_empty() {
            self.send(due)?;
        }
        self.connection.check_primary()?;
        let Some(batch) = self.in_flight.front() else {
            return Ok(None);
        };
        let until = until.filter(|until| until.after(GRACE) < due);
        let (awaited, contents) = (batch.awaited(), batch.contents());
        let received =
            self.connection
                .receive_until(awaited, until.unwrap_or(due), due, contents)?;
        self.connection.check_primary()?;
        Ok(received)
    }

    /// Handles the last reply to the oldest call in flight.
    fn finish_call(
        &mut self,
        context: &ScriptContext,
        reply: Value,
        deliver: &mut impl FnMut(Next),
    ) -> Result<(), Error> {
        let Some(batch) = self.in_flight.front_mut() else {
            return Ok(());
        };
        let refusal = batch.refusal.take();
        match batch.call {
            Call::Script { script, by_text } => {
                // A node that refuses `ASKING` also refuses the call. The first error has the reason.
                let refusal = refusal.filter(|_| error_replies::is_error(&reply));
                let reply = refusal.unwrap_or(reply);
                return self.finish_script(context, script, by_text, reply, deliver);
            }
            Call::Plain { asks_time, .. } => {
                return self.finish_plain(context, &reply, refusal, asks_time, deliver);
            }
            Call::Trial => self.finish_trial(context, reply, refusal),
            Call::Delete(_) => self.finish_delete(context, &reply, deliver),
            Call::DeleteTrial(command) => self.finish_delete_trial(context, command, &reply),
            Call::Wait(_) => {
                self.decide_unacknowledged(reply, deliver)?;
                self.in_flight.pop_front();
            }
        }
        Ok(())
    }

    /// Handles the reply to a script call: delivers the outcomes, or writes the call again in another form.
    fn finish_script(
        &mut self,
        context: &ScriptContext,
        script: &'static Script,
        by_text: bool,
        reply: Value,
        deliver: &mut impl FnMut(Next),
    ) -> Result<(), Error> {
        let n = self
            .in_flight
            .front()
            .map_or(0, |batch| batch.requests.len());
        match scripts::decode(script, n, reply, &context.prefix, context.other_library) {
            Decoded::Outcomes(outcomes) => {
                let call = Call::Script { script, by_text };
                self.finish_outcomes(context, call, outcomes, deliver);
            }
            Decoded::OutcomeUnknown(error) => {
                let error = error.at(&self.connection.address);
                let mut requests = self.take_answered();
                for request in requests.drain(..) {
                    deliver(request.on_unknown(&error));
                }
                self.keep(requests);
            }
            Decoded::SplitBatch => self.repeat_script(context, script, by_text, 1),
            Decoded::NoScript { are_hashes_refused } if !by_text => {
                if are_hashes_refused {
                    context.calls_by_hash.refuse(MonotonicTime::now());
                }
                self.repeat_script(context, script, true, MAX_KEYS);
            }
            Decoded::NoScript { .. } => {
                self.connection.discard_and_suspect_all();
                let message = format!(
                    "{} replies NOSCRIPT to a call with the script's text; check whether a proxy answers there",
                    self.connection.address
                );
                return Err(Error::new(ErrorKind::Protocol, message));
            }
            Decoded::Unexpected(error) => {
                self.connection.discard_and_suspect_all();
                return Err(error.at(&self.connection.address));
            }
        }
        Ok(())
    }

    /// Takes the requests of the oldest call in flight, which is done. An acquire that was written behind a release
    /// among them is no longer too early.
    fn take_answered(&mut self) -> Vec<PendingRequest> {
        let Some(batch) = self.in_flight.pop_front() else {
            return Vec::new();
        };
        if !self.released_late.is_empty() {
            let released: Vec<Key> = batch.released_keys().collect();
            self.released_late.retain(|key| !released.contains(key));
        }
        batch.requests
    }

    /// Delivers the outcomes of a script `call`, and repeats acquires that were too early.
    ///
    /// If such an acquire gives the keys of its set back, it is skipped instead, and its caller sends the whole set
    /// again. In a call without the rest of its set, the script would treat keys of another caller as keys of the set.
    fn finish_outcomes(
        &mut self,
        context: &ScriptContext,
        call: Call,
        outcomes: Few<Outcome>,
        deliver: &mut impl FnMut(Next),
    ) {
        let mut requests = self.take_answered();
        let mut too_early = Vec::new();
        for (request, outcome) in requests.drain(..).zip(outcomes) {
            if is_too_early(&request, &outcome, &self.released_late) {
                match request.command.gives_set_back() {
                    true => self.finish(request, Ok(Reply::Skipped), deliver),
                    false => too_early.push(request),
                }
                continue;
            }
            if let (Command::Acquire(Acquire { key, .. }), Ok(reply)) = (&request.command, &outcome)
            {
                let now = MonotonicTime::now();
                self.last_script = Some(now);
                if matches!(reply, Reply::Contended { .. } | Reply::Foreign(_)) {
                    self.contended.record(key, now);
                }
            }
            self.finish(request, outcome, deliver);
        }
        self.keep(requests);
        if !too_early.is_empty() {
            let replicas = replicas_of(&too_early);
            self.enqueue_all(context, call, MAX_KEYS, too_early);
            self.enqueue_wait(context, replicas);
        }
    }

    /// Passes the outcome of a request to `deliver`. If replicas have to acknowledge the request, keeps the outcome
    /// until then. Adds the server's address to an error.
    fn finish(
        &mut self,
        request: PendingRequest,
        outcome: Outcome,
        deliver: &mut impl FnMut(Next),
    ) {
        match outcome {
            Ok(reply) if request.command.replicas().is_some() && reply.is_success() => {
                self.unacknowledged.push((request, reply));
            }
            outcome => {
                let named = |error| errors::reply_error(&self.connection.address, error);
                deliver(request.on_reply(outcome.map_err(named)));
            }
        }
    }

    /// Clears `reply_by` once all replies that a reader left unread have come.
    fn clear_reply_by_if_read(&mut self) {
        if self.in_flight.len() <= self.behind {
            (self.reply_by, self.behind) = (None, 0);
        }
    }

    /// Handles the reply to a `WAIT`: the requests that waited for this reply go to `deliver`. If too few replicas have
    /// acknowledged a request, its outcome is an error, although the primary may have carried it out.
    fn decide_unacknowledged(
        &mut self,
        reply: Value,
        deliver: &mut impl FnMut(Next),
    ) -> Result<(), Error> {
        let acknowledged = match reply {
            Value::Int(count @ 0..) => Ok(count as u64),
            Value::ServerError(error) => {
                Err(error_replies::wait_refused(error.code(), error.details()))
            }
            other => {
                self.connection.discard_and_suspect_all();
                let address = &self.connection.address;
                return Err(error_replies::unexpected_reply("WAIT", &other).at(address));
            }
        };
        let address = &self.connection.address;
        for (request, reply) in self.unacknowledged.drain(..) {
            let asked = request.command.replicas().expect("only such requests wait");
            let error = match &acknowledged {
                Ok(count) if *count >= u64::from(asked.count) => {
                    deliver(request.on_reply(Ok(reply)));
                    continue;
                }
                Ok(count) => too_few(*count, asked),
                Err(refused) => refused.clone(),
            };
            deliver(request.on_unknown(&errors::reply_error(address, error)));
        }
        Ok(())
    }

    /// Takes the oldest call in flight, and enqueues its requests again, in calls of at most `at_once` keys. The server
    /// has carried out no part of the call, because it does not know the script or has refused one of the keys. Drops
    /// an acquire whose caller has left, unless plain commands may have set its key.
    fn repeat(&mut self, context: &ScriptContext, call: Call, at_once: usize) {
        let Some(InFlightBatch { mut requests, .. }) = self.in_flight.pop_front() else {
            return;
        };
        requests.retain(|request| request.may_be_set || request.is_wanted());
        let replicas = replicas_of(&requests);
        self.enqueue_all(context, call, at_once, requests);
        self.enqueue_wait(context, replicas);
    }

    /// Repeats the oldest call in flight as calls of `script` with at most `at_once` keys. Acquires that were written
    /// behind the call's releases are then too early.
    fn repeat_script(
        &mut self,
        context: &ScriptContext,
        script: &'static Script,
        by_text: bool,
        at_once: usize,
    ) {
        let released = self.in_flight.front().into_iter();
        let released = released.flat_map(InFlightBatch::released_keys);
        self.released_late.extend(released);
        self.repeat(context, Call::Script { script, by_text }, at_once);
    }

    fn enqueue_all(
        &mut self,
        context: &ScriptContext,
        call: Call,
        at_once: usize,
        mut requests: Vec<PendingRequest>,
    ) {
        let asking = requests.extract_if(.., |request| request.route.is_asking);
        // `ASKING` is valid for one call. Few requests need it, so each of them has its own call.
        let asking: Vec<PendingRequest> = asking.collect();
        for request in asking {
            self.enqueue(context, call, vec![request]);
        }
        if context.has_slots() && requests.len() > 1 {
            return self.enqueue_by_slot(context, call, at_once, requests);
        }
        // With `split_off`, each part would have the capacity of the whole batch.
        while requests.len() > at_once {
            let part = requests.drain(..at_once).collect();
            self.enqueue(context, call, part);
        }
        if !requests.is_empty() {
            self.enqueue(context, call, requests);
        }
    }

    /// Enqueues calls, each with the requests of one slot. Requests for one slot keep their order.
    fn enqueue_by_slot(
        &mut self,
        context: &ScriptContext,
        call: Call,
        at_once: usize,
        mut requests: Vec<PendingRequest>,
    ) {
        requests.sort_by_cached_key(|request| slot(&request.command));
        let mut rest = requests.drain(..).peekable();
        while let Some(first) = rest.next() {
            let slot_of_call = slot(&first.command);
            let mut part = vec![first];
            while part.len() < at_once
                && let Some(next) = rest.next_if(|next| slot(&next.command) == slot_of_call)
            {
                part.push(next);
            }
            self.enqueue(context, call, part);
        }
        drop(rest);
        self.keep(requests);
    }

    /// Whether the connection may be used again.
    pub fn is_usable(&self) -> bool {
        !self.connection.broken
    }

    /// Closes the connection after `error`, and returns the requests in flight, oldest first. Before the close, writes
    /// the releases of acquires that have no reply, so that the server reads the releases after the acquires.
    pub fn abandon(mut self, context: &ScriptContext, error: &Error) -> Vec<PendingRequest> {
        self.connection.discard();
        if error.kind() == ErrorKind::Unavailable {
            self.record_lost_trials(context);
        }
        let unacknowledged = std::mem::take(&mut self.unacknowledged).into_iter();
        let in_flight = std::mem::take(&mut self.in_flight).into_iter();
        let in_flight: Vec<PendingRequest> = unacknowledged
            .map(|(request, _)| request)
            .chain(in_flight.flat_map(|batch| batch.requests))
            .collect();
        let mut releases: Vec<Command> = in_flight
            .iter()
            .filter_map(|request| request.command.undo(MonotonicTime::now()))
            .map(Command::Release)
            .collect();
        if !releases.is_empty() && !self.write_failed {
            // Calls that were not written yet must not follow the releases.
            self.buffer.clear();
            let script = context.script(&release::SCRIPT);
            let mut call = ScriptRef::Text(script.text());
            let has_slots = context.has_slots();
            if has_slots {
                releases.sort_by_cached_key(slot);
            }
            let one_call = |a: &Command, b: &Command| !has_slots || slot(a) == slot(b);
            for releases in releases.chunk_by(one_call) {
                for releases in releases.chunks(MAX_KEYS) {
                    scripts::encode(&mut self.buffer, call, script, context, releases.iter());
                    // After the first call, the server knows the script, so the other calls use its hash.
                    call = ScriptRef::Hash(script.hash());
                }
            }
            // An error is ignored, since the releases are repeated on other connections. The deadline is now, so the
            // write does not wait for a server that does not read.
            let _ = self.connection.send(&self.buffer, MonotonicTime::now());
        }
        in_flight
    }
}
