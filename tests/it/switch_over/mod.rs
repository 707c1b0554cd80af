//! A switch-over that closes no connection: two servers swap their roles behind one address. Earlier connections lead
//! to the old primary, which still replies to reads.

mod locks;
mod notifications;
mod storms;
mod transactions;

use leasehold::Client;
use leasehold_testbed::{Proxy, Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, ask, channel_of, in_redis, kill_connections, notified_clients,
};

/// Two servers, and the address that leads to the primary.
struct Servers {
    old: Server,
    new: Server,
    proxy: Proxy,
}

impl Servers {
    /// Starts two servers; `new` is a replica of `old`, and has all its data.
    fn start() -> Self {
        let server = || {
            let builder = Server::builder().arg("repl-diskless-sync-delay", "0");
            builder.start().unwrap()
        };
        let (old, new) = (server(), server());
        replicate(&new, &old);
        let proxy = Proxy::start(old.port()).unwrap();
        Self { old, new, proxy }
    }

    fn client(&self) -> Client {
        let builder = steady(&self.proxy.url()).ttl(LONG_TTL);
        builder.build().unwrap()
    }

    /// A planned switch-over: writes are paused meanwhile, and nothing is lost.
    fn switch_over(&self) {
        ask(&self.old, &["CLIENT", "PAUSE", "60000", "WRITE"]);
        self.promote_the_new();
        replicate(&self.old, &self.new);
        ask(&self.old, &["CLIENT", "UNPAUSE"]);
    }

    /// As [`switch_over`](Self::switch_over), but writes on the new primary do not reach the old one.
    fn switch_over_apart(&self) {
        self.promote_the_new();
        ask(&self.old, &["REPLICAOF", "127.0.0.1", "1"]);
    }

    /// Makes the new server the primary, once it has all data of the old one.
    fn promote_the_new(&self) {
        let caught_up = || offset(&self.new, "slave") == offset(&self.old, "master");
        assert!(eventually(SOON, caught_up));
        ask(&self.new, &["REPLICAOF", "NO", "ONE"]);
        self.proxy.redirect(self.new.port());
    }

    /// Deletes a lock on the old primary only.
    fn drop_from_the_old(&self, key: &str) {
        ask(&self.old, &["REPLICAOF", "127.0.0.1", "1"]);
        ask(&self.old, &["CONFIG", "SET", "replica-read-only", "no"]);
        // In one step: a writable server without the lock would be a primary that has lost it.
        let client = redis::Client::open(self.old.url()).unwrap();
        let mut delete = redis::pipe();
        delete.atomic().del(in_redis(key));
        delete
            .cmd("CONFIG")
            .arg(&["SET", "replica-read-only", "yes"]);
        let deleted = delete.query::<(i64, String)>(&mut client.get_connection().unwrap());
        assert_eq!(deleted.unwrap(), (1, "OK".to_owned()));
    }

    /// Closes all connections to the old primary, except those for notifications.
    fn close_pipelines(&self) {
        kill_connections(&self.old);
    }
}

/// Makes `one` a replica of `other`, with all its data.
fn replicate(one: &Server, other: &Server) {
    ask(one, &["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    let linked = || replication(one).contains("master_link_status:up");
    assert!(eventually(SOON, linked), "{}", replication(one));
}

fn replication(server: &Server) -> String {
    let info = ask(server, &["INFO", "replication"]);
    info.as_text().unwrap().to_owned()
}

/// The replication offset of a server, in its `role`: `master` or `slave`.
fn offset(server: &Server, role: &str) -> String {
    let name = format!("{role}_repl_offset:");
    let info = replication(server);
    let offset = info.lines().find_map(|line| line.strip_prefix(&*name));
    offset.unwrap().trim().to_owned()
}

/// The number of connections on `server` that get the messages of `client`.
fn listening(server: &Server, client: &Client) -> i64 {
    let channel = channel_of(client);
    let Reply::Array(reply) = ask(server, &["PUBSUB", "NUMSUB", &channel]) else {
        panic!("PUBSUB NUMSUB answers with an array");
    };
    reply[1].as_int().unwrap()
}

/// Waits until the client is subscribed on the new primary, and nowhere else.
#[track_caller]
fn assert_listens_on_the_new(servers: &Servers, client: &Client) {
    let moved = || {
        (
            listening(&servers.old, client),
            listening(&servers.new, client),
        )
    };
    assert!(eventually(SOON, || moved() == (0, 1)), "{:?}", moved());
}

/// Makes the client subscribe on the old primary: it holds a lock for long enough to be tracked.
fn listen_on_the_old(servers: &Servers, client: &Client) -> leasehold::MutexGuard {
    let guard = client.mutex("watched").lock().unwrap();
    assert!(eventually(SOON, || notified_clients(&servers.old) > 0));
    guard
}
