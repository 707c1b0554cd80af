//! Transfers while the network or Redis fails: a lock never has two holders, and is never leaked for longer
//! than its ttl.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::{Client, ErrorKind, MutexGuard};
use leasehold_testbed::{Proxy, Reply, eventually};

use super::{adopt, client, lock, refused};
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, assert_all_become_free, builder,
    channel_of, expires_in, in_redis, is_held, kill_connections, lease_of, millis, secs, server,
    value_of, wait_for_messages, within,
};

/// A connected client behind the proxy, with one pipeline.
fn behind(proxy: &Proxy, command_timeout: Duration) -> Client {
    let builder = builder(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.command_timeout(command_timeout).build().unwrap();
    assert!(eventually(SOON, || client.mutex("warm").inspect().is_ok()));
    client
}

const SHORT_TTL: Duration = Duration::from_secs(1);
/// The length of an outage. It exceeds the command time-out, and the time-out of a connection that is made meanwhile.
const OUTAGE: Duration = Duration::from_secs(4);

/// Acquires a lock with a short ttl, and extends it to ten minutes.
fn lock_extended(client: &Client) -> MutexGuard {
    let mutex = client.mutex("k").ttl(SHORT_TTL);
    let guard = mutex.lock().unwrap();
    guard.extend(secs(600)).unwrap();
    guard
}

#[test]
fn adoptions_cut_anywhere_leave_one_holder_at_most() {
    let server = server();
    let old = client(&server);
    let length = {
        let proxy = Proxy::start(server.port()).unwrap();
        let client = behind(&proxy, SOON);
        let ticket = lock(&old, "key-000").into_ticket().unwrap();
        proxy.hold_requests(true);
        let task = Task::start(move || client.adopt(&ticket));
        assert!(eventually(SOON, || proxy.held_bytes() > 0));
        let length = proxy.held_bytes();
        proxy.hold_requests(false);
        task.within(SOON, "adopting").unwrap().unlock().unwrap();
        length
    };
    assert!((100..1_000).contains(&length), "{length} bytes");
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let n @ 0.. = next.fetch_add(1, Ordering::Relaxed)
                    && n <= length
                {
                    let proxy = Proxy::start(server.port()).unwrap();
                    let client = behind(&proxy, SOON);
                    let key = format!("key-{n:03}");
                    let ticket = lock(&old, &key).into_ticket().unwrap();
                    let before = lease_of(&server, &key).unwrap();
                    proxy.cut_after(Some(n));
                    match client.adopt(&ticket) {
                        Ok(guard) => {
                            guard.extend(2 * LONG_TTL).unwrap();
                            guard.unlock().unwrap();
                        }
                        // The reply was lost, and the adopted lock is released.
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::NotHeld, "{n}: {error}");
                            let undone = || lease_of(&server, &key).is_none_or(|id| id == before);
                            assert!(eventually(SOON, undone), "{n}: leaked");
                            // A ticket that was not used can still be adopted, once.
                            match old.adopt(&ticket) {
                                Ok(guard) => drop(guard.unlock().unwrap()),
                                Err(error) => {
                                    assert_eq!(error.kind(), ErrorKind::NotHeld, "{n}: {error}");
                                }
                            }
                        }
                    }
                    assert!(!is_held(&server, &key), "{n} of {length} bytes");
                }
            });
        }
    });
    assert_all_become_free(&server);
}

/// The caller has given up when Redis gets the adoption, so the client releases the lock.
#[test]
fn a_late_adoption_is_undone() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let late = behind(&proxy, TIMEOUT);
    let ticket = lock(&old, "k").into_ticket().unwrap();
    let value = value_of(&server, "k");
    proxy.hold_requests(true);
    let error = refused(&late, &ticket);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert_eq!(value_of(&server, "k"), value, "the ticket is still good");
    proxy.hold_requests(false);
    assert_all_become_free(&server);
    assert_eq!(refused(&old, &ticket).kind(), ErrorKind::NotHeld);
}

#[test]
fn a_late_adoption_spares_a_later_adopter() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let late = behind(&proxy, TIMEOUT);
    let ticket = lock(&old, "k").into_ticket().unwrap();
    proxy.hold_requests(true);
    assert_eq!(refused(&late, &ticket).kind(), ErrorKind::Timeout);
    let guard = adopt(&old, &ticket);
    let value = value_of(&server, "k");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    // The shutdown waits for all repeated releases.
    late.shutdown(secs(5)).unwrap();
    assert_eq!(value_of(&server, "k"), value);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
}

#[test]
fn adoptions_in_an_outage_end_with_their_client() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    let builder = builder(&proxy.url()).outage_timeout(10 * SOON);
    let new = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let ticket = lock(&old, "k").into_ticket().unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    let adopting = Task::start_blocked({
        let new = new.clone();
        move || new.adopt(&ticket)
    });
    recorder.wait_for(2, What::Unavailable, "k");
    let _ = new.shutdown(secs(1));
    let error = adopting.within(SOON, "adopting").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    assert_eq!(recorder.count(What::Acquired, "k"), 0);
}

/// The server has closed idle connections, and the client does not know it yet.
#[test]
fn disconnects_during_transfers_leave_nothing_held() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    for _ in 0..5 {
        let ticket = lock(&old, "k").into_ticket().unwrap();
        kill_connections(&server);
        match new.adopt(&ticket) {
            Ok(guard) => drop(guard.unlock().unwrap()),
            // The adoption was carried out on a connection that broke before the reply.
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}"),
        }
        assert!(eventually(SOON, || !is_held(&server, "k")));
    }
}

#[test]
fn tickets_made_in_an_outage_are_adopted_later() {
    let server = server();
    let settings = builder(&server.url()).ttl(LONG_TTL);
    let old = settings.outage_timeout(secs(2)).build().unwrap();
    let new = client(&server);
    let guard = lock(&old, "k");
    let token = guard.fencing_token();
    server.stop();
    let ticket = within(SOON, "the transfer", move || guard.into_ticket().unwrap());
    let adopter = old.clone();
    let stopped = ticket.clone();
    let error = within(SOON, "the end of the wait", move || {
        refused(&adopter, &stopped)
    });
    assert!(error.is_unavailable(), "{error}");
    server.resume();
    // It is unknown whether the first adoption was carried out. If it was, the client undoes it.
    match new.adopt(&ticket) {
        Ok(guard) => {
            assert!(guard.fencing_token() > token);
            guard.unlock().unwrap();
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}"),
    }
    assert_all_become_free(&server);
}

#[test]
fn a_ticket_of_a_restarted_server_is_refused() {
    let mut server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let ticket = lock(&old, "k").into_ticket().unwrap();
    server.restart().unwrap();
    let refused = eventually(SOON, || {
        let error = refused(&new, &ticket);
        assert!(error.is_unavailable() || error.kind() == ErrorKind::NotHeld);
        error.kind() == ErrorKind::NotHeld
    });
    assert!(refused);
}

/// Another thread reads the reply before its own deadline. By then, the caller of the adoption has given up.
#[test]
fn an_adoption_for_a_departed_caller_is_undone() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = builder(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let late = builder.command_timeout(secs(2)).build().unwrap();
    late.mutex("warm").inspect().unwrap();
    let ticket = lock(&old, "k").into_ticket().unwrap();
    proxy.delay(millis(700));
    // The first thread becomes the leader. The second becomes the leader after the first reply, and writes the request
    // of the third thread in its batch.
    let looks = ["first", "second"].map(|key| {
        let mutex = late.mutex(key);
        let look = Task::start(move || mutex.inspect());
        thread::sleep(millis(100));
        look
    });
    let outcome = late.adopt(&ticket);
    proxy.delay(millis(0));
    for look in looks {
        let _ = look.within(SOON, "looking");
    }
    match outcome {
        // On a busy machine, the third thread may become the leader.
        Ok(guard) => drop(guard),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Timeout, "{error}"),
    }
    assert_all_become_free(&server);
}

/// Messages may come twice or late, and any user may publish one. A client releases only leases that it has abandoned.
#[test]
fn a_repeated_grant_notification_spares_the_ticket() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let channel = channel_of(&old);
    let guard = lock(&old, "k");
    let value = value_of(&server, "k").unwrap();
    let words: Vec<&str> = value.split(' ').collect();
    let granted = format!("{} {} {}", words[1], words[2], in_redis("k"));
    let tell = |text: &str| ask(&server, &["PUBLISH", &channel, text]) == Reply::Int(1);
    assert!(
        eventually(SOON, || tell(&granted)),
        "the client is subscribed"
    );
    let ticket = guard.into_ticket().unwrap();
    assert!(tell(&granted));
    wait_for_messages(&server, &old);
    // This request is behind the writes for this key.
    old.mutex("k").inspect().unwrap();
    let guard = adopt(&new, &ticket);
    assert!(tell(&granted));
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();

    let lost = value.replace(words[1], &"0".repeat(32));
    ask(&server, &["SET", &in_redis("k"), &lost, "PX", "60000"]);
    assert!(tell(&granted.replace(words[1], &"0".repeat(32))));
    wait_for_messages(&server, &old);
    old.mutex("k").inspect().unwrap();
    assert!(is_held(&server, "k"), "no waiter here requested it");
}

/// Redis keeps an extended lock for longer than the ttl of its renewals. The release is retried for at least as long.
#[test]
fn adopted_extended_locks_are_released_after_an_outage() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let new = behind(&proxy, SOON);
    let guard = lock_extended(&old);
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    proxy.refuse(true);
    proxy.cut_all();
    drop(guard);
    thread::sleep(OUTAGE);
    proxy.refuse(false);
    let free = eventually(2 * SOON, || !is_held(&server, "k"));
    assert!(free, "leaked for {:?}", expires_in(&server, "k"));
}

#[test]
fn an_unanswered_extended_adoption_is_undone_later() {
    let server = server();
    let old = client(&server);
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = builder(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let late = builder
        .command_timeout(SOON)
        .outage_timeout(millis(1))
        .build();
    let late = late.unwrap();
    late.mutex("warm").inspect().unwrap();
    let guard = lock_extended(&old);
    let before = lease_of(&server, "k");
    let ticket = guard.into_ticket().unwrap();
    proxy.hold_replies(true);
    let adopter = late.clone();
    let task = Task::start(move || adopter.adopt(&ticket));
    assert!(eventually(SOON, || lease_of(&server, "k") != before));
    proxy.refuse(true);
    proxy.cut_all();
    assert!(task.within(SOON, "adopting").is_err());
    thread::sleep(OUTAGE);
    proxy.hold_replies(false);
    proxy.refuse(false);
    let free = eventually(2 * SOON, || !is_held(&server, "k"));
    assert!(free, "leaked for {:?}", expires_in(&server, "k"));
}
