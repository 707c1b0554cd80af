//! Many waiters that stand still, as when a machine or a zone fails: they delay the others once, however many they are.

use std::ops::Range;
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold_testbed::{Server, eventually};
use redis::{Connection, PubSub};

use crate::contention_faults::crashes::Waiter;
use crate::contention_faults::{KEY, unhurried};
use crate::support::{
    LONG_TTL, SOON, Task, ask, assert_all_become_free, in_redis, micros_now, notified_clients,
    queue, server, wait_for_queue,
};

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(10);

/// Clients that are subscribed and never reply, as those of stopped processes.
struct Frozen {
    redis: Connection,
}

fn holder(n: usize) -> String {
    format!("frozen/{n}/0badcafe")
}

impl Frozen {
    fn connect(server: &Server) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        let redis = client.get_connection_with_timeout(SOON).unwrap();
        redis.set_read_timeout(Some(SOON)).unwrap();
        Self { redis }
    }

    fn subscribe(&mut self, count: usize) -> PubSub<'_> {
        let mut subscriber = self.redis.as_pubsub();
        for n in 0..count {
            let channel = in_redis("~to:") + &holder(n);
            subscriber.subscribe(channel).unwrap();
        }
        subscriber.subscribe("so far").unwrap();
        subscriber
    }
}

/// Queues a waiter of each of these frozen clients, behind all others. The waiters ask for the key in these modes.
fn queue_frozen(server: &Server, clients: Range<usize>, mode: fn(usize) -> &'static str) {
    for n in clients {
        let joined = micros_now(server).to_string();
        let entry = format!("{n:032x},{}{},{}", LONG_TTL.as_millis(), mode(n), holder(n));
        let queue = in_redis(&format!("~queue:{KEY}"));
        ask(server, &["ZADD", &queue, &joined, &entry]);
    }
}

/// Acts as if all waiters had joined an hour earlier.
fn make_joins_earlier(server: &Server) {
    let name = in_redis(&format!("~queue:{KEY}"));
    for entry in queue(server, KEY) {
        ask(server, &["ZINCRBY", &name, "-3600000000", &entry]);
    }
}

/// The grants that were published for frozen clients.
fn grants(server: &Server, subscriber: &mut PubSub) -> usize {
    ask(server, &["PUBLISH", "so far", ""]);
    let mut grants = 0;
    loop {
        let message = subscriber.get_message().unwrap();
        if message.get_channel_name() == "so far" {
            return grants;
        }
        let text: String = message.get_payload().unwrap();
        let kind = text.split(' ').nth(1).unwrap_or_default();
        grants += usize::from(kind.trim_start_matches('?').parse::<u64>().is_ok());
    }
}

/// Frozen waiters stand before and between the living ones, so that a chain of delays would show.
#[test]
fn frozen_waiters_delay_the_living_once() {
    let server = server();
    let mut frozen = Frozen::connect(&server);
    for count in [5, 10, 20, 50] {
        let mut subscriber = frozen.subscribe(count);
        let clients = [(); 3].map(|()| unhurried(&server.url()));
        let held = clients[0].mutex(KEY).lock().unwrap();
        queue_frozen(&server, 0..count / 2, |_| "");
        let served = Arc::new(StdMutex::new(Vec::new()));
        let tasks = [1, 2].map(|n| {
            let (mutex, served) = (clients[n].mutex(KEY), Arc::clone(&served));
            let before = queue(&server, KEY).len();
            let task = Task::start(move || {
                let guard = mutex.lock().unwrap();
                served.lock().unwrap().push(n);
                guard.unlock().unwrap();
            });
            wait_for_queue(&server, KEY, before + 1);
            if n == 1 {
                queue_frozen(&server, count / 2..count, |_| "");
            }
            task
        });
        make_joins_earlier(&server);
        let released = Instant::now();
        held.unlock().unwrap();
        for task in tasks {
            task.within(SLACK, "the grant behind the frozen waiters");
        }
        eprintln!("{count} frozen: {:?}", released.elapsed());
        assert_eq!(grants(&server, &mut subscriber), 1, "{count} frozen");
        assert_eq!(served.lock().unwrap().len(), 2);
        drop(subscriber);
        assert_all_become_free(&server);
    }
}

/// A key, the modes of the frozen waiters, and a call that holds the key until its result is dropped.
type Shared = (fn(usize) -> &'static str, fn(&Client) -> Held);
type Held = Box<dyn Send>;

/// Frozen waiters of a semaphore, and frozen readers between frozen writers. None of them confirms its share.
#[test]
fn frozen_waiters_for_shares_delay_the_living_once() {
    let cases: [Shared; 2] = [
        (
            |_| "p1/1",
            |client| Box::new(client.semaphore(KEY, 1).acquire().unwrap()),
        ),
        (
            |n| if n % 2 == 0 { "r" } else { "" },
            |client| Box::new(client.rw_lock(KEY).write().unwrap()),
        ),
    ];
    let server = server();
    let mut frozen = Frozen::connect(&server);
    for (mode, hold) in cases {
        let mut subscriber = frozen.subscribe(20);
        let clients = [(); 2].map(|()| unhurried(&server.url()));
        let held = hold(&clients[0]);
        queue_frozen(&server, 0..20, mode);
        let living = clients[1].clone();
        let living = Task::start(move || drop(hold(&living)));
        wait_for_queue(&server, KEY, 21);
        make_joins_earlier(&server);
        drop(held);
        living.within(SLACK, "the share behind the frozen waiters");
        assert_eq!(grants(&server, &mut subscriber), 1, "{}", mode(0));
        drop(subscriber);
        assert_all_become_free(&server);
    }
}

/// A writer is first in the queue, and a reader stands behind it. A share that a stopped process was granted ends
/// without its confirmation, and the reader's client is the first that asks.
#[test]
fn a_reader_that_asks_first_does_not_pass_a_writer() {
    let server = server();
    let [one, two, three] = [(); 3].map(|()| unhurried(&server.url()).rw_lock(KEY));
    let held = one.read().unwrap();
    let entered = Arc::new(StdMutex::new(Vec::new()));
    let enters = |name, task: Box<dyn FnOnce() -> Held + Send>| {
        let entered = Arc::clone(&entered);
        Task::start(move || {
            let held = task();
            entered.lock().unwrap().push(name);
            drop(held);
        })
    };
    let writer = enters("writer", Box::new(move || Box::new(two.write().unwrap())));
    wait_for_queue(&server, KEY, 1);
    let reader = enters("reader", Box::new(move || Box::new(three.read().unwrap())));
    wait_for_queue(&server, KEY, 2);
    assert!(eventually(SOON, || notified_clients(&server) >= 2));
    let ended = (micros_now(&server) / 1000 - 1).to_string() + ".5";
    let late = format!("lh1 {:032x} r 1 1 0 {}", 0, holder(0));
    ask(&server, &["ZADD", &in_redis(KEY), &ended, &late]);
    // Asks the reader's client for a request.
    let entry = queue(&server, KEY).remove(1);
    let (lease, client) = (&entry[..16], entry.rsplit(',').next().unwrap());
    let message = format!("{lease} = {}", in_redis(KEY));
    let channel = in_redis("~to:") + client;
    ask(&server, &["PUBLISH", &channel, &message]);
    let end = || ask(&server, &["ZSCORE", &in_redis(KEY), &late]).to_string();
    assert!(
        eventually(SOON, || end() != ended),
        "the roll is not called"
    );
    drop(held);
    for task in [writer, reader] {
        task.within(SLACK, "its grant");
    }
    assert_eq!(*entered.lock().unwrap(), ["writer", "reader"]);
    assert_all_become_free(&server);
}

/// The processes continue after others had the lock. They have their turns before a waiter that came later.
#[test]
fn stopped_processes_delay_once_and_keep_their_places() {
    let server = server_with_long_ttl();
    let clients = [(); 2].map(|()| unhurried(&server.url()));
    let held = clients[0].mutex(KEY).lock().unwrap();
    let stopped = Waiter::line(&server, 4);
    let mutex = clients[1].mutex(KEY);
    let living = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 5);
    make_joins_earlier(&server);
    stopped.iter().for_each(Waiter::stop);
    let released = Instant::now();
    held.unlock().unwrap();
    let guard = living.within(SLACK, "the grant behind the stopped processes");
    eprintln!("4 stopped: {:?}", released.elapsed());
    let mutex = clients[0].mutex(KEY);
    let newcomer = Task::start(move || mutex.lock().unwrap());
    // The three that had no turn stay silent in the queue until they continue.
    let is_queued = || {
        queue(&server, KEY)
            .iter()
            .any(|entry| entry.ends_with(&clients[0].holder_id().to_string()))
    };
    assert!(eventually(SOON, is_queued), "{:?}", queue(&server, KEY));
    stopped.iter().for_each(Waiter::resume);
    let in_front = || {
        let holders: Vec<String> = queue(&server, KEY)
            .iter()
            .filter_map(|entry| Some(entry.rsplit(',').next()?.to_owned()))
            .collect();
        let last = clients[0].holder_id().to_string();
        holders.len() == 5 && holders[4] == last
    };
    assert!(eventually(SOON, in_front), "{:?}", queue(&server, KEY));
    guard.unlock().unwrap();
    for waiter in &stopped {
        waiter.has_its_turn(SLACK);
    }
    newcomer.within(SLACK, "the last grant").unlock().unwrap();
    assert_all_become_free(&server);
}

fn server_with_long_ttl() -> Server {
    crate::contention_faults::crashes::server_with_ttl(LONG_TTL)
}
