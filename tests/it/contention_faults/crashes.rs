//! Processes that die or are stopped while they hold a lock or wait for it.
//!
//! Each is a process of its own. It sends its parent its holder id before it waits, `entered` when it has the
//! lock, and `left` when it has released the lock.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{Builder, MutexGuard};
use leasehold_testbed::{Reply, Server, eventually};
use rustix::process::Signal;

use crate::child::{Child, Parent};
use crate::contention_faults::{KEY, unhurried};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, assert_all_become_free, make_first_join_earlier, millis,
    notification_connections, queue, secs, server, value_of, wait_for_queue,
};

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(5);
/// The key in Redis with the ttl of the processes' clients, in ms.
const TTL: &str = "settings:ttl";
/// The keys in Redis with the number of current holders, and with the tokens of all holders in order.
const INSIDE: &str = "seen:inside";
const TOKENS: &str = "seen:tokens";

fn number(server: &str, key: &str) -> u64 {
    let redis = redis::Client::open(server).unwrap();
    let mut connection = redis.get_connection_with_timeout(SOON).unwrap();
    redis::cmd("GET").arg(key).query(&mut connection).unwrap()
}

fn builder_of_process(url: &str) -> Builder {
    steady(url).ttl(millis(number(url, TTL)))
}

/// A section of code that only the holder enters, in any process. A counter in Redis shows whether two holders are
/// inside at the same time.
struct CriticalSection(redis::Connection);

impl CriticalSection {
    fn open(url: &str) -> Self {
        let redis = redis::Client::open(url).unwrap();
        Self(redis.get_connection_with_timeout(SOON).unwrap())
    }

    fn stay(&mut self, guard: &MutexGuard, stay: Duration) {
        let (inside, _): (usize, usize) = redis::pipe()
            .cmd("INCR")
            .arg(INSIDE)
            .cmd("RPUSH")
            .arg(TOKENS)
            .arg(guard.fencing_token())
            .query(&mut self.0)
            .unwrap();
        assert_eq!(inside, 1, "another holder is inside with {guard:?}");
        thread::sleep(stay);
        redis::cmd("DECR").arg(INSIDE).exec(&mut self.0).unwrap();
    }
}

/// Fails unless each holder had a greater token than the holder before.
#[track_caller]
fn assert_tokens_rose(server: &Server, entries: usize) {
    let Reply::Array(tokens) = ask(server, &["LRANGE", TOKENS, "0", "-1"]) else {
        panic!("LRANGE answers with an array");
    };
    let tokens: Vec<i64> = tokens.iter().filter_map(Reply::as_int).collect();
    assert_eq!(tokens.len(), entries, "{tokens:?}");
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

/// A process that waits for the lock.
pub(super) struct Waiter {
    child: Child,
    holder: String,
}

impl Waiter {
    fn start(server: &Server) -> Self {
        Self::start_as(wait_once, server)
    }

    fn start_as<F: Fn(&Parent)>(body: F, server: &Server) -> Self {
        let child = Child::start(body, &server.url());
        let holder = child.receive(6 * SOON);
        Self { child, holder }
    }

    /// Starts `count` processes, which join the queue one after another.
    pub(super) fn line(server: &Server, count: usize) -> Vec<Self> {
        let mut waiters = Vec::new();
        for n in 1..=count {
            waiters.push(Self::start(server));
            wait_for_queue(server, KEY, n);
        }
        waiters
    }

    /// Fails unless the process gets the lock within `limit` and releases it.
    #[track_caller]
    pub(super) fn has_its_turn(&self, limit: Duration) {
        assert_eq!(self.child.receive::<String>(limit), "entered");
        assert_eq!(self.child.receive::<String>(SOON), "left");
    }

    pub(super) fn stop(&self) {
        self.child.signal(Signal::STOP);
        let stat = PathBuf::from(format!("/proc/{}/stat", self.child.id()));
        let stopped = eventually(SOON, || {
            // Without /proc, the test assumes that the process has stopped.
            let Ok(stat) = std::fs::read_to_string(&stat) else {
                return true;
            };
            let state = stat.rsplit(')').next().map(str::trim_start);
            state.is_some_and(|state| state.starts_with('T'))
        });
        assert!(stopped, "{} does not stop", self.holder);
    }

    pub(super) fn resume(&self) {
        self.child.signal(Signal::CONT);
    }
}

pub fn wait_once(parent: &Parent) {
    let client = builder_of_process(&parent.url).build().unwrap();
    let mut section = CriticalSection::open(&parent.url);
    parent.tell(client.holder_id().to_string());
    let guard = client.mutex(KEY).lock().unwrap();
    parent.tell("entered");
    section.stay(&guard, millis(20));
    guard.unlock().unwrap();
    parent.tell("left");
    parent.wait_for_end();
}

pub fn enter_once(parent: &Parent) {
    let client = builder_of_process(&parent.url).build().unwrap();
    let mutex = client.mutex(KEY);
    parent.tell(client.holder_id().to_string());
    drop(mutex.lock().unwrap());
    parent.wait_for_end();
}

pub fn hold_until_killed(parent: &Parent) {
    let client = builder_of_process(&parent.url).build().unwrap();
    let guard = client.mutex(KEY).lock().unwrap();
    parent.tell("held");
    parent.wait_for_end();
    drop(guard);
}

pub(super) fn server_with_ttl(ttl: Duration) -> Server {
    let server = server();
    ask(&server, &["SET", TTL, &ttl.as_millis().to_string()]);
    server
}

#[test]
fn crashed_holders_cost_waiters_one_ttl_at_most() {
    let ttl = secs(5);
    let server = server_with_ttl(ttl);
    let mut holder = Child::start(hold_until_killed, &server.url());
    assert_eq!(holder.receive::<String>(6 * SOON), "held");
    let waiters = Waiter::line(&server, 4);
    holder.kill();
    let killed = Instant::now();
    for waiter in &waiters {
        waiter.has_its_turn(ttl + SLACK);
    }
    let took = killed.elapsed();
    assert!(took < ttl + SLACK, "the last grant came after {took:?}");
    assert_tokens_rose(&server, waiters.len());
    assert_all_become_free(&server);
}

/// Kills the processes at `places` of a queue of five. Fails unless the others get the lock long before a ttl ends.
fn kill_in_queue(places: &[usize]) {
    let server = server_with_ttl(LONG_TTL);
    let client = unhurried(&server.url());
    let held = client.mutex(KEY).lock().unwrap();
    let mut waiters = Waiter::line(&server, 5);
    let queued = queue(&server, KEY);
    let waiting = queued.iter().map(|one| one.rsplit(',').next());
    let holders = waiters.iter().map(|waiter| Some(waiter.holder.as_str()));
    assert!(waiting.eq(holders), "in arrival order: {queued:?}");

    for place in places {
        waiters[*place].child.kill();
    }
    let living = waiters.len() - places.len();
    // The client of this test, which holds the lock, has a notification connection, too.
    let noticed = || notification_connections(&server) <= living + 1;
    assert!(
        eventually(SOON, noticed),
        "Redis sees that the clients have gone"
    );
    held.unlock().unwrap();
    for (place, waiter) in waiters.iter().enumerate() {
        if !places.contains(&place) {
            waiter.has_its_turn(SLACK);
        }
    }
    assert_tokens_rose(&server, living);
    assert_all_become_free(&server);
}

#[test]
fn a_killed_first_waiter_is_skipped() {
    kill_in_queue(&[0]);
}

#[test]
fn a_killed_middle_waiter_is_skipped() {
    kill_in_queue(&[1, 3]);
}

#[test]
fn a_killed_last_waiter_leaves_nothing_held() {
    kill_in_queue(&[2, 3, 4]);
}

#[test]
fn a_killed_queue_leaves_nothing_held() {
    kill_in_queue(&[0, 1, 2, 3, 4]);
}

/// A tool that subscribes to all channels is not counted as a living client.
#[test]
fn a_pattern_subscriber_hides_no_killed_waiter() {
    let server = server_with_ttl(LONG_TTL);
    let client = unhurried(&server.url());
    let redis = redis::Client::open(server.url()).unwrap();
    let mut tool = redis.get_connection_with_timeout(SOON).unwrap();
    let mut tool = tool.as_pubsub();
    tool.psubscribe("*").unwrap();
    let held = client.mutex(KEY).lock().unwrap();
    let mut waiters = Waiter::line(&server, 2);
    waiters[0].child.kill();
    // The connections of the other waiter and of the holder are left.
    let noticed = || notification_connections(&server) <= 2;
    assert!(
        eventually(SOON, noticed),
        "Redis sees that the client has gone"
    );
    held.unlock().unwrap();
    waiters[1].has_its_turn(SLACK);
    assert_all_become_free(&server);
}

/// Redis grants the lock to a stopped process, which loses the lock when the ttl ends.
#[test]
fn a_stopped_waiter_loses_its_turn_and_knows() {
    let ttl = secs(2);
    let server = server_with_ttl(ttl);
    let holder = unhurried(&server.url());
    let next = unhurried(&server.url());
    let held = holder.mutex(KEY).lock().unwrap();
    let still = Waiter::start(&server);
    wait_for_queue(&server, KEY, 1);
    let mutex = next.mutex(KEY);
    let second = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 2);
    still.stop();
    held.unlock().unwrap();
    let value = value_of(&server, KEY).unwrap();
    assert!(
        value.contains(&still.holder),
        "the process has the lock: {value}"
    );
    let second = second.within(
        ttl + SLACK,
        "the grant after the ttl of the stopped process",
    );
    let mut section = CriticalSection::open(&server.url());

    still.resume();
    section.stay(&second, millis(700));
    second.check().unwrap();
    wait_for_queue(&server, KEY, 1);
    second.unlock().unwrap();
    still.has_its_turn(SLACK);
    assert_tokens_rose(&server, 2);
    assert_all_become_free(&server);
}

/// The process has waited for so long that it may have been stopped: Redis grants it the key for two seconds
/// at first.
#[test]
fn a_waiter_stopped_for_long_costs_less_than_its_ttl() {
    let server = server_with_ttl(LONG_TTL);
    let clients = [(); 2].map(|()| unhurried(&server.url()));
    let held = clients[0].mutex(KEY).lock().unwrap();
    let still = Waiter::start(&server);
    wait_for_queue(&server, KEY, 1);
    let mutex = clients[1].mutex(KEY);
    let second = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 2);
    still.stop();
    make_first_join_earlier(&server, KEY, secs(3600));
    held.unlock().unwrap();
    let value = value_of(&server, KEY).unwrap();
    assert!(
        value.contains(&still.holder),
        "the process has the lock: {value}"
    );
    let second = second.within(LONG_TTL / 2, "the grant after the stopped process");

    still.resume();
    second.check().unwrap();
    wait_for_queue(&server, KEY, 1);
    assert_eq!(queue(&server, KEY).len(), 1, "the process waits again");
    second.unlock().unwrap();
    still.has_its_turn(SLACK);
    assert_tokens_rose(&server, 1);
    assert_all_become_free(&server);
}

/// Each process is resumed just before or just after its grant expires.
#[test]
fn waiters_resumed_as_their_turn_ends_enter_alone() {
    let ttl = millis(1500);
    let server = server_with_ttl(ttl);
    let holder = unhurried(&server.url());
    let held = holder.mutex(KEY).lock().unwrap();
    let waiters = Waiter::line(&server, 3);
    for waiter in &waiters {
        waiter.stop();
    }
    held.unlock().unwrap();
    thread::sleep(ttl - millis(20));
    for waiter in &waiters {
        waiter.resume();
    }
    for waiter in &waiters {
        waiter.has_its_turn(ttl + SLACK);
    }
    assert_tokens_rose(&server, waiters.len());
    assert_all_become_free(&server);
}

/// The process is killed when its turn comes. Redis grants it the lock or skips it; the others wait for one ttl at
/// most.
#[test]
fn waiters_killed_at_their_turn_cost_one_ttl() {
    let ttl = secs(1);
    let server = server_with_ttl(ttl);
    let holder = unhurried(&server.url());
    let next = unhurried(&server.url());
    for delay in [0, 200, 700].map(Duration::from_micros) {
        let held = holder.mutex(KEY).lock().unwrap();
        let mut first = Waiter::start_as(enter_once, &server);
        wait_for_queue(&server, KEY, 1);
        let mutex = next.mutex(KEY);
        let second = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, 2);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(delay);
                held.unlock().unwrap();
            });
            first.child.kill();
        });
        let guard = second.within(ttl + SLACK, "the grant after the killed process");
        guard.unlock().unwrap();
        assert_all_become_free(&server);
    }
}
