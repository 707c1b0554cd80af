//! One connection and what is in flight on it: batches written, answers unanswered. Decides nothing about
//! who waits for whom and never retries on another connection; that is the pipeline's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use r2d2::PooledConnection;

use crate::error::{Error, ErrorKind};
use crate::store::command::{Command, Reply};
use crate::store::redis::connection::{Connector, Endpoint, ReplyContents};
use crate::store::redis::pipeline::caller::Few;
use crate::store::redis::pipeline::request::PendingRequest;
use crate::store::redis::scripts::{self, Decoded, ScriptContext, ScriptKind, ScriptRef};
use crate::util::clock::MonotonicTime;
use crate::util::key::Key;

/// Most keys in one script call, which blocks Redis for all others. A batch with more takes several calls.
const MAX_KEYS: usize = 128;

/// How many used batches are kept for the next ones: those are of a few kinds at most. Longer ones are
/// given back to the heap.
const SPARE: usize = 4;
const LONGEST_SPARE: usize = 256;

/// Longest pause between attempts to connect, while Redis is away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

pub(crate) type Pool = r2d2::Pool<Connector>;

/// Where pipelines and transactions find their connections, `size` at most. It makes them when they are
/// asked for.
pub(crate) fn pool(endpoint: &Arc<Endpoint>, size: usize) -> Pool {
    r2d2::Pool::builder()
        .max_size(size as u32)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .idle_timeout(None)
        .max_lifetime(None)
        // Not how long anybody waits: half of it bounds the pause between attempts to connect.
        .connection_timeout(RECONNECT_PAUSE * 2)
        .error_handler(Box::new(r2d2::NopErrorHandler))
        .build_unchecked(Connector(Arc::clone(endpoint)))
}

/// A connection for one transaction, within `timeout`.
pub(crate) fn transaction_connection(
    pool: &Pool,
    endpoint: &Endpoint,
    timeout: Duration,
) -> Result<PooledConnection<Connector>, Error> {
    let deadline = MonotonicTime::now().after(timeout);
    loop {
        match pool.get_timeout(deadline.since(MonotonicTime::now())) {
            Ok(mut connection) if connection.is_stale() => connection.discard(),
            Ok(connection) => return Ok(connection),
            Err(timed_out) => {
                return Err(endpoint.last_error().unwrap_or_else(|| {
                    let message = "no connection in time";
                    Error::new(ErrorKind::Unavailable, message).with_source(timed_out)
                }));
            }
        }
    }
}

/// Commands that share one script call, and so one answer.
struct InFlightBatch {
    kind: ScriptKind,
    by_text: bool,
    requests: Vec<PendingRequest>,
}

impl InFlightBatch {
    fn keys(&self) -> impl Iterator<Item = Key> {
        let commands = self.requests.iter().map(|request| &request.command);
        commands.filter_map(|command| match command {
            Command::Release { key, .. } => Some(key.clone()),
            _ => None,
        })
    }
}

/// Whether an acquire found a key taken whose release was written before it and not carried out. Then
/// nothing was done for it, and it can be asked again.
fn is_too_early(request: &PendingRequest, answer: &Answer, released_late: &[Key]) -> bool {
    let found_taken = matches!(
        answer,
        Answer::Outcome(Ok(Reply::Contended { queued: None, .. }))
    );
    let Command::Acquire { key, .. } = &request.command else {
        return false;
    };
    found_taken && released_late.contains(key) && request.is_wanted()
}

/// What a script call said of one of its commands.
pub(crate) enum Answer {
    Outcome(Result<Reply, Error>),
    /// An error that leaves open whether it was done.
    OutcomeUnknown(Error),
}

pub(crate) struct PipelinedConnection {
    connection: PooledConnection<Connector>,
    in_flight: VecDeque<InFlightBatch>,
    buffer: Vec<u8>,
    /// Empty ones that have been used, to be used again.
    spare: Vec<Vec<PendingRequest>>,
    /// What was last written may not have arrived whole, so nothing may be written behind it.
    cut: bool,
}

impl PipelinedConnection {
    pub(crate) fn new(connection: PooledConnection<Connector>) -> Self {
        Self {
            connection,
            in_flight: VecDeque::new(),
            buffer: Vec::new(),
            spare: Vec::new(),
            cut: false,
        }
    }

    /// It is to be replaced once all answers that are unanswered on it have been read.
    pub(crate) fn is_stale(&self) -> bool {
        self.connection.is_stale()
    }

    /// It is to be replaced, and nothing is unanswered on it.
    pub(crate) fn is_suspect(&self) -> bool {
        self.in_flight.is_empty() && self.is_stale()
    }

    /// Commands whose answers have not been read.
    pub(crate) fn unanswered(&self) -> usize {
        self.in_flight.iter().map(|one| one.requests.len()).sum()
    }

    /// The keys that are being passed on to others, as far as that has not been answered.
    pub(crate) fn passing_on(&self) -> impl Iterator<Item = &Key> {
        let requests = self.in_flight.iter().flat_map(|one| &one.requests);
        requests.filter_map(|request| request.command.key_for_next_waiter())
    }

    /// Where to gather the next batch.
    pub(crate) fn empty_batch(&mut self) -> Vec<PendingRequest> {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps an emptied batch.
    pub(crate) fn keep(&mut self, used: Vec<PendingRequest>) {
        debug_assert!(
            used.is_empty(),
            "what is in it would go into the next batch"
        );
        if self.spare.len() < SPARE && used.capacity() <= LONGEST_SPARE {
            self.spare.push(used);
        }
    }

    /// Puts a batch on the connection. Whatever happens, it is then in flight.
    pub(crate) fn write(
        &mut self,
        names: &ScriptContext,
        mut batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
    ) -> Result<(), Error> {
        let mut by_kind = ScriptKind::ALL.map(|_| Vec::new());
        for request in batch.drain(..) {
            if let Some(kind) = ScriptKind::of(&request.command) {
                let of_kind = &mut by_kind[kind as usize];
                if of_kind.capacity() == 0 {
                    *of_kind = self.empty_batch();
                }
                of_kind.push(request);
            }
        }
        self.keep(batch);
        self.buffer.clear();
        for (kind, requests) in ScriptKind::ALL.into_iter().zip(by_kind) {
            self.enqueue_all(names, kind, MAX_KEYS, false, requests);
        }
        self.send(deadline)
    }

    fn enqueue(
        &mut self,
        names: &ScriptContext,
        kind: ScriptKind,
        by_text: bool,
        requests: Vec<PendingRequest>,
    ) {
        let call = if by_text {
            ScriptRef::Text(kind.text())
        } else {
            ScriptRef::Hash(kind.hash())
        };
        let commands = requests.iter().map(|request| &request.command);
        scripts::encode(&mut self.buffer, call, kind, names, commands);
        self.in_flight.push_back(InFlightBatch {
            kind,
            by_text,
            requests,
        });
    }

    fn send(&mut self, deadline: MonotonicTime) -> Result<(), Error> {
        let sent = self.connection.send(&self.buffer, deadline);
        self.cut = sent.is_err();
        self.buffer.clear();
        self.buffer.shrink_to(64 * 1024);
        sent
    }

    /// Reads every answer that is unanswered, oldest first, by `deadline`, and hands each command to `deliver`
    /// with its answer.
    pub(crate) fn read(
        &mut self,
        names: &ScriptContext,
        deadline: MonotonicTime,
        deliver: &mut impl FnMut(PendingRequest, Answer),
    ) -> Result<(), Error> {
        // Keys whose releases come only now, behind acquires that were sent after them.
        let mut released_late: Vec<Key> = Vec::new();
        while let Some(batch) = self.in_flight.front() {
            let (kind, n, by_text) = (batch.kind, batch.requests.len(), batch.by_text);
            let contents = match kind {
                ScriptKind::Read => ReplyContents::Values(n),
                _ => ReplyContents::Internal,
            };
            let value = self.connection.receive(deadline, contents)?;
            let (outcomes, doubt) = match scripts::decode(kind, n, value) {
                Decoded::Outcomes(outcomes) => (outcomes, None),
                Decoded::OutcomeUnknown(error) => (Few::new(), Some(error)),
                Decoded::SplitBatch => {
                    self.repeat(names, 1, by_text, deadline)?;
                    continue;
                }
                Decoded::NoScript if !by_text => {
                    if kind == ScriptKind::Release {
                        released_late.extend(batch.keys());
                    }
                    self.repeat(names, MAX_KEYS, true, deadline)?;
                    continue;
                }
                Decoded::NoScript => {
                    self.connection.discard_and_suspect_all();
                    let message = "NOSCRIPT in answer to a script's text";
                    return Err(Error::new(ErrorKind::Protocol, message));
                }
                Decoded::Unexpected(error) => {
                    self.connection.discard_and_suspect_all();
                    return Err(error);
                }
            };
            let mut batch = self.in_flight.pop_front().expect("it was just looked at");
            let mut outcomes = outcomes.into_iter();
            let mut too_early = Vec::new();
            for request in batch.requests.drain(..) {
                let answer = match &doubt {
                    Some(error) => Answer::OutcomeUnknown(error.clone()),
                    None => Answer::Outcome(outcomes.next().expect("one for each of them")),
                };
                if !released_late.is_empty() && is_too_early(&request, &answer, &released_late) {
                    too_early.push(request);
                } else {
                    deliver(request, answer);
                }
            }
            self.keep(batch.requests);
            if !too_early.is_empty() {
                self.enqueue_all(names, kind, MAX_KEYS, by_text, too_early);
                self.send(deadline)?;
            }
        }
        Ok(())
    }

    /// Sends the oldest batch in flight again, `at_once` keys in one call. Its call was refused
    /// before anything was done: the server has forgotten the script (SCRIPT FLUSH, a fail-over;
    /// its text teaches it anew), or one key spoils it for the others. Acquires that nobody waits
    /// for any more stay behind.
    fn repeat(
        &mut self,
        names: &ScriptContext,
        at_once: usize,
        by_text: bool,
        deadline: MonotonicTime,
    ) -> Result<(), Error> {
        let Some(batch) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let mut requests = batch.requests;
        requests.retain(PendingRequest::is_wanted);
        if requests.is_empty() {
            return Ok(());
        }
        self.enqueue_all(names, batch.kind, at_once, by_text, requests);
        self.send(deadline)
    }

    fn enqueue_all(
        &mut self,
        names: &ScriptContext,
        kind: ScriptKind,
        at_once: usize,
        by_text: bool,
        mut requests: Vec<PendingRequest>,
    ) {
        // Not `split_off`: it would leave each part the capacity of the whole batch.
        while requests.len() > at_once {
            let part = requests.drain(..at_once).collect();
            self.enqueue(names, kind, by_text, part);
        }
        if !requests.is_empty() {
            self.enqueue(names, kind, by_text, requests);
        }
    }

    /// False once the connection must not be used again.
    pub(crate) fn is_usable(&self) -> bool {
        !self.connection.is_discarded()
    }

    /// Gives the connection up and returns what was in flight, oldest first. Behind acquires
    /// that were written and not answered their releases are written first: whenever the server
    /// comes to read them, it reads both.
    pub(crate) fn abandon(mut self, names: &ScriptContext) -> Vec<PendingRequest> {
        self.connection.discard();
        let in_flight: Vec<PendingRequest> = std::mem::take(&mut self.in_flight)
            .into_iter()
            .flat_map(|batch| batch.requests)
            .collect();
        let releases: Vec<Command> = in_flight
            .iter()
            .filter_map(|request| request.command.undo(MonotonicTime::now()))
            .collect();
        if !releases.is_empty() && !self.cut {
            self.buffer.clear();
            for releases in releases.chunks(MAX_KEYS) {
                let call = ScriptRef::Text(ScriptKind::Release.text());
                let commands = releases.iter();
                scripts::encode(&mut self.buffer, call, ScriptKind::Release, names, commands);
            }
            // Best effort: the releases are repeated on other connections anyway. Do not wait for a server that does
            // not read.
            let _ = self.connection.send(&self.buffer, MonotonicTime::now());
        }
        in_flight
    }
}
