//! Finds the primary of a group of servers under sentinels. This module connects to sentinels only. The Sentinel client
//! of redis-rs has no deadline for a whole reply.
//!
//! - *Queries.* Each attempt to connect asks a sentinel for three things in one round trip: the address of the primary,
//!   the number of the last fail-over (`config-epoch`), and the other sentinels. The client begins with the sentinel of
//!   the latest answer, and ends with sentinels that failed or named a wrong server. Each sentinel has a part of the
//!   remaining time.
//! - *Old answers.* An answer with an older number than the client has seen counts only if all sentinels of the URL
//!   give such answers. After the message `+switch-master`, the client expects a number that is greater by one. So a
//!   sentinel that does not know of the fail-over yet does not bring the old primary back.
//! - *The server.* The reply to `HELLO` or `ROLE` has to report a primary. If it does not, or if the answer of the
//!   sentinels changes in the meantime, the attempt begins again within its deadline. If the sentinels do not name a
//!   primary, the client connects to the last known one.
//! - *A switch.* An answer that differs from the last one, or `+switch-master`, makes all connections outdated
//!   (`epoch`) and ends the attempts to connect to servers.
//! - *Errors.* Before the first answer, an error tells whether the name or the login is wrong. Later, each failure is
//!   `Unavailable`, so waiters continue.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::time::Duration;

use parking_lot::Mutex;
use redis::{ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo, Value};

use crate::config::credentials::Credentials;
use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::wire::connect::connection::LONGEST_REPLY;
use crate::wire::connect::dial::Dialer;
use crate::wire::connect::errors::{Announcer, ConnectErrors};
use crate::wire::connect::steps::Step;
use crate::wire::connect::url::{self, HostPort, MAX_SENTINELS, SentinelUrl};
use crate::wire::net::replies::field;
use crate::wire::net::socket::{Receiver, Sender, Sockets};

/// The remaining time is divided into at most this many parts. A silent sentinel takes one part.
const SHARES: u32 = 4;
/// The pause after a failed attempt to connect. It doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The message of a sentinel once a fail-over is done: `<group> <old host> <old port> <new host> <new port>`.
pub const CHANNEL: &str = "+switch-master";

/// The sentinels of one group of servers.
pub struct Sentinels {
    configured: Vec<HostPort>,
    group: String,
    has_tls: bool,
    login: Option<Credentials>,
    state: Mutex<State>,
}

pub struct State {
    /// All known sentinels, in the order in which they are asked.
    order: Vec<HostPort>,
    /// The primary that the last accepted answer named.
    primary: Option<HostPort>,
    /// The number of the last fail-over (`config-epoch`) in the answers so far.
    epoch: u64,
    /// When the next attempt to connect begins, after a failed one.
    connect_again_at: MonotonicTime,
    /// The pause before `connect_again_at`. Zero after a success or a switch.
    backoff: Backoff,
    /// How many times an answer has proved wrong or outdated.
    doubts: u64,
    /// Whether [`Sentinels::begin_report`] was called since the last accepted answer.
    is_reported: bool,
}

/// The answer of a sentinel.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    primary: HostPort,
    /// The number of the last fail-over that this sentinel knows of. `None` if an ACL hides it.
    epoch: Option<u64>,
    /// The other sentinels of the group.
    others: Vec<HostPort>,
}

/// The primary that a sentinel named.
pub struct NamedPrimary {
    pub primary: HostPort,
    pub by: HostPort,
    /// Whether the previous answer named another primary.
    pub has_changed: bool,
}

impl Sentinels {
    pub fn new(url: &SentinelUrl) -> Self {
        Self {
            configured: url.hosts.clone(),
            group: url.group.clone(),
            has_tls: url.has_tls,
            login: None,
            state: Mutex::new(State {
                order: url.hosts.clone(),
                primary: None,
                epoch: 0,
                connect_again_at: MonotonicTime::now(),
                backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
                doubts: 0,
                is_reported: false,
            }),
        }
    }

    /// Sets the login at the sentinels. By default, the client sends them none.
    pub fn set_login(&mut self, login: Credentials) {
        self.login = Some(login);
    }

    /// The URL of the group, for debug output, without user and password.
    pub fn redacted(&self) -> String {
        url::sentinel::redacted(&self.configured, &self.group, self.has_tls)
    }

    pub fn has_tls(&self) -> bool {
        self.has_tls
    }

    /// How many times an answer has proved wrong or outdated. If the number has grown during a failed attempt to
    /// connect, another attempt may succeed.
    pub fn doubts(&self) -> u64 {
        self.state.lock().doubts
    }

    /// Records that the server which `by` named is not the primary. Puts `by` last in the order.
    pub fn doubt(&self, by: &HostPort) {
        let mut state = self.state.lock();
        state.put_last(by);
        state.doubts += 1;
    }

    /// The sentinel that is asked first.
    pub fn first(&self) -> HostPort {
        self.state.lock().order[0].clone()
    }

    /// Puts `sentinel` last in the order in which the client asks.
    pub fn put_last(&self, sentinel: &HostPort) {
        self.state.lock().put_last(sentinel);
    }

    /// Whether to report that the sentinels do not name the primary. Returns true once, and again only after a sentinel
    /// has named the primary.
    pub fn begin_report(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().is_reported, true)
    }

    /// The number of known sentinels.
    pub fn count(&self) -> usize {
        self.state.lock().order.len()
    }

    /// Records a failed attempt to connect. Returns the time of the next attempt: the pause doubles, up to `longest`
    /// and up to [`LONGEST_PAUSE`]. Several failures in one pause lengthen it once.
    pub fn lengthen_pause(&self, longest: Duration) -> MonotonicTime {
        let now = MonotonicTime::now();
        let mut state = self.state.lock();
        if state.connect_again_at <= now {
            let pause = state.backoff.next_within(longest.min(LONGEST_PAUSE));
            state.connect_again_at = now.after(pause);
        }
        state.connect_again_at
    }

    /// Ends the pause, because an attempt to connect has succeeded or there is another primary.
    pub fn reset_pause(&self) {
        self.state.lock().reset_pause();
    }

    /// The time of the next attempt to connect.
    pub fn connect_again_at(&self) -> MonotonicTime {
        self.state.lock().connect_again_at
    }

    /// The primary that the last accepted answer named.
    pub fn last_primary(&self) -> Option<HostPort> {
        self.state.lock().primary.clone()
    }

    /// Asks the sentinels in turn until one names the primary, by `deadline`. Each sentinel has only a part of the
    /// remaining time, so that a silent sentinel does not use up all of it. Returns an error at once after `sockets`
    /// were closed.
    ///
    /// An answer that is older than the last known fail-over counts only if all sentinels of the URL give such answers.
    pub fn find_primary(
        &self,
        dialer: &Dialer,
        deadline: MonotonicTime,
        sockets: &Sockets,
    ) -> Result<NamedPrimary, Error> {
        let (order, epoch) = {
            let state = self.state.lock();
            (state.order.clone(), state.epoch)
        };
        let mut failures = Vec::new();
        let mut outdated: Vec<(HostPort, Answer)> = Vec::new();
        for (asked, by) in order.iter().enumerate() {
            let now = MonotonicTime::now();
            let left = deadline.since(now);
            if left.is_zero() {
                let more = if asked > 0 { " more" } else { "" };
                let message = format!(
                    "{}{more} were not asked, since the time for connecting has ended",
                    order.len() - asked
                );
                failures.push(Error::new(ErrorKind::Unavailable, message));
                break;
            }
            let shares = u32::try_from(order.len() - asked).map_or(SHARES, |n| SHARES.min(n + 1));
            match self.ask(dialer, by, now.after(left / shares), sockets) {
                Ok(answer) => match self.accept_if(by, answer, State::is_current) {
                    Ok(named) => return Ok(named),
                    Err(answer) => {
                        let message = format!(
                            "{by} does not know of the last fail-over; if the group was set up anew, remove sentinels \
                             that are gone from the URL, and restart the client"
                        );
                        failures.push(Error::new(ErrorKind::Unavailable, message));
                        outdated.push((by.clone(), answer));
                    }
                },
                Err(error) => {
                    sockets.check()?;
                    self.put_last(by);
                    failures.push(error);
                }
            }
        }
        // If all sentinels of the URL give old answers, the group was set up anew, and the newest answer counts.
        // (Sentinels that the client has learned may then be gone.) If a sentinel of the URL is silent, the old answers
        // do not count: that sentinel may know of the fail-over, while the old primary still reports the role of a
        // primary.
        let is_outdated = |host: &HostPort| outdated.iter().any(|(by, _)| by == host);
        let is_new_group = self.configured.iter().all(is_outdated);
        let newest = outdated.into_iter().max_by_key(|(_, it)| it.epoch);
        let mut state = self.state.lock();
        match newest {
            // A fail-over during these queries makes all answers outdated.
            Some((by, answer)) if is_new_group && state.epoch == epoch => {
                Ok(state.accept(&self.configured, &by, answer))
            }
            _ => {
                drop(state);
                Err(self.no_primary(&failures))
            }
        }
    }

    /// Accepts the answer of the sentinel `by` if `is_wanted` returns true. Otherwise returns the answer. The state
    /// stays locked from the call of `is_wanted` until the answer is accepted.
    pub fn accept_if(
        &self,
        by: &HostPort,
        answer: Answer,
        is_wanted: impl FnOnce(&State, &Answer) -> bool,
    ) -> Result<NamedPrimary, Answer> {
        let mut state = self.state.lock();
        match is_wanted(&state, &answer) {
            true => Ok(state.accept(&self.configured, by, answer)),
            false => Err(answer),
        }
    }

    /// The error if the sentinels have not named the primary. It contains the error of each sentinel.
    fn no_primary(&self, failures: &[Error]) -> Error {
        let said: Vec<&str> = failures.iter().map(Error::message).collect();
        let message = format!(
            "no sentinel names the primary of the group {:?}: {}",
            self.group,
            said.join(" / ")
        );
        // If the client has found the group before, the failures are probably temporary: `Unavailable` makes callers
        // retry.
        let is_known = self.state.lock().primary.is_some();
        let severest = [
            ErrorKind::InvalidConfig,
            ErrorKind::Denied,
            ErrorKind::Tls,
            ErrorKind::Protocol,
        ];
        let severest = severest.into_iter().find(|kind| {
            let kinds = failures.iter().map(Error::kind);
            !is_known && kinds.into_iter().any(|other| other == *kind)
        });
        let kind = severest.unwrap_or(ErrorKind::Unavailable);
        let error = Error::new(kind, message);
        match failures.iter().find(|failure| failure.kind() == kind) {
            Some(failure) => error.with_source_of(failure),
            None => error,
        }
    }

    /// Asks one sentinel for the primary, by `deadline`. Registers the socket in `sockets`.
    pub fn ask(
        &self,
        dialer: &Dialer,
        sentinel: &HostPort,
        deadline: MonotonicTime,
        sockets: &Sockets,
    ) -> Result<Answer, Error> {
        let info = self.info_of(sentinel)?;
        let timeout = deadline.since(MonotonicTime::now());
        let setting = "a part of `connect_timeout`";
        let attempted = ConnectErrors::new(&info, timeout, setting, dialer.prefix());
        let is_learned = !self.configured.contains(sentinel);
        let attempted = attempted.announced_by(is_learned.then_some(Announcer::OtherSentinel));
        let connection = dialer.connect(attempted, deadline, |socket| sockets.register(socket))?;
        let mut connection = SentinelConnection::new(dialer, attempted, connection);
        connection.log_in(redis::ProtocolVersion::RESP2, deadline)?;
        // `HELLO` sets the name without a further right, which `CLIENT SETNAME` would need.
        let mut commands = redis::pipe();
        let set_name = commands.cmd("HELLO").arg("2").arg("SETNAME");
        set_name.arg(dialer.connection_name("leasehold"));
        self.add_query(&mut commands);
        connection.send(&commands, deadline)?;
        // A refused name is ignored.
        connection.receive(deadline)?;
        let mut replies = Vec::new();
        for _ in 0..QUERY_COMMANDS {
            replies.push(connection.receive(deadline)?);
        }
        self.read_answer(attempted, replies)
    }

    /// The address of a sentinel, and the login there.
    pub fn info_of(&self, sentinel: &HostPort) -> Result<ConnectionInfo, Error> {
        let mut settings = RedisConnectionInfo::default();
        if let Some(Credentials { user, password }) = &self.login {
            settings = settings.set_password(password.clone());
            if let Some(user) = user {
                settings = settings.set_username(user.clone());
            }
        }
        let info = sentinel.to_addr(self.has_tls).into_connection_info();
        let info = info.map_err(|_| Error::new(ErrorKind::Unavailable, "no address"))?;
        Ok(info.set_redis_settings(settings))
    }

    /// The commands of [`add_query`](Self::add_query).
    pub fn query(&self) -> redis::Pipeline {
        let mut commands = redis::pipe();
        self.add_query(&mut commands);
        commands
    }

    /// Adds the commands that ask for the primary, for the number of the last fail-over, and for other sentinels. An
    /// ACL may forbid all but the first.
    fn add_query(&self, commands: &mut redis::Pipeline) {
        for subcommand in ["GET-MASTER-ADDR-BY-NAME", "MASTER", "SENTINELS"] {
            let command = commands.cmd("SENTINEL").arg(subcommand);
            command.arg(&self.group);
        }
    }

    pub fn read_answer(
        &self,
        attempted: ConnectErrors<'_>,
        replies: Vec<Value>,
    ) -> Result<Answer, Error> {
        let [primary, master, others]: [Value; QUERY_COMMANDS] = replies
            .try_into()
            .expect("there is one reply for each command");
        let primary = match &primary {
            Value::Nil => {
                let what = format!(
                    "knows no group {:?}; check the name behind the hosts of the URL",
                    self.group
                );
                return Err(attempted.about(ErrorKind::InvalidConfig, what));
            }
            Value::ServerError(error) => {
                return Err(
                    attempted.refused_by_sentinel("SENTINEL GET-MASTER-ADDR-BY-NAME", error)
                );
            }
            Value::Array(parts) => match &parts[..] {
                [Value::BulkString(host), Value::BulkString(port)] => HostPort::new(host, port),
                _ => None,
            },
            _ => None,
        };
        let fault = "does not answer as a sentinel does; check the host and the port";
        let primary = primary.ok_or_else(|| attempted.about(ErrorKind::Protocol, fault))?;
        let epoch = field(&master, b"config-epoch")
            .and_then(|epoch| std::str::from_utf8(epoch).ok()?.parse().ok());
        let others = match &others {
            Value::Array(others) => others
                .iter()
                .filter_map(|other| HostPort::new(field(other, b"ip")?, field(other, b"port")?))
                .take(MAX_SENTINELS)
                .collect(),
            _ => Vec::new(),
        };
        Ok(Answer {
            primary,
            epoch,
            others,
        })
    }
}

/// The number of commands of [`Sentinels::add_query`].
pub const QUERY_COMMANDS: usize = 3;

impl State {
    /// Whether the answer knows of the last fail-over that this client knows of.
    pub fn is_current(&self, answer: &Answer) -> bool {
        answer.epoch.is_none_or(|epoch| epoch >= self.epoch)
    }

    /// Whether the answer knows of a later fail-over than this client.
    pub fn is_older_than(&self, answer: &Answer) -> bool {
        answer.epoch.is_some_and(|epoch| epoch > self.epoch)
    }

    /// Accepts the answer of the sentinel `by`, and puts `by` first in the order.
    fn accept(&mut self, configured: &[HostPort], by: &HostPort, answer: Answer) -> NamedPrimary {
        let Answer {
            primary,
            epoch,
            others,
        } = answer;
        if let Some(epoch) = epoch {
            self.epoch = epoch;
        }
        self.is_reported = false;
        self.learn(configured, by, others);
        NamedPrimary {
            has_changed: self.set_primary(&primary),
            primary,
            by: by.clone(),
        }
    }

    /// Sets the address of the primary. Returns whether the address has changed.
    fn set_primary(&mut self, primary: &HostPort) -> bool {
        let before = self.primary.replace(primary.clone());
        let has_changed = before.is_some_and(|before| before != *primary);
        if has_changed {
            self.doubts += 1;
            self.reset_pause();
        }
        has_changed
    }

    fn reset_pause(&mut self) {
        self.backoff.reset();
        self.connect_again_at = MonotonicTime::now();
    }

    /// Puts `sentinel` last in the order in which the client asks.
    fn put_last(&mut self, sentinel: &HostPort) {
        if let Some(at) = self.order.iter().position(|other| other == sentinel) {
            let sentinel = self.order.remove(at);
            self.order.push(sentinel);
        }
    }

    /// Puts `first` first in the order. Replaces the sentinels that were learned before by `others`; those of the URL
    /// stay.
    fn learn(&mut self, configured: &[HostPort], first: &HostPort, others: Vec<HostPort>) {
        let is_kept = |it: &HostPort| it == first || configured.contains(it);
        if !others.is_empty() {
            self.order
                .retain(|known| is_kept(known) || others.contains(known));
        }
        for other in others {
            if self.order.len() < MAX_SENTINELS && !self.order.contains(&other) {
                self.order.push(other);
            }
        }
        self.put_first(first);
    }

    /// Puts `sentinel` first in the order in which the client asks.
    fn put_first(&mut self, sentinel: &HostPort) {
        if let Some(at) = self.order.iter().position(|known| known == sentinel) {
            self.order[..=at].rotate_right(1);
        }
    }
}

/// A message on [`CHANNEL`].
#[derive(Debug, PartialEq, Eq)]
pub struct Switch {
    pub from: HostPort,
    pub to: HostPort,
}

impl Sentinels {
    /// Returns a sentinel other than `sentinel`: another one for each `turn`.
    pub fn other_than(&self, sentinel: &HostPort, turn: usize) -> Option<HostPort> {
        let state = self.state.lock();
        let others = || state.order.iter().filter(|known| *known != sentinel);
        others().nth(turn % others().count().max(1)).cloned()
    }

    /// Applies a fail-over that `sentinel` reports. Returns whether the primary has changed. Ignores a report about
    /// another server than the last known primary: it is outdated, or this client has missed a fail-over. A query then
    /// decides.
    pub fn apply_switch(&self, sentinel: &HostPort, switch: &Switch) -> bool {
        let mut state = self.state.lock();
        state.put_first(sentinel);
        if state.primary.as_ref() != Some(&switch.from) {
            return false;
        }
        let has_changed = state.set_primary(&switch.to);
        if has_changed {
            // Each fail-over has a greater number than the last, so older answers do not bring the old primary back.
            state.epoch += 1;
        }
        has_changed
    }

    /// Reads a message on [`CHANNEL`]. `None` if it is about another group.
    pub fn read_switch(&self, message: &[Value]) -> Option<Switch> {
        let [Value::BulkString(channel), Value::BulkString(text)] = message else {
            return None;
        };
        let mut parts = text.split(|byte| *byte == b' ');
        let group = parts.next()?;
        if channel != CHANNEL.as_bytes() || group != self.group.as_bytes() {
            return None;
        }
        let [old_host, old_port, host, port] = parts.collect::<Vec<_>>()[..] else {
            return None;
        };
        Some(Switch {
            from: HostPort::new(old_host, old_port)?,
            to: HostPort::new(host, port)?,
        })
    }
}

/// A connection to a sentinel.
pub struct SentinelConnection<'a> {
    dialer: &'a Dialer,
    attempted: ConnectErrors<'a>,
    sender: Sender,
    pub receiver: Receiver,
}

impl<'a> SentinelConnection<'a> {
    pub fn new(
        dialer: &'a Dialer,
        attempted: ConnectErrors<'a>,
        (sender, receiver): (Sender, Receiver),
    ) -> Self {
        Self {
            dialer,
            attempted,
            sender,
            receiver,
        }
    }

    /// Sends the login, if there is one, and selects the protocol. With RESP3, also names the connection as one that
    /// listens to messages.
    pub fn log_in(
        &mut self,
        protocol: redis::ProtocolVersion,
        deadline: MonotonicTime,
    ) -> Result<(), Error> {
        let name = self.dialer.connection_name("leasehold-sentinels");
        let login = crate::wire::connect::handshake::Login::new(
            self.attempted.info.redis_settings(),
            protocol,
            Some(&name),
        );
        self.send(&login.commands, deadline)?;
        for _ in 0..login.commands.len() {
            if let Value::ServerError(error) = self.receive(deadline)? {
                return Err(self.attempted.refused_by_sentinel("AUTH", &error));
            }
        }
        Ok(())
    }

    pub fn send(
        &mut self,
        commands: &redis::Pipeline,
        deadline: MonotonicTime,
    ) -> Result<(), Error> {
        if commands.is_empty() {
            return Ok(());
        }
        let sent = self.sender.send(&commands.get_packed_pipeline(), deadline);
        sent.map_err(|error| self.error(error.into()))
    }

    pub fn receive(&mut self, deadline: MonotonicTime) -> Result<Value, Error> {
        let received = self.receiver.receive_reply(deadline, LONGEST_REPLY);
        received.map_err(|error| self.error(error))
    }

    fn error(&self, error: redis::RedisError) -> Error {
        let tls = self.dialer.tls_error(self.attempted, &self.receiver);
        let received = self.receiver.unparsed();
        tls.unwrap_or_else(|| {
            self.attempted
                .no_reply_error(Step::AskSentinel, None, error, received)
        })
    }
}
