//! Attacks by other users of the same Redis. They have the right to publish or subscribe, and few other rights.

use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use leasehold::{Client, LossReason};
use leasehold_testbed::{Proxy, Reply, Server, eventually};
use redis::{Connection, PubSub};

use crate::scripts::RELEASE;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, bytes_received, channel_of, expires_in, in_redis,
    lease_of, lock, lost_within, make_first_join_earlier, micros_now, millis, notified_client,
    notified_clients, queue, script_calls, secs, server, wait_for_messages, wait_for_queue,
};

const PUBLISH: [&str; 3] = ["resetchannels", "&leasehold:*", "+publish"];

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// A client that is subscribed to its notifications.
fn subscribed(server: &Server) -> Client {
    notified_client(server, &Recorder::new())
}

/// A connection of a user with these rights only.
fn attacker(server: &Server, rights: &[&str]) -> Connection {
    let user = ["ACL", "SETUSER", "attacker", "reset", "on", ">secret"];
    ask(server, &[&user, rights].concat());
    let url = format!("redis://attacker:secret@127.0.0.1:{}", server.port());
    let client = redis::Client::open(url).unwrap();
    let connection = client.get_connection_with_timeout(SOON).unwrap();
    connection.set_read_timeout(Some(SOON)).unwrap();
    connection
}

#[track_caller]
fn publish(attacker: &mut Connection, victim: &Client, text: &str) {
    let mut publish = redis::cmd("PUBLISH");
    publish.arg(channel_of(victim)).arg(text);
    let receivers: i64 = publish.query(attacker).unwrap();
    assert!(receivers > 0, "the client is not subscribed");
}

/// The next message about a lease. Skips empty messages: a client publishes one whenever it connects.
fn next_text(messages: &mut PubSub<'_>) -> String {
    loop {
        let text: String = messages.get_message().unwrap().get_payload().unwrap();
        if !text.is_empty() {
            return text;
        }
    }
}

/// Publishes two messages saying that the lease was ended by force: one with the start of its id, and one with its
/// whole id.
fn forge_force(attacker: &mut Connection, victim: &Client, lease: &str, key: &str) {
    for lease in [&lease[..16], lease] {
        let text = format!("{lease} !host/1/0 {}", in_redis(key));
        publish(attacker, victim, &text);
    }
}

/// The ids of all notification connections.
fn notification_connections(server: &Server) -> Vec<String> {
    let list = ask(server, &["CLIENT", "LIST"]);
    let entries = list.as_text().unwrap().lines();
    let entries = entries.filter(|entry| entry.contains(" name=leasehold-notifications:"));
    let id = |entry: &str| entry.split(' ').next().unwrap().to_owned();
    entries.map(id).collect()
}

/// A lock that `owner` has waited for, and the id of its lease, which a subscriber has read from the grant's message.
fn granted_by_message(server: &Server, owner: &Client) -> (leasehold::MutexGuard, String) {
    let mut subscriber = attacker(
        server,
        &["resetchannels", "&leasehold:*", "+psubscribe", "+publish"],
    );
    let mut messages = subscriber.as_pubsub();
    messages.psubscribe("leasehold:*").unwrap();
    let held = lock(&client(server), "k");
    let mutex = owner.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(server, "k", 1);
    held.unlock().unwrap();
    let guard = waiter.within(SOON, "the grant");
    let lease = next_text(&mut messages)[..32].to_owned();
    assert_eq!(lease_of(server, "k").as_deref(), Some(&*lease));
    (guard, lease)
}

#[test]
fn a_near_message_cannot_forge_a_grant() {
    let server = server();
    let victim = subscribed(&server);
    let held = lock(&client(&server), "k");
    let fill = "for n = 1, 8 do \
        redis.call('ZADD', KEYS[1], n, string.format('%032x,60000,gone/%d/0', n, n)) end \
        redis.call('PEXPIRE', KEYS[1], 60000)";
    ask(&server, &["EVAL", fill, "1", &in_redis("~queue:k")]);
    let mutex = victim.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 9);
    let rights = ["resetchannels", "&leasehold:*", "+psubscribe"];
    let mut subscriber = attacker(&server, &[&rights[..], &["+publish"]].concat());
    let mut messages = subscriber.as_pubsub();
    messages.psubscribe("leasehold:*").unwrap();
    // The first waiter leaves the queue, so the script sends the next near waiter a message.
    let keys = ["~fence", "k", "~queue:k"].map(in_redis);
    let leaves = [&format!("{:032x},60000,gone/1/0", 1)];
    let eval = ["EVAL", &**RELEASE, "3", &keys[0], &keys[1], &keys[2]];
    assert_eq!(
        ask(&server, &[&eval[..], &leaves.map(String::as_str)].concat()),
        Reply::Int(1)
    );
    let near = next_text(&mut messages);
    let (lease, rest) = near.split_once(' ').unwrap();
    assert_eq!(rest, "~ leasehold:k");
    let fence: String = ask(&server, &["ZSCORE", &in_redis("~fence"), "t"]).to_string();
    let micros = fence.parse::<u64>().unwrap() + 1;
    drop(messages);
    let text = format!("{lease:0<32} {micros} {}", in_redis("k"));
    publish(&mut attacker(&server, &PUBLISH), &victim, &text);
    thread::sleep(millis(300));
    assert!(!waiter.is_done(), "the forged grant was believed");
    held.unlock().unwrap();
    waiter.within(SOON, "the grant").unlock().unwrap();
}

/// The attacker may read the queues and publish, so it knows the lease ids of waiters.
#[test]
fn a_forged_token_is_not_believed() {
    let server = server();
    let victim = subscribed(&server);
    let (holder, next) = (client(&server), client(&server));
    let held = lock(&holder, "k");
    let tasks: Vec<_> = [&victim, &next]
        .into_iter()
        .zip(1..)
        .map(|(client, n)| {
            let (mutex, value) = (client.mutex("k"), client.fenced_value("v"));
            let task = Task::start(move || {
                let guard = mutex.lock().unwrap();
                let token = guard.fencing_token();
                value.write(token, format!("{n}")).unwrap();
                guard.unlock().unwrap();
                token
            });
            wait_for_queue(&server, "k", n);
            task
        })
        .collect();
    let before = queue(&server, "k");
    let mut attacker = attacker(
        &server,
        &[&PUBLISH[..], &["~leasehold:*", "+zrange"]].concat(),
    );
    let mut read = redis::cmd("ZRANGE");
    read.arg(in_redis("~queue:k")).arg(0).arg(0);
    let first: Vec<String> = read.query(&mut attacker).unwrap();
    for micros in [u64::MAX >> 10, 1] {
        let text = format!("{} {micros} {}", &first[0][..32], in_redis("k"));
        publish(&mut attacker, &victim, &text);
        thread::sleep(millis(200));
        assert_eq!(queue(&server, "k"), before, "the waiter lost its place");
    }
    held.unlock().unwrap();
    let tokens: Vec<u64> = tasks
        .into_iter()
        .map(|task| task.within(SOON, "the grant and the write"))
        .collect();
    assert!(tokens[0] < tokens[1], "{tokens:?}");
    assert!(tokens[1] < u64::MAX - 2048, "{tokens:?}");
}

/// Attack by a user with the rights to read the queues and to publish: docs/security.md.
#[test]
fn a_forged_grant_is_detected_soon() {
    let server = server();
    let victim = subscribed(&server);
    let held = lock(&client(&server), "k");
    let mutex = victim.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    let lease = queue(&server, "k")[0][..32].to_owned();
    let micros = micros_now(&server);
    let text = format!("{lease} {micros} {}", in_redis("k"));
    publish(&mut attacker(&server, &PUBLISH), &victim, &text);
    let forged = waiter.within(SOON, "the forged grant");
    // The next renewal is due in 20 s, so the client has read the key.
    lost_within(SOON, &forged.lost_signal());
    held.check().unwrap();
    drop(forged);
    // The lease is still queued. When it is granted, its client releases it.
    let mutex = client(&server).mutex("k");
    let next = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 2);
    held.unlock().unwrap();
    next.within(SOON, "the grant").unlock().unwrap();
}

#[test]
fn a_forged_force_ends_no_lock_or_connection() {
    let server = server();
    let recorder = Recorder::new();
    let owner = notified_client(&server, &recorder);
    let (guard, lease) = granted_by_message(&server, &owner);
    // A suspect connection is replaced only if it is at least a second old.
    thread::sleep(millis(1200));
    wait_for_messages(&server, &owner);
    let mut attacker = attacker(&server, &PUBLISH);
    // The notification connections of other clients are being closed.
    assert!(eventually(SOON, || notification_connections(&server).len() == 1));
    let before = notification_connections(&server);
    forge_force(&mut attacker, &owner, &lease, "k");
    thread::sleep(millis(300));
    guard.extend(2 * LONG_TTL).expect("the lock is still held");
    guard.check().unwrap();
    for n in 0..20 {
        lock(&owner, &format!("other-{n}")).unlock().unwrap();
    }
    // The notification connection is replaced when any connection is suspect.
    assert_eq!(notification_connections(&server), before);
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    let operator = client(&server);
    operator.mutex("k").force_unlock().unwrap().unwrap();
    let by = operator.holder_id().clone();
    let reason = lost_within(SOON, &guard.lost_signal());
    assert_eq!(reason, LossReason::ForceUnlocked { by });
}

/// An operator has removed the ttl, so Redis keeps the lock until it is released. The forged message makes the holder's
/// client ask whether the lock is held.
#[test]
fn a_forged_force_ends_no_lock_without_a_ttl() {
    let server = server();
    let owner = subscribed(&server);
    let (guard, lease) = granted_by_message(&server, &owner);
    wait_for_messages(&server, &owner);
    ask(&server, &["PERSIST", &in_redis("k")]);
    let before = script_calls(&server);
    forge_force(&mut attacker(&server, &PUBLISH), &owner, &lease, "k");
    assert!(eventually(SOON, || script_calls(&server) > before));
    assert_eq!(expires_in(&server, "k"), None);
    assert_eq!(lease_of(&server, "k"), Some(lease));
    guard.check().unwrap();
    assert!(guard.unlock().unwrap().is_confirmed());
}

#[test]
fn a_long_message_costs_no_connection() {
    let server = server();
    let victim = subscribed(&server);
    let mut attacker = attacker(&server, &PUBLISH);
    let before = notification_connections(&server);
    publish(&mut attacker, &victim, &"x".repeat(300_000));
    wait_for_messages(&server, &victim);
    assert_eq!(notification_connections(&server), before);
}

/// Redis closes a subscribed connection if the output that waits for it exceeds a limit.
#[test]
fn messages_beyond_the_output_limit_cause_few_reconnects() {
    let server = server();
    let limit = ["client-output-buffer-limit", "pubsub 1mb 0 0"];
    ask(&server, &[&["CONFIG", "SET"], &limit[..]].concat());
    let holder = client(&server);
    // While there are no notifications, renewals find losses: one renewal per second.
    let victim = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let url = server.url();
    let mut observer = redis::Client::open(url).unwrap().get_connection().unwrap();
    let warm_up = lock(&victim, "warm-up");
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let mut attacker = attacker(&server, &PUBLISH);
    let mut flood = redis::cmd("PUBLISH");
    flood.arg(channel_of(&victim)).arg("x".repeat(2_000_000));
    let (stop, is_stopped) = mpsc::channel::<()>();
    let attack = Task::start(move || {
        let mut closed = 0_u64;
        while is_stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            closed += flood.query::<u64>(&mut attacker).unwrap();
        }
        closed
    });
    let accepted = |observer: &mut Connection| {
        let info: redis::InfoDict = redis::cmd("INFO").arg("stats").query(observer).unwrap();
        info.get::<u64>("total_connections_received").unwrap()
    };
    let (before, started) = (accepted(&mut observer), Instant::now());
    // In this time, a client that reconnects without pauses would make hundreds of connections.
    while started.elapsed() < secs(3) {
        let guard = lock(&victim, "lost");
        let mut delete = redis::cmd("DEL");
        delete.arg(in_redis("lost")).exec(&mut observer).unwrap();
        lost_within(SOON, &guard.lost_signal());
        let held = lock(&holder, "k");
        let mutex = victim.mutex("k");
        let waiter = Task::start_blocked(move || mutex.lock().unwrap());
        held.unlock().unwrap();
        waiter.within(SOON, "the grant").unlock().unwrap();
    }
    let (made, took) = (accepted(&mut observer) - before, started.elapsed());
    stop.send(()).unwrap();
    let closed = attack.within(SOON, "the end of the attack");
    warm_up.unlock().unwrap();
    // The pauses grow to half a second in eight connections. The pipelines of both clients make at most eight more.
    let most = 16 + took.as_millis() as u64 / 500;
    println!("{closed} connections closed, {made} made in {took:?}");
    assert!(
        closed >= 5 && made <= most,
        "{closed} closed, {made} made in {took:?}"
    );
    // After the attack, the client is notified again.
    assert!(eventually(SOON, || notified_clients(&server) >= 1));
    wait_for_messages(&server, &victim);
}

#[test]
fn a_flood_of_forged_forces_causes_few_requests() {
    let server = server();
    let owner = subscribed(&server);
    let (guard, lease) = granted_by_message(&server, &owner);
    wait_for_messages(&server, &owner);
    let before = script_calls(&server);
    let flood = "for n = 1, 10000 do for _, lease in ipairs({ ARGV[2], string.sub(ARGV[2], 1, 16) }) do \
        redis.call('PUBLISH', ARGV[1], lease .. ' !host/1/0 leasehold:k') end end";
    let rights = [&PUBLISH[..], &["+eval", "allkeys"]].concat();
    let mut eval = redis::cmd("EVAL");
    eval.arg(flood).arg(0).arg(channel_of(&owner)).arg(lease);
    eval.exec(&mut attacker(&server, &rights)).unwrap();
    wait_for_messages(&server, &owner);
    guard.check().unwrap();
    // This message is true. Usually it comes less than a second after a forged one was denied, when the client confirms
    // no message, but reads the key once more.
    let operator = client(&server);
    operator.mutex("k").force_unlock().unwrap().unwrap();
    let by = operator.holder_id().clone();
    let reason = lost_within(SOON, &guard.lost_signal());
    assert_eq!(reason, LossReason::ForceUnlocked { by });
    let calls = script_calls(&server) - before;
    assert!(calls < 50, "{calls} script calls");
}

#[test]
fn forged_grants_of_unknown_leases_cause_no_release() {
    let server = server();
    let victim = subscribed(&server);
    lock(&victim, "k").unlock().unwrap();
    wait_for_messages(&server, &victim);
    let flood = "for n = 1, 2000 do redis.call('PUBLISH', ARGV[1], \
        string.format('%032x 1795263780943818 leasehold:k%d', n, n)) end";
    let rights = [&PUBLISH[..], &["+eval", "allkeys"]].concat();
    let mut attacker = attacker(&server, &rights);
    let before = bytes_received(&server);
    let mut eval = redis::cmd("EVAL");
    eval.arg(flood).arg(0).arg(channel_of(&victim));
    eval.exec(&mut attacker).unwrap();
    wait_for_messages(&server, &victim);
    victim.shutdown(SOON).unwrap();
    let bytes = bytes_received(&server) - before;
    assert!(bytes < 40_000, "{bytes} bytes of requests");
}

/// The attacker subscribes to the channel of a dead waiter, so the scripts regard the waiter as alive.
#[test]
fn a_subscriber_keeps_no_dead_waiter_alive() {
    let server = server();
    let held = lock(&client(&server), "k");
    let proxy = Proxy::start(server.port()).unwrap();
    let dead = steady(&proxy.url()).ttl(LONG_TTL).build().unwrap();
    let channel = channel_of(&dead);
    let mutex = dead.mutex("k");
    let _waits = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&server, "k", 1);
    make_first_join_earlier(&server, "k", secs(5));
    let mutex = client(&server).mutex("k");
    let second = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 2);
    let rights = ["resetchannels", "&leasehold:*", "+subscribe"];
    let mut subscriber = attacker(&server, &rights);
    let mut messages = subscriber.as_pubsub();
    messages.subscribe(&channel).unwrap();
    // The waiter's client is cut off for ever.
    proxy.hold_replies(true);
    drop(proxy);
    held.unlock().unwrap();
    let text = next_text(&mut messages);
    assert!(text.contains(" ?"), "the grant is not a short one: {text}");
    second.within(LONG_TTL / 2, "the grant").unlock().unwrap();
}

#[test]
fn a_tenant_can_neither_publish_nor_subscribe_elsewhere() {
    let server = server();
    let rights = ["resetchannels", "&a:*", "~a:*", "+publish", "+subscribe"];
    let mut tenant = attacker(&server, &rights);
    for command in ["PUBLISH", "SUBSCRIBE"] {
        let mut request = redis::cmd(command);
        request.arg("b:~to:host/1/0");
        if command == "PUBLISH" {
            request.arg("text");
        }
        let error = request.query::<redis::Value>(&mut tenant).unwrap_err();
        assert_eq!(error.code(), Some("NOPERM"), "{error}");
    }
    redis::cmd("PUBLISH")
        .arg("a:~to:host/1/0")
        .arg("text")
        .exec(&mut tenant)
        .unwrap();
}

/// The user has the rights that docs/security.md lists for reading locks.
#[test]
fn a_user_who_reads_locks_cannot_read_queues() {
    let server = server();
    let rights = ["%R~leasehold:[^~]*", "+@read"];
    let user = ["ACL", "SETUSER", "tried", "reset"];
    if let Reply::Error(_) = server.command(&[&user[..], &rights].concat()).unwrap() {
        // Redis 6.2 does not know these rights.
        return;
    }
    let holder = client(&server);
    let _held = lock(&holder, "k");
    let mutex = client(&server).mutex("k");
    let _waits = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&server, "k", 1);
    let mut reader = attacker(&server, &rights);
    let mut get = redis::cmd("GET");
    let value: String = get.arg(in_redis("k")).query(&mut reader).unwrap();
    assert!(value.starts_with("lh1 "));
    for [command, key] in [
        ["ZCARD", "~fence"],
        ["ZCARD", "~queue:k"],
        ["HLEN", "~value:k"],
    ] {
        let mut request = redis::cmd(command);
        let error = request
            .arg(in_redis(key))
            .query::<redis::Value>(&mut reader);
        assert_eq!(error.unwrap_err().code(), Some("NOPERM"), "{key}");
    }
    holder.shutdown(secs(1)).ok();
}
