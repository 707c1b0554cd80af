//! Which replies of a quorum change what a client knows of the contention.

use super::*;
use crate::{Client, MemoryQuorum};

const MOMENT: Duration = Duration::from_millis(1);

/// A client that estimates 64 contenders, and whose waits are usually short. Another client holds the key.
fn beside_a_holder(work: impl FnOnce(&Client, &dyn Fn() -> u32)) {
    let quorum = MemoryQuorum::new(3);
    let [holder, client] = [(); 2].map(|()| quorum.client().unwrap());
    let _guard = holder.mutex("k").lock().unwrap();
    let contention = client.handle().acquirer.contention.as_ref().unwrap();
    let key = Key::new("leasehold:", "k", 16).unwrap();
    contention.note_grant(&key, MOMENT, Some(MOMENT));
    (0..6).for_each(|_| contention.note_split_vote(&key, MonotonicTime::now()));
    assert_eq!(contention.contenders(&key), 64);
    work(&client, &|| contention.contenders(&key));
}

#[test]
fn a_caller_that_does_not_wait_lowers_no_estimate() {
    beside_a_holder(|client, contenders| {
        for _ in 0..5 {
            assert!(client.mutex("k").try_lock().unwrap().is_none());
        }
        assert_eq!(contenders(), 64);
    });
}

/// The waiter polls some 40 times.
#[test]
fn a_grant_lowers_the_estimate_once() {
    beside_a_holder(|client, contenders| {
        let waited = client.mutex("k").try_lock_for(200 * MOMENT);
        assert!(waited.unwrap().is_none());
        assert_eq!(contenders(), 48);
    });
}
