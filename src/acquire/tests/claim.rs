//! Callers that wait for a fenced value instead of the queue of its lock.

use std::sync::mpsc::{Receiver, channel};
use std::thread::{JoinHandle, spawn};

use super::*;
use crate::acquire::tests::granted::GRANT;
use crate::acquire::watch::Bell;
use crate::acquire::{Campaign, ClaimResult};
use crate::command::LockAndValue;
use crate::command::value::LockValue;
use crate::store::KeyState;
use crate::util::backoff::Backoff;

/// A limit that only a hang reaches.
const SOON: Duration = Duration::from_secs(10);
const MILLISECOND: Duration = Duration::from_millis(1);

fn value_key() -> Key {
    Key::new("~value:", "k", 16).unwrap()
}

fn request() -> LockRequest {
    LockRequest {
        key: key(),
        options: OPTIONS,
        check: None,
        cancel: None,
    }
}

/// A reply to a claim: another client holds the lock under token 7, and the last token of the fenced value is
/// `value_token`.
fn held(value_token: Option<u64>) -> LockAndValue {
    let lock = LockValue {
        lease: LeaseId::random(),
        token: Some(7),
        holder: HolderId::of_text("host/1/a"),
        queued: 0,
    };
    LockAndValue {
        lock: Some((lock, Some(OPTIONS.ttl))),
        token: value_token,
        value: None,
    }
}

#[test]
fn a_waiter_trusts_its_bell_while_the_lock_is_held() {
    let f = fixture();
    let bell = Bell::new();
    let pauses = |found: &LockAndValue| {
        let (mut soon, mut polls) = (
            Backoff::new(MILLISECOND, SOON),
            Backoff::new(MILLISECOND, SOON),
        );
        let (request, value) = (request(), value_key());
        f.acquirer
            .pause_after(&request, &value, &bell, found, &mut soon, &mut polls)
    };
    let after_expiry = OPTIONS.ttl..=OPTIONS.ttl + Duration::from_millis(20);
    for value_token in [None, Some(6)] {
        let (tracked, untracked) = pauses(&held(value_token));
        assert!(after_expiry.contains(&tracked), "{tracked:?}");
        assert_eq!(untracked, Duration::from_secs(3));
    }
    *f.store.queue_mode.lock() = Some(QueueMode::Polling);
    let (tracked, untracked) = pauses(&held(None));
    assert!(after_expiry.contains(&tracked) && untracked <= MILLISECOND);
    // The holder has deleted the value, or the lock is free: the lock will be granted soon.
    let free = LockAndValue {
        lock: None,
        ..held(None)
    };
    for ending in [held(Some(7)), held(Some(8)), free] {
        let (tracked, untracked) = pauses(&ending);
        assert!(
            tracked <= MILLISECOND && tracked == untracked,
            "{tracked:?}"
        );
    }
    assert_eq!(
        f.store.tracked.load(Ordering::SeqCst),
        1,
        "one read tracks the value"
    );
}

type Outcome = Result<Option<ClaimResult>, Error>;

/// Starts a caller that finds the lock held. Returns once the value is tracked.
fn start_waiting(f: &Fixture) -> (JoinHandle<()>, Receiver<Outcome>) {
    f.store
        .answer(|_| Ok(Reply::LockAndValue(Box::new(held(None)))));
    let (asks, asked) = channel();
    *f.store.on_track.lock() = Some(Box::new(move || asks.send(()).is_ok()));
    let (acquirer, (ended, outcome)) = (f.acquirer.clone(), channel());
    let caller = spawn(move || {
        let claimed = acquirer.claim(&request(), &value_key(), Until::Forever, |_| Ok(false));
        ended.send(claimed).unwrap();
    });
    asked.recv_timeout(SOON).unwrap();
    f.queues.watches.seen(&value_key(), KeyState::Missing);
    (caller, outcome)
}

#[test]
fn a_shutdown_ends_the_wait_for_a_value() {
    let f = fixture();
    let (caller, outcome) = start_waiting(&f);
    f.acquirer.end();
    let claimed = outcome.recv_timeout(SOON).unwrap();
    assert_eq!(claimed.err().unwrap().kind(), ErrorKind::Shutdown);
    caller.join().unwrap();
    assert!(f.queues.watches.is_empty());
}

impl Fixture {
    /// The next request acquires the lock by plain commands, so its value in Redis contains no token. The request after
    /// that renews the lock. Returns the lease id of the acquire.
    fn grant_without_token(&self) -> Receiver<LeaseId> {
        let (send, sent) = channel();
        self.answer(move |request| {
            let Command::Acquire(Acquire { lease, .. }) = &request.command else {
                panic!("{request:?}");
            };
            send.send(*lease).unwrap();
            Ok(Reply::Granted {
                token: GRANT.token,
                is_token_in_value: false,
            })
        });
        self.answer_after(Duration::ZERO, Ok(Reply::Done));
        sent
    }

    fn campaign_until(&self, until: Until) -> Result<Option<Campaign>, Error> {
        let term = Arc::from(&b"a"[..]);
        self.acquirer
            .campaign(&request(), &value_key(), term, until)
    }

    fn campaign(&self) -> Result<Option<Campaign>, Error> {
        self.campaign_until(Until::Forever)
    }
}

/// Without a request: the other thread asks Redis.
#[test]
fn a_candidate_passes_no_waiting_thread() {
    let f = fixture();
    let lock = key();
    let _other = f.queues.join(&lock, OPTIONS, None);
    let campaign = f.campaign_until(Until::Now);
    assert!(campaign.unwrap().is_none());
}

/// The request that writes the token has no reply.
#[test]
fn a_campaign_that_fails_releases_its_lock() {
    let f = fixture();
    f.answer(|_| Ok(Reply::LockAndValue(Box::new(held(None)))));
    let sent = f.grant_without_token();
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Timeout)));
    let failed = f.campaign().map(drop).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Timeout);
    assert_eq!(*f.store.released.lock(), [sent.recv().unwrap()]);
}

/// The candidate has waited for longer than the `outage_timeout`. The outage begins when it writes the token.
#[test]
fn a_long_wait_shortens_no_outage_timeout() {
    let f = fixture();
    f.answer(|_| Ok(Reply::LockAndValue(Box::new(held(None)))));
    f.answer_after(2 * OUTAGE_TIMEOUT, Ok(contended(true)));
    let _sent = f.grant_without_token();
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Unavailable)));
    let adopted = Reply::Adopted {
        expires_in: OPTIONS.ttl,
        token: GRANT.token + 1024,
    };
    f.answer_after(Duration::ZERO, Ok(adopted));
    let campaign = f.campaign().unwrap().unwrap();
    assert!(!campaign.is_value_written);
    assert_eq!(campaign.lease.grant().token, GRANT.token + 1024);
}
