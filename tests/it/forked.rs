//! A process with a client forks. In the child, every method of the client fails, and the parent notices nothing. The
//! test process itself never forks: it starts the process that forks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fork::{Fork, waitpid_nohang};
use leasehold::{
    Client, Error, ErrorKind, LeaderState, LossReason, LostSignal, MemoryStore, MutexGuard,
    Observer, ReentrantGuard,
};
use leasehold_testbed::{Reply, eventually};
use rustix::process::{Pid, Signal, kill_process};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{LONG_TTL, Recorder, SOON, Task, What, ask, is_held, secs, server};

/// The exit code of a successful fork. A crash may give any other code.
const WELL: i32 = 42;

/// The locks that the parent holds.
const HELD: [&str; 5] = ["held", "dropped", "transferred", "again", "renewed"];

/// Runs `work` in a fork of this process, which then ends; fails unless the fork succeeds soon.
#[track_caller]
fn in_a_fork(work: impl FnOnce()) {
    match fork::fork().unwrap() {
        Fork::Parent(pid) => assert_ends_well(pid),
        Fork::Child => end_with(work),
    }
}

/// Ends the fork. Without it, the end of the fork's one thread would look like success.
fn end_with(work: impl FnOnce()) -> ! {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(()) => exit(WELL),
        Err(_) => exit(1),
    }
}

#[track_caller]
fn assert_ends_well(pid: i32) {
    let mut status = None;
    let ended = eventually(2 * SOON, || {
        status = waitpid_nohang(pid).unwrap();
        status.is_some()
    });
    if !ended {
        let pid = Pid::from_raw(pid).expect("it is a process");
        let _ = kill_process(pid, Signal::KILL);
        panic!("the fork hangs");
    }
    // The exit code is in the second byte, see wait(2).
    assert_eq!(status, Some(WELL << 8), "the fork failed");
}

#[track_caller]
fn assert_forked<T>(result: Result<T, Error>) -> Error {
    let error = result.err().expect("it is not this process's");
    assert_eq!(error.kind(), ErrorKind::Forked, "{error}");
    let text = error.to_string();
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    error
}

#[track_caller]
fn assert_forked_of<T>(key: &str, result: Result<T, Error>) {
    assert_eq!(assert_forked(result).key(), Some(key));
}

/// Calls every method of a client, its mutexes and its values.
fn try_client(client: &Client) {
    let mutex = client.mutex("another");
    assert_forked_of("another", mutex.lock());
    assert_forked_of("another", mutex.try_lock());
    assert_forked_of("another", mutex.try_lock_for(secs(1)));
    assert_forked_of("another", mutex.try_lock_until(Instant::now() + secs(1)));
    assert_forked_of("another", mutex.with(|_| ()));
    assert_forked_of("another", mutex.try_with(|_| ()));
    assert_forked_of("another", mutex.inspect());
    assert_forked_of("another", mutex.is_locked());
    assert_forked_of("another", mutex.force_unlock());
    assert_forked_of("another", client.with_lock("another", || ()));
    let again = client.reentrant_mutex("another");
    assert_forked_of("another", again.lock());
    assert_forked_of("another", again.try_lock());
    assert_forked_of("another", again.with(|_| ()));
    let value = client.fenced_value("another");
    assert_forked_of("another", value.write(u64::MAX, "a child's"));
    assert_forked_of("another", value.read());
    assert_forked(client.adopt("any text: the ticket is not read"));
    let election = client.election("another");
    assert_forked(election.campaign("a child's"));
    assert_forked(election.adopt("any text: the ticket is not read", "a child's"));
    assert_forked(election.leader());
    assert_forked(election.observe());
    assert!(client.held_locks().is_empty());
    // A new lock fails, too.
    assert_forked(Client::builder("redis://localhost").build_lazy());
    assert_forked(Client::open("redis://localhost:1"));
    assert_forked(client.shutdown(secs(1)));
    let _ = format!("{client:?} {mutex:?} {}", client.holder_id());
}

/// Calls every method of guards; one ends with an unlock, the other with a ticket.
fn try_guards(held: MutexGuard, handed_over: MutexGuard) {
    assert!(held.is_lost());
    assert_eq!(held.remaining(), Duration::ZERO);
    assert_forked_of("held", held.check());
    assert_forked_of("held", held.extend(secs(70)));
    assert_forked_of("held", held.transaction(|_, _| Ok(())));
    assert_eq!(held.lost_signal().try_recv(), Ok(LossReason::Forked));
    held.on_lost(|_| panic!("nobody is there to run it"));
    assert!(held.fencing_token() > 0 && held.key() == "held");
    assert_forked_of("held", held.unlock());
    assert_forked_of("transferred", handed_over.into_ticket());
}

/// Locking again needs no request, and must fail in the child all the same.
fn try_again(client: &Client, held: ReentrantGuard) {
    let mutex = client.reentrant_mutex("again");
    assert_forked_of("again", mutex.lock());
    assert_forked_of("again", mutex.try_lock());
    assert_forked_of("again", held.check());
    assert_forked_of("again", held.unlock());
}

/// The ids of the server's connections, without that of this request.
fn connections(server: &str) -> Vec<String> {
    let mut connection = redis::Client::open(server)
        .unwrap()
        .get_connection()
        .unwrap();
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(&mut connection)
        .unwrap();
    let others = list.lines().filter(|line| !line.contains("cmd=client"));
    let id = |line: &str| line.split(' ').next().map(str::to_owned);
    others.filter_map(id).collect()
}

struct Family {
    client: Client,
    recorder: Arc<Recorder>,
    held: MutexGuard,
    dropped: MutexGuard,
    handed_over: MutexGuard,
    again: ReentrantGuard,
    renewed: MutexGuard,
    lost: LostSignal,
    states: Observer,
}

/// A client with held and renewed locks and all its connections.
fn family(url: &str) -> Family {
    let recorder = Recorder::new();
    let client = steady(url)
        .ttl(LONG_TTL)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let lock = |key| client.mutex(key).lock().unwrap();
    let [held, dropped, handed_over] = ["held", "dropped", "transferred"].map(lock);
    let again = client.reentrant_mutex("again");
    let renewed = client.mutex("renewed").ttl(secs(3));
    let family = Family {
        renewed: renewed.lock().unwrap(),
        again: again.lock().unwrap(),
        lost: held.lost_signal(),
        states: client.election("election").observe().unwrap(),
        client,
        recorder,
        held,
        dropped,
        handed_over,
    };
    // By then the notification connection is open, and the keys are tracked.
    family.recorder.wait_for(1, What::Renewed, "renewed");
    family
}

pub fn a_parent(parent: &Parent) {
    let Family {
        client,
        recorder,
        held,
        dropped,
        handed_over,
        again,
        renewed,
        lost,
        mut states,
    } = family(&parent.url);
    assert_eq!(states.next(), Some(LeaderState::Vacant));
    let before = connections(&parent.url);
    let mut seen = None;
    let value = client.with_lock("with", || {
        if let Fork::Parent(pid) = fork::fork().unwrap() {
            seen = Some(pid);
        }
        1
    });
    let Some(pid) = seen else {
        // In the child, calls that began before the fork end, too.
        end_with(move || {
            assert_forked(value);
            assert!(lost.try_recv().is_err());
            drop(lost);
            try_client(&client);
            try_guards(held, handed_over);
            try_again(&client, again);
            assert_eq!(states.next(), None);
            drop((dropped, renewed, states, client));
        });
    };
    assert_eq!(value.unwrap(), 1);
    assert_ends_well(pid);
    // The parent still renews on its connections, although the child has copies of them.
    recorder.wait_for_more(2, What::Renewed, "renewed");
    // A pipeline may have connected since then, but no connection was replaced.
    let after = connections(&parent.url);
    assert!(
        before.iter().all(|id| after.contains(id)),
        "{before:?}, {after:?}"
    );
    for guard in [&held, &dropped, &handed_over, &again, &renewed] {
        guard.check().unwrap();
    }
    assert!(lost.try_recv().is_err());
    for key in HELD.into_iter().chain(["with"]) {
        assert_eq!(recorder.count(What::Lost, key), 0);
        assert_eq!(recorder.count(What::RenewalFailed, key), 0);
    }
    parent.tell("unharmed");
    // The test deletes one of the keys: without notifications the client would see that in twenty seconds.
    assert_eq!(lost.recv_timeout(SOON), Ok(LossReason::Deleted));
    let term = client.election("election").campaign("a parent's").unwrap();
    assert!(matches!(states.next(), Some(LeaderState::Leader(_))));
    drop(term);
    renewed.unlock().unwrap();
    again.unlock().unwrap();
    drop((dropped, handed_over));
    client.shutdown(SOON).unwrap();
}

#[test]
fn a_child_cannot_change_its_parents_locks() {
    let server = server();
    let parent = Child::start(a_parent, &server.url());
    assert_eq!(parent.receive::<String>(4 * SOON), "unharmed");
    for key in HELD {
        assert!(is_held(&server, key), "{key} was released");
    }
    ask(&server, &["DEL", "leasehold:held"]);
    parent.finish(2 * SOON);
    for key in HELD.into_iter().chain(["with"]) {
        assert!(!is_held(&server, key), "{key} was not released");
    }
}

pub fn a_busy_parent(parent: &Parent) {
    let client = steady(&parent.url).ttl(LONG_TTL).build().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..4)
        .map(|n| {
            let (client, over) = (client.clone(), Arc::clone(&over));
            Task::start(move || {
                while !over.load(Ordering::Relaxed) {
                    client.with_lock(["one", "two"][n % 2], || ()).unwrap();
                }
            })
        })
        .collect();
    for _ in 0..50 {
        let [guard, other] = ["held", "transferred"].map(|key| client.mutex(key).lock().unwrap());
        let signal = guard.lost_signal();
        // The fork has a copy of all of this; the originals live on here.
        let mut copies = Some((client.clone(), signal, guard, other));
        in_a_fork(|| {
            let (client, signal, guard, other) = copies.take().expect("they were just inserted");
            drop(signal);
            try_client(&client);
            try_guards(guard, other);
        });
        let (.., guard, other) = copies.expect("they were taken in the fork only");
        guard.unlock().unwrap();
        drop(other);
    }
    over.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.within(SOON, "the last round");
    }
}

#[test]
fn a_fork_during_work_never_hangs_the_child() {
    let server = server();
    Child::start(a_busy_parent, &server.url()).finish(12 * SOON);
}

pub fn a_parent_in_a_transaction(parent: &Parent) {
    let client = steady(&parent.url)
        .ttl(LONG_TTL)
        .max_transactions(1)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let mut in_child = false;
    let result = guard.transaction(|_, pipe| {
        pipe.incr("data", 1);
        // The parent's call returns when the child has finished.
        match fork::fork().unwrap() {
            Fork::Parent(pid) => assert_ends_well(pid),
            Fork::Child => in_child = true,
        }
        Ok(())
    });
    if in_child {
        end_with(|| {
            assert_forked(result);
            assert_forked(guard.transaction(|_, _| Ok(())));
            drop((guard, client));
        });
    }
    result.unwrap();
    // The parent's connection still works, and the one permit is still available.
    let again = guard.transaction(|_, pipe| {
        pipe.incr("data", 10);
        Ok(())
    });
    again.unwrap();
    guard.unlock().unwrap();
}

#[test]
fn a_transaction_that_forks_runs_once() {
    let server = server();
    Child::start(a_parent_in_a_transaction, &server.url()).finish(4 * SOON);
    assert_eq!(ask(&server, &["GET", "data"]).as_text(), Some("11"));
    assert!(!is_held(&server, "k"));
}

pub fn a_parent_with_a_memory(_: &Parent) {
    let memory = MemoryStore::new();
    let named = Client::open("memory://forked").unwrap();
    let guard = memory.client().unwrap().mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    in_a_fork(|| {
        memory.advance(secs(31));
        memory.flush();
        assert!(lost.try_recv().is_err(), "it is the parent's");
        assert_forked(memory.client());
        assert_forked(memory.builder().build_lazy());
        assert_forked(Client::open("memory://forked"));
        assert_forked(MemoryStore::new().client());
    });
    guard.check().unwrap();
    memory.flush();
    assert_eq!(lost.try_recv(), Ok(LossReason::Deleted));
    named.with_lock("k", || ()).unwrap();
    drop((guard, named));
    in_a_fork(|| {
        let own = MemoryStore::new();
        let guard = own.client().unwrap().mutex("k").lock().unwrap();
        own.advance(secs(31));
        assert!(guard.is_lost());
    });
    // One of the client's threads outlives the last client.
    let guard = memory.client().unwrap().mutex("k").lock().unwrap();
    let (_end, ended) = mpsc::channel::<()>();
    guard.on_lost(move |_| {
        let _ = ended.recv();
    });
    memory.flush();
    drop(guard);
    in_a_fork(|| drop(assert_forked(MemoryStore::new().client())));
}

#[test]
fn a_memory_store_stays_with_its_process() {
    Child::start(a_parent_with_a_memory, "memory://").finish(4 * SOON);
}

pub fn two_sides(parent: &Parent) {
    // Forks before it makes a client, as servers do with their workers.
    let forked = fork::fork().unwrap();
    let use_own_client = |key| {
        let recorder = Recorder::new();
        let client = steady(&parent.url)
            .ttl(secs(20))
            .renew_ratio(0.05)
            .event_handler(Arc::clone(&recorder))
            .build()
            .unwrap();
        let own = client.mutex(key).lock().unwrap();
        for _ in 0..20 {
            client.with_lock("both's", || ()).unwrap();
        }
        recorder.wait_for(1, What::Renewed, key);
        own.unlock().unwrap();
        client.shutdown(SOON).unwrap();
    };
    match forked {
        Fork::Child => end_with(|| use_own_client("child's")),
        Fork::Parent(pid) => {
            use_own_client("parent's");
            assert_ends_well(pid);
        }
    }
}

#[test]
fn parent_and_child_can_make_new_clients() {
    let server = server();
    Child::start(two_sides, &server.url()).finish(4 * SOON);
    let keys = ["EXISTS", "leasehold:child's", "leasehold:parent's"];
    assert_eq!(ask(&server, &keys), Reply::Int(0));
}
