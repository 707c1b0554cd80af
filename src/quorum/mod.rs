//! The store of a quorum: a [`QuorumNode`] for each of one to nine independent servers. The store sends each request to
//! all nodes at once, and takes the outcome from the replies of a majority. docs/protocol.md describes the requests and
//! why they are safe; `crates/models/` checks the protocol.
//!
//! # One request
//!
//! 1. The caller's thread writes the request to each node whose connection is free. It waits for all these sockets with
//!    one `poll`, so quick replies wake no other thread.
//! 2. After [`CALLER_READS_FOR`], the caller stops reading. Each node has a thread that reads the later replies. This
//!    thread also writes requests to a node that is busy or silent, and all batches.
//! 3. Once the replies of a majority decide, the caller waits at most [`slow_nodes::GRACE`] for the other replies: each
//!    of them may save a *write-back*, the request that makes a node store the token of a grant. Then the nodes drop
//!    the requests that are not written yet.
//! 4. A node that was slower than that is *silent* for [`SILENT_FOR`]: callers do not wait for it. `slow_nodes` has the
//!    exceptions.
//!
//! `count` decides what the replies mean together. If no majority can agree, the request is decided once a majority has
//! voted or cannot vote any more. So a slow node may still report that the key is taken while another node is down.
//!
//! # Rules
//!
//! - The store releases a lease that no majority has granted: on each node that has granted it, and as an undo on each
//!   node whose reply is missing. A node's pipeline does not undo a proposal by itself, because a renewal may have
//!   counted the node's grant in the meantime.
//! - A hold may set a missing key. So a hold must not overtake the release of its lease: it uses the pipeline of its
//!   key, a batch has its holds before its releases, and the watchdog repeats the release of a lease that ended during
//!   a renewal ([`Store::renewals_set_keys`]).
//! - A renewal with a ttl below `MIN_TTL` only asks whether the lease is held. It changes no ttl, because a change
//!   would wake the waiters, and each waiter's attempt would make the holder ask again.
//! - A node's report never ends a lease: the client first asks all nodes, by a renewal that changes nothing.
//! - An inspection asks again while the nodes disagree, as they do while a lock changes hands.
//! - A shutdown flushes all nodes. After a majority has flushed, the shutdown checks every 500 ms whether the other
//!   nodes' queues of releases have become shorter. If the queue of a node has not, the shutdown closes the node's
//!   sockets.
//! - An error names the answer of each node. Its kind is `NoQuorum`, or the kind of a lasting error that keeps a
//!   majority from agreeing.
//!
//! Waiters need no queue on the nodes: `acquire::turns` decides when a client asks.

pub mod clocks;
pub mod count;
pub mod health;
pub mod late_holds;
pub mod late_releases;
#[cfg(test)]
#[cfg(not(shuttle))]
mod memory_tests;
pub mod node;
pub mod proposals;
pub mod slow_nodes;
#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::command::value::micros_of;
use crate::command::{Acquire, ForceUnlock, Hold, Outcome, Probe, Propose, Release, Renew};
use crate::command::{Command, QueueMode, Reply, Request};
use crate::config::key;
use crate::config::key::Key;
use crate::config::{Config, MIN_TTL};
use crate::memory::{MemoryNode, MemoryServer};
use crate::process::threads::{ThreadGroup, call_each};
use crate::quorum::count::{Count, Grant, TOO_FAR_AHEAD, has_released, has_stored};
use crate::quorum::health::{Health, Prober};
use crate::quorum::late_holds::LateHolds;
use crate::quorum::late_releases::QuorumLateReleases;
use crate::quorum::node::QuorumNode;
use crate::quorum::proposals::{LONGEST_MICROS, Proposals};
use crate::quorum::slow_nodes::{GRACE, LONGEST_GRACE, RecentTtls, SlowNodes};
use crate::report::environment::{EnvironmentFinding, EnvironmentWarning};
use crate::report::error::{Error, ErrorKind};
use crate::report::node_state::NodeState;
use crate::store::completion::Submitted;
use crate::store::maintenance::MaintenanceRequests;
use crate::store::{
    Completion, Feature, LateRelease, Listener, Notifications, Report, ReportedReleases, Reports,
    ServerId, Store, TrackedKey,
};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::{HolderId, LeaseId};
use crate::util::sync::park_timeout;
use crate::wire::Node;
use crate::wire::connect::data_check::DataCheck;
use crate::wire::endpoint::Endpoint;
use crate::wire::pipeline::SentRequest;

/// The greatest number of nodes.
const MAX_NODES: usize = 9;
/// After a node has not replied to a request in time, it is silent for this time: callers do not wait for it.
const SILENT_FOR: Duration = Duration::from_secs(1);
/// A caller reads replies itself for this time. The nodes' threads read later ones.
const CALLER_READS_FOR: Duration = Duration::from_millis(5);
/// After a split vote, one caller in this many waits for silent nodes, for at most [`LONGEST_GRACE`]. A waiting caller
/// keeps the keys that it has got: if all callers waited, a stopped node would block all clients that contend for a
/// key. If none waited, a slow node could never outvote a key that a dead client has left on another node.
const WAIT_FOR_SILENT_EVERY: u32 = 16;
/// After a majority has flushed, the time until the first check whether the other nodes make progress, if all of them
/// are failing. In other cases, and between two checks, the time is [`LONGEST_GRACE`].
const FAILING_FLUSH: Duration = Duration::from_millis(100);
/// If the nodes disagree, an inspection waits this time for silent nodes. The time doubles with each attempt, up to
/// [`LONGEST_GRACE`].
const FIRST_INSPECTION_GRACE: Duration = Duration::from_millis(5);
/// The longest pause between two attempts of an inspection that waits for no node.
const LONGEST_INSPECTION_PAUSE: Duration = Duration::from_millis(50);
/// The features that a quorum does not have, with their alternatives.
const FENCED_VALUES: &str = "fenced values; compare the fencing token in the database that has the data, or read and \
                             write the value with a client of one server";
const TICKETS: &str = "tickets; release the lock, and acquire it in the other process";
const READERS: &str = "read-write locks; use a mutex for readers and writers";

/// The addresses of the nodes of a quorum.
pub struct QuorumAddress {
    endpoints: Vec<Endpoint>,
    names: Vec<String>,
    /// How long a node does not vote after it may have lost data: `max_ttl`, except in tests.
    quarantine: Duration,
}

impl QuorumAddress {
    /// Fails unless there are one to nine nodes with different addresses.
    pub fn new(endpoints: Vec<Endpoint>, config: &Config) -> Result<Self, Error> {
        Self::with_quarantine(endpoints, config, config.max_ttl)
    }

    fn with_quarantine(
        mut endpoints: Vec<Endpoint>,
        config: &Config,
        quarantine: Duration,
    ) -> Result<Self, Error> {
        let names: Vec<String> = endpoints.iter().map(Endpoint::address).collect();
        if !(1..=MAX_NODES).contains(&names.len()) {
            let wanted = format!("1 to {MAX_NODES}");
            return Err(Error::invalid("the number of nodes", &wanted, names.len()));
        }
        for (index, name) in names.iter().enumerate() {
            let is_same = |other: &String| is_same_address(other, name);
            if names[..index].iter().any(is_same) {
                let wanted = "different servers";
                return Err(Error::invalid("the nodes", wanted, format!("twice {name}")));
            }
        }
        for endpoint in &mut endpoints {
            let check = DataCheck::new(&config.prefix, quarantine, config.assume_durable_nodes);
            endpoint.data_check = Some(check);
            endpoint.dialer.set_prefix(&config.prefix);
        }
        Ok(Self {
            endpoints,
            names,
            quarantine,
        })
    }

    /// The addresses without user and password.
    pub fn text(&self) -> String {
        self.names.join(", ")
    }
}

/// Whether two addresses are the same. The case of letters counts in paths of Unix sockets, but not in names of hosts.
fn is_same_address(one: &str, other: &str) -> bool {
    one == other || (!one.contains('/') && one.eq_ignore_ascii_case(other))
}

/// The nodes of a client's quorum.
pub struct QuorumStore {
    members: Vec<Arc<Member>>,
    names: Vec<String>,
    prober: Arc<Prober>,
    probe: Command,
    count: Count,
    proposals: Proposals,
    /// See [`QuorumAddress::quarantine`].
    quarantine: Duration,
    ttls: RecentTtls,
    late_holds: LateHolds,
    /// Counts split votes, wrapping, to choose the callers that wait for silent nodes.
    split_vote_count: AtomicU32,
    clock: Clock,
    late_releases: Arc<QuorumLateReleases>,
    /// Set by [`Notifications::start`], and taken out by [`Notifications::stop`].
    threads: Mutex<Option<ThreadGroup>>,
}

/// One node of a quorum.
pub struct Member {
    address: String,
    node: Arc<dyn QuorumNode>,
    health: Health,
    maintenance: Arc<MaintenanceRequests>,
    /// Until this time, callers do not wait for the node once a majority has voted, because the node did not reply to a
    /// request in time.
    silent_until: Mutex<Option<MonotonicTime>>,
    pings: Pings,
}

impl Member {
    /// Calls `node` to make the node, with the receiver of the node's reports. The member handles requests for
    /// maintenance and reports of releases, and the client gets the other reports.
    fn new<N: QuorumNode + 'static>(
        address: String,
        reports: Reports,
        late_releases: impl Fn(&Key, u64, LateRelease) + Send + Sync + 'static,
        node: impl FnOnce(Reports) -> Arc<N>,
    ) -> Arc<Self> {
        let maintenance: Arc<MaintenanceRequests> = Arc::default();
        let requests = Arc::clone(&maintenance);
        let releases = match reports.releases {
            ReportedReleases::None => ReportedReleases::None,
            _ => ReportedReleases::All,
        };
        let of_node = Reports::new(releases, move |report| match report {
            Report::NeedsMaintenance(urgency) => requests.request(urgency),
            Report::Release(key, token, release) => late_releases(key, token, release),
            other => reports.send(other),
        });
        Arc::new(Self {
            address,
            node: node(of_node),
            health: Health::default(),
            maintenance,
            silent_until: Mutex::default(),
            pings: Pings::default(),
        })
    }

    fn state(&self, clock: &Clock) -> NodeState {
        NodeState {
            address: self.address.clone(),
            health: self.health.state(clock),
            clock: self.health.clock(),
        }
    }

    fn is_silent(&self) -> bool {
        let until = *self.silent_until.lock();
        until.is_some_and(|until| MonotonicTime::now() < until)
    }

    fn record_whether_silent(&self, has_replied: bool) {
        let now = MonotonicTime::now();
        let mut until = self.silent_until.lock();
        *until = match *until {
            _ if has_replied => None,
            Some(until) if now < until => Some(until),
            _ => Some(now.after(SILENT_FOR)),
        };
    }

    /// Adds the node's address to a time-out. If the node got the request too late, records the time of the node's
    /// clock. The request was sent at `sent` and its outcome was seen at `seen`, by the client's clock.
    fn record_outcome(
        &self,
        outcome: &mut Option<Outcome>,
        sent: MonotonicTime,
        seen: MonotonicTime,
    ) {
        if let Some(Ok(Reply::TooLate { micros })) = outcome {
            self.node.record_micros(*micros, sent, seen);
        }
        *outcome = outcome.take().map(|one| self.node.naming_the_server(one));
    }
}

/// The outcome of a ping, with the index of its node.
type Pinged = (usize, Result<Duration, Error>);

/// At most this many callers wait for the ping of a node. A further caller replaces the oldest one, which has probably
/// continued with the replies of a majority.
const MOST_PINGS: usize = 1024;

/// The callers that wait for the ping of a node. At most one ping of a node runs at a time.
#[derive(Default)]
struct Pings(Mutex<VecDeque<Sender<Pinged>>>);

impl Pings {
    /// Adds a caller. Returns true if the caller has to start a ping, because none is running.
    fn join(&self, caller: Sender<Pinged>) -> bool {
        let mut callers = self.0.lock();
        if callers.len() == MOST_PINGS {
            callers.pop_front();
        }
        callers.push_back(caller);
        callers.len() == 1
    }

    fn take(&self) -> VecDeque<Sender<Pinged>> {
        std::mem::take(&mut self.0.lock())
    }
}

/// A ping of this node that runs or is about to run. If the thread cannot start, or the ping panics, the drop of this
/// value discards the callers, which then get no outcome.
struct RunningPing(Option<Arc<Member>>);

impl RunningPing {
    fn run(mut self, index: usize) {
        let Some(outcome) = self.0.as_ref().map(|member| member.node.ping()) else {
            return;
        };
        for caller in self.end() {
            let _ = caller.send((index, outcome.clone()));
        }
    }

    /// Takes the callers of this ping. Later callers start the next one.
    fn end(&mut self) -> VecDeque<Sender<Pinged>> {
        self.0
            .take()
            .map(|member| member.pings.take())
            .unwrap_or_default()
    }
}

impl Drop for RunningPing {
    fn drop(&mut self) {
        drop(self.end());
    }
}

/// The lease that a request is about, and the ttl that it asks for.
struct Lease<'a> {
    key: &'a Key,
    id: LeaseId,
    ttl: Duration,
}

impl Lease<'_> {
    fn hold(&self, micros: u64, sets_missing: Option<u64>) -> Command {
        Command::Hold(Hold {
            key: self.key.clone(),
            lease: self.id,
            ttl: self.ttl,
            micros,
            sets_missing,
        })
    }

    fn release(&self, now: MonotonicTime) -> Release {
        Release::unheld(self.key.clone(), self.id, now.after(self.ttl))
    }
}

fn is_granted(reply: &Reply) -> bool {
    matches!(reply, Reply::Granted { .. })
}

impl QuorumStore {
    /// The store of a quorum of servers. Makes no connection.
    pub fn new(
        address: QuorumAddress,
        config: &Config,
        holder: &HolderId,
        reports: Reports,
    ) -> Arc<Self> {
        let late_releases = QuorumLateReleases::new(reports.clone(), address.names);
        let node_config = Config {
            max_ttl: address.quarantine,
            ..config.clone()
        };
        let member = |(index, endpoint): (usize, Endpoint)| {
            let late = late_releases.of_node(index);
            Member::new(endpoint.address(), reports.clone(), late, |reports| {
                let (server, holder) = (ServerId(index as u8), holder.clone());
                Arc::new(Node::new(
                    server,
                    endpoint,
                    &node_config,
                    holder,
                    reports,
                    None,
                ))
            })
        };
        let nodes = address.endpoints.into_iter().enumerate();
        let members = nodes.map(member).collect();
        let clock = Clock::default();
        Self::of(
            members,
            config,
            address.quarantine,
            clock,
            reports,
            late_releases,
        )
    }

    /// The store of a quorum of servers in memory, which share a clock.
    pub fn of_memory(
        servers: &[Arc<MemoryServer>],
        config: &Config,
        holder: &HolderId,
        reports: Reports,
    ) -> Arc<Self> {
        let names: Vec<String> = (0..servers.len())
            .map(|index| format!("memory node {index}"))
            .collect();
        let late_releases = QuorumLateReleases::new(reports.clone(), names.clone());
        let member = |(index, server): (usize, &Arc<MemoryServer>)| {
            let late = late_releases.of_node(index);
            Member::new(names[index].clone(), reports.clone(), late, |reports| {
                let node = MemoryNode::new(Arc::clone(server), holder.clone(), reports);
                Arc::new(node.with_quarantine(config.max_ttl))
            })
        };
        let members = servers.iter().enumerate().map(member).collect();
        let clock = servers[0].clock().clone();
        Self::of(
            members,
            config,
            config.max_ttl,
            clock,
            reports,
            late_releases,
        )
    }

    fn of(
        members: Vec<Arc<Member>>,
        config: &Config,
        quarantine: Duration,
        clock: Clock,
        reports: Reports,
        late_releases: Arc<QuorumLateReleases>,
    ) -> Arc<Self> {
        let mark = Key::from_full(&config.prefix, &key::data_mark(&config.prefix));
        let mark = mark.expect("it has the prefix");
        let proposals = Proposals::new(config.max_ttl);
        let allowed = clocks::allowed_from_median(config.max_ttl, proposals.lead());
        Arc::new(Self {
            count: Count::of(members.len()),
            names: members.iter().map(|one| one.address.clone()).collect(),
            members,
            prober: Arc::new(Prober::new(allowed, reports)),
            probe: Command::Probe(Probe { mark }),
            proposals,
            quarantine,
            ttls: RecentTtls::default(),
            late_holds: LateHolds::default(),
            split_vote_count: AtomicU32::new(0),
            clock,
            late_releases,
            threads: Mutex::default(),
        })
    }

    /// Starts the thread of each node, and the thread of the probes.
    fn start_threads(&self, threads: &ThreadGroup) -> Result<(), Error> {
        for member in &self.members {
            let (node, requests) = (Arc::downgrade(&member.node), &member.maintenance);
            let requests = Arc::clone(requests);
            let started = threads.spawn("leasehold-node", move || requests.run(&node));
            started.inspect_err(|_| self.stop_threads())?;
        }
        let members: Vec<_> = self.members.iter().map(Arc::downgrade).collect();
        let (prober, probe, clock) = (&self.prober, self.probe.clone(), self.clock.clone());
        let prober = Arc::clone(prober);
        let started = threads.spawn("leasehold-probes", move || {
            prober.run(&members, &probe, &clock);
        });
        started.inspect_err(|_| self.stop_threads())?;
        *self.threads.lock() = Some(threads.clone());
        Ok(())
    }

    fn stop_threads(&self) {
        self.threads.lock().take();
        self.prober.stop();
        for member in &self.members {
            member.maintenance.stop();
        }
    }

    fn all(&self) -> Vec<usize> {
        (0..self.members.len()).collect()
    }

    /// Sends a command to each of `nodes`, and waits until `is_decided` returns true or all have replied, until
    /// `deadline` at the latest. Returns the outcomes in the order of `nodes`: `None` for a node without a reply.
    fn ask(
        &self,
        nodes: &[usize],
        command: impl Fn(usize) -> Command,
        deadline: MonotonicTime,
        is_decided: impl Fn(&[Option<Outcome>]) -> bool,
    ) -> Vec<Option<Outcome>> {
        let batches = nodes.iter().map(|node| (*node, vec![command(*node)]));
        self.ask_voters(
            batches.collect(),
            deadline,
            SlowNodes::Leave,
            is_decided,
            |_| false,
        )
    }

    /// Sends a batch to each node, and waits as [`ask`](Self::ask) does. All batches have the same length. Returns the
    /// outcomes of each node in the order of its batch. If `has_voted` returns true (a majority has voted) and
    /// `is_decided` returns false, the votes of slow nodes may decide: `slow_nodes` sets how long to wait for them.
    fn ask_voters(
        &self,
        batches: Vec<(usize, Vec<Command>)>,
        deadline: MonotonicTime,
        slow_nodes: SlowNodes,
        is_decided: impl Fn(&[Option<Outcome>]) -> bool,
        has_voted: impl Fn(&[Option<Outcome>]) -> bool,
    ) -> Vec<Option<Outcome>> {
        let sent = self.clock.now();
        let nodes: Vec<usize> = batches.iter().map(|(node, _)| *node).collect();
        let need_votes = batches
            .first()
            .is_some_and(|(_, batch)| batch.iter().all(needs_vote));
        let length = batches.first().map_or(1, |(_, batch)| batch.len());
        let (submitted, completions) = Submitted::new(nodes.len() * length);
        let awaited: Vec<bool> = nodes
            .iter()
            .map(|node| !self.members[*node].is_silent())
            .collect();
        let sent_requests = self.send_batches(batches, &awaited, completions);
        let now = MonotonicTime::now();
        let deadline = self.on_machines_clock(deadline);
        let has_voted = |outcomes: &[Option<Outcome>]| is_decided(outcomes) || has_voted(outcomes);
        let voted_at = read_replies(sent_requests, deadline, || submitted.wait(now, has_voted));
        let voted_at = voted_at.or_else(|| {
            let has_voted = submitted.wait(deadline, has_voted);
            has_voted.then(MonotonicTime::now)
        });
        if let Some(voted_at) = voted_at {
            let have_replied = |outcomes: &[Option<Outcome>], awaited: &[bool]| {
                let mut of_nodes = outcomes.chunks(length).zip(awaited);
                of_nodes
                    .all(|(of_node, is_awaited)| !is_awaited || of_node.iter().all(Option::is_some))
            };
            // `now` has passed, so this call does not wait.
            if !submitted.wait(now, &is_decided)
                && let Some(grace) = self.grace_after_split_vote(slow_nodes)
            {
                let not_failing = self.not_failing(&nodes);
                let until = voted_at.after(grace).min(deadline);
                let _ = submitted.wait(until, |outcomes| {
                    is_decided(outcomes) || have_replied(outcomes, &not_failing)
                });
            }
            let soon = voted_at.after(GRACE).min(deadline);
            let _ = submitted.wait(soon, |outcomes| have_replied(outcomes, &awaited));
        }
        // The nodes drop the requests that are not written yet.
        let mut outcomes = submitted.leave();
        let seen = self.clock.now();
        for (node, of_node) in nodes.into_iter().zip(outcomes.chunks_mut(length)) {
            let member = &self.members[node];
            member.record_whether_silent(of_node.iter().all(Option::is_some));
            let noted = member.health.record(of_node, need_votes, &self.clock);
            self.prober.follow_up(noted, member, &self.clock);
            for outcome in of_node {
                member.record_outcome(outcome, sent, seen);
            }
        }
        outcomes
    }

    /// Sends a batch to each node. If the batch has a single command and the node is awaited, writes the command on
    /// this thread. Returns the requests that this thread has written.
    fn send_batches(
        &self,
        batches: Vec<(usize, Vec<Command>)>,
        awaited: &[bool],
        completions: Vec<Completion>,
    ) -> Vec<SentRequest<'_>> {
        let mut completions = completions.into_iter();
        let mut sent_requests = Vec::new();
        for ((node, batch), is_awaited) in batches.into_iter().zip(awaited) {
            let node = &self.members[node].node;
            let may_send = *is_awaited && batch.len() == 1;
            let mut batch = batch.into_iter().zip(completions.by_ref());
            if may_send && let Some((command, completion)) = batch.next() {
                sent_requests.extend(node.send(command, completion));
            } else {
                node.submit(batch.collect());
            }
        }
        sent_requests
    }

    /// How long a request waits for silent nodes after a split vote. Returns `None` for callers that do not wait.
    fn grace_after_split_vote(&self, slow_nodes: SlowNodes) -> Option<Duration> {
        match slow_nodes {
            SlowNodes::Leave => {
                let votes = self.split_vote_count.fetch_add(1, Ordering::Relaxed);
                let waits = votes.wrapping_add(1).is_multiple_of(WAIT_FOR_SILENT_EVERY);
                waits.then_some(LONGEST_GRACE)
            }
            SlowNodes::AwaitIfSplit(grace) => Some(grace),
        }
    }

    /// Converts a time of the client's clock to the machine's clock, by which threads wait.
    fn on_machines_clock(&self, time: MonotonicTime) -> MonotonicTime {
        MonotonicTime::now().after(time.since(self.clock.now()))
    }

    /// For each of `nodes`, whether it is not failing.
    fn not_failing(&self, nodes: &[usize]) -> Vec<bool> {
        let is_failing = |node: &usize| self.members[*node].health.is_failing();
        nodes.iter().map(|node| !is_failing(node)).collect()
    }

    /// The latest time that the node's clock may show at `time`, in µs. If the client has not connected to the node
    /// yet, returns a time beyond all clocks.
    fn shown_at(&self, node: usize, time: MonotonicTime) -> u64 {
        let latest = self.members[node].node.latest_micros_at(time);
        latest.map_or(LONGEST_MICROS, |latest| latest.min(LONGEST_MICROS))
    }

    fn no_majority(&self, outcomes: &[Option<Outcome>]) -> Error {
        self.count.no_majority(outcomes, &self.names)
    }

    /// Proposes the lease to all nodes. Without a majority, releases the lease, and returns the contention or an error.
    fn acquire(&self, lease: &Lease<'_>, deadline: MonotonicTime) -> Outcome {
        self.ttls.record(lease.ttl, MonotonicTime::now());
        // A grant that comes after the ttl has no validity.
        let deadline = deadline.min(self.clock.now().after(lease.ttl));
        let (token, outcomes) = self.propose(lease, deadline);
        if let Some(token) = token {
            return Ok(Reply::granted(token));
        }
        self.give_up(lease, &outcomes);
        let contention = self.count.contention(&outcomes);
        contention.ok_or_else(|| self.no_majority(&outcomes))
    }

    /// Proposes a token for the lease to all nodes, and makes a majority store it. Returns the token if a majority has
    /// granted and stored it, and the outcomes of the nodes.
    fn propose(
        &self,
        lease: &Lease<'_>,
        deadline: MonotonicTime,
    ) -> (Option<u64>, Vec<Option<Outcome>>) {
        let now = self.clock.now();
        let time = |member: &Arc<Member>| member.node.micros_at(now);
        let times = self.members.iter().filter_map(time).collect();
        let micros = self.proposals.next(times, self.count.majority());
        let proposal = |node: usize| {
            Command::Propose(Propose {
                key: lease.key.clone(),
                lease: lease.id,
                ttl: lease.ttl,
                micros,
                until: self.shown_at(node, deadline),
            })
        };
        let batches = self
            .all()
            .into_iter()
            .map(|node| (node, vec![proposal(node)]));
        let mut outcomes = self.ask_voters(
            batches.collect(),
            deadline,
            SlowNodes::Leave,
            |outcomes| self.count.is_decided(outcomes, is_granted),
            |outcomes| self.count.contention(outcomes).is_some(),
        );
        // A node refuses the request as too late if its clock was set forward since the client last read the clock. The
        // refusal contains the node's time, so the client computes the latest time of the vote anew, and asks once
        // more.
        let mut late = self.all();
        late.retain(|node| matches!(outcomes[*node], Some(Ok(Reply::TooLate { .. }))));
        if !late.is_empty()
            && self.count.grant(&outcomes) == Grant::None
            && self.clock.now() < deadline
        {
            let with = |again: Vec<Option<Outcome>>| {
                let mut outcomes = outcomes.clone();
                for (node, outcome) in late.iter().zip(again) {
                    outcomes[*node] = outcome;
                }
                outcomes
            };
            let again = self.ask(&late, proposal, deadline, |again| {
                self.count.is_decided(&with(again.to_vec()), is_granted)
            });
            outcomes = with(again);
        }
        let token = match self.count.grant(&outcomes) {
            Grant::Token { token, is_stored } => {
                let is_stored = is_stored || self.write_back(lease, token, &mut outcomes, deadline);
                is_stored.then_some(token)
            }
            Grant::None => None,
        };
        if let Some(token) = token {
            self.proposals.record(token);
        }
        (token, outcomes)
    }

    /// Makes a majority store the token of a grant. Replaces the outcomes of the nodes that it asks. Returns false if
    /// no majority has stored the token by `deadline`.
    fn write_back(
        &self,
        lease: &Lease<'_>,
        token: u64,
        outcomes: &mut [Option<Outcome>],
        deadline: MonotonicTime,
    ) -> bool {
        let has_stored = |outcome: &Option<Outcome>| has_stored(outcome, token);
        let (done, asked): (Vec<usize>, Vec<usize>) = self
            .all()
            .into_iter()
            .partition(|node| has_stored(&outcomes[*node]));
        let needed = self.count.majority().saturating_sub(done.len());
        let hold = |node: usize| {
            let sets_missing = Some(self.shown_at(node, deadline));
            lease.hold(micros_of(token), sets_missing)
        };
        let written = self.ask(&asked, hold, deadline, |written| {
            let stored = written.iter().filter(|one| has_stored(one)).count();
            let failed = written.iter().flatten().count() - stored;
            stored >= needed || asked.len() - failed < needed
        });
        let stored = written.iter().filter(|one| has_stored(one)).count();
        for (node, outcome) in asked.into_iter().zip(written) {
            // An error replaces this node's grant: the caller learns the reason, and the client releases the key on
            // this node.
            let outcome = match outcome {
                Some(Ok(Reply::TooFarAhead)) => {
                    Some(Err(Error::new(ErrorKind::NoQuorum, TOO_FAR_AHEAD)))
                }
                other => other,
            };
            // The outcome of the hold replaces the node's reply to the proposal. Without a reply, the hold may still
            // arrive and has to be undone. An error tells the caller why there is no majority. But if the node has
            // refused the hold, its reply to the proposal stays.
            let was_refused = matches!(&outcome, Some(Ok(_))) && !has_stored(&outcome);
            if !was_refused || outcomes[node].is_none() {
                outcomes[node] = outcome;
            }
        }
        stored >= needed
    }

    /// Releases a lease that no majority has granted, on each node that has granted it or whose outcome is unknown.
    fn give_up(&self, lease: &Lease<'_>, outcomes: &[Option<Outcome>]) {
        let release = lease.release(self.clock.now());
        for (member, outcome) in self.members.iter().zip(outcomes) {
            match outcome {
                Some(Ok(Reply::Granted { .. })) => member.node.send_release(release.clone()),
                Some(Ok(_)) => {}
                // The proposal may still arrive.
                None | Some(Err(_)) => member.node.queue_undo(release.clone()),
            }
        }
    }

    /// Sends a release to all nodes. If no majority replies, reports the release as late.
    fn release(&self, command: &Command, release: &Release, deadline: MonotonicTime) -> Outcome {
        self.end_late_holds(release);
        let tracked = self.track_release(release, true);
        let (released, _) = self.release_on_all(command, deadline);
        if let Some((key, token)) = tracked {
            self.late_releases.leave(key, token, &released);
        }
        released
    }

    /// Withdraws the lease's late holds that are not written yet: they must not set the key after this release.
    fn end_late_holds(&self, release: &Release) {
        self.late_holds.end(release.lease, self.members.len());
    }

    /// Records the release of a guard's lease before it is sent. Returns the key and the token for
    /// [`leave`](QuorumLateReleases::leave).
    fn track_release<'a>(&self, release: &'a Release, is_awaited: bool) -> Option<(&'a Key, u64)> {
        let (key, token) = release.of_guard()?;
        let is_tracked = self.late_releases.begin(key, token, is_awaited);
        is_tracked.then_some((key, token))
    }

    /// Sends a release or a forced release to all nodes. Returns the reply of a majority, and the outcomes of the
    /// nodes.
    fn release_on_all(
        &self,
        release: &Command,
        deadline: MonotonicTime,
    ) -> (Outcome, Vec<Option<Outcome>>) {
        let command = |_| release.clone();
        let outcomes = self.ask(&self.all(), command, deadline, |outcomes| {
            self.count.is_release_decided(outcomes)
        });
        let released = self.count.released(&outcomes);
        (
            released.ok_or_else(|| self.no_majority(&outcomes)),
            outcomes,
        )
    }

    /// After a majority has released a lease by force, releases it on the other nodes. The forced release may never be
    /// written to these nodes, since its caller no longer waits.
    fn release_elsewhere(&self, key: &Key, lease: LeaseId, outcomes: &[Option<Outcome>]) {
        let release = Release::unheld(key.clone(), lease, self.clock.now().after(self.quarantine));
        for (member, outcome) in self.members.iter().zip(outcomes) {
            if !has_released(outcome) {
                member.node.send_release(release.clone());
            }
        }
    }

    /// Renews leases, with one batch for each node. Then sets the keys that nodes lack, for leases that are not lost.
    ///
    /// A node lacks a key after a restart, or if it was too slow for the grant. (After a release by force, so many
    /// nodes lack the key that the lease is lost.) Waits for these keys only if a lease has no majority without them.
    /// `by_watchdog`: the watchdog sends these renewals, so callers do not wait.
    fn renew(&self, renewals: &mut [&mut Request], by_watchdog: bool) {
        let Some(deadline) = renewals.iter().map(|request| request.deadline).max() else {
            return;
        };
        let now = self.clock.now();
        for request in &*renewals {
            if let Command::Renew(Renew { ttl, .. }) = request.command {
                self.ttls.record(ttl, MonotonicTime::now());
            }
        }
        let slow_nodes = match by_watchdog {
            true => {
                SlowNodes::of_renewals(renewals.len(), self.ttls.shortest(MonotonicTime::now()))
            }
            false => SlowNodes::Leave,
        };
        let holds: Vec<Command> = renewals.iter().map(|one| self.hold_of(one, None)).collect();
        let is_decided = |of_lease: &[Option<Outcome>]| self.count.is_decided(of_lease, is_granted);
        let leases = holds.len();
        // If a majority has voted but split its votes, the watchdog does not wait until the deadline for the other
        // nodes: the next renewal of this lease asks them again.
        let has_voted = |one: &[Option<Outcome>]| is_decided(one) || self.count.has_voted(one);
        let outcomes = self.ask_voters(
            self.all()
                .into_iter()
                .map(|node| (node, holds.clone()))
                .collect(),
            deadline,
            slow_nodes,
            |outcomes| by_lease(outcomes, leases).all(|one| is_decided(&one)),
            |outcomes| by_watchdog && by_lease(outcomes, leases).all(|one| has_voted(&one)),
        );
        let mut of_leases: Vec<Vec<Option<Outcome>>> = by_lease(&outcomes, leases).collect();
        let to_set = self.holds_of_missing(renewals, &of_leases, now);
        let left = deadline.since(self.clock.now());
        self.set_missing(to_set, &mut of_leases, slow_nodes.sets_within().min(left));
        for (request, outcomes) in renewals.iter_mut().zip(of_leases) {
            let reply = self.count.renewed(&outcomes);
            request.outcome = Some(reply.ok_or_else(|| self.no_majority(&outcomes)));
        }
    }

    /// The hold that renews a lease. With `sets_on`, the hold also sets a missing key on that node, until one ttl after
    /// the given time: the next renewal comes by then.
    fn hold_of(&self, renewal: &Request, sets_on: Option<(usize, MonotonicTime)>) -> Command {
        let Command::Renew(Renew {
            key,
            lease,
            token,
            ttl,
            ..
        }) = &renewal.command
        else {
            unreachable!("{:?} is no renewal", renewal.command);
        };
        let (id, ttl) = (*lease, *ttl);
        let sets_missing = sets_on.map(|(node, now)| self.shown_at(node, now.after(ttl)));
        Lease { key, id, ttl }.hold(micros_of(*token), sets_missing)
    }

    /// Makes the holds that set keys on nodes that lack them. If a lease has a majority, queues its holds at their
    /// nodes, as late holds. Returns the other holds, each with its node and the index of its lease. `now` is the time
    /// at which the renewals began.
    fn holds_of_missing(
        &self,
        renewals: &[&mut Request],
        of_leases: &[Vec<Option<Outcome>>],
        now: MonotonicTime,
    ) -> Vec<(usize, usize, Command)> {
        let mut to_set: Vec<(usize, usize, Command)> = Vec::new();
        let mut late: Vec<Vec<(Command, Completion)>> =
            self.members.iter().map(|_| Vec::new()).collect();
        for (index, (request, outcomes)) in renewals.iter().zip(of_leases).enumerate() {
            let Command::Renew(Renew { lease, ttl, .. }) = request.command else {
                continue;
            };
            // A renewal with a shorter ttl only asks whether the lease is held.
            if ttl < MIN_TTL || !self.count.may_set(outcomes) {
                continue;
            }
            let is_held = self.count.renewed(outcomes) == Some(Reply::Done);
            for (node, outcome) in outcomes.iter().enumerate() {
                let lacks_key = match outcome {
                    Some(Ok(Reply::Missing)) => true,
                    // The node may lack the key. If the node's renewal is not written yet, the pipeline drops it.
                    None => !self.members[node].health.is_failing(),
                    _ => false,
                };
                if lacks_key && !is_held {
                    to_set.push((node, index, self.hold_of(request, Some((node, now)))));
                } else if lacks_key
                    && let Some(completion) = self.late_holds.begin(lease, node, ttl, now)
                {
                    late[node].push((self.hold_of(request, Some((node, now))), completion));
                }
            }
        }
        for (member, holds) in self.members.iter().zip(late) {
            if !holds.is_empty() {
                member.node.submit(holds);
            }
        }
        to_set
    }

    /// Sends holds, each with its node and the index of its lease, and waits for their outcomes, `within` at most.
    /// Replaces the outcomes of these nodes; `None` stands for a node without a reply.
    fn set_missing(
        &self,
        mut holds: Vec<(usize, usize, Command)>,
        of_leases: &mut [Vec<Option<Outcome>>],
        within: Duration,
    ) {
        if holds.is_empty() {
            return;
        }
        holds.sort_by_key(|(node, ..)| *node);
        let sent = self.clock.now();
        let (submitted, completions) = Submitted::new(holds.len());
        let mut completions = completions.into_iter();
        for of_node in holds.chunk_by(|(one, ..), (other, ..)| one == other) {
            let commands = of_node.iter().map(|(_, _, command)| command.clone());
            let batch = commands.zip(completions.by_ref()).collect();
            self.members[of_node[0].0].node.submit(batch);
        }
        let soon = MonotonicTime::now().after(within);
        let _ = submitted.wait(soon, |outcomes| outcomes.iter().all(Option::is_some));
        let seen = self.clock.now();
        for ((node, lease, _), mut outcome) in holds.into_iter().zip(submitted.leave()) {
            // If the hold came too late, this call records the node's time, and the next renewal comes in time.
            self.members[node].record_outcome(&mut outcome, sent, seen);
            of_leases[lease][node] = outcome;
        }
    }

    /// Inspects the key. Asks again until `deadline` while the nodes disagree, as they do while a lock changes hands.
    /// If they disagree for longer, the vote of a silent node may decide, so each attempt waits longer for such nodes.
    /// The last attempt may begin too late for replies. Then the error has the votes of the attempt before.
    fn inspect(&self, command: &Command, deadline: MonotonicTime) -> Outcome {
        let has_voted = |outcomes: &[Option<Outcome>]| self.count.has_voted(outcomes);
        let is_decided = |outcomes: &[Option<Outcome>]| {
            has_voted(outcomes) && self.count.found(outcomes).is_some()
        };
        let until = self.on_machines_clock(deadline);
        let mut grace = FIRST_INSPECTION_GRACE;
        let mut disagreement = None;
        loop {
            let asked = MonotonicTime::now();
            let nodes = self.all().into_iter();
            let outcomes = self.ask_voters(
                nodes.map(|node| (node, vec![command.clone()])).collect(),
                deadline,
                SlowNodes::AwaitIfSplit(grace),
                is_decided,
                has_voted,
            );
            if let Some(found) = self.count.found(&outcomes) {
                return Ok(found);
            }
            let now = MonotonicTime::now();
            let again_at = now.max(asked.after(grace.min(LONGEST_INSPECTION_PAUSE)));
            if !has_voted(&outcomes) {
                return Err(self.no_majority(&disagreement.unwrap_or(outcomes)));
            }
            if again_at >= until {
                return Err(self.no_majority(&outcomes));
            }
            disagreement = Some(outcomes);
            park_timeout(again_at.since(now));
            grace = (2 * grace).min(LONGEST_GRACE);
        }
    }

    /// The error for a feature that a quorum does not have. `what` may name an alternative.
    fn unsupported(what: &str) -> Error {
        let message = format!("a quorum of independent servers has no {what}");
        Error::new(ErrorKind::Unsupported, message)
    }
}

impl Store for QuorumStore {
    fn execute(&self, requests: &mut [Request]) {
        let is_renewal = |request: &&mut Request| matches!(request.command, Command::Renew(_));
        let (mut renewals, others): (Vec<&mut Request>, Vec<&mut Request>) =
            requests.iter_mut().partition(is_renewal);
        // Only the watchdog sends batches.
        self.renew(&mut renewals, true);
        for request in others {
            let outcome = self.execute_one(request.command.clone(), request.deadline);
            request.outcome = Some(outcome);
        }
    }

    fn execute_one(&self, command: Command, deadline: MonotonicTime) -> Result<Reply, Error> {
        match &command {
            Command::Acquire(Acquire {
                replicas: Some(_), ..
            }) => Err(Self::unsupported("acknowledgements of replicas")),
            Command::Acquire(Acquire {
                key, lease, ttl, ..
            }) => {
                let lease = Lease {
                    key,
                    id: *lease,
                    ttl: *ttl,
                };
                self.acquire(&lease, deadline)
            }
            Command::Renew(_) => {
                let mut request = Request::new(command, deadline);
                self.renew(&mut [&mut request], false);
                request.into_outcome()
            }
            Command::Release(release) => self.release(&command, release, deadline),
            Command::ForceUnlock(ForceUnlock { key, lease, .. }) => {
                // The lease may belong to this client.
                self.late_holds.end(*lease, self.members.len());
                let (released, outcomes) = self.release_on_all(&command, deadline);
                if matches!(released, Ok(Reply::Done)) {
                    self.release_elsewhere(key, *lease, &outcomes);
                }
                released
            }
            Command::Inspect(_) => self.inspect(&command, deadline),
            Command::Flush => self.flush(deadline).map(|()| Reply::Done),
            Command::Settle(_) => Ok(Reply::Done),
            Command::Adopt(_) => Err(Self::unsupported(TICKETS)),
            Command::Convert(_) => Err(Self::unsupported(READERS)),
            Command::Read(_) | Command::Write(_) | Command::Claim(_) | Command::Look(_) => {
                Err(Self::unsupported(FENCED_VALUES))
            }
            Command::Propose(_) | Command::Hold(_) | Command::Probe(_) => {
                Err(Self::unsupported("votes"))
            }
        }
    }

    /// Refuses to list locks: each node has other keys.
    fn servers_to_scan(&self) -> Result<Vec<ServerId>, Error> {
        Err(Self::unsupported("list of its locks"))
    }

    /// Refuses the requests. Callers do not submit requests to a quorum.
    fn submit(&self, requests: Vec<(Command, Completion)>) {
        for (_, completion) in requests {
            let _ = completion.complete(Err(Self::unsupported("submitted requests")));
        }
    }

    /// Pings all nodes at once, and waits until a majority has replied or can no longer reply. Returns the longest time
    /// of that majority.
    fn ping(&self) -> Result<Duration, Error> {
        let threads = self.threads.lock().clone();
        let (pinged, pings) = bounded(self.members.len());
        for (index, member) in self.members.iter().enumerate() {
            if !member.pings.join(pinged.clone()) {
                // The reply to the running ping counts for this caller, too.
                continue;
            }
            let running = RunningPing(Some(Arc::clone(member)));
            let ping = move || running.run(index);
            match &threads {
                Some(threads) => threads.spawn("leasehold-ping", ping)?,
                None => ping(),
            }
        }
        drop(pinged);
        let mut outcomes: Vec<Option<Outcome>> = vec![None; self.members.len()];
        let mut longest = Duration::ZERO;
        while !self.count.is_decided(&outcomes, Reply::is_success) {
            let Ok((index, took)) = pings.recv() else {
                break;
            };
            longest = longest.max(*took.as_ref().unwrap_or(&longest));
            outcomes[index] = Some(took.map(|_| Reply::Done));
        }
        if !self.count.has_succeeded(&outcomes) {
            return Err(self.no_majority(&outcomes));
        }
        Ok(longest)
    }

    /// Checks all nodes at once. Returns an error unless a majority replies. Each node that cannot be checked is a
    /// finding.
    fn check_environment(&self) -> Result<Option<Vec<EnvironmentFinding>>, Error> {
        let panicked = || Err(Error::new(ErrorKind::Timeout, "the check has panicked"));
        let mut checks: Vec<_> = self.members.iter().map(|_| panicked()).collect();
        let check = |member: &Arc<Member>| member.node.check_environment();
        call_each(&self.members, check, |results| {
            results
                .iter()
                .for_each(|(node, check)| checks[node] = check);
        });
        if checks.iter().flatten().count() < self.count.majority() {
            return Err(self.no_majority(&as_outcomes(&checks)));
        }
        let mut found = Vec::new();
        for (member, check) in self.members.iter().zip(checks) {
            match check {
                Ok(findings) => found.extend(findings.unwrap_or_default()),
                Err(error) => {
                    let reason = error.to_string();
                    let warning = EnvironmentWarning::ServerNotChecked { reason };
                    found.push(EnvironmentFinding::new(&member.address, warning));
                }
            }
        }
        Ok(Some(found))
    }

    fn send_release(&self, release: Release) {
        self.end_late_holds(&release);
        let _ = self.track_release(&release, false);
        for member in &self.members {
            member.node.send_release(release.clone());
        }
    }

    fn nodes(&self) -> Vec<NodeState> {
        let state = |member: &Arc<Member>| {
            let noted = member.health.probe_if_outdated(&self.clock);
            self.prober.follow_up(noted, member, &self.clock);
            member.state(&self.clock)
        };
        self.members.iter().map(state).collect()
    }

    fn failed_releases(&self) -> usize {
        let nodes = self.members.iter();
        nodes.map(|member| member.node.failed_releases()).sum()
    }

    /// A hold may arrive after the release of its lease, and set the key again.
    fn renewals_set_keys(&self) -> bool {
        true
    }

    fn check(&self, feature: Feature) -> Result<(), Error> {
        Err(Self::unsupported(match feature {
            Feature::Readers => READERS,
            Feature::Permits => {
                "semaphores; use one mutex for each permit, and `try_lock` on one after the other"
            }
            Feature::MinHold => "`min_hold`; hold the lock for that time",
            Feature::Claims => "fenced values, which `Once` and elections need",
            Feature::Tickets => TICKETS,
        }))
    }

    fn end(&self) {
        self.members.iter().for_each(|member| member.node.end());
    }

    /// Flushes all nodes at once, and returns an error unless a majority has confirmed its releases. Then closes the
    /// connections to each other node that makes no progress with its releases.
    fn flush(&self, deadline: MonotonicTime) -> Result<(), Error> {
        // The flushes of the nodes must not wait for late holds.
        self.late_holds.end_all();
        let mut outcomes: Vec<Option<Outcome>> = vec![None; self.members.len()];
        let flush = |member: &Arc<Member>| member.node.flush(deadline).map(|()| Reply::Done);
        call_each(&self.members, flush, |flushes| {
            while !self.count.has_succeeded(&outcomes) {
                let Ok((node, outcome)) = flushes.recv() else {
                    return;
                };
                outcomes[node] = Some(outcome);
            }
            self.await_slower_flushes(flushes, &mut outcomes);
        });
        match self.count.has_succeeded(&outcomes) {
            true => Ok(()),
            false => Err(self.no_majority(&outcomes)),
        }
    }

    fn close(&self) {
        self.stop_threads();
        self.members.iter().for_each(|member| member.node.close());
    }
}

impl QuorumStore {
    /// Waits for the nodes that have not flushed yet. Closes the connections to a node whose queue of releases has not
    /// become shorter since the last check, which ends the node's flush.
    fn await_slower_flushes(
        &self,
        flushes: &Receiver<(usize, Outcome)>,
        outcomes: &mut [Option<Outcome>],
    ) {
        let queued = || -> Vec<usize> {
            let members = self.members.iter();
            members
                .map(|member| member.node.queued_releases())
                .collect()
        };
        let mut before = queued();
        let mut check_at = MonotonicTime::now().after(self.first_flush_grace(outcomes));
        loop {
            match flushes.recv_timeout(check_at.since(MonotonicTime::now())) {
                Ok((node, outcome)) => outcomes[node] = Some(outcome),
                // All flushes have ended.
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let now = queued();
                    for (node, member) in self.members.iter().enumerate() {
                        if outcomes[node].is_none() && now[node] >= before[node] {
                            member.node.disconnect();
                        }
                    }
                    before = now;
                    check_at = MonotonicTime::now().after(LONGEST_GRACE);
                }
            }
        }
    }

    /// The time until a flush first checks whether the nodes without an outcome make progress.
    fn first_flush_grace(&self, outcomes: &[Option<Outcome>]) -> Duration {
        let members = self.members.iter().zip(outcomes);
        let mut pending = members.filter(|(_, outcome)| outcome.is_none());
        match pending.all(|(member, _)| member.health.is_failing()) {
            true => FAILING_FLUSH,
            false => LONGEST_GRACE,
        }
    }
}

/// Reads the replies to these requests as they come, for [`CALLER_READS_FOR`] and until `deadline` at the latest. The
/// nodes' threads read the rest. Returns the approximate time at which a majority had voted, or `None` if none has.
fn read_replies(
    mut requests: Vec<SentRequest<'_>>,
    deadline: MonotonicTime,
    has_voted: impl Fn() -> bool,
) -> Option<MonotonicTime> {
    let mut checked_at = MonotonicTime::now();
    let until = checked_at.after(CALLER_READS_FOR).min(deadline);
    let mut voted_at = None;
    while !requests.is_empty() {
        let ready = SentRequest::wait_for_any(&requests, until);
        let has_received = !ready.is_empty();
        for position in ready.into_iter().rev() {
            if requests[position].receive() {
                requests.swap_remove(position);
            }
        }
        let now = MonotonicTime::now();
        if voted_at.is_none() && has_voted() {
            // If no socket was ready, another thread has read the last of these votes since the last check. The time of
            // that check is used, so that the caller does not wait twice for slower nodes.
            voted_at = Some(if has_received { now } else { checked_at });
        }
        if now >= until {
            break;
        }
        checked_at = now;
    }
    voted_at
}

/// Whether a node in quarantine refuses the command.
fn needs_vote(command: &Command) -> bool {
    matches!(
        command,
        Command::Propose(_) | Command::Hold(_) | Command::Inspect(_)
    )
}

/// Groups the outcomes of batches by lease. Each batch has one request for each of `leases`.
fn by_lease(
    outcomes: &[Option<Outcome>],
    leases: usize,
) -> impl Iterator<Item = Vec<Option<Outcome>>> {
    let of_lease = move |lease: usize| {
        let of_nodes = outcomes.chunks(leases);
        of_nodes.map(|of_node| of_node[lease].clone()).collect()
    };
    (0..leases).map(of_lease)
}

/// The results of calls as outcomes, for an error.
fn as_outcomes<T>(calls: &[Result<T, Error>]) -> Vec<Option<Outcome>> {
    let outcome =
        |call: &Result<T, Error>| call.as_ref().map(|_| Reply::Done).map_err(Error::clone);
    calls.iter().map(|call| Some(outcome(call))).collect()
}

impl Notifications for QuorumStore {
    /// Starts the threads of the nodes. Each node has a notification connection.
    fn start(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        self.start_threads(threads)?;
        for member in &self.members {
            let started = member.node.start(threads, Arc::clone(&listener));
            started.inspect_err(|_| Notifications::stop(self))?;
        }
        Ok(())
    }

    fn stop(&self) {
        self.stop_threads();
        self.members.iter().for_each(|member| member.node.stop());
    }

    fn request(&self, key: &Key) {
        let nodes = self.members.iter();
        nodes.for_each(|member| member.node.request(key));
    }

    /// Tracks the keys on all nodes. Returns true if a majority can notify, so that the client notices a release by any
    /// majority.
    fn track(&self, keys: Vec<TrackedKey>) -> bool {
        let nodes = self.members.iter();
        let tracking = nodes.filter(|member| member.node.track(keys.clone()));
        tracking.count() >= self.count.majority()
    }

    fn queue_mode(&self, _: &Key) -> QueueMode {
        QueueMode::None
    }

    fn free_servers(&self) -> Option<usize> {
        Some(self.count.majority())
    }

    fn must_confirm_losses(&self) -> bool {
        true
    }
}
