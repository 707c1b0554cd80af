//! The steps of docs/migration.md: two versions of a service run side by side, and plain commands stand for the old
//! library. `cargo xtask interop` runs the real libraries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::{Client, ErrorKind, Mutex, MutexGuard, OtherLibrary};
use leasehold_testbed::{Reply, Server};

use crate::steady::steady;
use crate::support::{LONG_TTL, Task, Witness, ask, lock, secs, server};

/// The limit for all turns, on a busy machine.
const WORK: Duration = Duration::from_secs(120);
const TURNS: usize = 40;
/// The value of another library.
const FOREIGN: &str = "3f2504e04f8911d39a0c0305e82c3301";

fn beside(server: &Server, prefix: &str, other: OtherLibrary) -> Client {
    let builder = steady(&server.url()).prefix(prefix).ttl(LONG_TTL);
    builder.compatible_with(other).build().unwrap()
}

fn native(server: &Server, prefix: &str) -> Client {
    let builder = steady(&server.url()).prefix(prefix).ttl(LONG_TTL);
    builder.build().unwrap()
}

/// The last token of a mixed fleet.
fn take_turns(clients: &[Client]) -> u64 {
    let witness = Arc::new(Witness::default());
    let turns = clients
        .iter()
        .map(|client| witness.start_turns(client.mutex("job"), TURNS));
    for turns in turns.collect::<Vec<_>>() {
        turns.within(WORK, "a service takes its turns");
    }
    assert_eq!(witness.entries(), clients.len() * TURNS);
    lock(&clients[0], "job").fencing_token()
}

#[test]
fn old_services_and_clients_with_the_setting_wait_for_each_other() {
    let server = server();
    let (with, without) = (
        beside(&server, "", OtherLibrary::PlainKeys),
        native(&server, ""),
    );
    let set = ["SET", "job", FOREIGN, "NX", "PX", "60000"];
    assert_eq!(ask(&server, &set).as_text(), Some("OK"));
    assert!(with.mutex("job").try_lock().unwrap().is_none());
    // A client whose setting was switched off too early fails, and changes nothing.
    let early = without.mutex("job").try_lock().unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Protocol);
    assert_eq!(ask(&server, &["GET", "job"]).as_text(), Some(FOREIGN));

    ask(&server, &["DEL", "job"]);
    let guard = lock(&with, "job");
    assert_eq!(ask(&server, &set), Reply::Nil);
    guard.unlock().unwrap();
    assert_eq!(ask(&server, &set).as_text(), Some("OK"));
}

#[test]
fn clients_with_and_without_the_setting_exclude_each_other() {
    for (prefix, other) in [
        ("", OtherLibrary::PlainKeys),
        ("lock:", OtherLibrary::PythonRedisLock),
    ] {
        let server = server();
        take_turns(&[beside(&server, prefix, other), native(&server, prefix)]);
    }
}

#[test]
fn redisson_leads_to_plain_keys_and_then_to_no_setting() {
    let server = server();
    let redisson = beside(&server, "", OtherLibrary::Redisson { fenced: true });
    let plain = beside(&server, "", OtherLibrary::PlainKeys);
    let of_redisson = lock(&redisson, "job").fencing_token();
    // The tokens of two settings come from two counters, so only the witness of each setting can compare them.
    let inside = Arc::new(AtomicBool::new(false));
    let fleet = [&redisson, &plain].map(|client| nested_turns(vec![client.mutex("job")], &inside));
    for turns in fleet {
        turns.within(WORK, "a service takes its turns");
    }
    let of_plain = lock(&plain, "job").fencing_token();
    assert!(of_redisson < of_plain, "{of_redisson}, then {of_plain}");
    let last = take_turns(&[plain, native(&server, "")]);
    assert!(of_plain < last, "{of_plain}, then {last}");
}

#[test]
fn three_rollouts_lead_to_another_key() {
    let server = server();
    let old = beside(&server, "", OtherLibrary::PlainKeys);
    let new = native(&server, "leasehold:");
    let rollouts = [
        vec![old.mutex("job")],
        vec![old.mutex("job"), new.mutex("job")],
        vec![new.mutex("job")],
    ];
    for neighbours in rollouts.windows(2) {
        let inside = Arc::new(AtomicBool::new(false));
        let turns = neighbours
            .iter()
            .map(|locks| nested_turns(locks.clone(), &inside));
        for turns in turns.collect::<Vec<_>>() {
            turns.within(WORK, "a service takes its turns");
        }
    }
    // Services two rollouts apart do not exclude each other, as the page warns.
    let _first = lock(&old, "job");
    let third = new.mutex("job").try_lock_for(secs(10)).unwrap();
    assert!(third.is_some());
}

/// Starts a service that holds all the locks at once, `TURNS` times.
fn nested_turns(locks: Vec<Mutex>, inside: &Arc<AtomicBool>) -> Task<()> {
    let inside = Arc::clone(inside);
    Task::start(move || {
        for _ in 0..TURNS {
            let held = locks.iter().map(|lock| lock.lock().unwrap());
            let held: Vec<MutexGuard> = held.collect();
            assert!(
                !inside.swap(true, Ordering::SeqCst),
                "two services are inside"
            );
            thread::yield_now();
            inside.store(false, Ordering::SeqCst);
            for guard in held.into_iter().rev() {
                guard.unlock().unwrap();
            }
        }
    })
}
