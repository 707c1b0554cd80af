//! Tests of callers of a quorum. The tests set the replies.

use super::*;

/// A client of a quorum, whose nodes cannot notify.
fn quorum() -> Fixture {
    let mut store = Scripted::default();
    store.free_servers = Some(2);
    let f = with_store(store);
    *f.store.queue_mode.lock() = Some(QueueMode::None);
    f
}

impl Fixture {
    fn contention(&self) -> &Contention {
        self.acquirer.contention.as_ref().unwrap()
    }
}

#[test]
fn attempts_set_the_unit_of_pauses() {
    let (f, slow) = (quorum(), Duration::from_millis(5));
    f.answer_after(slow, Ok(contended(false)));
    assert!(f.acquire(Until::Now).unwrap().is_none());
    assert!(f.contention().round_trip(&key()) >= slow);
    // The time of a failed attempt is not recorded: the attempt may have ended at once.
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Denied)));
    f.acquire(Until::Now).unwrap_err();
    assert!(f.contention().round_trip(&key()) >= slow);
}

/// The key is watched once the lock may be taken.
#[test]
fn a_caller_of_a_quorum_waits_for_its_turn() {
    let f = quorum();
    *f.store.on_track.lock() = Some(Box::new(|| true));
    for may_be_taken in [false, true] {
        let expires_in = Duration::from_millis(1);
        f.answer(move |_| {
            Ok(Reply::SplitVote {
                expires_in,
                may_be_taken,
            })
        });
    }
    f.answer(|_| Ok(Reply::granted(7)));
    assert!(f.acquire(Until::Forever).unwrap().is_some());
    assert_eq!(f.tracked(), 1);
}
