//! Tests of a quorum on real servers: stopped, killed and restarted ones, and lost replies.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use leasehold_testbed::{Proxy, Server, eventually};

use super::*;
use crate::command::value::LockValue;
use crate::command::{Acquire, ForceUnlock, Held, Inspect, Mode, Probe, Release, Renew};
use crate::config::DEFAULT_MAX_REPLY;
use crate::quorum::slow_nodes::GRACE;
use crate::report::loss::LossReason;
use crate::store::{LateRelease, RenewalLimits};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);
const TTL: Duration = Duration::from_secs(60);
/// A time long before the test, and one long after it, in µs.
const PAST: &str = "1500000000000000";
const FUTURE: u64 = 5_000_000_000_000_000;
/// How far tokens may be ahead of the clocks in these tests, in µs.
const AHEAD: u64 = 10_000_000;

/// The client of a quorum.
struct Fixture {
    store: Arc<QuorumStore>,
    threads: ThreadGroup,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        Notifications::stop(&*self.store);
        self.store.end();
        self.store.close();
        self.threads
            .wait_until_ended(MonotonicTime::now().after(LONG));
    }
}

fn servers<const N: usize>() -> [Server; N] {
    let servers = [(); N].map(|()| Server::start().unwrap());
    servers.iter().for_each(end_quarantine);
    servers
}

fn ask(server: &Server, args: &[&str]) -> leasehold_testbed::Reply {
    server.command(args).unwrap()
}

/// Makes the server's data appear old, so that the node votes.
fn end_quarantine(server: &Server) {
    let info = ask(server, &["INFO", "server"]);
    let mut lines = info.as_text().unwrap().lines();
    let id = lines.find_map(|line| line.strip_prefix("run_id:"));
    let mark = format!("{} {PAST}", id.unwrap().trim());
    ask(server, &["SET", "p:~data", &mark]);
}

fn config(command_timeout: Duration) -> Config {
    Config {
        prefix: "p:".to_owned(),
        command_timeout,
        // A node's thread does not end while it tries to connect to a killed server.
        connect_timeout: command_timeout.min(Duration::from_secs(5)),
        ..Config::default()
    }
}

fn endpoints(urls: &[String], config: &Config) -> Vec<Endpoint> {
    let endpoint = |url: &String| Endpoint::new(url, config.connect_timeout, DEFAULT_MAX_REPLY);
    urls.iter().map(|url| endpoint(url).unwrap()).collect()
}

fn client(urls: &[String], config: &Config, quarantine: Duration) -> Fixture {
    client_with_reports(urls, config, quarantine, Reports::default())
}

fn client_with_reports(
    urls: &[String],
    config: &Config,
    quarantine: Duration,
    reports: Reports,
) -> Fixture {
    let holder = HolderId::of_this_process();
    let endpoints = endpoints(urls, config);
    let address = QuorumAddress::with_quarantine(endpoints, config, quarantine).unwrap();
    let store = QuorumStore::new(address, config, &holder, reports);
    let threads = ThreadGroup::new();
    store.start_threads(&threads).unwrap();
    Fixture { store, threads }
}

/// A client with time-outs longer than any pause of a busy machine.
fn patient(servers: &[Server]) -> Fixture {
    let config = config(LONG);
    client(&urls(servers), &config, config.max_ttl)
}

/// A client with long time-outs that reaches one of the servers through a proxy.
fn patient_behind_proxy(servers: &[Server], proxied: usize) -> (Fixture, Proxy) {
    let proxy = Proxy::start(servers[proxied].port()).unwrap();
    let mut urls = urls(servers);
    urls[proxied] = proxy.url();
    let config = config(LONG);
    (client(&urls, &config, config.max_ttl), proxy)
}

fn urls(servers: &[Server]) -> Vec<String> {
    servers.iter().map(Server::url).collect()
}

/// More locks than the pipelines of a node renew in one batch each.
const MOST_LOCKS: usize = 3 * RenewalLimits::USUAL.at_a_time;

fn key(name: &str) -> Key {
    Key::new("p:", name, 100).unwrap()
}

fn soon() -> MonotonicTime {
    MonotonicTime::now().after(LONG)
}

impl Fixture {
    fn acquire_by(&self, key: &Key, deadline: MonotonicTime) -> (LeaseId, Outcome) {
        self.acquire_for(key, TTL, deadline)
    }

    fn acquire_for(&self, key: &Key, ttl: Duration, deadline: MonotonicTime) -> (LeaseId, Outcome) {
        let lease = LeaseId::random();
        let acquire = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            ttl,
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        (lease, self.store.execute_one(acquire, deadline))
    }

    fn acquire(&self, key: &Key) -> (LeaseId, Outcome) {
        self.acquire_by(key, soon())
    }

    /// Acquires a free key. Returns the lease and the token. A node that is slower than a majority may still have the
    /// key of an earlier lease, so votes may be split at first.
    #[track_caller]
    fn lock(&self, key: &Key) -> (LeaseId, u64) {
        let until = soon();
        loop {
            match self.acquire(key) {
                (lease, Ok(Reply::Granted { token, .. })) => return (lease, token),
                (_, Ok(Reply::SplitVote { .. })) if MonotonicTime::now() < until => {}
                (_, outcome) => panic!("{outcome:?}"),
            }
        }
    }

    /// Ends the probes once they have read the clocks of the first `nodes` nodes, so that no probe comes among the
    /// requests that a test counts.
    fn end_probes(&self, nodes: usize) {
        let are_read = || {
            let states = self.store.nodes();
            states[..nodes].iter().all(|node| node.clock.is_some())
        };
        assert!(eventually(LONG, are_read));
        self.store.prober.stop();
    }

    /// Stops the threads of the nodes, and waits until they have ended, so that none of them serves a later request.
    fn stop_and_join_threads(&self) {
        self.store.stop_threads();
        assert!(self.threads.wait_until_ended(soon()));
    }

    fn ask(&self, command: Command) -> Outcome {
        self.store.execute_one(command, soon())
    }

    fn renew(&self, key: &Key, lease: LeaseId, token: u64) -> Said {
        said(self.ask(renewal(key, lease, token)))
    }

    /// Renews the lease until all nodes hold it. On a busy machine, a node may be slower than the majority.
    #[track_caller]
    fn hold_on_all(&self, servers: &[Server], key: &Key, lease: LeaseId, token: u64) {
        assert!(eventually(LONG, || {
            assert_eq!(self.renew(key, lease, token), Ok(Reply::Done));
            holders(servers, key, lease) == servers.len()
        }));
        self.end_late_holds();
    }

    /// Locks the key on all nodes, stops the third node, and renews the lease. The renewal for the stopped node becomes
    /// a late hold (see `late_holds`).
    #[track_caller]
    fn lock_with_a_late_hold(&self, servers: &[Server; 3], key: &Key) -> LeaseId {
        let (lease, token) = self.lock_on_all(servers, key);
        self.store.prober.stop();
        servers[2].stop();
        assert_eq!(self.renew(key, lease, token), Ok(Reply::Done));
        assert_eq!(self.store.late_holds.count(), 1);
        lease
    }

    /// Ends late holds: after a test has deleted a key on a node, a late hold could set it again.
    #[track_caller]
    fn end_late_holds(&self) {
        self.store.late_holds.end_all();
        self.flush_nodes();
    }

    /// Waits until the nodes have carried out all requests that were written.
    #[track_caller]
    fn flush_nodes(&self) {
        let flush = |member: &Arc<Member>| member.node.flush(soon()).unwrap();
        self.store.members.iter().for_each(flush);
    }

    /// Locks the key on all nodes.
    #[track_caller]
    fn lock_on_all(&self, servers: &[Server], key: &Key) -> (LeaseId, u64) {
        let (lease, token) = self.lock(key);
        self.hold_on_all(servers, key, lease, token);
        (lease, token)
    }

    /// Waits until a stopped node counts as failing.
    #[track_caller]
    fn fail_soon(&self, node: usize) {
        assert!(eventually(LONG, || {
            let (lease, _) = self.acquire(&key("other"));
            self.unlock(&key("other"), lease).unwrap();
            self.store.members[node].health.is_failing()
        }));
    }

    fn unlock(&self, key: &Key, lease: LeaseId) -> Said {
        said(self.ask(Command::Release(release(key, lease))))
    }
}

/// An outcome with the text of its error.
type Said = Result<Reply, String>;

fn said(outcome: Outcome) -> Said {
    outcome.map_err(|error| error.to_string())
}

fn renewal(key: &Key, lease: LeaseId, token: u64) -> Command {
    renewal_for(key, lease, token, TTL)
}

fn renewal_for(key: &Key, lease: LeaseId, token: u64, ttl: Duration) -> Command {
    Command::Renew(Renew {
        mode: Mode::Exclusive,
        key: key.clone(),
        lease,
        token,
        ttl,
        replicas: None,
    })
}

fn release(key: &Key, lease: LeaseId) -> Release {
    Release::unheld(key.clone(), lease, MonotonicTime::now().after(TTL))
}

fn value(server: &Server, key: &Key) -> Option<String> {
    let value = ask(server, &["GET", key.in_redis()]);
    value.as_text().map(str::to_owned)
}

/// Whether the lease holds the key on the server.
fn is_held(server: &Server, key: &Key, lease: LeaseId) -> bool {
    value(server, key)
        .is_some_and(|value| crate::command::value::is_held_by(value.as_bytes(), lease))
}

fn holders(servers: &[Server], key: &Key, lease: LeaseId) -> usize {
    let holds = |server: &&Server| is_held(server, key, lease);
    servers.iter().filter(holds).count()
}

fn is_free(server: &Server, key: &Key) -> bool {
    value(server, key).is_none()
}

#[track_caller]
fn assert_granted(outcome: Outcome) -> u64 {
    match outcome {
        Ok(Reply::Granted { token, .. }) => token,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_no_quorum(outcome: Outcome, part: &str) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
    assert!(error.message().contains(part), "{error}");
}

fn contended(outcome: &Outcome) -> bool {
    matches!(
        outcome,
        Ok(Reply::Contended { queued: None, .. } | Reply::SplitVote { .. })
    )
}

#[test]
fn a_lock_and_its_release_take_two_requests_per_node() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    // Each node connects and replies with its time.
    let (lease, mut last) = client.lock(&key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    client.end_probes(servers.len());
    client.flush_nodes();
    let calls = |server: &Server| server.calls("evalsha").unwrap();
    // Returns how many nodes had the key. On a busy machine, a node may be slower than the majority.
    let mut lock_and_unlock = || {
        let before = servers.each_ref().map(calls);
        let (lease, token) = client.lock(&key);
        assert!(token > last);
        last = token;
        let held = servers.iter().filter_map(|server| value(server, &key));
        let tokens = held.filter_map(|value| LockValue::parse(value.as_bytes(), 0));
        let tokens: Vec<u64> = tokens.filter_map(|value| value.token).collect();
        assert!(
            tokens.len() >= 2 && tokens.iter().all(|one| *one == token),
            "{tokens:?}"
        );
        assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
        let are_free = || servers.iter().all(|server| is_free(server, &key));
        assert!(eventually(LONG, are_free));
        client.flush_nodes();
        for (server, before) in servers.iter().zip(before) {
            assert!(calls(server) - before <= 2);
        }
        tokens.len()
    };
    assert!(eventually(LONG, || lock_and_unlock() == 3));
}

#[test]
fn another_lease_is_contended() {
    let servers = servers::<3>();
    let [first, second] = [(); 2].map(|()| patient(&servers));
    let key = key("k");
    let (lease, token) = first.lock_on_all(&servers, &key);
    let (other, outcome) = second.acquire(&key);
    let Ok(Reply::Contended {
        expires_in, queued, ..
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    assert!(expires_in <= TTL && expires_in > TTL / 2 && queued.is_none());
    assert_eq!(holders(&servers, &key, other), 0);
    assert!(matches!(
        second.unlock(&key, other),
        Ok(Reply::Taken { by: Some(_) })
    ));
    first.store.send_release(release(&key, lease));
    let mut next = None;
    assert!(eventually(LONG, || {
        next = Some(second.acquire(&key).1);
        !contended(next.as_ref().unwrap())
    }));
    assert!(assert_granted(next.unwrap()) > token);
}

/// Locks and unlocks with a client whose threads have stopped. Returns which nodes had the key, or `None` if a reply
/// came late, as on a busy machine.
fn lock_without_threads(
    servers: &[Server; 3],
    prepare: impl FnOnce(&QuorumStore),
) -> Option<[bool; 3]> {
    let client = patient(servers);
    let key = key("k");
    let (lease, _) = client.lock_on_all(servers, &key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    client.stop_and_join_threads();
    prepare(&client.store);
    let in_a_second = || MonotonicTime::now().after(LONG / 20);
    let (lease, outcome) = client.acquire_by(&key, in_a_second());
    let held = servers
        .each_ref()
        .map(|server| is_held(server, &key, lease));
    let released = client
        .store
        .execute_one(Command::Release(release(&key, lease)), in_a_second());
    for server in servers {
        ask(server, &["DEL", key.in_redis()]);
    }
    let is_granted = outcome.is_ok_and(|reply| is_granted(&reply));
    (is_granted && matches!(released, Ok(Reply::Done))).then_some(held)
}

#[test]
fn callers_need_no_other_thread_while_nodes_reply_soon() {
    let servers = servers();
    let lock = || lock_without_threads(&servers, |_| {});
    assert!(eventually(LONG, || lock() == Some([true; 3])));
}

#[test]
fn a_silent_node_is_left_to_its_thread() {
    let servers = servers();
    let lock = || {
        lock_without_threads(&servers, |store| {
            *store.members[1].silent_until.lock() = Some(soon());
        })
    };
    let mut held = None;
    assert!(eventually(LONG, || {
        held = lock();
        held.is_some()
    }));
    assert_eq!(held, Some([true, false, true]));
}

/// A node replies 7.5 ms late, because a proxy delays requests and replies. A caller waits for 5 ms. If a caller waited
/// for twice that time, the node would not become silent.
#[test]
fn a_slightly_slower_node_becomes_silent() {
    let servers = servers::<3>();
    let (client, proxy) = patient_behind_proxy(&servers, 2);
    let key = key("k");
    let (lease, _) = client.lock_on_all(&servers, &key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    let slow = &client.store.members[2];
    assert!(eventually(LONG, || !slow.is_silent()));
    proxy.delay(GRACE * 3 / 4);
    let becomes_silent = || {
        *slow.silent_until.lock() = None;
        let (lease, _) = client.lock(&key);
        let is_silent = slow.is_silent();
        assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
        // An earlier request would make the next one slower.
        assert!(eventually(LONG, || proxy.held_bytes() == 0));
        is_silent
    };
    // On a busy machine, the caller may run late and find the reply.
    let always = || (0..10).all(|_| becomes_silent());
    assert!(eventually(LONG, always));
}

/// The client writes the requests to the stopped minority, and does not wait for their replies.
#[test]
fn calls_do_not_wait_for_a_stopped_minority() {
    let servers = servers::<5>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, mut last) = client.lock(&key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    let stopped = &servers[3..];
    stopped.iter().for_each(Server::stop);
    let started = Instant::now();
    for _ in 0..50 {
        let (lease, token) = client.lock(&key);
        assert!(token > last);
        last = token;
        assert_eq!(client.renew(&key, lease, token), Ok(Reply::Done));
        assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    }
    // One wait for a stopped server would take the whole time-out.
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    let (lease, token) = client.lock(&key);
    stopped.iter().for_each(Server::resume);
    // After the next renewal, the nodes that are back hold the lease.
    client.hold_on_all(&servers, &key, lease, token);
    client.store.send_release(release(&key, lease));
    let are_free = || servers.iter().all(|server| is_free(server, &key));
    assert!(eventually(LONG, are_free), "nothing remains");
}

/// Three servers, of which the second has the key of another client.
fn servers_with_a_taken_key(key: &Key) -> [Server; 3] {
    let servers = servers::<3>();
    let other = patient(&servers);
    other.lock_on_all(&servers, key);
    for free in [&servers[0], &servers[2]] {
        ask(free, &["DEL", key.in_redis()]);
    }
    servers
}

/// Only the stopped node could decide the vote.
#[test]
fn split_votes_do_not_wait_for_a_stopped_node() {
    let key = key("k");
    let servers = servers_with_a_taken_key(&key);
    let client = patient(&servers);
    let (lease, _) = client.lock(&self::key("other"));
    assert_eq!(client.unlock(&self::key("other"), lease), Ok(Reply::Done));
    servers[0].stop();
    let started = Instant::now();
    // Some of these callers wait until a probe has found that the node is stopped.
    for _ in 0..2 * WAIT_FOR_SILENT_EVERY {
        let (_, outcome) = client.acquire(&key);
        let split = matches!(
            outcome,
            Ok(Reply::SplitVote {
                may_be_taken: false,
                ..
            })
        );
        assert!(split, "{outcome:?}");
        assert!(eventually(LONG, || is_free(&servers[2], &key)));
    }
    // One wait for a stopped server would take the whole time-out.
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    servers[0].resume();
}

#[test]
fn one_split_vote_in_sixteen_waits() {
    let servers = servers::<3>();
    let client = patient(&servers);
    client.lock(&key("k"));
    let store = &client.store;
    for _ in 0..2 {
        let wait = |_| store.grace_after_split_vote(SlowNodes::Leave);
        let waits: Vec<Duration> = (0..WAIT_FOR_SILENT_EVERY).filter_map(wait).collect();
        assert_eq!(waits, [LONGEST_GRACE]);
    }
    let not_failing = || store.not_failing(&[0, 1, 2]);
    assert!(eventually(LONG, || not_failing() == [true, true, true]));
    servers[0].stop();
    client.fail_soon(0);
    assert!(eventually(LONG, || not_failing() == [false, true, true]));
    servers[0].resume();
}

/// A client has left its key on the second node. So a caller needs the vote of the first one, which is slow.
#[test]
fn a_slow_node_decides_split_votes_sometimes() {
    let key = key("k");
    let servers = servers_with_a_taken_key(&key);
    let (client, proxy) = patient_behind_proxy(&servers, 0);
    client.lock(&self::key("other"));
    proxy.delay(2 * GRACE);
    // On a busy machine, the vote may come too late for a caller that waits.
    let mut votes = (0..4 * WAIT_FOR_SILENT_EVERY).map(|_| client.acquire(&key).1);
    assert!(contended(&votes.next().unwrap()));
    assert!(votes.any(|vote| vote.is_ok_and(|reply| is_granted(&reply))));
}

/// One node is down, and another one is slow. Only the vote of the slow node shows that the key is taken.
#[test]
fn a_slow_node_votes_for_the_holder_of_a_key() {
    let mut servers = servers::<3>();
    let holder = patient(&servers);
    let key = key("k");
    holder.lock_on_all(&servers, &key);
    let (client, proxy) = patient_behind_proxy(&servers, 2);
    client.lock(&self::key("other"));
    servers[0].kill();
    proxy.delay(4 * GRACE);
    for _ in 0..3 {
        let (_, outcome) = client.acquire(&key);
        assert!(contended(&outcome), "{outcome:?}");
    }
}

/// The third node is stopped, and the others disagree until the lock has changed hands.
#[test]
fn an_inspection_asks_again_while_nodes_disagree() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    client.lock_on_all(&servers, &key);
    servers[2].stop();
    ask(&servers[0], &["DEL", key.in_redis()]);
    let asked = || servers[0].calls("evalsha").unwrap();
    let before = asked();
    std::thread::scope(|scope| {
        let found = scope.spawn(|| client.ask(Command::Inspect(Inspect { key: key.clone() })));
        assert!(eventually(LONG, || asked() >= before + 2), "it asks again");
        ask(&servers[1], &["DEL", key.in_redis()]);
        assert_eq!(found.join().unwrap().unwrap(), Reply::Missing);
    });
    servers[2].resume();
}

/// The third node is failing, so no attempt waits for it.
#[test]
fn an_inspection_uses_its_time_while_nodes_disagree() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    client.lock_on_all(&servers, &key);
    servers[2].stop();
    client.fail_soon(2);
    ask(&servers[0], &["DEL", key.in_redis()]);
    // This is longer than a busy machine stops a thread, since a node has to vote in the first attempt.
    let (inspect, time) = (Command::Inspect(Inspect { key }), 20 * SHORT);
    let started = Instant::now();
    let outcome = client
        .store
        .execute_one(inspect, MonotonicTime::now().after(time));
    assert_no_quorum(outcome, "held");
    assert!(started.elapsed() >= time - 2 * LONGEST_INSPECTION_PAUSE);
    servers[2].resume();
}

/// The first two nodes always disagree, so the third one decides. It is slower than callers wait, and the client knows
/// that it is silent.
struct SlowDecider {
    servers: [Server; 3],
    client: Fixture,
    _proxy: Proxy,
    key: Key,
    lease: LeaseId,
    token: u64,
}

impl SlowDecider {
    fn new() -> Self {
        let servers = servers::<3>();
        let (client, proxy) = patient_behind_proxy(&servers, 2);
        let key = key("k");
        let (lease, token) = client.lock_on_all(&servers, &key);
        // The probes connect first, so that requests do not wait for logins.
        client.end_probes(servers.len());
        ask(&servers[0], &["DEL", key.in_redis()]);
        proxy.delay(SHORT);
        *client.store.members[2].silent_until.lock() = Some(soon());
        Self {
            servers,
            client,
            _proxy: proxy,
            key,
            lease,
            token,
        }
    }
}

#[test]
fn an_inspection_waits_for_a_deciding_slow_node() {
    let it = SlowDecider::new();
    let key = it.key.clone();
    let found = it.client.ask(Command::Inspect(Inspect { key })).unwrap();
    assert!(matches!(found, Reply::Found { value, .. } if value.lease == it.lease));
}

#[test]
fn an_extension_waits_for_a_deciding_slow_node() {
    let it = SlowDecider::new();
    let renewed = it.client.renew(&it.key, it.lease, it.token);
    assert_eq!(renewed, Ok(Reply::Done));
}

/// The slow node needs 200 ms: more than an eighth of the ttl, and less than a third.
#[test]
fn renewals_wait_for_a_deciding_slow_node() {
    let it = SlowDecider::new();
    let ttl = Duration::from_millis(1_500);
    let renew = || {
        let renewal = renewal_for(&it.key, it.lease, it.token, ttl);
        let mut requests = [Request::new(renewal, soon())];
        it.client.store.execute(&mut requests);
        let [renewed] = requests.map(Request::into_outcome);
        // A renewal has set the key on the first node. Without that key, the slow node decides again.
        ask(&it.servers[0], &["DEL", it.key.in_redis()]);
        renewed.is_ok_and(|reply| reply == Reply::Done)
    };
    // On a busy machine, the reply may come too late.
    assert!(eventually(LONG, renew));
}

/// A probe waits for four round trips of the node, as the last probe has measured them.
#[test]
fn a_distant_node_is_not_failing() {
    let servers = servers::<3>();
    let (client, proxy) = patient_behind_proxy(&servers, 2);
    let distant = &client.store.members[2];
    proxy.delay(3 * SHORT / 2);
    client.lock(&key("k"));
    let is_read = || client.store.nodes()[2].clock.is_some();
    assert!(eventually(LONG, is_read));
    // The reply to the next probe takes longer than the shortest limit.
    proxy.delay(3 * SHORT);
    let noted = distant.health.record(&[None], true, &client.store.clock);
    client
        .store
        .prober
        .follow_up(noted, distant, &client.store.clock);
    let is_known = || distant.health.is_failing() || distant.health.probe_at().is_none();
    assert!(eventually(LONG, is_known));
    assert!(!distant.health.is_failing());
}

/// The third node is silent, and the votes for the first lease are split. Its renewals wait for that node, but only so
/// long that a lease with a short ttl does not end.
#[test]
fn renewals_wait_a_part_of_the_shortest_ttl() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let keys = ["split", "held"].map(key);
    let leases = keys.each_ref().map(|key| client.lock_on_all(&servers, key));
    ask(&servers[1], &["DEL", keys[0].in_redis()]);
    client.store.prober.stop();
    servers[2].stop();
    let renew = |lock: usize, ttl| {
        let (lease, token) = leases[lock];
        let mut requests = [Request::new(
            renewal_for(&keys[lock], lease, token, ttl),
            soon(),
        )];
        let started = Instant::now();
        client.store.execute(&mut requests);
        let [renewed] = requests.map(Request::into_outcome);
        match lock {
            0 => assert_no_quorum(renewed, "2 of 3 are needed"),
            _ => assert_eq!(renewed.unwrap(), Reply::Done),
        }
        started.elapsed()
    };
    assert!(renew(0, TTL) >= LONGEST_GRACE);
    // On a busy machine, each renewal may take longer.
    assert!(eventually(LONG, || renew(1, TTL) < LONGEST_GRACE));
    assert!(eventually(LONG, || {
        renew(1, LONGEST_GRACE);
        renew(0, TTL) < LONGEST_GRACE
    }));
    let shortest = || client.store.ttls.shortest(MonotonicTime::now());
    assert!(eventually(LONG, || shortest() == TTL));
    assert!(renew(0, TTL) >= LONGEST_GRACE, "the short ttl has ended");
    // A lock with a short ttl also limits the waits before its own first renewal.
    assert!(eventually(LONG, || {
        let (lease, outcome) = client.acquire_for(&key("new"), LONGEST_GRACE, soon());
        let took = renew(0, TTL);
        // On a busy machine, the grant may come too late, or the ttl may end before.
        let unlocked = client.unlock(&key("new"), lease);
        outcome.is_ok_and(|reply| is_granted(&reply))
            && unlocked == Ok(Reply::Done)
            && took < LONGEST_GRACE
    }));
    servers[2].resume();
}

/// The third node has lost the keys. It is stopped while the locks are renewed, and carries the renewals out later.
#[test]
fn renewals_bring_keys_to_a_node_that_is_late() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let leases: Vec<_> = (0..MOST_LOCKS)
        .map(|n| {
            let key = key(&format!("k{n}"));
            let (lease, token) = client.lock(&key);
            (key, lease, token)
        })
        .collect();
    let renew = || {
        let requests = leases.iter().map(|(key, lease, token)| {
            let renewal = renewal(key, *lease, *token);
            Request::new(renewal, soon())
        });
        let mut requests: Vec<Request> = requests.collect();
        client.store.execute(&mut requests);
        let outcomes = requests.into_iter().map(Request::into_outcome);
        outcomes.for_each(|outcome| assert_eq!(outcome.unwrap(), Reply::Done));
    };
    let has_all = |server: &Server| {
        let is_held = |(key, lease, _): &(Key, LeaseId, u64)| is_held(server, key, *lease);
        leases.iter().all(is_held)
    };
    // A node that was slower than the majority may lack some keys until the first renewal.
    renew();
    assert!(eventually(LONG, || servers.iter().all(has_all)));
    client.end_late_holds();
    client.store.prober.stop();
    for (key, ..) in &leases {
        ask(&servers[2], &["DEL", key.in_redis()]);
    }
    servers[2].stop();
    (0..3).for_each(|_| renew());
    // One hold for each lease.
    assert_eq!(client.store.late_holds.count(), MOST_LOCKS);
    servers[2].resume();
    assert!(eventually(LONG, || has_all(&servers[2])));
}

/// The queue of a node that is away must not collect the renewals of all held locks.
#[test]
fn a_failing_node_gets_no_late_hold() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, token) = client.lock_on_all(&servers, &key);
    servers[2].stop();
    client.fail_soon(2);
    assert_eq!(client.renew(&key, lease, token), Ok(Reply::Done));
    assert_eq!(client.store.late_holds.count(), 0);
    servers[2].resume();
}

/// The client's own lock is released by force while the third node is stopped.
#[test]
fn a_forced_unlock_withdraws_late_holds() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let lease = client.lock_with_a_late_hold(&servers, &key);
    let force = Command::ForceUnlock(ForceUnlock {
        share: None,
        key: key.clone(),
        lease,
        must_notify: false,
    });
    assert_eq!(said(client.ask(force)), Ok(Reply::Done));
    assert_eq!(client.store.late_holds.count(), 0);
    servers[2].resume();
    assert!(eventually(LONG, || is_free(&servers[2], &key)));
}

/// The third node is stopped, and has many renewals to carry out when it continues. Locks that were released in the
/// meantime do not come back: their releases are written before the last of these renewals.
#[test]
fn a_late_renewal_sets_no_released_key() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let keys: Vec<Key> = (0..MOST_LOCKS).map(|n| key(&format!("k{n}"))).collect();
    let leases: Vec<_> = keys.iter().map(|key| client.lock(key)).collect();
    client.store.prober.stop();
    servers[2].stop();
    let requests = keys.iter().zip(&leases);
    let requests = requests.map(|(key, (lease, token))| renewal(key, *lease, *token));
    let mut requests: Vec<Request> = requests.map(|one| Request::new(one, soon())).collect();
    client.store.execute(&mut requests);
    let released = MOST_LOCKS - 20..MOST_LOCKS;
    for n in released.clone() {
        client.store.send_release(release(&keys[n], leases[n].0));
    }
    servers[2].resume();
    client.store.members[2].node.flush(soon()).unwrap();
    assert!(is_held(&servers[2], &keys[0], leases[0].0));
    assert!(keys[released].iter().all(|key| is_free(&servers[2], key)));
}

/// The third node is stopped, and one lease has its key only on the first node, so the votes for this lease stay split.
/// The other renewals of its batch do not wait for the stopped node.
#[test]
fn a_split_vote_delays_no_other_renewal() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let keys = ["a", "b"].map(key);
    let leases = keys.each_ref().map(|key| {
        let (lease, token) = client.lock_on_all(&servers, key);
        (lease, token)
    });
    ask(&servers[1], &["DEL", keys[0].in_redis()]);
    servers[2].stop();
    let request = |key: &Key, (lease, token)| Request::new(renewal(key, lease, token), soon());
    let mut requests = [0, 1].map(|n| request(&keys[n], leases[n]));
    let started = Instant::now();
    client.store.execute(&mut requests);
    // One wait for the stopped server would take the whole time-out.
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    let [split, held] = requests.map(Request::into_outcome);
    assert_no_quorum(split, "not held");
    assert_eq!(held.unwrap(), Reply::Done);
    servers[2].resume();
}

#[test]
fn a_stopped_majority_leaves_no_key_behind() {
    let servers = servers::<3>();
    let timeout = Duration::from_secs(1);
    let client = client(&urls(&servers), &config(timeout), TTL);
    let key = key("k");
    let (held, token) = client.lock(&key);
    servers[..2].iter().for_each(Server::stop);
    let started = Instant::now();
    let other = self::key("other");
    let deadline = || MonotonicTime::now().after(timeout);
    let (lease, outcome) = client.acquire_by(&other, deadline());
    assert_no_quorum(outcome, "2 of 3 are needed");
    assert!(started.elapsed() < timeout + LONG / 4);
    let renewed = client
        .store
        .execute_one(renewal(&key, held, token), deadline());
    assert_no_quorum(renewed, "2 of 3 are needed");
    let released = client
        .store
        .execute_one(Command::Release(release(&key, held)), deadline());
    assert_no_quorum(released, "2 of 3 are needed");
    assert!(eventually(LONG, || is_free(&servers[2], &other)));
    servers[..2].iter().for_each(Server::resume);
    let are_free = |key: &Key| servers.iter().all(|server| is_free(server, key));
    assert!(eventually(LONG, || are_free(&key) && are_free(&other)));
    assert_eq!(holders(&servers, &other, lease), 0);
    // The client continues to work with these servers.
    assert!(eventually(LONG, || {
        let (lease, outcome) = client.acquire(&other);
        outcome.is_ok() && client.unlock(&other, lease) == Ok(Reply::Done)
    }));
}

/// A majority is stopped until after the client has ended its undos, and then reads the proposal.
#[test]
fn a_majority_that_continues_late_grants_nothing() {
    let servers = servers::<3>();
    let config = config(Duration::from_secs(2));
    let client = client(&urls(&servers), &config, TTL);
    let [key, other] = ["k", "other"].map(key);
    client.lock_on_all(&servers, &other);
    client.end_probes(servers.len());
    let stopped = &servers[..2];
    let calls = || [0, 1].map(|n: usize| stopped[n].calls("evalsha").unwrap());
    let counters = || [0, 1].map(|n: usize| ask(&stopped[n], &["ZSCORE", "p:~fence", "t"]));
    let (before, counters_before) = (calls(), counters());
    stopped.iter().for_each(Server::stop);
    let ttl = Duration::from_secs(6);
    let acquire = Command::Acquire(Acquire {
        mode: Mode::Exclusive,
        key: key.clone(),
        lease: LeaseId::random(),
        ttl,
        queue_mode: QueueMode::None,
        link: crate::command::Link::Alone,
        replicas: None,
    });
    let deadline = MonotonicTime::now().after(config.command_timeout);
    let outcome = client.store.execute_one(acquire, deadline);
    assert_no_quorum(outcome, "2 of 3 are needed");
    // The undos fail until the ttl has ended.
    let fail = || client.store.failed_releases() > 0;
    assert!(eventually(LONG, fail));
    assert!(eventually(LONG, || !fail()));
    stopped.iter().for_each(Server::resume);
    let have_read = || {
        calls()
            .iter()
            .zip(before)
            .all(|(now, before)| *now > before)
    };
    assert!(eventually(LONG, have_read));
    assert!(servers.iter().all(|server| is_free(server, &key)));
    assert_eq!(counters(), counters_before, "a grant raises the counter");
    patient(&servers).lock(&key);
}

/// From the client's point of view, the clocks of all nodes are set forward by an hour.
#[test]
fn a_clock_that_was_set_forward_refuses_no_caller() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, _) = client.lock(&key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    client.end_probes(servers.len());
    for member in &client.store.members {
        let now = MonotonicTime::now();
        let shown = member.node.micros_at(now).unwrap();
        member.node.record_micros(shown - 3_600_000_000, now, now);
    }
    let calls = || servers.each_ref().map(|one| one.calls("evalsha").unwrap());
    let before = calls();
    let (lease, token) = client.lock(&key);
    let is_asked_twice = |(now, before): (u64, u64)| now >= before + 2;
    let asked_twice = calls()
        .into_iter()
        .zip(before)
        .filter(|one| is_asked_twice(*one));
    assert!(
        asked_twice.count() >= 2,
        "a majority has refused the first request"
    );
    // A node that was slower than the majority both times may still count as an hour behind.
    assert_eq!(client.renew(&key, lease, token), Ok(Reply::Done));
}

/// All nodes grant the key, and the replies of two of them are lost.
#[test]
fn a_lost_reply_leaves_no_key_behind() {
    let servers = servers::<3>();
    let proxies = [1, 2].map(|n: usize| Proxy::start(servers[n].port()).unwrap());
    let urls = [servers[0].url(), proxies[0].url(), proxies[1].url()];
    let client = client(&urls, &config(LONG), TTL);
    let key = key("k");
    let limit = Duration::from_secs(3);
    let lose_replies = |cuts| {
        // All nodes are connected then.
        let (lease, _) = client.lock_on_all(&servers, &key);
        assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
        proxies.iter().for_each(|proxy| proxy.hold_replies(true));
        let deadline = MonotonicTime::now().after(limit);
        let (lease, granted_by_all, outcome) = std::thread::scope(|scope| {
            let acquires = scope.spawn(|| client.acquire_by(&key, deadline));
            let granted = || servers.iter().all(|server| !is_free(server, &key));
            let granted = eventually(limit, granted);
            let (lease, outcome) = acquires.join().unwrap();
            (lease, granted, outcome)
        });
        if granted_by_all {
            assert_no_quorum(outcome, "no reply in time");
        }
        if cuts {
            proxies.iter().for_each(Proxy::cut_all);
        }
        proxies.iter().for_each(|proxy| proxy.hold_replies(false));
        let is_released = || holders(&servers, &key, lease) == 0;
        assert!(eventually(LONG, is_released), "cut: {cuts}");
        granted_by_all
    };
    for cuts in [false, true] {
        // A busy machine may hold the reply to an earlier request, and then the acquire is not written to that node.
        assert!((0..10).any(|_| lose_replies(cuts)), "cut: {cuts}");
    }
}

/// Raises the fence counter of the second node, so that the tokens of the nodes differ. Returns the greatest token, in
/// µs.
fn make_tokens_differ(servers: &[Server]) -> u64 {
    let ahead = micros_now(&servers[0]) + AHEAD;
    for (server, counter) in servers.iter().zip([ahead, ahead + 100]) {
        count_from(server, counter);
    }
    ahead + 100
}

fn count_from(server: &Server, counter: u64) {
    ask(server, &["ZADD", "p:~fence", &counter.to_string(), "t"]);
}

fn micros_now(server: &Server) -> u64 {
    let time = ask(server, &["TIME"]);
    let leasehold_testbed::Reply::Array(time) = &time else {
        panic!("{time:?}");
    };
    let number = |n: usize| time[n].as_text().unwrap().parse::<u64>().unwrap();
    1_000_000 * number(0) + number(1)
}

#[test]
fn a_token_is_written_back_to_a_majority() {
    let mut servers = servers::<3>();
    servers[2].kill();
    let last = make_tokens_differ(&servers);
    let client = patient(&servers);
    let key = key("k");
    let (lease, token) = client.lock(&key);
    assert_eq!(micros_of(token), last + 1);
    for server in &servers[..2] {
        let counter = ask(server, &["ZSCORE", "p:~fence", "t"]).as_int();
        assert_eq!(counter, Some((last + 1) as i64));
        assert!(is_held(server, &key, lease));
        let stored = value(server, &key).unwrap();
        assert!(stored.contains(&(last + 1).to_string()), "{stored}");
    }
    // The next proposal is later than both counters, so one round trip is enough.
    client.end_probes(2);
    let calls = || [0, 1].map(|n: usize| servers[n].calls("evalsha").unwrap());
    let before = calls();
    let (_, next) = client.lock(&self::key("next"));
    assert!(next > token);
    assert_eq!(calls(), before.map(|before| before + 1));
}

/// The counter of one node is years ahead, and another node is away.
#[test]
fn a_counter_far_ahead_spoils_no_other_counter() {
    let servers = servers::<3>();
    count_from(&servers[0], FUTURE);
    servers[2].stop();
    let client = client(&urls(&servers), &config(Duration::from_secs(2)), TTL);
    let key = key("k");
    let deadline = MonotonicTime::now().after(LONG);
    let (_, outcome) = client.acquire_by(&key, deadline);
    let address = format!("127.0.0.1:{}", servers[1].port());
    assert_no_quorum(
        outcome,
        &format!("{address}: the token is later than its clock by more than `max_ttl`"),
    );
    let counter = |server: &Server| ask(server, &["ZSCORE", "p:~fence", "t"]).as_int();
    assert!(counter(&servers[1]).is_none_or(|counter| counter < FUTURE as i64));
    servers[2].resume();
    let mut token = None;
    assert!(eventually(LONG, || {
        let (_, outcome) = client.acquire(&key);
        token = outcome.ok().and_then(|reply| match reply {
            Reply::Granted { token, .. } => Some(token),
            _ => None,
        });
        token.is_some()
    }));
    assert!(token.is_some_and(|token| micros_of(token) < FUTURE));
}

/// An ACL forbids the node with the smaller token to store the greater one.
#[test]
fn a_refused_write_back_says_why() {
    let mut servers = servers::<3>();
    servers[2].kill();
    make_tokens_differ(&servers);
    ask(&servers[0], &["ACL", "SETUSER", "default", "-setrange"]);
    let client = patient(&servers);
    let key = key("k");
    let deadline = MonotonicTime::now().after(LONG);
    let (lease, outcome) = client.acquire_by(&key, deadline);
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
    let text = error.to_string();
    let agrees = |server: &Server| text.contains(&format!("127.0.0.1:{}: agrees", server.port()));
    assert!(!agrees(&servers[0]) && agrees(&servers[1]), "{text}");
    assert!(text.contains("can't run this command"), "{text}");
    assert!(eventually(LONG, || holders(&servers[..2], &key, lease) == 0));
}

/// The second step of a grant fails, so the client does not rely on the grant.
#[test]
fn a_grant_without_its_write_back_is_released() {
    let mut servers = servers::<3>();
    servers[2].kill();
    let proxy = Proxy::start(servers[0].port()).unwrap();
    let urls = [proxy.url(), servers[1].url(), servers[2].url()];
    let client = client(&urls, &config(LONG), TTL);
    let key = key("k");
    let (lease, _) = client.lock(&key);
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    // The proxy would also hold the reply to a probe, and requests behind it.
    client.end_probes(2);
    count_from(&servers[1], micros_now(&servers[1]) + AHEAD);
    // The first node executes the proposal. Its reply arrives after the node has stopped, so the node executes no hold.
    proxy.hold_replies(true);
    let deadline = MonotonicTime::now().after(Duration::from_secs(3));
    let (lease, outcome) = std::thread::scope(|scope| {
        let acquires = scope.spawn(|| client.acquire_by(&key, deadline));
        assert!(eventually(LONG, || !is_free(&servers[0], &key)));
        servers[0].stop();
        proxy.hold_replies(false);
        acquires.join().unwrap()
    });
    assert_no_quorum(outcome, "2 of 3 are needed");
    assert!(eventually(LONG, || !is_held(&servers[1], &key, lease)));
    servers[0].resume();
    assert!(eventually(LONG, || !is_held(&servers[0], &key, lease)));
}

#[test]
fn a_renewal_needs_a_majority() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, token) = client.lock(&key);
    let renew = || client.renew(&key, lease, token);
    client.hold_on_all(&servers, &key, lease, token);
    // A node that has lost the key sets it again.
    ask(&servers[0], &["DEL", key.in_redis()]);
    ask(&servers[1], &["PEXPIRE", key.in_redis(), "10000"]);
    client.hold_on_all(&servers, &key, lease, token);
    let ttl = || {
        ask(&servers[1], &["PTTL", key.in_redis()])
            .as_int()
            .unwrap()
    };
    assert!(eventually(LONG, || {
        assert_eq!(renew(), Ok(Reply::Done));
        ttl() > 30_000
    }));
    let theirs = format!("lh1 {} {FUTURE} host/9/x", LeaseId::random());
    let take = |server: &Server| ask(server, &["SET", key.in_redis(), &theirs]);
    take(&servers[0]);
    assert_eq!(renew(), Ok(Reply::Done), "one node of three");
    take(&servers[1]);
    let by = Some(HolderId::of_text("host/9/x"));
    assert_eq!(renew(), Ok(Reply::Taken { by }));
    assert_eq!(value(&servers[1], &key), Some(theirs));
}

#[test]
fn renewals_share_a_call_per_node() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let keys: Vec<Key> = (0..100).map(|n| key(&n.to_string())).collect();
    let held: Vec<(LeaseId, u64)> = keys.iter().map(|key| client.lock(key)).collect();
    // One of the leases is lost on two nodes.
    for server in &servers[..2] {
        ask(server, &["SET", keys[7].in_redis(), "theirs"]);
        let theirs = format!("lh1 {} {FUTURE} host/9/x", LeaseId::random());
        ask(server, &["SET", keys[8].in_redis(), &theirs]);
    }
    let renewal = |(key, (lease, token)): (&Key, &(LeaseId, u64))| {
        Request::new(renewal(key, *lease, *token), soon())
    };
    let mut requests: Vec<Request> = keys.iter().zip(&held).map(renewal).collect();
    let calls = |server: &Server| server.calls("evalsha").unwrap();
    let before = servers.each_ref().map(calls);
    client.store.execute(&mut requests);
    for (server, before) in servers.iter().zip(before) {
        // Each of the two pipelines of a node writes one batch, or a few.
        assert!(calls(server) - before < 10);
    }
    for (n, request) in requests.into_iter().enumerate() {
        match (n, request.into_outcome()) {
            // A value of another program is an error, and no loss.
            (7, outcome) => assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Protocol),
            (8, outcome) => assert!(matches!(outcome, Ok(Reply::Taken { .. })), "{outcome:?}"),
            (_, outcome) => assert_eq!(said(outcome), Ok(Reply::Done), "{n}"),
        }
    }
}

#[test]
fn a_release_needs_a_majority_of_nodes() {
    let mut servers = servers::<3>();
    let config = config(Duration::from_secs(2));
    let client = client(&urls(&servers), &config, config.max_ttl);
    let [first, second] = ["a", "b"].map(key);
    let ((one, _), (two, _)) = (client.lock(&first), client.lock(&second));
    servers[0].kill();
    // The third node may lack the key, which counts as a release.
    assert_eq!(client.unlock(&first, one), Ok(Reply::Done));
    assert_eq!(client.unlock(&first, one), Ok(Reply::Missing));
    servers[1].kill();
    let deadline = MonotonicTime::now().after(config.command_timeout);
    let released = client
        .store
        .execute_one(Command::Release(release(&second, two)), deadline);
    assert_no_quorum(released, &servers[1].port().to_string());
    assert!(eventually(LONG, || is_free(&servers[2], &second)));
}

/// A majority restarts without its data. These nodes abstain, so they cannot have granted the lock to another lease, and
/// its release succeeds.
#[test]
fn nodes_without_data_report_no_loss() {
    let mut servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, _) = client.lock_on_all(&servers, &key);
    servers[..2]
        .iter_mut()
        .for_each(|one| one.restart().unwrap());
    let inspect = || client.ask(Command::Inspect(Inspect { key: key.clone() }));
    // The first call may use a connection from before the restart, and fail.
    let mut inspected = inspect();
    assert!(eventually(LONG, || {
        inspected = inspect();
        matches!(&inspected, Err(error) if error.message().matches("may have lost").count() == 2)
    }));
    assert_no_quorum(inspected, "may have lost data, and does not vote for");
    assert_eq!(client.unlock(&key, lease), Ok(Reply::Done));
    assert!(is_free(&servers[2], &key));
    assert_no_quorum(
        client.ask(Command::Release(release(&key, lease))),
        "may have lost data",
    );
}

#[test]
fn a_majority_says_who_holds_the_lock() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let inspect = || said(client.ask(Command::Inspect(Inspect { key: key.clone() })));
    assert_eq!(inspect(), Ok(Reply::Missing));
    let (lease, token) = client.lock_on_all(&servers, &key);
    ask(&servers[0], &["DEL", key.in_redis()]);
    let Ok(Reply::Found { value, expires_in }) = inspect() else {
        panic!("two nodes have the key");
    };
    assert_eq!((value.lease, value.token), (lease, Some(token)));
    assert!(expires_in.is_some_and(|left| left > TTL / 2 && left <= TTL));
    ask(&servers[1], &["DEL", key.in_redis()]);
    assert_eq!(inspect(), Ok(Reply::Missing));
}

#[test]
fn a_lock_is_unlocked_by_force_on_all_nodes() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, _) = client.lock(&key);
    let force = |must_notify| {
        client.ask(Command::ForceUnlock(ForceUnlock {
            share: None,
            key: key.clone(),
            lease,
            must_notify,
        }))
    };
    // A forced release changes nothing while the holder's client may still be connecting.
    assert!(matches!(
        force(true),
        Ok(Reply::NotListening { .. } | Reply::Done)
    ));
    assert!(matches!(force(false), Ok(Reply::Done)));
    // A call ends with the replies of a majority.
    let are_free = || servers.iter().all(|server| is_free(server, &key));
    assert!(eventually(LONG, are_free));
    client.lock(&key);
}

#[test]
fn a_forced_release_reaches_a_node_that_is_back() {
    let servers = servers::<3>();
    let [client, operator] = [(); 2].map(|()| patient(&servers));
    let key = key("k");
    let (lease, _) = client.lock_on_all(&servers, &key);
    // Stops each node in turn, since the calls are sent, and end, in the order of the nodes.
    for stopped in &servers {
        stopped.stop();
        let force = Command::ForceUnlock(ForceUnlock {
            share: None,
            key: key.clone(),
            lease,
            must_notify: false,
        });
        let forced = operator.ask(force);
        assert!(
            matches!(forced, Ok(Reply::Done | Reply::Missing)),
            "{forced:?}"
        );
        stopped.resume();
        assert!(eventually(LONG, || is_free(stopped, &key)));
    }
}

#[test]
fn other_requests_are_not_supported() {
    let servers = servers::<1>();
    let client = patient(&servers);
    let kind = |command: Command| client.ask(command).unwrap_err().kind();
    let key = key("k");
    let vote = Command::Probe(Probe { mark: key.clone() });
    assert_eq!(kind(vote), ErrorKind::Unsupported);
    let acquire = Command::Acquire(Acquire {
        mode: Mode::Exclusive,
        key,
        lease: LeaseId::random(),
        ttl: TTL,
        queue_mode: QueueMode::None,
        link: crate::command::Link::Alone,
        replicas: crate::config::Replicas::new(1, TTL),
    });
    assert_eq!(kind(acquire), ErrorKind::Unsupported);
    let (submitted, completions) = Submitted::new(1);
    let inspect = Command::Inspect(Inspect {
        key: self::key("k"),
    });
    client.store.submit(
        completions
            .into_iter()
            .map(|one| (inspect.clone(), one))
            .collect(),
    );
    let outcomes = submitted.leave();
    assert!(matches!(&outcomes[..], [Some(Err(_))]), "{outcomes:?}");
}

#[test]
fn a_quorum_has_one_to_nine_different_nodes() {
    let config = config(LONG);
    let refused = |urls: &[String]| {
        let endpoints = endpoints(urls, &config);
        let address = QuorumAddress::new(endpoints, &config);
        address.err().map(|error| error.message().to_owned())
    };
    let urls: Vec<String> = (1..=10).map(|n| format!("redis://127.0.0.1:{n}")).collect();
    assert_eq!(refused(&urls[..9]), None);
    assert_eq!(refused(&urls[..1]), None);
    let wanted = |given: &str| Some(format!("the number of nodes must be 1 to 9, not {given}"));
    assert_eq!(refused(&[]), wanted("0"));
    assert_eq!(refused(&urls), wanted("10"));
    let twice = [urls[0].clone(), urls[1].clone(), urls[0].clone()];
    let [lower, upper] = ["redis://host:1", "redis://HOST:1"].map(str::to_owned);
    for same in [twice.to_vec(), vec![lower, upper]] {
        let message = refused(&same).unwrap();
        assert!(
            message.contains("different servers, not twice"),
            "{message}"
        );
    }
    // The case of letters in paths counts.
    if cfg!(unix) {
        let paths = ["unix:///tmp/a", "unix:///tmp/A"].map(str::to_owned);
        assert_eq!(refused(&paths), None);
    }
}

#[test]
fn a_ping_and_a_flush_need_a_majority() {
    let mut servers = servers::<3>();
    let timeout = Duration::from_secs(2);
    let client = client(&urls(&servers), &config(timeout), TTL);
    let deadline = || MonotonicTime::now().after(timeout);
    assert!(client.store.ping().is_ok());
    let found = client.store.check_environment().unwrap().unwrap();
    let of = |server: &Server| {
        let address = format!("127.0.0.1:{}", server.port());
        found
            .iter()
            .any(|finding| finding.to_string().contains(&address))
    };
    assert!(servers.iter().all(of), "{found:?}");
    client.lock(&key("k"));
    servers[0].kill();
    let found = client.store.check_environment().unwrap().unwrap();
    let is_unchecked = |server: &Server| {
        let address = format!("127.0.0.1:{}: was not checked: ", server.port());
        found
            .iter()
            .any(|finding| finding.to_string().starts_with(&address))
    };
    let unchecked: Vec<bool> = servers.iter().map(is_unchecked).collect();
    assert_eq!(unchecked, [true, false, false], "{found:?}");
    assert!(client.store.ping().is_ok());
    assert_eq!(
        client
            .store
            .flush(deadline())
            .err()
            .map(|error| error.kind()),
        None
    );
    servers[1].kill();
    assert_no_quorum(
        client.store.ping().map(|_| Reply::Done),
        "2 of 3 are needed",
    );
}

/// A node without replies must not collect the callers of each health check.
#[test]
fn callers_of_pings_have_a_bound() {
    let pings = Pings::default();
    let starts = (0..2 * MOST_PINGS).map(|_| pings.join(bounded(1).0));
    assert_eq!(starts.filter(|starts| *starts).count(), 1);
    assert_eq!(pings.take().len(), MOST_PINGS);
}

/// The first ping ends before the slow node has replied to it.
#[test]
fn an_earlier_ping_of_a_slow_node_counts() {
    let mut servers = servers::<3>();
    let client = patient(&servers);
    servers[2].stop();
    assert!(client.store.ping().is_ok());
    servers[0].kill();
    let [_, _, slow] = &servers;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Both pings wait for this node.
            let callers = || client.store.members[2].pings.0.lock().len();
            assert!(eventually(LONG, || callers() == 2));
            slow.resume();
        });
        let took = client.store.ping();
        assert!(took.is_ok(), "{took:?}");
    });
}

/// On a busy machine, a majority of the nodes may be silent when a client ends.
#[test]
fn a_flush_waits_for_a_silent_majority() {
    let servers = servers::<3>();
    let client = &patient(&servers);
    client.lock(&key("k"));
    servers[..2].iter().for_each(Server::stop);
    // Until this deadline, both nodes count as silent, not as failing. The flush waits for the release of this acquire.
    let deadline = MonotonicTime::now().after(Duration::from_millis(300));
    let (_, outcome) = client.acquire_by(&key("other"), deadline);
    assert_no_quorum(outcome, "2 of 3 are needed");
    std::thread::scope(|scope| {
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        let flush = scope.spawn(move || client.store.flush(far));
        // The flush waits until its deadline: longer than for a silent node that a majority does not need.
        let soon = MonotonicTime::now().after(5 * FAILING_FLUSH);
        assert!(client.store.flush(soon).is_err());
        assert!(MonotonicTime::now() >= soon);
        servers[..2].iter().for_each(Server::resume);
        assert!(flush.join().unwrap().is_ok());
    });
}

/// Whether a flush waits for the third node, behind a proxy that `slow_down` makes slower. If this machine stands still
/// for half a second, the flush does not wait, because the node appears to make no progress.
fn flush_waits_for_a_node(slow_down: impl Fn(&Fixture, &Proxy)) -> bool {
    let servers = servers::<3>();
    let (client, proxy) = patient_behind_proxy(&servers, 2);
    let key = key("k");
    let (lease, _) = client.lock_on_all(&servers, &key);
    client.end_probes(servers.len());
    slow_down(&client, &proxy);
    client.store.send_release(release(&key, lease));
    let far = MonotonicTime::now().after(4 * LONG);
    client.store.flush(far).unwrap();
    // The connection is still open.
    let is_open = client.store.members[2].node.ping().is_ok();
    holders(&servers, &key, lease) == 0 && is_open
}

/// One node confirms its release later than the majority.
#[test]
fn a_flush_waits_for_a_slower_node() {
    let slow_down = |_: &Fixture, proxy: &Proxy| proxy.delay(20 * GRACE);
    assert!((0..5).any(|_| flush_waits_for_a_node(slow_down)));
}

/// The slower node needs some seconds for its releases, and the others some milliseconds.
#[test]
fn a_flush_waits_while_a_node_makes_progress() {
    let slow_down = |client: &Fixture, proxy: &Proxy| {
        proxy.delay(6 * GRACE);
        for _ in 0..10_000 {
            let other = release(&key("k"), LeaseId::random());
            client.store.send_release(other);
        }
    };
    assert!((0..5).any(|_| flush_waits_for_a_node(slow_down)));
}

#[test]
fn a_flush_closes_connections_to_a_node_without_replies() {
    let servers = servers::<3>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, _) = client.lock_on_all(&servers, &key);
    servers[2].stop();
    client.store.send_release(release(&key, lease));
    let started = Instant::now();
    client
        .store
        .flush(MonotonicTime::now().after(4 * LONG))
        .unwrap();
    // A wait for the stopped node would end after one time-out.
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    client.stop_and_join_threads();
    servers[2].resume();
    let [first, second, closed] = [0, 1, 2].map(|node| client.store.members[node].node.ping());
    let closed = closed.unwrap_err().to_string();
    assert!(closed.contains("the client has ended"), "{closed}");
    assert!(first.is_ok() && second.is_ok());
}

/// Two clients, two threads each, one key: no two of them hold it at the same time, and tokens increase.
#[test]
fn contending_clients_exclude_each_other() {
    let servers = servers::<3>();
    let clients = [(); 2].map(|()| patient(&servers));
    let key = key("k");
    let (is_held, last) = (AtomicBool::new(false), AtomicU64::new(0));
    let grants = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in clients.iter().cycle().take(4) {
            scope.spawn(|| {
                while grants.load(Ordering::SeqCst) < 200 {
                    match client.acquire(&key) {
                        (lease, Ok(Reply::Granted { token, .. })) => {
                            assert!(!is_held.swap(true, Ordering::SeqCst), "two holders");
                            assert!(last.swap(token, Ordering::SeqCst) < token);
                            grants.fetch_add(1, Ordering::SeqCst);
                            assert!(is_held.swap(false, Ordering::SeqCst));
                            client.store.send_release(release(&key, lease));
                        }
                        (_, outcome) => assert!(contended(&outcome), "{outcome:?}"),
                    }
                    let pause = rand_pause();
                    crate::util::sync::park_timeout(pause);
                }
            });
        }
    });
    assert!(eventually(LONG, || servers
        .iter()
        .all(|server| is_free(server, &key))));
}

/// A random pause of up to 3 ms, so that the clients do not split the votes again and again.
fn rand_pause() -> Duration {
    let random = LeaseId::random().to_string();
    let random = u64::from_str_radix(&random[26..], 16).unwrap();
    Duration::from_micros(random % 3_000)
}

/// Two clients. The first one holds the key on two nodes of three, and one of these has restarted without its data.
struct AfterARestart {
    servers: [Server; 3],
    clients: [Fixture; 2],
    key: Key,
    lease: LeaseId,
    token: u64,
}

fn after_a_restart(quarantine: Duration) -> AfterARestart {
    let mut servers = servers::<3>();
    let config = config(LONG);
    let clients = [(); 2].map(|()| client(&urls(&servers), &config, quarantine));
    let key = key("k");
    let (lease, token) = clients[0].lock(&key);
    clients[0].hold_on_all(&servers, &key, lease, token);
    // This is the same as if the request to the third node had been lost.
    ask(&servers[2], &["DEL", key.in_redis()]);
    servers[1].restart().unwrap();
    AfterARestart {
        servers,
        clients,
        key,
        lease,
        token,
    }
}

/// Shows that a quarantine has to last as long as the longest ttl.
#[test]
fn after_a_short_quarantine_a_restart_grants_a_lock_twice() {
    // The quarantine, here 1 s, is also the most by which a token may be ahead of a node's clock.
    let it = after_a_restart(Duration::from_secs(1));
    let is_granted = || {
        matches!(
            it.clients[1].acquire(&it.key),
            (_, Ok(Reply::Granted { .. }))
        )
    };
    assert!(eventually(LONG, is_granted));
}

#[test]
fn a_restarted_node_does_not_vote_in_its_quarantine() {
    let it = after_a_restart(TTL);
    // The first node replies that the lock is taken, and the second one abstains.
    let [first, second] = &it.clients;
    let (other, outcome) = second.acquire(&it.key);
    assert!(contended(&outcome), "{outcome:?}");
    assert!(eventually(LONG, || {
        holders(&it.servers, &it.key, other) == 0
    }));
    // The first client still has its lock, and sets it again on the third node.
    let is_renewed = || match first.renew(&it.key, it.lease, it.token) {
        Ok(renewed) => {
            assert_eq!(renewed, Reply::Done);
            true
        }
        // On a busy machine, the third node may be too slow.
        Err(error) => {
            assert!(error.contains("of 3 are needed"), "{error}");
            false
        }
    };
    assert!(eventually(LONG, is_renewed));
}

/// Locks a key with one client and restarts all nodes, with their data on disk. Returns the outcome of another client's
/// acquire.
fn acquire_after_restarts_with_data(assume_durable_nodes: bool) -> Outcome {
    let start = |()| {
        let server = Server::builder().arg("appendonly", "yes");
        server.arg("appendfsync", "always").start().unwrap()
    };
    let mut servers = [(); 3].map(start);
    servers.iter().for_each(end_quarantine);
    let config = Config {
        assume_durable_nodes,
        ..config(LONG)
    };
    let [first, second] = [(); 2].map(|()| client(&urls(&servers), &config, TTL));
    let key = key("k");
    let (lease, token) = first.lock_on_all(&servers, &key);
    for server in &mut servers {
        server.restart().unwrap();
    }
    // A restarted server loads its data first.
    assert!(eventually(LONG, || holders(&servers, &key, lease) == 3));
    let (_, outcome) = second.acquire(&key);
    if contended(&outcome) {
        assert_eq!(first.unlock(&key, lease), Ok(Reply::Done));
        let (_, next) = second.lock(&key);
        assert!(next > token);
    }
    outcome
}

#[test]
fn a_restarted_node_that_keeps_its_data_votes_at_once() {
    let outcome = acquire_after_restarts_with_data(true);
    assert!(contended(&outcome), "{outcome:?}");
    let outcome = acquire_after_restarts_with_data(false);
    assert_no_quorum(outcome, "may have lost data, and does not vote for");
}

#[test]
fn a_restarted_node_votes_after_its_quarantine() {
    let mut servers = servers::<3>();
    let quarantine = Duration::from_secs(2);
    let client = client(&urls(&servers), &config(LONG), quarantine);
    let key = key("k");
    let (lease, token) = client.lock_on_all(&servers, &key);
    let started = Instant::now();
    servers[0].restart().unwrap();
    assert!(eventually(LONG, || {
        assert_eq!(client.renew(&key, lease, token), Ok(Reply::Done));
        is_held(&servers[0], &key, lease)
    }));
    assert!(started.elapsed() >= quarantine, "{:?}", started.elapsed());
    // All data is lost at once: no node votes. The reason is in the error.
    for server in &servers {
        ask(server, &["FLUSHALL"]);
    }
    let (_, outcome) = client.acquire(&self::key("other"));
    assert_no_quorum(outcome, "may have lost data, and does not vote for");
}

#[test]
fn a_loss_names_the_new_holder() {
    let servers = servers::<1>();
    let client = patient(&servers);
    let key = key("k");
    let (lease, token) = client.lock(&key);
    let theirs = format!("lh1 {} {FUTURE} host/9/x", LeaseId::random());
    ask(&servers[0], &["SET", key.in_redis(), &theirs]);
    let Ok(Reply::Taken { by }) = client.renew(&key, lease, token) else {
        panic!("the key is taken");
    };
    assert!(
        LossReason::TakenOver { by }
            .to_string()
            .contains("host/9/x")
    );
}

fn release_of_guard(key: &Key, lease: LeaseId, token: u64, until: MonotonicTime) -> Release {
    Release {
        min_hold: Duration::ZERO,
        mode: Mode::Exclusive,
        key: key.clone(),
        lease,
        until,
        held: Some(Held {
            token,
            is_token_in_value: true,
            others_queued: false,
            valid_until: MonotonicTime::at_tick(0),
        }),
        queued: None,
    }
}

/// Entries of ended releases do not fill the memory.
#[test]
fn ended_releases_of_guards_are_forgotten() {
    let mut servers = servers::<3>();
    let texts: Arc<Mutex<Vec<&str>>> = Arc::default();
    let reported = Arc::clone(&texts);
    let reports = Reports::new(ReportedReleases::Late, move |report| {
        if let Report::Release(_, _, report) = report {
            reported.lock().push(match report {
                LateRelease::Delayed(_) => "delayed",
                other => panic!("{other:?}"),
            });
        }
    });
    let config = config(Duration::from_secs(2));
    let client = client_with_reports(&urls(&servers), &config, config.max_ttl, reports);
    let open = || client.store.late_releases.open();
    // Grants 20 locks, makes nodes fail, and releases the locks. Waits for at most `limit` for each release.
    let release_all = |fail: &mut dyn FnMut(), ttl: Duration, limit: Duration| {
        let grant = |n| {
            let key = key(&format!("k{n}"));
            let (lease, token) = client.lock(&key);
            (key, lease, token)
        };
        let locks: Vec<_> = (0..20).map(grant).collect();
        fail();
        for (n, (key, lease, token)) in locks.iter().enumerate() {
            let until = MonotonicTime::now().after(ttl);
            let release = release_of_guard(key, *lease, *token, until);
            if n % 2 == 0 {
                client.store.send_release(release);
            } else {
                let deadline = MonotonicTime::now().after(limit);
                let _ = client
                    .store
                    .execute_one(Command::Release(release), deadline);
            }
        }
    };
    release_all(&mut || {}, TTL, LONG);
    assert!(eventually(LONG, || open() == 0));
    release_all(&mut || servers[2].stop(), TTL, LONG);
    assert_eq!(open(), 20);
    servers[2].resume();
    assert!(eventually(LONG, || open() == 0));
    assert_eq!(*texts.lock(), [""; 0]);
    // First no majority replies, and later all nodes do.
    let stop = |servers: &[Server]| servers[1..].iter().for_each(Server::stop);
    release_all(&mut || stop(&servers), TTL, SHORT);
    servers[1..].iter().for_each(Server::resume);
    assert!(eventually(LONG, || open() == 0));
    // The leases end while two nodes are away.
    let mut kill = || servers[1..].iter_mut().for_each(Server::kill);
    release_all(&mut kill, SHORT, SHORT);
    assert!(eventually(LONG, || open() == 0));
    let reports = texts.lock().len();
    assert!((30..=40).contains(&reports), "{reports}");
}
