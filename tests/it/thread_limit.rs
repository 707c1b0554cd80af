//! Processes that may start no further thread: calls succeed or fail with `Unavailable`, and nothing panics.
#![cfg(unix)]

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use leasehold::{Client, Error};
use leasehold_testbed::eventually;
use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};

use crate::child::{Child, Parent};
use crate::cluster::pool::PooledCluster;
use crate::quorum::nodes::{self, Nodes};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, builder, secs, server};

/// The user `nobody` of most systems. Root has no limit of threads.
const NOBODY: u32 = 65_534;

/// Runs `body` as a user with limits, or skips the test if that user cannot run this program.
fn run_with_limits<F: Fn(&Parent)>(body: F, url: &str) {
    let program = || {
        let mut program = Command::new(std::env::current_exe().unwrap());
        if getuid().is_root() {
            program.uid(NOBODY).gid(NOBODY);
        }
        program.current_dir("/");
        program
    };
    let runs = program().args(["--list", "--exact", "none"]).output();
    if !runs.is_ok_and(|output| output.status.success()) {
        println!("skipped: the user {NOBODY} cannot run this program");
        return;
    }
    Child::start_by(program(), body, url).finish(12 * SOON);
}

#[test]
fn a_client_without_threads_works_or_is_unavailable() {
    let server = server();
    run_with_limits(lock_without_threads, &server.url());
}

#[test]
fn clients_of_many_servers_without_threads_are_unavailable() {
    let cluster = PooledCluster::take();
    let nodes = Nodes::start(3);
    let urls = format!("{} {}", cluster.get().url(), nodes.urls().join(" "));
    run_with_limits(lock_on_many_servers_without_threads, &urls);
}

/// Lets this process start no further thread, or as many as before. Returns whether the system obeys.
fn limit_threads(is_limited: bool) -> bool {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nproc);
    let current = if is_limited { Some(1) } else { maximum };
    setrlimit(Resource::Nproc, Rlimit { current, maximum }).unwrap();
    let starts = std::thread::Builder::new().spawn(|| ()).is_ok();
    starts != is_limited
}

/// Ends this process at the first panic, as `panic = "abort"` does, even if the panic is caught.
fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panicked| {
        leasehold_testbed::child::fail(&panicked.to_string());
        std::process::abort();
    }));
}

/// Waits until `call` succeeds. Its errors are `Unavailable` or `Timeout`.
#[track_caller]
fn succeeds<T>(what: &str, mut call: impl FnMut() -> Result<T, Error>) {
    let has_succeeded = || match call() {
        Ok(_) => true,
        Err(error) if error.is_unavailable() => false,
        Err(error) => panic!("{what}: {error}"),
    };
    assert!(eventually(SOON, has_succeeded), "{what}");
}

#[track_caller]
fn is_unavailable<T>(what: &str, outcome: Result<T, Error>) {
    let error = outcome.err().unwrap_or_else(|| panic!("{what} succeeds"));
    assert!(error.is_unavailable(), "{what}: {error}");
}

pub fn lock_without_threads(parent: &Parent) {
    abort_on_panic();
    let url = parent.url.as_str();
    if !limit_threads(true) {
        println!("skipped: the system does not limit threads");
        return;
    }
    is_unavailable("open", Client::open(url));
    is_unavailable("build_lazy", Client::builder(url).build_lazy());
    assert!(limit_threads(false));
    let builder = || steady(url).ttl(LONG_TTL).renew_ratio(0.05);
    let [client, other] = [(); 2].map(|()| builder().build().unwrap());
    let renewed = client.mutex("renewed").ttl(secs(20)).lock().unwrap();
    let held = client.mutex("held").lock().unwrap();
    assert!(limit_threads(true));
    let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
    let mut kill = || {
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL")
            .arg("TYPE")
            .arg("normal")
            .exec(&mut redis)
            .unwrap();
    };
    for _ in 0..3 {
        kill();
        succeeds("try_lock", || client.mutex("a").try_lock());
        kill();
        succeeds("lock", || client.mutex("b").lock());
        kill();
        succeeds("try_lock_for", || client.mutex("c").try_lock_for(secs(1)));
        kill();
        succeeds("reentrant", || client.reentrant_mutex("d").lock());
        kill();
        succeeds("transaction", || held.transaction(|_, _| Ok(())));
        kill();
        succeeds("ping", || client.ping());
        kill();
        succeeds("check_environment", || client.check_environment());
        kill();
        let mut seen = renewed.remaining();
        let has_risen = || {
            let before = std::mem::replace(&mut seen, renewed.remaining());
            seen > before
        };
        assert!(eventually(SOON, has_risen), "no renewal");
    }
    // The other client's lock expires while this caller waits.
    let expiring = other.mutex("waited for").fixed_ttl(secs(1)).lock().unwrap();
    succeeds("lock", || client.mutex("waited for").lock());
    drop(expiring);
    renewed.on_lost(drop);
    is_unavailable("renew_while", client.mutex("e").renew_while(|| true).lock());
    kill();
    drop(renewed);
    let is_free = || {
        other
            .mutex("renewed")
            .try_lock()
            .is_ok_and(|guard| guard.is_some())
    };
    assert!(eventually(SOON, is_free), "the release of a dropped guard");
    held.unlock().unwrap();
    assert!(limit_threads(false));
    succeeds("renew_while", || {
        client.mutex("e").renew_while(|| true).lock()
    });
}

pub fn lock_on_many_servers_without_threads(parent: &Parent) {
    abort_on_panic();
    let (cluster, nodes) = parent.url.split_once(' ').unwrap();
    let nodes = nodes.split(' ').map(str::to_owned).collect();
    let clients = [
        // A key whose master cannot be opened takes a whole time-out.
        builder(cluster).build().unwrap(),
        nodes::builder(nodes).build().unwrap(),
    ];
    if !limit_threads(true) {
        println!("skipped: the system does not limit threads");
        return;
    }
    for client in &clients {
        for n in 0..6 {
            let guard = client.mutex(format!("k{n}")).try_lock();
            assert!(guard.is_ok() || guard.is_err_and(|error| error.is_unavailable()));
        }
        let pinged = client.ping();
        assert!(pinged.is_ok() || pinged.is_err_and(|error| error.is_unavailable()));
    }
    is_unavailable("open", Client::open(cluster));
    assert!(limit_threads(false));
    for client in &clients {
        succeeds("lock", || client.mutex("k").lock());
    }
}
