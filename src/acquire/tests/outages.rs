//! Tests of failed attempts: their effect on their caller and on other callers.

use super::*;
use crate::util::sync::Mutex;

#[test]
fn short_deadline_is_no_outage() {
    let f = fixture();
    let limit = Duration::from_secs(30);
    f.answer_after(Duration::ZERO, Ok(contended(false)));
    f.answer_after(limit, Err(error(ErrorKind::Timeout)));
    let until = Until::At(f.clock.now().after(limit));
    assert!(f.acquire(until).unwrap().is_none());
}

#[test]
fn unanswered_try_is_an_outage() {
    let f = fixture();
    f.answer_after(COMMAND_TIMEOUT, Err(error(ErrorKind::Timeout)));
    let outage = f.acquire(Until::Now).unwrap_err();
    assert_eq!(outage.kind(), ErrorKind::Timeout);
    assert_eq!(*f.store.asked.lock(), [QueueMode::None], "it does not wait");
}

/// The first attempt may end early, for example because another caller has failed to connect. A later attempt then has
/// only the rest of the command time-out.
#[test]
fn attempts_of_one_call_share_its_time() {
    type Outcome = fn() -> Result<Reply, Error>;
    let outcomes: [Outcome; 4] = [
        || Err(error(ErrorKind::Unavailable)),
        || Err(error(ErrorKind::Timeout)),
        // The grant arrives after its ttl.
        || Ok(Reply::granted(7)),
        || {
            Ok(Reply::SplitVote {
                expires_in: OPTIONS.ttl,
                may_be_taken: false,
            })
        },
    ];
    let options = Options {
        ttl: Duration::from_secs(10),
        ..OPTIONS
    };
    let third = COMMAND_TIMEOUT / 3;
    let waits = [None, Some(Duration::ZERO), Some(Duration::from_secs(30))];
    for (outcome, wait) in outcomes
        .into_iter()
        .flat_map(|outcome| waits.map(|wait| (outcome, wait)))
    {
        let mut store = Scripted::default();
        store.free_servers = Some(2);
        let f = with_store(store);
        let deadlines: Arc<Mutex<Vec<MonotonicTime>>> = Arc::default();
        for _ in 0..8 {
            let (clock, deadlines) = (f.clock.clone(), Arc::clone(&deadlines));
            f.answer(move |request| {
                deadlines.lock().push(request.deadline);
                let left = request.deadline.since(clock.now());
                clock.advance(third.min(left));
                match left < third {
                    true => Err(error(ErrorKind::Timeout)),
                    false => outcome(),
                }
            });
        }
        let started = f.clock.now();
        let until = wait.map_or(Until::Now, |wait| Until::At(started.after(wait)));
        let ended = f.acquire_on(options, until);
        let deadlines = deadlines.lock();
        let last = deadlines[deadlines.len() - 1];
        let latest = match wait.filter(|wait| !wait.is_zero()) {
            Some(wait) => started.after(wait + Duration::from_millis(100)),
            None => deadlines[0],
        };
        let case = format!("{wait:?}, {:?}: {ended:?} after {deadlines:?}", outcome());
        assert!(last <= latest, "{case}");
        assert!(!matches!(ended, Ok(Some(_))), "{case}");
    }
}

#[test]
fn waiter_outlasts_an_outage() {
    for kind in [ErrorKind::Timeout, ErrorKind::Unavailable] {
        let f = fixture();
        f.answer_after(Duration::ZERO, Err(error(kind)));
        f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
        assert!(f.acquire(Until::Forever).unwrap().is_some());
    }
}

#[test]
fn try_behind_others_reports_a_known_outage() {
    let (f, key) = (fixture(), key());
    let _before = f.queues.join(&key, OPTIONS, None);
    assert!(f.acquire(Until::Now).unwrap().is_none());
    let now = f.clock.now();
    f.acquirer
        .outage
        .begin(ServerId::ONLY, now, now, error(ErrorKind::Unavailable));
    let outage = f.acquire(Until::Now).unwrap_err();
    assert_eq!(outage.kind(), ErrorKind::Unavailable);
    assert!(f.clock.now() < now.after(COMMAND_TIMEOUT), "at once");
    f.acquirer.end();
    let ended = f.acquire(Until::Now).unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::Shutdown);
}

#[test]
fn own_reply_counts_more_than_known_outage() {
    let f = fixture();
    let (acquirer, clock) = (Arc::downgrade(&f.acquirer), f.clock.clone());
    *f.store.on_request.lock() = Some(Box::new(move || {
        let (acquirer, now) = (acquirer.upgrade().unwrap(), clock.now());
        acquirer
            .outage
            .begin(ServerId::ONLY, now, now, error(ErrorKind::Unavailable));
    }));
    let limit = Duration::from_secs(30);
    f.answer_after(Duration::ZERO, Ok(contended(false)));
    f.answer_after(limit, Ok(contended(false)));
    let until = Until::At(f.clock.now().after(limit));
    assert!(f.acquire(until).unwrap().is_none());
}

/// The lease of the request without a reply is released, since Redis may have granted it.
#[test]
fn a_waiter_keeps_its_place_after_a_request_without_a_reply() {
    let f = fixture();
    f.answer_after(Duration::ZERO, Ok(contended(true)));
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Unavailable)));
    f.answer_after(Duration::ZERO, Ok(Reply::granted(7)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    let at_its_place = QueueMode::Rejoin {
        since: SINCE,
        polls: false,
    };
    let existing = QueueMode::Existing { notified: true };
    let asked = [QueueMode::Notified, existing, at_its_place];
    assert_eq!(*f.store.asked.lock(), asked);
}
