//! The cases: the clients and threads, their requests, and how long they hold the key.

use std::time::Duration;

use leasehold_load::Share;
use serde::{Deserialize, Serialize};

/// A library, or the scripts, with which the threads of a case share a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// Scripts without a library, which poll.
    Raw,
    /// leasehold's `RwLock`, `Semaphore` or `Mutexes`, with dropped guards.
    Leasehold,
    /// leasehold's `Mutex`, for a semaphore of one permit.
    Mutex,
    /// Redisson's `RReadWriteLock`, `RPermitExpirableSemaphore` or `RedissonMultiLock`.
    Redisson,
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Leasehold => "leasehold",
            Self::Mutex => "mutex",
            Self::Redisson => "redisson",
        }
    }
}

/// The two kinds of requests of a case, and how many of 100 are of the second kind.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Mix {
    pub first: Share,
    pub second: Share,
    pub second_percent: u32,
}

pub struct Case {
    pub name: String,
    pub title: String,
    pub mix: Mix,
    pub processes: usize,
    pub threads: usize,
    /// Whether each thread has its own client.
    pub own_clients: bool,
    pub hold: Duration,
    /// The number of further readers that hold the key all the time.
    pub others: usize,
    pub ways: &'static [Way],
}

impl Case {
    pub fn seats(&self) -> usize {
        self.processes * self.threads
    }
}

const ALL: &[Way] = &[Way::Raw, Way::Leasehold, Way::Redisson];
/// Cases with hundreds of clients measure only leasehold: clients that poll, or that have dozens of connections each,
/// would need all of the machine.
const OWN: &[Way] = &[Way::Leasehold];
const BESIDE_MUTEX: &[Way] = &[Way::Mutex, Way::Leasehold, Way::Raw];
const WITHOUT_PEER: &[Way] = &[Way::Raw, Way::Leasehold];
const BESIDE_REDISSON: &[Way] = &[Way::Leasehold, Way::Redisson];

fn rw(reads: u32) -> Mix {
    Mix {
        first: Share::Read,
        second: Share::Write,
        second_percent: 100 - reads,
    }
}

fn permits(limit: u32, heavy: u32, heavy_percent: u32) -> Mix {
    let of = |weight| Share::Permits { weight, limit };
    Mix {
        first: of(1),
        second: of(heavy),
        second_percent: heavy_percent,
    }
}

fn keys(count: u32, of: u32) -> Mix {
    let set = Share::Keys { count, of };
    Mix {
        first: set,
        second: set,
        second_percent: 0,
    }
}

/// All cases, in their order.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let case = |name: String, title: String, mix, (processes, threads), millis, ways| Case {
        name,
        title,
        mix,
        processes,
        threads,
        own_clients: false,
        hold: Duration::from_millis(millis),
        others: 0,
        ways,
    };
    for reads in [100, 95, 50] {
        for hold in [0, 1, 5] {
            let title = format!("4 processes of 16 threads, {reads} % reads, held for {hold} ms");
            let name = format!("rw-{reads}-{hold}ms");
            cases.push(case(name, title, rw(reads), (4, 16), hold, ALL));
        }
    }
    let title = "1,000 clients of 1 thread, 95 % reads, held for 5 ms".to_owned();
    cases.push(Case {
        own_clients: true,
        ..case("rw-1000-clients".into(), title, rw(95), (4, 250), 5, OWN)
    });
    for own_clients in [false, true] {
        let who = if own_clients { "clients" } else { "threads" };
        let title = match own_clients {
            true => "16 clients of 1 thread, reads only, released at once",
            false => "1 client of 16 threads, reads only, released at once",
        };
        let name = format!("rw-16-{who}");
        cases.push(Case {
            own_clients,
            ..case(name, title.into(), rw(100), (1, 16), 0, WITHOUT_PEER)
        });
    }
    for others in [0, 10, 100, 1_000, 9_999] {
        let title = format!("1 thread that reads beside {others} other readers");
        let name = format!("rw-beside-{others}");
        cases.push(Case {
            others,
            ..case(name, title, rw(100), (1, 1), 0, ALL)
        });
    }
    for hold in [0, 5, 50] {
        let title = format!("100 clients of 1 thread, 10 permits, held for {hold} ms");
        let name = format!("semaphore-{hold}ms");
        let mix = permits(10, 1, 0);
        cases.push(Case {
            own_clients: true,
            ..case(name, title, mix, (4, 25), hold, ALL)
        });
    }
    let title = "100 clients of 1 thread, 10 permits, weights 1 and 5, held for 5 ms".to_owned();
    let mix = permits(10, 5, 20);
    cases.push(Case {
        own_clients: true,
        ..case("semaphore-weights".into(), title, mix, (4, 25), 5, ALL)
    });
    let title = "1,000 clients of 1 thread, 10 permits, held for 5 ms".to_owned();
    let name = "semaphore-1000-clients".to_owned();
    cases.push(Case {
        own_clients: true,
        ..case(name, title, permits(10, 1, 0), (4, 250), 5, OWN)
    });
    let title = "16 clients of 1 thread, 1 permit, released at once".to_owned();
    let mix = permits(1, 1, 0);
    cases.push(Case {
        own_clients: true,
        ..case(
            "semaphore-of-one".into(),
            title,
            mix,
            (4, 4),
            0,
            BESIDE_MUTEX,
        )
    });
    let title = "1 thread that locks 8 free keys".to_owned();
    let name = "sets-8-free".to_owned();
    cases.push(case(name, title, keys(8, 8), (1, 1), 0, BESIDE_REDISSON));
    for hold in [0, 5] {
        let title = format!("100 clients of 1 thread, random 3 of 10 keys, held for {hold} ms");
        let name = format!("sets-3-of-10-{hold}ms");
        cases.push(Case {
            own_clients: true,
            ..case(name, title, keys(3, 10), (4, 25), hold, BESIDE_REDISSON)
        });
    }
    cases
}
