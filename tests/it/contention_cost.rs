//! Many clients with one thread each compete for one key. A grant costs the same however many clients wait, and clients
//! are served in the order in which they asked.

use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use leasehold_load::ServerStats;
use leasehold_testbed::{Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, ask, server};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);
/// Long enough for every notified waiter to send the requests that follow a notification.
const HOLD: Duration = Duration::from_millis(5);
/// Measured grants per client.
const ROUNDS: usize = 2;
/// Commands that only scripts call in this test.
const SCRIPTED: [&str; 17] = [
    "append",
    "del",
    "getrange",
    "pexpire",
    "pttl",
    "publish",
    "pubsub|numsub",
    "set",
    "time",
    "zadd",
    "zcard",
    "zcount",
    "zpopmin",
    "zrange",
    "zrank",
    "zrem",
    "zscore",
];

/// All grants, in order; only holders write it.
struct Contention {
    server: Server,
    clients: usize,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    /// The client of each grant.
    grants: Vec<usize>,
    /// The number of the grant, and the number of grants when its client asked.
    waits: Vec<(usize, usize)>,
    measured: Option<Measured>,
}

struct Measured {
    /// The number of grants before the measurement.
    start: usize,
    before: ServerStats,
    cost: Option<ServerStats>,
}

impl Contention {
    /// Locks and releases the key, as one client, until the measurement is over.
    fn compete(&self, client: usize, mutex: &leasehold::Mutex) {
        loop {
            let asked = self.log.lock().unwrap().grants.len();
            let guard = mutex.lock().unwrap();
            let is_over = self.granted(client, asked);
            if is_over {
                return;
            }
            thread::sleep(HOLD);
            drop(guard);
        }
    }

    /// Records a grant; only the holder calls this. The measurement begins when every client has had a grant.
    fn granted(&self, client: usize, asked: usize) -> bool {
        let mut log = self.log.lock().unwrap();
        let number = log.grants.len();
        log.grants.push(client);
        log.waits.push((number, asked));
        let served = || ServerStats::until_now(&self.server).unwrap();
        match &mut log.measured {
            None => {
                let mut seen = vec![false; self.clients];
                log.grants.iter().for_each(|client| seen[*client] = true);
                if seen.iter().all(|seen| *seen) {
                    log.measured = Some(Measured {
                        start: number,
                        before: served(),
                        cost: None,
                    });
                }
                false
            }
            Some(measured) if measured.cost.is_none() => {
                if number == measured.start + ROUNDS * self.clients {
                    measured.cost = Some(served().since(&measured.before));
                }
                false
            }
            Some(_) => true,
        }
    }
}

/// Lets `count` clients compete. Afterwards nothing is left in Redis.
fn compete(count: usize) {
    let contention = Arc::new(Contention {
        server: server(),
        clients: count,
        log: Mutex::default(),
    });
    let barrier = Arc::new(Barrier::new(count));
    let tasks: Vec<_> = (0..count)
        .map(|number| {
            let client = steady(&contention.server.url()).ttl(LONG_TTL);
            let mutex = client.build().unwrap().mutex("k");
            let (contention, barrier) = (Arc::clone(&contention), Arc::clone(&barrier));
            Task::start(move || {
                barrier.wait();
                contention.compete(number, &mutex);
            })
        })
        .collect();
    for task in tasks {
        task.within(WORK, "competing");
    }
    // Only the fence counter stays in Redis.
    let free = || ask(&contention.server, &["DBSIZE"]) == Reply::Int(1);
    let keys = || ask(&contention.server, &["KEYS", "*"]);
    assert!(eventually(SOON, free), "left in Redis: {}", keys());
    let log = contention.log.lock().unwrap();
    let measured = log.measured.as_ref().unwrap();
    assert_cheap(count, measured.cost.as_ref().unwrap());
    assert_in_order(count, &log, measured.start);
}

fn assert_cheap(clients: usize, cost: &ServerStats) {
    let grants = (ROUNDS * clients) as f64;
    let requests = cost.requests(&SCRIPTED) as f64 / grants;
    assert!(
        requests <= 5.0,
        "{requests} requests per grant: {:?}",
        cost.calls
    );
    // Redis counts requests that arrive together as one read.
    let reads = cost.reads as f64 / grants;
    assert!(reads <= 5.0, "{reads} reads per grant: {:?}", cost.calls);
    let bytes = cost.bytes() as f64 / grants;
    assert!(bytes <= 4096.0, "{bytes} bytes per grant: {:?}", cost.calls);
}

/// Fails unless clients were served in order. During one wait, each other client may be granted the lock twice: once
/// because it was ahead, and once if its next request reached Redis before the request of this wait.
fn assert_in_order(clients: usize, log: &Log, start: usize) {
    for (number, asked) in log.waits.iter().filter(|(_, asked)| *asked >= start) {
        let mut counts = vec![0; clients];
        let during = &log.grants[*asked..*number];
        during.iter().for_each(|client| counts[*client] += 1);
        let most = counts.into_iter().max().unwrap();
        assert!(
            most <= 2,
            "another client was granted {most} times during a wait"
        );
    }
}

#[test]
fn sixty_clients_are_served_cheaply_in_order() {
    compete(60);
}

#[test]
fn hundreds_of_clients_are_served_cheaply_in_order() {
    compete(240);
}
