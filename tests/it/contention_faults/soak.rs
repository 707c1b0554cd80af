//! A short form of the bench `no_hang`: processes want one lock all the time while one connection
//! after another is killed. Nobody hangs, and nobody has company.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{Reply, Server};

use crate::child::{self, Child};
use crate::contention_faults::{KEY, assert_kept, connections, kill};
use crate::support::{LONG_TTL, SOON, ask, assert_all_become_free, builder, millis, server};

const PROCESSES: usize = 4;
const ROUNDS: u32 = 3;
const ROUND: Duration = Duration::from_secs(1);
/// How many are inside, and the tokens of all who were.
const INSIDE: &str = "seen:inside";
const TOKENS: &str = "seen:tokens";
/// The name of the connections that see to it.
const WITNESS: &str = "witness";

#[test]
fn processes_whose_connections_are_killed_never_hang() {
    let server = server();
    let racers: Vec<Child> = (0..PROCESSES)
        .map(|_| Child::start("contention_faults::soak::race", &server.url()))
        .collect();
    for racer in &racers {
        assert_eq!(racer.told(6 * SOON), "ready");
    }
    ask(&server, &["SET", "start", "1"]);
    let mut victim = 0;
    let start = Instant::now();
    while start.elapsed() < ROUNDS * ROUND {
        thread::sleep(millis(90));
        kill_one(&server, &mut victim);
    }
    let mut entries = 0;
    for racer in &racers {
        for _ in 0..ROUNDS {
            let told = racer.told(ROUND + SOON);
            entries += told.parse::<usize>().expect("how often it was inside");
        }
    }
    for racer in racers {
        racer.finish(SOON);
    }
    let Reply::Array(tokens) = ask(&server, &["LRANGE", TOKENS, "0", "-1"]) else {
        panic!("LRANGE answers with an array");
    };
    let tokens: Vec<i64> = tokens.iter().filter_map(Reply::as_int).collect();
    assert_eq!(tokens.len(), entries);
    assert!(tokens.is_sorted_by(|one, next| one < next), "they rise");
    assert_all_become_free(&server);
}

/// Kills some connection of the clients.
fn kill_one(server: &Server, victim: &mut usize) {
    let list = connections(server);
    let mut of_clients = list.iter().filter(|one| one.name != WITNESS);
    *victim += 7;
    if let Some(one) = of_clients.nth(*victim % list.len().max(1)) {
        kill(server, one);
    }
}

#[test]
#[ignore = "the work of processes_whose_connections_are_killed_never_hang, which starts it"]
fn race() {
    let Some(url) = child::url() else { return };
    let redis = redis::Client::open(url.as_str()).unwrap();
    let mut witness = redis.get_connection_with_timeout(SOON).unwrap();
    let mut name = redis::cmd("CLIENT");
    name.arg("SETNAME").arg(WITNESS).exec(&mut witness).unwrap();
    child::tell("ready");
    while redis::cmd("GET")
        .arg("start")
        .query::<Option<u8>>(&mut witness)
        .unwrap()
        .is_none()
    {
        thread::sleep(millis(1));
    }
    for _ in 0..ROUNDS {
        // Its first connection may be the one that is killed.
        let client = builder(&url).ttl(LONG_TTL).build_lazy().unwrap();
        let start = Instant::now();
        let mutex = client.mutex(KEY);
        let mut entries = 0;
        while start.elapsed() < ROUND {
            let guard = mutex.lock().unwrap();
            let mut enter = redis::pipe();
            enter.cmd("INCR").arg(INSIDE);
            enter
                .cmd("RPUSH")
                .arg(TOKENS)
                .arg(guard.fencing_token())
                .ignore();
            let (inside,): (usize,) = enter.query(&mut witness).unwrap();
            assert_eq!(inside, 1, "somebody else is inside with {guard:?}");
            redis::cmd("DECR").arg(INSIDE).exec(&mut witness).unwrap();
            entries += 1;
            match entries % 2 {
                0 => drop(guard),
                _ => assert_kept(guard.unlock()),
            }
        }
        child::tell(entries);
    }
}
