use leasehold_testbed::{Server, eventually};

use super::*;

const LONG: Duration = Duration::from_secs(20);

/// Hears nothing.
struct Deaf;

impl Listener for Deaf {
    fn near(&self, _: &Key, _: LeaseId) {}
    fn granted(&self, _: &Key, _: LeaseId, _: Grant) {}
    fn forced(&self, _: &Key, _: LeaseId, _: HolderId) {}
    fn changed(&self, _: &Key) -> Option<Watched> {
        None
    }
    fn all_changed(&self) {}
    fn seen(&self, _: &Watched, _: Option<&[u8]>) {}
    fn clock_moved(&self) {}
    fn refused(&self, _: &Error) {}
}

#[test]
fn a_connection_with_too_many_unanswered_commands_is_given_up() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG, LONG).unwrap());
    let holder = HolderId::of_this_process();
    let wakeups = Arc::new(Wakeups::new(endpoint, &holder, "p:", LONG));
    let crew = Crew::new();
    wakeups.start(&crew, Arc::new(Deaf)).unwrap();
    let key = Key::new("p:", "k", 16).unwrap();
    let watch = || {
        wakeups.watch(vec![Watched {
            key: key.clone(),
            lease: None,
        }])
    };
    assert!(eventually(LONG, watch));
    assert!(eventually(LONG, || wakeups.state.lock().asked.is_empty()));
    server.stop();
    let asked = std::iter::repeat_with(watch).take_while(|is_heard| *is_heard);
    assert_eq!(asked.take(MOST_ASKED + 1).count(), MOST_ASKED);
    assert_eq!(wakeups.standing(), Standing::Polling);
    server.resume();
    assert!(eventually(LONG, || wakeups.standing() == Standing::Told));
    wakeups.stop();
}
