//! Mistakes in how a lock is offered to its callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::ErrorKind;

use crate::conformance::counterexamples::raw::Raw;
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, server, within};

#[test]
fn a_closure_that_ignores_a_failed_acquire_runs_beside_the_holder() {
    let server = server();
    let inside = Arc::new(AtomicUsize::new(0));
    let enter = || inside.fetch_add(1, Ordering::SeqCst) + 1;
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    enter();

    let mut broken = Raw::open(&server, "k", "broken");
    let with_lock = |broken: &mut Raw| {
        // `acquire()` returns false, and `__enter__` of this design ignores that.
        let _ = broken.take(LONG_TTL);
        enter()
    };
    assert_eq!(with_lock(&mut broken), 2, "two callers are inside");

    inside.store(1, Ordering::SeqCst);
    let (never, cancelled) = leasehold::crossbeam_channel::bounded(0);
    drop(never);
    let mutex = client.mutex("k").cancelled_by(cancelled);
    let refused = mutex.with(|_| enter()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Cancelled);
    assert_eq!(inside.load(Ordering::SeqCst), 1);
    guard.unlock().unwrap();
}

#[test]
fn a_client_id_shared_by_threads_breaks_exclusion() {
    let server = server();
    // Reentrancy by process: all threads share one id.
    let enter = |broken: &mut Raw| {
        let holder: Option<String> = broken.ask("GET", &[]);
        holder.as_ref() == Some(&broken.token) || broken.take(LONG_TTL)
    };
    let threads = [(); 2].map(|()| {
        let mut broken = Raw::open(&server, "k", "the process");
        within(SOON, "a thread's try", move || (enter(&mut broken), broken))
    });
    let [(one, mut broken), (two, _)] = threads;
    assert!(one && two, "both threads are inside");
    broken.ask::<()>("DEL", &[]);

    let client = steady(&server.url()).build().unwrap();
    let threads = [(); 2].map(|()| {
        let mutex = client.mutex("k");
        within(SOON, "a thread's attempt", move || {
            mutex.try_lock().unwrap()
        })
    });
    assert!(threads[0].is_some() && threads[1].is_none());
    drop(threads);
    let entered = client.reentrant_mutex("k").lock().unwrap();
    let mutex = client.reentrant_mutex("k");
    let other = std::thread::spawn(move || mutex.try_lock().unwrap().is_some());
    assert!(!other.join().unwrap(), "nor by what its own thread may do");
    entered.unlock().unwrap();
}
