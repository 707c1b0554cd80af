//! Models of waits. Threads of one or two clients want one lock, hand it off, stop waiting, lose it, or are ended by a
//! shutdown.

pub mod cancellation;
pub mod notifications;
pub mod shares;
pub mod transfer;

use std::sync::Arc;
use std::time::Duration;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::queue::GrantOf;
use super::*;
use crate::command::QueueMode;
use crate::report::error::ErrorKind;
use crate::report::loss::LossReason;
use crate::store::model::{Direct, Server};
use crate::util::clock::Clock;
use crate::util::id::{HolderId, LeaseId};
use crate::util::sync::model::{chance, check, choice, pass};
use crate::util::sync::{Mutex, Ordering};
use crate::watchdog::Scheduler;

const RUNS: usize = 1000;
const SECOND: Duration = Duration::from_secs(1);
const OPTIONS: Options = Options::USUAL;

/// A client without the threads of its watchdog: the models hold no lock until its renewal.
struct Client {
    store: Arc<Direct>,
    watchdog: Arc<Watchdog>,
    handler: NotificationHandler,
    acquirer: Acquirer,
    queues: Arc<LocalQueues>,
}

impl Client {
    fn new(server: &Server, queue_mode: QueueMode) -> Self {
        let store = Arc::new(Direct::new(server, queue_mode));
        let (callbacks, _deliver) = CallbackExecutor::for_model();
        let scheduler = Scheduler::new(Clock::default());
        let backend = Backend::new(store.clone());
        let watchdog = Watchdog::new(scheduler, &backend, callbacks.clone(), SECOND);
        let queues = Arc::new(LocalQueues::new(Clock::default()));
        let handler = NotificationHandler::new(
            HolderId::of_text("host/1/a"),
            backend.clone(),
            watchdog.clone(),
            &callbacks,
            queues.clone(),
            OPTIONS.ttl,
        );
        let hand_offs = HandOffs {
            count: 2,
            time: SECOND,
        };
        let acquirer = Acquirer::new(
            &backend,
            watchdog.clone(),
            callbacks,
            queues.clone(),
            SECOND,
            5 * SECOND,
            hand_offs,
        );
        Self {
            store,
            watchdog,
            handler,
            acquirer,
            queues,
        }
    }

    /// Releases the lease, at random as a dropped guard or as `unlock`. `is_there` says whether the lease's key still
    /// exists.
    fn release(&self, lease: &Arc<Lease>, is_there: bool) {
        if chance(2) {
            self.acquirer.release(lease, ONLY_GUARD);
            return;
        }
        let done = self.acquirer.release_confirmed(lease, ONLY_GUARD);
        let was_lost = lease.loss(MonotonicTime::now()).is_some();
        let is_released = done.is_ok_and(|released| released.is_confirmed());
        assert!(
            is_released || was_lost || !is_there,
            "the release did not find the lease"
        );
    }
}

/// The work that a lock protects.
struct Work {
    request: LockRequest,
    inside: AtomicU32,
    last_token: Mutex<u64>,
    /// The lease whose key another user deletes while a thread holds it. Then another holder may work at the same time.
    deleted: Option<LeaseId>,
}

impl Work {
    fn new() -> Self {
        Self {
            request: request(),
            inside: AtomicU32::new(0),
            last_token: Mutex::default(),
            deleted: None,
        }
    }

    /// Waits for the lock and does the work. Returns false if the lock was not granted.
    fn run(&self, client: &Client, until: Until) -> bool {
        let Some(lease) = client.acquirer.acquire(&self.request, until).unwrap() else {
            return false;
        };
        if self.deleted == Some(lease.grant().id) {
            client.release(&lease, false);
        } else {
            self.hold(client, &lease);
        }
        true
    }

    /// Does the work under `lease`, and releases the lease.
    fn hold(&self, client: &Client, lease: &Arc<Lease>) {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two inside");
        let token = lease.grant().token;
        let before = std::mem::replace(&mut *self.last_token.lock(), token);
        assert!(before < token, "{token} after {before}");
        assert!(lease.loss(MonotonicTime::now()).is_none());
        assert_eq!(self.inside.fetch_sub(1, Ordering::SeqCst), 1);
        client.release(lease, true);
    }
}

fn request() -> LockRequest {
    LockRequest {
        key: Key::new("", "k", 16).unwrap(),
        options: OPTIONS,
        check: None,
        cancel: None,
    }
}

/// Runs `threads`, and for each of `clients` a thread that delivers its notifications.
fn run(server: &Server, clients: &[Client], threads: &[&(dyn Fn() + Sync)]) {
    thread::scope(|scope| {
        for client in clients {
            scope.spawn(|| client.store.deliver_all(&client.handler));
        }
        let threads: Vec<_> = threads.iter().map(|run| scope.spawn(run)).collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        server.end();
    });
}

fn assert_nothing_is_left(server: &Server, clients: &[Client]) {
    assert_eq!(server.holder(&request().key), None, "no lease is left");
    for client in clients {
        assert_eq!(client.queues.queues(), 0, "no local queue is left");
    }
}

#[test]
fn model_threads_of_one_client_take_turns() {
    check(RUNS, || {
        let server = Server::new();
        // The clock stands still, so a waiter that misses its wake-up never returns.
        let queue_mode = [QueueMode::Notified, QueueMode::Polling][choice(2)];
        let clients = [Client::new(&server, queue_mode)];
        let work = Work::new();
        let twice = || (0..2).for_each(|_| assert!(work.run(&clients[0], Until::Forever)));
        run(&server, &clients, &[&twice, &twice, &twice]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_threads_of_two_clients_take_turns() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let work = Work::new();
        let one = || (0..2).for_each(|_| assert!(work.run(&clients[0], Until::Forever)));
        let other = || (0..2).for_each(|_| assert!(work.run(&clients[1], Until::Forever)));
        run(&server, &clients, &[&one, &one, &other, &other]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_a_leaving_waiter_wakes_the_next_one() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let work = Work::new();
        let soon = MonotonicTime::now().after(SECOND);
        let waits = |client: usize, until: Until| {
            let (work, clients) = (&work, &clients);
            move || {
                work.run(&clients[client], until);
            }
        };
        let gives_up = waits(0, Until::At(soon));
        let tries = waits(0, Until::Now);
        let other = waits(1, Until::At(soon));
        let stays = || assert!(work.run(&clients[0], Until::Forever));
        let clock = || pass(2 * SECOND);
        run(
            &server,
            &clients,
            &[&gives_up, &tries, &stays, &other, &clock],
        );
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_hand_off_to_a_leaving_waiter_goes_on() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        let work = Work::new();
        let lease = client.acquirer.acquire(&work.request, Until::Forever);
        let lease = lease.unwrap().unwrap();
        let until = Until::At(MonotonicTime::now().after(SECOND));
        let gives_up = || {
            work.run(client, until);
        };
        let stays = || assert!(work.run(client, Until::Forever));
        let releases = || {
            client.acquirer.release(&lease, ONLY_GUARD);
        };
        let clock = || pass(2 * SECOND);
        run(&server, &clients, &[&gives_up, &releases, &stays, &clock]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_loss_wakes_the_next_waiter() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        let request = request();
        let lease = client.acquirer.acquire(&request, Until::Forever);
        let lease = lease.unwrap().unwrap();
        let work = Work {
            deleted: Some(lease.grant().id),
            ..Work::new()
        };
        let waits = || assert!(work.run(client, Until::Forever));
        let tries = || {
            work.run(client, Until::Now);
        };
        let loses = || {
            server.take_back(&request.key, lease.grant().id);
            lease.lose(MonotonicTime::now(), LossReason::Deleted);
        };
        // The next waiters get the lock, whether or not the lost lease is released.
        let releases = || {
            client.acquirer.release(&lease, ONLY_GUARD);
        };
        let late = chance(2);
        let meanwhile = || {
            if !late {
                releases();
            }
        };
        run(
            &server,
            &clients,
            &[&waits, &tries, &waits, &loses, &meanwhile],
        );
        if late {
            releases();
        }
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_shutdown_ends_all_waits() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let (key, other) = (request().key, LeaseId::random());
        if chance(2) {
            server.give(&key, other, MonotonicTime::now().after(OPTIONS.ttl));
        }
        let waits = || match clients[0].acquirer.acquire(&request(), Until::Forever) {
            Ok(lease) => clients[0].release(&lease.unwrap(), true),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Shutdown),
        };
        let end = || {
            clients[0].watchdog.stop();
            clients[0].acquirer.end();
        };
        let late = chance(2);
        let meanwhile = || {
            if !late {
                server.take_back(&key, other);
            }
        };
        run(&server, &clients, &[&waits, &waits, &end, &meanwhile]);
        server.take_back(&key, other);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_sleep_ends_at_shutdown() {
    check(RUNS, || {
        let shutdown = Shutdown::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                let error = shutdown.rest(SECOND).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shutdown);
            });
            shutdown.close();
        });
    });
}
