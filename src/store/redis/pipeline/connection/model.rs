//! The connection of the models, in place of `connection`: a server and its connections in memory, with as many
//! faults as a model allows. Knows commands and replies, and nothing of their connection format.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use r2d2::PooledConnection;

use crate::error::{Error, ErrorKind};
use crate::store::command::{Command, QueueMode, Reply};
use crate::store::memory::{Keyspace, Notification, Step};
use crate::store::redis::connection::{Connector, Endpoint};
use crate::store::redis::pipeline::request::PendingRequest;
use crate::store::redis::scripts::ScriptContext;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::Key;
use crate::util::sync::model::{chance, choice, panic, pass, step};
use crate::util::sync::{AtomicBool, Ordering};

/// What the pipeline asks for connections.
pub(crate) type Pool = Arc<Server>;

pub(crate) fn pool(_: &Arc<Endpoint>, _: usize) -> Pool {
    Server::new(Faults::default())
}

/// Models have no transactions.
pub(crate) fn transaction_connection(
    _: &Pool,
    _: &Endpoint,
    _: Duration,
) -> Result<PooledConnection<Connector>, Error> {
    Err(Error::new(ErrorKind::Unsupported, "a model"))
}

/// How often something may go wrong, and what.
#[derive(Clone, Copy, Default)]
pub(crate) struct Faults {
    /// No connection is made.
    pub(crate) connecting: u32,
    /// A connection breaks, or an answer does not come in time.
    pub(crate) broken: u32,
    /// Whoever uses a connection panics.
    pub(crate) panics: u32,
}

/// A Redis that keeps locks, and the network before it.
pub(crate) struct Server {
    state: parking_lot::Mutex<State>,
    /// A connection is being used: one thread at a time does that.
    in_use: AtomicBool,
}

#[derive(Default)]
struct State {
    keyspace: Keyspace,
    /// What clients are to be notified of.
    news: Vec<Notification>,
    /// What was sent on connections that have been given up, and arrives yet.
    late: Vec<VecDeque<Command>>,
    /// Raised when a connection breaks.
    epoch: u64,
    faults: Faults,
}

impl Server {
    pub(crate) fn new(faults: Faults) -> Arc<Self> {
        let state = State {
            faults,
            ..State::default()
        };
        Arc::new(Self {
            state: parking_lot::Mutex::new(state),
            in_use: AtomicBool::new(false),
        })
    }

    /// Gives `key` to `lease`, as another connection would have.
    pub(crate) fn give(&self, key: &Key, lease: LeaseId, until: MonotonicTime) {
        let mut state = self.state.lock();
        state.keyspace.remove(key);
        state.serve(&Command::Acquire {
            key: key.clone(),
            lease,
            ttl: until.since(MonotonicTime::now()),
            queue_mode: QueueMode::None,
        });
    }

    /// Deletes `key`; its queue stays.
    pub(crate) fn delete(&self, key: &Key) {
        let mut state = self.state.lock();
        state.keyspace.remove(key);
        state.news.push(Notification::Changed(key.clone()));
    }

    /// The news since this was last asked.
    pub(crate) fn news(&self) -> Vec<Notification> {
        std::mem::take(&mut self.state.lock().news)
    }

    pub(crate) fn serve(&self, by: &HolderId, command: &Command) -> Reply {
        self.state.lock().serve_to(by, command)
    }

    /// What stands under `key`, as GET says it.
    pub(crate) fn text(&self, key: &Key) -> Option<String> {
        let mut state = self.state.lock();
        state.step(&HolderId::of_text("model"), |keyspace, step| {
            keyspace.text(key, step)
        })
    }

    pub(crate) fn take_back(&self, key: &Key, lease: LeaseId) {
        self.state.lock().serve(&Command::Release {
            key: key.clone(),
            lease,
            until: MonotonicTime::now(),
            held: None,
            queued: None,
        });
    }

    pub(crate) fn holder(&self, key: &Key) -> Option<LeaseId> {
        self.state.lock().holder(key)
    }

    /// From here on everything goes well.
    pub(crate) fn calm_down(&self) {
        self.state.lock().faults = Faults::default();
    }

    /// Whatever is still on its way arrives.
    pub(crate) fn deliver_late(&self) {
        let mut state = self.state.lock();
        for connection in std::mem::take(&mut state.late) {
            connection
                .into_iter()
                .for_each(|command| drop(state.serve(&command)));
        }
    }

    pub(crate) fn get_timeout(self: &Arc<Self>, timeout: Duration) -> Result<Connection, Error> {
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

    /// Whether such a fault happens here.
    fn happens(&self, of: impl Fn(&mut Faults) -> &mut u32) -> bool {
        step();
        let mut state = self.state.lock();
        let left = of(&mut state.faults);
        let happens = *left > 0 && chance(4);
        *left -= u32::from(happens);
        happens
    }

    fn may_panic(&self) {
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
        assert!(!in_use, "two lead one pipeline");
        let _used = Used(self);
        work()
    }
}

impl State {
    fn holder(&mut self, key: &Key) -> Option<LeaseId> {
        match self.serve(&Command::Inspect { key: key.clone() }) {
            Reply::Found { value, .. } => Some(value.lease),
            _ => None,
        }
    }

    fn serve(&mut self, command: &Command) -> Reply {
        self.serve_to(&HolderId::of_text("model"), command)
    }

    fn serve_to(&mut self, by: &HolderId, command: &Command) -> Reply {
        let reply = self.step(by, |keyspace, step| keyspace.carry_out(command, step));
        reply.expect("models keep to keys of locks")
    }

    fn step<T>(
        &mut self,
        by: &HolderId,
        step: impl FnOnce(&mut Keyspace, &mut Step<'_>) -> T,
    ) -> T {
        let mut context = Step {
            now: MonotonicTime::now(),
            by,
            listens: &|_| true,
            news: &mut self.news,
        };
        step(&mut self.keyspace, &mut context)
    }
}

pub(crate) struct Connection {
    server: Arc<Server>,
    made_in: u64,
    broken: bool,
}

impl Connection {
    pub(crate) fn is_stale(&self) -> bool {
        self.made_in < self.server.state.lock().epoch
    }

    pub(crate) fn discard(&mut self) {
        self.broken = true;
    }

    fn broke(&mut self, kind: ErrorKind) -> Error {
        self.broken = true;
        self.server.state.lock().epoch += 1;
        Error::new(kind, "a fault")
    }
}

#[derive(Clone)]
pub(crate) enum CommandOutcome {
    Known(Result<Reply, Error>),
    Unknown(Error),
}

pub(crate) struct PipelinedConnection {
    connection: Connection,
    in_flight: VecDeque<PendingRequest>,
    /// Of those in flight, what has reached the server, and what it said.
    served: VecDeque<Reply>,
    cut: bool,
}

impl PipelinedConnection {
    pub(crate) fn new(connection: Connection) -> Self {
        Self {
            connection,
            in_flight: VecDeque::new(),
            served: VecDeque::new(),
            cut: false,
        }
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.connection.is_stale()
    }

    pub(crate) fn is_stale_and_idle(&self) -> bool {
        self.in_flight.is_empty() && self.is_stale()
    }

    pub(crate) fn unanswered(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn keys_for_next_waiters(&self) -> impl Iterator<Item = &Key> {
        let in_flight = self.in_flight.iter();
        in_flight.filter_map(|request| request.command.key_for_next_waiter())
    }

    pub(crate) fn empty_batch(&mut self) -> Vec<PendingRequest> {
        Vec::new()
    }

    pub(crate) fn keep(&mut self, _: Vec<PendingRequest>) {}

    pub(crate) fn write(
        &mut self,
        _: &ScriptContext,
        batch: Vec<PendingRequest>,
        _: MonotonicTime,
    ) -> Result<(), Error> {
        let server = Arc::clone(&self.connection.server);
        server.use_alone(|| {
            self.in_flight.extend(batch);
            server.may_panic();
            if server.happens(|faults| &mut faults.broken) {
                self.cut = true;
                return Err(self.connection.broke(ErrorKind::Unavailable));
            }
            Ok(())
        })
    }

    pub(crate) fn read(
        &mut self,
        _: &ScriptContext,
        deadline: MonotonicTime,
        deliver: &mut impl FnMut(PendingRequest, CommandOutcome),
    ) -> Result<(), Error> {
        let server = Arc::clone(&self.connection.server);
        server.use_alone(|| {
            while let Some(request) = self.in_flight.front() {
                let reply = match self.served.pop_front() {
                    Some(reply) => reply,
                    None => server.state.lock().serve(&request.command),
                };
                self.served.push_front(reply.clone());
                server.may_panic();
                if server.happens(|faults| &mut faults.broken) {
                    let timed_out = chance(2);
                    if timed_out {
                        pass(deadline.since(MonotonicTime::now()));
                    }
                    return Err(self.connection.broke(match timed_out {
                        true => ErrorKind::Timeout,
                        false => ErrorKind::Unavailable,
                    }));
                }
                self.served.pop_front();
                let request = self.in_flight.pop_front().expect("it was just looked at");
                deliver(request, CommandOutcome::Known(Ok(reply)));
            }
            Ok(())
        })
    }

    pub(crate) fn is_usable(&self) -> bool {
        !self.connection.broken
    }

    /// What was written arrives whole and now, or in part, or late, or never; behind it, unless the
    /// connection was cut, the releases of its acquires.
    pub(crate) fn abandon(mut self, _: &ScriptContext) -> Vec<PendingRequest> {
        let in_flight: Vec<PendingRequest> = std::mem::take(&mut self.in_flight).into();
        let unserved = in_flight.iter().skip(self.served.len());
        let mut sent: VecDeque<Command> = unserved.map(|request| request.command.clone()).collect();
        if !self.cut {
            let now = MonotonicTime::now();
            sent.extend(
                in_flight
                    .iter()
                    .filter_map(|request| request.command.undo(now)),
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
