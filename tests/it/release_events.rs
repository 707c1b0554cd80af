//! What is told of locks that could not be let go at once: that each is late, and how it ended, once.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use leasehold::{Builder, Client, Error, ErrorKind, EventHandler, EventLock, MutexGuard};
use leasehold_testbed::{Proxy, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, TIMEOUT, Task, ask, assert_all_become_free, builder, in_line, kill_connections,
    millis, secs, server, unconfirmed, wait_for_line, within,
};

#[derive(Debug, PartialEq)]
enum Told {
    Delayed(ErrorKind),
    Ended { confirmed: bool },
}
use Told::{Delayed, Ended};

/// What was told of which key and token.
type Heard = (String, u64, Told);

struct Listener(Mutex<Sender<Heard>>);

impl Listener {
    fn hear(&self, lock: EventLock<'_>, told: Told) {
        assert_eq!(thread::current().name(), Some("leasehold-callbacks"));
        // Nobody listens any more once the test is over.
        let heard = (lock.key.to_owned(), lock.fencing_token, told);
        let _ = self.0.lock().unwrap().send(heard);
    }
}

impl EventHandler for Listener {
    fn release_delayed(&self, lock: EventLock<'_>, error: &Error) {
        self.hear(lock, Delayed(error.kind()));
    }

    fn release_ended(&self, lock: EventLock<'_>, confirmed: bool) {
        self.hear(lock, Ended { confirmed });
    }
}

fn listening(builder: Builder) -> (Client, Receiver<Heard>) {
    let (told, heard) = channel();
    let listener = Arc::new(Listener(Mutex::new(told)));
    (builder.event_handler(listener).build().unwrap(), heard)
}

/// A client of locks that stay for very long if they are not let go.
fn client(url: &str) -> (Client, Receiver<Heard>) {
    listening(builder(url).ttl(LONG_TTL))
}

fn lock(client: &Client, key: &str) -> (MutexGuard, u64) {
    let guard = client.mutex(key).lock().unwrap();
    let token = guard.fencing_token();
    (guard, token)
}

#[track_caller]
fn next(heard: &Receiver<Heard>) -> Heard {
    heard.recv_timeout(SOON).expect("it is told")
}

#[track_caller]
fn assert_delayed(heard: &Receiver<Heard>, key: &str, token: u64) -> ErrorKind {
    match next(heard) {
        (of, its, Delayed(kind)) if (of.as_str(), its) == (key, token) => kind,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_ended(heard: &Receiver<Heard>, key: &str, token: u64, confirmed: bool) {
    assert_eq!(next(heard), (key.to_owned(), token, Ended { confirmed }));
}

/// Ends the client: whatever it was going to tell has been told then.
#[track_caller]
fn assert_nothing_more(client: Client, heard: &Receiver<Heard>) {
    client.shutdown(SOON).unwrap();
    drop(client);
    assert_eq!(rest(heard), []);
}

/// All that was told until the client was gone.
#[track_caller]
fn rest(heard: &Receiver<Heard>) -> Vec<Heard> {
    let mut rest = Vec::new();
    loop {
        match heard.recv_timeout(SOON) {
            Ok(told) => rest.push(told),
            Err(RecvTimeoutError::Disconnected) => return rest,
            Err(RecvTimeoutError::Timeout) => panic!("some part of the client lives on"),
        }
    }
}

#[test]
fn a_lock_dropped_on_a_stopped_server_is_late_and_confirmed_when_it_goes_on() {
    let server = server();
    let (client, heard) = client(&server.url());
    let (guard, token) = lock(&client, "a");
    server.stop();
    drop(guard);
    let kind = assert_delayed(&heard, "a", token);
    assert_eq!(kind, ErrorKind::Timeout);
    server.resume();
    assert_ended(&heard, "a", token, true);
    assert_all_become_free(&server);
    assert_nothing_more(client, &heard);
}

#[test]
fn a_lock_of_a_killed_server_that_comes_back_empty_is_confirmed_to_be_free() {
    let mut server = server();
    let (client, heard) = client(&server.url());
    let (guard, token) = lock(&client, "a");
    server.kill();
    drop(guard);
    let kind = assert_delayed(&heard, "a", token);
    assert_eq!(kind, ErrorKind::Unavailable);
    server.restart().unwrap();
    assert_ended(&heard, "a", token, true);
    assert_nothing_more(client, &heard);
}

#[test]
fn an_unlock_of_a_dead_server_returns_soon_and_its_end_is_told_when_its_ttl_has_ended() {
    let mut server = server();
    let (client, heard) = listening(builder(&server.url()).ttl(secs(3)));
    let (guard, token) = lock(&client, "a");
    server.kill();
    let started = Instant::now();
    let error = unconfirmed(within(SOON, "unlocking", move || guard.unlock()));
    assert!(error.is_unavailable(), "{error}");
    // One command time-out and one connect time-out (four times as long) are what it may take.
    assert!(started.elapsed() < 5 * TIMEOUT + secs(2));
    assert_delayed(&heard, "a", token);
    assert_ended(&heard, "a", token, false);
    assert!(started.elapsed() >= secs(2), "before the ttl had ended");
    drop(client);
    assert_eq!(rest(&heard), []);
}

#[test]
fn work_that_ends_without_redis_gives_its_value_and_its_release_is_told_of_as_late() {
    let mut server = server();
    let (client, heard) = client(&server.url());
    let mut token = 0;
    let value = client.mutex("a").with(|guard| {
        token = guard.fencing_token();
        server.kill();
        42
    });
    assert_eq!(value.unwrap(), 42);
    assert_delayed(&heard, "a", token);
    server.restart().unwrap();
    assert_ended(&heard, "a", token, true);
    assert_nothing_more(client, &heard);
}

#[test]
fn a_release_that_redis_refuses_is_late_until_it_accepts_it() {
    let server = server();
    let (client, heard) = client(&server.url());
    let (dropped, dropped_token) = lock(&client, "dropped");
    let (unlocked, unlocked_token) = lock(&client, "unlocked");
    // A replica of nobody: it has its keys and takes no writes.
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    drop(dropped);
    assert_eq!(
        assert_delayed(&heard, "dropped", dropped_token),
        ErrorKind::Unavailable
    );
    let error = unconfirmed(unlocked.unlock());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_delayed(&heard, "unlocked", unlocked_token);
    ask(&server, &["REPLICAOF", "NO", "ONE"]);
    let mut ended = [next(&heard), next(&heard)];
    ended.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    let confirmed = |key: &str, token| (key.to_owned(), token, Ended { confirmed: true });
    assert_eq!(
        ended,
        [
            confirmed("dropped", dropped_token),
            confirmed("unlocked", unlocked_token)
        ]
    );
    assert_all_become_free(&server);
    assert_nothing_more(client, &heard);
}

#[test]
fn connections_that_break_again_and_again_are_told_of_once_for_each_lock() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, heard) = client(&proxy.url());
    let mut owed: Vec<(String, u64)> = Vec::new();
    let guards: Vec<MutexGuard> = (0..20)
        .map(|n| {
            let (guard, token) = lock(&client, &format!("lock-{n}"));
            owed.push((guard.key().to_owned(), token));
            guard
        })
        .collect();
    proxy.hold_replies(true);
    drop(guards);
    let mut told: Vec<Heard> = Vec::new();
    // Each attempt is cut before its answer comes, and some more when all have failed.
    let all_told = eventually(SOON, || {
        proxy.cut_all();
        told.extend(heard.try_iter());
        told.len() >= owed.len()
    });
    assert!(all_told, "only {told:?}");
    for _ in 0..20 {
        proxy.cut_all();
        thread::sleep(millis(50));
    }
    proxy.hold_replies(false);
    proxy.cut_all();
    assert_all_become_free(&server);
    client.shutdown(SOON).unwrap();
    drop(client);
    told.extend(rest(&heard));
    let (mut delayed, mut ended) = (Vec::new(), Vec::new());
    for (key, token, what) in told {
        match what {
            Delayed(_) => delayed.push((key, token)),
            Ended { confirmed } => {
                assert!(confirmed && delayed.contains(&(key.clone(), token)));
                ended.push((key, token));
            }
        }
    }
    for all in [&mut delayed, &mut ended, &mut owed] {
        all.sort();
    }
    assert_eq!((&delayed, &ended), (&owed, &owed));
}

#[test]
fn what_is_late_when_the_client_is_shut_down_or_dropped_is_told_of_as_given_up() {
    for shut_down in [true, false] {
        let mut server = server();
        let (client, heard) = client(&server.url());
        let (guard, token) = lock(&client, "a");
        server.kill();
        drop(guard);
        assert_delayed(&heard, "a", token);
        if shut_down {
            let error = client.shutdown(millis(200)).unwrap_err();
            assert!(error.is_unavailable(), "{error}");
            assert_ended(&heard, "a", token, false);
        }
        within(SOON, "dropping the client", move || drop(client));
        if !shut_down {
            assert_ended(&heard, "a", token, false);
        }
        assert_eq!(rest(&heard), []);
    }
}

#[test]
fn locks_let_go_in_good_time_are_not_told_of() {
    let server = server();
    let (client, heard) = listening(steady(&server.url()).ttl(LONG_TTL));
    for n in 0..50 {
        let (guard, _) = lock(&client, "a");
        if n % 10 == 0 {
            // Another connection does it at once.
            kill_connections(&server);
        }
        match n % 2 {
            0 => drop(guard),
            _ => assert!(guard.unlock().unwrap().is_confirmed()),
        }
    }
    assert_all_become_free(&server);
    assert_nothing_more(client, &heard);
}

/// An acquire without an answer, and a place in line, each given back while Redis is away: nobody
/// ever held those.
#[test]
fn what_no_guard_ever_held_is_given_back_in_silence() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (client, heard) = client(&proxy.url());
    let other = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let held = other.mutex("line").lock().unwrap();
    let waiting = {
        let mutex = client.mutex("line");
        Task::start(move || mutex.try_lock_for(secs(2)))
    };
    wait_for_line(&server, "line", 1);
    proxy.black_hole(true);
    let error = client.mutex("ghost").try_lock().unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    // Its time is up and its place given back; whether it came to know of the outage does not matter.
    let _ = waiting.within(SOON, "giving up");
    thread::sleep(2 * TIMEOUT);
    proxy.black_hole(false);
    let gone = eventually(SOON, || in_line(&server, "line") == 0);
    assert!(gone, "the place in line was not given back");
    held.unlock().unwrap();
    assert_all_become_free(&server);
    assert_nothing_more(client, &heard);
}
