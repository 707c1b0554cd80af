//! The output of the features `tracing` and `metrics`. A binary of its own, because both have one receiver
//! per process.
#![cfg(all(feature = "metrics", feature = "tracing"))]
#![allow(clippy::unwrap_used)]

#[path = "../it/child.rs"]
mod child;
mod forked;
mod receivers;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use leasehold::crossbeam_channel::{Sender, unbounded};
use leasehold::{Client, EventHandler, EventLock, MemoryQuorum, MemoryStore};
use leasehold_testbed::{Proxy, Reply, Server, eventually};
use metrics_util::debugging::DebuggingRecorder;

use receivers::{ALWAYS, AT_SPANS, Panicking, RECORDED_ON, Recorded, receivers, series_of};

const SOON: Duration = Duration::from_secs(20);

/// In a child process this is not a test: it runs the body that the parent test named.
#[test]
fn a_child_process_runs_the_named_body() {
    let bodies = child::bodies![child::echo, forked::a_parent,];
    if !child::run_body(&bodies) {
        let child = child::Child::start(child::echo, "memory://echo");
        assert_eq!(child.receive::<String>(6 * SOON), "memory://echo");
        child.finish(6 * SOON);
    }
}

#[test]
fn spans_contain_key_token_and_outcome() {
    let receivers = receivers();
    let client = Client::memory().unwrap();
    let mutex = client.mutex("invoice:42");
    let token = mutex
        .with(|guard| {
            assert!(mutex.try_lock().unwrap().is_none());
            tracing::info!("at work");
            guard.fencing_token()
        })
        .unwrap();
    drop(mutex.lock().unwrap());
    client.shutdown(SOON).unwrap();
    assert!(mutex.lock().is_err());

    let of = |notes: &[Recorded], field: &str| -> Vec<String> {
        notes
            .iter()
            .map(|one| one.fields.get(field).cloned().unwrap_or_default())
            .collect()
    };
    let waits = receivers.recorded("leasehold.wait");
    assert_eq!(
        of(&waits, "outcome"),
        ["granted", "contended", "granted", "shutdown"]
    );
    assert_eq!(of(&waits, "key"), ["invoice:42"; 4]);
    assert_eq!(of(&waits, "token")[0], token.to_string());
    assert_eq!(of(&waits, "token")[1], "");
    let holds = receivers.recorded("leasehold.hold");
    assert_eq!(of(&holds, "outcome"), ["released", "dropped"]);
    assert_eq!(of(&holds, "token")[0], token.to_string());
    assert_eq!(
        receivers.recorded("at work")[0].within,
        Some("leasehold.hold")
    );
    assert_eq!(
        waits[1].within,
        Some("leasehold.hold"),
        "a wait within a hold"
    );
    let numbers = receivers.numbers();
    assert_eq!(numbers["leasehold_waits_total{outcome=granted}"], 2.0);
    assert_eq!(numbers["leasehold_waits_total{outcome=contended}"], 1.0);
    assert_eq!(numbers["leasehold_waits_total{outcome=shutdown}"], 1.0);
    assert_eq!(numbers["leasehold_wait_seconds"], 4.0);
    assert_eq!(numbers["leasehold_holds_total{outcome=released}"], 1.0);
    assert_eq!(numbers["leasehold_holds_total{outcome=dropped}"], 1.0);
    assert_eq!(numbers["leasehold_hold_seconds"], 2.0);
}

#[test]
fn a_key_is_escaped_in_spans_and_warnings() {
    let receivers = receivers();
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let guard = client.mutex("a\u{202e}\u{2028}b").lock().unwrap();
    memory.advance(Duration::from_secs(31));
    assert!(eventually(SOON, || !receivers
        .recorded("lock lost")
        .is_empty()));
    drop(guard);
    for name in ["leasehold.wait", "leasehold.hold", "lock lost"] {
        let fields = receivers.recorded(name).remove(0).fields;
        assert_eq!(fields["key"], "a\\u{202e}\\u{2028}b", "{name}");
    }
}

#[test]
fn an_adoption_is_a_wait_for_a_lock() {
    let receivers = receivers();
    let memory = MemoryStore::new();
    let [old, new] = [(); 2].map(|()| memory.client().unwrap());
    let guard = old.mutex("k").lock().unwrap();
    let ticket = guard.into_ticket().unwrap();
    let adopted = new.adopt(&ticket).unwrap();
    let token = adopted.fencing_token().to_string();
    drop(adopted);
    new.adopt(&ticket).unwrap_err();
    let waits = receivers.recorded("leasehold.wait");
    let outcomes: Vec<_> = waits.iter().map(|wait| &wait.fields["outcome"]).collect();
    assert_eq!(outcomes, ["granted", "granted", "other"]);
    assert_eq!(waits[1].fields["token"], token);
    let numbers = receivers.numbers();
    assert_eq!(numbers["leasehold_waits_total{outcome=granted}"], 2.0);
    assert_eq!(numbers["leasehold_holds_total{outcome=transferred}"], 1.0);
}

#[test]
fn a_loss_is_logged_and_counted_by_reason() {
    let receivers = receivers();
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (key, token) = ("k".to_owned(), guard.fencing_token().to_string());
    memory.advance(Duration::from_secs(31));
    assert!(eventually(SOON, || !receivers
        .recorded("lock lost")
        .is_empty()));
    let fields = receivers.recorded("lock lost").remove(0).fields;
    assert_eq!((&fields["key"], &fields["token"]), (&key, &token));
    assert!(!fields["reason"].is_empty());
    drop(guard);
    let numbers = receivers.numbers();
    let losses: f64 = numbers
        .iter()
        .filter(|(name, _)| name.starts_with("leasehold_losses_total"))
        .map(|(_, count)| count)
        .sum();
    assert_eq!(losses, 1.0, "{numbers:?}");
    assert_eq!(numbers["leasehold_holds_total{outcome=lost}"], 1.0);
}

/// `unlock`, a closure and the release of a dropped guard find the loss: the server tells the client nothing.
#[test]
fn a_loss_that_a_release_finds_is_logged_and_counted_once() {
    let receivers = receivers();
    let server = Server::builder().arg("rename-command", "HELLO \"\"");
    let server = server.start().unwrap();
    let client = Client::builder(server.url())
        .command_timeout(SOON)
        .environment_check(false)
        .build()
        .unwrap();
    let lose = || server.command(&["DEL", "leasehold:k"]).unwrap();
    let mutex = client.mutex("k");
    let guard = mutex.lock().unwrap();
    lose();
    assert!(guard.unlock().unwrap_err().is_lease_lost());
    assert!(mutex.with(|_| lose()).unwrap_err().is_lease_lost());
    let guard = mutex.lock().unwrap();
    lose();
    drop(guard);
    client.shutdown(SOON).unwrap();
    assert_eq!(receivers.recorded("lock lost").len(), 3);
    let numbers = receivers.numbers();
    assert_eq!(numbers["leasehold_losses_total{reason=deleted}"], 3.0);
    assert_eq!(numbers["leasehold_holds_total{outcome=lost}"], 2.0);
    assert_eq!(numbers["leasehold_holds_total{outcome=dropped}"], 1.0);
}

#[test]
fn refused_writes_are_logged_and_counted() {
    let receivers = receivers();
    let client = Client::memory().unwrap();
    let total = client.fenced_value("invoice:42");
    total.write(9, "17").unwrap();
    total.write(7, "0").unwrap_err();
    total.delete(8).unwrap_err();
    let refused = receivers.recorded("write refused");
    let fields = |name: &str| -> Vec<String> {
        let values = refused.iter().map(|one| one.fields[name].clone());
        values.collect()
    };
    assert_eq!(fields("key"), ["invoice:42"; 2]);
    assert_eq!(fields("token"), ["7", "8"]);
    assert_eq!(fields("last_token"), ["9"; 2]);
    assert_eq!(receivers.numbers()["leasehold_writes_refused_total"], 2.0);
}

/// The series of the counters that docs/observability.md lists: each name with each value of its label.
fn documented_counters() -> BTreeSet<String> {
    let page = include_str!("../../docs/observability.md");
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| `leasehold_"));
    let mut series = BTreeSet::new();
    for row in rows.filter(|row| row.contains("| counter")) {
        let cells: Vec<&str> = row.split('|').collect();
        let words = |cell: &str| -> Vec<String> {
            let words = cell.split('`').skip(1).step_by(2);
            words.map(str::to_owned).collect()
        };
        let (name, labels) = (words(cells[1]).remove(0), words(cells[3]));
        match labels.split_first() {
            None => drop(series.insert(name)),
            Some((label, values)) => {
                series.extend(
                    values
                        .iter()
                        .map(|value| format!("{name}{{{label}={value}}}")),
                );
            }
        }
    }
    series
}

#[test]
fn a_client_registers_all_counters_when_it_is_built() {
    let _receivers = receivers();
    // Recorders of this thread, which is the only one that the client uses until its first event.
    let registered = |recorder: &DebuggingRecorder| {
        let series = series_of(recorder);
        assert!(series.values().all(|value| *value == 0.0), "{series:?}");
        series.into_keys().collect::<BTreeSet<_>>()
    };
    let all = documented_counters();
    assert!(all.len() > 30, "{all:?}");
    let recorder = DebuggingRecorder::new();
    let client = metrics::with_local_recorder(&recorder, || Client::memory().unwrap());
    assert_eq!(registered(&recorder), all);
    // A recorder that is installed later gets them with the first wait.
    let later = DebuggingRecorder::new();
    metrics::with_local_recorder(&later, || {
        client.with_lock("k", || ()).unwrap();
    });
    let series = series_of(&later);
    assert_eq!(series["leasehold_waits_total{outcome=granted}"], 1.0);
    assert_eq!(series["leasehold_losses_total{reason=expired}"], 0.0);
    assert!(all.iter().all(|name| series.contains_key(name)));
}

#[test]
fn renewals_are_counted_with_their_lateness() {
    let receivers = receivers();
    let memory = MemoryStore::new();
    let clients = [(); 3].map(|()| memory.client().unwrap());
    let keys = ["a", "b", "c"].iter().zip(&clients);
    let guards: Vec<_> = keys
        .map(|(key, client)| client.mutex(key).lock().unwrap())
        .collect();
    memory.advance(Duration::from_secs(12));
    for client in clients {
        client.shutdown(SOON).unwrap();
    }
    let numbers = receivers.numbers();
    assert_eq!(numbers["leasehold_renewals_total{outcome=renewed}"], 3.0);
    assert_eq!(numbers["leasehold_renewal_lateness_seconds"], 3.0);
    drop(guards);
}

#[test]
fn renewal_lateness_counts_from_its_due_time() {
    let receivers = receivers();
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let guard = client
        .mutex("k")
        .ttl(Duration::from_secs(30))
        .lock()
        .unwrap();
    // The renewal is due after ten seconds.
    memory.advance(Duration::from_secs(25));
    client.shutdown(SOON).unwrap();
    let late = receivers.seconds("leasehold_renewal_lateness_seconds");
    assert!(
        late.len() == 1 && (14.0..17.0).contains(&late[0]),
        "{late:?}"
    );
    drop(guard);
}

#[test]
fn renewal_seconds_end_with_the_reply() {
    const DELAY: Duration = Duration::from_millis(300);
    let receivers = receivers();
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let (renews, renewed) = unbounded();
    let client = Client::builder(proxy.url())
        .ttl(Duration::from_secs(10))
        .renew_ratio(0.1)
        .command_timeout(SOON)
        .event_handler(Arc::new(Renewals(renews)))
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    // By then the client has its connection, which takes several round trips.
    renewed.recv_timeout(SOON).unwrap();
    proxy.delay(DELAY);
    for _ in 0..2 {
        renewed.recv_timeout(SOON).unwrap();
    }
    proxy.delay(Duration::ZERO);
    client.shutdown(SOON).unwrap();
    let took = receivers.seconds("leasehold_renewal_seconds");
    assert!(
        took.iter().any(|took| *took >= DELAY.as_secs_f64()),
        "{took:?}"
    );
    drop(guard);
}

#[test]
fn shutdown_waits_until_renewals_are_counted() {
    const CLIENTS: u32 = 300;
    let receivers = receivers();
    for _ in 0..CLIENTS {
        let memory = MemoryStore::new();
        let client = memory.client().unwrap();
        let guard = client.mutex("k").lock().unwrap();
        // In some rounds a worker renews, because the timer thread sees first that the clock was moved.
        memory.advance(Duration::from_secs(12));
        client.shutdown(SOON).unwrap();
        drop(guard);
    }
    let numbers = receivers.numbers();
    let renewed = numbers["leasehold_renewals_total{outcome=renewed}"];
    assert_eq!(renewed, f64::from(CLIENTS));
}

/// Reports that a thread waits.
struct Waits(Sender<()>);

impl EventHandler for Waits {
    fn contended(&self, _: EventLock<'_>, _: Duration) {
        let _ = self.0.send(());
    }
}

#[test]
fn hand_offs_are_counted() {
    let receivers = receivers();
    let (waits, waiting) = unbounded();
    let client = MemoryStore::new()
        .builder()
        .event_handler(Arc::new(Waits(waits)))
        .hand_off_time(SOON)
        .build()
        .unwrap();
    let mutex = client.mutex("k");
    let first = mutex.lock().unwrap();
    std::thread::scope(|scope| {
        let next = scope.spawn(|| mutex.lock().unwrap().fencing_token());
        waiting.recv_timeout(SOON).unwrap();
        let token = first.fencing_token();
        drop(first);
        assert_eq!(next.join().unwrap(), token + 1);
    });
    assert_eq!(receivers.numbers()["leasehold_hand_offs_total"], 1.0);
}

#[test]
fn delayed_releases_are_logged_and_gauged() {
    let receivers = receivers();
    let are_retried = |count| {
        let retries = || receivers.level("leasehold_release_retries");
        let is_reached = eventually(SOON, || retries() == Some(count));
        assert!(is_reached, "{:?}, not {count}", retries());
    };
    let servers = [(); 3].map(|()| Server::start().unwrap());
    // The gauge has the sum of all clients.
    let mut clients = Vec::new();
    for (server, retries) in servers.iter().zip([1.0, 2.0, 3.0]) {
        let client = Client::builder(server.url())
            .pipelines(1)
            .command_timeout(Duration::from_millis(200))
            .build()
            .unwrap();
        let guard = client.mutex("k").lock().unwrap();
        server.stop();
        assert!(!guard.unlock().unwrap().is_confirmed());
        are_retried(retries);
        clients.push(client);
    }
    assert!(eventually(SOON, || !receivers
        .recorded("release delayed")
        .is_empty()));
    servers[0].resume();
    are_retried(2.0);
    servers[1].resume();
    are_retried(1.0);
    assert!(clients[1].mutex("k").try_lock().unwrap().is_some());
    // A client that has ended counts no longer, as soon as another client records the sum.
    assert!(clients[2].shutdown(Duration::from_millis(1)).is_err());
    assert!(eventually(SOON, || {
        // The background reads the reply to this release.
        drop(clients[1].mutex("k").lock().unwrap());
        receivers.level("leasehold_release_retries") == Some(0.0)
    }));
}

#[test]
fn changes_of_a_node_are_logged_and_gauged() {
    let receivers = receivers();
    let memory = MemoryQuorum::new(3);
    let client = memory.client().unwrap();
    client.with_lock("k", || ()).unwrap();
    memory.hang(2);
    client.with_lock("k", || ()).unwrap();
    let is_up = || receivers.level("leasehold_node_up{node=memory node 2}");
    assert!(eventually(SOON, || is_up() == Some(0.0)));
    assert!(eventually(SOON, || {
        !receivers.recorded("node does not vote").is_empty()
    }));
    let fields = receivers.recorded("node does not vote").remove(0).fields;
    let health = &fields["health"];
    assert!(
        health.starts_with("failing for ") && health.contains("ms: "),
        "{health}"
    );
    memory.recover(2);
    assert!(eventually(SOON, || is_up() == Some(1.0)));
    assert!(eventually(SOON, || !receivers
        .recorded("node up")
        .is_empty()));
}

/// The errors of renewals and releases are recorded, and so are the addresses of a quorum's nodes and why they do not
/// vote: after an outage, and after a refused login.
#[test]
fn no_record_shows_the_password_of_a_url() {
    const SECRET: &str = "hunter2";
    let receivers = receivers();
    let mut server = Server::start().unwrap();
    let ask = |server: &Server, words: &[&str]| {
        let reply = server.command(words).unwrap();
        assert!(!matches!(reply, Reply::Error(_)), "{reply}");
    };
    let user = ["ACL", "SETUSER", "me", "on", "~*", "&*", "+@all"];
    ask(&server, &[&user[..], &[&format!(">{SECRET}")]].concat());
    let url = |port| format!("redis://me:{SECRET}@127.0.0.1:{port}");
    let client = Client::builder(url(server.port()))
        .ttl(Duration::from_secs(60))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let [guard, other] = ["k", "other"].map(|key| client.mutex(key).lock().unwrap());
    ask(&server, &["ACL", "SETUSER", "me", "resetpass", ">an0ther"]);
    ask(&server, &["CLIENT", "KILL", "USER", "me"]);
    let has_failed = |why: &str| {
        let failed = receivers.recorded("renewal failed");
        failed.iter().any(|it| it.fields["error"].contains(why))
    };
    assert!(eventually(SOON, || has_failed("refuses the login")));
    assert!(!guard.unlock().unwrap().is_confirmed());
    let quorum = Client::quorum_builder([url(server.port()), url(1)]);
    let quorum = quorum.build_lazy().unwrap();
    quorum.mutex("k").try_lock().unwrap_err();
    server.kill();
    assert!(eventually(SOON, || has_failed("refuses connections")));
    let has = |name| !receivers.recorded(name).is_empty();
    assert!(eventually(SOON, || has("release delayed")));
    assert!(eventually(SOON, || has("node does not vote")));
    // The other node may be reported first.
    let node = format!("leasehold_node_up{{node=127.0.0.1:{}}}", server.port());
    let is_reported = || receivers.everything().contains(&node);
    assert!(eventually(SOON, is_reported), "{}", receivers.everything());
    let everything = receivers.everything();
    assert!(!everything.contains(SECRET), "{everything}");
    drop(other);
}

/// Reports that a lock was renewed.
struct Renewals(Sender<()>);

impl EventHandler for Renewals {
    fn renewed(&self, _: EventLock<'_>) {
        let _ = self.0.send(());
    }
}

#[test]
fn panicking_receivers_break_no_lock_or_thread() {
    let _receivers = receivers();
    let _panicking = Panicking::begin(ALWAYS);
    let server = Server::start().unwrap();
    let (renews, renewed) = unbounded();
    let client = Client::builder(server.url())
        .ttl(Duration::from_secs(10))
        .renew_ratio(0.05)
        .pipelines(1)
        .command_timeout(Duration::from_millis(500))
        .hand_off_time(SOON)
        .event_handler(Arc::new(Renewals(renews)))
        .build()
        .unwrap();
    let mutex = client.mutex("k");
    let is_held = || server.command(&["EXISTS", "leasehold:k"]).unwrap() == Reply::Int(1);
    // If a panic in the first round ended a thread, the second round fails.
    for _ in 0..2 {
        assert_eq!(mutex.with(|_| 1).unwrap(), 1);
        let guard = mutex.lock().unwrap();
        for _ in 0..3 {
            renewed.recv_timeout(SOON).unwrap();
        }
        assert!(mutex.try_lock().unwrap().is_none());
        let guard = std::thread::scope(|scope| {
            let next = scope.spawn(|| mutex.lock().unwrap());
            drop(guard);
            next.join().unwrap()
        });
        let lost = guard.lost_signal();
        server.command(&["DEL", "leasehold:k"]).unwrap();
        lost.recv_timeout(SOON).unwrap();
        drop(guard);
        let guard = mutex.lock().unwrap();
        server.stop();
        assert!(!guard.unlock().unwrap().is_confirmed());
        server.resume();
        assert!(
            eventually(SOON, || !is_held()),
            "the delayed release is done"
        );
        drop(mutex.lock().unwrap());
        assert!(eventually(SOON, || !is_held()));
        renewed.try_iter().for_each(drop);
    }
    client.shutdown(SOON).unwrap();
    let recorded_on = RECORDED_ON.lock().unwrap();
    let recorded_on: Vec<_> = recorded_on.iter().map(String::as_str).collect();
    assert_eq!(recorded_on, ["leasehold-callbacks"]);
}

#[test]
fn a_callers_panic_passes_a_panicking_subscriber() {
    let _receivers = receivers();
    let client = Client::memory().unwrap();
    // The receivers panic before the work begins, or only from within the work on.
    for before in [Some(AT_SPANS), Some(ALWAYS), None] {
        let mut panicking = before.map(Panicking::begin);
        let work = || {
            client.with_lock("k", || {
                panicking.get_or_insert_with(|| Panicking::begin(ALWAYS));
                panic!("the caller's own")
            })
        };
        let panic = catch_unwind(AssertUnwindSafe(work)).unwrap_err();
        drop(panicking);
        assert_eq!(panic.downcast_ref(), Some(&"the caller's own"));
        assert!(!client.mutex("k").is_locked().unwrap());
    }
}
