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
            if let Some(lease) = waiter.handed_off() {
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
