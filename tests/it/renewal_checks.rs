//! `renew_while`: locks that are renewed only while the holder's check agrees, and the effects of a check
//! that panics or hangs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex as Shared};
use std::thread;

use leasehold::{Client, ErrorKind, LossReason};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, builder, is_held, lost_within, millis, secs, server,
    within,
};

/// A check that hangs from its first call until the test releases it, and a channel that reports the call.
struct Stuck {
    asked: Receiver<()>,
    go_on: Sender<()>,
}

impl Stuck {
    fn new() -> (Self, impl Fn() -> bool + Send + Sync + 'static) {
        let (asking, asked) = channel();
        let (go_on, wait) = channel();
        let (asking, wait) = (Shared::new(asking), Shared::new(wait));
        let check = move || {
            let _ = asking.lock().unwrap().send(());
            // Waits until the test ends the check, or until the test is over.
            let _ = wait.lock().unwrap().recv();
            true
        };
        (Self { asked, go_on }, check)
    }
}

fn checked_client(recorder: &Arc<Recorder>, url: &str) -> Client {
    let client = steady(url).ttl(secs(3)).renew_ratio(0.1);
    client.event_handler(Arc::clone(recorder)).build().unwrap()
}

#[test]
fn a_lock_is_renewed_while_its_check_agrees() {
    let server = server();
    let recorder = Recorder::new();
    let client = checked_client(&recorder, &server.url());
    let (asked, checks) = channel();
    let asked = Shared::new(asked);
    let check = move || {
        let name = thread::current().name().map(str::to_owned);
        let _ = asked.lock().unwrap().send(name);
        true
    };
    let guard = client.mutex("k").ttl(secs(3)).renew_while(check);
    let guard = guard.lock().unwrap();
    let lost = guard.lost_signal().recv_timeout(secs(5));
    assert!(lost.is_err(), "{lost:?}");
    guard.check().unwrap();
    for thread in checks.try_iter() {
        assert_eq!(thread.as_deref(), Some("leasehold-checks"));
    }
    assert!(recorder.count(What::Renewed, "k") >= 2);
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

#[test]
fn a_check_that_refuses_ends_the_lock() {
    let server = server();
    let recorder = Recorder::new();
    let client = checked_client(&recorder, &server.url());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    // The check would agree again if it were called.
    let check = move || count.fetch_add(1, Ordering::SeqCst) != 1;
    let guard = client.mutex("k").renew_while(check).lock().unwrap();
    let other = steady(&server.url()).build().unwrap().mutex("k");
    let next = within(SOON, "what the stuck worker held", move || other.lock());
    assert!(guard.is_lost());
    assert_eq!(
        lost_within(SOON, &guard.lost_signal()),
        LossReason::NotRenewed
    );
    let error = guard.check().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::NotRenewed));
    assert!(error.to_string().contains("renew_while"), "{error}");
    recorder.wait_for(1, What::Lost, "k");
    assert_eq!(asked.load(Ordering::SeqCst), 2, "a refusal is final");
    assert_eq!(recorder.count(What::Renewed, "k"), 1);
    assert_eq!(recorder.count(What::RenewalFailed, "k"), 0);
    drop(guard);
    next.unwrap().unlock().unwrap();
}

#[test]
fn a_panicking_check_refuses_and_others_run() {
    let server = server();
    let client = checked_client(&Recorder::new(), &server.url());
    let panics = client.mutex("panics");
    let panics = panics.renew_while(|| panic!("a test's own panic"));
    let panics = panics.lock().unwrap();
    let goes_on = client
        .mutex("continues")
        .renew_while(|| true)
        .lock()
        .unwrap();
    assert_eq!(
        lost_within(SOON, &panics.lost_signal()),
        LossReason::NotRenewed
    );
    let lost = goes_on.lost_signal().recv_timeout(secs(2));
    assert!(lost.is_err(), "{lost:?}");
    goes_on.unlock().unwrap();
}

#[test]
fn a_hanging_check_ends_only_locks_with_checks() {
    let server = server();
    let recorder = Recorder::new();
    let client = checked_client(&recorder, &server.url());
    let (stuck, check) = Stuck::new();
    let hangs = client.mutex("hangs").renew_while(check).lock().unwrap();
    stuck.asked.recv_timeout(SOON).expect("the check is called");
    let behind = client.mutex("behind").renew_while(|| true).lock().unwrap();
    let plain = client.mutex("plain").lock().unwrap();
    for guard in [&hangs, &behind] {
        let reason = lost_within(SOON, &guard.lost_signal());
        assert_eq!(reason, LossReason::Expired);
    }
    let lost = plain.lost_signal().recv_timeout(secs(2));
    assert!(lost.is_err(), "{lost:?}");
    assert_eq!(recorder.count(What::Renewed, "hangs"), 0);
    drop((hangs, behind));

    drop(stuck.go_on);
    let after = client.mutex("after").renew_while(|| true).lock().unwrap();
    recorder.wait_for(1, What::Renewed, "after");
    after.unlock().unwrap();
    plain.unlock().unwrap();
}

#[test]
fn a_check_may_use_the_client_and_its_guards() {
    let server = server();
    let recorder = Recorder::new();
    let client = checked_client(&recorder, &server.url());
    let mine = client.clone();
    let check = move || {
        let counted = mine.with_lock("other", || ()).is_ok();
        counted && mine.mutex("k").try_lock().unwrap().is_none()
    };
    let guard = client.mutex("k").renew_while(check).lock().unwrap();
    recorder.wait_for(2, What::Renewed, "k");
    guard.unlock().unwrap();
}

#[test]
fn values_owned_by_checks_are_dropped() {
    let server = server();
    let client = checked_client(&Recorder::new(), &server.url());
    let (owned, mine) = (Arc::new(()), client.clone());
    let watched = Arc::downgrade(&owned);
    let mutex = client.mutex("k").renew_while(move || {
        let _ = (&owned, &mine);
        true
    });
    let guard = mutex.lock().unwrap();
    drop(mutex);
    assert!(watched.upgrade().is_some());
    guard.unlock().unwrap();
    // The check may be running at this moment, and then keeps its values until it returns.
    assert!(eventually(SOON, || watched.upgrade().is_none()));
}

#[test]
fn locks_with_a_check_are_never_handed_off() {
    let server = server();
    let client = steady(&server.url())
        .ttl(LONG_TTL)
        .hand_off_time(secs(60))
        .build()
        .unwrap();
    let plain = client.mutex("k");
    let checked = client.mutex("k").renew_while(|| true);
    for (one, other) in [
        (&plain, &checked),
        (&checked, &plain),
        (&checked, &checked),
        (&plain, &plain),
    ] {
        let held = one.lock().unwrap();
        let waiting = other.clone();
        let (about_to, begins) = channel();
        let waiter = Task::start(move || {
            about_to.send(()).unwrap();
            waiting.lock().unwrap().fencing_token()
        });
        begins.recv_timeout(SOON).unwrap();
        // If this thread comes too late for a hand-off, the test shows less, but does not fail.
        thread::sleep(millis(50));
        drop(held);
        let token = waiter.within(SOON, "the grant");
        let handed_over = token % 1024 > 0;
        let both_plain = std::ptr::eq(one, other) && std::ptr::eq(one, &plain);
        assert!(both_plain || !handed_over, "{one:?} to {other:?}");
    }
}

#[test]
fn a_check_and_a_fixed_ttl_contradict_each_other() {
    let nowhere = format!("redis://127.0.0.1:{}", crate::fakes::closed_port());
    let client = builder(&nowhere).build_lazy().unwrap();
    let both = [
        client.mutex("k").renew_while(|| true).fixed_ttl(secs(9)),
        client.mutex("k").fixed_ttl(secs(9)).renew_while(|| true),
    ];
    for mutex in both {
        let error = mutex.lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        let message = error.to_string();
        assert!(message.contains("renew_while") && message.contains("fixed_ttl"));
        assert_eq!(error.key(), Some("k"));
    }
}

#[test]
fn shutdown_waits_for_a_check_within_its_timeout() {
    let server = server();
    let client = checked_client(&Recorder::new(), &server.url());
    let (stuck, check) = Stuck::new();
    let guard = client.mutex("k").renew_while(check).lock().unwrap();
    stuck.asked.recv_timeout(SOON).expect("the check is called");
    let closing = client.clone();
    let ended = within(SOON, "a shutdown", move || closing.shutdown(millis(100)));
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(
        guard.check().unwrap_err().loss_reason(),
        Some(&LossReason::Shutdown)
    );
    drop(stuck.go_on);
    client.shutdown(SOON).unwrap();
}

#[test]
fn one_check_thread_starts_on_demand() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    let child = Child::start(count_threads, &server.url());
    child.finish(secs(60));
}

pub fn count_threads(parent: &Parent) {
    // Linux cuts a thread's name to this length.
    let name = "leasehold-check";
    let threads = || {
        let all = std::fs::read_dir("/proc/self/task").unwrap();
        let names =
            all.filter_map(|one| std::fs::read_to_string(one.unwrap().path().join("comm")).ok());
        names.filter(|found| found.trim_end() == name).count()
    };
    let client = steady(&parent.url).build().unwrap();
    drop(client.mutex("plain").lock().unwrap());
    assert_eq!(threads(), 0);
    for n in 0..20 {
        let checked = client.mutex(format!("{n}")).renew_while(|| true);
        checked.lock().unwrap().unlock().unwrap();
        assert!(eventually(SOON, || threads() == 1), "{}", threads());
    }
    drop(client);
    assert!(eventually(SOON, || threads() == 0));
}
