//! Readers and permits on a server: their requests, and processes that are killed. `conformance::shares` and
//! `conformance::rw_lock` have the behaviour on every kind of store.

use leasehold::{Client, RwLock};
use leasehold_testbed::{Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, held_keys, notified_clients, script_calls, server};

fn client(url: &str) -> Client {
    steady(url).ttl(LONG_TTL).build().unwrap()
}

#[track_caller]
fn wait_for_queue(lock: &RwLock, of: usize) {
    let waiting = || lock.inspect().unwrap().clients_waiting();
    assert!(eventually(SOON, || waiting() == of), "{} queued", waiting());
}

/// Waits to write, in a child process.
pub fn wait_to_write(parent: &Parent) {
    let client = client(&parent.url);
    parent.tell(client.holder_id().as_str());
    let _guard = client.rw_lock("k").write().unwrap();
    parent.wait_for_end();
}

#[test]
fn readers_enter_after_a_waiting_writer_is_killed() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    let _reader = one.rw_lock("k").read().unwrap();
    let mut writer = Child::start(wait_to_write, &server.url());
    let _: String = writer.receive(6 * SOON);
    let lock = two.rw_lock("k");
    wait_for_queue(&lock, 1);
    // The writer is notified, so only its death takes it out of the queue.
    assert!(eventually(SOON, || notified_clients(&server) >= 1));
    writer.kill();
    let reading = Task::start(move || lock.read().unwrap());
    reading
        .within(SOON, "the grant behind the dead writer")
        .check()
        .unwrap();
}

#[test]
fn a_grant_of_permits_takes_two_requests() {
    const CLIENTS: u64 = 4;
    const TURNS: u64 = 100;
    let server = server();
    let clients: Vec<_> = (0..CLIENTS).map(|_| client(&server.url())).collect();
    // Each connection for notifications is open before requests are counted.
    let warm: Vec<_> = clients
        .iter()
        .map(|client| client.semaphore("warm", CLIENTS as u32).acquire().unwrap())
        .collect();
    assert!(eventually(SOON, || notified_clients(&server) == clients.len()));
    drop(warm);
    let is_empty = || held_keys(&server).is_empty();
    assert!(eventually(SOON, is_empty), "{:?}", held_keys(&server));
    let before = calls(&server);
    let tasks: Vec<_> = clients
        .iter()
        .map(|client| {
            let semaphore = client.semaphore("k", 2);
            Task::start(move || {
                for _ in 0..TURNS {
                    semaphore.acquire().unwrap().unlock().unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(6 * SOON, "its turns");
    }
    // A waiter that waited for long on a busy machine asks once more.
    let (requests, grants) = (calls(&server) - before, CLIENTS * TURNS);
    assert!(
        requests <= grants * 11 / 5,
        "{requests} for {grants} grants"
    );
    assert!(eventually(SOON, is_empty), "{:?}", held_keys(&server));
}

fn calls(server: &Server) -> u64 {
    script_calls(server)
}
