//! Turns of other clients of a quorum: a caller counts those that it has missed, and reads the key before it asks.

use std::time::Instant;

use super::*;
use crate::util::clock::MonotonicTime;
use crate::{Client, MemoryQuorum, MutexGuard};

/// Two clients of a quorum: `holder` has the key, `client` asks for it.
struct TwoClients {
    holder: Client,
    client: Client,
    key: Key,
}

impl TwoClients {
    fn new(rivals: usize) -> Self {
        let quorum = MemoryQuorum::new(3);
        let [holder, client] = [(); 2].map(|()| quorum.client().unwrap());
        let key = Key::new("leasehold:", "k", 16).unwrap();
        let it = Self {
            holder,
            client,
            key,
        };
        for n in 0..rivals {
            let now = MonotonicTime::now();
            it.contention().note_turn(&it.key, turn(n), now);
        }
        it
    }

    fn contention(&self) -> &Contention {
        let acquirer = &self.client.live().unwrap().acquirer;
        acquirer.contention.as_ref().unwrap()
    }

    /// How many turns the last waiter of the client has missed.
    fn missed_turns(&self) -> u32 {
        let record = self.contention().lock_record(&self.key);
        record.last_wait.missed_turns
    }

    /// When the client was last refused.
    fn refused_at(&self) -> Option<MonotonicTime> {
        self.contention().lock_record(&self.key).others_seen_at
    }

    /// Whether the client's first waiter has read the key, which is taken, on all nodes.
    fn is_watched(&self) -> bool {
        let queues = &self.client.live().unwrap().acquirer.queues;
        queues.watched(&self.key) == Some((3, false))
    }

    /// Runs `work` while a thread of the client waits for the key. The thread has been refused and watches the key.
    fn during_a_wait(&self, work: impl FnOnce(MutexGuard)) {
        let guard = self.holder.mutex("k").lock().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(self.client.mutex("k").lock().unwrap()));
            wait_until(|| self.is_watched());
            work(guard);
        });
    }
}

#[track_caller]
fn wait_until(is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < COMMAND_TIMEOUT, "timed out");
        std::thread::yield_now();
    }
}

#[test]
fn a_waiter_misses_the_turn_of_a_holder_once() {
    let it = TwoClients::new(4);
    it.during_a_wait(|guard| {
        for _ in 0..3 {
            let before = it.refused_at();
            // As after a new connection: the waiter asks again. (A moved clock wakes it once for each node.)
            it.client.live().unwrap().acquirer.queues.wake(&it.key);
            wait_until(|| it.refused_at() > before);
        }
        guard.unlock().unwrap();
    });
    assert_eq!(it.missed_turns(), 1);
    let record = it.contention().lock_record(&it.key);
    let rivals = record.rivals(MonotonicTime::now());
    assert_eq!(rivals, 4 + 1, "the reads have named the holder");
}

/// The waiter's pause of 32 round trips of 0.5 ms would end after its deadline.
#[test]
fn a_waiter_asks_a_last_time_before_its_deadline() {
    let is_granted = || {
        let it = TwoClients::new(32);
        let guard = it.holder.mutex("k").lock().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let mutex = it.client.mutex("k");
                mutex.try_lock_for(Duration::from_millis(10)).unwrap()
            });
            wait_until(|| it.is_watched() || waits.is_finished());
            guard.unlock().unwrap();
            waits.join().unwrap().is_some()
        })
    };
    // On a busy machine, the deadline may come before the release.
    assert!((0..100).any(|_| is_granted()));
}

#[test]
fn a_waiter_with_a_long_pause_reads_first() {
    // The waiter pauses for 16 ms.
    let it = TwoClients::new(32);
    let mut refused_at = None;
    it.during_a_wait(|guard| {
        refused_at = it.refused_at();
        let queues = &it.client.live().unwrap().acquirer.queues;
        // A majority reports a change, such as a renewal.
        for node in [0, 1] {
            queues.note_change(&it.key, ServerId(node), 2);
        }
        // After the pause, another watch reads the key.
        wait_until(|| it.is_watched());
        guard.unlock().unwrap();
    });
    assert_eq!(
        it.refused_at(),
        refused_at,
        "no other attempt while the key is taken"
    );
    assert_eq!(it.missed_turns(), 2);
}
