//! Tests of the connector: when its pool lives, and which connections are used again.

use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use leasehold_testbed::{Proxy, Server, eventually};

use super::*;
use crate::config::DEFAULT_MAX_REPLY;
use crate::credentials::{Credentials, CredentialsCallback};
use crate::error::ErrorKind;
use crate::store::redis::fake_server;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(5);

fn connector_to(url: &str) -> Arc<Connector> {
    let endpoint = Endpoint::new(url, LONG, DEFAULT_MAX_REPLY).unwrap();
    Connector::new(&Arc::new(endpoint), 4)
}

fn has_pool(connector: &Connector) -> bool {
    connector.pool.lock().pool.is_some()
}

fn running_attempts(connector: &Connector) -> usize {
    connector.pool.lock().running_attempts
}

#[test]
fn a_connected_client_has_no_pool() {
    let server = Server::start().unwrap();
    let connector = connector_to(&server.url());
    assert!(!has_pool(&connector));
    let connections = [(); 3].map(|()| connector.connect(LONG).unwrap());
    // On a busy machine, a second attempt may be under way when the first one has ended.
    assert!(eventually(LONG, || !has_pool(&connector)));
    drop(connections);
}

#[test]
fn a_late_connection_serves_the_next_caller() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    proxy.hold_replies(true);
    let connector = connector_to(&proxy.url());
    // On a busy machine, the caller may leave before its attempt has begun.
    let leaves_an_attempt = || {
        let error = connector.connect(SHORT).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        running_attempts(&connector) > 0
    };
    assert!(eventually(LONG, leaves_an_attempt));
    assert!(has_pool(&connector));
    proxy.hold_replies(false);
    assert!(eventually(LONG, || !has_pool(&connector)));
    let connection = connector.connect(SHORT).unwrap();
    assert!(!has_pool(&connector), "it was kept");
    drop(connection);
}

#[test]
fn one_of_several_late_connections_is_kept() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    proxy.hold_replies(true);
    let connector = connector_to(&proxy.url());
    let leaves_attempts = || {
        assert!(connector.connect(SHORT).is_err());
        running_attempts(&connector) > 1
    };
    assert!(eventually(LONG, leaves_attempts));
    proxy.hold_replies(false);
    assert!(eventually(LONG, || !has_pool(&connector)));
    assert!(eventually(LONG, || proxy.connections() == 1));
    assert!(connector.pool.lock().kept.is_some());
}

#[test]
fn an_idle_connection_is_used_again() {
    let server = Server::start().unwrap();
    let connector = connector_to(&server.url());
    for _ in 0..3 {
        drop(connector.exclusive_connection(LONG).unwrap());
        // A second connection would stay beside the first.
        assert_eq!(connector.idle.lock().len(), 1);
    }
    let mut discarded = connector.exclusive_connection(LONG).unwrap();
    discarded.discard();
    drop(discarded);
    assert!(connector.idle.lock().is_empty());
}

#[test]
fn attempts_that_hang_keep_one_pool() {
    let server = Server::start().unwrap();
    let mut endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    let (release, released) = channel::<()>();
    let first = Mutex::new(Some(released));
    let login = move || {
        let hangs = first.lock().take();
        if let Some(released) = hangs {
            let _ = released.recv();
        }
        Ok(Credentials::user("default", "s3cret"))
    };
    endpoint
        .set_credentials(CredentialsCallback::new(login))
        .unwrap();
    let connector = Connector::new(&Arc::new(endpoint), 4);
    let gave_up = connector.connect(SHORT);
    assert!(gave_up.is_err(), "its callback hangs");
    let connection = connector.connect(LONG).unwrap();
    // The pool may have begun more attempts than these two.
    assert!(eventually(LONG, || running_attempts(&connector) == 1));
    assert!(has_pool(&connector), "a later attempt takes its threads");
    drop(release);
    // The end of the last attempt also ends the pool.
    assert!(eventually(LONG, || !has_pool(&connector)));
    assert_eq!(running_attempts(&connector), 0);
    drop(connection);
}

/// Otherwise a client that nobody uses would ask for credentials and log in again and again, and all clients would
/// connect at once when Redis returns.
#[test]
fn no_attempt_begins_without_a_caller() {
    let mut server = Server::start().unwrap();
    let refused = connector_to(&server.url().replace("://", "://nobody:wrong@"));
    assert_eq!(
        refused.connect(LONG).err().unwrap().kind(),
        ErrorKind::Denied
    );
    let connector = connector_to(&server.url());
    drop(connector.connect(LONG).unwrap());
    server.kill();
    for _ in 0..3 {
        assert!(connector.connect(Duration::from_millis(600)).is_err());
    }
    for connector in [&refused, &connector] {
        assert!(eventually(LONG, || !has_pool(connector)));
    }
    server.restart().unwrap();
    drop(connector.connect(LONG).unwrap());
}

/// One of these attempts is always under way, if the pool begins the next one whenever one has failed.
#[test]
fn attempts_that_overlap_end() {
    let server = Server::start().unwrap();
    server.stop();
    let timeout = Duration::from_secs(1);
    let endpoint = Endpoint::new(&server.url(), timeout, DEFAULT_MAX_REPLY).unwrap();
    let connector = Connector::new(&Arc::new(endpoint), 4);
    assert!(connector.connect(timeout).is_err());
    assert!(eventually(LONG, || !has_pool(&connector)));
}

#[test]
fn without_threads_the_caller_connects_itself() {
    let server = Server::start().unwrap();
    let connector = connector_to(&server.url());
    connector.has_no_threads.store(true, Ordering::Relaxed);
    drop(connector.connect(LONG).unwrap());
    let (_socket, address) = fake_server::refuses_connections();
    let closed = connector_to(&format!("redis://{address}"));
    closed.has_no_threads.store(true, Ordering::Relaxed);
    assert!(closed.connect(LONG).err().unwrap().is_lasting());
}
