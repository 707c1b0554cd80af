//! Clients beside another library, which the tests play by plain commands on the same keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{
    Builder, Client, ErrorKind, HolderKind, LossReason, MemoryStore, Mutex, MutexGuard,
    OtherLibrary,
};
use leasehold_testbed::{Reply, Server, eventually};

use crate::cluster::pool::PooledCluster;
use crate::steady::steady;
use crate::support::{
    Counter, LONG_TTL, Recorder, SOON, Task, What, Witness, ask, kill_connections, lock_requests,
    lost_within, millis, notified_clients, reads, secs, server, tracked,
};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);

/// The release of every library with plain keys.
const RELEASE: &str = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

/// The release of python-redis-lock.
const RELEASE_OF_PYTHON: &str = "
    if redis.call('get', KEYS[1]) ~= ARGV[1] then return 1 end
    redis.call('del', KEYS[2])
    redis.call('lpush', KEYS[2], 1)
    redis.call('pexpire', KEYS[2], ARGV[2])
    redis.call('del', KEYS[1])
    return 0";

/// A lock of another library, with a connection of its own.
struct Other {
    connection: redis::Connection,
    key: &'static str,
    value: String,
}

impl Other {
    fn new(server: &Server, key: &'static str, value: &str) -> Self {
        let client = redis::Client::open(server.url()).unwrap();
        Self {
            connection: client.get_connection_with_timeout(SOON).unwrap(),
            key,
            value: value.to_owned(),
        }
    }

    fn try_lock(&mut self, ttl: Duration) -> bool {
        let mut set = redis::cmd("SET");
        set.arg(self.key)
            .arg(&self.value)
            .arg("NX")
            .arg("PX")
            .arg(ttl.as_millis() as u64);
        set.query::<Option<String>>(&mut self.connection)
            .unwrap()
            .is_some()
    }

    /// Polls, as these libraries do.
    fn lock(&mut self) {
        let is_locked = eventually(WORK, || self.try_lock(LONG_TTL));
        assert!(is_locked, "the other library never got the lock");
    }

    fn unlock(&mut self) {
        let mut release = redis::cmd("EVAL");
        release.arg(RELEASE).arg(1).arg(self.key).arg(&self.value);
        let released: i64 = release.query(&mut self.connection).unwrap();
        assert_eq!(released, 1, "the other library has lost its lock");
    }
}

fn beside_plain_keys(server: &Server) -> Builder {
    let builder = steady(&server.url()).ttl(LONG_TTL).prefix("");
    builder.compatible_with(OtherLibrary::PlainKeys)
}

fn beside_python(server: &Server) -> Builder {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    builder.compatible_with(OtherLibrary::PythonRedisLock)
}

/// A client that receives notifications.
fn notified(server: &Server, builder: Builder) -> Client {
    let client = builder.build().unwrap();
    let guard = client.mutex("warm").lock().unwrap();
    assert!(
        eventually(SOON, || notified_clients(server) > 0),
        "no notifications"
    );
    guard.unlock().unwrap();
    client
}

/// Starts a thread that waits for the lock, and returns once the server tracks the key for it.
fn wait_for(server: &Server, mutex: Mutex) -> Task<MutexGuard> {
    let before = reads(server);
    let task = Task::start(move || mutex.lock().unwrap());
    // The script reads the taken key once, and then the notification connection does.
    let is_tracked = eventually(SOON, || reads(server) > before + 1);
    assert!(is_tracked, "the waiter does not watch the key");
    task
}

/// A value longer than each of this library.
const LONG: &str = concat!(
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
);

fn keys_of_all_types() -> [(&'static str, &'static [&'static str]); 9] {
    [
        ("like-ours", &["SET", "like-ours", "lh1 5f1c0b1e"]),
        ("text", &["SET", "text", "5f1c0b1e"]),
        ("empty", &["SET", "empty", ""]),
        ("long", &["SET", "long", LONG]),
        ("hash", &["HSET", "hash", "8743c9c0:1", "1"]),
        (
            "zset",
            &[
                "ZADD",
                "zset",
                "1795263780943",
                "token",
                "1795263780943",
                "__write__",
            ],
        ),
        ("list", &["RPUSH", "list", "a"]),
        ("set", &["SADD", "set", "a"]),
        ("stream", &["XADD", "stream", "1-1", "a", "b"]),
    ]
}

#[test]
fn both_libraries_exclude_each_other() {
    const TURNS: usize = 50;
    let server = server();
    let inside = Arc::new(AtomicUsize::new(0));
    let work = |inside: &AtomicUsize, counter: &mut Counter| {
        assert_eq!(
            inside.fetch_add(1, Ordering::SeqCst),
            0,
            "two holders at once"
        );
        counter.raise();
        inside.fetch_sub(1, Ordering::SeqCst);
    };
    let clients = [(); 2].map(|()| beside_plain_keys(&server).build().unwrap());
    let mut tasks = Vec::new();
    for client in clients
        .iter()
        .flat_map(|client| [client.clone(), client.clone()])
    {
        let (inside, mut counter) = (Arc::clone(&inside), Counter::open(&server, "n"));
        tasks.push(Task::start(move || {
            for turn in 0..TURNS {
                let guard = client.mutex("k").lock().unwrap();
                work(&inside, &mut counter);
                match turn % 2 {
                    0 => drop(guard),
                    _ => drop(guard.unlock().unwrap()),
                }
            }
        }));
    }
    for value in ["one", "two"] {
        let (inside, mut counter) = (Arc::clone(&inside), Counter::open(&server, "n"));
        let mut other = Other::new(&server, "k", value);
        tasks.push(Task::start(move || {
            for _ in 0..TURNS {
                other.lock();
                work(&inside, &mut counter);
                other.unlock();
            }
        }));
    }
    let workers = tasks.len();
    for task in tasks {
        task.within(WORK, "turns");
    }
    assert_eq!(Counter::open(&server, "n").read(), workers * TURNS);
    for key in ["~queue:k", "k"] {
        assert_eq!(ask(&server, &["EXISTS", key]), Reply::Int(0), "{key}");
    }
}

#[test]
fn a_release_of_the_other_library_wakes_a_waiter() {
    let server = server();
    let client = notified(&server, beside_plain_keys(&server));
    let mut other = Other::new(&server, "k", "theirs");
    let mut took = Vec::new();
    for _ in 0..15 {
        assert!(other.try_lock(LONG_TTL));
        let waiter = wait_for(&server, client.mutex("k"));
        let before = lock_requests(&server);
        let released = Instant::now();
        other.unlock();
        let guard = waiter.within(SOON, "the wait");
        took.push(released.elapsed());
        // The release of the other library is a script, too.
        assert!(
            lock_requests(&server) - before <= 4,
            "{} requests",
            lock_requests(&server) - before
        );
        guard.unlock().unwrap();
    }
    took.sort();
    // Without a notification, a waiter asks after half a second at the earliest.
    assert!(took[7] < millis(200), "{took:?}");
}

#[test]
fn foreign_keys_of_any_type_are_waited_for_and_left_alone() {
    let server = server();
    let client = notified(&server, beside_plain_keys(&server));
    let keys = keys_of_all_types();
    let dumps =
        || keys.map(|(key, _)| (ask(&server, &["DUMP", key]), ask(&server, &["PTTL", key])));
    for (_, write) in keys {
        ask(&server, write);
    }
    let before = dumps();
    let waiters = keys.map(|(key, _)| {
        let mutex = client.mutex(key);
        Task::start(move || mutex.lock().unwrap())
    });
    let all = keys.len() as u64;
    let start = lock_requests(&server);
    let has_begun = eventually(SOON, || lock_requests(&server) >= start + all);
    assert!(has_begun, "the waiters do not ask");
    // Each waiter asks once in half a second at most, although the keys have no ttl.
    let (start, begun) = (lock_requests(&server), Instant::now());
    assert!(eventually(WORK, || lock_requests(&server) >= start + 4 * all));
    assert!(begun.elapsed() > millis(1200), "{:?}", begun.elapsed());
    assert_eq!(dumps(), before);
    for (key, _) in keys {
        ask(&server, &["DEL", key]);
    }
    for waiter in waiters {
        waiter.within(SOON, "the wait").unlock().unwrap();
    }
}

#[test]
fn calls_that_do_not_wait_find_foreign_keys_taken() {
    let server = server();
    let client = beside_plain_keys(&server).build().unwrap();
    for (key, write) in keys_of_all_types() {
        ask(&server, write);
        let before = ask(&server, &["DUMP", key]);
        let mutex = client.mutex(key);
        assert!(mutex.try_lock().unwrap().is_none(), "{key}");
        assert!(mutex.try_lock_for(millis(1)).unwrap().is_none(), "{key}");
        assert!(client.mutexes([key, "free"]).try_lock().unwrap().is_none());
        assert!(mutex.is_locked().unwrap());
        let error = mutex.force_unlock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.key(), Some(key));
        assert_eq!(ask(&server, &["DUMP", key]), before, "{key}");
        assert_eq!(ask(&server, &["PTTL", key]), Reply::Int(-1), "{key}");
    }
    assert_eq!(ask(&server, &["EXISTS", "free"]), Reply::Int(0));
}

#[test]
fn an_expired_key_of_another_library_is_acquired() {
    let server = server();
    let client = beside_plain_keys(&server).build().unwrap();
    let mut other = Other::new(&server, "k", "theirs");
    let locked = Instant::now();
    assert!(other.try_lock(millis(700)));
    let guard = client.mutex("k").lock().unwrap();
    assert!(locked.elapsed() >= millis(700), "{:?}", locked.elapsed());
    assert!(!other.try_lock(LONG_TTL));
    guard.unlock().unwrap();
    assert!(other.try_lock(LONG_TTL));
}

/// A change of a key that stays taken costs a read, and no request for the lock.
#[test]
fn a_foreign_key_that_changes_often_costs_few_requests() {
    let server = server();
    let client = notified(&server, beside_plain_keys(&server));
    ask(&server, &["SET", "k", "theirs"]);
    let waiter = wait_for(&server, client.mutex("k"));
    let is_tracked = || eventually(SOON, || tracked(&server) > 0);
    let (before, begun) = (lock_requests(&server), Instant::now());
    for n in 0..60 {
        assert!(is_tracked(), "the key is not read again");
        match n % 2 {
            0 => ask(&server, &["SET", "k", &n.to_string()]),
            _ => ask(&server, &["PEXPIRE", "k", "60000"]),
        };
    }
    // The waiter also asks twice a second at most, in case a notification was lost.
    let most = 3 + 2 * begun.elapsed().as_secs();
    let asked = lock_requests(&server) - before;
    assert!(asked <= most, "{asked} requests");
    assert!(!waiter.is_done());
    let before = lock_requests(&server);
    ask(&server, &["DEL", "k"]);
    let guard = waiter.within(SOON, "the wait");
    assert!(lock_requests(&server) - before <= 2);
    guard.unlock().unwrap();
}

/// Each read of a key evicts another key from the table, which looks like a change.
#[test]
fn a_full_tracking_table_causes_few_requests() {
    const WAITERS: u64 = 12;
    let server = Server::builder().arg("tracking-table-max-keys", "4");
    let server = server.start().unwrap();
    let client = notified(&server, beside_plain_keys(&server));
    let before = reads(&server);
    let waiters: Vec<_> = (0..WAITERS)
        .map(|n| {
            let key = format!("k{n}");
            ask(&server, &["SET", &key, "theirs"]);
            let mutex = client.mutex(&key);
            Task::start_blocked(move || mutex.lock().unwrap())
        })
        .collect();
    // One request may serve several waiters, so requests do not show that all of them wait. Reads of their keys do: they
    // never end.
    assert!(eventually(SOON, || reads(&server) >= before + 3 * WAITERS));
    let (asked, looked, begun) = (lock_requests(&server), reads(&server), Instant::now());
    thread::sleep(secs(1));
    let [asked, looked] = [lock_requests(&server) - asked, reads(&server) - looked];
    let lasted = begun.elapsed().as_secs_f64();
    let limit = |each: f64| (WAITERS as f64 * each) as u64;
    println!("{asked} requests and {looked} reads in {lasted:.1} s");
    assert!(asked <= limit(2.0 + 2.0 * lasted), "{asked} requests");
    // Two reads, and then a pause of 75 ms on average. The first pauses are shorter.
    assert!(looked <= limit(8.0 + 27.0 * lasted), "{looked} reads");
    for n in 0..WAITERS {
        ask(&server, &["DEL", &format!("k{n}")]);
    }
    for waiter in waiters {
        waiter.within(SOON, "the wait").unlock().unwrap();
    }
}

/// A release that served a queue would never free the key.
#[test]
fn waiters_do_not_queue_in_redis() {
    let server = server();
    let holder = beside_plain_keys(&server).build().unwrap();
    let client = notified(&server, beside_plain_keys(&server));
    let guard = holder.mutex("k").lock().unwrap();
    let waiter = wait_for(&server, client.mutex("k"));
    assert_eq!(ask(&server, &["EXISTS", "~queue:k"]), Reply::Int(0));
    guard.unlock().unwrap();
    waiter.within(SOON, "the wait").unlock().unwrap();
}

/// Without reports of changes, waiters poll.
#[test]
fn waiters_poll_if_the_server_refuses_tracking() {
    let server = server();
    let user = [
        "ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-client",
    ];
    ask(&server, &user);
    let recorder = Recorder::new();
    let url = format!("redis://limited:secret@127.0.0.1:{}", server.port());
    let builder = steady(&url).prefix("").event_handler(Arc::clone(&recorder));
    let builder = builder.compatible_with(OtherLibrary::PlainKeys);
    let client = builder.build().unwrap();
    ask(&server, &["SET", "k", "theirs"]);
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::NotificationsRefused, "");
    // A waiter that relied on reports would ask twice a second at most.
    let before = lock_requests(&server);
    let polls = || lock_requests(&server) >= before + 40;
    assert!(eventually(SOON, polls), "the waiter does not poll");
    ask(&server, &["DEL", "k"]);
    waiter.within(SOON, "the wait").unlock().unwrap();
}

#[test]
fn a_lock_that_another_library_overwrites_is_lost() {
    let server = server();
    // With one pipeline, the requests come in order.
    let client = beside_plain_keys(&server).pipelines(1).build().unwrap();
    for (key, write) in keys_of_all_types() {
        let guard = client.mutex(key).lock().unwrap();
        let signal = guard.lost_signal();
        let renewed = guard.extend(LONG_TTL);
        assert!(renewed.is_ok(), "{renewed:?}");
        let mut overwrite = redis::pipe();
        overwrite.atomic().cmd("DEL").arg(key);
        let (command, arguments) = write.split_first().unwrap();
        overwrite.cmd(command).arg(arguments);
        let redis = redis::Client::open(server.url()).unwrap();
        overwrite
            .exec(&mut redis.get_connection().unwrap())
            .unwrap();
        let before = ask(&server, &["DUMP", key]);
        assert!(guard.extend(LONG_TTL).unwrap_err().is_lease_lost(), "{key}");
        let reason = lost_within(SOON, &signal);
        assert_eq!(reason, LossReason::TakenOver { by: None }, "{key}");
        // The drop sends a release, which changes nothing.
        drop(guard);
        client.mutex("fence").lock().unwrap().unlock().unwrap();
        assert_eq!(ask(&server, &["DUMP", key]), before, "{key}");
        assert_eq!(ask(&server, &["PTTL", key]), Reply::Int(-1), "{key}");
    }
}

#[test]
fn each_foreign_holder_is_one_event() {
    let server = server();
    let recorder = Recorder::new();
    let builder = beside_plain_keys(&server).event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let mutex = client.mutex("k");
    let events = || recorder.count(What::ForeignHolder, "k");
    assert!(mutex.try_lock().unwrap().is_some());
    assert_eq!(events(), 0);
    for (n, value) in ["a", "b"].into_iter().enumerate() {
        ask(&server, &["SET", "k", value]);
        for _ in 0..3 {
            assert!(mutex.try_lock().unwrap().is_none());
        }
        assert!(mutex.try_lock_for(millis(1)).unwrap().is_none());
        assert_eq!(events(), n + 1);
    }
    // Another client of this library is no foreign holder.
    ask(&server, &["DEL", "k"]);
    let own = beside_plain_keys(&server).build().unwrap();
    let guard = own.mutex("k").lock().unwrap();
    assert!(mutex.try_lock().unwrap().is_none());
    assert_eq!(events(), 2);
    guard.unlock().unwrap();
    // Holders of other types have no value to compare. A grant to this client ends the last one.
    for n in [3, 4] {
        ask(&server, &["HSET", "k", "holder", "1"]);
        for _ in 0..2 {
            assert!(mutex.try_lock().unwrap().is_none());
        }
        assert_eq!(events(), n);
        ask(&server, &["DEL", "k"]);
        mutex.try_lock().unwrap().unwrap().unlock().unwrap();
    }
}

#[test]
fn inspections_show_the_type_and_the_ttl_of_another_library() {
    let server = server();
    let client = beside_plain_keys(&server).build().unwrap();
    let guard = client.mutex("own").lock().unwrap();
    let secret = "5f1c0b1e-secret";
    ask(&server, &["SET", "theirs", secret, "PX", "60000"]);
    ask(&server, &["HSET", "java", secret, "1"]);
    let found = client.mutex("theirs").inspect().unwrap().unwrap();
    let [holder] = found.holders() else {
        panic!("{found:?}");
    };
    let redis_type = "string";
    assert_eq!(holder.kind(), HolderKind::OtherLibrary { redis_type });
    assert_eq!(holder.holder().as_str(), "another-library/string");
    let left = found.expires_in().unwrap();
    assert!((secs(1)..=secs(60)).contains(&left), "{left:?}");
    assert_eq!(
        (found.lease_id(), found.fencing_token(), found.taken()),
        (String::new(), None, 1)
    );
    let java = client.mutex("java").inspect().unwrap().unwrap();
    assert_eq!(
        (java.holder().as_str(), java.expires_in()),
        ("another-library/hash", None)
    );
    assert!(!format!("{found:?} {java:?}").contains("secret"));
    let listed = client.locks("").map(Result::unwrap);
    let mut listed: Vec<(String, String)> = listed
        .map(|found| (found.key().to_owned(), found.info().holder().to_string()))
        .collect();
    listed.sort();
    let own = ("own".to_owned(), client.holder_id().to_string());
    let theirs = |key: &str, holder: &str| (key.to_owned(), holder.to_owned());
    let java = theirs("java", "another-library/hash");
    assert_eq!(
        listed,
        [java, own, theirs("theirs", "another-library/string")]
    );
    guard.unlock().unwrap();
}

#[test]
fn without_the_setting_a_foreign_key_is_an_error_that_names_it() {
    let server = server();
    let client = steady(&server.url()).prefix("").build().unwrap();
    for (key, write) in keys_of_all_types() {
        ask(&server, write);
        for error in [
            client.mutex(key).try_lock().unwrap_err(),
            client.mutex(key).lock().unwrap_err(),
            client.mutex(key).inspect().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
            assert!(
                error.to_string().contains("Builder::compatible_with"),
                "{error}"
            );
        }
    }
    assert_eq!(client.locks("").count(), 0);
}

#[test]
fn clients_with_and_without_the_setting_exclude_each_other() {
    const TURNS: usize = 40;
    let server = server();
    let native = |_| {
        steady(&server.url())
            .ttl(LONG_TTL)
            .prefix("")
            .build()
            .unwrap()
    };
    let clients: Vec<Client> = (0..2)
        .map(native)
        .chain((0..2).map(|_| beside_plain_keys(&server).build().unwrap()))
        .collect();
    let witness = Arc::new(Witness::default());
    let turns: Vec<_> = clients
        .iter()
        .map(|client| witness.start_turns(client.mutex("k"), TURNS))
        .collect();
    for task in turns {
        task.within(WORK, "turns");
    }
    assert_eq!(witness.entries(), clients.len() * TURNS);
}

/// A native client queues in Redis. The release of a client with the setting grants the lock to it.
#[test]
fn a_release_serves_the_queue_of_a_native_client() {
    let server = server();
    let native = steady(&server.url())
        .ttl(LONG_TTL)
        .prefix("")
        .build()
        .unwrap();
    let client = beside_plain_keys(&server).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let mutex = native.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    let queued = || ask(&server, &["ZCARD", "~queue:k"]) == Reply::Int(1);
    assert!(eventually(SOON, queued));
    guard.unlock().unwrap();
    waiter.within(SOON, "the wait").unlock().unwrap();
}

#[test]
fn locks_that_the_other_library_does_not_have_are_unsupported() {
    let server = server();
    for client in [beside_plain_keys(&server), beside_python(&server)] {
        let client = client.build().unwrap();
        let value = b"here".as_slice();
        for error in [
            client.rw_lock("k").try_read().map(drop).unwrap_err(),
            client
                .semaphore("k", 2)
                .try_acquire()
                .map(drop)
                .unwrap_err(),
            client
                .once("k")
                .run(|_| Ok::<_, leasehold::Error>(1))
                .map(drop)
                .unwrap_err(),
            client.election("k").campaign(value).map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("compatible_with"), "{error}");
        }
    }
    assert_eq!(ask(&server, &["DBSIZE"]), Reply::Int(0));
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |builder: Builder, part: &str| {
        let error = builder.build_lazy().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    let url = "redis://127.0.0.1:1";
    let plain = OtherLibrary::PlainKeys;
    let python = OtherLibrary::PythonRedisLock;
    refused(Client::builder(url).compatible_with(plain), "`prefix`");
    refused(
        Client::builder(url).prefix("a:").compatible_with(python),
        "`lock:`",
    );
    refused(
        Client::quorum_builder([url])
            .prefix("")
            .compatible_with(plain),
        "quorum",
    );
    let cluster = Client::builder("redis+cluster://127.0.0.1:1");
    refused(cluster.compatible_with(python), "Cluster");
    for builder in [
        Client::builder(url).prefix("").compatible_with(plain),
        Client::builder(url)
            .prefix("lock:app:")
            .compatible_with(python),
        Client::builder(url).compatible_with(python),
        Client::builder("redis+cluster://127.0.0.1:1")
            .prefix("")
            .compatible_with(plain),
    ] {
        builder.build_lazy().unwrap();
    }
}

/// Without the setting, threads of one client hand a lock off. Beside another library, each release frees the key.
#[test]
fn threads_hand_locks_off_only_if_asked_to() {
    let server = server();
    for (max_hand_offs, is_handed_off) in [(None, false), (Some(100), true)] {
        let mut builder = beside_plain_keys(&server).hand_off_time(SOON);
        if let Some(count) = max_hand_offs {
            builder = builder.max_hand_offs(count);
        }
        let client = builder.build().unwrap();
        let guard = client.mutex("k").lock().unwrap();
        let mutex = client.mutex("k");
        let waiter = Task::start_blocked(move || mutex.lock().unwrap());
        let token = guard.fencing_token();
        drop(guard);
        let next = waiter.within(SOON, "the wait");
        assert_eq!(next.fencing_token() == token + 1, is_handed_off);
        next.unlock().unwrap();
    }
}

/// A waiter of python-redis-lock, which blocks until the lock's signal has an element.
fn python_waiter(server: &Server, name: &str) -> Task<bool> {
    let client = redis::Client::open(server.url()).unwrap();
    let signal = format!("lock-signal:{name}");
    let blocked = || {
        let stats = ask(server, &["INFO", "clients"]);
        let line = stats.as_text().and_then(|text| {
            let line = text
                .lines()
                .find(|line| line.starts_with("blocked_clients:"))?;
            line.split(':').nth(1)?.trim().parse::<u64>().ok()
        });
        line.unwrap()
    };
    let before = blocked();
    let task = Task::start(move || {
        let mut connection = client.get_connection_with_timeout(SOON).unwrap();
        let mut wait = redis::cmd("BLPOP");
        wait.arg(signal).arg(30);
        let woken: Option<(String, String)> = wait.query(&mut connection).unwrap();
        woken.is_some_and(|(_, element)| element == "1")
    });
    assert!(
        eventually(SOON, || blocked() > before),
        "the waiter does not block"
    );
    task
}

#[test]
fn each_release_wakes_a_waiter_of_python_redis_lock() {
    let server = server();
    let client = beside_python(&server).build().unwrap();
    let woken = |what: &str, name: &'static str, release: &mut dyn FnMut()| {
        // An earlier release may have left its signal.
        ask(&server, &["DEL", &format!("lock-signal:{name}")]);
        let waiter = python_waiter(&server, name);
        release();
        assert!(waiter.within(SOON, what), "{what}");
        let key = format!("lock:{name}");
        assert_eq!(ask(&server, &["EXISTS", &key]), Reply::Int(0), "{what}");
    };
    let mut guard = Some(client.mutex("a").lock().unwrap());
    woken("unlock", "a", &mut || {
        drop(guard.take().unwrap().unlock().unwrap())
    });
    let mut guard = Some(client.mutex("a").lock().unwrap());
    woken("drop", "a", &mut || drop(guard.take()));
    woken("a closure", "a", &mut || {
        client.with_lock("a", || ()).unwrap()
    });
    for name in ["a", "b"] {
        let mut set = Some(client.mutexes(["a", "b"]).lock().unwrap());
        woken("a set", name, &mut || {
            drop(set.take().unwrap().unlock().unwrap())
        });
        let mut set = Some(client.mutexes(["a", "b"]).lock().unwrap());
        woken("a dropped set", name, &mut || drop(set.take()));
    }
    let operator = beside_python(&server).build().unwrap();
    let guard = client.mutex("a").lock().unwrap();
    woken("force_unlock", "a", &mut || {
        drop(operator.mutex("a").force_unlock().unwrap().unwrap())
    });
    drop(guard);
    // The first attempt of this release fails, and the background repeats it on a new connection.
    let mut guard = Some(client.mutex("a").lock().unwrap());
    kill_connections(&server);
    woken("a late release", "a", &mut || drop(guard.take()));
}

#[test]
fn signals_live_for_a_second_and_are_not_taken_by_this_library() {
    let server = server();
    let client = beside_python(&server).build().unwrap();
    let other = Other::new(&server, "lock:a", "theirs");
    let mut connection = other.connection;
    let mut set = redis::cmd("SET");
    set.arg("lock:a")
        .arg("theirs")
        .arg("NX")
        .exec(&mut connection)
        .unwrap();
    let waiter = wait_for(&server, client.mutex("a"));
    let mut release = redis::cmd("EVAL");
    release
        .arg(RELEASE_OF_PYTHON)
        .arg(2)
        .arg("lock:a")
        .arg("lock-signal:a")
        .arg("theirs")
        .arg(60_000);
    let released: i64 = release.query(&mut connection).unwrap();
    assert_eq!(released, 0);
    let guard = waiter.within(SOON, "the wait");
    assert_eq!(
        ask(&server, &["LLEN", "lock-signal:a"]),
        Reply::Int(1),
        "the signal is for Python"
    );
    assert_eq!(server.calls("blpop").unwrap(), 0);
    guard.unlock().unwrap();
    // Our release has replaced the signal, as Python's does.
    let left = ask(&server, &["PTTL", "lock-signal:a"]).as_int().unwrap();
    assert!((1..=1000).contains(&left), "{left}");
}

/// A lock that stays taken after its release wakes no waiter of the other library.
#[test]
fn a_release_that_does_not_free_the_key_sends_no_signal() {
    let server = server();
    let client = beside_python(&server).build().unwrap();
    let lost = client.mutex("lost").lock().unwrap();
    ask(&server, &["SET", "lock:lost", "theirs"]);
    assert!(lost.unlock().unwrap_err().is_lease_lost());
    assert_eq!(ask(&server, &["EXISTS", "lock:lost"]), Reply::Int(1));
    assert_eq!(ask(&server, &["EXISTS", "lock-signal:lost"]), Reply::Int(0));
    // A key with `min_hold` would end by its ttl, and wake nobody.
    let kept = client.mutex("kept").min_hold(secs(1)).lock();
    assert_eq!(kept.unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_release_after_the_end_of_the_ttl_wakes_a_waiter_of_python_redis_lock() {
    let server = server();
    let client = beside_python(&server).build().unwrap();
    let guard = client.mutex("a").lock().unwrap();
    let waiter = python_waiter(&server, "a");
    // As if the key had expired.
    ask(&server, &["DEL", "lock:a"]);
    assert!(guard.unlock().unwrap_err().is_lease_lost());
    assert!(waiter.within(SOON, "the wait"));
}

#[test]
fn a_refused_signal_is_an_error_of_the_release() {
    let server = server();
    let client = beside_python(&server).build().unwrap();
    let guard = client.mutex("a").lock().unwrap();
    ask(&server, &["ACL", "SETUSER", "default", "-lpush"]);
    let error = crate::support::unconfirmed(guard.unlock());
    assert!(error.to_string().contains("lpush"), "{error}");
    assert_eq!(ask(&server, &["EXISTS", "lock:a"]), Reply::Int(0));
    // One call releases both keys of a set, and is repeated.
    let client = beside_python(&server).pipelines(1).build().unwrap();
    let set = client.mutexes(["b", "c"]).lock().unwrap();
    let error = crate::support::unconfirmed(set.unlock());
    assert!(error.to_string().contains("lpush"), "{error}");
    for name in ["b", "c"] {
        let key = format!("lock:{name}");
        assert_eq!(ask(&server, &["EXISTS", &key]), Reply::Int(0), "{name}");
    }
    ask(&server, &["ACL", "SETUSER", "default", "+lpush"]);
    let pushes = || server.calls("lpush").unwrap();
    let before = pushes();
    assert!(
        eventually(SOON, || pushes() >= before + 2),
        "the release is not repeated"
    );
}

#[test]
fn a_memory_store_has_foreign_keys_for_tests() {
    let memory = MemoryStore::new();
    let builder = memory.builder().prefix("").ttl(LONG_TTL);
    let client = builder
        .compatible_with(OtherLibrary::PlainKeys)
        .build()
        .unwrap();
    let native = memory.builder().prefix("").build().unwrap();
    memory.set_foreign("k", None);
    let mutex = client.mutex("k");
    assert!(mutex.try_lock().unwrap().is_none());
    assert_eq!(
        native.mutex("k").try_lock().unwrap_err().kind(),
        ErrorKind::Protocol
    );
    let found = mutex.inspect().unwrap().unwrap();
    assert_eq!(
        (found.holder().as_str(), found.expires_in()),
        ("another-library/hash", None)
    );
    assert_eq!(
        mutex.force_unlock().unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    assert_eq!(
        client.rw_lock("k").try_read().unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    let waiting = mutex.clone();
    let waiter = Task::start_blocked(move || waiting.lock().unwrap());
    memory.advance(secs(60));
    assert!(!waiter.is_done());
    assert!(memory.delete("k"));
    let guard = waiter.within(SOON, "the wait");
    memory.set_foreign("k", None);
    assert_eq!(
        lost_within(SOON, &guard.lost_signal()),
        LossReason::TakenOver { by: None }
    );
}

#[test]
fn on_a_cluster_foreign_keys_are_waited_for() {
    let cluster = PooledCluster::take();
    let cluster = cluster.get();
    let builder = steady(&cluster.url()).ttl(LONG_TTL).prefix("");
    let client = builder
        .compatible_with(OtherLibrary::PlainKeys)
        .build()
        .unwrap();
    let keys = ["a", "b", "c", "d", "e", "f"];
    let node_of = |key: &str| &cluster.nodes()[cluster.master_of_key(key)];
    for key in keys {
        ask(node_of(key), &["SET", key, ""]);
    }
    assert!(client.mutexes(keys).try_lock().unwrap().is_none());
    let waiters = keys.map(|key| {
        let mutex = client.mutex(key);
        Task::start_blocked(move || mutex.lock().unwrap())
    });
    let listens = |key| notified_clients(node_of(key)) > 0;
    assert!(eventually(SOON, || keys.into_iter().all(listens)));
    let masters = &cluster.nodes()[..3];
    let asked = || masters.iter().map(lock_requests).sum::<u64>();
    // Each waiter asks once in half a second at most, since the nodes report changes.
    let (before, begun) = (asked(), Instant::now());
    let most = 5 * keys.len() as u64;
    assert!(eventually(WORK, || asked() >= before + most));
    assert!(begun.elapsed() > millis(1200), "{:?}", begun.elapsed());
    for key in keys {
        ask(node_of(key), &["DEL", key]);
    }
    let guards = waiters.map(|waiter| waiter.within(SOON, "the wait"));
    for key in keys {
        let set = ask(node_of(key), &["SET", key, "theirs", "NX"]);
        assert_eq!(set, Reply::Nil, "{key}");
    }
    drop(guards);
}
