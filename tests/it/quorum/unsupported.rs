//! Parts of the library that a quorum does not have.

use leasehold::{Error, ErrorKind, MemoryStore};
use leasehold_testbed::Server;

use super::nodes::Nodes;
use crate::support::{lock, millis, secs};

#[test]
fn features_of_one_server_are_unsupported_on_a_quorum() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let guard = lock(&client, "k");
    let mutex = client.mutex("replicated").replicas(1, millis(100));
    let value = client.fenced_value("v");
    let of_one_server = MemoryStore::new().builder().ttl(secs(5)).build().unwrap();
    let ticket = lock(&of_one_server, "t").into_ticket().unwrap();
    // A request would wait for the nodes.
    nodes.0.iter().for_each(Server::stop);
    let errors = [
        guard.transaction(|_, _| Ok(())).map(drop).unwrap_err(),
        value.write(guard.fencing_token(), "17").unwrap_err(),
        value.delete(guard.fencing_token()).unwrap_err(),
        value.read().unwrap_err(),
        client.once("o").run(|_| Ok::<_, Error>(())).unwrap_err(),
        client.once("o").get().unwrap_err(),
        client.once("o").forget().unwrap_err(),
        client.adopt(&ticket).unwrap_err(),
        mutex.try_lock().unwrap_err(),
        mutex.lock().unwrap_err(),
        client.rw_lock("r").read().map(drop).unwrap_err(),
        client.rw_lock("r").try_write().map(drop).unwrap_err(),
        client.rw_lock("r").inspect().unwrap_err(),
        client.semaphore("s", 2).acquire().map(drop).unwrap_err(),
        client.semaphore("s", 2).inspect().unwrap_err(),
        client
            .mutex("m")
            .min_hold(secs(1))
            .try_lock()
            .map(drop)
            .unwrap_err(),
    ];
    nodes.0.iter().for_each(Server::resume);
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("quorum"), "{error}");
    }
    drop(guard);
    nodes.assert_all_become_free();
}

/// The lock is released as by a drop, so that another process can acquire it at once.
#[test]
fn a_guard_that_becomes_no_ticket_is_released() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let refused = lock(&client, "k").into_ticket().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert!(refused.to_string().contains("acquire it"), "{refused}");
    nodes.assert_all_become_free();
    lock(&nodes.client(), "k").unlock().unwrap();
}
