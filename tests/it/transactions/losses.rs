//! A lock that is lost before the data is written: nothing is written, and everybody is told.

use leasehold::redis::Commands;
use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::{Reply, Server, eventually};

use super::{DATA, client, data, silent_server, write};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, What, ask, builder, expires_in, in_redis, is_held, lease_of, millis,
    server, told_within, value_of,
};

/// What is told when `theft` happens between the closure and its writes.
#[track_caller]
fn reason(what: &str, theft: impl Fn(&Server)) -> LossReason {
    let (server, recorder) = (silent_server(), Recorder::new());
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    let (runs, result) = write(&guard, |_| theft(&server));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost, "{what}: {error}");
    assert_eq!(error.key(), Some("k"), "{what}");
    assert_eq!(runs, 1, "{what}");
    assert_eq!(data(&server), None, "{what}");
    let reason = error.loss_reason().unwrap().clone();
    assert_eq!(told_within(SOON, &lost), reason, "{what}");
    assert!(guard.is_lost(), "{what}");
    recorder.wait_for(1, What::Lost, "k");
    reason
}

#[test]
fn a_lock_that_is_gone_when_the_data_is_to_be_written_is_lost_and_nothing_is_written() {
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
fn a_lock_that_expires_before_the_data_is_written_is_lost() {
    let key = in_redis("k");
    let reason = reason("expiry", |server| {
        ask(server, &["PEXPIRE", &key, "1"]);
        // Nobody touches the key: that it has expired is seen by Redis when it comes to the writes.
        std::thread::sleep(millis(20));
    });
    assert_eq!(reason, LossReason::Deleted);
}

#[test]
fn who_took_the_lock_over_keeps_it_and_its_data() {
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
fn past_its_validity_nothing_is_written_even_if_redis_still_has_the_key() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").fixed_ttl(millis(300)).lock().unwrap();
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
fn a_lock_that_is_known_to_be_lost_is_not_asked_about() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    told_within(SOON, &guard.lost_signal());
    server.kill();
    let (runs, result) = write(&guard, |_| ());
    assert_eq!(result.unwrap_err().kind(), ErrorKind::LeaseLost);
    assert_eq!(runs, 0);
}

#[test]
fn a_client_that_was_shut_down_meanwhile_writes_nothing() {
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
fn a_loss_is_found_by_what_only_reads_too() {
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

/// The known broken way, which the library must not take: what is watched on one connection is nothing
/// to what is done on another.
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
    assert!(data(&server).is_some(), "a loss that nobody noticed");
    // On the one connection it is noticed.
    let done: Reply = {
        ask(&server, &["DEL", DATA]);
        watch().exec(&mut writing).unwrap();
        ask(&server, &["SET", &in_redis("k"), "stolen"]);
        let _: Option<Vec<String>> = pipe.query(&mut writing).unwrap();
        ask(&server, &["EXISTS", DATA])
    };
    assert_eq!(done, Reply::Int(0));
}
