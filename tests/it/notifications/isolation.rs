//! Redis reports keys and channels per server. Even so, clients of other prefixes and databases do not get each other's
//! notifications.

use leasehold::{Builder, LossReason, LostSignal};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, lost_within, millis, server, tracked, wait_for_queue,
};

fn prefixed(server: &Server, prefix: &str) -> Builder {
    steady(&server.url()).ttl(LONG_TTL).prefix(prefix)
}

fn in_database(server: &Server, number: u8) -> Builder {
    let url = format!("{}/{number}", server.url());
    steady(&url).ttl(LONG_TTL)
}

/// Deletes a key of a database, as a tool would.
fn delete(server: &Server, database: u8, key: &str) {
    let url = format!("{}/{database}", server.url());
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_connection_with_timeout(SOON).unwrap();
    let deleted: usize = redis::cmd("DEL").arg(key).query(&mut connection).unwrap();
    assert_eq!(deleted, 1, "{key} was there");
}

#[track_caller]
fn assert_silent(lost: &LostSignal) {
    let loss = lost.recv_timeout(millis(150));
    assert!(loss.is_err(), "{loss:?}");
}

#[test]
fn a_loss_under_another_prefix_is_ignored() {
    let server = server();
    let clients = ["one:", "two:"].map(|prefix| prefixed(&server, prefix).build().unwrap());
    let guards = clients
        .each_ref()
        .map(|client| client.mutex("k").lock().unwrap());
    assert!(
        eventually(SOON, || tracked(&server) == 2),
        "both are tracked"
    );
    let lost = guards.each_ref().map(|guard| guard.lost_signal());
    delete(&server, 0, "one:k");
    assert_eq!(lost_within(SOON, &lost[0]), LossReason::Deleted);
    assert_silent(&lost[1]);
    delete(&server, 0, "two:k");
    assert_eq!(lost_within(SOON, &lost[1]), LossReason::Deleted);
}

#[test]
fn a_loss_in_another_database_is_ignored() {
    let server = server();
    let clients = [0, 1, 7].map(|n| in_database(&server, n).build().unwrap());
    let guards = clients
        .each_ref()
        .map(|client| client.mutex("k").lock().unwrap());
    assert!(
        eventually(SOON, || tracked(&server) >= 3),
        "all are tracked"
    );
    let lost = guards.each_ref().map(|guard| guard.lost_signal());
    lost.iter().for_each(assert_silent);
    delete(&server, 1, "leasehold:k");
    assert_eq!(lost_within(SOON, &lost[1]), LossReason::Deleted);
    assert_silent(&lost[0]);
    assert_silent(&lost[2]);
    // The key is still tracked, although Redis has reported a change of the key with the same name in database 1.
    delete(&server, 7, "leasehold:k");
    assert_eq!(lost_within(SOON, &lost[2]), LossReason::Deleted);
    assert_silent(&lost[0]);
    delete(&server, 0, "leasehold:k");
    assert_eq!(lost_within(SOON, &lost[0]), LossReason::Deleted);
}

#[test]
fn a_waiter_is_woken_in_its_own_database() {
    let server = server();
    let [holder, waiting] = [(); 2].map(|()| in_database(&server, 1).build().unwrap());
    let elsewhere = in_database(&server, 0).build().unwrap();
    let (held, theirs) = (
        holder.mutex("k").lock().unwrap(),
        elsewhere.mutex("k").lock().unwrap(),
    );
    let mutex = waiting.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    // This queue is in another database than the first queue.
    let watched = eventually(SOON, || tracked(&server) >= 3);
    assert!(watched, "all three have read the key");
    theirs.unlock().unwrap();
    assert!(!waiter.is_done());
    delete(&server, 1, "leasehold:k");
    let guard = waiter.within(SOON, "entering");
    match lost_within(SOON, &held.lost_signal()) {
        // Either result is possible, depending on when the client looks.
        LossReason::Deleted => {}
        LossReason::TakenOver { by } => assert_eq!(by.as_ref(), Some(waiting.holder_id())),
        reason => panic!("{reason:?}"),
    }
    guard.check().unwrap();
}

#[test]
fn a_release_under_another_prefix_wakes_no_waiter() {
    let server = server();
    let [one, two] = ["leasehold:", "other:"];
    let holders = [one, two].map(|prefix| prefixed(&server, prefix).build().unwrap());
    let waiting = prefixed(&server, one).build().unwrap();
    let [held, theirs] = holders
        .each_ref()
        .map(|client| client.mutex("k").lock().unwrap());
    let mutex = waiting.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap().unlock().unwrap());
    wait_for_queue(&server, "k", 1);
    theirs.unlock().unwrap();
    assert!(!eventually(millis(100), || waiter.is_done()));
    held.unlock().unwrap();
    waiter.within(SOON, "entering");
}

#[test]
fn flushing_another_database_loses_nothing() {
    let server = server();
    let client = in_database(&server, 1).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    assert!(eventually(SOON, || tracked(&server) >= 1));
    let lost = guard.lost_signal();
    ask(&server, &["FLUSHDB"]);
    assert!(eventually(SOON, || tracked(&server) >= 1), "it reads again");
    assert_silent(&lost);
    guard.unlock().unwrap();
}
