//! Tests of upgrades and downgrades: the reply of Redis, and the time at which it comes, decide what the caller holds.

use super::*;
use crate::acquire::convert::Converted;
use crate::report::loss::LossReason;

const READ: Options = Options {
    mode: Mode::Read,
    ..OPTIONS
};

/// The options of each lease, with the mode to which it is converted.
const CONVERSIONS: [(Options, Mode); 2] = [(OPTIONS, Mode::Read), (READ, Mode::Exclusive)];

fn held(f: &Fixture, options: Options) -> Arc<Lease> {
    f.answer(|_| Ok(Reply::granted(7 << 10)));
    let lease = f.acquirer.acquire(&request(options), Until::Now);
    lease.unwrap().expect("it is free")
}

fn convert(f: &Fixture, lease: &Arc<Lease>, mode: Mode) -> Converted {
    f.acquirer.convert(lease, ONLY_GUARD, mode, |_| ())
}

fn granted() -> Result<Reply, Error> {
    Ok(Reply::granted(9 << 10))
}

#[test]
fn a_conversion_keeps_the_validity_and_the_options() {
    let hold = OPTIONS.ttl * 3;
    for (options, mode) in CONVERSIONS {
        let limited = Options {
            max_hold: Some(hold),
            ..options
        };
        let fixed = Options {
            renew_every: None,
            ..options
        };
        for options in [limited, fixed] {
            let f = fixture();
            let lease = held(&f, options);
            let ends = lease.valid_until();
            f.clock.advance(OPTIONS.ttl / 2);
            let clock = f.clock.clone();
            f.answer(move |request| {
                let Command::Convert(convert) = &request.command else {
                    panic!("{request:?}");
                };
                assert!(convert.longest >= OPTIONS.ttl / 2);
                // Another program may have removed the ttl, so the request does not rely on what the key has.
                assert!(convert.ttl >= ends.since(clock.now()));
                granted()
            });
            let next = convert(&f, &lease, mode).unwrap().unwrap();
            let grant = next.grant();
            assert_eq!((grant.token, grant.options.mode), (9 << 10, mode));
            assert_ne!(grant.id, lease.grant().id);
            assert_eq!(grant.hold_until(), lease.grant().hold_until());
            match options.renew_every {
                // The ttl is set again, and the lease is renewed.
                Some(_) => assert!(next.valid_until() >= ends.after(OPTIONS.ttl / 2)),
                None => assert_eq!(next.valid_until(), ends),
            }
            assert!(lease.valid_for(f.clock.now()).is_none());
            assert_eq!(f.acquirer.holders().len(), 1);
            assert_eq!(f.acquirer.holders()[0].grant().id, grant.id);
        }
    }
}

/// Neither a renewal nor a read of the key ends a lease while it is converted.
#[test]
fn reports_during_a_conversion_end_no_lease() {
    for (options, mode) in CONVERSIONS {
        // Only an upgrade may be refused.
        for is_granted in [true, mode.is_read()] {
            let f = fixture();
            let lease = held(&f, options);
            let reported = Arc::clone(&lease);
            let clock = f.clock.clone();
            f.answer(move |_| {
                reported.lose(clock.now(), LossReason::Deleted);
                assert!(reported.begin_renewal(clock.now()).is_none());
                match is_granted {
                    true => granted(),
                    false => Ok(contended(false)),
                }
            });
            let next = convert(&f, &lease, mode).unwrap();
            assert_eq!(next.is_some(), is_granted);
            let held = next.unwrap_or(lease);
            assert!(held.valid_for(f.clock.now()).is_some());
            held.lose(f.clock.now(), LossReason::Deleted);
            assert_eq!(held.loss(f.clock.now()), Some(LossReason::Deleted));
        }
    }
}

/// A report during a refused conversion is not lost: Redis is asked whether the lease is held.
#[test]
fn a_report_during_a_refused_upgrade_is_confirmed() {
    let f = fixture();
    let never_renewed = Options {
        renew_every: None,
        ..READ
    };
    let lease = held(&f, never_renewed);
    let (_keep, lost) = lease.loss_channel(f.clock.now(), ONLY_GUARD);
    f.watchdog.start(&ThreadGroup::new()).unwrap();
    let (reported, clock) = (Arc::clone(&lease), f.clock.clone());
    f.answer(move |_| {
        reported.lose(clock.now(), LossReason::Deleted);
        Ok(contended(false))
    });
    f.answer(|_| Ok(Reply::Missing));
    let refused = convert(&f, &lease, Mode::Exclusive).unwrap();
    assert!(refused.is_none());
    let reason = lost.recv_timeout(Duration::from_secs(60));
    assert_eq!(reason, Ok(LossReason::Deleted));
    f.watchdog.stop();
}

/// A second guard comes while the upgrade waits for the end of a renewal.
#[test]
fn a_reader_that_joins_before_an_upgrade_prevents_it() {
    let f = fixture();
    let lease = held(&f, READ);
    let far = f.clock.now().after(OPTIONS.ttl);
    assert!(lease.begin_ttl_change(far, || f.clock.now()));
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| convert(&f, &lease, Mode::Exclusive));
        while !lease.is_ttl_change_awaited() {
            std::thread::yield_now();
        }
        f.queues.add_guard(&lease);
        f.answer(|_| granted());
        lease.fail_ttl_change(f.clock.now(), OPTIONS.ttl, None);
        assert!(upgrade.join().unwrap().unwrap().is_none());
    });
    assert!(f.store.unasked(), "no request was sent");
}

/// The other guards of the lease learn of the loss by themselves, and the last one ends the lease.
#[test]
fn a_failed_upgrade_ends_its_own_guard_only() {
    let f = fixture();
    let lease = held(&f, READ);
    let joined = f.acquirer.acquire(&request(READ), Until::Now);
    assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &lease));
    lease.lose(f.clock.now(), LossReason::Deleted);
    assert!(convert(&f, &lease, Mode::Exclusive).is_err());
    assert_eq!(f.acquirer.holders().len(), 1);
    assert!(f.store.released.lock().is_empty());
    f.acquirer.release(&lease, ONLY_GUARD);
    assert!(f.acquirer.holders().is_empty());
}

/// Other holders cannot exclude a reader from the writer's key, so such a reply does not come from the script. The
/// client must not take the writer's lease for that of a reader.
#[test]
fn a_refused_downgrade_fails() {
    let f = fixture();
    let lease = held(&f, OPTIONS);
    f.answer(|_| Ok(contended(false)));
    let failed = convert(&f, &lease, Mode::Read).map(drop).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Protocol);
    assert_eq!(*f.store.released.lock(), [lease.grant().id]);
    assert_eq!(lease.loss(f.clock.now()), None);
    assert!(f.acquirer.holders().is_empty());
}

/// The outcome is unknown. The store undoes the new lease, and the client releases the old one without a report of a
/// loss.
#[test]
fn a_conversion_without_a_reply_ends_the_lease_without_a_loss() {
    for (options, mode) in CONVERSIONS {
        for kind in [
            ErrorKind::Timeout,
            ErrorKind::Unavailable,
            ErrorKind::Denied,
        ] {
            let f = fixture();
            let lease = held(&f, options);
            f.answer_after(Duration::from_secs(1), Err(error(kind)));
            let failed = convert(&f, &lease, mode).map(drop).unwrap_err();
            assert_eq!(failed.kind(), kind);
            assert_eq!(*f.store.released.lock(), [lease.grant().id]);
            assert_eq!(lease.loss(f.clock.now()), None);
            assert!(f.acquirer.holders().is_empty());
        }
    }
}

#[test]
fn a_lost_lease_is_not_converted() {
    for (options, mode) in CONVERSIONS {
        for (reply, reason) in [
            (Reply::Missing, LossReason::Deleted),
            (
                Reply::Taken { by: None },
                LossReason::TakenOver { by: None },
            ),
        ] {
            let f = fixture();
            let lease = held(&f, options);
            f.answer(|_| Ok(reply));
            let lost = convert(&f, &lease, mode).map(drop).unwrap_err();
            assert_eq!(lost.loss_reason(), Some(&reason));
            assert_eq!(lease.loss(f.clock.now()), Some(reason));
            assert!(f.acquirer.holders().is_empty());
        }
    }
}

/// The validity of the old lease ended before the reply came, so its loss was reported. The new lease is not used.
#[test]
fn a_late_grant_of_a_conversion_is_released() {
    for (options, mode) in CONVERSIONS {
        let f = fixture();
        let lease = held(&f, options);
        let clock = f.clock.clone();
        let new = Arc::new(crate::util::sync::Mutex::new(None));
        let asked = Arc::clone(&new);
        f.answer(move |request| {
            if let Command::Convert(convert) = &request.command {
                *asked.lock() = Some(convert.lease);
            }
            clock.advance(OPTIONS.ttl);
            granted()
        });
        let lost = convert(&f, &lease, mode).map(drop).unwrap_err();
        assert_eq!(lost.loss_reason(), Some(&LossReason::Expired));
        let released = [new.lock().unwrap(), lease.grant().id];
        assert_eq!(*f.store.released.lock(), released);
    }
}

/// The first reader asks Redis, and another one joins its lease. Neither can upgrade, and the client sends no request.
#[test]
fn joined_readers_are_not_upgraded() {
    let f = fixture();
    let lease = held(&f, READ);
    let joined = f.acquirer.acquire(&request(READ), Until::Now);
    assert!(Arc::ptr_eq(&joined.unwrap().unwrap(), &lease));
    for _ in 0..2 {
        assert!(convert(&f, &lease, Mode::Exclusive).unwrap().is_none());
    }
    f.acquirer.release(&lease, ONLY_GUARD);
    f.answer(|_| granted());
    let writer = convert(&f, &lease, Mode::Exclusive).unwrap().unwrap();
    // A thread of the client that wants to read does not join the writer.
    f.answer(|_| Ok(contended(false)));
    assert!(
        f.acquirer
            .acquire(&request(READ), Until::Now)
            .is_ok_and(|lease| lease.is_none())
    );
    f.answer(|_| granted());
    let reader = convert(&f, &writer, Mode::Read).unwrap().unwrap();
    assert!(
        f.acquirer
            .acquire(&request(READ), Until::Now)
            .is_ok_and(|lease| { lease.is_some_and(|lease| Arc::ptr_eq(&lease, &reader)) })
    );
}
