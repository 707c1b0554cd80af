//! Tests of the pipelines for callers and for renewals, on a real Redis.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::AtomicBool;
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{Cluster, Proxy, Server, eventually};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use redis::Value;

use super::*;
use crate::command::{Acquire, Inspect, Mode, Outcome, Release, Renew};
use crate::config::DEFAULT_MAX_REPLY;
use crate::config::key::{Key, KeyLayout};
use crate::store::completion::Submitted;
use crate::store::{Report, ReportedReleases, Urgency};
use crate::util::id::LeaseId;
use crate::util::slot;
use crate::util::slot::{Redirect, Slot};
use crate::wire::connect::connection::ReplyContents;
use crate::wire::connect::data_check::DataCheck;
use crate::wire::pipeline::{MAX_BATCH, MOST_RELEASES_ON_QUORUM};
use crate::wire::session::TransactionOutcome;

const LONG: Duration = Duration::from_secs(20);

#[test]
fn slots_are_those_of_a_cluster() {
    let cluster = Cluster::builder().masters(1).without_replicas();
    let cluster = cluster.start().unwrap();
    let url = cluster.nodes()[0].url();
    let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
    let mut runner = TestRunner::deterministic();
    let names: Vec<String> = (0..2_000)
        .map(|_| slot::tests::name().new_tree(&mut runner).unwrap().current())
        .chain((0..100).map(|n| format!("leasehold:invoice:{n}")))
        .collect();
    let mut ask = redis::pipe();
    for name in &names {
        ask.cmd("CLUSTER").arg("KEYSLOT").arg(name);
    }
    let slots: Vec<u16> = ask.query(&mut redis).unwrap();
    for (name, slot) in names.iter().zip(slots) {
        assert_eq!(Slot::of(name).number(), slot, "{name}");
    }
}

#[test]
fn close_connections_closes_open_ones() {
    let server = Server::start().unwrap();
    let endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    for _ in 0..3 {
        drop(endpoint.open().ok().unwrap());
    }
    let open = [(); 2].map(|()| endpoint.open().ok().unwrap());
    assert_eq!(endpoint.open_connections(), 2);
    endpoint.close_connections();
    for connection in open {
        let mut read = [std::mem::MaybeUninit::uninit()];
        assert_eq!(connection.socket().peek(&mut read).unwrap(), 0);
    }
    assert!(endpoint.open().is_err());
}

/// A connection for a transaction under `lease`, which holds `lock`.
fn transaction(url: &str, lock: &Key, lease: LeaseId) -> TransactionConnection {
    let endpoint = Arc::new(Endpoint::new(url, LONG, DEFAULT_MAX_REPLY).unwrap());
    transaction_at(&endpoint, KeyLayout::Slots, lock, lease)
}

fn transaction_at(
    endpoint: &Arc<Endpoint>,
    layout: KeyLayout,
    lock: &Key,
    lease: LeaseId,
) -> TransactionConnection {
    let connection = pipeline::connection::connector(endpoint).exclusive_connection(LONG);
    let mut transaction = TransactionConnection::new(connection.unwrap(), LONG, layout);
    assert_eq!(transaction.watch_and_check(&[(lock, lease)]).unwrap(), None);
    transaction
}

/// The reply to `EXEC` comes after the sentinels have named another primary, which may not have the writes.
#[test]
fn a_commit_of_an_old_primary_does_not_count() {
    let server = Server::start().unwrap();
    let endpoint: Arc<OnceLock<Arc<Endpoint>>> = Arc::default();
    let switches = Arc::new(AtomicBool::new(false));
    let port = fake_server::proxy(server.port(), {
        let (endpoint, switches) = (Arc::clone(&endpoint), Arc::clone(&switches));
        move |reply| {
            if switches.swap(false, Ordering::SeqCst) {
                endpoint.get().unwrap().epoch().count_switch();
            }
            reply.to_vec()
        }
    });
    let url = format!("redis://127.0.0.1:{port}");
    let endpoint =
        endpoint.get_or_init(|| Arc::new(Endpoint::new(&url, LONG, DEFAULT_MAX_REPLY).unwrap()));
    let (lock, lease) = (Key::new("p:", "lock", 100).unwrap(), LeaseId::random());
    let value = format!("lh1 {lease} 1795263780943818 host/1/a");
    server.command(&["SET", lock.in_redis(), &value]).unwrap();
    let commit = |switch: bool| {
        let mut transaction = transaction_at(endpoint, KeyLayout::Single, &lock, lease);
        switches.store(switch, Ordering::SeqCst);
        transaction.exec(redis::pipe().incr("n", 1))
    };
    assert!(matches!(
        commit(false),
        Ok(TransactionOutcome::Committed(_))
    ));
    let error = commit(true).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(
        source.contains("the sentinels name another primary"),
        "{source}"
    );
    let written = server.command(&["GET", "n"]).unwrap();
    assert_eq!(written.as_text(), Some("2"), "the old primary has written");
}

#[test]
fn a_transaction_on_a_cluster_has_the_slot_of_its_lock() {
    let cluster = Cluster::builder().masters(2).without_replicas();
    // Without HELLO, the client does not notice that the server is a node of a Cluster.
    let cluster = cluster.arg("rename-command", "HELLO \"\"").start().unwrap();
    let url = cluster.nodes()[0].url();
    let ask = |words: &[&str]| cluster.nodes()[0].command(words).unwrap();
    let keys_of = |node: usize| -> Vec<String> {
        let keys = (0..20).map(|n| format!("p:{n}"));
        keys.filter(|key| cluster.master_of_key(key) == node)
            .collect()
    };
    let [lock, same_node, ..] = &keys_of(0)[..] else {
        panic!("20 keys are in both halves of the slots");
    };
    let other_node = &keys_of(1)[0];
    let lock = Key::from_full("p:", lock).unwrap();
    let lease = LeaseId::random();
    let value = format!("lh1 {lease} 1795263780943818 host/1/a");
    ask(&["SET", lock.in_redis(), &value]);

    let same_slot = format!("{{{}}}", lock.in_redis());
    let mut written = redis::pipe();
    written.set(&same_slot, 7).ignore().get(&same_slot);
    let done = transaction(&url, &lock, lease).exec(&mut written).unwrap();
    let TransactionOutcome::Committed(replies) = done else {
        panic!("nobody has changed the lock");
    };
    let (found,): (i64,) = redis::from_redis_value(replies.unwrap()).unwrap();
    assert_eq!(
        found, 7,
        "the reply to the command of the library is left out"
    );

    let rule = format!("is not in slot {} of the lock's key", lock.slot().number());
    let refused = |commands: &mut redis::Pipeline| {
        let mut transaction = transaction(&url, &lock, lease);
        let error = transaction.exec(commands).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::CrossSlot, "{error}");
        assert!(error.to_string().contains(&rule), "{error}");
        assert!(error.redirect().is_none(), "{error}");
        assert!(!transaction.is_broken());
    };
    for key in [same_node, other_node] {
        refused(redis::pipe().set(&same_slot, 8).set(key, 8));
        // The node serves this key, and the transaction has no other.
        refused(redis::pipe().set(key, 8));
    }
    assert_eq!(ask(&["GET", &same_slot]).as_text(), Some("7"));
    assert_eq!(ask(&["EXISTS", same_node]).as_int(), Some(0));
    let mut reads = transaction(&url, &lock, lease);
    let error = redis::Commands::get::<_, Option<i64>>(&mut reads, other_node).unwrap_err();
    let error = session::read_failed(error);
    assert_eq!(error.kind(), ErrorKind::CrossSlot, "{error}");
    assert!(error.to_string().contains(&rule), "{error}");

    // The lock's own slot moves now, so the keys are not at fault.
    let mut late = transaction(&url, &lock, lease);
    cluster.move_slot(lock.slot().number(), 1).unwrap();
    let error = redis::Commands::get::<_, Option<i64>>(&mut reads, &same_slot).unwrap_err();
    assert_eq!(session::read_failed(error).kind(), ErrorKind::Unavailable);
    let mut written = redis::pipe();
    written.set(&same_slot, 9);
    let error = late.exec(&mut written).err().unwrap();
    match error.redirect() {
        Some(Redirect::Moved(place)) => {
            assert_eq!(place.slot, lock.slot());
            assert_eq!(place.port, cluster.nodes()[1].port());
        }
        other => panic!("{other:?}: {error}"),
    }
}

fn renewals(count: usize) -> Vec<Request> {
    let renewal = |n: usize| {
        Command::Renew(Renew {
            mode: Mode::Exclusive,
            key: Key::new("p:", &n.to_string(), 100).unwrap(),
            lease: LeaseId::random(),
            token: 0,
            ttl: LONG,
            replicas: None,
        })
    };
    let deadline = MonotonicTime::now().after(LONG);
    let commands = (0..count).map(renewal);
    commands
        .map(|command| Request::new(command, deadline))
        .collect()
}

fn node(url: &str) -> Node {
    node_with(url, Reports::default())
}

fn node_with(url: &str, reports: Reports) -> Node {
    let endpoint = Endpoint::new(url, LONG, DEFAULT_MAX_REPLY).unwrap();
    node_at(endpoint, reports)
}

fn node_at(endpoint: Endpoint, reports: Reports) -> Node {
    let config = Config {
        command_timeout: LONG,
        ..Config::default()
    };
    let holder = HolderId::of_this_process();
    Node::new(ServerId::ONLY, endpoint, &config, holder, reports, None)
}

#[test]
fn a_large_batch_of_renewals_is_written_at_once() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    node.execute(&mut renewals(1));
    let calls = || server.calls("evalsha").unwrap();
    let before = calls();
    proxy.hold_replies(true);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut requests = renewals(3 * MAX_BATCH);
            node.execute(&mut requests);
            requests
        });
        // A pipeline for callers would wait for the reply to the first call.
        let written = eventually(LONG / 2, || calls() == before + 3);
        proxy.hold_replies(false);
        let requests = asking.join().unwrap().into_iter();
        assert!(requests.map(Request::into_outcome).all(|one| one.is_ok()));
        assert!(written, "all calls are written before the first reply");
    });
}

#[test]
fn renewals_do_not_wait_for_each_others_replies() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    let renew = |count| node.execute(&mut renewals(count));
    let calls = || server.calls("evalsha").unwrap();
    // Makes each pipeline for renewals connect while the proxy still passes replies.
    for pipeline in node.pipelines.iter().rev().take(RENEWAL_PIPELINES) {
        let mut one = renewals(1);
        pipeline.execute(&mut one.iter_mut().collect::<Vec<_>>(), Route::default());
    }
    for (one, other) in [(1, 1), (1, 2), (2, 2)] {
        let before = calls();
        proxy.hold_replies(true);
        thread::scope(|scope| {
            scope.spawn(|| renew(one));
            let first = eventually(LONG / 4, || calls() == before + 1);
            scope.spawn(|| renew(other));
            let second = eventually(LONG / 4, || calls() == before + 2);
            proxy.hold_replies(false);
            assert!(first && second, "{one} and {other}");
        });
    }
    let before = calls();
    renew(4);
    assert_eq!(
        calls(),
        before + 1,
        "renewals of one call share a script call"
    );
}

#[test]
fn other_commands_use_all_pipelines_for_callers() {
    let node = node("redis://127.0.0.1:1");
    let pipeline_of = |n: usize| {
        let key = Key::new("p:", &n.to_string(), 100).unwrap();
        let pipeline = node.pipeline_of(&Command::Inspect(Inspect { key }));
        let mut all = node.pipelines.iter();
        all.position(|other| std::ptr::eq(other, pipeline)).unwrap()
    };
    let used: BTreeSet<usize> = (0..100).map(pipeline_of).collect();
    assert!(used.into_iter().eq(0..Config::default().pipelines));
}

#[test]
fn both_renewal_connections_are_used_once_needed() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    let renew = || node.execute(&mut renewals(1));
    let used = |times| {
        let pipelines = (0..times).map(|_| node.pipeline_for_renewals(1));
        pipelines.collect::<BTreeSet<usize>>().len()
    };
    assert_eq!(used(4), RENEWAL_PIPELINES, "any pipeline may connect");
    renew();
    assert_eq!(used(4), 1, "the connected pipeline is preferred");
    proxy.delay(Duration::from_millis(2));
    let both = eventually(LONG, || {
        thread::scope(|scope| [scope.spawn(renew), scope.spawn(renew)].map(|one| one.join()))
            .into_iter()
            .for_each(Result::unwrap);
        proxy.connections() == RENEWAL_PIPELINES
    });
    assert!(both, "two calls at a time need two connections");
    assert_eq!(used(4), RENEWAL_PIPELINES, "both take turns");
    proxy.cut_all();
    renew();
    assert_eq!(used(4), 1, "the other connection counts as dead, too");
}

#[test]
fn a_few_renewals_use_an_idle_connection_for_callers() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    let key = Key::new("p:", "k", 100).unwrap();
    let deadline = MonotonicTime::now().after(LONG);
    node.execute_one(Command::Inspect(Inspect { key }), deadline)
        .unwrap();
    node.execute(&mut renewals(FEW_RENEWALS));
    assert_eq!(proxy.connections(), 1);
    let own = node.for_callers;
    assert!(node.pipeline_for_renewals(1) < own);
    node.execute(&mut renewals(FEW_RENEWALS + 1));
    assert_eq!(proxy.connections(), 2);
    assert!(node.pipeline_for_renewals(1) >= own, "it is connected now");
}

#[test]
fn a_finished_login_is_not_closed_later() {
    let server = Server::start().unwrap();
    let endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    let mut connection = endpoint.open().unwrap();
    endpoint.close();
    let deadline = MonotonicTime::now().after(LONG);
    let pong = redis::cmd("PING").get_packed_command();
    connection.send(&pong, deadline).unwrap();
    let reply = connection.receive("GET", deadline, ReplyContents::Internal);
    assert_eq!(reply.unwrap(), Value::SimpleString("PONG".to_owned()));
}

/// A node with a thread of its own, which runs its maintenance until the node is dropped.
fn maintained_node(url: &str) -> Arc<Node> {
    let (request, requests) = mpsc::channel();
    let again = request.clone();
    let node = Arc::new(node_with(
        url,
        Reports::new(ReportedReleases::None, move |report| {
            if let Report::NeedsMaintenance(urgency) = report {
                let _ = request.send(urgency);
            }
        }),
    ));
    let maintained = Arc::downgrade(&node);
    thread::spawn(move || {
        while let Ok(urgency) = requests.recv() {
            if urgency == Urgency::Soon {
                park_timeout(Duration::from_millis(10));
            }
            let Some(node) = maintained.upgrade() else {
                return;
            };
            if node.run_maintenance() {
                let _ = again.send(Urgency::Soon);
            }
        }
    });
    node
}

fn grants(outcomes: &[Option<Outcome>]) -> usize {
    let is_granted = |one: &&Option<Outcome>| matches!(one, Some(Ok(Reply::Granted { .. })));
    outcomes.iter().filter(is_granted).count()
}

fn exists(server: &Server, key: &Key) -> bool {
    let reply = server.command(&["EXISTS", key.in_redis()]).unwrap();
    reply.as_int() == Some(1)
}

/// One pipeline always has a request in flight and another one in its queue. The reply to each request comes later than
/// callers stop reading replies themselves.
#[test]
fn a_busy_pipeline_delays_no_other_pipeline() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = maintained_node(&proxy.url());
    let submit = |command: Command| {
        let (submitted, mut completions) = Submitted::new(1);
        node.submit(vec![(command, completions.remove(0))]);
        submitted
    };
    let inspect = |name: &str| {
        Command::Inspect(Inspect {
            key: Key::new("p:", name, 100).unwrap(),
        })
    };
    let soon = || MonotonicTime::now().after(LONG);
    let has_reply = |outcomes: &[Option<Outcome>]| outcomes[0].is_some();
    let [busy, other] = [0, 1].map(|pipeline| {
        let mut commands = (0..).map(|n| inspect(&n.to_string()));
        let is_own =
            |command: &Command| std::ptr::eq(node.pipeline_of(command), &node.pipelines[pipeline]);
        commands.find(is_own).unwrap()
    });
    for command in [&busy, &other] {
        assert!(
            submit(command.clone()).wait(soon(), has_reply),
            "it connects"
        );
    }
    proxy.delay(Duration::from_millis(20));
    let mut queue = VecDeque::from([submit(busy.clone())]);
    assert!(
        eventually(LONG, || proxy.held_bytes() > 0),
        "it is in flight"
    );
    queue.push_back(submit(busy.clone()));
    let awaited = submit(other);
    let mut replies = 0;
    while !awaited.wait(MonotonicTime::now(), has_reply) {
        assert!(replies < 20, "the other pipeline waits");
        queue.push_back(submit(busy.clone()));
        assert!(queue.pop_front().unwrap().wait(soon(), has_reply));
        replies += 1;
    }
}

/// The third server does not read, and the caller continues with the grants of the other two. The grant of the third
/// server comes late, and is undone.
#[test]
fn a_caller_continues_with_a_majority_of_servers() {
    let servers = [(); 3].map(|()| Server::start().unwrap());
    let proxy = Proxy::start(servers[2].port()).unwrap();
    let urls = [servers[0].url(), servers[1].url(), proxy.url()];
    let nodes = urls.map(|url| maintained_node(&url));
    let key = Key::new("p:", "a", 100).unwrap();
    let submit = |command: Command| {
        let (submitted, completions) = Submitted::new(nodes.len());
        for (node, completion) in nodes.iter().zip(completions) {
            node.submit(vec![(command.clone(), completion)]);
        }
        submitted
    };
    let inspect = || Command::Inspect(Inspect { key: key.clone() });
    let deadline = || MonotonicTime::now().after(LONG);
    let have_come = |outcomes: &[Option<Outcome>]| outcomes.iter().all(Option::is_some);
    // Each node connects.
    assert!(submit(inspect()).wait(deadline(), have_come));
    proxy.hold_requests(true);
    servers[2].stop();
    let started = Instant::now();
    let submitted = submit(Command::Acquire(Acquire {
        mode: Mode::Exclusive,
        key: key.clone(),
        lease: LeaseId::random(),
        ttl: 10 * LONG,
        queue_mode: QueueMode::None,
        link: crate::command::Link::Alone,
        replicas: None,
    }));
    assert!(submitted.wait(deadline(), |outcomes| grants(outcomes) == 2));
    assert!(started.elapsed() < LONG / 2, "the time-out is {LONG:?}");
    assert!(eventually(LONG / 4, || proxy.held_bytes() > 0));
    let outcomes = submitted.leave();
    assert!(grants(&outcomes) == 2 && outcomes[2].is_none());
    proxy.hold_requests(false);
    servers[2].resume();
    // Replies are handled in the order of the requests.
    assert!(submit(inspect()).wait(deadline(), have_come));
    assert!(eventually(LONG / 2, || !exists(&servers[2], &key)));
    assert!(exists(&servers[0], &key) && exists(&servers[1], &key));
}

/// A node of a quorum stays slower than the majority, so callers leave before their releases are written.
#[test]
fn releases_for_a_node_of_a_quorum_have_a_bound() {
    let server = Server::start().unwrap();
    let mut endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    endpoint.data_check = Some(DataCheck::new("p:", LONG, false));
    let node = node_at(endpoint, Reports::default());
    let release = Release::unheld(
        Key::new("p:", "a", 100).unwrap(),
        LeaseId::random(),
        MonotonicTime::now().after(60 * LONG),
    );
    let pipeline = node.pipeline_of_key(&release.key);
    for _ in 0..MOST_RELEASES_ON_QUORUM + 1_000 {
        let (submitted, mut completions) = Submitted::new(1);
        let command = Command::Release(release.clone());
        node.submit(vec![(command, completions.remove(0))]);
        drop(submitted);
        assert!(pipeline.awaited() <= 256);
    }
    assert_eq!(pipeline.releases(), MOST_RELEASES_ON_QUORUM);
}

/// On a single server, a release is written at least once, even if its caller has left and its ttl has ended.
#[test]
fn releases_of_callers_that_left_stay_queued() {
    let server = Server::start().unwrap();
    let node = node_with(&server.url(), Reports::default());
    let release = Release::unheld(
        Key::new("p:", "a", 100).unwrap(),
        LeaseId::random(),
        MonotonicTime::now(),
    );
    let pipeline = node.pipeline_of_key(&release.key);
    for count in 1..=1_000 {
        let (submitted, mut completions) = Submitted::new(1);
        let command = Command::Release(release.clone());
        node.submit(vec![(command, completions.remove(0))]);
        drop(submitted);
        assert_eq!((pipeline.awaited(), pipeline.releases()), (count, 0));
    }
}

#[test]
fn dropping_a_sent_request_requests_maintenance() {
    let server = Server::start().unwrap();
    let urgent: Arc<AtomicUsize> = Arc::default();
    let counter = Arc::clone(&urgent);
    let reports = Reports::new(ReportedReleases::None, move |report| {
        let is_urgent = matches!(report, Report::NeedsMaintenance(Urgency::Now));
        counter.fetch_add(usize::from(is_urgent), Ordering::SeqCst);
    });
    let node = node_with(&server.url(), reports);
    let key = Key::new("p:", "a", 100).unwrap();
    let command = Command::Inspect(Inspect { key });
    let deadline = MonotonicTime::now().after(LONG);
    node.execute_one(command.clone(), deadline).unwrap();
    let send = || {
        let (submitted, mut completions) = Submitted::new(1);
        let sent = node.send(command.clone(), completions.remove(0));
        (sent.unwrap(), submitted)
    };
    let (mut read, submitted) = send();
    let positions = SentRequest::wait_for_any(std::slice::from_ref(&read), deadline);
    assert_eq!(positions, [0]);
    assert!(read.receive());
    drop(read);
    assert!(submitted.outcomes()[0].is_some());
    assert_eq!(urgent.load(Ordering::SeqCst), 0);
    server.stop();
    let (missing, _submitted) = send();
    let soon = MonotonicTime::now().after(Duration::from_millis(5));
    let positions = SentRequest::wait_for_any(std::slice::from_ref(&missing), soon);
    assert!(positions.is_empty());
    assert_eq!(urgent.load(Ordering::SeqCst), 0);
    drop(missing);
    assert_eq!(urgent.load(Ordering::SeqCst), 1);
}

/// Callers submit requests and leave, and no maintenance of the node runs.
#[test]
fn abandoned_requests_do_not_pile_up() {
    let server = Server::start().unwrap();
    let node = node(&server.url());
    let key = Key::new("p:", "a", 100).unwrap();
    let pipeline = node.pipeline_of_key(&key);
    for _ in 0..3000 {
        let (submitted, mut completions) = Submitted::new(1);
        let command = Command::Inspect(Inspect { key: key.clone() });
        node.submit(vec![(command, completions.remove(0))]);
        drop(submitted);
        assert!(pipeline.awaited() <= 256);
    }
}
