//! The nodes of a quorum: their number, addresses and logins.

use leasehold::{Builder, Client, Credentials, ErrorKind, QuorumNode};
use leasehold_testbed::Server;

use super::nodes::{Nodes, end_quarantine};
use crate::support::{lock, secs};

#[track_caller]
fn refused(builder: Builder) -> String {
    let error = builder.build_lazy().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    error.to_string()
}

#[test]
fn errors_name_the_wrong_node() {
    let urls: Vec<String> = (1..=10).map(|n| format!("redis://127.0.0.1:{n}")).collect();
    let of = |nodes: &[&str]| refused(Client::quorum_builder(nodes.to_vec()));
    for (message, part) in [
        (of(&[]), "the number of nodes must be 1 to 9, not 0"),
        (refused(Client::quorum_builder(&urls)), "1 to 9, not 10"),
        (
            of(&["redis://h:1", "redis://h:2", "redis://u:s3cret@h:1/3"]),
            "different servers, not twice h:1",
        ),
        (
            of(&["redis://h:1", "redis+sentinel://me:s3cret@h:2/group"]),
            "node 2: the nodes must be addresses of single servers (redis:// or rediss://), not redis+sentinel://h:2",
        ),
        (
            of(&["valkey+sentinel://h/group"]),
            "not redis+sentinel://h:26379",
        ),
        (
            of(&["redis+cluster://h:3", "redis://h:1"]),
            "not redis+cluster://h:3",
        ),
        (of(&["memory://a"]), "not memory://"),
        (
            of(&["redis://h:1", "redis://h:2", "http://h", "redis://h:3"]),
            "node 3: url: has an unknown scheme",
        ),
    ] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
        assert!(!message.contains("s3cret"), "{message}");
    }
}

#[test]
fn settings_without_meaning_for_a_quorum_are_refused() {
    let builder = || Client::quorum_builder(["redis://h:1", "redis://h:2", "redis://h:3"]);
    for (message, part) in [
        (
            refused(builder().ttl(secs(31))),
            "ttl must be 10ms to 30s (`max_ttl`), not 31s",
        ),
        (refused(builder().replicas(1, secs(1) / 10)), "replicas: "),
        (
            refused(builder().sentinel_credentials(Credentials::password("s3cret"))),
            "sentinel_credentials: ",
        ),
    ] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    // A lock with a longer ttl than a quarantine would break the protocol.
    let client = builder().build_lazy().unwrap();
    let error = client.mutex("k").ttl(secs(31)).try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(error.to_string().contains("not 31s"), "{error}");
}

#[test]
fn each_node_has_its_own_login() {
    let secured = |password| Server::builder().password(password).start().unwrap();
    let servers = [secured("one"), secured("two"), Server::start().unwrap()];
    servers.iter().for_each(end_quarantine);
    let without_login = |server: &Server| format!("redis://127.0.0.1:{}", server.port());
    let nodes = [
        QuorumNode::new(without_login(&servers[0]))
            .credentials(|| Ok(Credentials::password("one"))),
        QuorumNode::from(servers[1].url()),
        QuorumNode::from(servers[2].url()),
    ];
    assert!(!format!("{nodes:?}").contains("two"), "{nodes:?}");
    let builder = Client::quorum_builder(nodes);
    assert!(!format!("{builder:?}").contains("two"), "{builder:?}");
    let client = builder.build().unwrap();
    assert!(!format!("{client:?}").contains("two"), "{client:?}");
    lock(&client, "k").unlock().unwrap();
    // One callback for all nodes does not fit a node that has a login in its URL.
    let nodes = Client::quorum_builder([servers[1].url(), servers[2].url()]);
    let message = refused(nodes.credentials(|| Ok(Credentials::password("two"))));
    assert!(message.contains("credentials"), "{message}");
    // A minority may refuse the login; a majority may not.
    let wrong = |count: usize| {
        let url = |index: usize| match index < count {
            true => without_login(&servers[index]),
            false => servers[index].url(),
        };
        Client::quorum([url(0), url(1), url(2)])
    };
    assert!(wrong(1).is_ok());
    assert_eq!(wrong(2).unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn a_quorum_of_one_node_grants_locks() {
    let nodes = Nodes::start(1);
    let client = nodes.client();
    let first = lock(&client, "k");
    assert!(client.mutex("k").try_lock().unwrap().is_none());
    let token = first.fencing_token();
    first.unlock().unwrap();
    assert!(lock(&client, "k").fencing_token() > token);
}
