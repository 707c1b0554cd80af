//! The store of a Redis Cluster: a [`Node`] for each master that the client uses, the slot map that chooses among them,
//! and redirects.
//!
//! - A call for one node goes straight to that node, on the caller's thread, as on a single server. A call for several
//!   nodes is submitted to all of them, so a node without replies does not delay the requests to the others.
//! - The first request to a master opens its node. If the node's threads cannot start, this request fails with
//!   `Unavailable`, and the next request tries again.
//! - A master has a queue of renewals and two workers of its own, so it does not delay the renewals on other masters.
//!
//! # Redirects
//!
//! A node that does not serve the slot of a request refuses the request before the script runs. So the same request may
//! be sent again, even an acquire under its lease id.
//!
//! | reply | meaning | what the client does |
//! |---|---|---|
//! | `MOVED` | another node serves the slot | corrects its slot map, asks for a new one, and sends the request to that node |
//! | `ASK` | the slot is moving, and the keys of this request have moved | sends the request once to the named node, behind `ASKING` |
//! | `TRYAGAIN` | the slot is moving, and some of the keys have moved | asks the same node again after a pause. Fails at the deadline with `Unavailable` |
//! | `CLUSTERDOWN` | the slot has no master now | the same, and asks for a new slot map |
//!
//! While a slot moves, both nodes reply `TRYAGAIN` to a call with several keys if they lack some of them. Acquires and
//! releases have several keys, so they wait. A renewal has one key, so held locks are renewed. A call with several
//! renewals that gets `TRYAGAIN` or `ASK` is repeated with one call for each renewal, all in one write. A renewal is
//! tried for [`MOVING_RENEWAL_TIMEOUT`] only, because the same worker renews the leases of other slots.
//!
//! # Releases
//!
//! - A caller that awaits a release follows the redirects. At its deadline, the release is queued and reported as late.
//! - A release without a caller moves from its pipeline to the pipeline of the other node ([`ReleaseRouter`]). After
//!   several redirects in a row, the client repeats the release after a pause.
//! - When the slot map changes, the queued releases of a moved slot move to its new node. So they reach the successor
//!   of a dead master. An undo stays at its node, because the acquire may still arrive there, and a copy of it moves.
//! - While a release moves between two nodes, neither queue contains it. So a flush that overlaps such a move begins
//!   again ([`Transits`]).
//!
//! # A master that fails
//!
//! Requests to the master end at their own deadlines, and after each failure the client asks for the slot map. Once the
//! Cluster has a successor, requests go there. A master that has lost its last slot is *retired*: callers do not wait
//! for a connection to it, and requests that were not written there go to the new master. The node of a retired master
//! is closed once its releases are done.
//!
//! # Notifications and transactions
//!
//! Each node in use has a notification connection, which listens to the client's channel and to the client's shard
//! channel of that node. A node forwards a message on the plain channel to all other nodes, so a client may get the
//! message several times, which does no harm. When a slot moves, the first waiter of each key in the slot asks once,
//! and the client reads and tracks held keys at the new node.
//!
//! A transaction uses a connection to the node that serves the lock's slot. The client follows a redirect of the first
//! `WATCH`. A later redirect ends the transaction with `Unavailable`, and nothing is written.

pub mod address;
pub mod master;
pub mod masters;
pub mod query;
pub mod redirects;
pub mod refresh;
pub mod slot_map;
pub mod transit;

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::RwLock;

use crate::cluster::master::Master;
use crate::cluster::masters::Masters;
use crate::cluster::redirects::Attempts;
use crate::cluster::refresh::Refresher;
use crate::cluster::slot_map::resolved;
use crate::cluster::transit::{Transit, Transits};
use crate::command::{Command, Outcome, QueueMode, Release, Reply, Request};
use crate::config::Config;
use crate::config::key::{Key, KeyLayout};
use crate::process::threads::{ThreadGroup, call_each};
use crate::report::environment::{EnvironmentFinding, EnvironmentWarning};
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::Submitted;
use crate::store::late_release::ReleaseTracker;
use crate::store::maintenance::MaintenanceRequests;
use crate::store::{
    Completion, Listener, Notifications, RenewalLimits, Report, Reports, Scan, ScannedKeys,
    ServerId, Store, TrackedKey,
};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::slot;
use crate::util::slot::{Redirect, RedirectTarget, Slot};
use crate::wire::Node;
use crate::wire::connect::url::HostPort;
use crate::wire::pipeline::ReleaseRouter;
use crate::wire::pipeline::releases::{QueuedRelease, Route};
use crate::wire::session::{TransactionConnection, Transactions};

pub use address::ClusterAddress;

/// How long a renewal is tried while its slot moves or has no master. The watchdog then retries it.
const MOVING_RENEWAL_TIMEOUT: Duration = Duration::from_millis(100);

/// The nodes of a client on a Redis Cluster.
pub struct ClusterStore {
    me: Weak<Self>,
    address: ClusterAddress,
    config: Config,
    holder: HolderId,
    reports: Reports,
    masters: Masters,
    refresher: Refresher,
    /// Set by [`Notifications::start`]: nodes that are opened later start their threads in this group. The listener
    /// refers to this store, so [`Notifications::stop`] clears this value. Otherwise the client would never be freed.
    started: RwLock<Option<Arc<NodeThreads>>>,
    transits: Transits,
}

struct NodeThreads {
    threads: ThreadGroup,
    listener: Arc<dyn Listener>,
}

/// The next step of a caller whose request failed.
enum RetryStep {
    /// Send the request again, to the master of its slot.
    Again,
    /// Send the request once to this node, which is about to become the master of its slot.
    Ask(Arc<Master>),
    End(Error),
}

/// The error of a request that was not carried out.
struct FailedRequest {
    error: Error,
    /// Whether the failed command is a release that the node repeats in the background.
    is_retried_by_node: bool,
}

impl From<Error> for FailedRequest {
    /// Converts the error of a request that was not sent.
    fn from(error: Error) -> Self {
        Self {
            error,
            is_retried_by_node: false,
        }
    }
}

impl ClusterStore {
    /// Makes the store without connecting. The first request asks for the slot map.
    pub fn new(
        address: ClusterAddress,
        config: &Config,
        holder: HolderId,
        reports: Reports,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            address,
            config: config.clone(),
            holder,
            reports,
            masters: Masters::default(),
            refresher: Refresher::default(),
            started: RwLock::new(None),
            transits: Transits::default(),
        })
    }

    /// Returns the master that serves `slot`. If the map has none, asks for a new map, and waits for it until
    /// `deadline`.
    fn owner_or_refresh(&self, slot: Slot, deadline: MonotonicTime) -> Result<Arc<Master>, Error> {
        if let Some(owner) = self.masters.owner(slot) {
            return Ok(owner);
        }
        let failed = self.refresher.refresh_by(deadline, &self.address);
        self.masters
            .owner(slot)
            .ok_or_else(|| failed.unwrap_or_else(|| no_owner(slot, &self.address)))
    }

    /// Returns the node of a master. Opens it and starts its threads if it was not used before. Does not connect.
    fn node_or_open<'a>(&self, master: &'a Master) -> Result<&'a Arc<Node>, Error> {
        if let Some(node) = master.node() {
            return Ok(node);
        }
        // Locked until the master has its node: `stop` either comes first and prevents the start of the threads, or
        // finds the node.
        let started = self.started.read();
        master.node_or_open(|| self.open(master, started.as_deref()))
    }

    fn open(
        &self,
        master: &Master,
        started: Option<&NodeThreads>,
    ) -> Result<(Arc<Node>, Arc<MaintenanceRequests>), Error> {
        let mut endpoint = self
            .address
            .announced_endpoint(master.address(), master.announced_by())?;
        endpoint.is_retired = master.retired_flag();
        let store = Weak::clone(&self.me);
        endpoint.epoch().on_failure(move || {
            if let Some(store) = store.upgrade() {
                store.refresher.request();
            }
        });
        let maintenance = Arc::new(MaintenanceRequests::default());
        let (requests, reports) = (Arc::clone(&maintenance), self.reports.clone());
        let of_node = Reports::new(reports.releases, move |report| match report {
            Report::NeedsMaintenance(urgency) => requests.request(urgency),
            other => reports.send(other),
        });
        let node = Node::new(
            master.id(),
            endpoint,
            &self.config,
            self.holder.clone(),
            of_node,
            Some(Weak::clone(&self.me) as Weak<dyn ReleaseRouter>),
        );
        let node = Arc::new(node);
        node.set_shard_slot(self.shard_slot_of(master.id()));
        if let Some(NodeThreads { threads, listener }) = started {
            let (maintained, requests) = (Arc::downgrade(&node), Arc::clone(&maintenance));
            threads.spawn("leasehold-node", move || requests.run(&maintained))?;
            node.start(threads, Arc::clone(listener))
                .inspect_err(|_| maintenance.stop())?;
            if master.wants_notifications() {
                node.request_notifications();
            }
        }
        Ok((node, maintenance))
    }

    /// The slot in the names of a node's shard channels. All clients with the same slot map choose the same slot.
    fn shard_slot_of(&self, server: ServerId) -> Option<Slot> {
        match self.config.layout {
            // All keys and channels use the slot of the prefix's hash tag.
            KeyLayout::OneSlot => {
                let slot = Slot::of(&self.config.prefix);
                self.masters.is_owner(server, slot).then_some(slot)
            }
            _ => self.masters.lowest_slot_of(server),
        }
    }

    /// All nodes that are open.
    fn open_nodes(&self) -> Vec<Arc<Node>> {
        let masters = self.masters.all().into_iter();
        masters
            .filter_map(|master| master.node().map(Arc::clone))
            .collect()
    }

    /// Handles the error of a request to `master`: corrects the slot map, and waits if the next attempt needs a pause.
    fn on_error(&self, master: &Arc<Master>, error: Error, attempts: &mut Attempts) -> RetryStep {
        let Some(redirect) = error.redirect() else {
            if error.is_unavailable() {
                // The master may have failed, and a replica may take over.
                self.refresher.request();
            }
            return RetryStep::End(error);
        };
        self.apply_redirect(master, redirect);
        if let Err(error) = attempts.wait(redirect, master.address()) {
            return RetryStep::End(error);
        }
        match redirect {
            Redirect::Ask(target) => self
                .master_named_by(master, target)
                .map_or_else(RetryStep::End, RetryStep::Ask),
            _ => RetryStep::Again,
        }
    }

    /// The node that `master` has named in a redirect. Adds it if it is new.
    fn master_named_by(
        &self,
        master: &Master,
        target: &RedirectTarget,
    ) -> Result<Arc<Master>, Error> {
        let address = redirect_address(target, master);
        let target = self.masters.get_or_add_named(&address)?;
        target.set_announcer(master.address());
        Ok(target)
    }

    /// Corrects the slot map after a redirect of `master`. Asks for a new map after `MOVED` and `CLUSTERDOWN`.
    fn apply_redirect(&self, master: &Master, redirect: &Redirect) {
        match redirect {
            Redirect::Moved(target) => {
                let to = redirect_address(target, master);
                if self.masters.set_owner(target.slot, &to).unwrap_or(false) {
                    self.masters.set_announcer(master.address());
                    self.refresher.queue_moved(target.slot);
                }
                self.refresher.request();
            }
            Redirect::ClusterDown => self.refresher.request(),
            Redirect::Ask(_) | Redirect::TryAgain | Redirect::Retired => {}
        }
    }

    /// Sends one command to the node that serves its slot, and follows redirects. If `is_repeat`, a node got the
    /// command before and sent no reply, so it may have carried the command out.
    fn send(
        &self,
        command: &mut Command,
        slot: Slot,
        mut deadline: MonotonicTime,
        mut is_repeat: bool,
    ) -> Result<Reply, FailedRequest> {
        let mut attempts = Attempts::until(deadline);
        let mut asked = None;
        loop {
            if is_repeat {
                command.report_no_loss();
            }
            let is_asked = asked.is_some();
            let master = match asked.take() {
                Some(target) => target,
                None => self.owner_or_refresh(slot, deadline)?,
            };
            let node = self.node_or_open(&master)?;
            let outcome = match is_asked {
                false => node.execute_one(command.clone(), deadline),
                true => node.ask_one(command.clone(), deadline_while_moving(command, deadline)),
            };
            let error = match outcome {
                Ok(reply) => {
                    master.record_reply(true);
                    return Ok(match is_repeat {
                        true => command.reply_to_repeat(reply),
                        false => reply,
                    });
                }
                Err(error) => error,
            };
            is_repeat |= error.is_of_repeat();
            if is_silence(&error) {
                master.record_reply(false);
            }
            if let Some(Redirect::TryAgain | Redirect::ClusterDown) = error.redirect() {
                deadline = deadline_while_moving(command, deadline);
                attempts.end_by(deadline);
            }
            let is_retried_by_node = error.redirect().is_none();
            match self.on_error(&master, error, &mut attempts) {
                RetryStep::Again => {}
                RetryStep::Ask(target) => asked = Some(target),
                RetryStep::End(error) => {
                    return Err(FailedRequest {
                        error,
                        is_retried_by_node,
                    });
                }
            }
        }
    }

    /// Calls [`send`](Self::send). Queues a failed release for the background, unless its node has done so. A command
    /// without a key is a flush, which goes to all nodes.
    fn send_or_queue(
        &self,
        mut command: Command,
        deadline: MonotonicTime,
        is_repeat: bool,
    ) -> Outcome {
        let Some(slot) = command.key().map(Key::slot) else {
            return self.flush(deadline).map(|()| Reply::Done);
        };
        let sent = self.send(&mut command, slot, deadline, is_repeat);
        sent.map_err(|failed| {
            let FailedRequest {
                error,
                is_retried_by_node,
            } = failed;
            if let Command::Release(release) = command
                && !is_retried_by_node
            {
                self.queue_late_release(release, &error);
            }
            error
        })
    }

    /// Reports a release as late, because of `error`, and queues it at the node of its slot. If that node is unknown,
    /// or cannot be opened because the process is at its limit of threads, queues the release at another node, which
    /// redirects it. If no node can be opened, drops the release.
    fn queue_late_release(&self, release: Release, error: &Error) {
        let owner = self.masters.owner(release.key.slot());
        for master in owner.into_iter().chain(self.masters.all()) {
            if let Ok(node) = self.node_or_open(&master) {
                return node.queue_late_release(release, error);
            }
        }
        if let Some(mut tracker) = ReleaseTracker::new(&self.reports, &release, false) {
            tracker.report_late(error);
        }
    }

    /// Sends `requests` to their nodes, and sets their outcomes. A redirect is an outcome here.
    fn send_round(&self, requests: &mut [&mut Request]) {
        let mut groups: Vec<(Arc<Master>, Vec<&mut Request>)> = Vec::new();
        for request in requests {
            let owner = match request.command.key() {
                Some(key) => self.owner_or_refresh(key.slot(), request.deadline),
                None => Err(Error::new(
                    ErrorKind::Unsupported,
                    "a flush is a call of its own",
                )),
            };
            let opened = owner.and_then(|owner| {
                self.node_or_open(&owner)?;
                Ok(owner)
            });
            match opened {
                Ok(owner) => push_to_group(&mut groups, owner, &mut **request),
                Err(error) => request.outcome = Some(Err(error)),
            }
        }
        if let [(master, group)] = groups.as_mut_slice()
            && let Some(node) = master.node()
        {
            let requests = group.iter_mut().map(|request| &mut **request);
            node.execute_all(requests, Route::default());
            let outcomes = group.iter().map(|request| request.outcome.as_ref());
            record_replies(master, outcomes);
            return;
        }
        submit_groups(&mut groups);
    }

    /// Sends `requests` together to the node to which their slots are moving, and sets their outcomes.
    fn ask_all(&self, target: &Arc<Master>, requests: &mut [&mut Request]) {
        match self.node_or_open(target) {
            Ok(node) => {
                let asked = requests.iter_mut().map(|request| &mut **request);
                node.execute_all(asked, Route::ASKING);
                let outcomes = requests.iter().map(|request| request.outcome.as_ref());
                record_replies(target, outcomes);
            }
            Err(error) => {
                for request in requests {
                    request.outcome = Some(Err(error.clone()));
                }
            }
        }
    }

    /// Handles slots that have moved: moves queued releases to the nodes that serve the slots now, and reports the keys
    /// of `moved` as changed, so that the new nodes read and track them.
    fn on_moved(&self, moved: &[Slot]) {
        if moved.is_empty() {
            return;
        }
        for master in self.masters.all() {
            let Some(node) = master.node() else { continue };
            node.set_shard_slot(self.shard_slot_of(master.id()));
            self.reroute_releases(&master, node);
        }
        // The lock on `started` ends before the listener is called, because the listener may open nodes.
        let started = self.started.read().clone();
        if let Some(started) = started {
            let mut is_moved = vec![false; usize::from(slot::COUNT)];
            for slot in moved {
                is_moved[usize::from(slot.number())] = true;
            }
            let is_moved = |key: &Key| is_moved[usize::from(key.slot().number())];
            started.listener.moved(&is_moved);
        }
    }

    /// Moves the queued releases of slots that `master` does not serve to the nodes that serve them. A release stays at
    /// `master` if the other node cannot be opened. An undo always stays, and a copy of it moves; the copy is dropped
    /// if the other node cannot be opened. Returns false if a release stays.
    fn reroute_releases(&self, master: &Master, node: &Arc<Node>) -> bool {
        let is_moved = |key: &Key| !self.masters.is_owner(master.id(), key.slot());
        let transit = self.transits.begin();
        let mut have_all_left = true;
        for release in node.take_releases(is_moved) {
            // This clone keeps the master until its node has the release: other threads do not remove a master that is
            // in use.
            let owner = self.masters.owner(release.release.key.slot());
            match owner
                .as_ref()
                .and_then(|owner| self.node_or_open(owner).ok())
            {
                Some(target) => adopt(target, release, &transit),
                None if release.is_undo => {}
                None => {
                    node.adopt_release(release);
                    have_all_left = false;
                }
            }
        }
        have_all_left
    }

    /// Flushes one node. A master that is away and has lost its slots counts as flushed once its releases have moved to
    /// the masters of their slots.
    fn flush_node(&self, master: &Arc<Master>, deadline: MonotonicTime) -> Result<(), Error> {
        let Some(node) = master.node() else {
            return Ok(());
        };
        let flushed = node.flush(deadline);
        match &flushed {
            Err(error)
                if error.redirect() == Some(&Redirect::Retired)
                    && self.reroute_releases(master, node) =>
            {
                Ok(())
            }
            _ => flushed,
        }
    }

    /// Closes the node of each master without slots, unless the node has work or another thread uses the master.
    /// Returns true if a master without slots is left.
    fn close_unused(&self) -> bool {
        let mut are_left = false;
        for master in self.masters.all() {
            if master.serves_slots() {
                continue;
            }
            if let Some(node) = master.node() {
                // Callers may have queued releases here after the slots moved, and this server may be gone.
                self.reroute_releases(&master, node);
            }
            let id = master.id();
            drop(master);
            let is_idle = |master: &Master| master.node().is_none_or(|node| node.is_idle());
            let Some(removed) = self.masters.remove_if(id, is_idle) else {
                are_left = true;
                continue;
            };
            removed.stop_maintenance();
            if let Some(node) = removed.node() {
                node.stop();
                node.close();
            }
        }
        are_left
    }

    /// The master of `key`, if its node is open.
    fn open_owner(&self, key: &Key) -> Option<Arc<Master>> {
        let owner = self.masters.owner(key.slot())?;
        owner.node().is_some().then_some(owner)
    }
}

/// The error if the Cluster at `cluster` has no master for `slot`.
fn no_owner(slot: Slot, cluster: &ClusterAddress) -> Error {
    let (cluster, slot) = (cluster.text(), slot.number());
    let message = format!(
        "{cluster}: no node of the Cluster serves slot {slot}; check the slots with `redis-cli --cluster check`"
    );
    Error::new(ErrorKind::Unavailable, message)
}

/// The deadline of a request whose slot is moving or has no master. Renewals have little time, because their worker
/// also renews other leases.
fn deadline_while_moving(command: &Command, deadline: MonotonicTime) -> MonotonicTime {
    match command {
        Command::Renew(_) => deadline.min(MonotonicTime::now().after(MOVING_RENEWAL_TIMEOUT)),
        _ => deadline,
    }
}

/// Adds `item` to the group of `master`.
fn push_to_group<T>(groups: &mut Vec<(Arc<Master>, Vec<T>)>, master: Arc<Master>, item: T) {
    match groups
        .iter_mut()
        .find(|(other, _)| other.id() == master.id())
    {
        Some((_, group)) => group.push(item),
        None => groups.push((master, vec![item])),
    }
}

/// Submits each group of requests to its node, waits for all outcomes, and sets them.
fn submit_groups(groups: &mut [(Arc<Master>, Vec<&mut Request>)]) {
    let count = groups.iter().map(|(_, group)| group.len()).sum();
    let (submitted, completions) = Submitted::new(count);
    let mut completions = completions.into_iter();
    let mut deadline = MonotonicTime::now();
    for (master, group) in &*groups {
        let Some(node) = master.node() else { continue };
        let mut commands = Vec::with_capacity(group.len());
        for request in group {
            deadline = deadline.max(request.deadline);
            commands.extend(
                completions
                    .next()
                    .map(|completion| (request.command.clone(), completion)),
            );
        }
        node.submit(commands);
    }
    let are_complete = |outcomes: &[Option<Outcome>]| outcomes.iter().all(Option::is_some);
    let _ = submitted.wait(deadline, are_complete);
    let mut outcomes = submitted.leave().into_iter();
    for (master, group) in groups {
        for request in group.iter_mut() {
            let timed_out = || Err(Error::new(ErrorKind::Timeout, ""));
            let outcome = outcomes.next().flatten().unwrap_or_else(timed_out);
            request.outcome = Some(match master.node() {
                Some(node) => node.naming_the_server(outcome),
                None => outcome,
            });
        }
        record_replies(master, group.iter().map(|request| request.outcome.as_ref()));
    }
}

/// Queues at `node` a release from the queue of another node.
fn adopt(node: &Node, release: QueuedRelease, transit: &Transit<'_>) {
    node.adopt_release(release);
    transit.count_arrival();
}

/// The address of the node that `master` has named in a redirect.
fn redirect_address(target: &RedirectTarget, master: &Master) -> HostPort {
    resolved(&target.host, target.port, master.address())
}

/// Whether the error means that the node did not reply, or that the client could not connect to it.
fn is_silence(error: &Error) -> bool {
    error.is_unavailable() && error.redirect().is_none()
}

/// Marks a node as replying if one of its requests succeeded. Marks it as silent if all of them failed and one got no
/// reply.
fn record_replies<'a>(
    master: &Master,
    mut outcomes: impl Iterator<Item = Option<&'a Outcome>> + Clone,
) {
    let got_no_reply =
        |outcome: Option<&Outcome>| matches!(outcome, Some(Err(error)) if is_silence(error));
    if outcomes
        .clone()
        .any(|outcome| matches!(outcome, Some(Ok(_))))
    {
        master.record_reply(true);
    } else if outcomes.any(got_no_reply) {
        master.record_reply(false);
    }
}

impl ClusterStore {
    /// The deadline of a call that may have to find a master and connect to it.
    fn deadline_with_connect(&self) -> MonotonicTime {
        let timeout = self.config.connect_timeout + self.config.command_timeout;
        MonotonicTime::now().after(timeout)
    }

    /// The addresses and nodes of the masters that this client uses. If it uses none yet, opens one by `deadline`.
    fn used_masters(&self, deadline: MonotonicTime) -> Result<Vec<(HostPort, Arc<Node>)>, Error> {
        let mut nodes: Vec<(HostPort, Arc<Node>)> = Vec::new();
        for master in self.masters.all() {
            if let Some(node) = master.node()
                && master.serves_slots()
            {
                nodes.push((master.address().clone(), Arc::clone(node)));
            }
        }
        if nodes.is_empty() {
            let slot = Slot::of("");
            let owner = self.owner_or_refresh(slot, deadline)?;
            nodes.push((
                owner.address().clone(),
                Arc::clone(self.node_or_open(&owner)?),
            ));
        }
        Ok(nodes)
    }
}

impl Store for ClusterStore {
    fn execute(&self, requests: &mut [Request]) {
        if let [request] = requests {
            let (command, deadline) = (request.command.clone(), request.deadline);
            request.outcome = Some(self.send_or_queue(command, deadline, false));
            return;
        }
        let mut all: Vec<&mut Request> = requests.iter_mut().collect();
        self.send_round(&mut all);
        // All redirects are applied first, so that the redirected requests are sent together.
        let mut moved: Vec<&mut Request> = Vec::new();
        let mut asked: Vec<(Arc<Master>, Vec<&mut Request>)> = Vec::new();
        let mut others: Vec<&mut Request> = Vec::new();
        for request in all {
            let Some(Err(error)) = &request.outcome else {
                continue;
            };
            let Some(redirect) = error.redirect() else {
                if error.is_unavailable() {
                    self.refresher.request();
                }
                continue;
            };
            let owner = request
                .command
                .key()
                .and_then(|key| self.masters.owner(key.slot()));
            let Some(owner) = owner else {
                others.push(request);
                continue;
            };
            self.apply_redirect(&owner, redirect);
            match redirect {
                _ if error.is_of_repeat() => others.push(request),
                Redirect::Ask(target) => match self.master_named_by(&owner, target) {
                    Ok(target) => push_to_group(&mut asked, target, request),
                    Err(_) => others.push(request),
                },
                Redirect::Moved(_) | Redirect::Retired => moved.push(request),
                Redirect::TryAgain | Redirect::ClusterDown => others.push(request),
            }
        }
        for (master, requests) in &mut asked {
            for request in requests.iter_mut() {
                request.deadline = deadline_while_moving(&request.command, request.deadline);
            }
            self.ask_all(master, requests);
        }
        if moved.len() > 1 {
            self.send_round(&mut moved);
        }
        let asked = asked.into_iter().flat_map(|(_, requests)| requests);
        for request in moved.into_iter().chain(asked).chain(others) {
            let Some(Err(error)) = &request.outcome else {
                continue;
            };
            if error.redirect().is_none() {
                continue;
            }
            let (is_repeat, deadline) = (error.is_of_repeat(), request.deadline);
            let command = request.command.clone();
            request.outcome = Some(self.send_or_queue(command, deadline, is_repeat));
        }
    }

    fn execute_one(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        self.send_or_queue(command, deadline, false)
    }

    /// Submits requests to their nodes. A redirect is an outcome here: the caller decides whether to submit again.
    fn submit(&self, requests: Vec<(Command, Completion)>) {
        for (command, completion) in requests {
            let owner = command.key().and_then(|key| self.masters.owner(key.slot()));
            let node = owner
                .as_ref()
                .and_then(|owner| self.node_or_open(owner).ok());
            match node {
                Some(node) => node.submit(vec![(command, completion)]),
                None => {
                    self.refresher.request();
                    let message = format!(
                        "{}: no node of the Cluster is known for the key's slot yet; the client asks for the nodes, \
                         and a later request finds them",
                        self.address.text()
                    );
                    let _ = completion.complete(Err(Error::new(ErrorKind::Unavailable, message)));
                }
            }
        }
    }

    fn renewal_limits(&self) -> RenewalLimits {
        RenewalLimits {
            by_slot: self.config.layout == KeyLayout::Slots,
            ..RenewalLimits::USUAL
        }
    }

    fn server_of(&self, key: &Key) -> ServerId {
        let owner = self.masters.owner(key.slot());
        owner.map_or(ServerId::ONLY, |owner| owner.id())
    }

    /// Pings each master that this client uses, or one master if it uses none. Returns the longest time. All pings
    /// share one deadline.
    fn ping(&self) -> Result<Duration, Error> {
        let deadline = self.deadline_with_connect();
        let mut longest = Duration::ZERO;
        for (_, node) in self.used_masters(deadline)? {
            let took = node
                .ping_by(deadline)
                .inspect_err(|_| self.refresher.request())?;
            longest = longest.max(took);
        }
        Ok(longest)
    }

    /// Checks the masters one after another. A master that cannot be checked is a finding. Returns an error if none can
    /// be checked.
    fn check_environment(&self) -> Result<Option<Vec<EnvironmentFinding>>, Error> {
        let masters = self.used_masters(self.deadline_with_connect())?;
        let mut found = Vec::new();
        let mut errors = Vec::new();
        for (address, node) in &masters {
            match node.check_environment() {
                Ok(findings) => found.extend(findings.unwrap_or_default()),
                Err(error) => {
                    let reason = error.to_string();
                    let warning = EnvironmentWarning::ServerNotChecked { reason };
                    found.push(EnvironmentFinding::new(&address.to_string(), warning));
                    errors.push(error);
                }
            }
        }
        let have_all_failed = errors.len() == masters.len();
        match errors.into_iter().next() {
            Some(error) if have_all_failed => Err(error),
            _ => Ok(Some(found)),
        }
    }

    /// The masters that serve slots.
    fn servers_to_scan(&self) -> Result<Vec<ServerId>, Error> {
        // Asks for a slot map if there is none yet.
        self.owner_or_refresh(Slot::of(""), self.deadline_with_connect())?;
        let mut masters = self.masters.all();
        masters.retain(|master| master.serves_slots());
        Ok(masters.iter().map(|master| master.id()).collect())
    }

    fn scan(&self, server: ServerId, scan: &Scan) -> Result<ScannedKeys, Error> {
        let deadline = self.deadline_with_connect();
        let Some(master) = self.masters.get(server) else {
            let message = "a master of the Cluster is gone; list the locks again";
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let scanned = self.node_or_open(&master)?.scan_by(scan, deadline);
        scanned.inspect_err(|_| self.refresher.request())
    }

    fn send_release(&self, release: Release) {
        let owner = self.masters.owner(release.key.slot());
        match owner.as_ref().and_then(|owner| owner.node()) {
            Some(node) => node.send_release(release),
            None => {
                let message = format!(
                    "{}: the node of the lock's slot is not known; the client releases the lock when it knows the \
                     node",
                    self.address.text()
                );
                self.queue_late_release(release, &Error::new(ErrorKind::Unavailable, message));
            }
        }
    }

    fn send_releases(&self, releases: Vec<Release>) {
        let mut groups: Vec<(Arc<Master>, Vec<Release>)> = Vec::new();
        for release in releases {
            match self.open_owner(&release.key) {
                Some(owner) => push_to_group(&mut groups, owner, release),
                None => self.send_release(release),
            }
        }
        for (owner, releases) in groups {
            if let Some(node) = owner.node() {
                node.send_releases(releases);
            }
        }
    }

    /// Does nothing: each node has a maintenance thread of its own.
    fn run_maintenance(&self) -> bool {
        false
    }

    fn failed_releases(&self) -> usize {
        self.open_nodes()
            .iter()
            .map(|node| node.failed_releases())
            .sum()
    }

    fn suspect_connections(&self, key: &Key) {
        if let Some(master) = self.open_owner(key)
            && let Some(node) = master.node()
        {
            node.suspect_connections(key);
        }
        self.refresher.request();
    }

    fn end(&self) {
        self.open_nodes().iter().for_each(|node| node.end());
    }

    /// Flushes all nodes at the same time, so that a node without replies does not delay the others. Begins again if a
    /// release moved between two nodes in the meantime.
    fn flush(&self, deadline: MonotonicTime) -> Result<(), Error> {
        self.transits.flush_with(deadline, || {
            let masters = self.masters.all().into_iter();
            let open: Vec<_> = masters.filter(|master| master.node().is_some()).collect();
            let flush = |master: &Arc<Master>| self.flush_node(master, deadline);
            if let [master] = open.as_slice() {
                return flush(master);
            }
            let failed = || Err(Error::new(ErrorKind::Timeout, "the flush has failed"));
            let mut flushed: Vec<_> = open.iter().map(|_| failed()).collect();
            call_each(&open, flush, |results| {
                results
                    .iter()
                    .for_each(|(node, result)| flushed[node] = result);
            });
            flushed.into_iter().collect()
        })
    }

    fn close(&self) {
        self.refresher.stop();
        for master in self.masters.all() {
            master.stop_maintenance();
            if let Some(node) = master.node() {
                node.close();
            }
        }
    }
}

impl Notifications for ClusterStore {
    fn start(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        let started = NodeThreads {
            threads: threads.clone(),
            listener,
        };
        *self.started.write() = Some(Arc::new(started));
        let Some(store) = self.me.upgrade() else {
            return Ok(());
        };
        threads.spawn("leasehold-cluster", move || refresh::run(&store))
    }

    fn stop(&self) {
        let started = self.started.write().take();
        drop(started);
        self.refresher.stop();
        for master in self.masters.all() {
            master.stop_maintenance();
            if let Some(node) = master.node() {
                node.stop();
            }
        }
    }

    fn request(&self, key: &Key) {
        if let Some(master) = self.open_owner(key)
            && let Some(node) = master.node()
        {
            node.request(key);
        }
    }

    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        let mut groups: Vec<(Arc<Master>, Vec<TrackedKey>)> = Vec::new();
        let mut are_tracked = true;
        for tracked in keys {
            let Some(owner) = self.masters.owner(tracked.key.slot()) else {
                are_tracked = false;
                continue;
            };
            push_to_group(&mut groups, owner, tracked);
        }
        for (master, keys) in groups {
            // If the process has reached its limit of threads, the node cannot be opened now. Once it is open, its
            // first notification connection tracks the keys.
            master.request_notifications();
            are_tracked &= self
                .node_or_open(&master)
                .is_ok_and(|node| node.track(keys));
        }
        are_tracked
    }

    fn queue_mode(&self, key: &Key) -> QueueMode {
        let master = self.open_owner(key);
        let node = master.as_ref().and_then(|master| master.node());
        node.map_or(QueueMode::None, |node| node.queue_mode(key))
    }

    fn free_servers(&self) -> Option<usize> {
        self.config.other_library.map(|_| 1)
    }

    /// The epoch contains the master's number, so it changes when the key's slot moves.
    fn epoch(&self, key: &Key) -> u64 {
        let master = self.open_owner(key);
        master.map_or(0, |master| {
            let epoch = master.node().map_or(0, |node| node.epoch(key));
            master.notification_epoch(epoch)
        })
    }

    fn is_at(&self, server: ServerId, key: &Key) -> bool {
        self.masters.is_owner(server, key.slot())
    }

    fn must_confirm_losses(&self) -> bool {
        true
    }
}

impl Transactions for ClusterStore {
    fn transaction_connection(
        &self,
        key: &Key,
        deadline: MonotonicTime,
    ) -> Result<TransactionConnection, Error> {
        loop {
            let owner = self.owner_or_refresh(key.slot(), deadline)?;
            let node = self.node_or_open(&owner)?;
            let connection = node.transaction_connection(key, deadline);
            let Err(error) = connection else {
                return connection;
            };
            let is_retired = error.redirect() == Some(&Redirect::Retired);
            if !is_retired || MonotonicTime::now() >= deadline {
                self.refresher.request();
                return Err(error);
            }
        }
    }

    fn handle_failure(&self, key: &Key, error: &Error) {
        match (error.redirect(), self.masters.owner(key.slot())) {
            (Some(redirect), Some(owner)) => self.apply_redirect(&owner, redirect),
            _ => self.refresher.request(),
        }
    }
}

impl ReleaseRouter for ClusterStore {
    fn reroute(
        &self,
        from: ServerId,
        mut release: QueuedRelease,
        redirect: &Redirect,
    ) -> Option<QueuedRelease> {
        let Some(master) = self.masters.get(from) else {
            return Some(release);
        };
        self.apply_redirect(&master, redirect);
        let (Redirect::Moved(target) | Redirect::Ask(target)) = redirect else {
            return Some(release);
        };
        release.route.is_asking = matches!(redirect, Redirect::Ask(_));
        let target = self.master_named_by(&master, target);
        match target.as_ref().map(|target| self.node_or_open(target)) {
            Ok(Ok(node)) => {
                adopt(node, release, &self.transits.begin());
                None
            }
            _ => Some(release),
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::cluster::slot_map::SlotRange;
    use crate::command::{Held, Inspect, Release};
    use crate::config::DEFAULT_MAX_REPLY;
    use crate::store::ReportedReleases;
    use crate::store::observation::NoListener;
    use crate::util::id::LeaseId;

    /// An address without a listening process.
    fn address(port: u16) -> HostPort {
        let host = "127.0.0.1".to_owned();
        HostPort { host, port }
    }

    /// An address that cannot be opened: "%" is no host.
    fn bad_address() -> HostPort {
        let host = "%".to_owned();
        HostPort { host, port: 2 }
    }

    /// The slot map of a Cluster with one master.
    fn all_slots_on(master: HostPort) -> [SlotRange; 1] {
        [SlotRange {
            first: Slot::new(0).unwrap(),
            last: Slot::new(16_383).unwrap(),
            master,
            replicas: Vec::new(),
            ids: Vec::new(),
        }]
    }

    /// A store that knows no master.
    fn store_without_slots() -> Arc<ClusterStore> {
        store_with_reports(Reports::default())
    }

    /// A store that knows no master.
    fn store_with_reports(reports: Reports) -> Arc<ClusterStore> {
        let timeout = Duration::from_millis(100);
        let url = "redis+cluster://127.0.0.1:1";
        let address_of_seeds = ClusterAddress::from_url(url, (timeout, timeout), DEFAULT_MAX_REPLY);
        let config = Config {
            layout: KeyLayout::Slots,
            ..Config::default()
        };
        let holder = HolderId::of_this_process();
        let address_of_seeds = address_of_seeds.unwrap().unwrap();
        ClusterStore::new(address_of_seeds, &config, holder, reports)
    }

    /// A store whose slots are all on one master, which is away.
    fn store() -> Arc<ClusterStore> {
        let store = store_without_slots();
        store.masters.replace(&all_slots_on(address(1)));
        store
    }

    fn release(key: &Key) -> Release {
        Release::unheld(
            key.clone(),
            LeaseId::random(),
            MonotonicTime::now().after(Duration::from_secs(60)),
        )
    }

    #[test]
    fn a_request_without_a_node_ends_at_once() {
        let store = store_without_slots();
        let key = Key::new("p:", "k", 16).unwrap();
        let (submitted, completions) = Submitted::new(1);
        let inspect = Command::Inspect(Inspect { key });
        store.submit(std::iter::once(inspect).zip(completions).collect());
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        // Returns before the deadline, because all outcomes are there.
        assert!(!submitted.wait(far, |_| false));
        assert!(MonotonicTime::now() < far);
        let [Some(Err(error))] = &submitted.leave()[..] else {
            panic!("no node is known");
        };
        assert_eq!(
            error.to_string(),
            "Redis is unavailable: 127.0.0.1:1: no node of the Cluster is known for the key's slot yet; the client asks \
             for the nodes, and a later request finds them"
        );
        store.close();
    }

    #[test]
    fn a_slot_without_a_node_is_named() {
        let store = store_without_slots();
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        let slot = Slot::new(7).unwrap();
        thread::scope(|scope| {
            let caller = scope.spawn(|| store.owner_or_refresh(slot, far).map(drop));
            // Each round ends without a master for this slot, until the caller gets its error.
            while !caller.is_finished() {
                store.refresher.end_round(None);
                thread::yield_now();
            }
            assert_eq!(
                caller.join().unwrap().unwrap_err().to_string(),
                "Redis is unavailable: 127.0.0.1:1: no node of the Cluster serves slot 7; check the slots with \
                 `redis-cli --cluster check`"
            );
        });
        store.close();
    }

    #[test]
    fn a_release_without_a_node_is_abandoned() {
        let (texts, reported) = mpsc::channel();
        let reports = Reports::new(ReportedReleases::Late, move |report| {
            if let Report::Release(key, token, report) = report {
                let text = format!("{} {token} {report:?}", key.name());
                texts.send(text).unwrap();
            }
        });
        let store = store_with_reports(reports);
        let bad = bad_address();
        let key = Key::new("p:", "k", 16).unwrap();
        assert!(store.masters.set_owner(key.slot(), &bad).unwrap());
        let mut of_guard = release(&key);
        of_guard.held = Some(Held {
            token: 7,
            is_token_in_value: true,
            others_queued: false,
            valid_until: MonotonicTime::at_tick(0),
        });
        store.send_release(of_guard);
        let [delayed] = &reported.try_iter().collect::<Vec<_>>()[..] else {
            panic!("expected one report");
        };
        assert!(delayed.starts_with("k 7 Delayed("), "{delayed}");
        store.close();
    }

    #[test]
    fn releases_for_a_bad_node_do_not_multiply() {
        let store = store();
        let key = Key::new("p:", "k", 16).unwrap();
        let old = store.masters.owner(key.slot()).unwrap();
        let node = store.node_or_open(&old).unwrap();
        node.queue_undo(release(&key));
        node.send_release(release(&key));
        let bad = bad_address();
        assert!(store.masters.set_owner(key.slot(), &bad).unwrap());
        for _ in 0..3 {
            assert!(!store.reroute_releases(&old, node), "one release stays");
        }
        store.masters.set_owner(key.slot(), &address(1)).unwrap();
        let left = node.take_releases(|_| true);
        let undos: Vec<bool> = left.iter().map(|release| release.is_undo).collect();
        assert_eq!(undos, [false], "a copy of the undo");
        assert!(!node.is_idle(), "the undo itself");
        store.close();
    }

    /// The undo stays queued at the old master, since the other master cannot be opened.
    #[test]
    fn an_unreachable_retired_master_delays_no_flush() {
        let store = store();
        let key = Key::new("p:", "k", 16).unwrap();
        let old = store.masters.owner(key.slot()).unwrap();
        store.node_or_open(&old).unwrap().queue_undo(release(&key));
        store.masters.replace(&all_slots_on(bad_address()));
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        store.flush(far).unwrap();
        assert!(MonotonicTime::now() < far);
        store.close();
    }

    #[test]
    fn a_retired_master_closes_after_its_work() {
        for has_work in [false, true] {
            let store = store();
            let key = Key::new("p:", "k", 16).unwrap();
            let old = store.masters.owner(key.slot()).unwrap();
            store.node_or_open(&old).unwrap();
            store.masters.replace(&all_slots_on(address(2)));
            if has_work {
                // A caller that chose the node before the slots moved queues this release.
                let away = Error::new(ErrorKind::Unavailable, "away");
                let node = old.node().unwrap();
                node.queue_late_release(release(&key), &away);
                node.queue_undo(release(&key));
            }
            let id = old.id();
            drop(old);
            assert_eq!(store.close_unused(), has_work);
            assert_eq!(store.masters.get(id).is_some(), has_work, "the undo stays");
            let new = store.open_owner(&key);
            let moved = new.map_or(Vec::new(), |new| {
                new.node().unwrap().take_releases(|_| true)
            });
            assert_eq!(moved.len(), 2 * usize::from(has_work));
            store.close();
        }
    }

    #[test]
    fn a_node_without_threads_is_opened_later() {
        let store = store();
        let key = Key::new("p:", "k", 16).unwrap();
        let threads = ThreadGroup::new();
        let allow = |count| threads.may_start.store(count, Ordering::SeqCst);
        allow(1);
        store.start(&threads, Arc::new(NoListener)).unwrap();
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        let names = ["leasehold-node", "leasehold-notifications"];
        for (count, name) in names.into_iter().enumerate() {
            allow(count);
            let inspect = Command::Inspect(Inspect { key: key.clone() });
            let error = store.execute_one(inspect, far).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "Redis is unavailable: cannot start the thread {name}; check the limits on threads of this process"
                )
            );
            assert!(store.open_nodes().is_empty());
        }
        let tracked = TrackedKey {
            key: key.clone(),
            lease: None,
        };
        assert!(!store.track(vec![tracked]));
        allow(usize::MAX);
        let owner = store.masters.owner(key.slot()).unwrap();
        store.node_or_open(&owner).unwrap();
        // The thread has tried to connect for notifications, and the port is closed.
        while !matches!(store.queue_mode(&key), QueueMode::Polling) {
            assert!(MonotonicTime::now() < far, "no attempt to connect");
            thread::yield_now();
        }
        store.stop();
        store.close();
        assert!(threads.wait_until_ended(far), "a thread is left");
    }

    #[test]
    fn a_flush_waits_for_releases_between_nodes() {
        let store = store();
        let key = Key::new("p:", "k", 16).unwrap();
        let release = release(&key);
        let away = Error::new(ErrorKind::Unavailable, "away");
        store.queue_late_release(release, &away);
        let old = store.open_owner(&key).unwrap();
        let slot = key.slot();
        assert!(store.masters.set_owner(slot, &address(2)).unwrap());
        thread::scope(|scope| {
            // The move takes the release from the old node. Before it can open the new node, it waits for this mutex.
            let opening = store.started.write();
            let moved = scope.spawn(|| store.on_moved(&[slot]));
            while !old.node().unwrap().is_idle() {
                thread::yield_now();
            }
            let soon = MonotonicTime::now().after(Duration::from_millis(50));
            let error = store.flush(soon).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            drop(opening);
            moved.join().unwrap();
        });
        let new = store.open_owner(&key).unwrap();
        assert!(!new.node().unwrap().is_idle(), "it has the release");
        store.close();
    }
}
