//! A lock that is lost before the data is written: nothing is written, and the holder learns of the loss in
//! every way.

use leasehold::redis::Commands;
use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::{Reply, Server, eventually};

use super::{DATA, client, data, silent_server, write};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, What, ask, builder, expires_in, in_redis, is_held, lease_of,
    lost_within, millis, secs, server, value_of,
};

/// The reason of the loss if `change` runs between the closure and its writes.
#[track_caller]
fn reason(what: &str, change: impl Fn(&Server)) -> LossReason {
    let (server, recorder) = (silent_server(), Recorder::new());
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    let (runs, result) = write(&guard, |_| change(&server));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost, "{what}: {error}");
    assert_eq!(error.key(), Some("k"), "{what}");
    assert_eq!(runs, 1, "{what}");
    assert_eq!(data(&server), None, "{what}");
    let reason = error.loss_reason().unwrap().clone();
    assert_eq!(lost_within(SOON, &lost), reason, "{what}");
    assert!(guard.is_lost(), "{what}");
    recorder.wait_for(1, What::Lost, "k");
    reason
}

#[test]
fn a_deleted_lock_writes_nothing() {
    let key = in_redis("k");
    let other = format!("lh1 {} 1 host/1/ab", "0123456789abcdef".repeat(2));
    for (command, expected) in [
        (&["DEL", &key][..], None),
        (&["RENAME", &key, "elsewhere"], None),
        (&["FLUSHALL"], None),
        (&["FLUSHDB", "ASYNC"], None),
        (&["SET", &key, "something else"], Some(None)),
        (&["SET", &key, &other], Some(Some("host/1/ab"))),
    ] {
        let what = format!("{command:?}");
        let reason = reason(&what, |server| drop(ask(server, command)));
        match (reason, expected) {
            (LossReason::Deleted, None) => {}
            (LossReason::TakenOver { by }, Some(expected)) => {
                assert_eq!(by.as_ref().map(|by| by.as_str()), expected, "{what}");
            }
            (reason, _) => panic!("{what}: {reason:?}"),
        }
    }
    let no_string = reason("a list in its place", |server| {
        ask(server, &["DEL", &key]);
        ask(server, &["LPUSH", &key, "x"]);
    });
    assert_eq!(no_string, LossReason::TakenOver { by: None });
}

#[test]
fn a_lock_expired_before_exec_is_lost() {
    let key = in_redis("k");
    let reason = reason("expiry", |server| {
        ask(server, &["PEXPIRE", &key, "1"]);
        // No client touches the key: Redis itself finds that it has expired when it executes the writes.
        std::thread::sleep(millis(20));
    });
    assert_eq!(reason, LossReason::Deleted);
}

#[test]
fn the_new_holder_keeps_lock_and_data() {
    let server = silent_server();
    let (one, two) = (client(&server), client(&server));
    let late = one.mutex("k").lock().unwrap();
    let mut next = None;
    let (_, result) = write(&late, |_| {
        ask(&server, &["DEL", &in_redis("k")]);
        let guard = two.mutex("k").lock().unwrap();
        let written = guard.transaction(|_, pipe| {
            pipe.set(DATA, "the next one's");
            Ok(())
        });
        written.unwrap();
        next = Some(guard);
    });
    let by = Some(two.holder_id().clone());
    let reason = LossReason::TakenOver { by };
    assert_eq!(result.unwrap_err().loss_reason(), Some(&reason));
    assert_eq!(data(&server).as_deref(), Some("the next one's"));
    let (next, lease) = (next.unwrap(), lease_of(&server, "k"));
    drop(late);
    next.check().unwrap();
    assert_eq!(lease_of(&server, "k"), lease);
    assert!(expires_in(&server, "k") > Some(LONG_TTL / 2));
}

#[test]
fn nothing_is_written_past_validity() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").fixed_ttl(secs(3)).lock().unwrap();
    ask(&server, &["PERSIST", &in_redis("k")]);
    let (runs, result) = write(&guard, |_| {
        assert!(eventually(SOON, || guard.remaining().is_zero()));
    });
    let error = result.unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired), "{error}");
    assert_eq!((runs, data(&server)), (1, None));
    assert!(is_held(&server, "k"));
}

#[test]
fn a_known_loss_sends_no_request() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    lost_within(SOON, &guard.lost_signal());
    server.kill();
    let (runs, result) = write(&guard, |_| ());
    assert_eq!(result.unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(runs, 0);
}

#[test]
fn a_client_shut_down_meanwhile_writes_nothing() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let (runs, result) = write(&guard, |_| client.shutdown(SOON).unwrap());
    let error = result.unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Shutdown), "{error}");
    assert_eq!((runs, data(&server)), (1, None));
    assert_eq!(write(&guard, |_| ()).0, 0);
}

#[test]
fn a_read_only_transaction_finds_a_loss() {
    let server = silent_server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let read = guard.transaction(|conn, _| {
        let value: Option<String> = conn.get(DATA)?;
        ask(&server, &["DEL", &in_redis("k")]);
        Ok(value)
    });
    assert_eq!(read.unwrap_err().kind(), ErrorKind::LeaseLost);
}

/// The known mistake, which the library must not make: a WATCH on one connection does not protect a
/// transaction on another.
#[test]
fn a_watch_on_another_connection_would_protect_nothing() {
    let server = server();
    let client = client(&server);
    let redis = redis::Client::open(server.url()).unwrap();
    let [mut watching, mut writing] = [(); 2].map(|()| redis.get_connection().unwrap());
    let _guard = client.mutex("k").lock().unwrap();
    let watch = || redis::cmd("WATCH").arg(in_redis("k")).to_owned();
    watch().exec(&mut watching).unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    let mut pipe = redis::pipe();
    pipe.atomic().set(DATA, "written without the lock");
    pipe.exec(&mut writing).unwrap();
    assert_eq!(value_of(&server, "k"), None);
    assert!(data(&server).is_some(), "an unnoticed loss");
    // On one connection, Redis notices the loss.
    let done: Reply = {
        ask(&server, &["DEL", DATA]);
        watch().exec(&mut writing).unwrap();
        ask(&server, &["SET", &in_redis("k"), "taken"]);
        let _: Option<Vec<String>> = pipe.query(&mut writing).unwrap();
        ask(&server, &["EXISTS", DATA])
    };
    assert_eq!(done, Reply::Int(0));
}
