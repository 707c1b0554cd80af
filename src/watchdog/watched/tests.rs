use super::*;
use crate::clock::Moment;
use crate::lease::{Courier, Terms};
use crate::thread::Crew;

fn lease(name: &str, courier: &Arc<Courier>) -> Arc<Lease> {
    let (key, now) = (Key::new("", name, 16).unwrap(), Moment::now());
    let terms = Terms::usual(key, now);
    Arc::new(Lease::new(terms, Arc::clone(courier), None))
}

#[test]
fn no_more_are_watched_than_there_is_room_for_and_one_that_goes_makes_room() {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    let watched = WatchedLeases::default();
    let first = lease("first", &courier);
    assert!(watched.insert(&first));
    for n in 1..MOST {
        assert_eq!(watched.room(), MOST - n);
        assert!(watched.insert(&lease(&n.to_string(), &courier)));
    }
    let late = lease("late", &courier);
    assert_eq!(watched.room(), 0);
    assert!(!watched.insert(&late));
    assert!(watched.get(&late.terms().key).is_none());
    assert!(watched.insert(&first), "it has its place");
    let next = lease("first", &courier);
    assert!(watched.insert(&next), "of the same key");
    watched.remove(&first);
    assert_eq!(watched.room(), 0, "the place is another's");
    watched.remove(&next);
    assert!(watched.insert(&late));
    courier.stop();
}
