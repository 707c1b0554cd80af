//! Permits on a server: clients, replies and the server fail, and the clock of the server changes.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, LossReason, Semaphore};
use leasehold_testbed::terms::{Share, Term, bursts};
use leasehold_testbed::{OwnClock, Proxy, Reply, Server, eventually};
use serde::{Deserialize, Serialize};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, in_redis, in_time, lost_within, millis, notified_clients, secs,
    server, wait_for_queue,
};

fn client(url: &str) -> Client {
    steady(url).ttl(LONG_TTL).build().unwrap()
}

fn ids(semaphore: &Semaphore) -> BTreeSet<String> {
    let found = semaphore.inspect().unwrap();
    found.holders().iter().map(|holder| holder.id()).collect()
}

#[test]
fn a_release_of_lost_permits_frees_no_others() {
    let server = server();
    let [one, two, operator] = [(); 3].map(|()| client(&server.url()).semaphore("k", 5));
    let (taken, kept) = (one.clone().weight(2).acquire(), one.acquire());
    let (taken, kept, other) = (taken.unwrap(), kept.unwrap(), two.acquire().unwrap());
    let found = operator.inspect().unwrap();
    let holder = found.holders().iter().find(|one| one.id() == taken.id());
    assert!(operator.force_unlock(holder.unwrap()).unwrap());
    lost_within(SOON, &taken.lost_signal());
    assert!(taken.unlock().unwrap_err().is_lease_lost());
    assert_eq!(ids(&operator), BTreeSet::from([kept.id(), other.id()]));
    assert_eq!(operator.inspect().unwrap().available(), 3);
    kept.unlock().unwrap();
    other.unlock().unwrap();
}

#[test]
fn ended_permits_are_free_although_they_are_still_stored() {
    let server = server();
    let semaphore = client(&server.url()).semaphore("k", 3);
    let kept = semaphore.acquire().unwrap();
    let ends = semaphore.clone().weight(2).fixed_ttl(millis(200));
    // The guard is kept, since its drop would send a request.
    let ended = ends.acquire().unwrap();
    lost_within(SOON, &ended.lost_signal());
    let available = || semaphore.inspect().unwrap().available();
    assert!(eventually(SOON, || available() == 2), "{}", available());
    // Clients have not asked for permits since then.
    assert_eq!(ask(&server, &["ZCARD", &in_redis("k")]), Reply::Int(3));
    assert_eq!(ids(&semaphore), BTreeSet::from([kept.id()]));
    let next = semaphore.clone().weight(2).try_acquire().unwrap();
    assert!(next.is_some());
    assert_eq!(ask(&server, &["ZCARD", &in_redis("k")]), Reply::Int(3));
}

#[test]
fn a_closed_client_has_no_permits() {
    let server = server();
    let (closes, waits) = (client(&server.url()), client(&server.url()));
    let permits = [(); 2].map(|()| closes.semaphore("k", 2).acquire().unwrap());
    let semaphore = waits.semaphore("k", 2).weight(2);
    let waiter = Task::start(move || semaphore.acquire().unwrap());
    wait_for_queue(&server, "k", 1);
    drop(closes);
    drop(permits);
    waiter
        .within(SOON, "the permits of the closed client")
        .unlock()
        .unwrap();
}

/// The first waiter sleeps until the share with the latest end has ended. This share is released, so the waiter now
/// fits at an earlier end.
#[test]
fn a_release_that_shortens_a_wait_hints_the_waiter() {
    let server = server();
    let [ends, releases, waits] = [(); 3].map(|()| client(&server.url()));
    let ends = ends.rw_lock("k").fixed_ttl(millis(900)).read().unwrap();
    let latest = releases.rw_lock("k").read().unwrap();
    let lock = waits.rw_lock("k");
    let waiter = Task::start(move || lock.write().unwrap());
    wait_for_queue(&server, "k", 1);
    assert!(eventually(SOON, || notified_clients(&server) >= 1));
    let published = || server.calls("publish").unwrap();
    let before = published();
    latest.unlock().unwrap();
    if !ends.is_lost() {
        assert!(published() > before, "no hint");
    }
    drop(waiter.within(SOON, "the grant after the last end"));
}

#[test]
fn waiters_for_permits_enter_after_a_restart() {
    const WAITERS: usize = 6;
    let mut server = server();
    let url = server.url();
    let holder = client(&url).semaphore("k", 2).weight(2).acquire().unwrap();
    let waiters: Vec<_> = (0..WAITERS)
        .map(|n| {
            let client = client(&url);
            let wait = move || {
                let semaphore = client.semaphore("k", 2);
                semaphore.acquire().unwrap().unlock().unwrap();
            };
            let waiter = Task::start(wait);
            wait_for_queue(&server, "k", n + 1);
            waiter
        })
        .collect();
    server.kill();
    server.restart().unwrap();
    // The server has no data: neither the permits nor the queue.
    for waiter in waiters {
        waiter.within(6 * SOON, "its turn after the restart");
    }
    assert_eq!(
        lost_within(SOON, &holder.lost_signal()),
        LossReason::Deleted
    );
}

#[test]
fn shares_leave_no_key_queue_or_channel() {
    let server = server();
    let clients = [(); 3].map(|()| client(&server.url()));
    let tasks: Vec<_> = clients
        .iter()
        .cycle()
        .take(6)
        .map(|client| {
            let (permits, lock) = (client.semaphore("p", 3).weight(2), client.rw_lock("r"));
            Task::start(move || {
                for n in 0..20 {
                    permits.acquire().unwrap().unlock().unwrap();
                    drop(lock.read().unwrap());
                    if n % 4 == 0 {
                        lock.write().unwrap().unlock().unwrap();
                    }
                    let ends = permits.clone().fixed_ttl(millis(50));
                    std::mem::forget(ends.try_acquire().unwrap());
                    drop(in_time(permits.try_acquire_for(millis(1))));
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(6 * SOON, "its turns");
    }
    // A wait that is cancelled behind a holder.
    let held = clients[0].rw_lock("r").write().unwrap();
    let (stop, stopped) = bounded(0);
    let leaves = clients[1].rw_lock("r").cancelled_by(stopped);
    let waiter = Task::start(move || leaves.read().map(drop).unwrap_err());
    wait_for_queue(&server, "r", 1);
    drop(stop);
    waiter.within(SOON, "the end of its wait");
    drop(held);
    // A key with a shortest hold.
    let rests = clients[0].semaphore("m", 1).min_hold(millis(50));
    drop(rests.acquire().unwrap());
    for client in clients {
        client.shutdown(SOON).unwrap();
    }
    let left = || {
        let Reply::Array(keys) = ask(&server, &["KEYS", "*"]) else {
            panic!("KEYS answers with an array");
        };
        let keys = keys.iter().filter_map(Reply::as_text).map(str::to_owned);
        let fence = in_redis("~fence");
        keys.filter(|key| !key.starts_with(&fence))
            .collect::<Vec<_>>()
    };
    assert!(eventually(SOON, || left().is_empty()), "{:?}", left());
    let channels = || ask(&server, &["PUBSUB", "CHANNELS", "*"]);
    let is_closed = || channels() == Reply::Array(Vec::new());
    assert!(eventually(SOON, is_closed), "{:?}", channels());
}

#[test]
fn a_lost_reply_leaves_one_lease() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (cut, direct) = (client(&proxy.url()), client(&server.url()));
    let semaphore = direct.semaphore("k", 5);
    let first = cut.semaphore("k", 5).acquire().unwrap();
    proxy.hold_replies(true);
    let asks = cut.semaphore("k", 5).weight(2);
    let waiter = Task::start(move || asks.acquire().unwrap());
    let taken = || semaphore.inspect().unwrap().taken();
    assert!(eventually(SOON, || taken() == 3), "{}", taken());
    let unanswered = ids(&semaphore);
    proxy.cut_all();
    proxy.hold_replies(false);
    let permit = waiter.within(SOON, "the repeated request");
    assert!(!unanswered.contains(&permit.id()));
    assert!(eventually(SOON, || taken() == 3), "{}", taken());
    assert_eq!(ids(&semaphore), BTreeSet::from([first.id(), permit.id()]));
}

/// A window of this length contains at most `STARTS` starts.
const MIN_HOLD: Duration = Duration::from_secs(1);
const STARTS: u32 = 10;
const PROCESSES: usize = 5;
const CLIENTS: usize = 20;

/// A grant, which happened between these two times of the machine's clock, in µs.
#[derive(Serialize, Deserialize)]
struct Start {
    asked: u64,
    granted: u64,
}

fn machine_micros() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_micros() as u64
}

/// Starts work again and again with a client for each thread, in a child process that is killed.
pub fn start_until_killed(parent: &Parent) {
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let client = steady(&parent.url).ttl(MIN_HOLD).build().unwrap();
                let limit = client.semaphore("k", STARTS).min_hold(MIN_HOLD);
                loop {
                    let asked = machine_micros();
                    let permit = limit.acquire().unwrap();
                    let granted = machine_micros();
                    parent.tell(Start { asked, granted });
                    drop(permit);
                }
            });
        }
    });
}

#[test]
fn killed_clients_start_no_more_than_the_limit() {
    const KILLS: usize = 10;
    let server = server();
    let start = || Child::start(start_until_killed, &server.url());
    let mut children: Vec<Child> = (0..PROCESSES).map(|_| start()).collect();
    let mut terms: Vec<Term> = Vec::new();
    for kill in 0..KILLS {
        // The child is killed while its clients wait or hold permits.
        let child = &mut children[kill * 3 % PROCESSES];
        for _ in 0..5 {
            terms.push(term(child.receive(6 * SOON)));
        }
        child.kill();
        terms.extend(child.rest().into_iter().map(term));
        *child = start();
    }
    for mut child in children {
        child.kill();
        terms.extend(child.rest().into_iter().map(term));
    }
    let window = MIN_HOLD.as_micros() as u64;
    let found = bursts(&terms, STARTS, window);
    assert!(found.is_empty(), "{found:?} of {terms:#?}");
    assert!(terms.len() >= 5 * KILLS, "{} starts", terms.len());
    // The check can fail: it finds a window with one start too many.
    let asked = terms[0].asked;
    let planted = Term {
        asked,
        from: asked,
        ..terms[0].clone()
    };
    let planted = std::iter::repeat_n(planted, STARTS as usize + 1);
    assert_eq!(
        bursts(&planted.collect::<Vec<_>>(), STARTS, window).len(),
        1
    );
}

fn term(Start { asked, granted }: Start) -> Term {
    let (weight, limit) = (1, STARTS);
    Term {
        share: Share::Permits { weight, limit },
        asked,
        queued: None,
        from: granted,
        to: granted,
    }
}

/// A server whose clock is ahead of the machine's clock by this time. `None` without libfaketime.
fn server_ahead(by: i64) -> Option<Server> {
    let clock = OwnClock::find()?;
    let server = Server::builder().own_clock(&clock).start().unwrap();
    set_ahead(&server, by);
    Some(server)
}

fn set_ahead(server: &Server, by: i64) {
    server.set_clock_offset(1_000_000 * by).unwrap();
}

#[test]
fn a_clock_set_back_lets_no_more_start() {
    let Some(server) = server_ahead(0) else {
        return;
    };
    let limit = client(&server.url()).semaphore("k", 2).min_hold(secs(1));
    for _ in 0..2 {
        limit.acquire().unwrap().unlock().unwrap();
    }
    set_ahead(&server, -60);
    // According to other clocks, the window has ended.
    assert!(limit.try_acquire_for(millis(1_500)).unwrap().is_none());
    set_ahead(&server, 60);
    assert!(limit.try_acquire_for(SOON).unwrap().is_some());
}

#[test]
fn permits_outlive_a_move_to_a_server_with_another_clock() {
    for ahead in [20, -20] {
        let (from, Some(to)) = (server(), server_ahead(ahead)) else {
            return;
        };
        let (one, two) = (client(&from.url()), client(&to.url()));
        // The ttl is shorter than the difference of the clocks.
        let of_two = |client: &Client| client.semaphore("k", 2).fixed_ttl(secs(10));
        let held = [(); 2].map(|()| of_two(&one).acquire().unwrap());
        let port = to.port().to_string();
        let key = in_redis("k");
        let migrate = ["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"];
        assert_eq!(ask(&from, &migrate).as_text(), Some("OK"));
        let semaphore = of_two(&two);
        assert!(semaphore.try_acquire().unwrap().is_none(), "{ahead}");
        let found = semaphore.inspect().unwrap();
        assert_eq!((found.taken(), found.available()), (2, 0), "{ahead}");
        for holder in found.holders() {
            assert!(holder.expires_in() <= Some(secs(10)), "{ahead} {holder:?}");
        }
        assert_eq!(held.len(), 2);
    }
}
