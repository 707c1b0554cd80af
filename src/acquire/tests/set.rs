//! Tests of the requests for several keys.

use super::*;
use crate::lease::Lease;
use crate::report::loss::LossReason;

fn key(name: &str) -> Key {
    Key::new("", name, 16).unwrap()
}

impl Fixture {
    /// Acquires these keys, in this order.
    fn acquire_set(&self, names: &[&str], until: Until) -> Result<Option<Vec<Arc<Lease>>>, Error> {
        let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
        let first = LockRequest {
            key: keys[0].clone(),
            ..request(OPTIONS)
        };
        self.acquirer.acquire_set(&first, &keys, until)
    }

    /// Sets the replies to the next requests.
    fn answers<const N: usize>(&self, replies: [Reply; N]) {
        for reply in replies {
            self.answer_after(Duration::ZERO, Ok(reply));
        }
    }

    /// The end of a call that has no time to wait for a taken key.
    fn at_once(&self) -> Until {
        Until::At(self.clock.now())
    }

    #[track_caller]
    fn assert_requests(&self, at_a_time: &[usize]) {
        assert_eq!(*self.store.at_a_time.lock(), at_a_time);
        assert!(self.store.answers_taken());
    }
}

/// The grant of the first key came after its validity, so the caller tries again.
#[test]
fn keys_behind_a_late_grant_are_released() {
    let f = fixture();
    f.answer_after(OPTIONS.ttl, Ok(Reply::granted(1)));
    f.answers([Reply::granted(2), Reply::granted(3)]);
    f.answers([contended(false), Reply::Skipped, Reply::Skipped]);
    let leases = f.acquire_set(&["a", "b", "c"], Until::Now);
    assert!(leases.unwrap().is_none());
    assert_eq!(f.store.released.lock().len(), 3);
    f.assert_requests(&[3, 3]);
}

/// A release of one of the keys, which this client had to send again, has come after the first request.
#[test]
fn a_set_asks_again_if_all_keys_were_skipped() {
    let f = fixture();
    f.answers([Reply::Skipped, Reply::Skipped]);
    f.answers([Reply::granted(1), Reply::granted(2)]);
    let leases = f.acquire_set(&["a", "b"], Until::Now);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(2));
    f.assert_requests(&[2, 2]);
}

#[test]
fn a_set_that_gives_up_leaves_the_queue() {
    let f = fixture();
    f.answers([Reply::granted(1), contended(true)]);
    f.answers([Reply::Done, Reply::Done]);
    let leases = f.acquire_set(&["a", "b"], f.at_once());
    assert!(leases.unwrap().is_none());
    f.assert_requests(&[2, 2]);
}

/// Otherwise the other thread could wait for the set, and the set for the other thread.
#[test]
fn a_waiting_set_does_not_ask_for_keys_with_waiters() {
    let f = fixture();
    let taken = key("b");
    let _other = f.queues.join(&taken, OPTIONS, None);
    f.answers([Reply::granted(1), Reply::Done]);
    let leases = f.acquire_set(&["a", "b", "c"], f.at_once());
    assert!(leases.unwrap().is_none());
    f.assert_requests(&[1, 1]);
}

/// While the set waited for its first key, others may have come for the other keys.
#[test]
fn a_set_waits_at_the_place_of_its_first_wait() {
    let f = fixture();
    f.answers([contended(true), Reply::Skipped, Reply::Skipped]);
    f.answers([Reply::granted(1)]);
    f.answers([Reply::granted(2), Reply::granted(3)]);
    let leases = f.acquire_set(&["a", "b", "c"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(3));
    let (new, existing) = (QueueMode::Notified, QueueMode::Existing { notified: true });
    let at_its_place = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    let asked = [new, new, new, existing, at_its_place, at_its_place];
    assert_eq!(*f.store.asked.lock(), asked);
    f.assert_requests(&[3, 1, 2]);
}

/// The set first waits for its second key, whose grant a message reports. So the place is known only from the request
/// that asked for the first key.
#[test]
fn a_set_keeps_the_place_of_a_later_key() {
    let f = fixture();
    f.answers([Reply::granted(1)]);
    f.grant(granted::GRANT, Duration::ZERO, || {});
    f.answers([Reply::Skipped, Reply::granted(3)]);
    let leases = f.acquire_set(&["a", "b", "c"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(3));
    let new = QueueMode::Notified;
    let at_its_place = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    assert_eq!(*f.store.asked.lock(), [new, new, new, at_its_place]);
    f.assert_requests(&[3, 1]);
}

/// The clocks of the servers of two slots may differ.
#[test]
fn a_set_has_a_place_of_its_own_in_each_slot() {
    let f = fixture();
    f.store.by_slot.store(true, Ordering::SeqCst);
    f.answers([contended(true), Reply::granted(1), Reply::granted(2)]);
    let leases = f.acquire_set(&["a", "b"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(2));
    let asked = [
        QueueMode::Notified,
        QueueMode::Existing { notified: true },
        QueueMode::Notified,
    ];
    assert_eq!(*f.store.asked.lock(), asked);
}

/// While the set waits for the key of the second slot, it loses the key of the first slot. Then it waits for that key
/// again.
#[test]
fn a_place_in_one_slot_does_not_count_in_an_earlier_slot() {
    let f = fixture();
    f.store.by_slot.store(true, Ordering::SeqCst);
    f.answers([Reply::granted(1), contended(true)]);
    let (queues, clock) = (Arc::clone(&f.queues), f.clock.clone());
    f.answer(move |_| {
        for lost in queues.holders() {
            lost.lose(clock.now(), LossReason::Deleted);
        }
        Ok(Reply::granted(2))
    });
    f.answers([Reply::granted(3), Reply::granted(4)]);
    let leases = f.acquire_set(&["a", "b"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(2));
    let (new, existing) = (QueueMode::Notified, QueueMode::Existing { notified: true });
    assert_eq!(*f.store.asked.lock(), [new, new, existing, new, new]);
}

/// The caller continues with the place of another thread of its client, which confirmed a grant of the first key too
/// late.
#[test]
fn a_place_in_front_counts_for_one_key() {
    let f = fixture();
    let in_front = QueuePlace {
        ahead: 0,
        since: front_place(SINCE),
    };
    f.answers([Reply::Contended {
        expires_in: OPTIONS.ttl,
        queued: Some(in_front),
        shared: None,
    }]);
    f.answers([Reply::Skipped, Reply::granted(1), Reply::granted(2)]);
    let leases = f.acquire_set(&["a", "b"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(2));
    let at_its_place = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    assert_eq!(f.store.asked.lock().last(), Some(&at_its_place));
}

/// On a quorum, a renewal whose lease has ended releases the lease id once more. So a lease does not get its limits
/// during a renewal.
#[test]
fn limits_wait_for_a_renewal() {
    let f = fixture();
    f.answers([Reply::granted(1)]);
    let lease = f
        .acquire_set(&["a"], Until::Now)
        .unwrap()
        .unwrap()
        .remove(0);
    let now = f.clock.now();
    assert!(lease.begin_ttl_change(now, || now));
    std::thread::scope(|scope| {
        let (f, renewed) = (&f, &lease);
        let limited = scope.spawn(move || {
            let mut limits = request(OPTIONS);
            limits.options.max_hold = Some(OPTIONS.ttl);
            f.acquirer.with_limits(renewed, &limits, now)
        });
        while !lease.is_ttl_change_awaited() {
            assert!(!limited.is_finished(), "the renewal is under way");
            std::thread::yield_now();
        }
        lease.finish_ttl_change(now, now, OPTIONS.ttl);
        let limited = limited.join().unwrap().unwrap();
        assert_eq!(limited.grant().options.max_hold, Some(OPTIONS.ttl));
        assert!(!Arc::ptr_eq(&limited, &lease) && limited.grant().id == lease.grant().id);
    });
    assert!(f.store.released.lock().is_empty());
}

/// A waiter that joined long ago has to confirm its grant.
#[test]
fn a_confirmation_also_asks_for_the_keys_behind() {
    let f = fixture();
    let unconfirmed = GrantMessage {
        to_confirm: true,
        ..granted::GRANT
    };
    f.grant(unconfirmed, Duration::ZERO, || {});
    f.answers([Reply::Skipped]);
    f.answers([Reply::granted(9), Reply::granted(10)]);
    let leases = f.acquire_set(&["a", "b"], Until::Forever);
    assert_eq!(leases.unwrap().map(|leases| leases.len()), Some(2));
    f.assert_requests(&[2, 2]);
}
