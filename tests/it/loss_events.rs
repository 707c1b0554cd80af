//! Each lock that a call reports as lost is one event `lost`, however the client learns of the loss. The server sends no
//! notifications and no renewal is due, so the call itself finds the loss, as it does for a lock that is held briefly.

use std::sync::Arc;
use std::sync::mpsc::channel;

use leasehold::{Client, Error, LossReason};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, What, ask, in_redis, lost_within, millis, server, tracked, value_of,
};
use crate::transactions::silent_server;

const OTHER: &str = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 other/1/0";

/// A way to lose the lock `k`.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Deleted,
    TakenOver,
    /// The key expires in Redis before its validity ends.
    ExpiredInRedis,
    /// The validity of a fixed ttl ends.
    ValidityEnded,
}

impl Cause {
    const ALL: [Self; 4] = [
        Self::Deleted,
        Self::TakenOver,
        Self::ExpiredInRedis,
        Self::ValidityEnded,
    ];

    fn mutex(self, client: &Client) -> leasehold::Mutex {
        match self {
            Self::ValidityEnded => client.mutex("k").fixed_ttl(millis(100)),
            _ => client.mutex("k"),
        }
    }

    fn lose(self, server: &Server) {
        let key = in_redis("k");
        match self {
            Self::Deleted => drop(ask(server, &["DEL", &key])),
            Self::TakenOver => drop(ask(server, &["SET", &key, OTHER, "PX", "60000"])),
            Self::ExpiredInRedis => {
                ask(server, &["PEXPIRE", &key, "1"]);
                assert!(eventually(SOON, || value_of(server, "k").is_none()));
            }
            Self::ValidityEnded => {
                assert!(eventually(SOON, || value_of(server, "k").is_none()));
            }
        }
    }
}

/// Acquires the lock, calls the closure, which loses the lock, and returns the error of a call that finds the loss.
type Call = fn(leasehold::Mutex, &dyn Fn()) -> Result<(), Error>;

const CALLS: [(&str, Call); 14] = [
    ("unlock", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        guard.unlock().map(drop)
    }),
    ("with", |mutex, lose| mutex.with(|_| lose())),
    ("try_with", |mutex, lose| {
        mutex.try_with(|_| lose()).map(drop)
    }),
    ("with, after the loss was seen", |mutex, lose| {
        mutex.with(|guard| {
            lose();
            let _ = guard.extend(LONG_TTL);
            assert!(guard.is_lost());
        })
    }),
    ("check after extend", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        let extended = guard.extend(LONG_TTL);
        assert!(guard.check().is_err());
        extended
    }),
    ("extend, then unlock", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        guard.extend(LONG_TTL).unwrap_err();
        guard.unlock().map(drop)
    }),
    ("into_ticket", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        guard.into_ticket().map(drop)
    }),
    ("transaction", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        guard.transaction(|_, _| Ok(())).map(drop)
    }),
    ("transaction whose closure loses the lock", |mutex, lose| {
        let guard = mutex.lock()?;
        let done = guard.transaction(|_, pipe| {
            lose();
            pipe.set("data", 1);
            Ok(())
        });
        done.map(drop)
    }),
    ("try_transaction", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        guard.try_transaction(|_, _| Ok::<_, Error>(())).map(drop)
    }),
    ("unlock of a reentrant lock", |mutex, lose| {
        let mutex = mutex.reentrant();
        let (outer, inner) = (mutex.lock()?, mutex.lock()?);
        lose();
        let _ = inner.unlock();
        outer.unlock().map(drop)
    }),
    ("with of a reentrant lock", |mutex, lose| {
        let mutex = mutex.reentrant();
        mutex.with(|_| {
            let _ = mutex.with(|_| lose());
        })
    }),
    ("lock of a lost reentrant lock", |mutex, lose| {
        let mutex = mutex.reentrant();
        let outer = mutex.lock()?;
        lose();
        let _ = outer.extend(LONG_TTL);
        mutex.lock().map(drop)
    }),
    ("threads that ask together", |mutex, lose| {
        let guard = mutex.lock()?;
        lose();
        std::thread::scope(|scope| {
            let calls = [(); 3].map(|()| scope.spawn(|| guard.extend(LONG_TTL)));
            let lost = calls.map(|call| call.join().unwrap());
            assert!(lost.iter().all(Result::is_err));
        });
        guard.unlock().map(drop)
    }),
];

fn client(server: &Server) -> (Client, Arc<Recorder>) {
    let recorder = Recorder::new();
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    (client, recorder)
}

/// The events `lost` of the lock after the client's end. The shutdown waits for all replies and callbacks.
fn losses(client: &Client, recorder: &Recorder) -> usize {
    client.shutdown(SOON).unwrap();
    recorder.count(What::Lost, "k")
}

#[test]
fn each_loss_that_a_call_returns_is_one_event() {
    let server = silent_server();
    for cause in Cause::ALL {
        for (name, call) in CALLS {
            let (client, recorder) = client(&server);
            let error = call(cause.mutex(&client), &|| cause.lose(&server)).unwrap_err();
            assert!(error.is_lease_lost(), "{name}, {cause:?}: {error}");
            assert_eq!(losses(&client, &recorder), 1, "{name}, {cause:?}");
            ask(&server, &["DEL", &in_redis("k")]);
        }
    }
}

/// With notifications, the watchdog and the calls find the loss at about the same time.
#[test]
fn a_loss_that_two_threads_find_is_one_event() {
    let server = server();
    for (name, call) in CALLS {
        let (client, recorder) = client(&server);
        let lose = || {
            assert!(eventually(SOON, || tracked(&server) > 0));
            Cause::Deleted.lose(&server);
        };
        let error = call(client.mutex("k"), &lose).unwrap_err();
        assert!(error.is_lease_lost(), "{name}: {error}");
        assert_eq!(losses(&client, &recorder), 1, "{name}");
    }
}

#[test]
fn a_dropped_guard_whose_lock_was_lost_is_one_event() {
    let server = silent_server();
    type Dropping = fn(leasehold::Mutex, &dyn Fn());
    let drops: [(&str, Dropping); 3] = [
        ("drop", |mutex, lose| {
            let guard = mutex.lock().unwrap();
            lose();
            drop(guard);
        }),
        ("drop after the loss was seen", |mutex, lose| {
            let guard = mutex.lock().unwrap();
            lose();
            guard.extend(LONG_TTL).unwrap_err();
            drop(guard);
        }),
        ("drop of reentrant guards", |mutex, lose| {
            let mutex = mutex.reentrant();
            let guards = [(); 2].map(|()| mutex.lock().unwrap());
            lose();
            drop(guards);
        }),
    ];
    for cause in Cause::ALL {
        for (name, drops) in drops {
            let (client, recorder) = client(&server);
            drops(cause.mutex(&client), &|| cause.lose(&server));
            assert_eq!(losses(&client, &recorder), 1, "{name}, {cause:?}");
            ask(&server, &["DEL", &in_redis("k")]);
        }
    }
    // A lock that was held until its end is no loss.
    let (client, recorder) = client(&server);
    drop(client.mutex("k").lock().unwrap());
    client.with_lock("k", || ()).unwrap();
    client.mutex("k").lock().unwrap().unlock().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    drop(client.adopt(&guard.into_ticket().unwrap()).unwrap());
    assert_eq!(losses(&client, &recorder), 0);
}

#[test]
fn an_unlock_that_finds_a_loss_notifies_every_listener() {
    let server = silent_server();
    let (client, recorder) = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let signal = guard.lost_signal();
    let (called, calls) = channel();
    guard.on_lost(move |reason| called.send(reason).unwrap());
    Cause::TakenOver.lose(&server);
    let error = guard.unlock().unwrap_err();
    let reason = error.loss_reason().unwrap().clone();
    let LossReason::TakenOver { by: Some(by) } = &reason else {
        panic!("{reason:?}");
    };
    assert_eq!(by.as_str(), "other/1/0");
    assert_eq!(lost_within(SOON, &signal), reason);
    assert_eq!(calls.recv_timeout(SOON), Ok(reason));
    assert_eq!(losses(&client, &recorder), 1);
    assert_eq!(
        (signal.try_recv().ok(), calls.try_recv().ok()),
        (None, None)
    );
}
