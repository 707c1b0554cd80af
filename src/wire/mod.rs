//! The store of one Redis server: pipelines for callers, two pipelines for renewals, the notification connection, and
//! connections for transactions and pings. Each connection is made when it is first needed.
//!
//! The hash of a key chooses the key's pipeline, with a random seed for each client. Renewals may run in any order, so
//! `Node::pipeline_for_renewals` chooses a connected renewal pipeline that is idle, or for few renewals an idle
//! pipeline for callers. So a client with a few locks has three connections.

pub mod connect;
pub mod endpoint;
pub mod environment;
#[cfg(test)]
#[cfg(not(shuttle))]
pub mod fake_server;
pub mod net;
pub mod notifications;
pub mod pipeline;
pub mod scripts;
pub mod sentinel;
pub mod session;
#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::command::{Acquire, Command, Outcome, QueueMode, Release, Reply, Request};
use crate::config::Config;
use crate::config::key::Key;
use crate::process::threads::ThreadGroup;
use crate::report::environment::EnvironmentFinding;
use crate::report::error::{Error, ErrorKind};
use crate::store::{
    Completion, Listener, Notifications, RenewalLimits, Reports, Scan, ScannedKeys, ServerId,
    Store, TrackedKey,
};
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::slot::{Redirect, Slot};
use crate::util::sync::park_timeout;
use crate::wire::connect::data_check::{ClockEstimate, DataCheck};
use crate::wire::endpoint::Endpoint;
use crate::wire::endpoint::watcher::SentinelWatcher;
use crate::wire::environment::EnvironmentCheck;
use crate::wire::notifications::NotificationConnection;
use crate::wire::pipeline::releases::{QueuedRelease, Route};
use crate::wire::pipeline::{Pipeline, Readiness, ReleaseRouter, SentRequest, Shared};
use crate::wire::scripts::ScriptContext;
use crate::wire::session::{TransactionConnection, Transactions};

/// The number of pipelines for renewals: one for each thread that renews.
const RENEWAL_PIPELINES: usize = RenewalLimits::USUAL.threads;
/// This many renewals on the pipeline of a caller delay the caller's request by less than one round trip.
const FEW_RENEWALS: usize = 8;
/// The pause after the first attempt of a flush, if Redis is away or refuses releases. The pause doubles with each
/// attempt, since each attempt repeats all refused releases.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The connections of a client to one Redis server.
pub struct Node {
    /// The last [`RENEWAL_PIPELINES`] are for renewals. Up to [`FEW_RENEWALS`] renewals at a time use an idle pipeline
    /// for callers if a pipeline for renewals would have to connect.
    pipelines: Arc<[Pipeline]>,
    /// The number of pipelines for callers.
    for_callers: usize,
    /// Counts the calls with renewals, so that the pipelines for renewals take turns: each connection is used often,
    /// and the client notices a dead one soon.
    turn: AtomicUsize,
    notifications: Arc<NotificationConnection>,
    sentinels: Arc<SentinelWatcher>,
    shared: Arc<Shared>,
    /// Locked by a ping: one connection serves all pings.
    pinging: Mutex<()>,
    environment: EnvironmentCheck,
}

impl Node {
    /// Makes the node without connecting: each pipeline connects for its first request. `server` is the number of this
    /// server in reports to the [`Listener`].
    pub fn new(
        server: ServerId,
        mut endpoint: Endpoint,
        config: &Config,
        holder: HolderId,
        reports: Reports,
        router: Option<Weak<dyn ReleaseRouter>>,
    ) -> Self {
        endpoint.reports = reports.clone();
        endpoint.other_library = config.other_library;
        endpoint.dialer.name_connections(&holder);
        let endpoint = Arc::new(endpoint);
        let notifications = NotificationConnection::new(
            server,
            Arc::clone(&endpoint),
            &holder,
            &config.prefix,
            config.command_timeout,
        );
        let notifications = Arc::new(notifications);
        let suspected = Arc::downgrade(&notifications);
        endpoint.epoch().on_suspicion(move || {
            if let Some(notifications) = suspected.upgrade() {
                notifications.suspect();
            }
        });
        let sentinels = SentinelWatcher::new(Arc::clone(&endpoint), config.command_timeout);
        let mut context = ScriptContext::new(
            holder,
            &config.prefix,
            config.layout,
            config.max_reply_bytes,
        );
        context.reports = reports.clone();
        context.other_library = config.other_library;
        if endpoint.data_check.is_some() {
            context.quarantine = Some(config.max_ttl);
        }
        let shared = Arc::new(Shared {
            connector: pipeline::connection::connector(&endpoint),
            endpoint,
            context,
            connect_timeout: config.connect_timeout,
            command_timeout: config.command_timeout,
            reports,
            server,
            router,
        });
        // On a quorum, renewals use the pipelines of callers.
        let for_callers =
            (0..config.pipelines).map(|_| match shared.endpoint.data_check.as_ref() {
                Some(_) => Pipeline::for_renewals(Arc::clone(&shared)),
                None => Pipeline::for_callers(Arc::clone(&shared)),
            });
        let for_renewals =
            (0..RENEWAL_PIPELINES).map(|_| Pipeline::for_renewals(Arc::clone(&shared)));
        let pipelines: Arc<[Pipeline]> = for_callers.chain(for_renewals).collect();
        let stale = Arc::downgrade(&pipelines);
        shared.endpoint.epoch().on_stale(move || {
            if let Some(pipelines) = stale.upgrade() {
                pipelines.iter().for_each(Pipeline::request_repeats);
            }
        });
        Self {
            pipelines,
            for_callers: config.pipelines,
            turn: AtomicUsize::new(0),
            notifications,
            sentinels: Arc::new(sentinels),
            shared,
            pinging: Mutex::new(()),
            environment: EnvironmentCheck::default(),
        }
    }

    /// Sends all of `requests` and waits for their replies. With [`Route::ASKING`], `ASKING` goes before each of them,
    /// because their slots are moving to this node.
    pub fn execute_all<'a>(
        &self,
        requests: impl IntoIterator<Item = &'a mut Request>,
        route: Route,
    ) {
        let by_pipeline = self.by_pipeline(requests, |request| &request.command);
        for (pipeline, mut requests) in self.pipelines.iter().zip(by_pipeline) {
            self.settle(pipeline, &requests);
            pipeline.execute(&mut requests, route);
        }
    }

    /// Waits until other pipelines have released the keys of a set: an acquire of the set must not find a key taken by
    /// a lock that this client has released.
    fn settle(&self, pipeline: &Pipeline, requests: &[&mut Request]) {
        let deadline = requests.iter().map(|request| request.deadline).max();
        let in_sets = requests
            .iter()
            .filter_map(|request| match &request.command {
                Command::Acquire(Acquire { key, link, .. }) if link.is_next() => Some(key),
                _ => None,
            });
        for other in &self.pipelines[..self.for_callers] {
            let keys = in_sets.clone();
            let own = keys.filter(|key| std::ptr::eq(self.pipeline_of_key(key), other));
            let own: Vec<&Key> = own.collect();
            if let Some(deadline) = deadline
                && !own.is_empty()
                && !std::ptr::eq(other, pipeline)
            {
                other.settle(&own, deadline);
            }
        }
    }

    /// Sends one command with `ASKING`, for a slot that is moving to this node.
    pub fn ask_one(&self, command: Command, deadline: MonotonicTime) -> Outcome {
        self.pipeline_of(&command)
            .run_one(command, deadline, Route::ASKING)
    }

    fn pipeline_of_key(&self, key: &Key) -> &Pipeline {
        &self.pipelines[key.shard(self.for_callers)]
    }

    /// Queues a release that another node has refused.
    pub fn adopt_release(&self, release: QueuedRelease) {
        self.pipeline_of_key(&release.release.key)
            .adopt_release(release);
    }

    /// Reports as late a release that no node has carried out, and queues it.
    pub fn queue_late_release(&self, release: Release, error: &Error) {
        self.pipeline_of_key(&release.key)
            .queue_late_release(release, error);
    }

    /// The number of queued releases that callers do not wait for.
    pub fn queued_releases(&self) -> usize {
        self.pipelines.iter().map(Pipeline::releases).sum()
    }

    /// Closes the connections of requests for good.
    pub fn disconnect(&self) {
        self.shared.endpoint.close_connections();
        self.shared.connector.wake_callers();
    }

    /// Queues the release of a lease whose proposal got no reply and may still arrive.
    pub fn queue_undo(&self, release: Release) {
        self.pipeline_of_key(&release.key).queue_undo(release);
    }

    /// The clock of the server, as this client estimates it, if the server is a node of a quorum.
    pub fn clock(&self) -> Option<&ClockEstimate> {
        let check = self.shared.endpoint.data_check.as_ref();
        check.map(DataCheck::clock)
    }

    /// Takes out the queued releases of the keys for which `keys` returns true.
    pub fn take_releases(&self, keys: impl Fn(&Key) -> bool) -> Vec<QueuedRelease> {
        let pipelines = self.pipelines.iter();
        pipelines
            .flat_map(|pipeline| pipeline.take_releases(&keys))
            .collect()
    }

    /// Makes the notification thread open its first connection.
    pub fn request_notifications(&self) {
        self.notifications.request_connection();
    }

    /// Whether no request is queued or in flight.
    pub fn is_idle(&self) -> bool {
        self.pipelines.iter().all(Pipeline::is_idle)
    }

    /// Sets the slot that names the shard channels of the server: see `ScriptContext::set_shard_slot`.
    pub fn set_shard_slot(&self, slot: Option<Slot>) {
        self.shared.context.set_shard_slot(slot);
        let channel = self.shared.context.shard_channel();
        self.notifications.set_shard_channel(channel);
    }

    /// Adds the server's address to the error of `outcome`, if the caller's deadline came before a reply.
    pub fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        self.pipelines[0].naming_the_server(outcome)
    }

    /// The pipeline of the command's key. For a renewal, the pipeline that can write it soonest.
    fn pipeline_of(&self, command: &Command) -> &Pipeline {
        let pipeline = match command {
            Command::Renew(_) => self.pipeline_for_renewals(1),
            of_key => of_key.key().map_or(0, |key| key.shard(self.for_callers)),
        };
        &self.pipelines[pipeline]
    }

    /// The pipeline that can write this many renewals soonest. If several are equally ready, they take turns. Renewals
    /// may overtake each other, since none shortens a ttl. If the pipelines for renewals would have to connect, an idle
    /// pipeline for callers takes a few renewals, so that a client with a few locks needs fewer connections.
    fn pipeline_for_renewals(&self, renewals: usize) -> usize {
        let first = self.for_callers;
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let readiness = |pipeline: usize| self.pipelines[pipeline].readiness_after_dropping_stale();
        let (best, soonest) = (0..RENEWAL_PIPELINES)
            .map(|n| first + turn.wrapping_add(n) % RENEWAL_PIPELINES)
            .map(|pipeline| (readiness(pipeline), pipeline))
            .min_by_key(|(readiness, _)| *readiness)
            .expect("RENEWAL_PIPELINES is not zero");
        let for_callers = (best == Readiness::Unconnected && renewals <= FEW_RENEWALS)
            .then(|| (0..first).find(|pipeline| readiness(*pipeline) == Readiness::Idle));
        for_callers.flatten().unwrap_or(soonest)
    }

    /// Writes a request on this thread if the connection of its pipeline is free, and returns it: the caller then reads
    /// the reply. Otherwise submits the request, and returns `None`.
    pub fn send(&self, command: Command, completion: Completion) -> Option<SentRequest<'_>> {
        self.pipeline_of(&command).send(command, completion)
    }

    /// Groups the requests by their pipelines. All acquires of a set use the pipeline of the set's first key, so that
    /// they share a script call. For the same reason, all releases use the pipeline of the first one.
    fn by_pipeline<T>(
        &self,
        requests: impl IntoIterator<Item = T>,
        command: impl Fn(&T) -> &Command,
    ) -> Vec<Vec<T>> {
        let mut by_pipeline = Vec::new();
        by_pipeline.resize_with(self.pipelines.len(), Vec::new);
        let mut renewals = Vec::new();
        let (mut of_set, mut of_releases) = (None, None);
        for request in requests {
            let of_call = command(&request);
            let own = || of_call.key().map_or(0, |key| key.shard(self.for_callers));
            let pipeline = match of_call {
                Command::Renew(_) => {
                    renewals.push(request);
                    continue;
                }
                Command::Acquire(acquire) if acquire.link.is_next() => of_set.unwrap_or_else(own),
                Command::Acquire(_) => *of_set.insert(own()),
                Command::Release(_) => *of_releases.get_or_insert_with(own),
                _ => own(),
            };
            by_pipeline[pipeline].push(request);
        }
        // All renewals of this call go through one pipeline, so that they share a round trip.
        if !renewals.is_empty() {
            by_pipeline[self.pipeline_for_renewals(renewals.len())].append(&mut renewals);
        }
        by_pipeline
    }

    /// Sends a PING, and waits for the reply until `deadline`. Returns how long the reply took.
    pub fn ping_by(&self, deadline: MonotonicTime) -> Result<Duration, Error> {
        let shared = &*self.shared;
        let left = || deadline.since(MonotonicTime::now());
        let Some(_alone) = self.pinging.try_lock_for(left()) else {
            let address = shared.endpoint.address_of_server();
            let message = format!(
                "{address}: other pings of this client take too long; check the server's load, or ping less often"
            );
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let connect = || {
            shared
                .connector
                .exclusive_connection(left().min(shared.connect_timeout))
        };
        let mut connection = connect()?;
        // The server may have closed this connection while it was idle. The error makes all older connections stale, so
        // the second attempt gets a new connection.
        match connection.ping(left().min(shared.command_timeout)) {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                drop(connection);
                connect()?.ping(left().min(shared.command_timeout))
            }
            outcome => outcome,
        }
    }

    /// Returns a part of the server's keys, by `deadline`.
    pub fn scan_by(&self, scan: &Scan, deadline: MonotonicTime) -> Result<ScannedKeys, Error> {
        let left = deadline.since(MonotonicTime::now());
        let connect_timeout = left.min(self.shared.connect_timeout);
        let mut connection = self
            .shared
            .connector
            .exclusive_connection(connect_timeout)?;
        connection.scan(scan, deadline)
    }

    /// Flushes each pipeline. Returns the first error.
    fn flush_once(&self, deadline: MonotonicTime) -> Result<(), Error> {
        let mut flushed = Ok(());
        for pipeline in &*self.pipelines {
            flushed = flushed.and(pipeline.flush(deadline).map(drop));
        }
        flushed
    }
}

impl Store for Node {
    fn execute(&self, requests: &mut [Request]) {
        self.execute_all(requests, Route::default());
    }

    fn execute_one(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        self.pipeline_of(&command)
            .run_one(command, deadline, Route::default())
    }

    fn submit(&self, requests: Vec<(Command, Completion)>) {
        let by_pipeline = self.by_pipeline(requests, |(command, _)| command);
        for (pipeline, requests) in self.pipelines.iter().zip(by_pipeline) {
            if !requests.is_empty() {
                pipeline.submit(requests);
            }
        }
    }

    fn ping(&self) -> Result<Duration, Error> {
        let shared = &*self.shared;
        let timeout = shared.connect_timeout + shared.command_timeout;
        self.ping_by(MonotonicTime::now().after(timeout))
    }

    fn check_environment(&self) -> Result<Option<Vec<EnvironmentFinding>>, Error> {
        let Shared {
            endpoint,
            command_timeout,
            ..
        } = &*self.shared;
        self.environment.run(endpoint, *command_timeout).map(Some)
    }

    fn scan(&self, _: ServerId, scan: &Scan) -> Result<ScannedKeys, Error> {
        let shared = &*self.shared;
        let timeout = shared.connect_timeout + shared.command_timeout;
        self.scan_by(scan, MonotonicTime::now().after(timeout))
    }

    fn send_release(&self, release: Release) {
        self.pipeline_of_key(&release.key).send_release(release);
    }

    /// A later acquire of one of the keys must not overtake its release, so each key uses its own pipeline.
    fn send_releases(&self, mut releases: Vec<Release>) {
        for pipeline in &self.pipelines[..self.for_callers] {
            let is_here =
                |release: &mut Release| std::ptr::eq(self.pipeline_of_key(&release.key), pipeline);
            pipeline.send_releases(releases.extract_if(.., is_here).collect::<Vec<_>>());
        }
    }

    fn run_maintenance(&self) -> bool {
        let mut left = false;
        for pipeline in &*self.pipelines {
            // Writes to all pipelines before reading from any. So slow replies on one pipeline delay requests of the
            // others by only about one round trip.
            self.pipelines.iter().for_each(Pipeline::write_due);
            left |= pipeline.run_maintenance();
        }
        left
    }

    fn failed_releases(&self) -> usize {
        self.pipelines.iter().map(Pipeline::failed_releases).sum()
    }

    fn suspect_connections(&self, _: &Key) {
        self.shared.endpoint.epoch().suspect();
    }

    fn end(&self) {
        self.pipelines.iter().for_each(Pipeline::end);
    }

    fn flush(&self, deadline: MonotonicTime) -> Result<(), Error> {
        let is_open = || self.shared.endpoint.check_open().is_ok();
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let flushed = self.flush_once(deadline);
            let left = deadline.since(MonotonicTime::now());
            match flushed {
                // The master has lost its slots, so its releases belong to other masters.
                Err(error) if error.redirect() == Some(&Redirect::Retired) => return Err(error),
                Err(error) if error.is_unavailable() && is_open() && !left.is_zero() => {
                    park_timeout(left.min(backoff.next()));
                }
                other => return other,
            }
        }
    }

    fn close(&self) {
        self.shared.endpoint.close();
        self.shared.connector.wake_callers();
    }
}

impl Notifications for Node {
    fn start(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        self.sentinels.start(threads)?;
        let started = self.notifications.start(threads, listener);
        started.inspect_err(|_| self.sentinels.stop())
    }

    fn stop(&self) {
        self.environment.stop();
        self.sentinels.stop();
        self.notifications.stop();
    }

    /// Another library never serves the queue in Redis.
    fn queue_mode(&self, _: &Key) -> QueueMode {
        match self.shared.context.other_library {
            Some(_) => QueueMode::None,
            None => self.notifications.queue_mode(),
        }
    }

    fn free_servers(&self) -> Option<usize> {
        self.shared.context.other_library.map(|_| 1)
    }

    fn request(&self, _: &Key) {
        self.request_notifications();
    }

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        self.notifications.track(keys)
    }

    fn epoch(&self, _: &Key) -> u64 {
        self.notifications.epoch()
    }

    fn must_confirm_losses(&self) -> bool {
        true
    }
}

impl Transactions for Node {
    fn transaction_connection(
        &self,
        _: &Key,
        deadline: MonotonicTime,
    ) -> Result<TransactionConnection, Error> {
        let left = deadline.since(MonotonicTime::now());
        let connection = self.shared.connector.exclusive_connection(left)?;
        Ok(TransactionConnection::new(
            connection,
            self.shared.command_timeout,
            self.shared.context.layout,
        ))
    }
}
