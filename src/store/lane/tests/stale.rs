//! A connection that may be dead, or lead to the wrong server, is replaced before it is written on.

use std::sync::atomic::Ordering;

use super::{Fixture, fixture};

impl Fixture {
    /// Another connection breaks.
    fn make_stale(&self) {
        self.lane.common.endpoint.epoch().broke();
    }

    fn ask_server(&self, args: &[&str]) -> String {
        let reply = self.server.command(args).unwrap();
        reply.as_text().unwrap_or_default().to_owned()
    }
}

#[test]
fn answers_owed_on_a_stale_connection_are_read() {
    let f = fixture();
    let lease = f.acquire("k");
    // The release is answered by NOSCRIPT, so that nothing is done unless the answer is read.
    f.ask_server(&["SCRIPT", "FLUSH"]);
    let before = f.connection();
    f.lane.post(f.release("k", lease));
    assert_eq!(f.owed(), 1);
    f.make_stale();
    f.acquire("k");
    assert_ne!(f.connection(), before);
}

#[test]
fn a_release_is_not_written_on_a_stale_connection() {
    let f = fixture();
    let lease = f.acquire("k");
    let (before, rings) = (f.connection(), f.rings.load(Ordering::SeqCst));
    f.make_stale();
    f.lane.post(f.release("k", lease));
    assert_eq!(f.owed(), 0);
    assert!(f.exists("k"));
    assert!(
        f.rings.load(Ordering::SeqCst) > rings,
        "left to the background"
    );
    f.lane.settle();
    assert!(!f.exists("k"));
    assert_ne!(f.connection(), before);
}
