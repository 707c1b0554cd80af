//! Tests of the results of `unlock`, which depend on the reply of Redis and on the time of its arrival.

use super::*;
use crate::report::loss::LossReason;
use crate::report::released::Released;

/// Unlocks a lock with a ttl of 30 s; the reply comes after `later`.
fn unlock(later: Duration, outcome: Result<Reply, Error>) -> Result<Released, Error> {
    let f = fixture();
    f.answer(|_| Ok(Reply::granted(7 << 10)));
    let lease = f.acquirer.acquire(&request(OPTIONS), Until::Now);
    let lease = lease.unwrap().expect("it is free");
    f.answer_after(later, outcome);
    f.acquirer.release_confirmed(&lease, ONLY_GUARD)
}

#[test]
fn an_unlock_fails_only_if_the_lock_was_lost() {
    let soon = Duration::from_secs(1);
    let released = unlock(soon, Ok(Reply::Done)).unwrap();
    assert!(released.is_confirmed());
    for (reply, reason) in [
        (Reply::Missing, LossReason::Deleted),
        (
            Reply::Taken { by: None },
            LossReason::TakenOver { by: None },
        ),
    ] {
        let lost = unlock(soon, Ok(reply)).unwrap_err();
        assert_eq!(lost.loss_reason(), Some(&reason));
    }
    for kind in [
        ErrorKind::Timeout,
        ErrorKind::Unavailable,
        ErrorKind::Denied,
        ErrorKind::Protocol,
        ErrorKind::Shutdown,
    ] {
        let released = unlock(soon, Err(error(kind))).unwrap();
        let why = match &released {
            Released::Unconfirmed(error) => error.kind(),
            other => panic!("{kind:?} confirms nothing: {other:?}"),
        };
        assert_eq!((why, released.is_confirmed()), (kind, false));
    }
}

/// The work ended within the validity. The key may have expired while the release was on its way.
#[test]
fn a_key_gone_after_the_validity_is_no_loss() {
    let late = OPTIONS.ttl;
    for reply in [Reply::Missing, Reply::Taken { by: None }] {
        match unlock(late, Ok(reply)).unwrap() {
            Released::Unconfirmed(error) => assert_eq!(error.kind(), ErrorKind::Timeout),
            other => panic!("Redis did not release it: {other:?}"),
        }
    }
}
