//! The network between a client and Redis fails: it delays, cuts, swallows, and delivers late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use leasehold::{Builder, Client, ErrorKind, LossReason};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::steady::steady;
use crate::support::{
    Counter, LONG_TTL, Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, builder,
    is_held, lock, lost_within, make_first_join_earlier, millis, notification_connections, secs,
    server, value_of, wait_for_queue, within,
};

fn proxied() -> (Server, Proxy) {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    (server, proxy)
}

/// The builder of a client with one pipeline, whose locks have a ttl longer than any test.
fn long_held(url: &str, recorder: &Arc<Recorder>) -> Builder {
    // The proxy refuses an attempt to connect at once, or accepts it. So the time-out only has to be long enough for a
    // busy machine.
    builder(url)
        .connect_timeout(2 * SOON)
        .ttl(LONG_TTL)
        .pipelines(1)
        .event_handler(Arc::clone(recorder))
}

fn client(url: &str, recorder: &Arc<Recorder>) -> Client {
    long_held(url, recorder).build().unwrap()
}

/// A client with time-outs that a busy machine does not reach.
fn unhurried_client(url: &str, recorder: &Arc<Recorder>) -> Client {
    let builder = long_held(url, recorder).command_timeout(2 * SOON);
    builder.build().unwrap()
}

/// The number of bytes that `request` sends; the proxy delivers them afterwards.
fn length_of(proxy: &Proxy, request: impl FnOnce() + Send + 'static) -> usize {
    proxy.hold_requests(true);
    let task = Task::start(request);
    assert!(eventually(SOON, || proxy.held_bytes() > 0));
    let length = proxy.held_bytes();
    proxy.hold_requests(false);
    task.within(SOON, "sending a request");
    assert!((100..2_000).contains(&length), "{length} bytes");
    length
}

/// Calls `try_one` with every number from 0 to `last`, on a few threads that mostly wait.
fn sweep(last: usize, try_one: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while let n @ 0.. = next.fetch_add(1, Ordering::Relaxed)
                    && n <= last
                {
                    try_one(n);
                }
            });
        }
    });
}

#[test]
fn an_acquire_cut_anywhere_leaves_nothing_behind() {
    let (server, proxy) = proxied();
    let length = {
        let recorder = Recorder::new();
        let client = client(&proxy.url(), &recorder);
        client.with_lock("warm", || ()).unwrap();
        length_of(&proxy, move || drop(lock(&client, "key-000")))
    };
    sweep(length, |n| {
        let proxy = Proxy::start(server.port()).unwrap();
        let recorder = Recorder::new();
        // A new client each time, since the cut could hit the background work of an old client.
        let client = unhurried_client(&proxy.url(), &recorder);
        client.with_lock(format!("warm-{n}"), || ()).unwrap();
        let key = format!("key-{n:03}");
        proxy.cut_after(Some(n));
        let guard = lock(&client, &key);
        assert!(
            recorder.count(What::Unavailable, &key) > 0,
            "not cut at {n}"
        );
        guard.unlock().unwrap();
        let free = eventually(SOON, || !is_held(&server, &key));
        assert!(free, "leaked by a cut at {n} of {length} bytes");
    });
    assert_all_become_free(&server);
}

#[test]
fn unanswered_acquires_are_undone_without_their_caller() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = long_held(&proxy.url(), &recorder).command_timeout(secs(4));
    let client = client.build().unwrap();
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_replies(true);
    let mutex = client.mutex("a");
    let task = Task::start(move || mutex.try_lock().unwrap_err());
    assert!(eventually(SOON, || is_held(&server, "a")));
    proxy.refuse(true);
    proxy.cut_all();
    let error = task.within(SOON, "the end of the wait");
    assert!(error.is_unavailable(), "{error}");
    assert!(is_held(&server, "a"), "nothing could have undone it yet");
    proxy.hold_replies(false);
    proxy.refuse(false);
    assert_all_become_free(&server);
}

#[test]
fn a_release_cut_anywhere_is_repeated() {
    let (server, proxy) = proxied();
    let length = {
        let client = client(&proxy.url(), &Recorder::new());
        let guard = lock(&client, "key-000");
        length_of(&proxy, move || drop(guard.unlock().unwrap()))
    };
    sweep(length, |n| {
        let proxy = Proxy::start(server.port()).unwrap();
        let recorder = Recorder::new();
        let client = unhurried_client(&proxy.url(), &recorder);
        let key = format!("key-{n:03}");

        let guard = lock(&client, &key);
        proxy.cut_after(Some(n));
        let released = within(SOON, "unlocking", move || guard.unlock().unwrap());
        assert!(released.is_confirmed(), "{released:?}");
        assert!(!is_held(&server, &key), "confirmed, and yet locked: {n}");

        let guard = lock(&client, &key);
        proxy.cut_after(Some(n));
        drop(guard);
        let mutex = client.mutex(&key);
        let again = within(SOON, "trying", move || mutex.try_lock().unwrap());
        let again = again.unwrap_or_else(|| panic!("found its own lock, cut at {n}"));

        proxy.cut_after(Some(n));
        drop(again);
        let free = eventually(SOON, || !is_held(&server, &key));
        assert!(free, "a release cut after {n} of {length} bytes was lost");
        assert_eq!(recorder.count(What::Contended, &key), 0);
    });
    assert_all_become_free(&server);
}

/// The acquire arrives at Redis long after its caller has given up.
#[test]
fn a_late_abandoned_acquire_is_undone() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_requests(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "the end of the wait", move || {
        mutex.try_lock().unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(proxy.held_bytes() > 0 && !is_held(&server, "a"));
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    assert_all_become_free(&server);
    client.with_lock("a", || ()).unwrap();
}

/// The client cannot reconnect. Only the release that it wrote behind the acquire can undo the acquire.
#[test]
fn a_late_abandoned_acquire_is_undone_behind_it() {
    let (server, proxy) = proxied();
    let client = client(&proxy.url(), &Recorder::new());
    client.with_lock("warm", || ()).unwrap();
    let counter = || ask(&server, &["ZSCORE", "leasehold:~fence", "t"]);
    let before = counter();
    proxy.hold_requests(true);
    proxy.refuse(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "the end of the wait", move || {
        mutex.try_lock().unwrap_err()
    });
    assert!(error.is_unavailable(), "{error}");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || counter() != before), "it was granted");
    assert_all_become_free(&server);
}

#[test]
fn a_late_abandoned_acquire_spares_the_current_holder() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    let other = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_requests(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "the end of the wait", move || {
        mutex.try_lock().unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let guard = lock(&other, "a");
    let value = value_of(&server, "a");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    // The shutdown waits for all repeated releases.
    client.shutdown(secs(5)).unwrap();
    assert_eq!(value_of(&server, "a"), value);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn late_releases_spare_the_clients_live_grant() {
    let (server, proxy) = proxied();
    for _ in 0..3 {
        let recorder = Recorder::new();
        let client = client(&proxy.url(), &recorder);
        client.with_lock("warm", || ()).unwrap();
        proxy.hold_requests(true);
        let mutex = client.mutex("a");
        let long_waiter = Task::start(move || mutex.lock().unwrap());
        recorder.wait_for(2, What::Unavailable, "a");
        proxy.hold_requests(false);
        let guard = long_waiter.within(SOON, "locking");
        guard.extend(LONG_TTL).expect("the lock is its own");
        let value = value_of(&server, "a").expect("the lock is held");
        // The background repeats the releases, and writes them together with other requests.
        for _ in 0..20 {
            client.with_lock("b", || ()).unwrap();
            thread::sleep(millis(20));
            assert_eq!(value_of(&server, "a").as_ref(), Some(&value));
        }
        guard.extend(2 * LONG_TTL).unwrap();
        guard.unlock().unwrap();
        assert_all_become_free(&server);
    }
}

#[test]
fn cut_off_holders_lose_locks_and_stay_silent() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    let others_events = Recorder::new();
    let other = builder(&server.url())
        .event_handler(Arc::clone(&others_events))
        .build()
        .unwrap();
    let ttl = secs(3);
    let guard = client.mutex("a").ttl(ttl).lock().unwrap();
    let guard = Arc::new(guard);
    recorder.wait_for(1, What::Renewed, "a");
    let signal = guard.lost_signal();
    proxy.black_hole(true);
    let mutex = other.mutex("a").fixed_ttl(LONG_TTL);
    let holder = Arc::clone(&guard);
    let next = Task::start(move || {
        let next = mutex.lock().unwrap();
        (next, holder.is_lost())
    });
    assert_eq!(lost_within(ttl + secs(2), &signal), LossReason::Expired);
    let (next, lost) = next.within(SOON, "the grant after the ttl");
    assert!(lost, "another client entered before");
    assert!(next.fencing_token() > guard.fencing_token());
    drop(guard);

    // Redis gets the renewals and the release only now.
    let value = value_of(&server, "a");
    proxy.black_hole(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    client.shutdown(secs(5)).unwrap();
    assert_eq!(value_of(&server, "a"), value);
    next.extend(2 * LONG_TTL).unwrap();
    next.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn a_short_black_hole_costs_a_renewed_lock_nothing() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = builder(&proxy.url())
        .renew_ratio(0.1)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("a").lock().unwrap();
    recorder.wait_for(1, What::Renewed, "a");
    proxy.black_hole(true);
    recorder.wait_for(1, What::RenewalFailed, "a");
    proxy.black_hole(false);
    recorder.wait_for_more(1, What::Renewed, "a");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert!(!is_held(&server, "a"));
}

#[test]
fn a_grant_beyond_its_validity_is_not_used() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = builder(&proxy.url())
        .command_timeout(secs(5))
        .event_handler(recorder.clone())
        .build()
        .unwrap();
    client.with_lock("a", || ()).unwrap();
    proxy.delay(millis(300));
    let mutex = client.mutex("a").ttl(millis(400));
    let error = within(SOON, "trying", move || {
        mutex.try_lock_for(secs(1)).unwrap_err()
    });
    assert!(error.is_unavailable(), "{error}");
    proxy.delay(millis(0));
    assert_all_become_free(&server);
    client.with_lock("b", || ()).unwrap();
    // The client sends its events before it ends.
    client.shutdown(SOON).unwrap();
    assert_eq!(recorder.count(What::Lost, "a"), 0);
}

/// The ids of the connections on which clients are notified.
fn notified_connections(server: &Server) -> Vec<String> {
    let list = ask(server, &["CLIENT", "LIST", "TYPE", "PUBSUB"]).to_string();
    let ids = list.lines().filter_map(|line| line.split(' ').next());
    ids.map(str::to_owned).collect()
}

/// The waiter confirms its grant too late. This counts until another waiter is served. On a slow machine another waiter
/// may be served, and then the far waiter joins in front again.
#[test]
fn a_waiter_far_away_has_its_turn() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let far = steady(&proxy.url()).ttl(secs(2)).build().unwrap();
    far.with_lock("warm", || ()).unwrap();
    let near = [(); 3].map(|()| client(&server.url(), &recorder));
    let held = lock(&near[0], "k");
    let mutex = far.mutex("k");
    let far = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    let [second, third] = [1, 2].map(|n| {
        let mutex = near[n].mutex("k");
        let task = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, "k", n + 1);
        task
    });
    // All clients have a notification connection from here on, so the grant comes as a message.
    assert!(eventually(SOON, || notification_connections(&server) >= 4));
    make_first_join_earlier(&server, "k", secs(3600));
    proxy.delay(millis(300));
    let before = notified_connections(&server);
    held.unlock().unwrap();
    assert!(eventually(SOON, || far.is_done() || second.is_done()));
    let mut second = Some(second);
    if !far.is_done() {
        let served = second.take().map(|one| one.within(SOON, "its grant"));
        wait_for_queue(&server, "k", 2);
        served.unwrap().unlock().unwrap();
    }
    let far = far.within(SOON, "its grant");
    assert!(!third.is_done());
    far.check().unwrap();
    proxy.delay(millis(0));
    far.unlock().unwrap();
    for other in second.into_iter().chain([third]) {
        other.within(SOON, "a grant").unlock().unwrap();
    }
    let after = notified_connections(&server);
    let is_kept = |id: &String| after.contains(id);
    assert!(before.iter().all(is_kept), "{before:?}, then {after:?}");
}

/// The waiters give up while their second attempts are in flight, in a batch that another thread leads.
#[test]
fn grants_for_departed_waiters_are_released() {
    const LEAVERS: usize = 10;
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = unhurried_client(&proxy.url(), &recorder);
    let holder = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let key = |n: usize| format!("lock-{n}");
    let guards: Vec<_> = (0..LEAVERS).map(|n| lock(&holder, &key(n))).collect();
    let busy = Arc::new(AtomicBool::new(true));
    let leaders: Vec<Task<()>> = (0..4)
        .map(|n| {
            let (client, busy) = (client.clone(), Arc::clone(&busy));
            Task::start(move || {
                while busy.load(Ordering::Relaxed) {
                    client.with_lock(format!("busy-{n}"), || ()).unwrap();
                }
            })
        })
        .collect();
    recorder.wait_for(1, What::Acquired, "busy-0");
    proxy.delay(millis(200));
    // A batch takes 400 ms from now on. The waiters find their locks taken with one of the first batches, and leave at
    // various times during the batches of their later attempts. On a slow machine, they leave earlier, or get the lock.
    let leavers: Vec<_> = (0..LEAVERS)
        .map(|n| {
            let (mutex, wait) = (client.mutex(key(n)), millis(1_600 + 80 * n as u64));
            Task::start(move || match mutex.try_lock_for(wait) {
                Ok(guard) => drop(guard),
                // The first attempt has no reply yet.
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            })
        })
        .collect();
    for (n, leaver) in leavers.iter().enumerate() {
        let has_asked = || leaver.is_done() || recorder.count(What::Contended, &key(n)) > 0;
        assert!(eventually(SOON, has_asked));
    }
    drop(guards);
    for leaver in leavers {
        leaver.within(SOON, "the end of the wait");
    }
    busy.store(false, Ordering::Relaxed);
    for leader in leaders {
        leader.within(SOON, "keeping the pipeline busy");
    }
    proxy.delay(millis(0));
    assert_all_become_free(&server);
}

/// The grant comes too late to be valid, but would stay in Redis for another ttl.
#[test]
fn a_late_grant_is_released() {
    let (_server, proxy) = proxied();
    let client = builder(&proxy.url())
        .command_timeout(secs(30))
        .build()
        .unwrap();
    client.with_lock("a", || ()).unwrap();
    let (ttl, recorded) = (secs(2), std::time::Instant::now());
    proxy.hold_requests(true);
    let mutex = client.mutex("a").fixed_ttl(ttl);
    let task = Task::start(move || mutex.try_lock().unwrap());
    assert!(eventually(SOON, || proxy.held_bytes() > 0));
    thread::sleep(ttl.saturating_sub(recorded.elapsed()));
    proxy.hold_requests(false);
    // The client asks again, and would find the lock taken by its own first attempt.
    let guard = task
        .within(SOON, "asking again")
        .expect("nobody has the lock");
    guard.unlock().unwrap();
}

#[test]
fn a_slow_network_costs_time_and_no_exclusion() {
    let (server, proxy) = proxied();
    proxy.delay(millis(10));
    count_with(&server, &proxy, 5, |_| ());
}

#[test]
fn connections_cut_anywhere_cost_no_exclusion() {
    let (server, proxy) = proxied();
    let mut position = 0;
    count_with(&server, &proxy, 25, |proxy| {
        position = (position + 397) % 1_999;
        proxy.cut_after(Some(position));
    });
}

/// Eight threads of two clients behind the proxy raise a counter `times` times each, while the test calls
/// `fault` every few entries.
fn count_with(server: &Server, proxy: &Proxy, times: usize, mut fault: impl FnMut(&Proxy)) {
    const THREADS: usize = 8;
    let witness = Arc::new(Witness::default());
    let clients = [(); 2].map(|()| client(&proxy.url(), &Recorder::new()));
    let tasks: Vec<Task<()>> = (0..THREADS)
        .map(|n| {
            let (witness, mut counter) = (Arc::clone(&witness), Counter::open(server, "n"));
            let mutex = clients[n % 2].mutex("a");
            Task::start(move || {
                for _ in 0..times {
                    let guard = mutex.lock().unwrap();
                    let inside = witness.enter(&guard);
                    counter.raise();
                    drop(inside);
                }
            })
        })
        .collect();
    while tasks.iter().any(|task| !task.is_done()) {
        let entries = witness.entries();
        fault(proxy);
        let moved = eventually(SOON, || {
            witness.entries() > entries + 1 || tasks.iter().all(Task::is_done)
        });
        assert!(moved, "no grant");
    }
    for task in tasks {
        task.within(SOON, "raising the counter");
    }
    let counted = Counter::open(server, "n").read();
    assert_eq!(counted, THREADS * times, "updates were lost");
    drop(clients);
    assert_all_become_free(server);
}
