//! A server and how to connect to it: finds the primary of a group under sentinels, and logs in. [`connector`] makes
//! connections on their own threads, and [`watcher`] listens to a sentinel.
//!
//! When the client ends, the sockets of connections that are being made are closed, and further attempts fail at once.
//! If the system starts no thread, the caller connects on its own thread, so a process at its limit of threads keeps
//! its locks.

pub mod connector;
pub mod watcher;

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
#[cfg(feature = "tls")]
use redis::ConnectionAddr;
use redis::ConnectionInfo;

use crate::config::ConnectionLimits;
use crate::config::credentials::{Credentials, CredentialsCallback};
use crate::config::other_library::OtherLibrary;
#[cfg(feature = "tls")]
use crate::config::tls::TlsConfig;
use crate::report::error::{Error, ErrorKind};
use crate::store::{Report, Reports};
use crate::util::clock::MonotonicTime;
use crate::util::sync::park_timeout;
use crate::wire::connect::connection::{Connection, password_to_hide};
use crate::wire::connect::data_check::DataCheck;
use crate::wire::connect::dial::{Dialer, open_socket};
use crate::wire::connect::epoch::{ConnectionEpoch, Epoch};
use crate::wire::connect::errors::{Announcer, ConnectErrors, no_connection, unfinished};
use crate::wire::connect::handshake::Handshake;
use crate::wire::connect::steps::{Progress, RunningStep, RunningSteps, Step};
use crate::wire::connect::url::{self, HostPort, SentinelUrl};
use crate::wire::net::socket::{Closer, Receiver, Sender, Sockets};
#[cfg(feature = "tls")]
use crate::wire::net::tls::Tls;
use crate::wire::sentinel::Sentinels;

/// A caller waits this long for the connection that replaces an old one. A slower attempt continues, and a later caller
/// gets its connection.
pub const REPLACE_WAIT: Duration = Duration::from_millis(20);

/// A server, and how to connect to it.
pub struct Endpoint {
    pub info: ConnectionInfo,
    /// The sentinels that name the server. `None` for a fixed address, which is in `info`.
    sentinels: Option<Sentinels>,
    /// The settings of the sockets to the server and to its sentinels.
    pub dialer: Dialer,
    /// Returns the login of each connection. If there is a callback, `info` has no login.
    credentials: Option<CredentialsCallback>,
    connect_timeout: Duration,
    /// The largest size of a reply with a value of the caller.
    max_reply_bytes: usize,
    /// How long connections may be idle, and for how long they are used.
    pub limits: ConnectionLimits,
    failures: Mutex<Failures>,
    /// Whether the server has ever accepted a connection.
    was_reached: AtomicBool,
    epoch: Arc<Epoch>,
    /// Whether the server is not needed any more: see [`is_retired`](Self::is_retired).
    pub is_retired: Arc<AtomicBool>,
    /// The node of a Cluster that has announced this address. Empty for an address of the user.
    pub announced_by: Arc<OnceLock<HostPort>>,
    /// The sockets of attempts to connect that are under way.
    opening: Sockets,
    steps: RunningSteps,
    /// The sockets of the connections that were opened.
    connections: Sockets,
    /// Sockets to sentinels that are asked for the primary. A switch-over does not close them.
    queries: Sockets,
    /// Whether the server has to be a node of a Cluster. If false, it must not be one.
    pub is_in_cluster: bool,
    /// The first request of each connection to a node of a quorum. `None` for other servers.
    pub data_check: Option<DataCheck>,
    /// The library whose locks the client also excludes and waits for.
    pub other_library: Option<OtherLibrary>,
    /// Receives reports about connections.
    pub reports: Reports,
}

/// An attempt that is in one step for longer than this counts as hanging. Errors then name its step, and not an earlier
/// failure.
const HANGS: Duration = Duration::from_millis(500);

/// How often an attempt to connect checks during its pause whether the pause can end early.
const PAUSE_STEP: Duration = Duration::from_millis(20);

/// The server to connect to.
pub struct FoundServer<'a> {
    pub info: Cow<'a, ConnectionInfo>,
    /// `None` for a fixed address, where the role is not checked.
    pub named_by: Option<NamedBy>,
}

/// Why a server counts as the primary of a group, until it reports its role.
pub enum NamedBy {
    Sentinel(HostPort),
    /// An earlier answer of a sentinel. The sentinels no longer name a primary, for this reason.
    EarlierAnswer(Error),
}

/// The failed attempts to connect, except those of notifications.
#[derive(Default)]
struct Failures {
    count: u64,
    /// The error of the last attempt, if it failed, and when it failed.
    last: Option<(Error, MonotonicTime)>,
}

impl Endpoint {
    pub fn new(
        url: &str,
        connect_timeout: Duration,
        max_reply_bytes: usize,
    ) -> Result<Self, Error> {
        let invalid = |why| Error::new(ErrorKind::InvalidConfig, format!("url: {why}"));
        if let Some(group) = SentinelUrl::parse(url) {
            let group = group.map_err(invalid)?;
            let sentinels = Sentinels::new(&group);
            let endpoint = Self::with(group.info, connect_timeout, max_reply_bytes);
            return Ok(Self {
                sentinels: Some(sentinels),
                ..endpoint
            });
        }
        let info = url::parse(url).map_err(invalid)?;
        Ok(Self::with(info, connect_timeout, max_reply_bytes))
    }

    /// Makes an endpoint from an address that redis-rs has read or that was put together in code.
    pub fn from_info(
        info: ConnectionInfo,
        connect_timeout: Duration,
        max_reply_bytes: usize,
    ) -> Result<Self, Error> {
        url::check_address(&info)
            .map_err(|why| Error::new(ErrorKind::InvalidConfig, format!("address: {why}")))?;
        Ok(Self::with(info, connect_timeout, max_reply_bytes))
    }

    fn with(info: ConnectionInfo, connect_timeout: Duration, max_reply_bytes: usize) -> Self {
        Self {
            info,
            sentinels: None,
            dialer: Dialer::default(),
            credentials: None,
            connect_timeout,
            max_reply_bytes,
            limits: ConnectionLimits::default(),
            failures: Mutex::default(),
            was_reached: AtomicBool::new(false),
            epoch: Arc::default(),
            is_retired: Arc::default(),
            announced_by: Arc::default(),
            opening: Sockets::default(),
            steps: RunningSteps::default(),
            connections: Sockets::default(),
            queries: Sockets::default(),
            is_in_cluster: false,
            data_check: None,
            other_library: None,
            reports: Reports::default(),
        }
    }

    /// The other server that has announced the address of this one. `None` for an address of the user.
    pub fn announcer<'a>(&'a self, named_by: Option<&'a NamedBy>) -> Option<Announcer<'a>> {
        match named_by {
            Some(NamedBy::Sentinel(by)) => Some(Announcer::Sentinel(by)),
            Some(NamedBy::EarlierAnswer(_)) => None,
            None => self.announced_by.get().map(Announcer::Node),
        }
    }

    /// Prepares TLS, if the address has it. Must be called before the first connection to such an address.
    #[cfg(feature = "tls")]
    pub fn set_up_tls(&mut self, settings: Option<&TlsConfig>) -> Result<(), Error> {
        let invalid = |why: String| Error::new(ErrorKind::InvalidConfig, why);
        let ConnectionAddr::TcpTls {
            host, tls_params, ..
        } = self.info.addr()
        else {
            return match settings {
                None => Ok(()),
                Some(_) => {
                    let why = format!(
                        "tls: {} is an address without TLS; use rediss://host:port, or leave out \
                         Builder::tls",
                        self.address()
                    );
                    Err(invalid(why))
                }
            };
        };
        if tls_params.is_some() && settings.is_none() {
            let why =
                "address: its certificates are known to redis-rs only; give them with Builder::tls";
            return Err(invalid(why.to_owned()));
        }
        let default = TlsConfig::default();
        let tls = Tls::new(settings.unwrap_or(&default), host);
        self.dialer.set_tls(tls.map_err(invalid)?);
        Ok(())
    }

    /// Sets the callback that returns the login of each connection.
    pub fn set_credentials(&mut self, callback: CredentialsCallback) -> Result<(), Error> {
        let settings = self.info.redis_settings();
        if settings.username().is_some() || settings.password().is_some() {
            let why = "credentials: the address has a login, too; leave it out there";
            return Err(Error::new(ErrorKind::InvalidConfig, why));
        }
        self.credentials = Some(callback);
        Ok(())
    }

    /// Sets the login at the sentinels.
    pub fn set_sentinel_login(&mut self, login: Credentials) -> Result<(), Error> {
        let Some(sentinels) = &mut self.sentinels else {
            let why = "sentinel_credentials: the address has no sentinels; use redis+sentinel://";
            return Err(Error::new(ErrorKind::InvalidConfig, why));
        };
        sentinels.set_login(login);
        Ok(())
    }

    /// The sentinels that name the server. `None` for a fixed address.
    pub fn sentinels(&self) -> Option<&Sentinels> {
        self.sentinels.as_ref()
    }

    /// Asks the user's callback for a login. Returns `info` with the login, and `deadline` plus the time that the
    /// callback took. Callers hold no mutex. They connect the socket first, so that the callback is not asked for a
    /// server that is away.
    pub fn with_login<'a>(
        &self,
        info: Cow<'a, ConnectionInfo>,
        deadline: MonotonicTime,
    ) -> Result<(Cow<'a, ConnectionInfo>, MonotonicTime), Error> {
        let Some(callback) = &self.credentials else {
            return Ok((info, deadline));
        };
        let called_at = MonotonicTime::now();
        let Credentials { user, password } = callback.call(&url::address(&info))?;
        let deadline = deadline.after(MonotonicTime::now().since(called_at));
        let mut settings = info.redis_settings().clone().set_password(password);
        if let Some(user) = user {
            settings = settings.set_username(user);
        }
        let info = info.into_owned().set_redis_settings(settings);
        Ok((Cow::Owned(info), deadline))
    }

    /// The address to connect to. With sentinels, asks them for the primary by `deadline`, and also returns why the
    /// address counts as that of the primary. If the sentinels do not name a primary, returns the last known one.
    /// Registers the sockets to sentinels in `queries`.
    pub fn find_server(
        &self,
        deadline: MonotonicTime,
        queries: &Sockets,
    ) -> Result<FoundServer<'_>, Error> {
        let Some(sentinels) = &self.sentinels else {
            let info = Cow::Borrowed(&self.info);
            let named_by = None;
            return Ok(FoundServer { info, named_by });
        };
        let now = MonotonicTime::now();
        // Half of the time is left for the connection to the last primary.
        let ask_by = match sentinels.last_primary() {
            Some(_) => now.after(deadline.since(now) / 2),
            None => deadline,
        };
        let (primary, named_by) = match sentinels.find_primary(&self.dialer, ask_by, queries) {
            Ok(named) => {
                if named.has_changed {
                    self.follow_switch();
                }
                (named.primary, NamedBy::Sentinel(named.by))
            }
            Err(error) => match sentinels.last_primary() {
                Some(last) => {
                    queries.check()?;
                    if sentinels.begin_report() {
                        self.reports
                            .send(Report::SentinelsUnavailable(error.clone()));
                    }
                    (last, NamedBy::EarlierAnswer(error))
                }
                None => return Err(error),
            },
        };
        let addr = primary.to_addr(sentinels.has_tls());
        Ok(FoundServer {
            info: Cow::Owned(self.info.clone().set_addr(addr)),
            named_by: Some(named_by),
        })
    }

    /// Handles a fail-over: makes all connections outdated, and ends the attempts to connect to the old primary.
    pub fn follow_switch(&self) {
        self.epoch.count_switch();
        self.opening.close_open();
    }

    /// Returns an error unless `role` is that of a primary. After the error, the sentinel that has named the server is
    /// asked last.
    pub fn check_role(
        &self,
        attempted: ConnectErrors<'_>,
        named_by: &NamedBy,
        role: &[u8],
    ) -> Result<(), Error> {
        if role == b"master" {
            return Ok(());
        }
        let what = match named_by {
            NamedBy::Sentinel(by) => {
                if let Some(sentinels) = &self.sentinels {
                    sentinels.doubt(by);
                }
                format!(
                    "is no primary, although the sentinel {by} names it; a fail-over may be under way"
                )
            }
            NamedBy::EarlierAnswer(_) => {
                "is no primary any more; check the sentinels, which name the new one".to_owned()
            }
        };
        Err(attempted.about(ErrorKind::Unavailable, what))
    }

    /// The error for a failed connection to a server. The sentinel that has named this server is then asked last.
    pub fn connect_failed(&self, named_by: Option<&NamedBy>, error: Error) -> Error {
        match (named_by, &self.sentinels) {
            (Some(NamedBy::Sentinel(by)), Some(sentinels)) => {
                if error.kind() == ErrorKind::Unavailable {
                    sentinels.put_last(by);
                }
                error
            }
            (Some(NamedBy::EarlierAnswer(why)), _) => {
                let (why, last) = (why.message(), error.message());
                let message = format!("{why}; the last primary: {last}");
                Error::new(error.kind(), message).with_source_of(&error)
            }
            _ => error,
        }
    }

    /// The address for debug output, without user and password.
    pub fn address(&self) -> String {
        match &self.sentinels {
            Some(sentinels) => sentinels.redacted(),
            None => url::address(&self.info),
        }
    }

    /// The server's address, for errors of requests. With sentinels, that is the primary that they named last.
    pub fn address_of_server(&self) -> String {
        let last = self.sentinels.as_ref().and_then(Sentinels::last_primary);
        last.map_or_else(|| self.address(), |server| server.to_string())
    }

    /// Connects by `deadline`, as [`Dialer::connect`] does. The error is lasting if no process listens at a fixed
    /// address that the client has never reached.
    pub fn connect(
        &self,
        attempted: ConnectErrors<'_>,
        deadline: MonotonicTime,
        connected: impl FnOnce(Closer) -> Result<(), Error>,
    ) -> Result<(Sender, Receiver), Error> {
        let halves = open_socket(attempted, deadline).map_err(|error| {
            let is_lasting = error.nothing_listens() && self.is_fixed() && !self.was_reached();
            let error = attempted.connect_error(error);
            if is_lasting { error.lasting() } else { error }
        })?;
        self.was_reached.store(true, Ordering::Relaxed);
        connected(halves.0.closer())?;
        self.dialer.start_tls(attempted, halves, deadline)
    }

    /// Connects, logs in and loads the scripts that the server does not know, all within the connect time-out. The time
    /// of the callback for credentials does not count. Fails at once after [`close`](Self::close).
    ///
    /// With sentinels, begins again if the named server is no primary, or if a sentinel names another server during the
    /// attempt. If the client cannot reach the named server, it asks each other sentinel once.
    ///
    /// The error [is lasting](Error::is_lasting) unless it may change by itself: the server is away, starts or is busy.
    /// If nothing listens at a fixed address that this client has never reached, the error is lasting, too.
    pub fn open(&self) -> Result<Connection, Error> {
        self.open_within(self.connect_timeout)
    }

    /// Calls [`open`](Self::open) with the time-out `time`, if that is shorter than `connect_timeout`.
    pub fn open_within(&self, time: Duration) -> Result<Connection, Error> {
        let opened = self.open_in_time(time.min(self.connect_timeout));
        opened.map_err(|error| match error.kind() {
            ErrorKind::Unavailable => error,
            _ => error.lasting(),
        })
    }

    fn open_in_time(&self, time: Duration) -> Result<Connection, Error> {
        let deadline = MonotonicTime::now().after(time);
        let mut others = self.sentinels.as_ref().map_or(0, |all| all.count() - 1);
        let mut has_failed = false;
        loop {
            self.pause(deadline, &self.queries);
            self.check_open()?;
            let doubts = self.doubts();
            let mut closer = None;
            let opened = self.open_once(time, deadline, others > 0, &mut closer);
            if let Some(closer) = closer {
                self.opening.forget(&closer);
                if opened.is_ok() {
                    // After `close_connections`, this closes the socket.
                    let _ = self.connections.register(closer);
                }
            }
            let again_at = self.record_attempt(opened.as_ref().err());
            let (Some(again_at), Err(error)) = (again_at, &opened) else {
                if has_failed && opened.is_ok() {
                    self.record(None, 0);
                }
                return opened;
            };
            if doubts == self.doubts() {
                if others == 0 || error.kind() != ErrorKind::Unavailable {
                    return opened;
                }
                others -= 1;
            }
            // With less time than this, perhaps only the first sentinel would reply, and its answer may be outdated.
            if deadline <= again_at.after(self.connect_timeout / 8) {
                return opened;
            }
            // A caller whose time ends before the next attempt gets this error.
            self.record(Some(error), 0);
            has_failed = true;
        }
    }

    /// Sets the error of the last attempt to connect, or `None` if that attempt has succeeded. Adds `failed` to the
    /// number of failed attempts.
    fn record(&self, error: Option<&Error>, failed: u64) {
        let last = error.map(|error| (error.clone(), MonotonicTime::now()));
        let mut failures = self.failures.lock();
        failures.count += failed;
        // The replaced error may own a value of the user, so it is dropped after the unlock.
        let replaced = std::mem::replace(&mut failures.last, last);
        drop(failures);
        drop(replaced);
    }

    /// After a failed attempt to connect, waits until the client may ask the sentinels again, or until `deadline`.
    /// Returns early if they name another primary, or if `queries` are closed.
    pub fn pause(&self, deadline: MonotonicTime, queries: &Sockets) {
        let Some(sentinels) = &self.sentinels else {
            return;
        };
        loop {
            let now = MonotonicTime::now();
            let left = sentinels.connect_again_at().min(deadline).since(now);
            if left.is_zero() || queries.check().is_err() {
                return;
            }
            park_timeout(left.min(PAUSE_STEP));
        }
    }

    /// Records how an attempt to connect ended. After a failure, returns when the client may ask the sentinels again.
    /// Returns `None` for a fixed address.
    pub fn record_attempt(&self, failure: Option<&Error>) -> Option<MonotonicTime> {
        let sentinels = self.sentinels.as_ref()?;
        if failure.is_none() {
            sentinels.reset_pause();
            return None;
        }
        Some(sentinels.lengthen_pause(self.connect_timeout / 4))
    }

    /// An attempt to connect to `info` within `time`, which is `connect_timeout` or a part of it.
    fn attempted<'a>(&'a self, info: &'a ConnectionInfo, time: Duration) -> ConnectErrors<'a> {
        let setting = match time < self.connect_timeout {
            true => "a part of `connect_timeout`",
            false => "`connect_timeout`",
        };
        ConnectErrors::new(info, time, setting, self.dialer.prefix())
    }

    fn doubts(&self) -> u64 {
        self.sentinels.as_ref().map_or(0, Sentinels::doubts)
    }

    /// Makes one attempt of [`open`](Self::open). If another attempt may follow, leaves a quarter of the time for it.
    /// Sets `closer` once the socket is connected; the caller has to remove the closer from `opening`.
    fn open_once(
        &self,
        time: Duration,
        deadline: MonotonicTime,
        is_followed: bool,
        closer: &mut Option<Closer>,
    ) -> Result<Connection, Error> {
        let first = match &self.sentinels {
            Some(_) => Step::AskSentinel,
            None => Step::LookUp,
        };
        let progress = self.steps.begin(first);
        let found = self.find_server(deadline, &self.queries)?;
        let made_in = self.begin_connection(&found)?;
        let FoundServer { info, named_by } = found;
        let now = MonotonicTime::now();
        let deadline = match is_followed {
            true => now.after(deadline.since(now) * 3 / 4),
            false => deadline,
        };
        let (time, progress) = ((time, deadline), Some(&progress));
        let opened = self.open_server(info, named_by.as_ref(), made_in, time, progress, closer);
        opened.map_err(|error| self.connect_failed(named_by.as_ref(), error))
    }

    /// The counts of [`Epoch`] for a new connection to `found`. They do not cover a switch before this call, so this
    /// call returns an error if the sentinels have named another server since `found`.
    pub fn begin_connection(&self, found: &FoundServer<'_>) -> Result<ConnectionEpoch, Error> {
        let made_in = self.epoch.now();
        self.check_is_named(&found.info)?;
        Ok(made_in)
    }

    /// Returns an error if the sentinels have named another server since they named the server of `info`.
    fn check_is_named(&self, info: &ConnectionInfo) -> Result<(), Error> {
        let Some(sentinels) = &self.sentinels else {
            return Ok(());
        };
        let last = sentinels.last_primary();
        if last.is_some_and(|last| last.to_addr(sentinels.has_tls()) == *info.addr()) {
            return Ok(());
        }
        let what = "is no primary any more: the sentinels name another one, and the client connects to that";
        let attempted = self.attempted(info, self.connect_timeout);
        Err(attempted.about(ErrorKind::Unavailable, what))
    }

    fn open_server(
        &self,
        info: Cow<'_, ConnectionInfo>,
        named_by: Option<&NamedBy>,
        mut made_in: ConnectionEpoch,
        (time, deadline): (Duration, MonotonicTime),
        progress: Option<&Progress<'_>>,
        closer: &mut Option<Closer>,
    ) -> Result<Connection, Error> {
        let attempted = self.attempted(&info, time).with_progress(progress);
        let attempted = attempted.announced_by(self.announcer(named_by));
        let (sender, receiver) = self.connect(attempted, deadline, |socket| {
            *closer = Some(socket.clone());
            self.register_opening(socket, &info)
        })?;
        attempted.enter(Step::CallCredentials);
        let (info, deadline) = self.with_login(info, deadline)?;
        // The login below fails if this connection is broken, too. So the breaks until now do not count.
        made_in.forget_breaks(&self.epoch);
        let mut connection = Connection {
            sender,
            receiver,
            address: url::address(&info).into(),
            database: info.redis_settings().db(),
            max_reply_bytes: self.max_reply_bytes,
            prefix: Arc::clone(self.dialer.prefix()),
            password: password_to_hide(&info),
            broken: false,
            max_idle: self.limits.max_idle,
            replace_at: self.limits.replace_at(MonotonicTime::now()),
            made_in,
            epoch: Arc::clone(&self.epoch),
        };
        let mut handshake = Handshake {
            dialer: &self.dialer,
            is_in_cluster: self.is_in_cluster,
            data_check: self.data_check.as_ref(),
            other_library: self.other_library,
            attempted: self.attempted(&info, time).with_progress(progress),
            connection: &mut connection,
            deadline,
        };
        let server = handshake.log_in()?;
        if let Some(by) = named_by {
            let attempted = handshake.attempted;
            self.check_role(attempted, by, &handshake.role(server)?)?;
        }
        handshake.load_missing_scripts()?;
        handshake.check_data()?;
        // The server may have taken long to reply, so the idle time begins now.
        connection.sender.mark_used();
        Ok(connection)
    }

    /// Refuses new connections, and closes the sockets of attempts to connect, so that their threads end. Called when
    /// the client has ended.
    pub fn close(&self) {
        self.opening.close();
        self.queries.close();
    }

    /// Calls [`close`](Self::close), and closes the connections that [`open`](Self::open) has made, so that callers
    /// stop waiting for replies.
    pub fn close_connections(&self) {
        self.close();
        self.connections.close();
    }

    /// Registers the socket of an attempt to connect to `info`, so that [`close`](Self::close) and
    /// [`follow_switch`](Self::follow_switch) can close it. Returns an error if the client has ended, or if the
    /// sentinels have named another server.
    fn register_opening(&self, socket: Closer, info: &ConnectionInfo) -> Result<(), Error> {
        self.opening.register(socket)?;
        // Checked after the registration, because a later switch closes the registered socket.
        self.check_is_named(info)
    }

    /// Returns an error once the client has ended.
    pub fn check_open(&self) -> Result<(), Error> {
        self.opening.check()
    }

    /// Whether other servers have all slots of this node of a Cluster. Then callers do not wait for a connection to it.
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Relaxed)
    }

    /// The record of which of this endpoint's connections are suspect.
    pub fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// Connects to `found`. `made_in` is the epoch that was read before the attempt.
    #[cfg(all(test, not(shuttle)))]
    pub fn open_found(
        &self,
        found: FoundServer<'_>,
        made_in: ConnectionEpoch,
        deadline: MonotonicTime,
    ) -> Result<Connection, Error> {
        let FoundServer { info, named_by } = found;
        let time = (self.connect_timeout, deadline);
        self.open_server(info, named_by.as_ref(), made_in, time, None, &mut None)
    }

    #[cfg(all(test, not(shuttle)))]
    pub fn open_connections(&self) -> usize {
        self.connections.count()
    }

    #[cfg(all(test, not(shuttle)))]
    pub fn queries_under_way(&self) -> usize {
        self.queries.count()
    }

    /// Whether the address always leads to the same server. A group under sentinels and a Cluster have several servers.
    fn is_fixed(&self) -> bool {
        self.sentinels.is_none() && !self.is_in_cluster
    }

    fn was_reached(&self) -> bool {
        self.was_reached.load(Ordering::Relaxed)
    }

    /// The error of the last attempt to connect, if it failed.
    pub fn last_error(&self) -> Option<Error> {
        let failures = self.failures.lock();
        failures.last.as_ref().map(|(error, _)| error.clone())
    }

    /// The error of a caller that leaves without a connection, and whose request was not sent: the client has ended,
    /// the last attempt has failed, or the current attempt has hung in one step for a while.
    pub fn no_connection(&self) -> Error {
        if let Err(ended) = self.check_open() {
            return ended;
        }
        let running = self.steps.longest();
        let last = self.failures.lock().last.clone();
        match (running, last) {
            (Some(running), Some((_, failed_at)))
                if failed_at < running.since && running.lasted() >= HANGS =>
            {
                self.unfinished(running)
            }
            (_, Some((error, _))) => error,
            (Some(running), None) => self.unfinished(running),
            (None, None) => no_connection(&self.address_of_server()),
        }
    }

    /// The error of a caller that leaves while an attempt to connect is under way.
    pub fn unfinished_step(&self) -> Option<Error> {
        self.steps.longest().map(|running| self.unfinished(running))
    }

    fn unfinished(&self, running: RunningStep) -> Error {
        let last = self
            .sentinels
            .as_ref()
            .filter(|sentinels| sentinels.last_primary().is_some());
        // The sentinel that has replied last.
        let sentinel = last.map(Sentinels::first);
        let by_sentinel = sentinel.as_ref().map(Announcer::Sentinel);
        let announced_by = by_sentinel.or_else(|| self.announcer(None));
        let (address, lasted) = (self.address_of_server(), running.lasted());
        unfinished(&address, running.step, lasted, announced_by)
    }

    /// The number of failed attempts to connect.
    pub fn failures(&self) -> u64 {
        self.failures.lock().count
    }

    /// Whether an attempt after the first `before` failures has failed with a lasting error.
    pub fn is_refused_since(&self, before: u64) -> bool {
        let failures = self.failures.lock();
        let last = failures.last.as_ref();
        failures.count > before && last.is_some_and(|(error, _)| error.is_lasting())
    }

    /// Calls [`open`](Self::open), and records and reports the result. Used for all connections except those of
    /// notifications and of checks.
    pub fn open_and_record(&self) -> Result<Connection, Error> {
        let opened = self.open();
        self.record(opened.as_ref().err(), u64::from(opened.is_err()));
        match opened {
            Ok(_) => self.reports.send(Report::Connected),
            Err(_) => self.epoch.call_failure_hook(),
        }
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DEFAULT_MAX_REPLY;

    fn endpoint(url: &str) -> Result<Endpoint, Error> {
        Endpoint::new(url, Duration::from_secs(1), DEFAULT_MAX_REPLY)
    }

    #[test]
    fn the_error_for_bad_urls_hides_the_password() {
        for url in [
            "redis://user:secret@host:badport/0",
            "redis://:se/secret@host",
            "http://u:secret@host",
            "redis:secret@host",
            "rediss://:secret@host#insecure",
            "redis://:secret@host/notanumber",
            "redis://:secret@host/0?timeout=5",
            "unix:///x?db=0&pass=secret&user=me&shard=1",
            "unix:///x?pass=secret&db=zero",
            "redis://:secret@host?protocol=9",
        ] {
            let error = endpoint(url).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{url}");
            let text = format!("{error} {error:?}");
            assert!(text.contains("url"), "{text}");
            assert!(!text.contains("secret"), "{text}");
        }
        let error = endpoint("redis://h/0?timeout=5").err().unwrap().to_string();
        assert!(error.ends_with("has an unknown option; known are protocol"));
    }

    #[test]
    #[cfg(not(shuttle))]
    fn only_a_fixed_address_that_never_worked_refuses_for_good() {
        let is_lasting = |endpoint: &Endpoint, to: &ConnectionInfo| {
            let deadline = MonotonicTime::now().after(endpoint.connect_timeout);
            let connected = endpoint.connect(
                endpoint.attempted(to, endpoint.connect_timeout),
                deadline,
                |_| Ok(()),
            );
            connected.err().unwrap().is_lasting()
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let reached = endpoint(&url).unwrap();
        let deadline = MonotonicTime::now().after(reached.connect_timeout);
        let attempted = reached.attempted(&reached.info, reached.connect_timeout);
        assert!(reached.connect(attempted, deadline, |_| Ok(())).is_ok());
        drop(listener);
        let closed_port = &reached.info;
        assert!(!is_lasting(&reached, closed_port));
        assert!(is_lasting(&endpoint(&url).unwrap(), closed_port));
        let no_socket = endpoint("unix:///nowhere/at/all.sock").unwrap();
        assert!(is_lasting(&no_socket, &no_socket.info));
        let mut for_cluster = endpoint(&url).unwrap();
        for_cluster.is_in_cluster = true;
        assert!(!is_lasting(&for_cluster, closed_port));
        let group = endpoint("redis+sentinel://127.0.0.1:1/group").unwrap();
        assert!(!is_lasting(&group, closed_port));
    }

    /// A test cannot make the lookup of a name hang. `bad_input::unfinished` tests the other steps.
    #[test]
    #[cfg(not(shuttle))]
    fn callers_learn_of_the_step_that_hangs() {
        let endpoint = endpoint("redis://redis.example:7").unwrap();
        let shown = || endpoint.no_connection().to_string();
        let never = shown();
        assert!(
            never.contains("redis.example:7: the time was too short"),
            "{never}"
        );
        let progress = endpoint.steps.begin(Step::LookUp);
        let other = endpoint.steps.begin(Step::LookUp);
        other.enter(Step::LogIn);
        let hanging = shown();
        let begin = "Redis is unavailable: redis.example:7: the lookup of the host name has not ended after ";
        assert!(hanging.starts_with(begin), "{hanging}");
        assert!(
            hanging.ends_with("s, so nothing was sent; check DNS"),
            "{hanging}"
        );
        drop(progress);
        assert!(shown().contains("the login has not ended after"));
        // A later failure describes the cause more exactly.
        let fail = |at| {
            let failed = Error::new(ErrorKind::Unavailable, "refused");
            endpoint.failures.lock().last = Some((failed, at));
        };
        fail(MonotonicTime::now());
        assert!(shown().contains("refused"));
        endpoint
            .steps
            .set_first_since(MonotonicTime::now().before(HANGS));
        fail(MonotonicTime::now().before(2 * HANGS));
        assert!(shown().contains("the login has not ended after"));
        drop(other);
        assert!(shown().contains("refused"));
        let info = &endpoint.info;
        let slow = crate::wire::net::socket::ConnectError::SlowLookup(Duration::from_millis(5_250));
        let slow = endpoint
            .attempted(info, endpoint.connect_timeout)
            .connect_error(slow);
        let text = "redis.example:7 cannot be reached: the lookup of its host name took 5.25s of 1s \
                    (`connect_timeout`); check DNS";
        assert_eq!(slow.message(), text);
    }

    #[cfg(not(shuttle))]
    mod slow {
        use std::net::{SocketAddr, TcpStream};

        use super::*;
        use crate::wire::fake_server;
        use crate::wire::fake_server::Stall;

        const TIMEOUT: Duration = Duration::from_millis(200);
        /// The delay allowed for a busy machine.
        const MARGIN: Duration = Duration::from_secs(5);

        #[track_caller]
        fn assert_ends_in_time(address: SocketAddr) {
            let endpoint =
                Endpoint::new(&format!("redis://{address}"), TIMEOUT, DEFAULT_MAX_REPLY).unwrap();
            let started = MonotonicTime::now();
            let error = endpoint.open().err().unwrap();
            let took = MonotonicTime::now().since(started);
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(took >= TIMEOUT / 2 && took < TIMEOUT + MARGIN, "{took:?}");
        }

        #[test]
        fn an_unanswered_attempt_times_out() {
            let (_listener, address) = fake_server::accepts_nothing();
            let attempt = || TcpStream::connect_timeout(&address, TIMEOUT);
            let _accepted: Vec<TcpStream> = std::iter::from_fn(|| attempt().ok()).collect();
            assert_ends_in_time(address);
        }

        #[test]
        fn each_step_of_connecting_times_out() {
            const LOGIN: &str = "+OK\r\n+OK\r\n+OK\r\n*0\r\n";
            let asked = crate::command::SCRIPTS.iter();
            let asked = asked.filter(|script| !script.only_on_quorum).count();
            let no_script = format!("*{asked}\r\n{}", ":0\r\n".repeat(asked));
            for replies in ["", LOGIN, &format!("{LOGIN}{no_script}")] {
                for stall in Stall::ALL {
                    assert_ends_in_time(fake_server::stalling(replies.as_bytes(), stall));
                }
            }
        }
    }

    #[test]
    #[cfg(not(shuttle))]
    fn closing_an_endpoint_ends_its_logins() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let timeout = Duration::from_secs(60);
        let endpoint = Endpoint::new(&url, timeout, DEFAULT_MAX_REPLY).unwrap();
        std::thread::scope(|scope| {
            let logins = [(); 3].map(|()| scope.spawn(|| endpoint.open().err().unwrap()));
            // The server accepts the connections and does not reply to logins.
            let _accepted = [(); 3].map(|()| listener.accept().unwrap());
            while endpoint.opening.count() < 3 {
                std::thread::yield_now();
            }
            let closed_at = MonotonicTime::now();
            endpoint.close();
            for login in logins {
                assert_eq!(login.join().unwrap().kind(), ErrorKind::Unavailable);
            }
            let took = MonotonicTime::now().since(closed_at);
            assert!(took < timeout / 2, "{took:?}");
        });
        assert!(endpoint.opening.count() == 0);
        listener.set_nonblocking(true).unwrap();
        assert_eq!(
            endpoint.open().err().unwrap().kind(),
            ErrorKind::Unavailable
        );
        let accepted = listener.accept();
        assert_eq!(accepted.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}
