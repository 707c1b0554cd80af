use super::*;
use crate::lease::{CallbackExecutor, Grant};
use crate::process::threads::ThreadGroup;
use crate::util::clock::MonotonicTime;

fn lease(name: &str, callbacks: &Arc<CallbackExecutor>) -> Arc<Lease> {
    let (key, now) = (Key::new("", name, 16).unwrap(), MonotonicTime::now());
    let grant = Grant::usual(key, now);
    Arc::new(Lease::new(grant, Arc::clone(callbacks), None))
}

#[test]
fn tracked_leases_are_bounded_and_removal_makes_room() {
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    let tracked = TrackedLeases::default();
    let first = lease("first", &callbacks);
    assert!(tracked.insert(&first));
    for n in 1..MAX_TRACKED {
        assert_eq!(tracked.room(), MAX_TRACKED - n);
        assert!(tracked.insert(&lease(&n.to_string(), &callbacks)));
    }
    let late = lease("late", &callbacks);
    assert_eq!(tracked.room(), 0);
    assert!(!tracked.insert(&late));
    assert!(tracked.get(&late.grant().key).is_none());
    assert!(tracked.insert(&first), "the key is tracked already");
    let next = lease("first", &callbacks);
    assert!(tracked.insert(&next), "the same key");
    tracked.remove(&first);
    assert_eq!(tracked.room(), 0, "another lease has the key");
    tracked.remove(&next);
    assert!(tracked.insert(&late));
    callbacks.stop();
}
