//! Locks of Redisson under the same keys: the tests send the commands that Redisson sends.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold::{
    Builder, Client, Error, ErrorKind, HolderKind, LossReason, MemoryStore, OtherLibrary,
};
use leasehold_testbed::{Cluster, Proxy, Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{
    Counter, LONG_TTL, Recorder, SOON, Task, What, Witness, ask, kill_connections, lock,
    lost_within, millis, monitored, secs, server,
};

/// The field of a thread of Redisson.
const OF_JAVA: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:31";

fn builder(url: &str, fenced: bool) -> Builder {
    let builder = steady(url).ttl(LONG_TTL).prefix("");
    builder.compatible_with(OtherLibrary::Redisson { fenced })
}

fn client(server: &Server) -> Client {
    builder(&server.url(), true).build().unwrap()
}

/// Takes the lock as a thread of Redisson does.
fn lock_as_java(server: &Server, key: &str) {
    ask(server, &["HSET", key, OF_JAVA, "1"]);
    ask(server, &["PEXPIRE", key, "60000"]);
}

fn exists(server: &Server, key: &str) -> bool {
    ask(server, &["EXISTS", key]) == Reply::Int(1)
}

fn ttl_of(server: &Server, key: &str) -> i64 {
    ask(server, &["PTTL", key]).as_int().unwrap()
}

/// The fields and values of a hash.
fn fields(server: &Server, key: &str) -> Vec<String> {
    let Reply::Array(fields) = ask(server, &["HGETALL", key]) else {
        panic!("HGETALL answers with an array");
    };
    fields.iter().map(Reply::to_string).collect()
}

#[test]
fn a_lock_is_a_hash_with_one_field_and_a_ttl() {
    let server = server();
    let client = client(&server);
    let guard = lock(&client, "k");
    let [field, count] = &fields(&server, "k")[..] else {
        panic!("not one field");
    };
    let (lease, holder) = field.split_once(':').unwrap();
    assert_eq!((lease.len(), holder), (32, client.holder_id().as_str()));
    assert_eq!(count, "1");
    assert!((1..=60_000).contains(&ttl_of(&server, "k")));
    let found = client.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(found.holder(), client.holder_id());
    assert!(found.expires_in().is_some_and(|left| left <= LONG_TTL));
    ask(&server, &["PEXPIRE", "k", "9000"]);
    guard.extend(secs(50)).unwrap();
    assert!(ttl_of(&server, "k") > 40_000);
    assert!(guard.unlock().unwrap().is_confirmed());
    assert!(!exists(&server, "k"));
}

#[test]
fn a_lock_of_redisson_is_waited_for_and_named() {
    let server = server();
    let recorder = Recorder::new();
    let handler = builder(&server.url(), true).event_handler(Arc::clone(&recorder));
    let client = handler.build().unwrap();
    lock_as_java(&server, "k");
    let mutex = client.mutex("k");
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(mutex.is_locked().unwrap());
    let found = mutex.inspect().unwrap().unwrap();
    let kind = HolderKind::OtherLibrary { redis_type: "hash" };
    assert_eq!(found.holders()[0].kind(), kind);
    assert!(!format!("{found:?}").contains("8743c9c0"), "{found:?}");
    let refused = mutex.force_unlock().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    // Redisson deletes the key, and the waiter has it long before its ttl would have ended.
    let waiter = Task::start(move || mutex.lock().unwrap().fencing_token());
    recorder.wait_for(1, What::Contended, "k");
    ask(&server, &["DEL", "k"]);
    assert_eq!(waiter.within(SOON, "the waiter"), 1);
}

#[test]
fn the_loss_of_a_lock_is_reported_before_the_renewal() {
    let server = server();
    let client = client(&server);
    let [deleted, taken] = ["deleted", "taken"].map(|key| lock(&client, key));
    let tracked = || crate::support::tracked(&server) >= 2;
    assert!(eventually(SOON, tracked), "not tracked");
    ask(&server, &["DEL", "deleted"]);
    let reason = lost_within(SOON, &deleted.lost_signal());
    assert_eq!(reason, LossReason::Deleted);
    ask(&server, &["DEL", "taken"]);
    lock_as_java(&server, "taken");
    let reason = lost_within(SOON, &taken.lost_signal());
    assert!(
        matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. }),
        "{reason:?}"
    );
    drop(taken);
    assert!(
        exists(&server, "taken"),
        "the release spares the lock of Redisson"
    );
}

/// Redisson's waiters sleep until a message, for the whole ttl that they have seen.
#[test]
fn a_release_wakes_the_waiters_of_redisson() {
    let server = server();
    let client = client(&server);
    let mut connection = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    connection.set_read_timeout(Some(SOON)).unwrap();
    let mut subscriber = connection.as_pubsub();
    let fair = "redisson_lock__channel:{fair}:8743c9c0-0795-4907-87fd-6c719a6b4586:7";
    for channel in [
        "redisson_lock__channel:{k}",
        "redisson_lock__channel:a{b}c",
        "redisson_lock__channel:{fair}",
        fair,
    ] {
        subscriber.subscribe(channel).unwrap();
    }
    let waiter = "8743c9c0-0795-4907-87fd-6c719a6b4586:7";
    ask(
        &server,
        &["RPUSH", "redisson_lock_queue:{fair}", waiter, "another:1"],
    );
    let mut woken = |channels: &[&str]| {
        for channel in channels {
            let message = subscriber.get_message().unwrap();
            assert_eq!(message.get_channel_name(), *channel);
            assert_eq!(message.get_payload::<String>().unwrap(), "0");
        }
    };
    lock(&client, "k").unlock().unwrap();
    woken(&["redisson_lock__channel:{k}"]);
    drop(lock(&client, "k"));
    woken(&["redisson_lock__channel:{k}"]);
    client.with_lock("a{b}c", || ()).unwrap();
    woken(&["redisson_lock__channel:a{b}c"]);
    client.with_lock("fair", || ()).unwrap();
    woken(&["redisson_lock__channel:{fair}", fair]);
    let guard = lock(&client, "k");
    let other = builder(&server.url(), true).build().unwrap();
    assert!(other.mutex("k").force_unlock().unwrap().is_some());
    woken(&["redisson_lock__channel:{k}"]);
    lost_within(SOON, &guard.lost_signal());
    let both = client.mutexes(["k", "a{b}c"]).lock().unwrap();
    let keys: Vec<String> = both.keys().map(str::to_owned).collect();
    both.unlock().unwrap();
    let channel = |key: &String| match key.as_str() {
        "k" => "redisson_lock__channel:{k}",
        _ => "redisson_lock__channel:a{b}c",
    };
    let mut channels: Vec<&str> = keys.iter().map(channel).collect();
    channels.sort_unstable();
    let mut seen = [(); 2].map(|()| {
        subscriber
            .get_message()
            .unwrap()
            .get_channel_name()
            .to_owned()
    });
    seen.sort_unstable();
    assert_eq!(seen.to_vec(), channels);
    assert_eq!(
        ask(&server, &["LLEN", "redisson_lock_queue:{fair}"]),
        Reply::Int(2)
    );
}

/// A message that the user may not send is an error of `unlock`: Redisson's waiters would sleep for the whole ttl.
#[test]
fn a_refused_message_is_an_error_of_the_release() {
    let server = server();
    let client = client(&server);
    let guard = lock(&client, "k");
    ask(
        &server,
        &["ACL", "SETUSER", "default", "resetchannels", "&~to:*"],
    );
    let error = crate::support::unconfirmed(guard.unlock());
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let right = "&redisson_lock__channel:*";
    assert!(error.to_string().contains(right), "{error}");
    assert!(!exists(&server, "k"));
}

#[test]
fn the_tokens_of_a_fenced_lock_are_those_of_redisson() {
    let server = server();
    let client = client(&server);
    let token = |key: &str| {
        client
            .mutex(key)
            .with(|guard| guard.fencing_token())
            .unwrap()
    };
    assert_eq!([token("k"), token("k"), token("other")], [1, 2, 1]);
    // Redisson grants the lock three times.
    ask(&server, &["INCRBY", "redisson_lock_token:{k}", "3"]);
    assert_eq!(token("k"), 6);
    assert_eq!(token("a{b}c"), 1);
    let counter = ask(&server, &["GET", "redisson_lock_token:a{b}c"]);
    assert_eq!(counter.as_text(), Some("1"));
    let value = client.fenced_value("v");
    value.write(token("k"), "seventh").unwrap();
    assert_eq!(
        value.write(6, "sixth").unwrap_err().kind(),
        ErrorKind::StaleToken
    );
    // Locks that are not fenced have tokens of their own, which rise across keys.
    let plain = builder(&server.url(), false).build().unwrap();
    let mut last = 0;
    for _ in 0..3 {
        let token = plain
            .mutex("k")
            .with(|guard| guard.fencing_token())
            .unwrap();
        assert!(token > last);
        last = token;
    }
    let counter = ask(&server, &["GET", "redisson_lock_token:{k}"]);
    assert_eq!(counter.as_text(), Some("7"));
}

/// The commands on keys that begin with `k` that clients send during `work`, in scripts or not.
fn commands_during(server: &Server, work: impl FnOnce()) -> Vec<(String, String)> {
    let command = |line: String| {
        // `+<time> [<database> <address>] "<command>" "<key>" ..`
        let mut words = line.split_once("] ")?.1.split(' ');
        let word = |word: &str| word.trim_matches('"').to_owned();
        Some((word(words.next()?), word(words.next()?)))
    };
    let of_keys = monitored(server, work)
        .filter_map(command)
        .filter(|(_, key)| key.starts_with('k'));
    of_keys.collect()
}

/// A string under the key of a lock would cost a process of Redisson its other locks, and Redisson takes a hash without
/// a ttl for a lock of its own. So no way of a lock may leave one, not even for a moment.
#[test]
fn no_way_of_a_lock_writes_a_string_or_a_hash_without_a_ttl() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let commands = commands_during(&server, || {
        let settings = |url: &str| builder(url, true).ttl(millis(900));
        let client = settings(&server.url()).build().unwrap();
        let other = settings(&server.url()).build().unwrap();
        lock(&client, "k").unlock().unwrap();
        drop(lock(&client, "k"));
        client.with_lock("k", || ()).unwrap();
        // Contention between clients, and between the threads of one.
        let witness = Arc::new(Witness::default());
        let turns =
            [&client, &client, &other].map(|client| witness.start_turns(client.mutex("k"), 20));
        turns
            .into_iter()
            .for_each(|task| task.within(6 * SOON, "the turns"));
        // Renewals, an extension, and limits of the hold.
        let guard = lock(&client, "k-renewed");
        let fixed = client.mutex("k-fixed").fixed_ttl(secs(2)).lock().unwrap();
        let limited = client
            .mutex("k-limited")
            .max_hold(millis(300))
            .lock()
            .unwrap();
        assert!(
            other
                .mutex("k-renewed")
                .try_lock_for(secs(2))
                .unwrap()
                .is_none()
        );
        guard.extend(secs(5)).unwrap();
        lost_within(SOON, &limited.lost_signal());
        drop((fixed, guard, limited));
        // Sets, reentrant locks, a lock that was taken away, a wait that is too long.
        let set = client.mutexes(["k", "k-two", "k-three"]).lock().unwrap();
        assert!(other.mutexes(["k", "k-two"]).try_lock().unwrap().is_none());
        drop(set);
        let reentrant = client.reentrant_mutex("k");
        let (outer, inner) = (reentrant.lock().unwrap(), reentrant.lock().unwrap());
        assert!(
            other
                .mutex("k")
                .try_lock_for(millis(200))
                .unwrap()
                .is_none()
        );
        drop((inner, outer));
        let guard = lock(&client, "k-forced");
        other.mutex("k-forced").force_unlock().unwrap();
        drop(guard);
        // Refused calls send nothing.
        let guard = lock(&client, "k");
        assert!(guard.transaction(|_, _| Ok(())).is_err());
        assert!(guard.into_ticket().is_err());
        assert!(client.rw_lock("k-refused").read().is_err());
        assert!(
            client
                .mutex("k-refused")
                .min_hold(millis(500))
                .lock()
                .is_err()
        );
        // An acquire whose reply is lost is undone, and a release whose reply is lost is repeated.
        let far = settings(&proxy.url())
            .command_timeout(secs(1))
            .build()
            .unwrap();
        far.with_lock("k-far", || ()).unwrap();
        proxy.hold_replies(true);
        let mutex = far.mutex("k-far");
        let task = Task::start(move || mutex.try_lock().map(drop));
        assert!(eventually(SOON, || exists(&server, "k-far")));
        proxy.cut_all();
        assert!(task.within(SOON, "the acquire").is_err());
        proxy.hold_replies(false);
        assert!(eventually(SOON, || !exists(&server, "k-far")), "not undone");
        let guard = lock(&far, "k-far");
        kill_connections(&server);
        drop(guard);
        assert!(
            eventually(SOON, || !exists(&server, "k-far")),
            "not released"
        );
        client.shutdown(SOON).unwrap();
    });
    let writes: HashSet<&str> = commands
        .iter()
        .map(|(command, _)| command.as_str())
        .collect();
    let allowed = HashSet::from([
        "EXISTS", "HEXISTS", "HDEL", "HLEN", "HKEYS", "HSET", "PEXPIRE", "PTTL", "TYPE", "DEL",
    ]);
    // The test asks by commands in capitals, too.
    let others: Vec<_> = writes.difference(&allowed).collect();
    assert!(others.is_empty(), "{others:?}");
    let mut sets = 0;
    for (n, (command, key)) in commands.iter().enumerate() {
        if command == "HSET" {
            sets += 1;
            let next = commands.get(n + 1);
            assert_eq!(next, Some(&("PEXPIRE".to_owned(), key.clone())));
        }
    }
    assert!(sets > 60, "{sets}");
}

#[test]
fn features_without_a_form_in_redisson_are_unsupported() {
    let server = server();
    let client = client(&server);
    let of_memory = MemoryStore::new().builder().prefix("").build().unwrap();
    let ticket = lock(&of_memory, "t").into_ticket().unwrap();
    let guard = lock(&client, "k");
    let mutex = client.mutex("m");
    for (error, advice) in [
        (
            guard.transaction(|_, _| Ok(())).map(drop).unwrap_err(),
            "fencing token",
        ),
        (lock(&client, "t").into_ticket().unwrap_err(), "acquire it"),
        (client.adopt(&ticket).unwrap_err(), "acquire it"),
        (
            mutex.min_hold(secs(1)).lock().map(drop).unwrap_err(),
            "keep the guard",
        ),
        (
            client.rw_lock("r").read().map(drop).unwrap_err(),
            "a client without it",
        ),
        (
            client.rw_lock("r").write().map(drop).unwrap_err(),
            "a client without it",
        ),
        (
            client.semaphore("s", 2).acquire().map(drop).unwrap_err(),
            "a client without it",
        ),
        (
            client.once("o").run(|_| Ok::<_, Error>(())).unwrap_err(),
            "no elections",
        ),
        (
            client.election("e").campaign("a").map(drop).unwrap_err(),
            "no elections",
        ),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains(advice), "{error}");
    }
    drop(guard);
    for (refused, advice) in [
        (MemoryStore::new().builder().prefix(""), "without a server"),
        (Client::builder("memory://").prefix(""), "without a server"),
        (Client::quorum_builder([server.url()]).prefix(""), "quorum"),
        (Client::builder(server.url()), "prefix"),
        (
            Client::builder(server.url()).prefix("").max_hand_offs(1),
            "max_hand_offs",
        ),
    ] {
        let refused = refused.compatible_with(OtherLibrary::Redisson { fenced: true });
        let error = refused.build_lazy().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains(advice), "{error}");
    }
}

/// A thread that takes the lock as Redisson does: it polls, since the test has no subscriber for each thread.
fn turns_of_java(server: &Server, key: &'static str, turns: usize) -> Task<()> {
    let script = "if redis.call('exists', KEYS[1]) == 0 then redis.call('incr', KEYS[2]); \
                  redis.call('hincrby', KEYS[1], ARGV[1], 1); redis.call('pexpire', KEYS[1], 60000); return 1 end; \
                  return 0";
    let mut connection = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    let mut counter = Counter::open(server, key);
    Task::start(move || {
        let token = format!("redisson_lock_token:{{{key}}}");
        for _ in 0..turns {
            loop {
                let mut eval = redis::cmd("EVAL");
                eval.arg(script).arg(2).arg(key).arg(&token).arg(OF_JAVA);
                if eval.query::<i64>(&mut connection).unwrap() == 1 {
                    break;
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
            counter.raise();
            redis::cmd("DEL").arg(key).exec(&mut connection).unwrap();
        }
    })
}

#[test]
fn redisson_and_clients_of_two_settings_exclude_each_other() {
    let server = server();
    let of = |other| {
        steady(&server.url())
            .ttl(LONG_TTL)
            .prefix("")
            .compatible_with(other)
    };
    let java = turns_of_java(&server, "k", 40);
    let clients = [
        of(OtherLibrary::Redisson { fenced: true }),
        of(OtherLibrary::Redisson { fenced: false }),
    ];
    let ours = clients.map(|client| {
        let (mutex, mut counter) = (
            client.build().unwrap().mutex("k"),
            Counter::open(&server, "k"),
        );
        Task::start(move || {
            for _ in 0..40 {
                mutex.with(|_| counter.raise()).unwrap();
            }
        })
    });
    java.within(6 * SOON, "the turns of Redisson");
    ours.into_iter()
        .for_each(|task| task.within(6 * SOON, "our turns"));
    assert_eq!(Counter::open(&server, "k").read(), 120);
    // After Redisson has left, clients with the next setting of a migration write strings.
    let next = of(OtherLibrary::PlainKeys).build().unwrap();
    let before = of(OtherLibrary::Redisson { fenced: true }).build().unwrap();
    for (holder, other) in [(&before, &next), (&next, &before)] {
        let guard = lock(holder, "k");
        assert!(other.mutex("k").try_lock().unwrap().is_none());
        let mutex = other.mutex("k");
        let waiter = Task::start(move || drop(mutex.lock().unwrap()));
        drop(guard);
        waiter.within(SOON, "the waiter");
    }
}

/// The client sends the undo on the connection of the acquire, which it then closes. No other connection works.
#[test]
fn an_acquire_without_a_reply_is_undone_on_its_connection() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let far = builder(&proxy.url(), true).command_timeout(secs(1));
    let far = far.build().unwrap();
    far.with_lock("k", || ()).unwrap();
    proxy.hold_replies(true);
    proxy.refuse(true);
    let mutex = far.mutex("k");
    let task = Task::start(move || mutex.try_lock().map(drop));
    assert!(task.within(SOON, "the acquire").is_err());
    let tokens = ask(&server, &["GET", "redisson_lock_token:{k}"]);
    assert_eq!(tokens.as_text(), Some("2"), "Redis has granted the lock");
    assert!(eventually(SOON, || !exists(&server, "k")), "not undone");
}

/// The names of Redisson's keys keep the slot of the lock, except for broken braces.
#[test]
fn locks_of_redisson_work_on_a_cluster() {
    let cluster = Cluster::start().unwrap();
    let client = builder(&cluster.url(), true).build().unwrap();
    for key in ["k", "a", "b", "c", "x{y}z", "{y}"] {
        let node = &cluster.nodes()[cluster.master_of_key(key)];
        let mut connection = redis::Client::open(node.url())
            .unwrap()
            .get_connection()
            .unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        let channel = match key.contains('{') {
            true => format!("redisson_lock__channel:{key}"),
            false => format!("redisson_lock__channel:{{{key}}}"),
        };
        let mut subscriber = connection.as_pubsub();
        subscriber.subscribe(&channel).unwrap();
        // Redis 6.2 has no shard channels.
        let mut on_shard = redis::Client::open(node.url())
            .unwrap()
            .get_connection()
            .unwrap();
        on_shard.set_read_timeout(Some(SOON)).unwrap();
        let subscribe = redis::cmd("SSUBSCRIBE").arg(&channel).clone();
        let has_shards = subscribe.query::<redis::Value>(&mut on_shard).is_ok();
        for token in 1..=2 {
            let guard = lock(&client, key);
            assert_eq!(guard.fencing_token(), token, "{key}");
            assert!(guard.unlock().unwrap().is_confirmed());
            assert_eq!(
                subscriber.get_message().unwrap().get_channel_name(),
                channel
            );
            if has_shards {
                let message = format!("{:?}", on_shard.recv_response().unwrap());
                assert!(message.contains("smessage"), "{message}");
            }
        }
    }
    // The queue of a fair lock with this name would be in another slot, so the release does not ask for it.
    let plain = builder(&cluster.url(), false).build().unwrap();
    assert!(lock(&plain, "a}b").unlock().unwrap().is_confirmed());
    // So would its counter of tokens, which a fenced lock needs.
    for key in ["a}b", "{", "{}x"] {
        let error = client.mutex(key).try_lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
        assert!(error.to_string().contains("slots"), "{error}");
    }
}
