//! Which turns of other clients of a quorum a caller counts as missed.

use super::*;
use crate::{Client, MemoryQuorum, MutexGuard};

const MOMENT: Duration = Duration::from_millis(1);

/// A client whose callers usually miss four turns. Another client holds the key.
fn beside_a_holder(work: impl FnOnce(&Client, MutexGuard, &dyn Fn() -> f64)) {
    let quorum = MemoryQuorum::new(3);
    let [holder, client] = [(); 2].map(|()| quorum.client().unwrap());
    let guard = holder.mutex("k").lock().unwrap();
    let contention = client.handle().acquirer.contention.as_ref().unwrap();
    let key = Key::new("leasehold:", "k", 16).unwrap();
    contention.note_grant(&key, MOMENT, Some(64));
    let usually_missed = || contention.usually_missed(&key);
    assert_eq!(usually_missed(), 4.0);
    work(&client, guard, &usually_missed);
}

#[test]
fn a_caller_that_does_not_wait_misses_no_turn() {
    beside_a_holder(|client, guard, usually_missed| {
        assert!(client.mutex("k").try_lock().unwrap().is_none());
        guard.unlock().unwrap();
        drop(client.mutex("k").try_lock().unwrap().unwrap());
        assert_eq!(usually_missed(), 4.0);
    });
}

/// The waiter asks some three times while the holder has the key.
#[test]
fn a_waiter_misses_the_turn_of_a_holder_once() {
    beside_a_holder(|client, guard, usually_missed| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(client.mutex("k").lock().unwrap()));
            std::thread::sleep(2200 * MOMENT);
            guard.unlock().unwrap();
        });
        // The newest wait has a sixteenth of the weight.
        assert_eq!(usually_missed(), 4.0 - 3.0 / 16.0);
    });
}
