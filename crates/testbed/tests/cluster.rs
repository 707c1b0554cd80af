//! The private Cluster, with real servers.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::Duration;

use leasehold_testbed::{Cluster, Reply, Server, eventually};

fn ask(server: &Server, command: &[&str]) -> Reply {
    server.command(command).unwrap()
}

fn set(server: &Server, key: &str) -> Reply {
    ask(server, &["SET", key, "x"])
}

fn is_error(reply: &Reply, code: &str) -> bool {
    matches!(reply, Reply::Error(text) if text.starts_with(code))
}

#[test]
fn each_slot_has_one_of_three_masters() {
    let cluster = Cluster::start().unwrap();
    let masters: Vec<usize> = [0, 5_461, 5_462, 10_922, 10_923, 16_383]
        .map(|slot| cluster.master_of(slot))
        .to_vec();
    assert_eq!(masters, [0, 0, 1, 1, 2, 2]);
    assert_eq!(
        [0, 1, 2].map(|master| cluster.replica_of(master)),
        [3, 4, 5]
    );
    let node = cluster.master_of_key("k");
    assert_eq!(set(&cluster.nodes()[node], "k"), Reply::Status("OK".into()));
    let other = &cluster.nodes()[(node + 1) % 3];
    assert!(is_error(&set(other, "k"), "MOVED"));
    let url = cluster.url();
    assert!(url.starts_with("redis+cluster://127.0.0.1:"), "{url}");
    assert_eq!(url.matches(',').count(), 2, "{url}");
}

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = Cluster::builder()
        .without_replicas()
        .password("secret")
        .start()
        .unwrap();
    let slot = cluster.slot_of("k");
    let from = cluster.master_of(slot);
    let to = (from + 1) % 3;
    let [source, target] = [from, to].map(|node| &cluster.nodes()[node]);
    set(source, "k");
    cluster.begin_move(slot, to).unwrap();
    assert!(is_error(&ask(source, &["GET", "{k}other"]), "ASK"));
    assert!(is_error(
        &ask(source, &["MGET", "{k}other", "k"]),
        "TRYAGAIN"
    ));
    cluster.move_keys(slot, to, |_| true).unwrap();
    assert!(is_error(&ask(source, &["GET", "k"]), "ASK"));
    cluster.end_move(slot, to).unwrap();
    assert!(is_error(&ask(source, &["GET", "k"]), "MOVED"));
    assert_eq!(ask(target, &["GET", "k"]).as_text(), Some("x"));
    assert_eq!(cluster.master_of(slot), to);
}

#[test]
fn a_client_of_the_proxies_stays_at_their_address() {
    let cluster = Cluster::builder().without_replicas().without_hosts();
    let cluster = cluster.start().unwrap();
    let (proxies, url) = cluster.proxies(3).unwrap();
    let ports = cluster.nodes().iter().map(Server::port);
    assert!(ports.eq(proxies.iter().map(leasehold_testbed::Proxy::port)));
    assert!(url.starts_with("redis+cluster://127.0.0.3:"), "{url}");
    let node = cluster.master_of_key("k");
    let other = &cluster.nodes()[(node + 1) % 3];
    let port = proxies[node].port();
    let Reply::Error(moved) = set(other, "k") else {
        panic!("the other node serves the key");
    };
    assert!(
        moved.starts_with("MOVED") && moved.ends_with(&format!(" :{port}")),
        "{moved}"
    );
    let client = std::net::TcpStream::connect(("127.0.0.3", port)).unwrap();
    assert!(eventually(Duration::from_secs(10), || proxies[node]
        .connections()
        == 1));
    drop(client);
}

#[test]
fn replicas_take_over() {
    let mut cluster = Cluster::start().unwrap();
    let first = cluster.fail_over(0).unwrap();
    assert_eq!((first, cluster.master_of(0)), (3, 3));
    cluster.wait_until_ok().unwrap();
    assert_eq!(cluster.replica_of(3), 0);
    cluster.node(3).stop();
    cluster.wait_until_master(0).unwrap();
    assert_eq!(cluster.master_of(0), 0);
    cluster.node(3).resume();
    cluster.node(1).kill();
    cluster.wait_until_master(4).unwrap();
    cluster.node(1).restart().unwrap();
    cluster.wait_until_ok().unwrap();
    assert_eq!(cluster.replica_of(4), 1);
    assert_eq!(cluster.replica_of(0), 3);
}
