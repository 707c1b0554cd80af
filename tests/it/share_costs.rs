//! The number of requests for each grant of a share or a writer, with and without contention, and the time until a
//! killed holder's permit is granted to the next client.

use std::time::{Duration, Instant};

use leasehold::Client;
use leasehold::crossbeam_channel::bounded;
use leasehold_testbed::{Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, held_keys, lock_requests, notified_clients, script_calls, server,
    wait_for_queue,
};

const CLIENTS: usize = 4;
const TURNS: usize = 100;

/// One turn of a client: locks and releases once. The number is that of the turn.
type Turn = fn(&Client, usize);

fn permit(client: &Client, limit: u32) {
    client
        .semaphore("k", limit)
        .acquire()
        .unwrap()
        .unlock()
        .unwrap();
}

fn read_or_write(client: &Client, writes: bool) {
    let lock = client.rw_lock("k");
    if writes {
        lock.write().unwrap().unlock().unwrap();
    } else {
        lock.read().unwrap().unlock().unwrap();
    }
}

fn is_empty(server: &Server) -> bool {
    held_keys(server).is_empty()
}

#[test]
fn each_grant_takes_two_requests() {
    let kinds: [(&str, Turn); 6] = [
        ("permits for all", |client, _| {
            permit(client, CLIENTS as u32)
        }),
        ("permits for two", |client, _| permit(client, 2)),
        ("one permit", |client, _| permit(client, 1)),
        ("readers", |client, _| read_or_write(client, false)),
        ("writers", |client, _| read_or_write(client, true)),
        ("both", |client, turn| {
            read_or_write(client, turn.is_multiple_of(5))
        }),
    ];
    let server = server();
    let open = || steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let clients: Vec<Client> = (0..CLIENTS).map(|_| open()).collect();
    // All connections for notifications are open before the test counts requests.
    let warm = clients
        .iter()
        .map(|client| client.semaphore("warm", CLIENTS as u32).acquire());
    let warm: Vec<_> = warm.collect();
    assert!(eventually(SOON, || notified_clients(&server) == clients.len()));
    drop(warm);
    for (kind, turn) in kinds {
        assert!(
            eventually(SOON, || is_empty(&server)),
            "{:?}",
            held_keys(&server)
        );
        let before = lock_requests(&server);
        let tasks: Vec<_> = clients
            .iter()
            .map(|client| {
                let client = client.clone();
                Task::start(move || (0..TURNS).for_each(|number| turn(&client, number)))
            })
            .collect();
        for task in tasks {
            task.within(6 * SOON, "its turns");
        }
        // On a busy machine, a waiter that has waited for long asks once more.
        let (requests, grants) = (lock_requests(&server) - before, CLIENTS * TURNS);
        let most = grants as u64 * 11 / 5;
        assert!(requests <= most, "{kind}: {requests} for {grants} grants");
    }
    assert!(
        eventually(SOON, || is_empty(&server)),
        "{:?}",
        held_keys(&server)
    );
}

/// When a writer stops waiting, its request lets in the readers behind it: they send no request.
#[test]
fn a_writer_that_leaves_pushes_readers_in() {
    let server = server();
    let clients = [(); 3].map(|()| steady(&server.url()).ttl(LONG_TTL).build().unwrap());
    let [holds, leaves, waits] = clients.each_ref().map(|client| client.rw_lock("k"));
    // All connections for notifications are open before the test counts requests.
    let warm = clients
        .each_ref()
        .map(|client| client.semaphore("warm", 3).acquire());
    assert!(eventually(SOON, || notified_clients(&server) == clients.len()));
    drop(warm);
    let _held = holds.read().unwrap();
    let is_pushed = || {
        let (stop, stopped) = bounded(0);
        let writes = leaves.clone().cancelled_by(stopped);
        let writer = Task::start(move || writes.write().map(drop).unwrap_err());
        wait_for_queue(&server, "k", 1);
        let reads = waits.clone();
        let reader = Task::start(move || reads.read().unwrap());
        wait_for_queue(&server, "k", 2);
        let before = script_calls(&server);
        drop(stop);
        writer.within(SOON, "the end of its wait");
        let reader = reader.within(SOON, "the grant behind the writer");
        let requests = script_calls(&server) - before;
        reader.unlock().unwrap();
        requests == 1
    };
    // A waiter that has waited for a second asks once more.
    assert!((0..TRIES).any(|_| is_pushed()), "requests in {TRIES} tries");
}

/// The ttl of the client that is killed.
const TTL: Duration = Duration::from_secs(1);
/// The maximum delay of the grant to the next client.
const LATENESS: Duration = Duration::from_millis(100);
/// The number of tries, of which one has to be in time: another process may use the processor.
const TRIES: usize = 5;

/// Holds a permit, in a child process.
pub fn hold_a_permit(parent: &Parent) {
    let client = steady(&parent.url).ttl(TTL).build().unwrap();
    let permit = client.semaphore("k", 2).acquire().unwrap();
    parent.tell(permit.id());
    parent.wait_for_end();
}

#[test]
fn a_killed_holders_permit_is_granted_at_its_end() {
    let server = server();
    let (lives, waits) = (steady(&server.url()), steady(&server.url()));
    let [lives, waits] = [lives, waits].map(|client| client.ttl(LONG_TTL).build().unwrap());
    let held = lives.semaphore("k", 2).acquire().unwrap();
    let semaphore = waits.semaphore("k", 2);
    // Both clients are connected for notifications before the test counts requests.
    let warm = semaphore.acquire().unwrap();
    assert!(eventually(SOON, || notified_clients(&server) == 2));
    warm.unlock().unwrap();
    let is_in_time = || {
        let mut killed = Child::start(hold_a_permit, &server.url());
        let id: String = killed.receive(6 * SOON);
        killed.kill();
        let found = lives.semaphore("k", 2).inspect().unwrap();
        let mut holders = found.holders().iter();
        let ends_in = holders
            .find(|holder| holder.id() == id)
            .unwrap()
            .expires_in()
            .unwrap();
        let end = Instant::now() + ends_in;
        let before = script_calls(&server);
        let permit = semaphore.acquire().unwrap();
        let late = end.elapsed();
        // The waiter joins the queue, asks once the permit has ended, and asks once more if it was a millisecond early.
        let requests = script_calls(&server) - before;
        assert!(requests <= 3, "{requests} requests");
        permit.unlock().unwrap();
        late <= LATENESS
    };
    assert!((0..TRIES).any(|_| is_in_time()), "late {TRIES} times");
    held.unlock().unwrap();
}
