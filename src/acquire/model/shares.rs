//! Models of readers of one client that share a lease.

use super::*;
use crate::command::Mode;
use crate::lease::Grant;

const READ: Options = Options {
    mode: Mode::Read,
    ..OPTIONS
};
const LIMITS: HandOffs = HandOffs {
    count: 2,
    time: SECOND,
};

/// The readers of one client, whose leases Redis grants at once.
struct Readers {
    queues: LocalQueues,
    callbacks: Arc<CallbackExecutor>,
    key: Key,
    /// The leases that were granted and not released.
    unreleased: Mutex<Vec<LeaseId>>,
}

impl Readers {
    fn new() -> Self {
        Self {
            queues: LocalQueues::new(Clock::default()),
            callbacks: CallbackExecutor::for_model().0,
            key: request().key,
            unreleased: Mutex::default(),
        }
    }

    /// Joins a lease or gets a new one, as `Acquirer::acquire` does.
    fn enter(&self) -> Arc<Lease> {
        let now = MonotonicTime::now();
        if let Some(lease) = self.queues.join_reader(&self.key, &READ, LIMITS, now) {
            return lease;
        }
        let waiter = self.queues.join(&self.key, READ, None);
        loop {
            if let Some(lease) = waiter.take_handed_off() {
                waiter.leave();
                return lease;
            }
            if let QueuePosition::First = waiter.position(now) {
                break;
            }
            waiter.sleep(now.after(SECOND));
        }
        let grant = Grant {
            options: Arc::new(READ),
            ..Grant::usual(self.key.clone(), now)
        };
        let lease = Arc::new(Lease::new(grant, Arc::clone(&self.callbacks), None));
        self.unreleased.lock().push(lease.grant().id);
        // The thread may have joined another lease since it looked.
        if let (Some(other), _) = waiter.leave_with(&lease, LIMITS) {
            self.leave(&other);
        }
        lease
    }

    /// Ends a guard, as `Acquirer::release` does.
    fn leave(&self, lease: &Arc<Lease>) {
        if self.queues.remove_guard(lease) {
            let id = lease.grant().id;
            let held = self
                .unreleased
                .lock()
                .extract_if(.., |held| *held == id)
                .count();
            assert_eq!(held, 1, "released twice");
            self.queues.remove_holder(lease);
        }
    }
}

/// A reader joins while the last guard is dropped, and a writer queues beside both.
#[test]
fn model_each_reader_lease_is_released_by_its_last_guard() {
    check(RUNS, || {
        let readers = Readers::new();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2 {
                        let lease = readers.enter();
                        readers.leave(&lease);
                    }
                });
            }
            scope.spawn(|| {
                let writer = readers.queues.join(&readers.key, OPTIONS, None);
                thread::yield_now();
                let now = MonotonicTime::now();
                let joined = readers.queues.join_reader(&readers.key, &READ, LIMITS, now);
                assert!(joined.is_none(), "a reader passed the writer");
                writer.leave();
            });
        });
        assert!(readers.unreleased.lock().is_empty());
        assert_eq!(readers.queues.queues(), 0);
    });
}

/// The numbers of threads that read and write at the moment.
#[derive(Default)]
struct Inside {
    readers: AtomicU32,
    writers: AtomicU32,
}

impl Inside {
    fn enter(&self, mode: Mode) {
        match mode {
            Mode::Exclusive => {
                assert_eq!(
                    self.writers.fetch_add(1, Ordering::SeqCst),
                    0,
                    "two writers"
                );
                let readers = self.readers.load(Ordering::SeqCst);
                assert_eq!(readers, 0, "a writer beside a reader");
            }
            _ => {
                self.readers.fetch_add(1, Ordering::SeqCst);
                let writers = self.writers.load(Ordering::SeqCst);
                assert_eq!(writers, 0, "a reader beside a writer");
            }
        }
    }

    fn leave(&self, mode: Mode) {
        let number = match mode {
            Mode::Exclusive => &self.writers,
            _ => &self.readers,
        };
        number.fetch_sub(1, Ordering::SeqCst);
    }

    /// Enters, converts the lease at random, and releases it.
    fn visit(&self, client: &Client, mode: Mode) {
        let request = LockRequest {
            options: Options { mode, ..OPTIONS },
            ..request()
        };
        let lease = client.acquirer.acquire(&request, Until::Forever);
        let mut held = (lease.unwrap().unwrap(), mode);
        self.enter(mode);
        if chance(2) {
            held = self.convert(client, held);
        }
        self.leave(held.1);
        client.acquirer.release(&held.0, ONLY_GUARD);
    }

    fn convert(&self, client: &Client, (lease, mode): (Arc<Lease>, Mode)) -> (Arc<Lease>, Mode) {
        let to = match mode {
            Mode::Exclusive => Mode::Read,
            _ => Mode::Exclusive,
        };
        let move_over = || {
            self.leave(mode);
            self.enter(to);
        };
        // While a writer becomes a reader, it does not write any more.
        if to == Mode::Read {
            move_over();
        }
        let converted = client.acquirer.convert(&lease, ONLY_GUARD, to, |_| ());
        let Some(next) = converted.unwrap() else {
            assert_eq!(mode, Mode::Read, "only an upgrade is refused");
            return (lease, mode);
        };
        assert!(next.grant().token > lease.grant().token);
        if to == Mode::Exclusive {
            move_over();
        }
        (next, to)
    }
}

/// Readers join a lease while its guard becomes the writer, and wait while a writer becomes a reader.
#[test]
fn model_conversions_keep_readers_and_writers_apart() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let inside = Inside::default();
        let own_reader = || (0..2).for_each(|_| inside.visit(&clients[0], Mode::Read));
        let own_writer = || inside.visit(&clients[0], Mode::Exclusive);
        let other = || inside.visit(&clients[1], [Mode::Read, Mode::Exclusive][choice(2)]);
        run(
            &server,
            &clients,
            &[&own_reader, &own_reader, &own_writer, &other],
        );
        let last = clients[1].acquirer.acquire(&request(), Until::Now);
        let last = last.unwrap().expect("no share is left");
        clients[1].release(&last, true);
        assert_nothing_is_left(&server, &clients);
    });
}

/// Without a writer in the queue, readers join until the upgrade begins.
#[test]
fn model_no_reader_joins_beside_an_upgrade() {
    check(16 * RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let inside = Inside::default();
        let reader = || inside.visit(&clients[0], Mode::Read);
        run(&server, &clients, &[&reader, &reader]);
        assert_nothing_is_left(&server, &clients);
    });
}

/// A writer of the client is first in its queue, or behind a reader, while another writer becomes a reader. It asks Redis
/// while both readers still read: otherwise, readers of other clients would pass it.
#[test]
fn model_a_downgrade_lets_the_next_writer_ask() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        let first = client.acquirer.acquire(&request(), Until::Forever);
        let first = first.unwrap().unwrap();
        let downgrades = || {
            let convert = client
                .acquirer
                .convert(&first, ONLY_GUARD, Mode::Read, |_| ());
            let reader = convert.unwrap().expect("a downgrade is not refused");
            server.wait_for_queue(&request().key);
            client.acquirer.release(&reader, ONLY_GUARD);
        };
        let written = AtomicU32::new(0);
        let writes = || {
            let lease = client.acquirer.acquire(&request(), Until::Forever);
            written.store(1, Ordering::SeqCst);
            client.release(&lease.unwrap().unwrap(), true);
        };
        let reads = || {
            let request = LockRequest {
                options: READ,
                ..request()
            };
            let lease = client.acquirer.acquire(&request, Until::Forever);
            if written.load(Ordering::SeqCst) == 0 {
                server.wait_for_queue(&request.key);
            }
            client
                .acquirer
                .release(&lease.unwrap().unwrap(), ONLY_GUARD);
        };
        run(&server, &clients, &[&downgrades, &reads, &writes]);
        assert_nothing_is_left(&server, &clients);
    });
}
