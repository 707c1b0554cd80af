//! Tests of readers and permits: which of them ask Redis, join a lease, or lose it.

use super::*;

const PERMIT: Options = Options {
    mode: Mode::Permits {
        weight: 1,
        limit: 2,
    },
    ..OPTIONS
};
const READ: Options = Options {
    mode: Mode::Read,
    ..OPTIONS
};

fn share(key: &Key, options: Options) -> Arc<Lease> {
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    let grant = Grant {
        options: Arc::new(options),
        ..Grant::usual(key.clone(), MonotonicTime::now())
    };
    Arc::new(Lease::new(grant, callbacks, None))
}

/// Gives a waiter with these options a lease that Redis has granted.
fn granted(queues: &LocalQueues, key: &Key, options: Options) -> Arc<Lease> {
    let lease = share(key, options);
    let waiter = queues.join(key, options, None);
    assert!(waiter.leave_with(&lease, LIMITS).0.is_none());
    lease
}

fn joined(queues: &LocalQueues, key: &Key, options: Options) -> Option<Arc<Lease>> {
    queues.join_reader(key, &options, LIMITS, MonotonicTime::now())
}

#[test]
fn a_share_lets_the_next_waiter_ask() {
    for held in [PERMIT, READ] {
        let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
        let one = queues.join(&key, held, None);
        // A writer has to be queued in Redis, so that new readers of other clients wait.
        let writer = queues.join(&key, OPTIONS, None);
        let lease = share(&key, held);
        assert!(one.leave_with(&lease, LIMITS).0.is_none());
        assert_eq!(writer.sleep(far()), WakeReason::Woken);
        assert!(is_first(&writer));
        queues.remove_holder(&lease);
        assert_eq!(writer.sleep(far()), WakeReason::Woken);
        writer.leave();
        assert_eq!(queues.queues(), 0);
    }
}

#[test]
fn a_reader_waits_for_a_writer_of_its_client() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let writer = granted(&queues, &key, OPTIONS);
    let reader = queues.join(&key, READ, None);
    let position = reader.position(MonotonicTime::now());
    assert!(matches!(position, QueuePosition::Held(_)));
    queues.remove_holder(&writer);
    assert!(is_first(&reader));
}

#[test]
fn readers_behind_a_reader_enter_with_it() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let first = queues.join(&key, READ, None);
    let readers = [(); 3].map(|()| queues.join(&key, READ, None));
    let writer = queues.join(&key, OPTIONS, None);
    let lease = share(&key, READ);
    assert!(first.leave_with(&lease, LIMITS).0.is_none());
    let [one, two, three] = readers;
    for reader in [one, two] {
        assert_eq!(reader.sleep(far()), WakeReason::Woken);
        let joined = reader.take_handed_off().expect("it has joined");
        assert!(Arc::ptr_eq(&joined, &lease));
    }
    // The limits allow two joins.
    assert_eq!(three.sleep(far()), WakeReason::Woken);
    assert!(is_first(&three) && three.take_handed_off().is_none());
    three.leave();
    assert!(is_first(&writer));
    assert!(joined(&queues, &key, READ).is_none(), "a writer waits");
    let last = [(); 3].map(|()| queues.remove_guard(&lease));
    assert_eq!(last, [false, false, true]);
}

/// The limits of hand-offs count from the downgrade, however long the writer held the lock.
#[test]
fn waiting_readers_enter_with_a_downgraded_writer() {
    let clock = Clock::movable();
    let (queues, key) = (LocalQueues::new(clock.clone()), key("a"));
    let writer = granted(&queues, &key, OPTIONS);
    let readers = [(); 3].map(|()| queues.join(&key, READ, None));
    let next = share(&key, READ);
    clock.advance(OPTIONS.ttl / 6);
    let limits = HandOffs {
        time: OPTIONS.ttl / 10,
        ..LIMITS
    };
    queues.replace_converted(&writer, &next, limits);
    assert_eq!(
        readers[2].sleep(clock.now()),
        WakeReason::Woken,
        "it asks Redis"
    );
    let joined = readers.map(|reader| reader.take_handed_off().is_some());
    assert_eq!(joined, [true, true, false]);
}

#[test]
fn readers_behind_a_writer_do_not_pass_it() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let first = queues.join(&key, READ, None);
    let _writer = queues.join(&key, OPTIONS, None);
    let reader = queues.join(&key, READ, None);
    let lease = share(&key, READ);
    assert!(first.leave_with(&lease, LIMITS).0.is_none());
    assert!(reader.take_handed_off().is_none());
    assert!(queues.remove_guard(&lease));
}

#[test]
fn readers_join_a_lease_within_its_bounds() {
    let clock = Clock::movable();
    let (queues, key) = (LocalQueues::new(clock.clone()), key("a"));
    let lease = granted(&queues, &key, READ);
    let other = Options {
        ttl: 2 * OPTIONS.ttl,
        ..READ
    };
    assert!(joined(&queues, &key, other).is_none(), "another ttl");
    let now = MonotonicTime::now();
    let late = |after, limits| queues.join_reader(&key, &READ, limits, now.after(after));
    let short = HandOffs {
        time: Duration::from_millis(5),
        ..LIMITS
    };
    assert!(late(Duration::from_millis(6), short).is_none(), "too late");
    let half = OPTIONS.ttl / 2;
    assert!(late(half, LIMITS).is_none(), "too little validity is left");
    for _ in 0..LIMITS.count {
        assert!(joined(&queues, &key, READ).is_some());
    }
    assert!(joined(&queues, &key, READ).is_none(), "too many");
    lease.lose(now, LossReason::Deleted);
    assert!(joined(&queues, &key, READ).is_none(), "lost");
}

#[test]
fn a_lease_whose_last_guard_has_left_is_not_joined() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let lease = granted(&queues, &key, READ);
    assert!(queues.remove_guard(&lease));
    assert!(joined(&queues, &key, READ).is_none());
    // Another reader gets its own lease before the first one is removed.
    let next = granted(&queues, &key, READ);
    queues.remove_holder(&lease);
    let joins = joined(&queues, &key, READ).expect("the new lease");
    assert!(Arc::ptr_eq(&joins, &next));
}

#[test]
fn a_permit_is_handed_off_to_the_next_waiter() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = [(); 2].map(|()| granted(&queues, &key, PERMIT));
    let [one, two] = [(); 2].map(|()| queues.join(&key, PERMIT, None));
    let next = share(&key, PERMIT);
    assert!(queues.hand_off(&held[0], |options| {
        assert_eq!(options, PERMIT);
        Some(Arc::clone(&next))
    }));
    assert!(one.take_handed_off().is_some());
    assert_eq!(two.sleep(far()), WakeReason::Woken, "it asks Redis");
    assert!(!queues.hand_off(&share(&key, PERMIT), |_| panic!("not held")));
    one.leave();
    two.leave();
    let held = [&held[0], &held[1], &next];
    held.iter().for_each(|lease| queues.remove_holder(lease));
    assert_eq!(queues.queues(), 0);
}

#[test]
fn a_message_of_force_finds_one_share() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = [(); 3].map(|()| granted(&queues, &key, PERMIT));
    for lease in &held {
        let found = queues.forced(&key, lease.grant().id.start(), &operator());
        assert!(Arc::ptr_eq(&found.unwrap(), lease));
    }
    let unknown = LeaseId::random().start();
    assert!(queues.forced(&key, unknown, &operator()).is_none());
    assert_eq!(queues.holders().len(), 3);
}

#[test]
fn a_grant_that_excludes_older_leases_ends_them() {
    let is_lost =
        |lease: &Arc<Lease>| lease.loss(MonotonicTime::now()) == Some(LossReason::Deleted);
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let readers = [(); 2].map(|()| granted(&queues, &key, READ));
    let writer = granted(&queues, &key, OPTIONS);
    assert!(readers.iter().all(is_lost) && !is_lost(&writer));
    assert!(joined(&queues, &key, READ).is_none());
    let reader = granted(&queues, &key, READ);
    assert!(is_lost(&writer) && !is_lost(&reader));
    for ended in readers.iter().chain([&writer, &reader]) {
        queues.remove_holder(ended);
    }
    assert_eq!(queues.queues(), 0);
}
