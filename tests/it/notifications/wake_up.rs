//! Wake-ups of a waiter when another client's hold ends, for each cause. They come long before the waiter would ask
//! again (after half a second or more) and before the ttl ends.

use std::time::{Duration, Instant};

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind, LossReason, MutexGuard};
use leasehold_testbed::{Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, in_redis, is_held, lost_within, millis, server,
    wait_for_queue,
};

const ROUNDS: usize = 5;
/// Most waiters are woken sooner, even on a busy machine. No waiter would ask again so soon.
const AT_ONCE: Duration = Duration::from_millis(300);
const OTHER_HOLDER: &str = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 other/1/0";

struct Scene {
    holder: Client,
    waiting: Client,
    // Dropped last: a dropped client releases its locks.
    server: Server,
}

impl Scene {
    fn start() -> Self {
        let server = server();
        let client = || steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        Self {
            holder: client(),
            waiting: client(),
            server,
        }
    }

    /// A client waits for a lock, and `free` frees the lock; repeatedly. The value that `free` returns is kept until
    /// the waiter has finished. Fails unless most waiters get the lock within `limit`.
    #[track_caller]
    fn assert_woken<T>(
        &self,
        limit: Duration,
        lock: impl Fn(&Client) -> MutexGuard,
        free: impl Fn(&Server, MutexGuard) -> T,
    ) {
        let waits = (0..ROUNDS)
            .map(|_| {
                let held = lock(&self.holder);
                let mutex = self.waiting.mutex("k");
                let waiter = Task::start(move || {
                    let guard = mutex.lock().unwrap();
                    let entered = Instant::now();
                    guard.unlock().unwrap();
                    entered
                });
                wait_for_queue(&self.server, "k", 1);
                let start = Instant::now();
                let kept = free(&self.server, held);
                let entered = waiter.within(SOON, "entering");
                drop(kept);
                entered.saturating_duration_since(start)
            })
            .collect();
        assert_most_within(limit, waits);
    }
}

#[track_caller]
fn assert_most_within(limit: Duration, mut waits: Vec<Duration>) {
    waits.sort();
    assert!(waits[waits.len() / 2] < limit, "{waits:?}");
}

fn lock(client: &Client) -> MutexGuard {
    client.mutex("k").lock().unwrap()
}

#[test]
fn a_waiter_enters_at_once_after_unlock() {
    Scene::start().assert_woken(AT_ONCE, lock, |_, guard| guard.unlock().unwrap());
}

#[test]
fn a_waiter_enters_at_once_after_a_drop() {
    Scene::start().assert_woken(AT_ONCE, lock, |_, guard| drop(guard));
}

#[test]
fn a_waiter_enters_at_once_after_a_deletion() {
    for command in ["DEL", "UNLINK"] {
        Scene::start().assert_woken(AT_ONCE, lock, |server, guard| {
            ask(server, &[command, &in_redis("k")]);
            guard
        });
    }
}

#[test]
fn a_waiter_enters_at_once_after_a_flush() {
    for command in ["FLUSHALL", "FLUSHDB"] {
        Scene::start().assert_woken(AT_ONCE, lock, |server, guard| {
            ask(server, &[command]);
            guard
        });
    }
}

#[test]
fn a_waiter_enters_when_a_foreign_value_expires() {
    Scene::start().assert_woken(millis(100) + AT_ONCE, lock, |server, guard| {
        ask(server, &["SET", &in_redis("k"), OTHER_HOLDER, "PX", "100"]);
        guard
    });
}

#[test]
fn a_waiter_enters_after_a_shortened_ttl() {
    Scene::start().assert_woken(millis(100) + AT_ONCE, lock, |server, guard| {
        ask(server, &["PEXPIRE", &in_redis("k"), "100"]);
        guard
    });
}

#[test]
fn a_waiter_enters_when_a_fixed_ttl_ends() {
    let scene = Scene::start();
    let ttl = millis(200);
    let waits = [(); ROUNDS].map(|()| {
        let start = Instant::now();
        let held = scene.holder.mutex("k").fixed_ttl(ttl).lock().unwrap();
        let mutex = scene.waiting.mutex("k");
        let waiter = Task::start(move || {
            let guard = mutex.lock().unwrap();
            let entered = Instant::now();
            guard.unlock().unwrap();
            entered
        });
        let entered = waiter.within(SOON, "entering");
        assert!(held.is_lost(), "before another client has it");
        entered.saturating_duration_since(start)
    });
    assert_most_within(ttl + AT_ONCE, waits.into());
}

#[test]
fn waiters_get_the_lock_after_earlier_waiters_left() {
    let scene = Scene::start();
    let between = steady(&scene.server.url()).build().unwrap();
    let waits = [(); ROUNDS].map(|()| {
        let held = lock(&scene.holder);
        let (stop, stopped) = bounded(1);
        let mutex = between.mutex("k").cancelled_by(stopped);
        let first = Task::start(move || mutex.lock().map(drop));
        wait_for_queue(&scene.server, "k", 1);
        let mutex = scene.waiting.mutex("k");
        let second = Task::start(move || {
            let guard = mutex.lock().unwrap();
            let entered = Instant::now();
            guard.unlock().unwrap();
            entered
        });
        wait_for_queue(&scene.server, "k", 2);
        drop(stop);
        first.within(SOON, "the end of the wait").unwrap_err();
        wait_for_queue(&scene.server, "k", 1);
        let start = Instant::now();
        held.unlock().unwrap();
        let entered = second.within(SOON, "entering");
        entered.saturating_duration_since(start)
    });
    assert_most_within(AT_ONCE, waits.into());
}

#[test]
fn a_waiter_enters_with_unusual_keys_and_prefixes() {
    let long = "x".repeat(1024);
    for (prefix, key) in [
        ("", "k"),
        ("a prefix: ", "a key, 100 % {in} blanks "),
        ("pré:", "ключ \u{1f512}"),
        ("leasehold:", &long),
    ] {
        let server = server();
        let clients = [(); 2].map(|()| {
            let builder = steady(&server.url()).ttl(LONG_TTL).prefix(prefix);
            builder.build().unwrap()
        });
        let queue = format!("{prefix}~queue:{key}");
        let stands = || ask(&server, &["ZCARD", &queue]) == Reply::Int(1);
        let waits = [(); ROUNDS].map(|()| {
            let held = clients[0].mutex(key).lock().unwrap();
            let mutex = clients[1].mutex(key);
            let waiter = Task::start(move || {
                drop(mutex.lock().unwrap());
                Instant::now()
            });
            assert!(eventually(SOON, stands), "queued for {key:?}");
            let start = Instant::now();
            held.unlock().unwrap();
            let entered = waiter.within(SOON, "entering");
            entered.saturating_duration_since(start)
        });
        assert_most_within(AT_ONCE, waits.into());
    }
}

#[test]
fn notifications_work_with_every_login_and_socket() {
    let plain = Server::builder().unix_socket().start().unwrap();
    let socket = plain.unix_url().expect("the lock was requested");
    let locked = Server::builder().password("secret/:@1").unix_socket();
    let locked = locked.start().unwrap();
    ask(
        &plain,
        &[
            "ACL", "SETUSER", "user", "on", ">secret", "~*", "&*", "+@all",
        ],
    );
    let named = format!("redis://user:secret@127.0.0.1:{}/3", plain.port());
    for url in [
        socket.clone(),
        format!("{socket}?db=2"),
        named,
        locked.url(),
        locked.unix_url().expect("the lock was requested"),
    ] {
        let recorder = Recorder::new();
        let clients = [(); 2].map(|()| {
            let builder = steady(&url).ttl(LONG_TTL).event_handler(recorder.clone());
            builder.build().unwrap()
        });
        let waits = [(); ROUNDS].map(|()| {
            let held = clients[0].mutex("k").lock().unwrap();
            let lost = held.lost_signal();
            let mutex = clients[1].mutex("k");
            let waiter = Task::start(move || {
                drop(mutex.lock().unwrap());
                Instant::now()
            });
            // The pause is long enough for all keys to be tracked.
            assert!(lost.recv_timeout(millis(80)).is_err(), "{url}");
            let start = Instant::now();
            held.unlock().unwrap();
            let entered = waiter.within(SOON, "entering");
            entered.saturating_duration_since(start)
        });
        assert_most_within(AT_ONCE, waits.into());
        assert_eq!(recorder.count(What::NotificationsRefused, ""), 0, "{url}");
    }
}

#[test]
fn a_foreign_value_fails_a_waiter_at_once() {
    let scene = Scene::start();
    let held = lock(&scene.holder);
    let lost = held.lost_signal();
    let mutex = scene.waiting.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&scene.server, "k", 1);
    ask(&scene.server, &["SET", &in_redis("k"), "a tool's value"]);
    let error = waiter.within(SOON, "the notification").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    let reason = lost_within(SOON, &lost);
    assert_eq!(reason, LossReason::TakenOver { by: None });
    drop(held);
    assert!(is_held(&scene.server, "k"), "the value is the tool's");
}
