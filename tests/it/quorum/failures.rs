//! Nodes that are stopped, killed, or new.

use std::time::Instant;

use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Proxy, Reply, Server, eventually};

use super::nodes::{Nodes, builder, impatient};
use crate::support::{
    SOON, Task, ask, held_keys, in_redis, lock, lost_within, millis, secs, value_of,
};

/// Callers go on as before: one wait for a stopped node would take a whole time-out.
#[test]
fn two_stopped_nodes_of_five_delay_no_call() {
    let nodes = Nodes::start(5);
    let [client, operator] = [(); 2].map(|()| nodes.client());
    lock(&client, "k").unlock().unwrap();
    nodes.0[3..].iter().for_each(Server::stop);
    let started = Instant::now();
    let mut last = 0;
    for _ in 0..30 {
        let guard = lock(&client, "k");
        assert!(guard.fencing_token() > last);
        last = guard.fencing_token();
        guard.unlock().unwrap();
    }
    client.ping().unwrap();
    // The time-outs are 8 s.
    assert!(started.elapsed() < secs(6), "{:?}", started.elapsed());
    let guard = lock(&client, "k");
    let of_others = operator.mutex("k");
    let found = of_others.inspect().unwrap().unwrap();
    assert_eq!(found.holder(), client.holder_id());
    assert!(of_others.force_unlock().unwrap().is_some());
    assert!(of_others.inspect().unwrap().is_none());
    drop(guard);
    nodes.0[3..].iter().for_each(Server::resume);
    drop(lock(&client, "k"));
    nodes.assert_all_become_free();
}

/// Callers that ask at the same time split the votes of the nodes that reply. They go on without the stopped ones.
#[test]
fn stopped_nodes_delay_no_contending_clients() {
    const LOCKS: usize = 25;
    let nodes = Nodes::start(5);
    let clients = [(); 4].map(|()| nodes.client());
    clients.iter().for_each(|client| drop(lock(client, "k")));
    nodes.0[3..].iter().for_each(Server::stop);
    let started = Instant::now();
    let contend = |client: &Client| {
        let client = client.clone();
        Task::start(move || (0..LOCKS).for_each(|_| lock(&client, "k").unlock().map(drop).unwrap()))
    };
    let tasks = clients.each_ref().map(contend);
    tasks
        .into_iter()
        .for_each(|task| task.within(SOON, "the turns of a client"));
    // The time-outs are 8 s.
    assert!(started.elapsed() < secs(6), "{:?}", started.elapsed());
    nodes.0[3..].iter().for_each(Server::resume);
    nodes.assert_all_become_free();
}

/// Calls go on without a node that is farther away than the others. Renewals bring it the keys, so the locks outlive the
/// death of one of the others.
#[test]
fn a_distant_node_gets_its_keys_by_renewals() {
    const LOCKS: usize = 20;
    let mut nodes = Nodes::start(3);
    let proxy = Proxy::start(nodes.0[2].port()).unwrap();
    let mut urls = nodes.urls();
    urls[2] = proxy.url();
    let client = builder(urls).ttl(secs(6)).build().unwrap();
    lock(&client, "first").unlock().unwrap();
    proxy.delay(millis(20));
    let guards: Vec<_> = (0..LOCKS)
        .map(|n| lock(&client, &format!("k{n}")))
        .collect();
    let held = || held_keys(&nodes.0[2]).len();
    assert!(eventually(SOON, || held() == LOCKS), "{} keys", held());
    nodes.0[0].kill();
    // Longer than the ttl: only locks that a majority has renewed are left.
    std::thread::sleep(secs(7));
    for guard in guards {
        assert!(!guard.is_lost(), "{}", guard.key());
        guard.unlock().unwrap();
    }
}

#[test]
fn three_stopped_nodes_of_five_are_no_quorum() {
    let nodes = Nodes::start(5);
    let client = impatient(nodes.urls(), secs(2)).build().unwrap();
    let held = lock(&client, "held");
    nodes.0[2..].iter().for_each(Server::stop);
    for error in [
        client.mutex("k").try_lock().unwrap_err(),
        client.mutex("k").lock().unwrap_err(),
        client.mutex("k").inspect().unwrap_err(),
        client.ping().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
        assert!(error.is_unavailable());
        let text = error.to_string();
        for server in &nodes.0 {
            let name = format!("127.0.0.1:{}", server.port());
            assert!(text.contains(&name), "{text:?} lacks {name}");
        }
        assert!(text.contains("3 of 5 are needed: "), "{text}");
    }
    // Nothing of the attempts stays on the nodes that reply.
    let is_free = |server: &Server| held_keys(server).iter().all(|key| key == "held");
    assert!(eventually(SOON, || nodes.0[..2].iter().all(is_free)));
    held.check().unwrap();
    nodes.0[2..].iter().for_each(Server::resume);
    assert!(eventually(SOON, || client.mutex("k").try_lock().is_ok()));
    held.unlock().unwrap();
    nodes.assert_all_become_free();
}

#[test]
fn a_taken_lock_is_no_error_while_a_majority_votes() {
    let mut nodes = Nodes::start(5);
    let (first, second) = (nodes.client(), nodes.client());
    let guard = lock(&first, "k");
    assert!(second.mutex("k").try_lock().unwrap().is_none());
    nodes.0[3..].iter_mut().for_each(Server::kill);
    assert!(second.mutex("k").try_lock().unwrap().is_none());
    let waited = second.mutex("k").try_lock_for(secs(3)).unwrap();
    assert!(waited.is_none());
    guard.unlock().unwrap();
    drop(lock(&second, "k"));
}

/// A quorum of new servers grants its first lock after one `max_ttl`.
#[test]
fn new_nodes_vote_after_max_ttl() {
    let nodes = Nodes::start_in_quarantine(3);
    let started = Instant::now();
    let client = builder(nodes.urls())
        .ttl(secs(1))
        .max_ttl(secs(3))
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    assert!(started.elapsed() >= secs(3), "{:?}", started.elapsed());
    guard.unlock().unwrap();
}

/// A lease outlives restarts of one node after another, since renewals set the keys that a node has lost.
#[test]
fn a_lock_outlives_the_restart_of_each_node() {
    let mut nodes = Nodes::start(3);
    let (ttl, max_ttl) = (secs(4), secs(4));
    let client = nodes.builder().max_ttl(max_ttl).ttl(ttl).build().unwrap();
    let other = nodes.builder().max_ttl(max_ttl).ttl(ttl).build().unwrap();
    let guard = lock(&client, "k");
    assert!(eventually(SOON, || nodes.holding("k") == 3));
    for index in 0..3 {
        nodes.0[index].restart().unwrap();
        assert!(other.mutex("k").try_lock().unwrap().is_none());
        assert!(eventually(SOON, || nodes.holding("k") == 3), "{index}");
        guard.check().unwrap();
    }
    guard.unlock().unwrap();
    lock(&other, "k").unlock().unwrap();
}

/// For each set of three nodes: these have another program's value under the lock's key.
#[test]
fn foreign_values_on_a_minority_are_ignored() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    for set in 0_u32..8 {
        let key = format!("k{set}");
        for (n, node) in nodes.0.iter().enumerate() {
            if set & 1 << n != 0 {
                ask(node, &["SET", &in_redis(&key), "foreign"]);
            }
        }
        let outcome = client.mutex(&key).try_lock();
        if set.count_ones() < 2 {
            outcome.unwrap().unwrap().unlock().unwrap();
        } else {
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Protocol);
        }
        for (n, node) in nodes.0.iter().enumerate() {
            let foreign = (set & 1 << n != 0).then(|| "foreign".to_owned());
            assert!(eventually(SOON, || value_of(node, &key) == foreign));
        }
    }
}

/// The holder connects for notifications at one node after the other, and each node releases the lock then.
#[test]
fn a_forced_release_at_one_node_after_the_other_is_reported() {
    let nodes = Nodes::start(3);
    let proxies: Vec<Proxy> = nodes.0[1..]
        .iter()
        .map(|server| Proxy::start(server.port()).unwrap())
        .collect();
    let mut urls = vec![nodes.0[0].url()];
    urls.extend(proxies.iter().map(Proxy::url));
    let holder = impatient(urls, secs(2)).build().unwrap();
    let guard = lock(&holder, "k");
    nodes.bring_to_all(&guard, "k");
    let listens = |server: &Server| {
        let channels = ask(server, &["PUBSUB", "CHANNELS"]);
        matches!(channels, Reply::Array(channels) if !channels.is_empty())
    };
    assert!(eventually(SOON, || nodes.0.iter().all(listens)));
    for (proxy, server) in proxies.iter().zip(&nodes.0[1..]) {
        proxy.black_hole(true);
        ask(server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    }
    let operator = nodes.client();
    std::thread::scope(|scope| {
        let forced = scope.spawn(|| operator.mutex("k").force_unlock());
        for (left, proxy) in [(2, &proxies[0]), (1, &proxies[1])] {
            assert!(eventually(SOON, || nodes.holding("k") <= left));
            proxy.cut_all();
            proxy.black_hole(false);
        }
        let found = forced.join().unwrap().unwrap();
        assert!(found.is_some_and(|found| found.holder() == holder.holder_id()));
    });
    // A release on the broken connections would be repeated, and could not find the loss.
    lost_within(SOON, &guard.lost_signal());
    assert!(guard.unlock().unwrap_err().is_lease_lost());
}
