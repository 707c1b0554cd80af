//! Tests of a quorum of servers in memory: nodes that fail, hang, and restart with and without their data.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::QuorumStore;
use crate::command::value::micros_of;
use crate::command::{Acquire, GrantMessage, Inspect, Mode, Outcome, Propose, Release, Renew};
use crate::command::{Command, QueueMode, Reply};
use crate::config::Config;
use crate::config::key::Key;
use crate::memory::MemoryServer;
use crate::process::threads::ThreadGroup;
use crate::report::error::ErrorKind;
use crate::store::{KeyState, Listener, Notifications, Reports, ServerId, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};

const TTL: Duration = Duration::from_secs(30);
const MAX_TTL: Duration = Duration::from_secs(60);
/// The command time-out for requests to nodes that hang.
const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(20);

/// The nodes of a quorum, and two of its clients.
struct Fixture {
    nodes: Vec<Arc<MemoryServer>>,
    clients: [Arc<QuorumStore>; 2],
    timeout: Duration,
}

fn quorum(nodes: usize) -> Fixture {
    let nodes = MemoryServer::nodes(nodes);
    let config = Config {
        max_ttl: MAX_TTL,
        ..Config::default()
    };
    let client = |name| {
        QuorumStore::of_memory(
            &nodes,
            &config,
            &HolderId::of_text(name),
            Reports::default(),
        )
    };
    Fixture {
        clients: ["host/1/a", "host/2/b"].map(client),
        nodes,
        timeout: LONG,
    }
}

fn key() -> Key {
    Key::new("p:", "k", 100).unwrap()
}

impl Fixture {
    fn ask(&self, client: usize, command: Command) -> Outcome {
        let deadline = self.nodes[0].clock().now().after(self.timeout);
        self.clients[client].execute_one(command, deadline)
    }

    fn acquire(&self, client: usize) -> (LeaseId, Outcome) {
        let lease = LeaseId::random();
        let acquire = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key(),
            lease,
            ttl: TTL,
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        (lease, self.ask(client, acquire))
    }

    #[track_caller]
    fn lock(&self, client: usize) -> (LeaseId, u64) {
        match self.acquire(client) {
            (lease, Ok(Reply::Granted { token, .. })) => (lease, token),
            (_, other) => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn assert_contended(&self, client: usize) {
        let (_, outcome) = self.acquire(client);
        assert!(
            matches!(
                outcome,
                Ok(Reply::Contended { .. } | Reply::SplitVote { .. })
            ),
            "{outcome:?}"
        );
    }

    /// Checks that an acquire fails, and that its error contains `part`: how many nodes have to agree.
    #[track_caller]
    fn assert_no_majority(&self, client: usize, part: &str) {
        let (_, outcome) = self.acquire(client);
        let error = outcome.unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        assert!(error.message().contains(part), "{error}");
    }

    fn renew(&self, client: usize, (lease, token): (LeaseId, u64)) -> Outcome {
        let renew = Command::Renew(Renew {
            mode: Mode::Exclusive,
            key: key(),
            lease,
            token,
            ttl: TTL,
            replicas: None,
        });
        self.ask(client, renew)
    }

    fn unlock(&self, client: usize, (lease, _): (LeaseId, u64)) -> Outcome {
        let release = Command::Release(Release::unheld(
            key(),
            lease,
            self.nodes[0].clock().now().after(TTL),
        ));
        self.ask(client, release)
    }

    /// Makes a node grant another key under a token of at least `micros`.
    fn raise_counter(&self, node: usize, micros: u64) {
        let proposal = Command::Propose(Propose {
            key: Key::new("p:", "other", 100).unwrap(),
            lease: LeaseId::random(),
            ttl: TTL,
            micros,
            until: u64::MAX,
        });
        let deadline = self.nodes[node].clock().now().after(self.timeout);
        let member = &self.clients[0].members[node];
        let granted = member.node.execute_one(proposal, deadline);
        assert!(granted.is_ok_and(|reply| super::is_granted(&reply)));
    }

    fn advance(&self, by: Duration) {
        MemoryServer::advance_all(&self.nodes, by);
    }
}

fn is_done(outcome: &Outcome) -> bool {
    matches!(outcome, Ok(Reply::Done))
}

#[test]
fn a_memory_quorum_grants_renews_and_releases() {
    for nodes in [1, 3, 4, 5, 9] {
        let quorum = quorum(nodes);
        let held = quorum.lock(0);
        quorum.assert_contended(1);
        quorum.advance(TTL * 2 / 3);
        assert!(is_done(&quorum.renew(0, held)));
        quorum.advance(TTL * 2 / 3);
        quorum.assert_contended(1);
        assert!(is_done(&quorum.unlock(0, held)));
        let (_, token) = quorum.lock(1);
        assert!(token > held.1);
        quorum.advance(TTL + Duration::from_millis(2));
        let (_, last) = quorum.lock(0);
        assert!(last > token);
    }
}

#[test]
fn a_failed_minority_delays_nobody() {
    let mut quorum = quorum(5);
    quorum.timeout = LONG;
    quorum.nodes[1].fail(ErrorKind::Unavailable);
    quorum.nodes[4].hang();
    let begun = MonotonicTime::now();
    let mut last = 0;
    for _ in 0..50 {
        let held = quorum.lock(0);
        assert!(held.1 > last);
        last = held.1;
        assert!(is_done(&quorum.renew(0, held)));
        assert!(is_done(&quorum.unlock(0, held)));
    }
    assert!(MonotonicTime::now().since(begun) < LONG / 2);
    // When the nodes are back, the releases reach them.
    quorum.nodes.iter().for_each(|node| node.recover());
    assert!(quorum.nodes.iter().all(|node| !node.delete("p:k")));
}

#[test]
fn a_failed_majority_refuses_and_nothing_remains() {
    let mut quorum = quorum(3);
    let held = quorum.lock(0);
    for (first, second) in [(0, 1), (1, 2), (0, 2)] {
        quorum.nodes[first].hang();
        quorum.nodes[second].fail(ErrorKind::Unavailable);
        quorum.timeout = SHORT;
        assert!(quorum.renew(0, held).unwrap_err().is_unavailable());
        quorum.assert_no_majority(1, "no reply in time");
        quorum.timeout = LONG;
        quorum.nodes.iter().for_each(|node| node.recover());
    }
    assert!(is_done(&quorum.renew(0, held)));
    assert!(is_done(&quorum.unlock(0, held)));
    assert!(quorum.nodes.iter().all(|node| !node.delete("p:k")));
}

/// The majorities of two leases share a node. If that node has lost its data, only the quarantine prevents a second
/// grant.
#[test]
fn a_restart_without_data_grants_no_lock_twice() {
    let quorum = quorum(3);
    let held = quorum.lock(0);
    quorum.nodes[0].delete("p:k");
    quorum.nodes[1].flush();
    quorum.assert_contended(1);
    quorum.advance(TTL / 2);
    assert!(is_done(&quorum.renew(0, held)));
    quorum.assert_contended(1);
}

#[test]
fn a_restarted_node_abstains_for_a_quarantine() {
    for keeps_data in [true, false] {
        let quorum = quorum(3);
        let (_, first) = quorum.lock(0);
        for node in &quorum.nodes[..2] {
            match keeps_data {
                true => node.restart(),
                false => node.flush(),
            }
        }
        quorum.assert_no_majority(1, "may have lost data");
        // All leases of before the restart end in the quarantine.
        quorum.advance(MAX_TTL - Duration::from_secs(5));
        quorum.assert_no_majority(1, "may have lost data");
        quorum.advance(Duration::from_secs(10));
        let (_, second) = quorum.lock(1);
        assert!(second > first, "keeps its data: {keeps_data}");
    }
}

/// A node without its data reports neither that a lock is free nor that it is lost.
#[test]
fn nodes_without_data_report_no_free_lock() {
    let quorum = quorum(3);
    let inspect = || quorum.ask(1, Command::Inspect(Inspect { key: key() }));
    let held = quorum.lock(0);
    quorum.nodes[0].flush();
    let found = inspect();
    assert!(matches!(found, Ok(Reply::Found { .. })), "{found:?}");
    quorum.nodes[1].flush();
    let unknown = inspect().unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NoQuorum);
    assert!(
        unknown.message().contains("may have lost data"),
        "{unknown}"
    );
    assert!(is_done(&quorum.unlock(0, held)));
    let unknown = quorum.unlock(0, held).unwrap_err();
    assert!(
        unknown.message().contains("may have lost data"),
        "{unknown}"
    );
    quorum.advance(MAX_TTL);
    assert_eq!(inspect().unwrap(), Reply::Missing);
    assert_eq!(quorum.unlock(0, held).unwrap(), Reply::Missing);
}

/// The counter of one node is ahead. The majorities of the two grants share another node, which learns the token of the
/// first grant only by the write-back.
#[test]
fn a_token_is_written_back_to_a_majority_in_memory() {
    let quorum = quorum(3);
    let now = quorum.clients[0].members[0]
        .node
        .micros_at(quorum.nodes[0].clock().now());
    let ahead = now.expect("a server in memory knows its time") + 10_000_000;
    quorum.raise_counter(0, ahead);
    quorum.nodes[2].fail(ErrorKind::Unavailable);
    let first = quorum.lock(0);
    assert!(micros_of(first.1) > ahead);
    assert!(is_done(&quorum.unlock(0, first)));
    quorum.nodes[2].recover();
    quorum.nodes[0].fail(ErrorKind::Unavailable);
    // The other client does not know of the first grant.
    let (_, second) = quorum.lock(1);
    assert!(micros_of(second) > micros_of(first.1));
}

/// The clock of one node is an hour ahead, and another node is away. The counters of the other nodes do not follow.
#[test]
fn a_clock_far_ahead_spoils_no_counter() {
    let quorum = quorum(3);
    let hour = Duration::from_secs(3600);
    quorum.nodes[0].set_ahead(hour);
    quorum.nodes[2].fail(ErrorKind::Unavailable);
    quorum.assert_no_majority(
        0,
        "memory node 1: the token is later than its clock by more than",
    );
    quorum.nodes[2].recover();
    let near = |token| {
        let node = &quorum.clients[0].members[1].node;
        let now = node.micros_at(quorum.nodes[0].clock().now()).unwrap();
        micros_of(token) < now + 10_000_000
    };
    for client in [0, 1] {
        let held = quorum.lock(client);
        assert!(near(held.1), "{held:?}");
        assert!(is_done(&quorum.unlock(client, held)));
    }
    // The clock is right again, but the node's counter stays ahead.
    quorum.nodes[0].set_ahead(Duration::ZERO);
    let held = quorum.lock(1);
    assert!(near(held.1), "{held:?}");
    assert!(is_done(&quorum.unlock(1, held)));
}

/// Counts the calls about a moved clock.
#[derive(Default)]
struct Moves(AtomicUsize);

impl Listener for Moves {
    fn changed(&self, _: ServerId, _: &Key) -> Option<TrackedKey> {
        None
    }
    fn granted(&self, _: ServerId, _: &Key, _: LeaseId, _: GrantMessage) {}
    fn near(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn called(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn forced(&self, _: ServerId, _: &Key, _: LeaseStart, _: HolderId) {}
    fn all_changed(&self, _: ServerId) {}
    fn moved(&self, _: &dyn Fn(&Key) -> bool) {}
    fn seen(&self, _: ServerId, _: &TrackedKey, _: KeyState<'_>) {}
    fn clock_moved(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn each_client_hears_once_of_a_moved_clock() {
    let quorum = quorum(3);
    let threads = ThreadGroup::new();
    let moves = [0, 1].map(|client| {
        let moves = Arc::new(Moves::default());
        let listener: Arc<dyn Listener> = Arc::clone(&moves) as _;
        quorum.clients[client].start(&threads, listener).unwrap();
        moves
    });
    quorum.nodes[0].fail(ErrorKind::Unavailable);
    quorum.advance(TTL);
    for client in [0, 1] {
        assert_eq!(moves[client].0.load(Ordering::SeqCst), 1);
        Notifications::stop(&*quorum.clients[client]);
    }
}
