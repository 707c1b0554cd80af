//! A watched key changes while the lock is still held: the closure runs again, on the new data.

use leasehold::ErrorKind;
use leasehold::redis::Commands;

use super::{DATA, assert_writes, client, data, set, watch, write};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, in_redis, secs, server, wait_for_queue,
};

#[test]
fn a_renewal_meanwhile_only_reruns_the_closure() {
    let (server, recorder) = (server(), Recorder::new());
    let builder = steady(&server.url()).ttl(secs(10)).renew_ratio(0.05);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |run| {
        if run == 1 {
            recorder.wait_for_more(1, What::Renewed, "k");
        }
    });
    result.unwrap();
    assert!(runs > 1);
    assert_eq!(data(&server), Some(format!("written in run {runs}")));
    guard.unlock().unwrap();
}

#[test]
fn a_closure_may_extend_its_lock() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |run| {
        if run == 1 {
            guard.extend(2 * LONG_TTL).unwrap();
        }
    });
    result.unwrap();
    assert_eq!(runs, 2);
}

#[test]
fn a_joining_waiter_only_reruns_the_closure() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    let guard = one.mutex("k").lock().unwrap();
    let mut waiting = None;
    let (runs, result) = write(&guard, |run| {
        if run == 1 {
            let mutex = two.mutex("k");
            waiting = Some(Task::start(move || mutex.lock().unwrap()));
            wait_for_queue(&server, "k", 1);
        }
    });
    result.unwrap();
    assert_eq!(runs, 2);
    guard.unlock().unwrap();
    let next = waiting.unwrap().within(SOON, "waiting for the lock");
    assert_writes(&server, &next);
}

#[test]
fn a_foreign_write_reruns_the_closure() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    set(&server, "a");
    let mut seen = Vec::new();
    let read = guard.transaction(|conn, pipe| {
        watch(conn, DATA)?;
        let value: String = conn.get(DATA)?;
        seen.push(value.clone());
        pipe.append(DATA, "!");
        if seen.len() <= 2 {
            ask(&server, &["APPEND", DATA, "b"]);
        }
        Ok(value)
    });
    assert_eq!(read.unwrap().value, "abb");
    assert_eq!(seen, ["a", "ab", "abb"]);
    // The writes of earlier runs are discarded.
    assert_eq!(data(&server).as_deref(), Some("abb!"));
}

#[test]
fn an_unwatched_key_may_change() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |_| set(&server, "another user's"));
    result.unwrap();
    assert_eq!(runs, 1);
    assert_eq!(data(&server).as_deref(), Some("written in run 1"));
}

#[test]
fn a_read_only_transaction_is_consistent() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["MSET", "a", "1", "b", "1"]);
    let mut runs = 0;
    let read = guard.transaction(|conn, _| {
        runs += 1;
        redis::cmd("WATCH").arg(&["a", "b"]).exec(conn)?;
        let a: u32 = conn.get("a")?;
        if runs == 1 {
            ask(&server, &["MSET", "a", "2", "b", "2"]);
        }
        Ok((a, conn.get::<_, u32>("b")?))
    });
    assert_eq!(read.unwrap().value, (2, 2));
}

#[test]
fn endless_foreign_writes_end_in_a_conflict() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let mut runs = 0;
    let result = guard.transaction(|conn, pipe| {
        runs += 1;
        watch(conn, DATA)?;
        pipe.set("written", runs);
        set(&server, &format!("foreign {runs}"));
        Ok(())
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert!(
        error.to_string().contains(&format!("{runs} times")),
        "{error}"
    );
    assert_eq!(ask(&server, &["EXISTS", "written"]).as_int(), Some(0));
    guard.check().unwrap();
    assert_writes(&server, &guard);
    guard.unlock().unwrap();
}

#[test]
fn a_lock_deleted_during_a_conflict_is_lost() {
    let server = super::silent_server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    for deleted_in_run in [2, 100] {
        let guard = client.mutex(format!("k{deleted_in_run}")).lock().unwrap();
        let mut runs = 0;
        let result = guard.transaction(|conn, pipe| {
            runs += 1;
            watch(conn, DATA)?;
            pipe.set("written", runs);
            set(&server, &format!("foreign {runs}"));
            if runs == deleted_in_run {
                ask(&server, &["DEL", &in_redis(guard.key())]);
            }
            Ok(())
        });
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LeaseLost, "{error}");
        assert_eq!(runs, deleted_in_run);
    }
    assert_eq!(ask(&server, &["EXISTS", "written"]).as_int(), Some(0));
    guard.unlock().unwrap();
}
