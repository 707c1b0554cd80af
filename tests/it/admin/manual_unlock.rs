//! A stuck lock is freed with the commands that docs/failures.md names.

use std::time::Duration;

use leasehold::LossReason;
use leasehold_testbed::{Reply, Server, eventually};

use super::{client, lock};
use crate::support::{
    SOON, Task, ask, is_held, lost_within, notified_clients, server, wait_for_queue,
};

/// The documented commands, each as words without `redis-cli`.
fn documented_commands() -> Vec<Vec<&'static str>> {
    let page = include_str!("../../../docs/failures.md");
    let (_, section) = page.split_once("## Freeing a stuck lock by hand").unwrap();
    let lines = section.lines().take_while(|line| !line.starts_with("## "));
    lines
        .filter_map(|line| line.strip_prefix("$ redis-cli "))
        .map(|command| command.split(' ').collect())
        .collect()
}

/// Runs the documented command of this name, which must occur once.
fn run(server: &Server, name: &str) -> Reply {
    let commands = documented_commands();
    let mut named = commands.iter().filter(|words| words[0] == name);
    let words = named
        .next()
        .unwrap_or_else(|| panic!("no {name} in {commands:?}"));
    assert!(named.next().is_none(), "{name} occurs twice");
    ask(server, words)
}

#[test]
fn documented_commands_free_a_lock() {
    let server = server();
    let [owner, other] = [(); 2].map(|()| client(&server));
    let guard = lock(&owner, "invoice:42");
    let lost = guard.lost_signal();
    let is_tracked = eventually(SOON, || notified_clients(&server) > 0);
    assert!(is_tracked, "held for long enough to be tracked");
    let mutex = other.mutex("invoice:42");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "invoice:42", 1);

    let value = run(&server, "GET");
    let holder = value.as_text().unwrap().split(' ').nth(3).unwrap();
    assert_eq!(holder, owner.holder_id().as_str());
    assert!(run(&server, "PTTL").as_int() > Some(0));
    let Reply::Array(queued) = run(&server, "ZRANGE") else {
        panic!("ZRANGE answers with an array");
    };
    let waits = queued[0].as_text().unwrap();
    assert!(waits.ends_with(other.holder_id().as_str()), "{waits}");
    assert_eq!(run(&server, "DEL"), Reply::Int(1));

    let next = waiter.within(SOON, "the lock");
    assert!(next.fencing_token() > guard.fencing_token());
    let reason = lost_within(SOON, &lost);
    let by = Some(other.holder_id().clone());
    let known = [LossReason::Deleted, LossReason::TakenOver { by }];
    assert!(known.contains(&reason), "{reason:?}");
    // The late release leaves the next holder's lock alone.
    drop(guard);
    owner.shutdown(SOON).unwrap();
    next.extend(Duration::from_secs(60)).unwrap();
    assert!(is_held(&server, "invoice:42"));
    next.unlock().unwrap();
}
