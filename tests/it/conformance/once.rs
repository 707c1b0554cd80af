//! Work that runs once for its name.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::{Client, Error, ErrorKind, Run};

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task};

type Failure = Box<dyn std::error::Error>;

fn succeed(client: &Client, name: &str) -> Run<String> {
    let holder = client.holder_id().to_string();
    client.once(name).run(|_| Ok::<_, Error>(holder)).unwrap()
}

pub fn work_runs_once_for_its_name(backend: &dyn Backend) {
    let clients = [(); 3].map(|()| backend.client());
    let runs = Arc::new(AtomicUsize::new(0));
    for name in ["a", "b"] {
        let tasks = clients.each_ref().map(|client| {
            let (client, runs) = (client.clone(), Arc::clone(&runs));
            Task::start(move || {
                let run = client.once(name).run(|guard| {
                    guard.check()?;
                    assert!(client.held_locks().iter().any(|held| held.key() == name));
                    Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst) as u64)
                });
                matches!(run.unwrap(), Run::Ran(_))
            })
        });
        let ran = tasks.map(|task| task.within(6 * SOON, "the run"));
        assert_eq!(ran.iter().filter(|ran| **ran).count(), 1, "{name}");
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    let once = clients[0].once("a");
    let record = once.get().unwrap().unwrap();
    assert!(record.is_done() && record.ended_at().unwrap() >= record.started_at());
    assert_eq!(record.result(), b"0");
    assert_eq!(succeed(&clients[1], "a"), Run::Done(record));
    assert!(once.forget().unwrap());
    assert_eq!(once.get().unwrap(), None);
    assert!(matches!(succeed(&clients[1], "a"), Run::Ran(_)));
    for client in &clients {
        assert!(!client.mutex("a").is_locked().unwrap());
    }
}

pub fn waiters_get_the_record_or_run_the_work(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    for (name, fails, at_most_once) in [
        ("works", false, false),
        ("works at most once", false, true),
        ("fails", true, false),
        ("fails at most once", true, true),
    ] {
        let (once, waiting) = (one.once(name), two.clone());
        let once = if at_most_once {
            once.at_most_once()
        } else {
            once
        };
        let task = Cell::new(None);
        let first = once.run(|_| {
            assert!(
                two.once(name)
                    .try_run(|_| Ok::<_, Error>(()))
                    .unwrap()
                    .is_none()
            );
            assert!(!two.once(name).forget().unwrap());
            task.set(Some(Task::start_blocked(move || succeed(&waiting, name))));
            match fails {
                true => Err(Failure::from("no luck")),
                false => Ok("first"),
            }
        });
        let second = task.take().unwrap().within(6 * SOON, "the waiter's turn");
        match fails {
            true => {
                first.unwrap_err();
                assert_eq!(second, Run::Ran(two.holder_id().to_string()));
            }
            false => {
                assert_eq!(first.unwrap(), Run::Ran("first"));
                assert!(matches!(second, Run::Done(record) if record.result() == b"first"));
            }
        }
    }
}

pub fn work_of_a_crashed_process_runs_again_or_is_interrupted(backend: &dyn Backend) {
    let (crashed, next) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let begin = |name| crashed.mutex(name).fixed_ttl(ttl).once();
    let report = begin("report").run(|_| {
        let payment = begin("payment").at_most_once().run(|guard| {
            // As if the process had ended: it does not renew its locks.
            backend.pass(ttl + ttl / 10);
            assert!(guard.is_lost());
            let run = succeed(&next, "payment");
            assert!(matches!(run, Run::Interrupted(record) if !record.is_done()));
            assert!(matches!(succeed(&next, "report"), Run::Ran(_)));
            Ok::<_, Error>("late")
        });
        assert!(payment.unwrap_err().is_lease_lost());
        Ok::<_, Error>("late")
    });
    assert!(report.unwrap_err().is_lease_lost());
    let record = next.once("report").get().unwrap().unwrap();
    assert_eq!(record.holder(), next.holder_id());
    assert!(next.once("payment").forget().unwrap());
    assert!(matches!(succeed(&next, "payment"), Run::Ran(_)));
}

pub fn a_long_run_is_not_taken_over(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let client = backend.builder().ttl(ttl).build().unwrap();
    let other = backend.client();
    let run = client.once("k").run(|guard| {
        for _ in 0..3 {
            backend.pass(ttl * 2 / 3);
            let refused = other.once("k").try_run(|_| Ok::<_, Error>(()));
            assert!(refused?.is_none());
        }
        guard.check()?;
        Ok::<_, Error>("long")
    });
    assert_eq!(run.unwrap(), Run::Ran("long"));
}

/// The client of the first run has not learned of its loss yet when it writes.
pub fn a_late_record_is_refused(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let late = one.mutex("k").with(|guard| guard.fencing_token()).unwrap();
    assert!(matches!(succeed(&two, "k"), Run::Ran(_)));
    let refused = one.fenced_value("k").write(late, "late").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StaleToken);
    assert!(matches!(succeed(&one, "k"), Run::Done(_)));
    // The record of a start comes after that of the end.
    let run = one.once("ended").at_most_once();
    let Run::Ran(token) = run
        .run(|guard| Ok::<_, Error>(guard.fencing_token()))
        .unwrap()
    else {
        panic!("it ran before");
    };
    let refused = one.fenced_value("ended").write(token, "started");
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::StaleToken);
    assert!(matches!(succeed(&two, "ended"), Run::Done(_)));
    // The first record of the name comes after `forget`.
    let late = one.mutex("forgotten").with(|guard| guard.fencing_token());
    assert!(two.once("forgotten").forget().unwrap());
    let refused = one.fenced_value("forgotten").write(late.unwrap(), "late");
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::StaleToken);
    assert_eq!(two.once("forgotten").get().unwrap(), None);
}
