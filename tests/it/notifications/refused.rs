//! Servers that send no notifications to a client. The client still locks and waits, by polling, and reports the
//! refusal once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::crossbeam_channel::{Sender, unbounded};
use leasehold::{Client, Error, EventHandler, EventLock, LossReason, Mutex};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, Witness, ask, connections_made, info_number, lost_within,
    millis, notification_connections, notified_clients, secs, server, wait_for_queue,
};

/// Permissions without which a user can get no notifications.
const LACKS: [&[&str]; 3] = [
    &["~*", "&*", "+@all", "-subscribe"],
    // Other clients of this user could not notify it of grants.
    &["~*", "&*", "+@all", "-publish"],
    // The user has no right to any channel, and so cannot publish either.
    &["~*", "resetchannels", "+@all"],
];

/// Servers that send no notifications to a client at the URL beside them.
fn refusing() -> Vec<(Server, String)> {
    let old = Server::builder().arg("rename-command", "SUBSCRIBE \"\"");
    let old = old.start().unwrap();
    let url = old.url();
    let limited = LACKS.map(|permissions| {
        let server = server();
        let url = limited(&server, permissions);
        (server, url)
    });
    limited.into_iter().chain([(old, url)]).collect()
}

/// The URL of a user with these permissions.
fn limited(server: &Server, permissions: &[&str]) -> String {
    let command = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
    ask(server, &[&command, permissions].concat());
    format!("redis://limited:secret@127.0.0.1:{}", server.port())
}

fn client(url: &str, recorder: &Arc<Recorder>) -> Client {
    let builder = steady(url)
        .ttl(LONG_TTL)
        .event_handler(Arc::clone(recorder));
    builder.build().unwrap()
}

#[test]
fn a_client_without_notifications_polls_and_reports_once() {
    for (n, (server, url)) in refusing().into_iter().enumerate() {
        let recorder = Recorder::new();
        let client = client(&url, &recorder);
        let holder = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        for (key, round) in [("a", 1), ("b", 2), ("a", 3)] {
            let held = holder.mutex(key).lock().unwrap();
            let mutex = client.mutex(key);
            let waiter = Task::start(move || mutex.lock().unwrap());
            recorder.wait_for(1, What::NotificationsRefused, "");
            wait_for_queue(&server, key, 1);
            if round % 2 == 0 {
                drop(held);
            } else {
                held.unlock().unwrap();
            }
            let guard = waiter.within(SOON, "entering");
            guard.check().unwrap();
            guard.unlock().unwrap();
        }
        let reports = recorder.count(What::NotificationsRefused, "");
        assert_eq!(reports, 1, "server {n}");
        assert!(notification_connections(&server) <= 1, "the holder's");
    }
}

#[test]
fn local_waiting_works_without_notifications() {
    let (server, recorder) = (server(), Recorder::new());
    let client = client(&limited(&server, LACKS[0]), &recorder);
    let witness = Arc::new(Witness::default());
    let turns = |_| witness.start_turns(client.mutex("k"), 10);
    let tasks: Vec<_> = (0..8).map(turns).collect();
    for task in tasks {
        task.within(secs(60), "ten grants");
    }
    assert_eq!(witness.entries(), 80);
}

#[test]
fn without_tracking_a_renewal_finds_a_loss() {
    let (server, recorder) = (server(), Recorder::new());
    // Redis 6.2 cannot forbid CLIENT TRACKING alone.
    let url = limited(&server, &["~*", "&*", "+@all", "-client"]);
    let client = client(&url, &recorder);
    let mutex = client.mutex("k").ttl(secs(3));
    let guard = mutex.lock().unwrap();
    recorder.wait_for(1, What::NotificationsRefused, "");
    ask(&server, &["DEL", "leasehold:k"]);
    let reason = guard.lost_signal().recv_timeout(SOON).unwrap();
    assert_eq!(reason, leasehold::LossReason::Deleted);
}

#[test]
fn a_key_without_read_permission_costs_no_connection() {
    let (server, recorder) = (server(), Recorder::new());
    let client = client(&limited(&server, &["~*", "&*", "+@all"]), &recorder);
    let [hidden, seen] = ["hidden", "seen"].map(|key| client.mutex(key).lock().unwrap());
    let both_watched = || info_number(&server, "stats", "tracking_total_keys") == 2;
    assert!(eventually(SOON, both_watched));
    let rules = ["resetkeys", "~leasehold:seen", "~leasehold:~*"];
    ask(
        &server,
        &[&["ACL", "SETUSER", "limited"], &rules[..]].concat(),
    );
    ask(&server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    // The earlier connection could read both keys. So a refused read shows that the client uses its new connection.
    assert!(eventually(SOON, || looks_refused(&server) == 1));
    let other = redis::Client::open(server.url()).unwrap();
    let mut other = other.get_connection_with_timeout(SOON).unwrap();
    // Opens the connection on which a loss is confirmed.
    seen.extend(secs(120)).unwrap();
    let made = connections_made(&server, || {
        for _ in 0..20 {
            let mut change = redis::cmd("PEXPIRE");
            let change = change.arg("leasehold:hidden").arg(70_000);
            change.exec(&mut other).unwrap();
            std::thread::sleep(millis(10));
        }
        redis::cmd("DEL")
            .arg("leasehold:seen")
            .exec(&mut other)
            .unwrap();
        let signal = seen.lost_signal();
        assert_eq!(lost_within(SOON, &signal), leasehold::LossReason::Deleted);
    });
    assert_eq!(made, 0);
    assert_eq!(looks_refused(&server), 1, "the hidden key");
    // Otherwise the client would retry the release until the ttl ends.
    ask(&server, &["ACL", "SETUSER", "limited", "~*"]);
    hidden.unlock().unwrap();
}

/// The number of GETRANGE calls that Redis refused because of a key.
fn looks_refused(server: &Server) -> u64 {
    let stats = ask(server, &["INFO", "commandstats"]);
    let mut lines = stats.as_text().unwrap().lines();
    let of_reads = lines.find(|line| line.starts_with("cmdstat_getrange:"));
    let (_, refused) = of_reads.unwrap().split_once("rejected_calls=").unwrap();
    refused.split(',').next().unwrap().parse().unwrap()
}

/// Takes turns with another client until both together have had `total` grants. Returns the number of this client's
/// grants.
fn take_turns(
    server: &Server,
    mutex: &Mutex,
    witness: &Witness,
    turns: &AtomicUsize,
    total: usize,
) -> usize {
    let mut own = 0;
    loop {
        let guard = mutex.lock().unwrap();
        if turns.fetch_add(1, Ordering::SeqCst) >= total {
            return own;
        }
        own += 1;
        drop(witness.enter(&guard));
        // Waits, since the other client may ask late on a slow machine.
        wait_for_queue(server, "k", 1);
        if own % 2 == 0 {
            guard.unlock().unwrap();
        }
    }
}

#[test]
fn notified_and_polling_waiters_both_progress() {
    const TOTAL: usize = 60;
    for (n, (server, url)) in refusing().into_iter().enumerate() {
        let recorder = Recorder::new();
        let polling = client(&url, &recorder);
        // On the last of these servers, this client polls, too, since the server notifies no client.
        let notified = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        let server = Arc::new(server);
        let (witness, turns) = (Arc::new(Witness::default()), Arc::default());
        let holder = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        let held = holder.mutex("k").lock().unwrap();
        let tasks = [&polling, &notified].map(|client| {
            let (mutex, witness) = (client.mutex("k"), Arc::clone(&witness));
            let (turns, server) = (Arc::clone(&turns), Arc::clone(&server));
            Task::start(move || take_turns(&server, &mutex, &witness, &turns, TOTAL))
        });
        recorder.wait_for(1, What::NotificationsRefused, "");
        wait_for_queue(&server, "k", 2);
        held.unlock().unwrap();
        let [by_polling, by_notified] = tasks.map(|task| task.within(secs(60), "all grants"));
        // A client that is queued while the other client holds the lock gets the next grant, unless it polls too late.
        assert!(
            by_polling.min(by_notified) >= TOTAL / 12,
            "{by_polling} by polling, {by_notified} by notification, server {n}"
        );
    }
}

/// Sends its events on, in their order.
struct Ordered(Sender<What>);

impl EventHandler for Ordered {
    fn notifications_refused(&self, _: &Error) {
        let _ = self.0.send(What::NotificationsRefused);
    }

    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        let _ = self.0.send(What::Lost);
    }
}

/// The program `leasehold doctor` relies on this order.
#[test]
fn a_refusal_is_reported_before_a_loss_in_a_message() {
    let server = server();
    let url = limited(&server, &["~*", "&*", "+@all", "-client|tracking"]);
    let (sender, events) = unbounded();
    let builder = steady(&url).ttl(LONG_TTL);
    let client = builder.event_handler(Arc::new(Ordered(sender)));
    let client = client.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let operator = steady(&server.url()).build().unwrap();
    // The client may not have handled the reply to its subscription yet.
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    operator.mutex("k").force_unlock().unwrap();
    for what in [What::NotificationsRefused, What::Lost] {
        assert_eq!(events.recv_timeout(2 * SOON), Ok(what));
    }
    assert!(guard.is_lost());
}

#[test]
fn clients_that_may_not_publish_keep_their_connections() {
    const CLIENTS: usize = 6;
    const TURNS: usize = 10;
    let server = server();
    let url = limited(&server, &["~*", "&*", "+@all", "-publish"]);
    let recorders: [_; CLIENTS] = std::array::from_fn(|_| Recorder::new());
    let clients = recorders.each_ref().map(|recorder| client(&url, recorder));
    let witness = Arc::new(Witness::default());
    let held = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let held = held.mutex("k").lock().unwrap();
    let tasks = clients
        .each_ref()
        .map(|client| witness.start_turns(client.mutex("k"), TURNS));
    wait_for_queue(&server, "k", CLIENTS);
    // Each client has opened all its connections by now.
    for recorder in &recorders {
        recorder.wait_for(1, What::NotificationsRefused, "");
    }
    assert!(
        eventually(SOON, || notified_clients(&server) == 1),
        "the holder"
    );
    let made = connections_made(&server, || {
        held.unlock().unwrap();
        for task in tasks {
            task.within(secs(60), "all grants");
        }
    });
    assert_eq!(made, 0);
}
