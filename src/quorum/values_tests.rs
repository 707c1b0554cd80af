//! Random tests of fenced values on a quorum of servers in memory. Requests and replies are lost or late, nodes lose
//! their data, clients are interrupted in the middle of a call, and time passes. Afterwards no write with a smaller
//! token may be accepted than any client has seen, and no read may return an older version.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::node::QuorumNode;
use super::values::Change;
use super::{Member, QuorumStore};
use crate::command::copy::{ValueCopy, Version};
use crate::command::{Command, Reply};
use crate::command::{QueueMode, Request};
use crate::config::Config;
use crate::memory::Keyspace;
use crate::memory::{MemoryNode, MemoryServer};
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::Outcome;
use crate::store::{Completion, Listener, Notifications, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::key::{Key, KeyLayout};
use crate::util::threads::ThreadGroup;

const MAX_TTL: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(600);
const CLIENTS: usize = 2;

fn key() -> Key {
    Key::of_value(KeyLayout::Single, "p:", "k", 100).unwrap()
}

/// The nodes, and all that happens between two requests.
struct World {
    servers: Vec<Arc<MemoryServer>>,
    clients: OnceLock<Vec<Arc<QuorumStore>>>,
    /// Whether tokens come from the nodes' clocks, as those of locks do.
    has_times_as_tokens: bool,
    state: Mutex<State>,
}

/// How often things happen in a history: chances in a hundred.
#[derive(Clone, Copy, Default)]
struct Chances {
    /// Between two requests.
    loss_in_call: usize,
    call_in_call: usize,
    /// Of a request.
    late: usize,
    /// Of a request of a call within a call.
    lost_in_inner_call: usize,
    /// Of the node that a late request is for, to be the next to lose its data.
    loss_after_late: usize,
    /// Of a node, to be away when another one has lost its data.
    away: usize,
}

type Plan = Box<dyn FnOnce(&Arc<World>) + Send>;

#[derive(Default)]
struct State {
    random: u64,
    chances: Chances,
    /// Nothing fails, and nothing happens between two requests but `plan`.
    is_calm: bool,
    /// The events before the request with this number, counted from 1.
    plan: Option<(usize, Plan)>,
    /// How many calls are running, each within the other.
    depth: usize,
    is_down: Vec<bool>,
    /// Requests that arrive after their caller has given up.
    late: Vec<(usize, Command)>,
    /// The losses of data since which no call has brought the value to a majority again.
    losses: Vec<Loss>,
    /// The data that each node may come back with.
    saved: Vec<Option<Keyspace>>,
    tokens: Vec<u64>,
    values: u64,
    seen: Seen,
    counts: Counts,
}

/// A loss of data, and the nodes that have lost theirs at that time or later.
struct Loss {
    at: MonotonicTime,
    nodes: HashSet<usize>,
}

/// The reads and writes that callers have seen succeed.
#[derive(Clone, Default)]
struct Seen {
    token: u64,
    /// The latest version that a read has returned.
    version: Option<Version>,
    /// The values of the accepted writes, and those that reads have returned.
    values: HashSet<u64>,
    /// The values of `values` that a later write has replaced.
    replaced: HashSet<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    accepted: usize,
    stale: usize,
    read: usize,
    failed: usize,
    losses: usize,
}

impl State {
    fn below(&mut self, limit: usize) -> usize {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }

    /// Whether something happens that has so many chances in a hundred.
    fn happens(&mut self, chances: usize) -> bool {
        self.below(100) < chances
    }
}

/// The fate of a request.
enum Fate {
    Usual,
    Lost,
    ReplyLost,
    Late,
}

/// A node that loses and delays requests and replies.
struct Faulty {
    index: usize,
    node: MemoryNode,
    world: Arc<World>,
}

impl Store for Faulty {
    fn execute(&self, requests: &mut [Request]) {
        self.node.execute(requests);
    }

    fn submit(&self, requests: Vec<(Command, Completion)>) {
        for (command, completion) in requests {
            self.world.interrupt();
            let outcome = self.carry_out(command);
            let _ = completion.complete(outcome);
        }
    }

    fn ping(&self) -> Result<Duration, Error> {
        self.node.ping()
    }

    fn send_release(&self, release: Command) {
        self.node.send_release(release);
    }
}

impl Faulty {
    fn carry_out(&self, command: Command) -> Outcome {
        let fails = || Err(Error::new(ErrorKind::Unavailable, "lost"));
        let (is_down, fate) = {
            let mut state = self.world.state.lock();
            // A call within a call often ends halfway.
            let lost = state.chances.lost_in_inner_call;
            let is_lost = state.depth > 1 && state.happens(lost);
            let is_down = is_lost || state.is_down[self.index];
            let late = state.chances.late;
            let fate = match state.happens(late) {
                true => Fate::Late,
                false => match state.below(100) {
                    _ if state.is_calm => Fate::Usual,
                    0..5 => Fate::Lost,
                    5..10 => Fate::ReplyLost,
                    _ => Fate::Usual,
                },
            };
            (is_down, fate)
        };
        match fate {
            _ if is_down => fails(),
            Fate::Lost => fails(),
            Fate::Late => {
                self.world.state.lock().late.push((self.index, command));
                fails()
            }
            Fate::ReplyLost => {
                let _ = self.node.execute_one(command, self.world.later());
                fails()
            }
            Fate::Usual => self.node.execute_one(command, self.world.later()),
        }
    }
}

impl Notifications for Faulty {
    fn start(&self, threads: &ThreadGroup, listener: Arc<dyn Listener>) -> Result<(), Error> {
        self.node.start(threads, listener)
    }
    fn stop(&self) {
        Notifications::stop(&self.node);
    }
    fn request(&self, _: &Key) {}
    fn track(&self, _: Vec<TrackedKey>) -> bool {
        false
    }
    fn queue_mode(&self, _: &Key) -> QueueMode {
        QueueMode::None
    }
}

impl QuorumNode for Faulty {
    fn micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Some(self.node.micros_at(now))
    }
    fn latest_micros_at(&self, now: MonotonicTime) -> Option<u64> {
        Some(self.node.micros_at(now))
    }
    fn note_micros(&self, _: u64, _: MonotonicTime, _: MonotonicTime) {}
    fn queue_undo(&self, release: Command) {
        self.node.send_release(release);
    }
    fn queued_releases(&self) -> usize {
        self.node.failed_releases()
    }
    fn disconnect(&self) {
        self.node.drop_releases();
    }
    fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        outcome
    }
}

impl World {
    fn new(nodes: usize, seed: u64, has_times_as_tokens: bool) -> Arc<Self> {
        let config = Config {
            max_ttl: MAX_TTL,
            ..Config::default()
        };
        let world = Arc::new(Self {
            servers: MemoryServer::nodes(nodes),
            clients: OnceLock::new(),
            has_times_as_tokens,
            state: Mutex::new(State {
                random: seed,
                is_down: vec![false; nodes],
                saved: vec![None; nodes],
                tokens: vec![7],
                ..State::default()
            }),
        });
        let client = |client: usize| {
            let member = |index: usize| {
                let holder = HolderId::of_text(&format!("host/{client}/a"));
                let server = Arc::clone(&world.servers[index]);
                Member::new(format!("node {index}"), |hook| {
                    let node = MemoryNode::new(server, holder, hook, None);
                    Arc::new(Faulty {
                        index,
                        node: node.with_quarantine(MAX_TTL),
                        world: Arc::clone(&world),
                    })
                })
            };
            let members = (0..nodes).map(member).collect();
            QuorumStore::of(
                members,
                &config,
                MAX_TTL,
                world.servers[0].clock().clone(),
                None,
            )
        };
        let clients = (0..CLIENTS).map(client).collect();
        assert!(world.clients.set(clients).is_ok());
        world
    }

    fn now(&self) -> MonotonicTime {
        self.servers[0].clock().now()
    }

    fn later(&self) -> MonotonicTime {
        self.now().after(LONG)
    }

    /// Lets other things happen between two requests of a call, as if the caller had been stopped there.
    fn interrupt(self: &Arc<Self>) {
        let (event, depth) = {
            let mut state = self.state.lock();
            if let Some((requests, _)) = &mut state.plan {
                *requests -= 1;
            }
            if let Some((_, plan)) = state.plan.take_if(|(requests, _)| *requests == 0) {
                drop(state);
                return plan(self);
            }
            if state.is_calm {
                return;
            }
            (state.below(1000), state.depth)
        };
        match event {
            0..10 => {
                let node = self.state.lock().below(self.servers.len());
                self.lose_data(node);
            }
            10..13 => {
                let node = self.state.lock().below(self.servers.len());
                self.servers[node].restart();
            }
            13..25 => self.pass_time(),
            300..320 => {
                let mut state = self.state.lock();
                let node = state.below(self.servers.len());
                state.saved[node] = Some(self.servers[node].data());
            }
            25..75 => {
                let mut state = self.state.lock();
                let node = state.below(self.servers.len());
                state.is_down[node] = event < 35;
            }
            75..175 => self.deliver_late(),
            175..195 => {
                let mut state = self.state.lock();
                let node = state.below(self.servers.len());
                state.saved[node] = Some(self.servers[node].data());
            }
            _ if depth >= 3 => {}
            _ => {
                let mut state = self.state.lock();
                let Chances {
                    loss_in_call,
                    call_in_call,
                    ..
                } = state.chances;
                let (loses, calls) = (state.happens(loss_in_call), state.happens(call_in_call));
                drop(state);
                if loses {
                    self.lose_data_and_go_on();
                } else if calls {
                    self.call();
                }
            }
        }
    }

    fn pass_time(&self) {
        let by = self.state.lock().below(4);
        let by = [
            MAX_TTL / 10,
            MAX_TTL / 2,
            MAX_TTL + MAX_TTL / 20,
            MAX_TTL * 3,
        ][by];
        MemoryServer::advance_all(&self.servers, by);
    }

    fn deliver_late(&self) {
        let (node, command) = {
            let mut state = self.state.lock();
            let count = state.late.len();
            if count == 0 {
                return;
            }
            let at = state.below(count);
            state.late.swap_remove(at)
        };
        let holder = HolderId::of_text("host/9/late");
        let late = MemoryNode::plain(Arc::clone(&self.servers[node]), holder);
        let _ = late
            .with_quarantine(MAX_TTL)
            .execute_one(command, self.later());
    }

    /// A node loses its data, and votes again when late requests arrive. Another node may be away then.
    fn lose_data_and_go_on(self: &Arc<Self>) {
        let node = {
            let mut state = self.state.lock();
            let node = state.below(self.servers.len());
            let after_late = state.chances.loss_after_late;
            match state.late.len() {
                count if count > 0 && state.happens(after_late) => {
                    let at = state.below(count);
                    state.late[at].0
                }
                _ => node,
            }
        };
        self.lose_data(node);
        MemoryServer::advance_all(&self.servers, MAX_TTL + MAX_TTL / 20);
        let late = self.state.lock().late.len();
        (0..late).for_each(|_| self.deliver_late());
        let were_down = {
            let mut state = self.state.lock();
            let mut is_down = vec![false; self.servers.len()];
            let away = state.chances.away;
            if state.happens(away) {
                let away = state.below(is_down.len());
                is_down[away] = true;
            }
            std::mem::replace(&mut state.is_down, is_down)
        };
        self.call();
        self.state.lock().is_down = were_down;
    }

    /// Restarts a node without its data, or with old data, unless too many have lost their data: more than a minority
    /// from a loss on until a call has succeeded that began more than a third of `max_ttl` after it.
    fn lose_data(&self, node: usize) {
        let now = self.now();
        let mut state = self.state.lock();
        let minority = (self.servers.len() - 1) / 2;
        let is_full = |loss: &Loss| loss.nodes.len() >= minority && !loss.nodes.contains(&node);
        if state.losses.iter().any(is_full) {
            return;
        }
        state.losses.push(Loss {
            at: now,
            nodes: HashSet::new(),
        });
        for loss in &mut state.losses {
            loss.nodes.insert(node);
        }
        state.counts.losses += 1;
        let saved = state.saved[node].clone().filter(|_| state.happens(30));
        drop(state);
        match saved {
            Some(data) => self.servers[node].restart_with(data),
            None => self.servers[node].flush(),
        }
    }

    /// A read or write of one client.
    fn call(self: &Arc<Self>) {
        let (client, writes, begun, before) = {
            let mut state = self.state.lock();
            state.depth += 1;
            let client = state.below(CLIENTS);
            let writes = state.happens(60);
            (client, writes, self.now(), state.seen.clone())
        };
        let store = &self.clients.get().unwrap()[client];
        let deadline = self.later();
        let done = match writes {
            true => self.write(store, &before, deadline),
            false => self.read(store, &before, deadline),
        };
        let mut state = self.state.lock();
        state.depth -= 1;
        match done {
            true => state
                .losses
                .retain(|loss| begun <= loss.at.after(MAX_TTL / 3)),
            false => state.counts.failed += 1,
        }
    }

    /// Returns whether the call has succeeded.
    fn write(&self, store: &QuorumStore, before: &Seen, deadline: MonotonicTime) -> bool {
        let (token, value) = {
            let mut state = self.state.lock();
            let now = store.members[0].node.micros_at(self.now()).unwrap();
            if state.happens(40) {
                let last = *state.tokens.last().unwrap();
                let ahead = state.below(MAX_TTL.as_micros() as usize) as u64;
                let next = match self.has_times_as_tokens {
                    true => (now + ahead) << 10,
                    false => last,
                };
                state.tokens.push(next.max(last) + 1);
            }
            let recent = state.tokens.len().min(4);
            let back = state.below(recent);
            let token = match state.happens(2) {
                true => (now + 3 * MAX_TTL.as_micros() as u64) << 10,
                false => state.tokens[state.tokens.len() - 1 - back],
            };
            state.values += 1;
            (token, state.values)
        };
        let written: Arc<[u8]> = value.to_be_bytes().into();
        let key = key();
        let change = Change {
            key: &key,
            token,
            value: Some(&written),
            ttl: None,
        };
        let outcome = store.write_value(&change, deadline);
        let mut state = self.state.lock();
        match outcome {
            Ok(Reply::Done) => {
                assert!(
                    token >= before.token,
                    "accepted {token} after {}",
                    before.token
                );
                let seen = &mut state.seen;
                seen.token = seen.token.max(token);
                seen.replaced.extend(&before.values);
                seen.values.insert(value);
                state.counts.accepted += 1;
            }
            Ok(Reply::Stale { token: greater }) => {
                assert!(greater > token);
                state.seen.token = state.seen.token.max(greater);
                state.counts.stale += 1;
            }
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                let is_usual = error.is_unavailable() || error.kind() == ErrorKind::Protocol;
                assert!(is_usual, "{error}");
                return false;
            }
        }
        true
    }

    /// Returns whether the call has succeeded.
    fn read(&self, store: &QuorumStore, before: &Seen, deadline: MonotonicTime) -> bool {
        let deadline = store.value_deadline(deadline);
        let copy = match store.read_latest(&key(), deadline) {
            Ok(copy) => copy,
            Err(error) => {
                assert!(error.is_unavailable(), "{error}");
                return false;
            }
        };
        let mut state = self.state.lock();
        state.counts.read += 1;
        let Some(copy) = copy else {
            assert!(before.token == 0, "no value after {}", before.token);
            return true;
        };
        let version = copy.version;
        assert!(
            version.token >= before.token,
            "{version:?} after {}",
            before.token
        );
        assert!(
            Some(version) >= before.version,
            "{version:?} after {before:?}",
            before = before.version
        );
        let value = u64::from_be_bytes(copy.value.as_deref().unwrap().try_into().unwrap());
        assert!(!before.replaced.contains(&value), "{value} was replaced");
        let seen = &mut state.seen;
        seen.token = seen.token.max(version.token);
        seen.version = seen.version.max(Some(version));
        seen.values.insert(value);
        true
    }

    /// Ends all faults, and reads the value once more.
    fn end(&self) {
        self.calm();
        MemoryServer::advance_all(&self.servers, MAX_TTL * 2);
        let store = &self.clients.get().unwrap()[0];
        let before = self.state.lock().seen.clone();
        assert!(self.read(store, &before, self.later()));
    }

    fn calm(&self) {
        let mut state = self.state.lock();
        state.is_calm = true;
        state.chances = Chances::default();
        state.is_down.fill(false);
    }
}

/// Runs a history, and returns what has happened in it.
fn run(nodes: usize, seed: u64, has_times_as_tokens: bool) -> Counts {
    let world = World::new(nodes, seed, has_times_as_tokens);
    {
        let mut state = world.state.lock();
        let mut one_of = |chances: [usize; 3]| chances[state.below(3)];
        state.chances = Chances {
            loss_in_call: one_of([1, 5, 20]),
            call_in_call: one_of([2, 10, 20]),
            late: one_of([1, 10, 30]),
            lost_in_inner_call: one_of([0, 10, 40]),
            loss_after_late: one_of([0, 50, 100]),
            away: one_of([0, 50, 100]),
        };
    }
    for _ in 0..30 {
        world.call();
        world.interrupt();
        if world.state.lock().happens(20) {
            world.pass_time();
        }
    }
    world.end();
    world.state.lock().counts
}

#[test]
fn no_caller_sees_an_older_version_than_before() {
    for (nodes, has_times_as_tokens, histories) in [
        (3, true, 1000),
        (3, false, 100),
        (5, true, 100),
        (4, false, 100),
    ] {
        let mut all = Counts::default();
        for seed in 0..histories {
            let run = std::panic::catch_unwind(|| run(nodes, seed, has_times_as_tokens));
            let Ok(counts) = run else {
                panic!("{nodes} nodes, seed {seed}, times as tokens: {has_times_as_tokens}");
            };
            all.accepted += counts.accepted;
            all.stale += counts.stale;
            all.read += counts.read;
            all.failed += counts.failed;
            all.losses += counts.losses;
        }
        let often = [all.accepted, all.stale, all.read, all.losses];
        let is_often = |count: &usize| *count as u64 >= histories / 2;
        assert!(often.iter().all(is_often), "{nodes} nodes: {all:?}");
    }
}

/// A node loses its copy, another one never had it, and a client writes without a reply of the third.
#[test]
fn a_ttl_that_one_node_knows_is_kept() {
    let servers = MemoryServer::nodes(3);
    let config = Config {
        max_ttl: MAX_TTL,
        ..Config::default()
    };
    let store = QuorumStore::of_memory(&servers, &config, &HolderId::of_text("host/1/a"), None);
    let now = || servers[0].clock().now();
    let ask = |command| store.execute_one(command, now().after(MAX_TTL)).unwrap();
    let token = || store.members[0].node.micros_at(now()).unwrap() << 10;
    let write = |token, ttl| {
        let value = Some(Arc::from(&b"v"[..]));
        let key = key();
        ask(Command::Write {
            key,
            token,
            value,
            ttl,
        })
    };
    let ttl = 10 * MAX_TTL;
    servers[2].fail(ErrorKind::Unavailable);
    assert_eq!(write(token(), Some(ttl)), Reply::Done);
    servers[2].recover();
    servers[0].flush();
    MemoryServer::advance_all(&servers, 2 * MAX_TTL);
    let later = token();
    let version = Version {
        token: later,
        sequence: 0,
        writer: 7,
    };
    let copy = Arc::new(ValueCopy {
        version,
        value: Some(Arc::from(&b"w"[..])),
    });
    for member in &store.members {
        let copy = Command::WriteCopy {
            key: key(),
            copy: Arc::clone(&copy),
            ttl: None,
            mark: None,
        };
        let written = member.node.execute_one(copy, now().after(MAX_TTL));
        assert!(matches!(written, Ok(Reply::Copy(copy)) if copy.keeps(version)));
    }
    assert_eq!(write(later, None), Reply::Done);
    assert_eq!(
        ask(Command::Read { key: key() }),
        Reply::Value(b"v".to_vec())
    );
    MemoryServer::advance_all(&servers, ttl);
    assert_eq!(ask(Command::Read { key: key() }), Reply::Missing);
}

/// One node has confirmed a write. Then it loses its data, and gets back the value of before the write. So its reply
/// must not count together with a later one.
#[test]
fn a_caller_that_was_stopped_for_a_quarantine_fails() {
    let world = World::new(3, 1, true);
    world.calm();
    let stores = world.clients.get().unwrap();
    let write = |token: u64, text: &[u8]| {
        let change = Change {
            key: &key(),
            token,
            value: Some(&Arc::from(text)),
            ttl: None,
        };
        stores[0].write_value(&change, world.later())
    };
    let read = |world: &World| {
        let store = &world.clients.get().unwrap()[1];
        store.read_value(&key(), world.later()).unwrap()
    };
    let old = Reply::Value(b"old".to_vec());
    assert_eq!(write(7, b"old").unwrap(), Reply::Done);
    let is_old = old.clone();
    let plan: Plan = Box::new(move |world| {
        world.servers[0].flush();
        MemoryServer::advance_all(&world.servers, MAX_TTL * 2);
        assert_eq!(read(world), is_old);
        world.state.lock().is_down[2] = true;
    });
    // The write has read three copies, and node 0 has stored the new one.
    world.state.lock().plan = Some((5, plan));
    assert_eq!(write(8, b"new").unwrap_err().kind(), ErrorKind::Timeout);
    assert!(world.state.lock().plan.is_none());
    // Without node 1, the others have the old value.
    world.calm();
    world.state.lock().is_down[1] = true;
    assert_eq!(read(&world), old);
}
