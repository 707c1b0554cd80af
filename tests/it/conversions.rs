//! Upgrades and downgrades while the network or Redis fails. The caller then holds nothing, the client reports no loss,
//! and the key is free after the ttl at the latest. `conformance::rw_lock` tests the behaviour on every kind of store.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::{Client, Error, ErrorKind, RwLockReadGuard, RwLockWriteGuard};
use leasehold_testbed::terms::{Share, Term, TermLog};
use leasehold_testbed::{Proxy, Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, assert_all_become_free, builder, held_keys,
    in_redis, secs, server,
};

enum Held {
    Reader(RwLockReadGuard),
    Writer(RwLockWriteGuard),
}

impl Held {
    /// A reader if `upgrades`, otherwise a writer.
    fn new(client: &Client, key: &str, upgrades: bool) -> Self {
        let lock = client.rw_lock(key);
        match upgrades {
            true => Self::Reader(lock.read().unwrap()),
            false => Self::Writer(lock.write().unwrap()),
        }
    }

    fn convert(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Reader(reader) => Self::Writer(reader.try_upgrade()?.expect("one reader")),
            Self::Writer(writer) => Self::Reader(writer.downgrade()?),
        })
    }

    fn unlock(self) {
        match self {
            Self::Reader(reader) => reader.unlock().unwrap(),
            Self::Writer(writer) => writer.unlock().unwrap(),
        };
    }
}

/// A connected client behind the proxy, with one pipeline.
fn behind(proxy: &Proxy, command_timeout: Duration) -> (Client, Arc<Recorder>) {
    let recorder = Recorder::new();
    let builder = builder(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let builder = builder.event_handler(Arc::clone(&recorder));
    let client = builder.command_timeout(command_timeout).build().unwrap();
    assert!(eventually(SOON, || client.mutex("warm").inspect().is_ok()));
    (client, recorder)
}

fn is_free(server: &Server) -> bool {
    held_keys(server).is_empty()
}

#[test]
fn conversions_cut_anywhere_leave_nothing_held() {
    let server = server();
    for upgrades in [true, false] {
        let length = {
            let proxy = Proxy::start(server.port()).unwrap();
            let (client, _) = behind(&proxy, SOON);
            let held = Held::new(&client, "key-000", upgrades);
            proxy.hold_requests(true);
            let task = Task::start(move || held.convert());
            assert!(eventually(SOON, || proxy.held_bytes() > 0));
            let length = proxy.held_bytes();
            proxy.hold_requests(false);
            task.within(SOON, "the conversion").unwrap().unlock();
            length
        };
        assert!((100..1_000).contains(&length), "{length} bytes");
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while let n @ 0.. = 5 * next.fetch_add(1, Ordering::Relaxed)
                        && n <= length + 4
                    {
                        let proxy = Proxy::start(server.port()).unwrap();
                        let (client, recorder) = behind(&proxy, SOON);
                        let held = Held::new(&client, &format!("key-{n:03}"), upgrades);
                        proxy.cut_after(Some(n.min(length)));
                        match held.convert() {
                            Ok(held) => held.unlock(),
                            Err(error) => assert!(error.is_unavailable(), "{n}: {error}"),
                        }
                        client.shutdown(SOON).unwrap();
                        assert_eq!(recorder.count(What::Lost, &format!("key-{n:03}")), 0);
                    }
                });
            }
        });
        assert!(
            eventually(SOON, || is_free(&server)),
            "{:?}",
            held_keys(&server)
        );
    }
}

/// Redis gets the request, or sends its reply, after the caller has stopped waiting.
#[test]
fn a_late_conversion_is_undone() {
    for (upgrades, is_carried_out) in [(true, false), (true, true), (false, false), (false, true)] {
        let server = server();
        let proxy = Proxy::start(server.port()).unwrap();
        let (late, recorder) = behind(&proxy, TIMEOUT);
        let held = Held::new(&late, "k", upgrades);
        match is_carried_out {
            true => proxy.hold_replies(true),
            false => proxy.hold_requests(true),
        }
        let error = held.convert().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(error.key(), Some("k"));
        proxy.hold_requests(false);
        proxy.hold_replies(false);
        assert_all_become_free(&server);
        late.shutdown(SOON).unwrap();
        assert_eq!(recorder.count(What::Lost, "k"), 0);
    }
}

/// Another client has got the lock before Redis gets the late request and the releases of both leases.
#[test]
fn a_late_conversion_spares_the_next_holder() {
    for (upgrades, next_reads) in [(true, true), (true, false), (false, true), (false, false)] {
        let server = server();
        let proxy = Proxy::start(server.port()).unwrap();
        let (late, _) = behind(&proxy, TIMEOUT);
        let other = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
        let held = Held::new(&late, "k", upgrades);
        proxy.hold_requests(true);
        assert!(held.convert().is_err());
        ask(&server, &["DEL", &in_redis("k")]);
        let next = Held::new(&other, "k", next_reads);
        proxy.hold_requests(false);
        assert!(eventually(SOON, || proxy.held_bytes() == 0));
        // The shutdown waits until all repeated releases have been carried out.
        late.shutdown(secs(5)).unwrap();
        next.convert().unwrap().unlock();
        assert!(is_free(&server));
    }
}

/// A lost lease is not converted, and the error names the loss.
#[test]
fn a_lost_lock_is_not_converted() {
    let server = server();
    for upgrades in [true, false] {
        let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
        let held = Held::new(&client, "k", upgrades);
        ask(&server, &["DEL", &in_redis("k")]);
        let error = held.convert().map(drop).unwrap_err();
        assert!(error.is_lease_lost(), "{error}");
        assert!(is_free(&server));
    }
}

/// Another program has removed the ttls of the keys. The next request of each lease sets a ttl that ends no earlier than
/// the validity on which the guard relies.
#[test]
fn a_removed_ttl_comes_back_whole() {
    let server = server();
    let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let writer = client.rw_lock("k").fixed_ttl(LONG_TTL).write().unwrap();
    let mutex = client.mutex("m").lock().unwrap();
    let set = client.mutexes(["a", "b"]).lock().unwrap();
    let keys = ["k", "m", "a", "b"];
    for key in keys {
        assert_eq!(ask(&server, &["PERSIST", &in_redis(key)]), Reply::Int(1));
    }
    let reader = writer.downgrade().unwrap();
    mutex.extend(secs(1)).unwrap();
    set.extend(secs(1)).unwrap();
    let left = keys.map(|key| ask(&server, &["PTTL", &in_redis(key)]).as_int().unwrap());
    let set_left = set.remaining();
    let relied = [reader.remaining(), mutex.remaining(), set_left, set_left];
    for ((key, left), relied) in keys.iter().zip(left).zip(relied) {
        assert!(relied > LONG_TTL / 2, "{key}: {relied:?}");
        // PTTL rounds.
        assert!(
            left + 2 >= relied.as_millis() as i64,
            "{key}: {left}, {relied:?}"
        );
    }
}

/// 16 clients read, write, upgrade, downgrade and take permits at the same time. Holders that exclude each other never
/// overlap.
#[test]
fn a_mixed_load_has_no_overlap() {
    const CLIENTS: u64 = 16;
    const TURNS: u64 = 40;
    let server = server();
    let logs = Arc::new([(); 2].map(|()| TermLog::start()));
    let workers: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let client = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
            let logs = Arc::clone(&logs);
            Task::start(move || (0..TURNS).for_each(|turn| one_turn(&client, &logs, 7 * n + turn)))
        })
        .collect();
    for worker in workers {
        worker.within(12 * SOON, "its turns");
    }
    for log in &*logs {
        assert!(log.terms().len() as u64 >= CLIENTS * TURNS / 4);
        assert_eq!(log.findings(), [""; 0]);
    }
    assert_all_become_free(&server);
}

/// Takes a lock in one of several ways, and logs the time in which it was certainly held.
fn one_turn(client: &Client, [readers, permits]: &[TermLog; 2], number: u64) {
    let lock = client.rw_lock("k");
    let asked = readers.now();
    let add = |log: &TermLog, share, from| {
        let (queued, to) = (None, log.now());
        log.add(Term {
            share,
            asked,
            queued,
            from,
            to,
        });
    };
    match number % 8 {
        0 | 1 => {
            let guard = lock.read().unwrap();
            let from = readers.now();
            add(readers, Share::Reader, from);
            guard.unlock().unwrap();
        }
        2 => {
            let reader = lock.read().unwrap();
            let from = readers.now();
            thread::yield_now();
            add(readers, Share::Reader, from);
            if let Ok(writer) = reader.try_upgrade().unwrap() {
                let from = readers.now();
                thread::yield_now();
                add(readers, Share::Alone, from);
                writer.unlock().unwrap();
            }
        }
        3 => {
            let writer = lock.write().unwrap();
            let from = readers.now();
            thread::yield_now();
            add(readers, Share::Alone, from);
            let reader = writer.downgrade().unwrap();
            let from = readers.now();
            thread::yield_now();
            add(readers, Share::Reader, from);
            reader.unlock().unwrap();
        }
        4 => {
            let guard = client.mutex("k").lock().unwrap();
            let from = readers.now();
            add(readers, Share::Alone, from);
            guard.unlock().unwrap();
        }
        5 => {
            let guard = client.mutex("s").lock().unwrap();
            let from = permits.now();
            add(permits, Share::Alone, from);
            guard.unlock().unwrap();
        }
        _ => {
            let (weight, limit) = (1 + (number % 3) as u32, 4);
            let permit = client
                .semaphore("s", limit)
                .weight(weight)
                .acquire()
                .unwrap();
            let from = permits.now();
            thread::yield_now();
            add(permits, Share::Permits { weight, limit }, from);
            permit.unlock().unwrap();
        }
    }
}
