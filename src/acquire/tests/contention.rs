//! Turns of other clients of a quorum: a caller counts those that it has missed, and reads the key before it asks.

use std::time::Instant;

use super::*;
use crate::util::clock::MonotonicTime;
use crate::{Client, MemoryQuorum, MutexGuard};

/// A quorum whose client asks for a key that another client holds.
struct BesideAHolder {
    quorum: MemoryQuorum,
    holder: Client,
    client: Client,
    key: Key,
}

impl BesideAHolder {
    fn new(usually_missed: f64) -> Self {
        let quorum = MemoryQuorum::new(3);
        let [holder, client] = [(); 2].map(|()| quorum.client().unwrap());
        let key = Key::new("leasehold:", "k", 16).unwrap();
        let it = Self {
            quorum,
            holder,
            client,
            key,
        };
        it.contention().of(&it.key).usually_missed = usually_missed;
        it
    }

    fn contention(&self) -> &Contention {
        let acquirer = &self.client.handle().acquirer;
        acquirer.contention.as_ref().unwrap()
    }

    fn usually_missed(&self) -> f64 {
        self.contention().of(&self.key).usually_missed
    }

    /// When the client was last refused.
    fn refused_at(&self) -> Option<MonotonicTime> {
        self.contention().of(&self.key).wanted_at
    }

    /// Runs `work` while a thread of the client waits for the key. The thread has been refused and watches the key.
    fn during_a_wait(&self, work: impl FnOnce(MutexGuard)) {
        let guard = self.holder.mutex("k").lock().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(self.client.mutex("k").lock().unwrap()));
            wait_until(|| self.refused_at().is_some());
            work(guard);
        });
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < COMMAND_TIMEOUT, "it never happens");
        std::thread::yield_now();
    }
}

#[test]
fn a_caller_that_does_not_wait_misses_no_turn() {
    let it = BesideAHolder::new(4.0);
    let guard = it.holder.mutex("k").lock().unwrap();
    assert!(it.client.mutex("k").try_lock().unwrap().is_none());
    guard.unlock().unwrap();
    drop(it.client.mutex("k").try_lock().unwrap().unwrap());
    assert_eq!(it.usually_missed(), 4.0);
}

#[test]
fn a_waiter_misses_the_turn_of_a_holder_once() {
    let it = BesideAHolder::new(4.0);
    it.during_a_wait(|guard| {
        for _ in 0..3 {
            let before = it.refused_at();
            // The waiter relies on notifications for a second at most, and asks again.
            it.quorum.advance(Duration::from_secs(1));
            wait_until(|| it.refused_at() > before);
        }
        guard.unlock().unwrap();
    });
    // The newest wait has a sixteenth of the weight.
    assert_eq!(it.usually_missed(), 4.0 - 3.0 / 16.0);
}

#[test]
fn a_waiter_far_from_its_turn_reads_the_key_first() {
    // The waiter pauses for 0.2 s after each change.
    let it = BesideAHolder::new(400.0);
    let mut refused_at = None;
    it.during_a_wait(|guard| {
        refused_at = it.refused_at();
        let queues = &it.client.handle().acquirer.queues;
        // A majority reports a change, such as a renewal.
        for node in [0, 1] {
            queues.note_change(&it.key, ServerId(node), 2);
        }
        // The read after the pause begins another watch.
        wait_until(|| !queues.was_released(&it.key));
        guard.unlock().unwrap();
    });
    assert_eq!(
        it.refused_at(),
        refused_at,
        "no other attempt while the key is taken"
    );
    // The waiter has missed two turns.
    assert_eq!(it.usually_missed(), 400.0 - 398.0 / 16.0);
}
