//! The states of nodes that a client of a quorum reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{Client, EnvironmentWarning, ErrorKind, MemoryQuorum, NodeClock, NodeHealth};
use leasehold_testbed::{Server, eventually};

use super::nodes::{Nodes, builder, end_quarantine, impatient};
use crate::steady::steady;
use crate::support::{Recorder, SOON, What, ask, held_keys, lock, millis, secs, server};

fn health(client: &Client, node: usize) -> NodeHealth {
    client.nodes().unwrap()[node].health().clone()
}

#[track_caller]
fn assert_all_become_up(client: &Client) {
    let are_up = || client.nodes().unwrap().iter().all(|node| node.is_up());
    assert!(eventually(SOON, are_up), "{:?}", client.nodes());
}

fn address(server: &Server) -> String {
    format!("127.0.0.1:{}", server.port())
}

/// `assume_durable_nodes` says that a restarted node has all its locks.
#[test]
fn nodes_that_lose_data_are_found() {
    let saved = ("appendonly", "yes");
    let servers = [
        &[saved, ("appendfsync", "always")][..],
        &[saved, ("appendfsync", "everysec")],
        &[],
    ]
    .map(|directives| {
        let mut server = Server::builder();
        for (name, value) in directives {
            server = server.arg(*name, *value);
        }
        server.start().unwrap()
    });
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let found = |keep_data: bool| {
        let client = builder(urls.clone()).assume_durable_nodes(keep_data);
        let found = client.build_lazy().unwrap().check_environment().unwrap();
        let losses = found
            .into_iter()
            .filter_map(|finding| match finding.warning() {
                EnvironmentWarning::LosesData { setting, value } => {
                    Some((finding.server().to_owned(), *setting, value.clone()))
                }
                _ => None,
            });
        losses.collect::<Vec<_>>()
    };
    let [_, often, never] = servers.each_ref().map(address);
    let expected = [
        (often, "appendfsync", "everysec".to_owned()),
        (never, "appendonly", "no".to_owned()),
    ];
    assert_eq!(found(true), expected);
    assert_eq!(found(false), []);
}

#[test]
fn a_stopped_node_is_failing_until_it_continues() {
    let nodes = Nodes::start(5);
    let recorder = Recorder::new();
    let builder = nodes.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    assert_all_become_up(&client);
    let listed = client.nodes().unwrap();
    let addresses: Vec<String> = nodes.0.iter().map(address).collect();
    let listed: Vec<&str> = listed.iter().map(|node| node.address()).collect();
    assert_eq!(listed, addresses);
    let stopped = &addresses[4];
    assert_eq!(
        recorder.count(What::NodeUp, stopped),
        0,
        "it was not missed"
    );

    nodes.0[4].stop();
    lock(&client, "k").unlock().unwrap();
    let is_failing = || match health(&client, 4) {
        NodeHealth::Failing { error, .. } => {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains(stopped), "{error}");
            true
        }
        _ => false,
    };
    assert!(eventually(SOON, is_failing), "{:?}", client.nodes());
    recorder.wait_for(1, What::NodeFailing, stopped);
    nodes.0[4].resume();
    // No request is sent: a probe finds the node.
    recorder.wait_for(1, What::NodeUp, stopped);
    assert_all_become_up(&client);
    assert_eq!(recorder.count(What::NodeFailing, stopped), 1);
}

#[test]
fn a_restarted_node_is_failing_then_quarantined_then_up() {
    let mut nodes = Nodes::start(3);
    let recorder = Recorder::new();
    let builder = nodes.builder().ttl(secs(2)).max_ttl(secs(2));
    let builder = builder.event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    assert_all_become_up(&client);
    let restarted = address(&nodes.0[0]);
    nodes.0[0].kill();
    lock(&client, "k").unlock().unwrap();
    let is_failing = || match health(&client, 0) {
        NodeHealth::Failing { error, .. } => error.to_string().contains(&restarted),
        _ => false,
    };
    assert!(eventually(SOON, is_failing), "{:?}", client.nodes());
    nodes.0[0].restart().unwrap();
    recorder.wait_for(1, What::NodeQuarantined, &restarted);
    if let NodeHealth::Quarantined { remaining, .. } = health(&client, 0) {
        assert!(remaining <= secs(2), "{remaining:?}");
    }
    recorder.wait_for(1, What::NodeUp, &restarted);
    assert_all_become_up(&client);
    assert_eq!(recorder.count(What::NodeFailing, &restarted), 1);
}

#[test]
fn a_new_node_is_quarantined() {
    let nodes = Nodes::start_in_quarantine(1);
    let client = nodes.client();
    let is_quarantined = || match health(&client, 0) {
        NodeHealth::Quarantined { remaining, .. } => remaining > secs(1),
        _ => false,
    };
    assert!(eventually(SOON, is_quarantined), "{:?}", client.nodes());
    end_quarantine(&nodes.0[0]);
    // The client probes a node in quarantine once a second.
    assert_all_become_up(&client);
}

/// A wait for a node without replies would take the whole time-out.
#[track_caller]
fn assert_shuts_down_early(client: &Client) {
    let started = Instant::now();
    client.shutdown(secs(30)).unwrap();
    assert!(started.elapsed() < secs(15), "{:?}", started.elapsed());
}

/// The client does not know yet that the node is away, and a thread waits for its reply.
#[test]
fn a_newly_stopped_node_delays_no_shutdown() {
    let nodes = Nodes::start(3);
    let client = impatient(nodes.urls(), secs(60)).build().unwrap();
    let guard = lock(&client, "k");
    nodes.bring_to_all(&guard, "k");
    nodes.0[2].stop();
    drop(guard);
    assert_shuts_down_early(&client);
    assert!(nodes.0[..2].iter().all(|it| held_keys(it).is_empty()));
    nodes.0[2].resume();
}

/// A thread waits for a connection to the node.
#[test]
fn a_node_that_was_never_reached_delays_no_shutdown() {
    let nodes = Nodes::start(3);
    nodes.0[2].stop();
    let client = impatient(nodes.urls(), secs(60)).build().unwrap();
    drop(lock(&client, "k"));
    assert_shuts_down_early(&client);
    nodes.0[2].resume();
}

#[test]
fn a_hanging_node_in_memory_delays_no_shutdown() {
    let quorum = MemoryQuorum::new(3);
    let client = quorum.client().unwrap();
    let guard = lock(&client, "k");
    quorum.hang(2);
    drop(guard);
    assert_shuts_down_early(&client);
}

#[test]
fn a_failing_node_delays_no_shutdown() {
    let nodes = Nodes::start(3);
    let client = impatient(nodes.urls(), secs(3)).build().unwrap();
    nodes.0[2].stop();
    let guard = lock(&client, "k");
    let is_failing = || matches!(health(&client, 2), NodeHealth::Failing { .. });
    assert!(eventually(SOON, is_failing), "{:?}", client.nodes());
    // The release for the failing node stays queued. For a second after it, the node counts as silent in any case.
    guard.unlock().unwrap();
    std::thread::sleep(millis(1_100));
    client.shutdown(secs(5)).unwrap();
    assert_eq!(client.nodes().unwrap_err().kind(), ErrorKind::Shutdown);
    nodes.0[2].resume();
}

/// Such a node still tells its time, and which keys are taken. So a probe also writes the mark, and a vote ends no failure.
#[test]
fn a_node_that_refuses_writes_is_failing() {
    let nodes = Nodes::start(3);
    let recorder = Recorder::new();
    let builder = nodes.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    assert_all_become_up(&client);
    let holder = nodes.client();
    let held = lock(&holder, "held");
    nodes.bring_to_all(&held, "held");
    ask(&nodes.0[2], &["CONFIG", "SET", "maxmemory", "1"]);
    lock(&client, "k").unlock().unwrap();
    let says_why = || match health(&client, 2) {
        NodeHealth::Failing { error, .. } => error.to_string().contains("maxmemory"),
        _ => false,
    };
    assert!(eventually(SOON, says_why), "{:?}", client.nodes());
    for _ in 0..10 {
        assert!(client.mutex("held").try_lock().unwrap().is_none());
        lock(&client, "k").unlock().unwrap();
    }
    let refusing = address(&nodes.0[2]);
    assert_eq!(recorder.count(What::NodeUp, &refusing), 0);
    ask(&nodes.0[2], &["CONFIG", "SET", "maxmemory", "0"]);
    recorder.wait_for(1, What::NodeUp, &refusing);
    assert_eq!(recorder.count(What::NodeFailing, &refusing), 1);
}

/// A node in quarantine carries out releases, which are no votes.
#[test]
fn a_release_ends_no_quarantine() {
    let quorum = MemoryQuorum::new(3);
    let recorder = Recorder::new();
    let builder = quorum.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    quorum.flush(1);
    for _ in 0..5 {
        lock(&client, "k").unlock().unwrap();
    }
    let is_quarantined = || matches!(health(&client, 1), NodeHealth::Quarantined { .. });
    assert!(eventually(SOON, is_quarantined), "{:?}", client.nodes());
    let address = client.nodes().unwrap()[1].address().to_owned();
    assert_eq!(recorder.count(What::NodeUp, &address), 0);
}

#[test]
fn a_client_of_one_server_lists_no_nodes() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    assert!(client.nodes().unwrap().is_empty());
}

/// How far the clock of each node is ahead, and the error; `None` until all clocks are known.
fn clocks(client: &Client) -> Option<Vec<NodeClock>> {
    let nodes = client.nodes().unwrap();
    nodes.iter().map(|node| node.clock().copied()).collect()
}

#[test]
fn clocks_of_one_machine_differ_within_the_error() {
    let nodes = Nodes::start(5);
    let client = nodes.client();
    assert!(eventually(SOON, || clocks(&client).is_some()));
    for clock in clocks(&client).unwrap() {
        let offset = Duration::from_micros(clock.offset_micros().unsigned_abs());
        assert!(offset <= clock.error(), "{clock:?}");
        assert!(clock.is_within_bound(), "{clock:?}");
    }
    nodes.0[4].stop();
    lock(&client, "k").unlock().unwrap();
    let is_unknown = || client.nodes().unwrap()[4].clock().is_none();
    assert!(eventually(SOON, is_unknown), "it does not vote");
    nodes.0[4].resume();
}

#[test]
fn a_node_whose_clock_is_far_ahead_is_reported_once() {
    let quorum = MemoryQuorum::new(3);
    let recorder = Recorder::new();
    let builder = quorum.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    // 13 s are within half of the bound: 14.5 s at a `max_ttl` of 30 s.
    quorum.set_clock_ahead(2, secs(13));
    let is_ahead = |by: Duration| {
        clocks(&client).is_some_and(|clocks| {
            let expected = i64::try_from(by.as_micros()).unwrap();
            let error = i64::try_from(clocks[2].error().as_micros()).unwrap();
            error < 1_000_000 && (clocks[2].offset_micros() - expected).abs() <= error
        })
    };
    assert!(
        eventually(SOON, || is_ahead(secs(13))),
        "{:?}",
        client.nodes()
    );
    assert_eq!(recorder.count(What::NodeUp, "memory node 2"), 0);
    quorum.set_clock_ahead(2, secs(16));
    // The next reading.
    quorum.advance(secs(11));
    assert!(
        eventually(SOON, || is_ahead(secs(16))),
        "{:?}",
        client.nodes()
    );
    assert!(!clocks(&client).unwrap()[2].is_within_bound());
    recorder.wait_for(1, What::NodeUp, "memory node 2");
    // A request has the clock read, too.
    quorum.set_clock_ahead(2, secs(17));
    quorum.advance(secs(11));
    lock(&client, "k").unlock().unwrap();
    assert!(
        eventually(SOON, || is_ahead(secs(17))),
        "{:?}",
        client.nodes()
    );
    assert_eq!(recorder.count(What::NodeUp, "memory node 2"), 1);
    quorum.set_clock_ahead(2, secs(0));
    quorum.advance(secs(11));
    assert!(
        eventually(SOON, || is_ahead(secs(0))),
        "{:?}",
        client.nodes()
    );
    recorder.wait_for(2, What::NodeUp, "memory node 2");
    for other in ["memory node 0", "memory node 1"] {
        assert_eq!(recorder.count(What::NodeUp, other), 0);
    }
}
