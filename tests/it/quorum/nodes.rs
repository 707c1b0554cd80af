//! The nodes of a quorum, and the settings of its clients.

use std::time::Duration;

use leasehold::{Builder, Client, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::support::{LONG_TTL, SOON, ask, held_keys, in_redis, secs, value_of};

/// A time long before the test, in µs.
const PAST: &str = "1500000000000000";

/// Servers that vote at once, as if they had had their data for long.
pub struct Nodes(pub Vec<Server>);

impl Nodes {
    pub fn start(count: usize) -> Self {
        let nodes = Self::start_in_quarantine(count);
        nodes.0.iter().for_each(end_quarantine);
        nodes
    }

    pub fn start_in_quarantine(count: usize) -> Self {
        Self((0..count).map(|_| Server::start().unwrap()).collect())
    }

    pub fn urls(&self) -> Vec<String> {
        self.0.iter().map(Server::url).collect()
    }

    /// Settings with time-outs that a busy machine does not reach.
    pub fn builder(&self) -> Builder {
        builder(self.urls())
    }

    pub fn client(&self) -> Client {
        self.builder().build().unwrap()
    }

    /// How many nodes have the key of the lock.
    pub fn holding(&self, key: &str) -> usize {
        let has_key = |server: &&Server| value_of(server, key).is_some();
        self.0.iter().filter(has_key).count()
    }

    /// Extends the lease until all nodes have its key. A node that was slower than the majority may not have it before.
    #[track_caller]
    pub fn bring_to_all(&self, guard: &MutexGuard, key: &str) {
        let is_on_all = || guard.extend(LONG_TTL).is_ok() && self.holding(key) == self.0.len();
        assert!(eventually(SOON, is_on_all));
    }

    /// Fails unless all nodes have no lock soon.
    #[track_caller]
    pub fn assert_all_become_free(&self) {
        for server in &self.0 {
            let free = eventually(SOON, || held_keys(server).is_empty());
            assert!(free, "leaked: {:?}", held_keys(server));
        }
    }
}

/// The settings of a client of these nodes.
pub fn builder(urls: Vec<String>) -> Builder {
    Client::quorum_builder(urls)
        .max_ttl(LONG_TTL)
        .ttl(LONG_TTL)
        .connect_timeout(secs(8))
        .command_timeout(secs(8))
        .outage_timeout(secs(20))
        .environment_check(false)
}

/// As [`builder`], with time-outs for tests of nodes that do not reply.
pub fn impatient(urls: Vec<String>, timeout: Duration) -> Builder {
    builder(urls)
        .connect_timeout(timeout)
        .command_timeout(timeout)
        .outage_timeout(timeout)
}

/// Acts as if the server's process had had its data for long.
pub fn end_quarantine(server: &Server) {
    end_quarantine_of(server, &[&in_redis("")]);
}

/// As [`end_quarantine`], for the clients with these prefixes.
pub fn end_quarantine_of(server: &Server, prefixes: &[&str]) {
    let info = ask(server, &["INFO", "server"]);
    let mut lines = info.as_text().unwrap().lines();
    let id = lines.find_map(|line| line.strip_prefix("run_id:"));
    let mark = format!("{} {PAST}", id.unwrap().trim());
    for prefix in prefixes {
        ask(server, &["SET", &format!("{prefix}~data"), &mark]);
    }
}

/// The time of the latest token that the node has granted, in µs.
pub fn fence_counter(server: &Server) -> u64 {
    let micros = ask(server, &["ZSCORE", &in_redis("~fence"), "t"]);
    micros.as_int().map_or(0, i64::cast_unsigned)
}

/// Deletes all keys of a node but its mark, in one step. So no request finds a node without its mark, which would begin
/// a quarantine.
pub fn delete_all_but_the_mark(server: &Server) {
    const SCRIPT: &str = "local mark = redis.call('GET', KEYS[1])
        redis.call('FLUSHALL')
        return redis.call('SET', KEYS[1], mark)";
    ask(server, &["EVAL", SCRIPT, "1", &in_redis("~data")]);
}
