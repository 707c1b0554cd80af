//! Tests of grants that a message reports, that come after their validity, or that come during a shutdown.

use super::*;
use crate::command::{Acquire, Command};

/// A grant whose token is later than the waiter's place.
pub const GRANT: GrantMessage = GrantMessage {
    token: (SINCE + 1) << 10,
    to_confirm: false,
};

impl Fixture {
    /// The reply to the next acquire reports that Redis has queued the lease. A message reports the grant before this
    /// reply arrives.
    fn grant_while_queued(&self, later: Duration, meanwhile: impl FnOnce() + Send + 'static) {
        self.grant(GRANT, later, meanwhile);
    }

    pub fn grant(
        &self,
        grant: GrantMessage,
        later: Duration,
        meanwhile: impl FnOnce() + Send + 'static,
    ) {
        let (clock, queues) = (self.clock.clone(), Arc::clone(&self.queues));
        self.answer(move |request| {
            let Command::Acquire(Acquire { key, lease, .. }) = &request.command else {
                panic!("{request:?}");
            };
            clock.advance(later);
            assert_eq!(queues.granted(key, *lease, grant), GrantOf::Waiter);
            meanwhile();
            Ok(contended(true))
        });
    }

    fn asked(&self) -> Vec<QueueMode> {
        self.store.asked.lock().clone()
    }
}

#[test]
fn reported_grant_is_accepted_without_a_request() {
    let f = fixture();
    f.grant_while_queued(Duration::ZERO, || {});
    let grant = f.acquire(Until::Forever).unwrap().unwrap();
    assert_eq!(grant.token, GRANT.token);
}

#[test]
fn doubtful_grant_is_confirmed_first() {
    let unrenewed = Options {
        renew_every: None,
        ..OPTIONS
    };
    let unconfirmed = GrantMessage {
        to_confirm: true,
        ..GRANT
    };
    let [too_early, too_late] =
        [(SINCE - 1) << 10, u64::MAX].map(|token| GrantMessage { token, ..GRANT });
    for (options, later, grant) in [
        (OPTIONS, OPTIONS.ttl / 2, GRANT),
        (unrenewed, Duration::ZERO, GRANT),
        (OPTIONS, Duration::ZERO, unconfirmed),
        (OPTIONS, Duration::ZERO, too_early),
        (OPTIONS, Duration::ZERO, too_late),
    ] {
        let f = fixture();
        f.grant(grant, later, || {});
        f.answer_after(Duration::ZERO, Ok(Reply::granted(9)));
        let grant = f.acquire_on(options, Until::Forever).unwrap().unwrap();
        assert_eq!(grant.token, 9);
        assert_eq!(
            f.asked(),
            [QueueMode::Notified, QueueMode::Existing { notified: true }]
        );
    }
}

#[test]
fn lease_from_the_queue_is_released_to_waiters() {
    for (by_message, was_queued) in [(true, true), (false, true), (false, false)] {
        let f = fixture();
        if by_message {
            f.grant_while_queued(Duration::ZERO, || {});
        } else {
            f.answer_after(Duration::ZERO, Ok(contended(was_queued)));
            f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
        }
        let lease = f
            .acquirer
            .acquire(&request(OPTIONS), Until::Forever)
            .unwrap();
        f.acquirer.release(&lease.unwrap(), ONLY_GUARD);
        assert_eq!(
            f.store.passed_on.load(Ordering::SeqCst),
            usize::from(was_queued)
        );
    }
}

#[test]
fn grant_that_ended_before_acceptance_is_repeated() {
    // The ttl is as short as the allowance for drift of the clocks, so the validity is zero.
    let options = Options {
        ttl: Duration::from_millis(2),
        ..OPTIONS
    };
    let kept = QueueMode::Existing { notified: true };
    // On a busy machine, a third of the ttl can pass before the waiter runs. The waiter then confirms the grant, so the
    // test tries again.
    let is_in_time = (0..1000).any(|_| {
        let f = fixture();
        f.grant_while_queued(Duration::ZERO, || {});
        f.answer_after(Duration::ZERO, Err(error(ErrorKind::Denied)));
        let denied = f.acquire_on(options, Until::Forever).unwrap_err();
        assert_eq!(denied.kind(), ErrorKind::Denied);
        assert_eq!(f.store.released.lock().len(), 1, "the late grant");
        let asked = f.asked();
        let anew = QueueMode::Rejoin {
            since: SINCE,
            polls: false,
        };
        let is_known = asked == [QueueMode::Notified, anew] || asked == [QueueMode::Notified, kept];
        assert!(is_known, "under another lease id, at its place: {asked:?}");
        asked[1] == anew
    });
    assert!(is_in_time, "the machine is too slow for this test");
}

#[test]
fn grant_after_its_validity_is_released_and_repeated() {
    let f = fixture();
    f.answer_after(OPTIONS.ttl, Ok(Reply::granted(7)));
    f.answer_after(Duration::ZERO, Ok(Reply::granted(8)));
    let grant = f.acquire(Until::Forever).unwrap().unwrap();
    assert_eq!(grant.token, 8);
    let released = f.store.released.lock();
    assert!(released.len() == 1 && released[0] != grant.id);
}

#[test]
fn grant_at_shutdown_is_an_error() {
    for by_message in [true, false] {
        let f = fixture();
        let watchdog = Arc::clone(&f.watchdog);
        if by_message {
            f.grant_while_queued(Duration::ZERO, move || watchdog.stop());
        } else {
            f.answer(move |_| {
                watchdog.stop();
                Ok(Reply::granted(7))
            });
        }
        let ended = f.acquire(Until::Forever).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::Shutdown);
        assert_eq!(f.store.released.lock().len(), 1, "the grant is released");
    }
}
