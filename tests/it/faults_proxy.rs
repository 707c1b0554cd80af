//! The network fails between a client and Redis: it delays, cuts, swallows, and delivers late.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use leasehold::{Builder, Client, ErrorKind, LossReason};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::steady::steady;
use crate::support::{
    Counter, LONG_TTL, Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, builder,
    is_held, lock, make_first_join_earlier, millis, secs, server, told_within, value_of,
    wait_for_line, wake_up_connections, within,
};

fn proxied() -> (Server, Proxy) {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    (server, proxy)
}

/// Settings of a client with one pipeline, whose locks stay for very long if they are not let go.
fn long_held(url: &str, recorder: &Arc<Recorder>) -> Builder {
    // Connecting is refused at once or takes as long as the machine is slow.
    builder(url)
        .connect_timeout(2 * SOON)
        .ttl(LONG_TTL)
        .pipelines(1)
        .event_handler(Arc::clone(recorder))
}

fn client(url: &str, recorder: &Arc<Recorder>) -> Client {
    long_held(url, recorder).build().unwrap()
}

/// A client that no slowness of the machine makes give up.
fn patient_client(url: &str, recorder: &Arc<Recorder>) -> Client {
    let builder = long_held(url, recorder).command_timeout(2 * SOON);
    builder.build().unwrap()
}

/// How many bytes `request` sends; it is delivered afterwards.
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

/// Calls `try_one` with every number from 0 to `last`, on a few threads that wait most of the time.
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
fn an_acquire_cut_after_any_number_of_its_bytes_is_made_good_and_leaves_nothing_behind() {
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
        // A new one each time: what an old one still sees to would be cut instead.
        let client = patient_client(&proxy.url(), &recorder);
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
        assert!(free, "held by nobody after a cut at {n} of {length} bytes");
    });
    assert_all_become_free(&server);
}

#[test]
fn an_acquire_whose_answer_is_cut_off_is_undone_though_its_caller_has_gone() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_replies(true);
    let mutex = client.mutex("a");
    let task = Task::start(move || mutex.try_lock().unwrap_err());
    assert!(eventually(SOON, || is_held(&server, "a")));
    proxy.refuse(true);
    proxy.cut_all();
    let error = task.within(SOON, "giving up");
    assert!(error.is_unavailable(), "{error}");
    assert!(is_held(&server, "a"), "nobody could have undone it yet");
    proxy.hold_replies(false);
    proxy.refuse(false);
    assert_all_become_free(&server);
}

#[test]
fn a_release_cut_after_any_number_of_its_bytes_is_sent_again() {
    let (server, proxy) = proxied();
    let length = {
        let client = client(&proxy.url(), &Recorder::new());
        let guard = lock(&client, "key-000");
        length_of(&proxy, move || drop(guard.unlock().unwrap()))
    };
    sweep(length, |n| {
        let proxy = Proxy::start(server.port()).unwrap();
        let recorder = Recorder::new();
        let client = patient_client(&proxy.url(), &recorder);
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
        assert!(
            free,
            "a release cut after {n} of {length} bytes has vanished"
        );
        assert_eq!(recorder.count(What::Contended, &key), 0);
    });
    assert_all_become_free(&server);
}

/// The acquire comes to Redis long after its caller has given up.
#[test]
fn an_abandoned_acquire_delivered_late_is_undone() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_requests(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "giving up", move || mutex.try_lock().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(proxy.held_bytes() > 0 && !is_held(&server, "a"));
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    assert_all_become_free(&server);
    client.with_lock("a", || ()).unwrap();
}

/// The client cannot come back: what it wrote behind the acquire before it left is all there is.
#[test]
fn an_abandoned_acquire_delivered_late_is_undone_on_its_own_connection() {
    let (server, proxy) = proxied();
    let client = client(&proxy.url(), &Recorder::new());
    client.with_lock("warm", || ()).unwrap();
    let counter = || ask(&server, &["GET", "leasehold:~fence"]);
    let before = counter();
    proxy.hold_requests(true);
    proxy.refuse(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "giving up", move || mutex.try_lock().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || counter() != before), "it was granted");
    assert_all_become_free(&server);
}

#[test]
fn an_abandoned_acquire_delivered_late_leaves_the_holder_of_that_moment_alone() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    let other = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_requests(true);
    let mutex = client.mutex("a");
    let error = within(SOON, "giving up", move || mutex.try_lock().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let guard = lock(&other, "a");
    let value = value_of(&server, "a");
    proxy.hold_requests(false);
    assert!(eventually(SOON, || proxy.held_bytes() == 0));
    // Behind all that is owed.
    client.shutdown(secs(5)).unwrap();
    assert_eq!(value_of(&server, "a"), value);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn late_releases_of_abandoned_acquires_leave_the_same_clients_live_grant_alone() {
    let (server, proxy) = proxied();
    for _ in 0..3 {
        let recorder = Recorder::new();
        let client = client(&proxy.url(), &recorder);
        client.with_lock("warm", || ()).unwrap();
        proxy.hold_requests(true);
        let mutex = client.mutex("a");
        let patient = Task::start(move || mutex.lock().unwrap());
        recorder.wait_for(2, What::Unavailable, "a");
        proxy.hold_requests(false);
        let guard = patient.within(SOON, "locking");
        guard
            .extend(LONG_TTL)
            .expect("what stands there is its own");
        let value = value_of(&server, "a").expect("it is held");
        // The worker pool repeats what it owes; other requests carry it along.
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
fn a_holder_in_a_black_hole_is_told_in_time_and_disturbs_nobody_later() {
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = client(&proxy.url(), &recorder);
    let others_events = Recorder::new();
    let other = builder(&server.url())
        .event_handler(Arc::clone(&others_events))
        .build()
        .unwrap();
    let ttl = secs(1);
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
    assert_eq!(told_within(ttl + secs(2), &signal), LossReason::Expired);
    let (next, lost) = next.within(SOON, "getting in after the ttl");
    assert!(lost, "somebody else entered before");
    assert!(next.fencing_token() > guard.fencing_token());
    drop(guard);

    // Renewals and the release come to Redis now.
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
fn a_grant_that_comes_too_late_to_be_believed_is_not_handed_out_and_not_told_as_a_loss() {
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
    // It tells what it has to tell before it ends.
    client.shutdown(SOON).unwrap();
    assert_eq!(recorder.count(What::Lost, "a"), 0);
}

/// The ids of the connections on which clients are notified.
fn notified_connections(server: &Server) -> Vec<String> {
    let list = ask(server, &["CLIENT", "LIST", "TYPE", "PUBSUB"]).to_string();
    let ids = list.lines().filter_map(|line| line.split(' ').next());
    ids.map(str::to_owned).collect()
}

/// Its first grant ends before it can confirm it; it joins in front, and the next grant has the whole ttl.
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
    wait_for_line(&server, "k", 1);
    let [second, third] = [1, 2].map(|n| {
        let mutex = near[n].mutex("k");
        let task = Task::start(move || mutex.lock().unwrap());
        wait_for_line(&server, "k", n + 1);
        task
    });
    // It is notified by now.
    assert!(eventually(SOON, || wake_up_connections(&server) >= 4));
    make_first_join_earlier(&server, "k", secs(3600));
    proxy.delay(millis(300));
    let before = notified_connections(&server);
    held.unlock().unwrap();
    let second = second.within(SOON, "the turn of the second");
    wait_for_line(&server, "k", 2);
    second.unlock().unwrap();
    let far = far.within(SOON, "its second turn");
    assert!(!third.is_done());
    far.check().unwrap();
    proxy.delay(millis(0));
    far.unlock().unwrap();
    third.within(SOON, "the last turn").unlock().unwrap();
    let after = notified_connections(&server);
    let is_kept = |id: &String| after.contains(id);
    assert!(before.iter().all(is_kept), "{before:?}, then {after:?}");
}

/// Their second attempts are under way in a batch that another thread leads when they give up.
#[test]
fn grants_for_those_who_have_left_by_then_are_given_back() {
    const LEAVERS: usize = 10;
    let (server, proxy) = proxied();
    let recorder = Recorder::new();
    let client = patient_client(&proxy.url(), &recorder);
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
    // A batch takes 400 ms from now on. They find their locks taken with one batch, and leave at
    // all times during those that carry their second attempts.
    let leavers: Vec<_> = (0..LEAVERS)
        .map(|n| {
            let (mutex, outage_timeout) = (client.mutex(key(n)), millis(800 + 80 * n as u64));
            Task::start(move || mutex.try_lock_for(outage_timeout).unwrap().map(drop))
        })
        .collect();
    for n in 0..LEAVERS {
        recorder.wait_for(1, What::Contended, &key(n));
    }
    drop(guards);
    for leaver in leavers {
        // With the lock or without, that is for the machine's speed to decide.
        let _ = leaver.within(SOON, "giving up");
    }
    busy.store(false, Ordering::Relaxed);
    for leader in leaders {
        leader.within(SOON, "keeping the pipeline busy");
    }
    proxy.delay(millis(0));
    assert_all_become_free(&server);
}

/// It comes too late to be believed, but would be in force for as long again.
#[test]
fn a_grant_that_comes_too_late_is_given_back() {
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
    // It asks again, and would find the lock taken by its own first attempt.
    let guard = task.within(SOON, "asking again").expect("nobody has it");
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

/// Eight threads of two clients behind the proxy raise a counter `times` each, while `fault` is
/// called every few entries.
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
        assert!(moved, "nobody gets in");
    }
    for task in tasks {
        task.within(SOON, "raising the counter");
    }
    let counted = Counter::open(server, "n").read();
    assert_eq!(counted, THREADS * times, "updates were lost");
    drop(clients);
    assert_all_become_free(server);
}
