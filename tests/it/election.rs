//! Elections on a server: their requests, faults, and many observers. `conformance::election` tests the behaviour on
//! every kind of store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::crossbeam_channel::{RecvTimeoutError, bounded};
use leasehold::{Client, ErrorKind, LeaderState, MemoryQuorum, Observer};
use leasehold_testbed::{Proxy, Server, eventually};
use rustix::process::Signal;

use crate::child::{self, Child, Parent};
use crate::conformance::election::{Watched, wait_for_candidates};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, assert_all_become_free, connections, held_keys,
    in_redis, is_held, kill_connections, lock_requests, millis, notified_clients, queue, reads,
    script_calls, secs, server, tracked, value_of, warm_up,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// A client whose connections are all open.
fn warm_client(server: &Server, ttl: Duration) -> Client {
    let before = notified_clients(server);
    let client = steady(&server.url()).ttl(ttl).pipelines(1).build().unwrap();
    let guard = client.mutex("warm").lock().unwrap();
    assert!(eventually(SOON, || notified_clients(server) > before));
    guard.unlock().unwrap();
    client
}

/// All requests about elections: script calls and the reads of tracked keys.
fn requests(server: &Server) -> u64 {
    // The scripts of looks read keys, too: each look reads one.
    script_calls(server) + server.calls("exec").unwrap()
}

/// Waits until an observer has nothing to do: both of its keys are tracked, and no request is under way.
fn wait_until_idle(server: &Server, clients: u64) {
    assert!(eventually(SOON, || tracked(server) >= 2 * clients));
    let mut last = 0;
    let is_quiet = || {
        let now = requests(server) + reads(server);
        thread::sleep(millis(50));
        let is_quiet = now == last;
        last = now;
        is_quiet
    };
    assert!(eventually(SOON, is_quiet));
}

#[test]
fn a_campaign_for_a_vacant_election_is_one_request() {
    let server = server();
    let client = warm_client(&server, LONG_TTL);
    let election = client.election("k");
    let count = |work: &mut dyn FnMut()| {
        let before = lock_requests(&server);
        work();
        lock_requests(&server) - before
    };
    let mut term = None;
    assert_eq!(count(&mut || term = election.try_campaign("a").unwrap()), 1);
    let term = term.unwrap();
    assert_eq!(
        count(&mut || assert!(election.leader().unwrap().is_some())),
        1
    );
    assert_eq!(
        count(&mut || assert!(election.try_campaign("b").unwrap().is_none())),
        1
    );
    assert_eq!(count(&mut || term.proclaim("c").unwrap()), 1);
    let stored = client.fenced_value("k").read().unwrap();
    assert_eq!(stored.as_deref(), Some(&b"c"[..]));
    // The token has more digits than a number in Lua, so the script computes it in two parts.
    let token = ask(&server, &["HGET", &in_redis("~value:k"), "token"]);
    assert_eq!(
        token.as_text(),
        Some(&*format!("{:020}", term.fencing_token()))
    );
    term.resign().unwrap();
    let token = ask(&server, &["HGET", &in_redis("~value:k"), "token"]);
    let next = election.campaign("d").unwrap();
    let later = ask(&server, &["HGET", &in_redis("~value:k"), "token"]);
    assert!(token.as_text() < later.as_text());
    assert_eq!(
        later.as_text(),
        Some(&*format!("{:020}", next.fencing_token()))
    );
}

/// The lock is free, but its queue is not empty, so the claim is refused, and plain commands grant the lock. The client
/// then adds the token, which observers need, to the lock's value.
#[test]
fn the_lock_of_a_leader_contains_its_token() {
    let server = server();
    let client = warm_client(&server, LONG_TTL);
    for checks in [false, true] {
        warm_up(&client);
        let queue = in_redis("~queue:k");
        ask(&server, &["ZADD", &queue, "1", "an entry of nobody"]);
        let mutex = client.mutex("k");
        let election = match checks {
            false => mutex.election(),
            true => mutex.renew_while(|| true).election(),
        };
        let before = lock_requests(&server);
        let term = election.try_campaign("a").unwrap().unwrap();
        // The claim, the grant by plain commands, a renewal, the adoption, and the value.
        assert_eq!(lock_requests(&server) - before, 5);
        let micros = (term.fencing_token() >> 10).to_string();
        let value = value_of(&server, "k").unwrap();
        assert!(value.contains(&micros), "{value} has no {micros}");
        let leader = election.leader().unwrap().unwrap();
        assert_eq!(leader.fencing_token(), term.fencing_token());
        assert_eq!(leader.value(), Some(&b"a"[..]));
        term.extend(LONG_TTL).unwrap();
        term.resign().unwrap();
        ask(&server, &["DEL", &queue]);
    }
}

/// Observers see no leader while a mutex with the name of an election is held.
#[test]
fn a_mutex_of_the_same_name_keeps_candidates_out() {
    let server = server();
    let client = warm_client(&server, LONG_TTL);
    warm_up(&client);
    // Its value contains no token.
    let held = client.mutex("k").lock().unwrap();
    let election = client.election("k");
    assert!(election.try_campaign("a").unwrap().is_none());
    assert!(election.leader().unwrap().is_none());
    let mut states = Watched::new(&client, "k");
    assert_eq!(states.next(), LeaderState::Vacant);
    held.unlock().unwrap();
    let term = election.campaign("a").unwrap();
    states.wait_for("a");
    drop(term);
}

#[test]
fn idle_observers_send_three_requests_per_ttl_at_most() {
    const TTL: Duration = Duration::from_secs(3);
    let server = server();
    let leader = warm_client(&server, TTL);
    let observing = warm_client(&server, TTL);
    for name in ["led", "vacant"] {
        let term = (name == "led").then(|| leader.election(name).campaign("a").unwrap());
        // All observers share the requests.
        let observers: Vec<Observer> = (0..100)
            .map(|_| observing.election(name).observe().unwrap())
            .collect();
        for states in &observers {
            assert!(states.recv_timeout(SOON).is_ok());
        }
        wait_until_idle(&server, 1);
        let (calls, tracking) = (requests(&server), reads(&server));
        let begun = Instant::now();
        thread::sleep(2 * TTL);
        let (calls, tracking) = (requests(&server) - calls, reads(&server) - tracking);
        let ttls = begun.elapsed().div_duration_f64(TTL).ceil() as u64;
        // Each renewal is a call, and its script reads the key. The leader's own client reads the key, too. Each look
        // is a call that reads the key.
        let renewals = if term.is_some() { 3 * ttls + 1 } else { 0 };
        let looks = calls.saturating_sub(renewals);
        println!("{name}: {calls} calls and {tracking} reads in {ttls} ttls");
        let own = tracking.saturating_sub(2 * renewals).max(looks);
        assert!(own <= 3 * ttls + 1, "{own} requests in {ttls} ttls");
        assert!(observers.iter().all(|states| states.is_empty()));
    }
}

/// Redis refuses the notification connection, so the client asks every third of the ttl.
#[test]
fn observers_without_notifications_poll() {
    const TTL: Duration = Duration::from_secs(3);
    let server = server();
    ask(
        &server,
        &[
            "ACL",
            "SETUSER",
            "default",
            "-client|tracking",
            "-subscribe",
        ],
    );
    let builder = steady(&server.url()).ttl(TTL).pipelines(1);
    let (leader, observing) = (client(&server), builder.build().unwrap());
    let mut states = Watched::new(&observing, "k");
    assert_eq!(states.next(), LeaderState::Vacant);
    let calls = requests(&server);
    let begun = Instant::now();
    thread::sleep(2 * TTL);
    let calls = requests(&server) - calls;
    let ttls = begun.elapsed().div_duration_f64(TTL);
    assert!(calls as f64 <= 3.0 * ttls + 2.0, "{calls} in {ttls} ttls");
    let term = leader.election("k").campaign("a").unwrap();
    states.wait_for("a");
    drop(term);
    states.wait_until_vacant();
}

#[test]
fn a_thousand_observers_learn_of_a_change_together() {
    const OBSERVERS: usize = 1_000;
    let server = server();
    let (leader, observing) = (
        warm_client(&server, LONG_TTL),
        warm_client(&server, LONG_TTL),
    );
    let observers: Vec<Observer> = (0..OBSERVERS)
        .map(|_| observing.election("k").observe().unwrap())
        .collect();
    let vacant = |states: &Observer| states.recv_timeout(SOON) == Ok(LeaderState::Vacant);
    assert!(observers.iter().all(vacant));
    wait_until_idle(&server, 1);
    let before = (script_calls(&server), reads(&server));
    let term = leader.election("k").campaign("a").unwrap();
    let granted = Instant::now();
    let mut learned = Vec::new();
    for states in &observers {
        loop {
            match states.recv_timeout(SOON).unwrap() {
                LeaderState::Leader(found) if found.value() == Some(b"a") => break,
                state => println!("{state:?}"),
            }
        }
        learned.push(granted.elapsed());
    }
    let p99 = learned[OBSERVERS * 99 / 100];
    println!("1,000 observers knew the leader after {p99:?} (p99)");
    // The limit is 50 ms plus stalls of a busy machine.
    assert!(p99 < millis(50) + secs(2), "{p99:?}");
    let after = (script_calls(&server), reads(&server));
    // The campaign, two reads of changed keys, and at most two looks, which read a key each. The client of the leader
    // reads its lock to track it.
    assert!(after.0 - before.0 <= 3, "{} calls", after.0 - before.0);
    assert!(after.1 - before.1 <= 8, "{} reads", after.1 - before.1);
    term.resign().unwrap();
    assert!(observers.iter().all(vacant));
}

/// Observers that do not receive their states take bounded memory, and get the newest state.
#[test]
fn slow_observers_keep_the_newest_state_only() {
    let server = server();
    let client = warm_client(&server, LONG_TTL);
    let slow: Vec<Observer> = (0..10_000)
        .map(|_| client.election("k").observe().unwrap())
        .collect();
    let mut fast = Watched::new(&client, "k");
    assert_eq!(fast.next(), LeaderState::Vacant);
    let term = client.election("k").campaign("0").unwrap();
    for n in 1..20 {
        term.proclaim(n.to_string()).unwrap();
    }
    fast.wait_for("19");
    // When the thread looks again, it has sent the last state to all observers.
    term.proclaim("last").unwrap();
    fast.wait_for("last");
    let memory = child::memory();
    for states in &slow {
        let mut newest = states.recv_timeout(SOON).unwrap();
        while !matches!(&newest, LeaderState::Leader(found) if found.value() == Some(b"last")) {
            newest = states.recv_timeout(SOON).unwrap();
        }
        assert!(states.is_empty(), "one state at a time");
    }
    let begun = Instant::now();
    drop(slow);
    println!("{memory:?} bytes; dropped in {:?}", begun.elapsed());
}

#[test]
fn dropped_observers_leave_nothing_behind() {
    let server = server();
    let (leader, observing) = (
        warm_client(&server, LONG_TTL),
        warm_client(&server, LONG_TTL),
    );
    let open = connections(&server);
    let term = leader.election("k").campaign("a").unwrap();
    let observers: Vec<Observer> = (0..3)
        .map(|_| observing.election("k").observe().unwrap())
        .collect();
    for states in &observers {
        assert!(states.recv_timeout(SOON).is_ok());
    }
    wait_until_idle(&server, 1);
    let kept = observers[0].clone();
    drop(observers);
    assert_eq!(kept.recv_timeout(SOON), Err(RecvTimeoutError::Disconnected));
    // Redis reports one more change of each key. The client does not read the keys afterwards.
    term.proclaim("b").unwrap();
    let before = (requests(&server), tracked(&server));
    term.proclaim("c").unwrap();
    term.resign().unwrap();
    let calls = requests(&server) - before.0;
    assert!(calls <= 2, "{calls} calls");
    assert_eq!(connections(&server), open);
    // A later observer makes the client read the keys again.
    let mut states = Watched::new(&observing, "k");
    assert_eq!(states.next(), LeaderState::Vacant);
    assert!(held_keys(&server).is_empty());
}

#[test]
fn an_outage_is_unknown_and_then_the_state_comes_again() {
    const TTL: Duration = Duration::from_secs(4);
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let leader = client(&server);
    let builder = steady(&proxy.url()).ttl(TTL);
    let observing = builder.command_timeout(millis(500)).build().unwrap();
    let term = leader.election("k").campaign("a").unwrap();
    let mut states = Watched::new(&observing, "k");
    states.wait_for("a");
    for silent in [true, false] {
        let begun = Instant::now();
        match silent {
            true => proxy.black_hole(true),
            false => {
                proxy.refuse(true);
                proxy.cut_all();
            }
        }
        assert_eq!(states.next(), LeaderState::Unknown);
        let took = begun.elapsed();
        println!("unknown after {took:?}");
        assert!(took <= TTL + secs(2), "{took:?}");
        // In the second case, the leader's value changes during the outage.
        thread::sleep(secs(2));
        let value = if silent { "a" } else { "b" };
        if !silent {
            term.proclaim("b").unwrap();
        }
        proxy.black_hole(false);
        proxy.refuse(false);
        let back = Instant::now();
        states.wait_for(value);
        println!("known again after {:?}", back.elapsed());
    }
}

/// Observers also learn of changes while the notification connection is closed.
#[test]
fn killed_connections_hide_no_change() {
    let server = server();
    let (leader, observing) = (
        warm_client(&server, LONG_TTL),
        warm_client(&server, LONG_TTL),
    );
    let mut states = Watched::new(&observing, "k");
    let term = leader.election("k").campaign("0").unwrap();
    for n in 1..=10 {
        kill_connections(&server);
        let value = n.to_string();
        term.proclaim(&value).unwrap();
        states.wait_for(&value);
    }
}

/// A replica that was behind has taken over. It has an earlier leader.
#[test]
fn an_older_state_counts_as_no_answer() {
    const TTL: Duration = Duration::from_secs(3);
    let server = server();
    let (leader, observing) = (warm_client(&server, LONG_TTL), warm_client(&server, TTL));
    let mut states = Watched::new(&observing, "k");
    assert_eq!(states.next(), LeaderState::Vacant);
    let first = leader.election("k").campaign("first").unwrap();
    states.wait_for("first");
    let old = value_of(&server, "k").unwrap();
    first.resign().unwrap();
    let second = leader.election("k").campaign("second").unwrap();
    let token = states.wait_for("second").fencing_token();
    ask(&server, &["SET", &in_redis("k"), &old, "PX", "60000"]);
    assert_eq!(states.next(), LeaderState::Unknown);
    assert!(second.is_lost() || second.lost_signal().recv_timeout(SOON).is_ok());
    ask(&server, &["DEL", &in_redis("k")]);
    states.wait_until_vacant();
    let third = leader.election("k").campaign("third").unwrap();
    assert!(third.fencing_token() > token);
    states.wait_for("third");
}

/// After a hand-off, only the value in Redis contains the token of the leader.
#[test]
fn observers_know_a_leader_whose_value_was_deleted() {
    let server = server();
    let recorder = Recorder::new();
    let builder = steady(&server.url()).ttl(LONG_TTL).hand_off_time(6 * SOON);
    let leading = builder.event_handler(Arc::clone(&recorder));
    let leading = leading.build().unwrap();
    let mut states = Watched::new(&client(&server), "k");
    let first = leading.election("k").campaign("first").unwrap();
    let token = states.wait_for("first").fencing_token();
    let election = leading.election("k");
    let second = Task::start(move || election.campaign("second").unwrap());
    recorder.wait_for(1, What::Contended, "k");
    drop(first);
    let second = second.within(SOON, "the next term");
    assert_eq!(second.fencing_token(), token + 1, "it was handed off");
    states.wait_for("second");
    ask(&server, &["DEL", &in_redis("~value:k")]);
    let LeaderState::Leader(leader) = states.next() else {
        panic!("the leader holds the lock");
    };
    assert_eq!(leader.value(), None);
    assert_eq!(leader.fencing_token(), second.fencing_token());
    second.proclaim("again").unwrap();
    states.wait_for("again");
}

/// The observer's process was stopped, so replies that it reads afterwards are old.
#[test]
fn replies_from_before_a_pause_are_old() {
    const TTL: Duration = Duration::from_secs(2);
    let server = server();
    let mut child = Child::start(observe_and_tell, &server.url());
    let leader = client(&server);
    let next = |child: &Child| child.receive::<String>(6 * SOON);
    assert_eq!(next(&child), "vacant");
    let term = leader.election("k").ttl(LONG_TTL).campaign("a").unwrap();
    while next(&child) != "a" {}
    child.signal(Signal::STOP);
    thread::sleep(2 * TTL);
    term.resign().unwrap();
    let term = leader.election("k").campaign("b").unwrap();
    child.signal(Signal::CONT);
    // The observer may report `Unknown` and `Vacant`, but not the earlier leader.
    loop {
        match &*next(&child) {
            "b" => break,
            "a" => panic!("an earlier leader"),
            _ => {}
        }
    }
    drop(term);
    child.kill();
}

pub fn observe_and_tell(parent: &Parent) {
    let client = steady(&parent.url).ttl(secs(2)).build().unwrap();
    for state in client.election("k").observe().unwrap() {
        parent.tell(match state {
            LeaderState::Leader(leader) => {
                String::from_utf8_lossy(leader.value().unwrap_or(b"?")).into_owned()
            }
            LeaderState::Vacant => "vacant".to_owned(),
            LeaderState::Unknown => "unknown".to_owned(),
        });
    }
}

pub fn lead_until_killed(parent: &Parent) {
    let client = steady(&parent.url).ttl(secs(2)).build().unwrap();
    for _ in 0..2 {
        let term = client.election("k").campaign("child").unwrap();
        parent.tell(term.fencing_token());
        parent.wait_to_proceed();
        assert!(term.resign().is_ok());
        parent.tell(0u64);
    }
}

#[test]
fn a_killed_leader_is_replaced_when_its_ttl_ends() {
    let server = server();
    let mut child = Child::start(lead_until_killed, &server.url());
    let token: u64 = child.receive(6 * SOON);
    let next = client(&server);
    let mut states = Watched::new(&next, "k");
    states.wait_for("child");
    let waiting = next.election("k");
    let waiter = Task::start(move || (waiting.campaign("next").unwrap(), Instant::now()));
    wait_for_candidates(&next, "k", 1);
    let killed = Instant::now();
    child.kill();
    let (term, elected) = waiter.within(6 * SOON, "the next leader");
    let took = elected.duration_since(killed);
    println!("replaced after {took:?} with a ttl of 2 s");
    // The limit is the ttl and 50 ms, plus stalls of a busy machine.
    assert!(took < secs(2) + millis(50) + SOON / 4, "{took:?}");
    assert!(term.fencing_token() > token);
    states.wait_for("next");
    drop(term);
}

#[test]
fn a_leader_that_resigns_is_replaced_at_once() {
    let server = server();
    let (one, two) = (
        warm_client(&server, LONG_TTL),
        warm_client(&server, LONG_TTL),
    );
    let mut fastest = Duration::MAX;
    for _ in 0..20 {
        let term = one.election("k").campaign("one").unwrap();
        let election = two.election("k");
        let next = Task::start(move || (election.campaign("two").unwrap(), Instant::now()));
        wait_for_candidates(&one, "k", 1);
        let resigned = Instant::now();
        term.resign().unwrap();
        let (term, elected) = next.within(SOON, "the next leader");
        fastest = fastest.min(elected.duration_since(resigned));
        term.resign().unwrap();
    }
    println!("the next leader after {fastest:?} at best, with its value");
    // This time contains the grant, the message of Redis, and the write of the value.
    assert!(fastest < millis(5) + millis(10), "{fastest:?}");
}

/// A candidate's process is stopped while it waits, and its turn passes. When it continues, it waits again.
#[test]
fn a_stopped_candidate_leads_on_no_stale_turn() {
    let server = server();
    let leader = client(&server);
    let term = leader.election("k").campaign("first").unwrap();
    let child = Child::start(lead_until_killed, &server.url());
    wait_for_candidates(&leader, "k", 1);
    child.signal(Signal::STOP);
    thread::sleep(secs(3));
    term.resign().unwrap();
    let other = client(&server);
    let term = other.election("k").campaign("other").unwrap();
    let token = term.fencing_token();
    child.signal(Signal::CONT);
    wait_for_candidates(&leader, "k", 1);
    term.check().unwrap();
    let found = other.election("k").leader().unwrap().unwrap();
    assert_eq!(found.value(), Some(&b"other"[..]));
    term.resign().unwrap();
    let later: u64 = child.receive(6 * SOON);
    assert!(later > token);
    let found = other.election("k").leader().unwrap().unwrap();
    assert_eq!(
        (found.value(), found.fencing_token()),
        (Some(&b"child"[..]), later)
    );
}

/// The client is shut down while the leader's closure runs.
#[test]
fn no_other_leads_while_work_runs_at_a_shutdown() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    let mut states = Watched::new(&one, "k");
    let ended = AtomicBool::new(false);
    let ran = one.election("k").run("one", |leader| {
        one.shutdown(SOON).unwrap();
        assert!(leader.is_lost());
        assert!(two.election("k").try_campaign("two").unwrap().is_none());
        ended.store(true, Ordering::SeqCst);
    });
    assert!(ran.unwrap_err().is_lease_lost());
    assert!(ended.load(Ordering::SeqCst));
    let mut last = None;
    // The channel of the observer ends with the client.
    while let Some(state) = states.next_or_end() {
        last = Some(state);
    }
    println!("the last state: {last:?}");
    let error = one.election("k").observe().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    assert_all_become_free(&server);
    assert!(two.election("k").try_campaign("two").unwrap().is_some());
}

#[test]
fn a_shutdown_ends_waiting_observers() {
    let server = server();
    let client = client(&server);
    let observers = [(); 3].map(|()| client.election("k").observe().unwrap());
    let waiting = observers.map(|states| Task::start_blocked(move || states.count()));
    client.shutdown(SOON).unwrap();
    for states in waiting {
        assert!(states.within(SOON, "the end of the channel") <= 1);
    }
}

/// Redis refuses the write of the value, so the candidate gives the term back.
#[test]
fn a_candidate_without_a_value_does_not_lead() {
    let server = server();
    let client = client(&server);
    let deny = |denied: &str| ask(&server, &["ACL", "SETUSER", "default", denied]);
    deny("-hset");
    let error = client.election("k").campaign("a").unwrap_err();
    deny("+hset");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_all_become_free(&server);
    let term = client.election("k").campaign("a").unwrap();
    let other = steady(&server.url()).build().unwrap().election("k");
    let waiting = Task::start(move || other.campaign("b").map(drop));
    wait_for_candidates(&client, "k", 1);
    deny("-hset");
    term.resign().unwrap();
    let error = waiting.within(SOON, "the refusal").unwrap_err();
    deny("+hset");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_all_become_free(&server);
    assert!(queue(&server, "k").is_empty());
}

/// Other programs' data under the keys of an election is an error, and stays unchanged.
#[test]
fn foreign_values_are_left_alone() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(2)).build().unwrap();
    for key in [in_redis("k"), in_redis("~value:k")] {
        ask(&server, &["SET", &key, "theirs"]);
        let election = client.election("k");
        for error in [
            election.campaign("a").map(drop).unwrap_err(),
            election.try_campaign("a").map(drop).unwrap_err(),
            election.leader().map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
            assert_eq!(error.key(), Some("k"));
        }
        let mut states = Watched::new(&client, "k");
        assert_eq!(states.next(), LeaderState::Unknown);
        assert_eq!(ask(&server, &["GET", &key]).as_text(), Some("theirs"));
        ask(&server, &["DEL", &key]);
        states.wait_until_vacant();
    }
}

/// The fence counter was deleted, and the clock was set back, so the value has a greater token than the next grant.
#[test]
fn a_value_with_a_later_token_refuses_a_candidate() {
    let server = server();
    let client = client(&server);
    let later = u64::MAX / 2;
    client.fenced_value("k").write(later, "later").unwrap();
    let election = client.election("k");
    for error in [
        election.try_campaign("a").map(drop).unwrap_err(),
        election.campaign("a").map(drop).unwrap_err(),
    ] {
        assert!(error.is_lease_lost(), "{error}");
    }
    assert_all_become_free(&server);
    let value = client.fenced_value("k").read().unwrap();
    assert_eq!(value.as_deref(), Some(&b"later"[..]));
}

#[test]
fn a_claim_without_a_reply_leaves_no_term() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = steady(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.command_timeout(millis(500)).build().unwrap();
    client.mutex("k").lock().unwrap().unlock().unwrap();
    proxy.hold_replies(true);
    let error = client.election("k").try_campaign("a").unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    proxy.cut_all();
    proxy.hold_replies(false);
    assert_all_become_free(&server);
    // A waiting campaign tries again.
    client.mutex("k").lock().unwrap().unlock().unwrap();
    proxy.hold_replies(true);
    let election = client.election("k");
    let waiting = Task::start(move || election.campaign("b").unwrap());
    assert!(eventually(SOON, || is_held(&server, "k")));
    proxy.cut_all();
    proxy.hold_replies(false);
    let term = waiting.within(6 * SOON, "the term");
    let found = client.election("k").leader().unwrap().unwrap();
    assert_eq!(found.fencing_token(), term.fencing_token());
}

#[test]
fn settings_and_names_are_checked() {
    const LIMIT: usize = 256 * 1024;
    let server = server();
    let builder = steady(&server.url()).max_reply_bytes(LIMIT);
    let client = builder.build().unwrap();
    let election = client.election("k");
    for error in [
        election
            .campaign(vec![7; LIMIT - 1023])
            .map(drop)
            .unwrap_err(),
        election.try_campaign(vec![7; LIMIT]).map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    }
    let term = election.campaign(vec![7; LIMIT - 1024]).unwrap();
    let found = election.leader().unwrap().unwrap();
    assert_eq!(found.value().map(<[u8]>::len), Some(LIMIT - 1024));
    let error = term.proclaim(vec![7; LIMIT]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    drop(term);
    for name in ["~k", ""] {
        let election = client.election(name);
        for error in [
            election.campaign("a").map(drop).unwrap_err(),
            election.leader().map(drop).unwrap_err(),
            election.observe().map(drop).unwrap_err(),
            election.adopt("no ticket", "a").map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
        }
    }
    let short = client.election("k").ttl(millis(1));
    let error = short.observe().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    let (stop, stopped) = bounded(0);
    drop(stop);
    let cancelled = client.election("other").cancelled_by(stopped);
    let _held = client.mutex("other").lock().unwrap();
    let error = cancelled.campaign("a").map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
}

#[test]
fn a_quorum_has_no_elections_and_names_the_alternative() {
    let client = MemoryQuorum::new(3).client().unwrap();
    let election = client.election("k");
    for error in [
        election.campaign("a").map(drop).unwrap_err(),
        election.try_campaign("a").map(drop).unwrap_err(),
        election.leader().map(drop).unwrap_err(),
        election.observe().map(drop).unwrap_err(),
        election.adopt("no ticket", "a").map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("hold a mutex"), "{error}");
    }
}

/// Ten thousand elections with one observer each share a thread and their round trips. The server does not track the
/// keys of the last election.
#[test]
fn ten_thousand_elections_are_observed_by_one_thread() {
    const ELECTIONS: usize = 10_001;
    let store = leasehold::MemoryStore::new();
    let client = store.client().unwrap();
    let before = child::threads();
    let observers: Vec<Observer> = (0..ELECTIONS)
        .map(|n| client.election(format!("e{n}")).observe().unwrap())
        .collect();
    for states in &observers {
        assert_eq!(states.recv_timeout(6 * SOON), Ok(LeaderState::Vacant));
    }
    if let (Some(before), Some(now)) = (before, child::threads()) {
        println!("{} more threads, of all tests", now.saturating_sub(before));
    }
    let term = client.election("e7").campaign("a").unwrap();
    let state = observers[7].recv_timeout(SOON).unwrap();
    assert!(matches!(state, LeaderState::Leader(_)), "{state:?}");
    let last = client.election("e10000").campaign("b").unwrap();
    assert!(observers[10_000].is_empty());
    store.advance(secs(11));
    let state = observers[10_000].recv_timeout(SOON).unwrap();
    assert!(matches!(state, LeaderState::Leader(_)), "{state:?}");
    drop(last);
    // A long time without an answer: Redis is away.
    store.hang();
    store.advance(secs(31));
    for states in &observers {
        assert_eq!(states.recv_timeout(6 * SOON), Ok(LeaderState::Unknown));
    }
    store.recover();
    for states in &observers {
        assert_eq!(states.recv_timeout(6 * SOON), Ok(LeaderState::Vacant));
    }
    assert!(term.is_lost());
}
