//! Real servers under a scripted sentinel, which names one primary after another.

use leasehold_testbed::{Server, ServerBuilder, eventually};

use super::*;
use crate::Client;

struct Group {
    /// Dropped before the servers, since its end waits for their replies.
    client: Client,
    servers: [Server; 2],
    fake: Fake,
}

impl Group {
    /// Two primaries, of which the sentinel names the first.
    fn start() -> Self {
        let servers = [Server::start().unwrap(), Server::start().unwrap()];
        let fake = Fake::start(servers[0].port().into(), 1, vec![]);
        let url = format!("redis+sentinel://127.0.0.1:{}/g", fake.port);
        let client = Client::builder(&url)
            .ttl(3 * LONG)
            .command_timeout(LONG)
            .connect_timeout(LONG)
            .outage_timeout(LONG)
            .build()
            .unwrap();
        let is_watched = || !fake.subscribed.lock().is_empty();
        assert_eventually("a subscription", is_watched);
        Self {
            client,
            servers,
            fake,
        }
    }

    /// Makes the sentinel name the second server.
    fn switch(&self) {
        let [old, new] = self.servers.each_ref().map(Server::port);
        let mut script = self.fake.script.lock();
        (script.primary, script.epoch) = (new.into(), 2);
        drop(script);
        let message = format!("g 127.0.0.1 {old} 127.0.0.1 {new}");
        self.fake.publish(&message);
    }

    fn calls(&self, server: usize) -> u64 {
        self.servers[server].calls("evalsha").unwrap()
    }
}

/// The connections are younger than `SHORTEST_LIFE`. The old primary continues to work, like one that is cut off.
#[test]
fn an_old_primary_grants_nothing_after_a_switch() {
    let group = Group::start();
    let locks = || (0..8).map(|n| group.client.mutex(format!("k{n}")));
    for mutex in locks() {
        drop(mutex.lock().unwrap());
    }
    let queries = || group.fake.queries.load(Ordering::SeqCst);
    let asked = queries();
    group.switch();
    // The client asks again after it has handled the message.
    assert!(eventually(LONG, || queries() > asked));
    let before = group.calls(0);
    let guards: Vec<_> = locks().map(|mutex| mutex.lock().unwrap()).collect();
    assert_eq!(group.calls(0), before);
    assert_eq!(guards.len(), 8);
}

/// A caller whose time ends between two attempts gets the error of the first one.
#[test]
fn a_failed_attempt_is_known_before_the_next_one() {
    let server = Server::start().unwrap();
    // The attempts end only after many pauses, since each sentinel names the primary that refuses connections.
    let fakes: Vec<Fake> = (0..40).map(|_| Fake::start(1, 1, vec![])).collect();
    let endpoint = endpoint(&fakes.iter().collect::<Vec<_>>(), 3 * LONG);
    thread::scope(|scope| {
        let attempts = scope.spawn(|| endpoint.open());
        let error = || endpoint.last_error().map(|error| error.to_string());
        assert_eventually("a failed attempt", || error().is_some());
        assert!(!attempts.is_finished(), "the error came only at the end");
        let error = error().unwrap_or_default();
        assert!(error.contains("refuses connections"), "{error}");
        for fake in &fakes {
            let mut script = fake.script.lock();
            (script.primary, script.epoch) = (server.port().into(), 2);
        }
        drop(attempts.join().unwrap().unwrap());
    });
    assert!(endpoint.last_error().is_none());
}

/// A replica that a sentinel names as the primary.
fn replica_named_as_primary(server: ServerBuilder) -> (Server, Arc<Endpoint>, Fake) {
    let replica = server.arg("replicaof", "127.0.0.1 1").start().unwrap();
    let fake = Fake::start(replica.port().into(), 1, vec![]);
    let endpoint = endpoint(&[&fake], Duration::from_secs(3));
    (replica, endpoint, fake)
}

#[test]
fn a_replica_is_recognized_without_hello() {
    let without_hello = Server::builder().arg("rename-command", "HELLO \"\"");
    let (replica, endpoint, _fake) = replica_named_as_primary(without_hello);
    let error = endpoint.open().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("is no primary"), "{error}");
    let deny = ["ACL", "SETUSER", "default", "-role"];
    replica.command(&deny).unwrap();
    let error = endpoint.open().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("ROLE"), "{error}");
}

#[test]
fn notifications_of_a_replica_are_refused() {
    let (replica, endpoint, _fake) = replica_named_as_primary(Server::builder());
    let sentinels = endpoint.sentinels().unwrap();
    while_notifications_connect(&endpoint, || {
        assert_eventually("a doubt about the sentinel", || sentinels.doubts() > 0);
    });
    assert_eq!(replica.calls("subscribe").unwrap(), 0);
}

/// A switch may come after an attempt to connect has found the old primary, and before the socket is connected.
#[test]
fn a_connection_to_a_replaced_primary_fails() {
    let [server, replaced_by] = [Server::start().unwrap(), Server::start().unwrap()];
    let fake = Fake::start(server.port().into(), 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let deadline = MonotonicTime::now().after(LONG);
    let found = endpoint.find_server(deadline, &Sockets::default()).unwrap();
    let made_in = endpoint.begin_connection(&found).unwrap();
    fake.script.lock().primary = replaced_by.port().into();
    find(&endpoint).unwrap();
    let error = endpoint.open_found(found, made_in, deadline).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("is no primary any more"),
        "{error}"
    );
    assert!(endpoint.open().is_ok());
}

/// The connections to a frozen server stay open. The client closes the notification connection itself.
#[test]
fn a_frozen_old_primary_hides_no_loss() {
    let group = Group::start();
    let guard = group.client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    let is_notified = || {
        let clients = group.servers[0].command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        clients
            .unwrap()
            .as_text()
            .is_some_and(|clients| !clients.is_empty())
    };
    assert!(eventually(LONG, is_notified));
    group.servers[0].stop();
    group.switch();
    // Much less than `command_timeout`.
    assert!(lost.recv_timeout(LONG / 2).is_ok());
}
