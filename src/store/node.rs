//! One Redis: a few lanes, two more for renewals, a connection for wake-ups, some for transactions. Says
//! which lane serves what, nothing else.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::cell::LazyCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::clock::Moment;
use crate::config::Config;
use crate::error::Error;
use crate::id::HolderId;
use crate::key;
use crate::store::command::{Command, Reply, Request, Standing};
use crate::store::connect::Endpoint;
use crate::store::lane::{Common, Lane};
use crate::store::script::Names;
use crate::store::wakeups::Wakeups;
use crate::store::{Bell, DelayHook, Listener, Store, TransactionConnection, Watched, link};
use crate::sync::park_timeout;
use crate::thread::Crew;

/// Lanes for renewals, and workers of the watchdog that use them: while the answers on the one are worked
/// through, Redis has what came on the other.
pub(crate) const RENEWAL_LANES: usize = 2;
/// Pause between the first two attempts of a flush, while Redis is away or refuses releases. It doubles with each
/// attempt, so that a server that refuses many releases is not asked for all of them without a pause.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Node {
    /// The last ones are for renewals: callers' traffic can never hold them up.
    lanes: Vec<Lane>,
    /// Counts the renewals' calls: their lanes take turns, so that no connection rests for long and is found dead
    /// when it is needed.
    turn: AtomicUsize,
    wakeups: Arc<Wakeups>,
    common: Arc<Common>,
}

impl Node {
    /// Does not connect: lanes do, when they have something to say.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        config: &Config,
        holder: HolderId,
        bell: Bell,
        delays: Option<DelayHook>,
    ) -> Self {
        let wakeups = Wakeups::new(
            Arc::clone(&endpoint),
            &holder,
            &config.prefix,
            config.command_timeout,
        );
        let wakeups = Arc::new(wakeups);
        let told = Arc::downgrade(&wakeups);
        endpoint.epoch().on_suspicion(move || {
            if let Some(wakeups) = told.upgrade() {
                wakeups.suspect();
            }
        });
        let common = Arc::new(Common {
            pool: link::pool(
                &endpoint,
                config.lanes + RENEWAL_LANES + config.transactions,
            ),
            endpoint,
            names: Names {
                holder,
                fence_counter: key::fence_counter(&config.prefix),
            },
            connect_timeout: config.connect_timeout,
            command_timeout: config.command_timeout,
            bell,
            delays,
        });
        let for_callers = (0..config.lanes).map(|_| Lane::for_callers(Arc::clone(&common)));
        let for_renewals = (0..RENEWAL_LANES).map(|_| Lane::for_renewals(Arc::clone(&common)));
        Self {
            lanes: for_callers.chain(for_renewals).collect(),
            turn: AtomicUsize::new(0),
            wakeups,
            common,
        }
    }

    fn lane_of(&self, command: &Command, for_renewals: impl FnOnce() -> usize) -> usize {
        match command {
            Command::Renew { .. } => for_renewals(),
            Command::Flush { lane } => *lane,
            about_a_key => {
                let for_callers = self.lanes.len() - RENEWAL_LANES;
                about_a_key.key().map_or(0, |key| key.part(for_callers))
            }
        }
    }

    /// The readiest, of equals the one whose turn it is. No order is needed: only what shortens a ttl would have to
    /// keep its place, and no renewal does that.
    fn lane_for_renewals(&self) -> usize {
        let first = self.lanes.len() - RENEWAL_LANES;
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        (0..RENEWAL_LANES)
            .map(|n| first + turn.wrapping_add(n) % RENEWAL_LANES)
            .min_by_key(|lane| self.lanes[*lane].get_ready())
            .expect("there are some")
    }

    fn flush_once(&self, deadline: Moment) -> Result<(), Error> {
        let mut flushes: Vec<Request> = (0..self.lanes.len())
            .map(|lane| Request::new(Command::Flush { lane }, deadline))
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
        by_lane.resize_with(self.lanes.len(), Vec::new);
        // One for all of them: they share a round trip.
        let for_renewals = LazyCell::new(|| self.lane_for_renewals());
        for request in requests {
            by_lane[self.lane_of(&request.command, || *for_renewals)].push(request);
        }
        for (lane, requests) in self.lanes.iter().zip(&mut by_lane) {
            lane.execute(requests);
        }
    }

    fn ask(&self, command: Command, deadline: Moment) -> Result<Reply, Error> {
        let lane = self.lane_of(&command, || self.lane_for_renewals());
        self.lanes[lane].ask(command, deadline)
    }

    fn post(&self, release: Command) {
        let lane = self.lane_of(&release, || self.lane_for_renewals());
        self.lanes[lane].post(release);
    }

    fn settle(&self) -> bool {
        let mut left = false;
        for lane in &self.lanes {
            left |= lane.settle();
        }
        left
    }

    fn debts(&self) -> Vec<usize> {
        self.lanes.iter().map(Lane::debts).collect()
    }

    fn hearing(&self) -> u64 {
        self.wakeups.hearing()
    }

    fn suspect_connections(&self) {
        self.common.endpoint.epoch().suspect();
    }

    fn may_hear_others(&self) -> bool {
        true
    }

    fn end_delays(&self) {
        self.lanes.iter().for_each(Lane::end_delays);
    }

    fn flush(&self, deadline: Moment) -> Result<(), Error> {
        let mut pause = FIRST_PAUSE;
        loop {
            let flushed = self.flush_once(deadline);
            let left = deadline.since(Moment::now());
            match flushed {
                Err(error) if error.is_unavailable() && !left.is_zero() => {
                    park_timeout(left.min(pause));
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
                other => return other,
            }
        }
    }

    fn listen(&self, crew: &Crew, listener: Arc<dyn Listener>) -> Result<(), Error> {
        self.wakeups.start(crew, listener)
    }

    fn standing(&self) -> Standing {
        self.wakeups.standing()
    }

    fn want_wakeups(&self) {
        self.wakeups.want();
    }

    fn watch(&self, keys: Vec<Watched>) -> bool {
        self.wakeups.watch(keys)
    }

    fn stop_listening(&self) {
        self.wakeups.stop();
    }

    fn lend(&self) -> Result<TransactionConnection, Error> {
        let Common {
            pool,
            endpoint,
            connect_timeout,
            command_timeout,
            ..
        } = &*self.common;
        let wire = link::lend(pool, endpoint, *connect_timeout)?;
        Ok(TransactionConnection::new(wire, *command_timeout))
    }
}
