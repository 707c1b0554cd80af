//! Mutual exclusion among the threads of one client, among clients and among processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use leasehold::{Client, Error, ErrorKind, HolderId, LossReason, LostSignal, Mutex, MutexGuard};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, in_redis, is_held, millis,
    secs, server,
};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);

const COUNTER: &str = "counter";

/// Raises the counter in Redis `times` times under the lock, by reading, then writing. If two holders do so at the same
/// time, an update is lost.
fn raise(url: &str, client: &Client, times: usize, mut seen: impl FnMut(&MutexGuard)) {
    let redis = redis::Client::open(url).unwrap();
    let mut connection = redis.get_connection_with_timeout(SOON).unwrap();
    let mutex = client.mutex("exclusion");
    for round in 0..times {
        let guard = mutex.lock().unwrap();
        seen(&guard);
        let read: Option<usize> = redis::cmd("GET")
            .arg(COUNTER)
            .query(&mut connection)
            .unwrap();
        let next = read.unwrap_or(0) + 1;
        redis::cmd("SET")
            .arg(COUNTER)
            .arg(next)
            .exec(&mut connection)
            .unwrap();
        // Every second round releases the lock with `unlock`, which waits for the reply; the others drop the guard.
        if round % 2 == 0 {
            guard.unlock().unwrap();
        }
    }
}

#[test]
fn threads_of_several_clients_lose_no_update() {
    let server = server();
    let witness = Arc::new(Witness::default());
    let clients: Vec<Client> = (0..4)
        .map(|_| steady(&server.url()).build().unwrap())
        .collect();
    let tasks: Vec<_> = (0..16)
        .map(|n| {
            let (client, witness, url) = (clients[n % 4].clone(), witness.clone(), server.url());
            Task::start(move || {
                raise(&url, &client, 60, |guard| drop(witness.enter(guard)));
            })
        })
        .collect();
    for task in tasks {
        task.within(WORK, "raising the counter");
    }
    assert_eq!(ask(&server, &["GET", COUNTER]).as_int(), Some(16 * 60));
    assert_eq!(witness.entries(), 16 * 60);
    assert_all_become_free(&server);
}

#[test]
fn processes_lose_no_update() {
    let server = server();
    let children: Vec<Child> = (0..3)
        .map(|_| Child::start(raise_in_a_process_of_its_own, &server.url()))
        .collect();
    for child in children {
        child.finish(WORK);
    }
    assert_eq!(ask(&server, &["GET", COUNTER]).as_int(), Some(3 * 4 * 50));
    assert_all_become_free(&server);
}

pub fn raise_in_a_process_of_its_own(parent: &Parent) {
    let client = steady(&parent.url).build().unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (url, client) = (parent.url.clone(), client.clone());
            Task::start(move || raise(&url, &client, 50, |_| ()))
        })
        .collect();
    for task in tasks {
        task.within(WORK, "raising the counter");
    }
}

#[test]
fn two_hundred_threads_all_get_one_lock() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let witness = Arc::new(Witness::default());
    let mutex = client.mutex("k");
    let first = mutex.lock().unwrap();
    let turns = |_| witness.start_turns(mutex.clone(), 3);
    let tasks: Vec<_> = (0..200).map(turns).collect();
    drop(first);
    for task in tasks {
        task.within(WORK, "a thread's three turns");
    }
    assert_eq!(witness.entries(), 600);
}

#[test]
fn different_keys_prefixes_and_databases_are_independent() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let other_prefix = steady(&server.url()).prefix("other:").build().unwrap();
    let other_database = steady(&format!("{}/1", server.url())).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    assert!(client.mutex("K").try_lock().unwrap().is_some());
    assert!(other_prefix.mutex("k").try_lock().unwrap().is_some());
    assert!(other_database.mutex("k").try_lock().unwrap().is_some());
    assert!(client.mutex("k").try_lock().unwrap().is_none());
    held.unlock().unwrap();
}

#[test]
fn with_lock_holds_and_returns_the_value() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let held = client.with_lock("k", || is_held(&server, "k")).unwrap();
    assert!(held, "held while it works");
    assert!(!is_held(&server, "k"), "released and confirmed afterwards");
    let token = client.mutex("k").with(MutexGuard::fencing_token).unwrap();
    assert!(token > 0);
}

#[test]
fn with_lock_releases_when_its_closure_panics() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).event_handler(recorder.clone());
    let client = client.build().unwrap();
    for _ in 0..3 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            client.with_lock("k", || panic!("a test's own panic"))
        }));
        let payload = outcome.map(|result: Result<(), Error>| result).unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&"a test's own panic"));
        // This thread's next request comes after its release.
        client
            .mutex("k")
            .try_lock()
            .unwrap()
            .expect("it was released")
            .unlock()
            .unwrap();
    }
    assert_eq!(recorder.count(What::Released, "k"), 6);
    assert_all_become_free(&server);
}

#[test]
fn with_lock_fails_if_the_lock_was_lost() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();

    let deleted = client.with_lock("k", || ask(&server, &["DEL", &in_redis("k")]));
    assert_eq!(
        deleted.unwrap_err().loss_reason(),
        Some(&LossReason::Deleted)
    );

    let other = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 other/1/0";
    let lost = client.with_lock("k", || ask(&server, &["SET", &in_redis("k"), other]));
    let lost = lost.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::LeaseLost);
    assert_eq!(lost.key(), Some("k"));
    let Some(LossReason::TakenOver { by: Some(by) }) = lost.loss_reason() else {
        panic!("{lost:?}");
    };
    assert_eq!(by.as_str(), "other/1/0");
    assert!(is_held(&server, "k"), "the other holder keeps it");
    ask(&server, &["DEL", &in_redis("k")]);

    let mutex = client.mutex("k").fixed_ttl(millis(50));
    let expired = mutex.with(|guard| guard.lost_signal().recv_timeout(SOON).unwrap());
    assert_eq!(
        expired.unwrap_err().loss_reason(),
        Some(&LossReason::Expired)
    );
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn a_guard_may_be_dropped_on_another_thread() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    for round in 0..50 {
        let guard = mutex
            .try_lock_for(SOON)
            .unwrap()
            .expect("the last holder released");
        let elsewhere = Task::start(move || {
            if round % 2 == 0 {
                guard.unlock().unwrap();
            } else {
                drop(guard);
            }
        });
        elsewhere.within(SOON, "the release");
        // The release was written before this thread's request, so it comes first.
        assert!(mutex.try_lock().unwrap().is_some(), "round {round}");
    }
}

#[test]
fn a_guard_outlives_its_client_and_mutex() {
    let server = server();
    let guard = {
        let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
        client.mutex("k").lock().unwrap()
    };
    // Only the guard keeps the client alive, and the client still renews the lock.
    let lost = guard.lost_signal();
    assert!(lost.recv_timeout(secs(6)).is_err(), "the lock is kept");
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

#[test]
fn public_types_are_send_and_sync() {
    fn everywhere<T: Send + Sync + 'static>() {}
    fn shared<T: Clone + Send + Sync + 'static>() {}
    shared::<Client>();
    shared::<Mutex>();
    shared::<HolderId>();
    shared::<Error>();
    shared::<LossReason>();
    everywhere::<MutexGuard>();
    everywhere::<LostSignal>();
}
