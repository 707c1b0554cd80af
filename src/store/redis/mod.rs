//! One Redis: a few pipelines, two more for renewals, a connection for notifications, some for transactions. Says
//! which pipeline serves what, nothing else.

pub(crate) mod connection;
mod epoch;
#[cfg(test)]
#[cfg(not(shuttle))]
mod fake_server;
pub(crate) mod notifications;
pub(crate) mod pipeline;
pub(crate) mod replies;
pub(crate) mod scripts;
pub(crate) mod session;
mod socket;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::cell::LazyCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::config::Config;
use crate::error::Error;
use crate::store::command::{Command, QueueMode, Reply, Request};
use crate::store::redis::connection::Endpoint;
use crate::store::redis::notifications::Notifications;
use crate::store::redis::pipeline::{Pipeline, Shared};
use crate::store::redis::scripts::ScriptContext;
use crate::store::{
    DelayHook, Listener, MaintenanceHook, Store, TrackedKey, TransactionConnection,
};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::key;
use crate::util::sync::park_timeout;
use crate::util::threads::ThreadGroup;

/// Pipelines for renewals, and workers of the watchdog that use them: while the answers on the one are worked
/// through, Redis has what came on the other.
pub(crate) const RENEWAL_PIPELINES: usize = 2;
/// Pause between the first two attempts of a flush, while Redis is away or refuses releases. It doubles with each
/// attempt, so that a server that refuses many releases is not asked for all of them without a pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Node {
    /// The last ones are for renewals: callers' traffic can never hold them up.
    pipelines: Vec<Pipeline>,
    /// Counts the renewals' calls: their pipelines take turns, so that no connection rests for long and is found dead
    /// when it is needed.
    turn: AtomicUsize,
    notifications: Arc<Notifications>,
    shared: Arc<Shared>,
}

impl Node {
    /// Does not connect: pipelines do, when they have something to say.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        config: &Config,
        holder: HolderId,
        request_maintenance: MaintenanceHook,
        delays: Option<DelayHook>,
    ) -> Self {
        let notifications = Notifications::new(
            Arc::clone(&endpoint),
            &holder,
            &config.prefix,
            config.command_timeout,
        );
        let notifications = Arc::new(notifications);
        let told = Arc::downgrade(&notifications);
        endpoint.epoch().on_suspicion(move || {
            if let Some(notifications) = told.upgrade() {
                notifications.suspect();
            }
        });
        let shared = Arc::new(Shared {
            pool: pipeline::connection::pool(
                &endpoint,
                config.pipelines + RENEWAL_PIPELINES + config.max_transactions,
            ),
            endpoint,
            names: ScriptContext {
                holder,
                fence_counter: key::fence_counter(&config.prefix),
                max_value: config.max_reply_bytes,
            },
            connect_timeout: config.connect_timeout,
            command_timeout: config.command_timeout,
            request_maintenance,
            delays,
        });
        let for_callers = (0..config.pipelines).map(|_| Pipeline::for_callers(Arc::clone(&shared)));
        let for_renewals =
            (0..RENEWAL_PIPELINES).map(|_| Pipeline::for_renewals(Arc::clone(&shared)));
        Self {
            pipelines: for_callers.chain(for_renewals).collect(),
            turn: AtomicUsize::new(0),
            notifications,
            shared,
        }
    }

    fn pipeline_of(&self, command: &Command, for_renewals: impl FnOnce() -> usize) -> usize {
        match command {
            Command::Renew { .. } => for_renewals(),
            Command::Flush { pipeline } => *pipeline,
            about_a_key => {
                let for_callers = self.pipelines.len() - RENEWAL_PIPELINES;
                about_a_key.key().map_or(0, |key| key.shard(for_callers))
            }
        }
    }

    /// The readiest, of equals the one whose turn it is. No order is needed: only what shortens a ttl would have to
    /// keep its place, and no renewal does that.
    fn pipeline_for_renewals(&self) -> usize {
        let first = self.pipelines.len() - RENEWAL_PIPELINES;
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        (0..RENEWAL_PIPELINES)
            .map(|n| first + turn.wrapping_add(n) % RENEWAL_PIPELINES)
            .min_by_key(|pipeline| self.pipelines[*pipeline].readiness_without_stale())
            .expect("there are some")
    }

    fn flush_once(&self, deadline: MonotonicTime) -> Result<(), Error> {
        let mut flushes: Vec<Request> = (0..self.pipelines.len())
            .map(|pipeline| Request::new(Command::Flush { pipeline }, deadline))
            .collect();
        self.execute(&mut flushes);
        flushes
            .into_iter()
            .try_for_each(|flush| flush.into_outcome().map(drop))
    }
}

impl Store for Node {
    fn execute(&self, requests: &mut [Request]) {
        let mut by_lane: Vec<Vec<&mut Request>> = Vec::new();
        by_lane.resize_with(self.pipelines.len(), Vec::new);
        // One for all of them: they share a round trip.
        let for_renewals = LazyCell::new(|| self.pipeline_for_renewals());
        for request in requests {
            by_lane[self.pipeline_of(&request.command, || *for_renewals)].push(request);
        }
        for (pipeline, requests) in self.pipelines.iter().zip(&mut by_lane) {
            pipeline.execute(requests);
        }
    }

    fn ask(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        let pipeline = self.pipeline_of(&command, || self.pipeline_for_renewals());
        self.pipelines[pipeline].ask(command, deadline)
    }

    fn post(&self, release: Command) {
        let pipeline = self.pipeline_of(&release, || self.pipeline_for_renewals());
        self.pipelines[pipeline].post(release);
    }

    fn run_maintenance(&self) -> bool {
        let mut left = false;
        for pipeline in &self.pipelines {
            left |= pipeline.run_maintenance();
        }
        left
    }

    fn retries(&self) -> Vec<usize> {
        self.pipelines.iter().map(Pipeline::retries).collect()
    }

    fn notification_epoch(&self) -> u64 {
        self.notifications.notification_epoch()
    }

    fn suspect_connections(&self) {
        self.shared.endpoint.epoch().suspect();
    }

    fn may_hear_others(&self) -> bool {
        true
    }

    fn end_delays(&self) {
        self.pipelines.iter().for_each(Pipeline::end_delays);
    }

    fn flush(&self, deadline: MonotonicTime) -> Result<(), Error> {
        let mut pause = FIRST_PAUSE;
        loop {
            let flushed = self.flush_once(deadline);
            let left = deadline.since(MonotonicTime::now());
            match flushed {
                Err(error) if error.is_unavailable() && !left.is_zero() => {
                    park_timeout(left.min(pause));
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
                other => return other,
            }
        }
    }

    fn listen(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        self.notifications.start(threads, listener)
    }

    fn queue_mode(&self) -> QueueMode {
        self.notifications.queue_mode()
    }

    fn want_notifications(&self) {
        self.notifications.request_connection();
    }

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        self.notifications.track(keys)
    }

    fn stop_listening(&self) {
        self.notifications.stop();
    }

    fn close(&self) {
        self.shared.endpoint.close();
    }

    fn transaction_connection(&self) -> Result<TransactionConnection, Error> {
        let Shared {
            pool,
            endpoint,
            connect_timeout,
            command_timeout,
            ..
        } = &*self.shared;
        let wire = pipeline::connection::transaction_connection(pool, endpoint, *connect_timeout)?;
        Ok(TransactionConnection::new(wire, *command_timeout))
    }
}
