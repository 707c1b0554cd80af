//! Waiters of a store that never queues them.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;
use crate::command::Inspect;
use crate::memory::{MemoryNode, MemoryServer};
use crate::store::{Listener, Notifications, Reports, TrackedKey};
use crate::util::id::HolderId;

/// The notifications of a store without queues. This store sends none.
struct Silent;

impl Notifications for Silent {
    fn start(&self, _: &ThreadGroup, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn stop(&self) {}

    fn request(&self, _: &Key) {}

    fn track(&self, _: Vec<TrackedKey>) -> bool {
        false
    }

    fn queue_mode(&self, _: &Key) -> QueueMode {
        QueueMode::None
    }
}

/// A client of `server` without notifications.
fn client(server: &Arc<MemoryServer>) -> Acquirer {
    let clock = server.clock().clone();
    let holder = HolderId::of_this_process();
    let backend = Backend {
        notifications: Arc::new(Silent),
        ..Backend::new(Arc::new(MemoryNode::new(
            Arc::clone(server),
            holder,
            Reports::default(),
        )))
    };
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    // The watchdog's threads do not run: tests hold no lock until its renewal.
    let scheduler = Scheduler::new(clock.clone());
    let watchdog = Watchdog::new(scheduler, &backend, callbacks.clone(), COMMAND_TIMEOUT);
    let hand_offs = HandOffs {
        count: 0,
        time: Duration::ZERO,
    };
    Acquirer::new(
        &backend,
        watchdog,
        callbacks,
        Arc::new(LocalQueues::new(clock)),
        COMMAND_TIMEOUT,
        OUTAGE_TIMEOUT,
        hand_offs,
    )
}

#[test]
fn each_client_gets_the_lock_without_a_queue() {
    const TURNS: usize = 5;
    let server = MemoryServer::new();
    let is_held = AtomicBool::new(false);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let client = client(&server);
                for _ in 0..TURNS {
                    let lease = client.acquire(&request(OPTIONS), Until::Forever);
                    let lease = lease.unwrap().unwrap();
                    assert!(!is_held.swap(true, Ordering::SeqCst));
                    std::thread::park_timeout(Duration::from_millis(2));
                    let inspect = Command::Inspect(Inspect { key: key() });
                    let deadline = MonotonicTime::now().after(COMMAND_TIMEOUT);
                    match client.store.execute_one(inspect, deadline) {
                        Ok(Reply::Found { value, .. }) => assert_eq!(value.queued, 0),
                        other => panic!("{other:?}"),
                    }
                    is_held.store(false, Ordering::SeqCst);
                    client.release(&lease, ONLY_GUARD);
                }
            });
        }
    });
    assert!(
        started.elapsed() < OPTIONS.ttl / 2,
        "no grant waits for an expiry"
    );
}

#[test]
fn pauses_without_a_queue_are_short() {
    const ATTEMPTS: u32 = 20;
    let f = fixture();
    *f.store.queue_mode.lock() = Some(QueueMode::None);
    for _ in 0..ATTEMPTS {
        f.answer(|_| Ok(contended(false)));
    }
    f.answer(|_| Ok(Reply::granted(7)));
    let started = Instant::now();
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    // A waiter that waits for notifications asks again after half a second at the earliest.
    assert!(started.elapsed() < ATTEMPTS * Duration::from_millis(250));
    assert!(
        f.store
            .asked
            .lock()
            .iter()
            .all(|mode| *mode == QueueMode::None)
    );
    assert_eq!(f.tracked(), 0);
}
