//! Replaces `connection` in models: a server and its connections in memory, with the faults that a model allows.
//! Commands and replies are not encoded.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::command::keyspace::{Keyspace, Notification, Step};
use crate::command::{Acquire, Command, Inspect, Mode, QueueMode, Release, Reply};
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::Caller;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};
use crate::util::sync::model::{chance, choice, panic, pass, step};
use crate::util::sync::{AtomicBool, Ordering};
use crate::wire::endpoint::Endpoint;
use crate::wire::endpoint::connector::ExclusiveConnection;
use crate::wire::pipeline::request;
use crate::wire::pipeline::request::{Next, PendingRequest};
use crate::wire::scripts::ScriptContext;

/// Models have no sockets.
pub type SharedSocket = ();

pub fn wait_for_any<'a>(_: impl Iterator<Item = &'a SharedSocket>, _: MonotonicTime) -> Vec<usize> {
    unreachable!("models have no quorum")
}

/// The double of the connector.
pub type SharedConnector = Arc<Server>;

pub fn connector(_: &Arc<Endpoint>) -> SharedConnector {
    Server::new(Faults::default())
}

/// The number of faults of each kind that may happen.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// An attempt to connect fails.
    pub connecting: u32,
    /// A connection breaks, or a reply does not come in time.
    pub broken: u32,
    /// The thread that uses a connection panics.
    pub panics: u32,
    /// A reply comes after the reader's own deadline, and before the reply is due.
    pub slow: u32,
    /// Too few replicas acknowledge a batch.
    pub unacknowledged: u32,
}

/// A Redis that keeps locks, and the network in front of it.
pub struct Server {
    state: parking_lot::Mutex<ServerState>,
    /// Whether a thread uses a connection. Only one thread at a time may.
    in_use: AtomicBool,
}

#[derive(Default)]
struct ServerState {
    keyspace: Keyspace,
    /// Notifications that the model has not taken yet.
    notifications: Vec<Notification>,
    /// Commands on closed connections that have not arrived yet.
    late: Vec<VecDeque<Command>>,
    /// How many connections have broken.
    epoch: u64,
    faults: Faults,
}

impl Server {
    pub fn new(faults: Faults) -> Arc<Self> {
        let state = ServerState {
            faults,
            ..ServerState::default()
        };
        Arc::new(Self {
            state: parking_lot::Mutex::new(state),
            in_use: AtomicBool::new(false),
        })
    }

    pub fn connect(self: &Arc<Self>, timeout: Duration) -> Result<Connection, Error> {
        if self.happens(|faults| &mut faults.connecting) {
            pass(timeout);
            return Err(Error::new(ErrorKind::Unavailable, "no connection"));
        }
        Ok(Connection {
            server: Arc::clone(self),
            made_in: self.state.lock().epoch,
            broken: false,
        })
    }

    pub fn wake_callers(&self) {
        unreachable!("models have no client that ends")
    }

    /// Models have no transactions.
    pub fn exclusive_connection(
        self: &Arc<Self>,
        _: Duration,
    ) -> Result<ExclusiveConnection, Error> {
        Err(Error::new(ErrorKind::Unsupported, "a model"))
    }

    /// Grants `key` to `lease`, in the same way as a request on another connection.
    pub fn give(&self, key: &Key, lease: LeaseId, until: MonotonicTime) {
        let mut state = self.state.lock();
        state.keyspace.entries.remove(key);
        state.serve(&Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            ttl: until.since(MonotonicTime::now()),
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        }));
    }

    /// Deletes `key`; its queue stays.
    pub fn delete(&self, key: &Key) {
        let mut state = self.state.lock();
        state.keyspace.entries.remove(key);
        state.notifications.push(Notification::Changed(key.clone()));
    }

    /// Takes the notifications since the last call.
    pub fn take_notifications(&self) -> Vec<Notification> {
        std::mem::take(&mut self.state.lock().notifications)
    }

    pub fn serve(&self, by: &HolderId, command: &Command) -> Reply {
        self.state.lock().serve_to(by, command)
    }

    /// The value of `key`, as GET returns it.
    pub fn text(&self, key: &Key) -> Option<String> {
        let mut state = self.state.lock();
        state.step(&HolderId::of_text("model"), |keyspace, step| {
            keyspace.text(key, step)
        })
    }

    pub fn take_back(&self, key: &Key, lease: LeaseId) {
        self.state.lock().serve(&Command::Release(Release::unheld(
            key.clone(),
            lease,
            MonotonicTime::now(),
        )));
    }

    pub fn holder(&self, key: &Key) -> Option<LeaseId> {
        self.state.lock().holder(key)
    }

    /// The number of waiters in the queue of `key`.
    pub fn queued(&self, key: &Key) -> usize {
        self.state.lock().keyspace.queued(key)
    }

    /// Ends the faults.
    pub fn end_faults(&self) {
        self.state.lock().faults = Faults::default();
    }

    /// Carries out the commands that have not arrived yet.
    pub fn deliver_late(&self) {
        let mut state = self.state.lock();
        for connection in std::mem::take(&mut state.late) {
            connection
                .into_iter()
                .for_each(|command| drop(state.serve(&command)));
        }
    }

    /// Chooses whether a fault of this kind happens here.
    fn happens(&self, of: impl Fn(&mut Faults) -> &mut u32) -> bool {
        step();
        let mut state = self.state.lock();
        let left = of(&mut state.faults);
        let happens = *left > 0 && chance(4);
        *left -= u32::from(happens);
        happens
    }

    fn panic_by_chance(&self) {
        if self.happens(|faults| &mut faults.panics) {
            panic();
        }
    }

    fn use_alone<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Used<'a>(&'a Server);
        impl Drop for Used<'_> {
            fn drop(&mut self) {
                self.0.in_use.store(false, Ordering::SeqCst);
            }
        }
        let in_use = self.in_use.swap(true, Ordering::SeqCst);
        assert!(!in_use, "two threads lead one pipeline");
        let _used = Used(self);
        work()
    }
}

impl ServerState {
    fn holder(&mut self, key: &Key) -> Option<LeaseId> {
        match self.serve(&Command::Inspect(Inspect { key: key.clone() })) {
            Reply::Found { value, .. } => Some(value.lease),
            _ => None,
        }
    }

    fn serve(&mut self, command: &Command) -> Reply {
        self.serve_to(&HolderId::of_text("model"), command)
    }

    fn serve_to(&mut self, by: &HolderId, command: &Command) -> Reply {
        let reply = self.step(by, |keyspace, step| keyspace.execute(command, step));
        reply.expect("models use only the keys of locks")
    }

    fn step<T>(
        &mut self,
        by: &HolderId,
        step: impl FnOnce(&mut Keyspace, &mut Step<'_>) -> T,
    ) -> T {
        let mut context = Step {
            now: MonotonicTime::now(),
            by,
            quarantine: Duration::ZERO,
            ahead: 0,
            listens: &|_| true,
            notifications: &mut self.notifications,
        };
        step(&mut self.keyspace, &mut context)
    }
}

pub struct Connection {
    server: Arc<Server>,
    made_in: u64,
    broken: bool,
}

impl Connection {
    pub fn is_stale(&self) -> bool {
        self.made_in < self.server.state.lock().epoch
    }

    pub fn discard(&mut self) {
        self.broken = true;
    }

    fn mark_broken(&mut self, kind: ErrorKind) -> Error {
        self.broken = true;
        self.server.state.lock().epoch += 1;
        Error::new(kind, "a fault")
    }
}

pub struct PipelinedConnection {
    connection: Connection,
    in_flight: VecDeque<PendingRequest>,
    /// The replies to those requests in flight that have reached the server.
    served: VecDeque<Reply>,
    /// Requests that succeeded, and that replicas have to acknowledge.
    unacknowledged: VecDeque<(PendingRequest, Reply)>,
    reply_by: Option<MonotonicTime>,
    write_failed: bool,
}

impl PipelinedConnection {
    pub fn new(connection: Connection) -> Self {
        Self {
            connection,
            in_flight: VecDeque::new(),
            served: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            reply_by: None,
            write_failed: false,
        }
    }

    pub fn is_stale(&self) -> bool {
        self.connection.is_stale()
    }

    /// Models have no ages of connections.
    pub fn is_old(&self) -> bool {
        false
    }

    pub fn is_fit(&self) -> bool {
        !self.is_stale()
    }

    pub fn postpone_replacement(&mut self) {}

    pub fn is_stale_and_idle(&self) -> bool {
        self.unanswered() == 0 && self.is_stale()
    }

    pub fn unanswered(&self) -> usize {
        self.in_flight.len() + self.unacknowledged.len()
    }

    fn requests(&self) -> impl Iterator<Item = &PendingRequest> {
        let unacknowledged = self.unacknowledged.iter().map(|(request, _)| request);
        unacknowledged.chain(&self.in_flight)
    }

    /// Models have no blocking writes.
    pub fn unanswered_bytes(&self) -> usize {
        0
    }

    pub fn is_half_read(&self) -> bool {
        self.reply_by.is_some()
    }

    pub fn socket(&self) -> SharedSocket {}

    pub fn has_socket(&self, _: &SharedSocket) -> bool {
        true
    }

    pub fn leave_unread(&mut self, due: MonotonicTime) {
        self.reply_by.get_or_insert(due);
    }

    pub fn leave_unawaited(&mut self) {
        if self.requests().all(|request| request.completion.is_none()) {
            self.reply_by = None;
        }
    }

    pub fn next_leader(&self) -> Option<&Arc<Caller>> {
        self.reply_by?;
        request::next_leader(self.requests())
    }

    pub fn is_waited_for(&self) -> bool {
        self.is_half_read() && self.requests().any(PendingRequest::is_waited_for)
    }

    pub fn keys_for_next_waiters(&self) -> impl Iterator<Item = &Key> {
        request::keys_for_next_waiters(self.requests())
    }

    pub fn empty_batch(&mut self) -> Vec<PendingRequest> {
        Vec::new()
    }

    pub fn keep(&mut self, _: Vec<PendingRequest>) {}

    pub fn write(
        &mut self,
        _: &ScriptContext,
        batch: Vec<PendingRequest>,
        _: MonotonicTime,
    ) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        let server = Arc::clone(&self.connection.server);
        let is_awaited = |request: &PendingRequest| request.completion.is_some();
        assert!(
            !(batch.iter().any(PendingRequest::is_waited_for) && self.requests().any(is_awaited)),
            "two batches in flight"
        );
        server.use_alone(|| {
            self.in_flight.extend(batch);
            server.panic_by_chance();
            if server.happens(|faults| &mut faults.broken) {
                self.write_failed = true;
                return Err(self.connection.mark_broken(ErrorKind::Unavailable));
            }
            Ok(())
        })
    }

    pub fn read(
        &mut self,
        _: &ScriptContext,
        until: Option<MonotonicTime>,
        due: MonotonicTime,
        deliver: &mut impl FnMut(Next),
    ) -> Result<bool, Error> {
        let server = Arc::clone(&self.connection.server);
        let due = due.min(*self.reply_by.get_or_insert(due));
        server.use_alone(|| {
            loop {
                // The server reads the `WAIT` of a batch after the batch, and before releases that were written later.
                let next = self.in_flight.front();
                let is_of_batch = next.is_some_and(|request| request.completion.is_some());
                let waits = !is_of_batch && !self.unacknowledged.is_empty();
                if next.is_none() && !waits {
                    break;
                }
                if let Some(request) = next.filter(|_| !waits) {
                    let reply = match self.served.pop_front() {
                        Some(reply) => reply,
                        None => server.state.lock().serve(&request.command),
                    };
                    self.served.push_front(reply);
                }
                server.panic_by_chance();
                if let Some(until) = until.filter(|until| *until < due)
                    && server.happens(|faults| &mut faults.slow)
                {
                    pass(until.since(MonotonicTime::now()));
                    return Ok(false);
                }
                if server.happens(|faults| &mut faults.broken) {
                    let timed_out = chance(2);
                    if timed_out {
                        pass(due.since(MonotonicTime::now()));
                    }
                    return Err(self.connection.mark_broken(match timed_out {
                        true => ErrorKind::Timeout,
                        false => ErrorKind::Unavailable,
                    }));
                }
                if waits {
                    let are_enough = !server.happens(|faults| &mut faults.unacknowledged);
                    for (request, reply) in self.unacknowledged.drain(..) {
                        let too_few = Error::new(ErrorKind::Unavailable, "too few replicas");
                        deliver(match are_enough {
                            true => request.on_reply(Ok(reply)),
                            false => request.on_unknown(&too_few),
                        });
                    }
                    continue;
                }
                let reply = self.served.pop_front();
                let request = self.in_flight.pop_front();
                let (request, reply) = request.zip(reply).expect("the loop found a request");
                if request.command.replicas().is_some() && reply.is_success() {
                    self.unacknowledged.push_back((request, reply));
                } else {
                    deliver(request.on_reply(Ok(reply)));
                }
            }
            self.reply_by = None;
            Ok(true)
        })
    }

    pub fn is_usable(&self) -> bool {
        !self.connection.broken
    }

    /// Closes the connection. The requests in flight arrive now, late, in part, or never. The releases of their
    /// acquires follow, unless the last write failed.
    pub fn abandon(mut self, _: &ScriptContext, _: &Error) -> Vec<PendingRequest> {
        let unacknowledged = std::mem::take(&mut self.unacknowledged).into_iter();
        let unacknowledged = unacknowledged.map(|(request, _)| request);
        let served = unacknowledged.len() + self.served.len();
        let in_flight: Vec<PendingRequest> = unacknowledged
            .chain(std::mem::take(&mut self.in_flight))
            .collect();
        let unserved = in_flight.iter().skip(served);
        let mut sent: VecDeque<Command> = unserved.map(|request| request.command.clone()).collect();
        if !self.write_failed {
            let now = MonotonicTime::now();
            sent.extend(
                in_flight
                    .iter()
                    .filter_map(|request| request.command.undo(now))
                    .map(Command::Release),
            );
        }
        let mut state = self.connection.server.state.lock();
        for command in sent.drain(..choice(sent.len() + 1)) {
            state.serve(&command);
        }
        if chance(2) {
            state.late.push(sent);
        }
        in_flight
    }
}
