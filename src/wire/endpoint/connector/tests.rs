//! Tests of the connector: when attempts begin, how many run, and which connections are used again.

use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold_testbed::{Proxy, Server, eventually};

use super::*;
use crate::config::DEFAULT_MAX_REPLY;
use crate::config::credentials::{Credentials, CredentialsCallback};
use crate::report::error::ErrorKind;
use crate::wire::fake_server;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(5);

fn connector_to(url: &str) -> Arc<Connector> {
    let endpoint = Endpoint::new(url, LONG, DEFAULT_MAX_REPLY).unwrap();
    Connector::new(&Arc::new(endpoint))
}

fn running_attempts(connector: &Connector) -> usize {
    connector.attempts.state.lock().running
}

fn made(connector: &Connector) -> usize {
    connector.attempts.state.lock().made.len()
}

/// Waits until no attempt is under way, so the connector has no thread.
fn wait_for_attempts(connector: &Connector) {
    assert!(eventually(LONG, || running_attempts(connector) == 0));
}

#[test]
fn callers_get_a_connection_each() {
    let server = Server::start().unwrap();
    let connector = connector_to(&server.url());
    assert_eq!(running_attempts(&connector), 0);
    // There are four times as many callers as attempts at a time. Callers also take the connections of other attempts.
    let connections = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4 * MAX_ATTEMPTS)
            .map(|_| scope.spawn(|| connector.connect(LONG).unwrap()))
            .collect();
        let connect = |caller: std::thread::ScopedJoinHandle<'_, _>| caller.join().unwrap();
        callers.into_iter().map(connect).collect::<Vec<_>>()
    });
    wait_for_attempts(&connector);
    assert!(made(&connector) <= 1);
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
    proxy.hold_replies(false);
    wait_for_attempts(&connector);
    let connection = connector.connect(SHORT).unwrap();
    assert_eq!(running_attempts(&connector), 0, "it was kept");
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
    wait_for_attempts(&connector);
    assert!(eventually(LONG, || proxy.connections() == 1));
    assert_eq!(made(&connector), 1);
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
fn attempts_that_hang_are_bounded() {
    let server = Server::start().unwrap();
    let mut endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    // Each attempt hangs while this is locked. `may_hang` is the number of attempts that may do so.
    let (hang, may_hang) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(1)));
    let (login_hangs, may_hang_now) = (Arc::clone(&hang), Arc::clone(&may_hang));
    let login = move || {
        let take = |left: usize| left.checked_sub(1);
        let order = Ordering::SeqCst;
        if may_hang_now.fetch_update(order, order, take).is_ok() {
            drop(login_hangs.lock());
        }
        Ok(Credentials::user("default", "s3cret"))
    };
    endpoint
        .set_credentials(CredentialsCallback::new(login))
        .unwrap();
    let connector = Connector::new(&Arc::new(endpoint));
    let hanging = hang.lock();
    // The attempt of this call hangs, so the call begins another one.
    let connection = connector.connect(LONG).unwrap();
    assert!(eventually(LONG, || running_attempts(&connector) == 1));
    may_hang.store(usize::MAX, Ordering::SeqCst);
    for _ in 0..3 * MAX_ATTEMPTS {
        assert!(connector.connect(SHORT).is_err());
        assert!(running_attempts(&connector) <= MAX_ATTEMPTS);
    }
    assert_eq!(running_attempts(&connector), MAX_ATTEMPTS);
    drop(hanging);
    wait_for_attempts(&connector);
    drop((connection, connector.connect(LONG).unwrap()));
}

/// Returns a connector whose attempts hang while the mutex is locked.
fn hanging_connector(server: &Server) -> (Arc<Connector>, Arc<Mutex<()>>) {
    let mut endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    let hang = Arc::new(Mutex::new(()));
    let login_hangs = Arc::clone(&hang);
    let login = move || {
        drop(login_hangs.lock());
        Ok(Credentials::user("default", "s3cret"))
    };
    endpoint
        .set_credentials(CredentialsCallback::new(login))
        .unwrap();
    (Connector::new(&Arc::new(endpoint)), hang)
}

/// A thousand clients that start together wait for their connections. If each checked every few milliseconds, the
/// attempts to connect would get too little time of the processors, and would time out.
#[test]
fn a_waiting_caller_checks_rarely() {
    let server = Server::start().unwrap();
    let (connector, hang) = hanging_connector(&server);
    let hanging = hang.lock();
    let waits = Duration::from_secs(1);
    assert!(connector.connect(waits).is_err());
    // Pauses of 5, 10, 20, 40, 80 and then 100 ms, and a check after the begin of each attempt.
    let checks = connector.checks.load(Ordering::SeqCst);
    assert!(checks <= 20, "{checks} checks in {waits:?}");
    drop(hanging);
    wait_for_attempts(&connector);
}

/// An unused client must not log in again and again, and clients must not all connect at once when Redis is back.
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
        wait_for_attempts(connector);
    }
    server.restart().unwrap();
    drop(connector.connect(LONG).unwrap());
}

/// If each failed attempt began the next one, an attempt would always be under way.
#[test]
fn attempts_that_overlap_end() {
    let server = Server::start().unwrap();
    server.stop();
    let timeout = Duration::from_secs(1);
    let endpoint = Endpoint::new(&server.url(), timeout, DEFAULT_MAX_REPLY).unwrap();
    let connector = Connector::new(&Arc::new(endpoint));
    assert!(connector.connect(timeout).is_err());
    wait_for_attempts(&connector);
}

#[test]
fn without_threads_the_caller_connects_itself() {
    let server = Server::start().unwrap();
    let connector = connector_to(&server.url());
    connector.has_no_threads.store(true, Ordering::Relaxed);
    drop(connector.connect(LONG).unwrap());
    assert_eq!(running_attempts(&connector), 0);
    let (_socket, address) = fake_server::refuses_connections();
    let closed = connector_to(&format!("redis://{address}"));
    closed.has_no_threads.store(true, Ordering::Relaxed);
    assert!(closed.connect(LONG).err().unwrap().is_lasting());
}
