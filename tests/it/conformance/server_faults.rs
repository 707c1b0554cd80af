//! Reactions to other programs that change a lock's key, and to a server that fails.

use std::sync::Arc;

use leasehold::{ErrorKind, LossReason, MutexGuard};
use leasehold_testbed::{Reply, eventually};

use crate::conformance::backend::Serving;
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, connections, expires_in, in_redis, in_time,
    kill_connections, lease_of, lost_within, millis, secs, unconfirmed, value_of,
};

/// Another lock and a key for data, in the slot of the lock `k`. On a Cluster, one node has all of them.
const THEIRS: &str = "{leasehold:k}theirs";
const DATA: &str = "{leasehold:k}data";

pub fn a_foreign_value_is_left_alone(backend: &mut dyn Serving) {
    let client = backend.client();
    let server = backend.server();
    ask(server, &["SET", &in_redis("k"), "somebody's"]);
    let mutex = client.mutex("k");
    for refused in [
        mutex.try_lock().map(drop).unwrap_err(),
        mutex.lock().map(drop).unwrap_err(),
        mutex.inspect().map(drop).unwrap_err(),
        mutex.force_unlock().map(drop).unwrap_err(),
    ] {
        assert_eq!(refused.kind(), ErrorKind::Protocol);
    }
    assert_eq!(value_of(server, "k").as_deref(), Some("somebody's"));
    assert_eq!(expires_in(server, "k"), None, "the attempt sets no ttl");
}

pub fn failed_attempts_give_an_immortal_lock_a_ttl(backend: &mut dyn Serving) {
    let (one, two) = (backend.client(), backend.client());
    let server = backend.server();
    let guard = one.mutex("k").lock().unwrap();
    ask(server, &["PERSIST", &in_redis("k")]);
    let found = two.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(found.expires_in(), None);
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    let healed = expires_in(server, "k");
    assert!(healed.is_some_and(|left| left <= LONG_TTL), "{healed:?}");
    guard.unlock().unwrap();
}

pub fn a_deleted_key_is_reported_as_deleted(backend: &mut dyn Serving) {
    let client = backend.client();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    ask(backend.server(), &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
}

pub fn overwritten_keys_are_reported_with_their_new_holder(backend: &mut dyn Serving) {
    let (one, two) = (backend.client(), backend.client());
    let server = backend.server();
    let theirs = two.mutex(THEIRS).lock().unwrap();
    let value = value_of(server, THEIRS).unwrap();
    let mine = one.mutex("k").lock().unwrap();
    let lost = mine.lost_signal();
    ask(server, &["SET", &in_redis("k"), &value]);
    let by = Some(two.holder_id().clone());
    let reason = LossReason::TakenOver { by };
    assert_eq!(lost_within(SOON, &lost), reason);
    let error = mine.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&reason));
    assert_eq!(value_of(server, "k"), Some(value));
    theirs.unlock().unwrap();
}

pub fn renewal_survives_broken_connections(backend: &mut dyn Serving) {
    let (ttl, recorder) = (secs(4), Recorder::new());
    let builder = backend
        .builder()
        .ttl(ttl)
        .event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    recorder.wait_for(1, What::Renewed, "k");
    let lease = lease_of(backend.server(), "k");
    for _ in 0..2 {
        kill_connections(backend.server());
        recorder.wait_for_more(1, What::Renewed, "k");
    }
    assert_eq!(lease_of(backend.server(), "k"), lease, "never released");
    guard.unlock().unwrap();
}

pub fn a_stopped_server_is_an_error(backend: &mut dyn Serving) {
    let hasty = backend.builder().command_timeout(TIMEOUT);
    let client = hasty.outage_timeout(TIMEOUT).connect_timeout(secs(2));
    let client = client.build().unwrap();
    backend.server().stop();
    let mutex = client.mutex("k");
    let tried = crate::support::within(2 * SOON, "an attempt", move || {
        [
            mutex.try_lock().map(drop).unwrap_err(),
            mutex.try_lock_for(millis(50)).map(drop).unwrap_err(),
            mutex.lock().map(drop).unwrap_err(),
            mutex.inspect().map(drop).unwrap_err(),
        ]
    });
    backend.server().resume();
    for error in tried {
        assert!(error.is_unavailable(), "{error}");
    }
    // If an acquire is granted late, the client releases it.
    let free = eventually(SOON, || value_of(backend.server(), "k").is_none());
    assert!(free);
}

pub fn a_grant_beyond_its_validity_is_requested_again(backend: &mut dyn Serving) {
    let (proxy, builder) = backend.proxied();
    let brief = secs(3);
    let builder = builder.ttl(brief).outage_timeout(brief);
    // One pipeline: both keys use the connection that is made here.
    let client = builder.pipelines(1).build().unwrap();
    client.with_lock("{leasehold:k}before", || ()).unwrap();
    proxy.hold_replies(true);
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    // The grant expires before its reply arrives, as after a pause of the whole machine.
    assert!(eventually(SOON, || value_of(backend.server(), "k").is_some()));
    std::thread::sleep(brief * 3 / 2);
    proxy.hold_replies(false);
    waiter.within(SOON, "another attempt").unlock().unwrap();
}

/// The server is killed and starts again in its place. Meanwhile a client holds `k`, and drops [`THEIRS`], and another
/// client waits for `k`.
fn restart(backend: &mut dyn Serving, keeps_data: bool) -> (MutexGuard, Task<MutexGuard>) {
    backend.make_restartable(keeps_data);
    let recorder = Recorder::new();
    let holder = backend.client();
    let waiting = backend.builder().outage_timeout(LONG_TTL);
    // So an attempt fails soon while the server is away. Attempts are repeated, on a busy machine as well.
    let waiting = waiting.connect_timeout(secs(2));
    let waiting = waiting.event_handler(Arc::clone(&recorder));
    let mutex = waiting.build_lazy().unwrap().mutex("k");
    let guard = holder.mutex("k").lock().unwrap();
    let to_drop = holder.mutex(THEIRS).lock().unwrap();
    let waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::Contended, "k");
    backend.server().kill();
    drop(to_drop);
    recorder.wait_for_more(1, What::Unavailable, "k");
    backend.server().restart().unwrap();
    backend.wait_until_ready();
    (guard, waiter)
}

#[track_caller]
fn assert_both_are_free(backend: &mut dyn Serving) {
    let server = backend.server();
    let are_free = || {
        ["k", THEIRS]
            .iter()
            .all(|key| value_of(server, key).is_none())
    };
    assert!(eventually(SOON, are_free));
}

pub fn a_restart_with_all_data_costs_nothing(backend: &mut dyn Serving) {
    let (guard, waiter) = restart(backend, true);
    // Only the dropped lock was released, although its ttl has not ended.
    assert!(eventually(SOON, || value_of(backend.server(), THEIRS).is_none()));
    guard.extend(2 * LONG_TTL).unwrap();
    guard.check().unwrap();
    assert!(!waiter.is_done());
    assert!(guard.unlock().unwrap().is_confirmed());
    waiter.within(SOON, "the lock").unlock().unwrap();
    assert_both_are_free(backend);
}

pub fn a_restart_without_data_ends_holds_only(backend: &mut dyn Serving) {
    let (guard, waiter) = restart(backend, false);
    // The next renewal would be due later.
    let reason = lost_within(SOON, &guard.lost_signal());
    assert!(
        matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. }),
        "{reason:?}"
    );
    let next = waiter.within(2 * SOON, "the lock");
    assert!(next.fencing_token() > guard.fencing_token());
    assert!(guard.unlock().unwrap_err().is_lease_lost());
    next.extend(2 * LONG_TTL).unwrap();
    assert!(next.unlock().unwrap().is_confirmed());
    assert_both_are_free(backend);
}

pub fn a_failed_release_is_reported(backend: &mut dyn Serving) {
    let hasty = backend.builder().command_timeout(TIMEOUT);
    let client = hasty.connect_timeout(secs(2)).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    backend.server().kill();
    let error = unconfirmed(guard.unlock());
    assert!(error.is_unavailable(), "{error}");
}

pub fn a_failed_renewal_is_reported_before_the_loss(backend: &mut dyn Serving) {
    let (ttl, recorder) = (backend.ttl(), Recorder::new());
    let builder = backend
        .builder()
        .ttl(ttl)
        .event_handler(Arc::clone(&recorder));
    let builder = builder.command_timeout(TIMEOUT).connect_timeout(secs(2));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    backend.server().kill();
    recorder.wait_for(1, What::RenewalFailed, "k");
    assert_eq!(lost_within(SOON, &lost), LossReason::Expired);
    assert!(guard.unlock().unwrap_err().is_lease_lost());
}

pub fn data_is_not_written_after_a_loss(backend: &mut dyn Serving) {
    let client = backend.client();
    let server = backend.server();
    let guard = client.mutex("k").lock().unwrap();
    let write = |what: &str, lose: &dyn Fn()| {
        guard.transaction(|_, pipe| {
            pipe.set(DATA, what);
            lose();
            Ok(())
        })
    };
    write("held", &|| ()).unwrap();
    // The write comes in the middle of the transaction, from another connection.
    let outcome = write("lost", &|| {
        ask(server, &["SET", &in_redis("k"), "another holder's"]);
    });
    assert!(outcome.unwrap_err().is_lease_lost());
    assert!(write("late", &|| ()).unwrap_err().is_lease_lost());
    let data = ask(server, &["GET", DATA]);
    assert_eq!(data.as_text(), Some("held"));
}

pub fn nothing_is_left_in_redis(backend: &mut dyn Serving) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    // Connecting may take longer than the waiter waits.
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    let waited = in_time(two.mutex("k").try_lock_for(millis(500)));
    assert!(waited.flatten().is_none());
    drop(held);
    one.with_lock("other", || ()).unwrap();
    let ticket = two.mutex("k").lock().unwrap().into_ticket().unwrap();
    one.adopt(&ticket).unwrap().unlock().unwrap();
    drop((one, two));
    let server = backend.server();
    assert!(eventually(SOON, || connections(server) == 0));
    let keys = ask(server, &["KEYS", "*"]);
    let Reply::Array(keys) = keys else {
        panic!("KEYS answers with an array");
    };
    let keys: Vec<_> = keys.iter().filter_map(Reply::as_text).collect();
    // On a Cluster, each slot has a fence counter of its own. The locks `k` and `other` have different masters there.
    let is_counter =
        |key: &&str| *key == "leasehold:~fence" || key.starts_with("leasehold:~fence{");
    assert!(keys.len() == 1 && keys.iter().all(is_counter), "{keys:?}");
    let channels = ask(server, &["PUBSUB", "CHANNELS", "leasehold:*"]);
    assert_eq!(channels, Reply::Array(Vec::new()));
}
