//! Tests of requests whose sender writes them and reads the replies.

use super::*;

/// The receiving end of one request's outcome, and the right to set it.
fn one_completion() -> (Submitted, Completion) {
    let (submitted, mut completions) = Submitted::new(1);
    (submitted, completions.remove(0))
}

/// A pipeline with a connection.
fn connected() -> Fixture {
    let f = fixture();
    f.acquire("warm-up");
    f
}

impl Fixture {
    /// Sends an acquire. Returns the request if this thread has written it, and the receiving end of its outcome.
    fn send(&self, name: &str) -> (Option<SentRequest<'_>>, Submitted) {
        let (submitted, completion) = one_completion();
        (self.pipeline.send(acquire_of(name), completion), submitted)
    }

    /// Sends an acquire on the connection, which is free.
    fn send_now(&self, name: &str) -> (SentRequest<'_>, Submitted) {
        let (sent, submitted) = self.send(name);
        (sent.expect("the connection is free"), submitted)
    }

    /// How often maintenance was requested at once, since the last call.
    fn take_urgent_requests(&self) -> usize {
        self.urgent_calls.swap(0, Ordering::SeqCst)
    }
}

/// Reads until nothing is left to read.
fn receive(mut sent: SentRequest<'_>) {
    assert!(eventually(LONG, || sent.receive()));
}

fn is_granted(submitted: &Submitted) -> bool {
    matches!(submitted.outcomes()[..], [Some(Ok(Reply::Granted { .. }))])
}

fn is_refused(submitted: &Submitted) -> bool {
    matches!(&submitted.outcomes()[..], [Some(Err(error))] if error.kind() == ErrorKind::Shutdown)
}

#[test]
fn the_caller_sends_if_the_connection_is_free() {
    let f = connected();
    f.take_urgent_requests();
    let (mut sent, submitted) = f.send_now("a");
    assert!(eventually(LONG, || f.exists("a")), "nothing was written");
    assert!(!is_granted(&submitted), "no thread reads the reply yet");
    assert!(eventually(LONG, || sent.receive()));
    assert!(is_granted(&submitted));
    assert_eq!(f.take_urgent_requests(), 0);
    assert!(sent.receive(), "there is no more to read");
    assert!(f.is_idle());
}

#[test]
fn the_background_reads_for_a_sender_that_does_not() {
    let f = connected();
    let (mut sent, submitted) = f.send_now("a");
    assert!(f.pipeline.run_maintenance(), "work is left");
    assert!(!is_granted(&submitted), "it leaves the reply to the sender");
    assert!(eventually(LONG, || !f.pipeline.run_maintenance()));
    assert!(is_granted(&submitted));
    assert!(sent.receive());
    assert!(f.is_idle());
}

#[test]
fn the_background_reads_late_replies() {
    let f = connected();
    f.server.stop();
    let (mut sent, submitted) = f.send_now("a");
    assert!(!sent.receive());
    assert_eq!(f.take_urgent_requests(), 0);
    drop(sent);
    assert!(submitted.outcomes()[0].is_none());
    assert_eq!(f.take_urgent_requests(), 1);
    // One batch is in flight at a time.
    let (sent, behind) = f.send("b");
    assert!(sent.is_none());
    assert_eq!(f.take_urgent_requests(), 1);
    f.server.resume();
    f.pipeline.run_maintenance();
    assert!(is_granted(&submitted));
    assert!(behind.outcomes()[0].is_none(), "other pipelines come first");
    assert_eq!(f.take_urgent_requests(), 1);
    f.pipeline.write_due();
    assert!(f.unanswered() == 1 && behind.outcomes()[0].is_none());
    f.pipeline.run_maintenance();
    assert!(is_granted(&behind));
    assert!(f.is_idle());
}

#[test]
fn requests_behind_a_sender_follow_its_reply() {
    let f = connected();
    let (sent, first) = f.send_now("a");
    let (queued, second) = f.send("b");
    assert!(queued.is_none());
    assert_eq!(f.take_urgent_requests(), 0, "the sender will request it");
    receive(sent);
    assert!(is_granted(&first));
    assert_eq!(f.take_urgent_requests(), 1);
    f.pipeline.run_maintenance();
    assert!(is_granted(&second));
    assert!(f.is_idle());
}

#[test]
fn a_sender_does_not_wait_for_other_threads_releases() {
    let f = fixture();
    let lease = f.warm_up("warm-up");
    let (mut sent, submitted) = f.send_now("a");
    assert!(eventually(LONG, || f.exists("a")));
    f.server.stop();
    f.pipeline.send_release(f.release("warm-up", lease));
    assert_eq!(f.unanswered(), 2);
    assert!(sent.receive(), "its own reply has come");
    assert!(is_granted(&submitted));
    assert_eq!((f.take_urgent_requests(), f.unanswered()), (0, 1));
    // The next sender writes behind the release.
    let (sent, submitted) = f.send_now("b");
    f.server.resume();
    receive(sent);
    assert!(is_granted(&submitted));
    assert_eq!((f.take_urgent_requests(), f.unanswered()), (0, 0));
    assert!(!f.exists("warm-up"));
}

#[test]
fn a_leader_requests_the_maintenance_that_reads_for_a_sender() {
    let f = connected();
    let (mut sent, submitted) = f.send_now("a");
    let leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock());
    assert!(sent.receive(), "another thread leads");
    drop(leadership);
    assert_eq!(f.take_urgent_requests(), 1);
    f.pipeline.run_maintenance();
    assert!(is_granted(&submitted));
}

#[test]
fn a_sender_whose_reply_was_read_delays_no_maintenance() {
    let f = connected();
    let (_sent, submitted) = f.send_now("a");
    f.acquire("b");
    assert!(
        is_granted(&submitted),
        "the caller of `b` has read the reply"
    );
    drop(f.pipeline.state.lock().connection.take());
    let (_, behind) = f.send("c");
    assert_eq!(f.take_urgent_requests(), 1);
    f.pipeline.run_maintenance();
    assert!(is_granted(&behind));
}

#[test]
fn the_sender_of_an_old_connection_changes_nothing() {
    let f = connected();
    let (mut old, _) = f.send_now("a");
    drop(f.pipeline.state.lock().connection.take());
    f.acquire("b");
    let (sent, submitted) = f.send_now("c");
    assert!(old.receive());
    old.is_done = false;
    drop(old);
    assert!(!is_granted(&submitted));
    assert_eq!(f.take_urgent_requests(), 0);
    receive(sent);
    assert!(is_granted(&submitted));
}

#[test]
fn a_flush_stays_queued_beside_a_sender() {
    let f = connected();
    let (flushed, completion) = one_completion();
    f.pipeline.submit(vec![(Command::Flush, completion)]);
    let (sent, submitted) = f.send_now("a");
    receive(sent);
    assert!(is_granted(&submitted));
    assert!(flushed.outcomes()[0].is_none());
    f.pipeline.run_maintenance();
    assert!(matches!(flushed.outcomes()[..], [Some(Ok(Reply::Done))]));
}

#[test]
fn a_sender_needs_a_fresh_connection() {
    let f = fixture();
    let (sent, first) = f.send("a");
    assert!(sent.is_none(), "there is no connection");
    assert_eq!(f.take_urgent_requests(), 1);
    f.pipeline.run_maintenance();
    assert!(is_granted(&first));
    f.pipeline.shared.endpoint.epoch().count_break();
    let (sent, second) = f.send("b");
    assert!(sent.is_none(), "the connection is stale");
    f.pipeline.write_due();
    assert_eq!(f.unanswered(), 0, "nothing is written there");
    f.pipeline.run_maintenance();
    f.pipeline.run_maintenance();
    assert!(is_granted(&second));
}

#[test]
fn a_lost_connection_ends_the_senders_request() {
    let mut f = connected();
    f.server.stop();
    let (submitted, completion) = one_completion();
    let sent = f.pipeline.send(acquire_of("a"), completion).unwrap();
    f.server.kill();
    receive(sent);
    assert!(matches!(submitted.outcomes()[..], [Some(Err(_))]));
}

#[test]
fn a_write_that_fails_ends_the_senders_request() {
    let f = connected();
    let state = f.pipeline.state.lock();
    let socket = state.connection.as_ref().unwrap().socket();
    socket.shutdown(std::net::Shutdown::Both).unwrap();
    drop(state);
    let (sent, submitted) = f.send("a");
    assert!(sent.is_none());
    assert!(matches!(submitted.outcomes()[..], [Some(Err(_))]));
    assert!(f.pipeline.state.lock().connection.is_none());
}

#[test]
fn a_sender_without_a_connection_delays_no_maintenance() {
    let f = connected();
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    leadership.sender_reads_on = true;
    // A release that is written behind the request may find that the connection is broken.
    leadership.lose_connection(&Error::new(ErrorKind::Unavailable, ""));
    drop(leadership);
    assert!(!f.pipeline.state.lock().is_left_to_sender());
}

#[test]
fn with_a_short_timeout_the_background_sends() {
    let f = with_timeout(SHORTEST_TIMEOUT_OF_SENDERS - Duration::from_millis(1));
    let is_connected = || {
        let (_, outcome) = f.acquire_within("warm-up", LONG);
        outcome.is_ok() && f.connection().is_some()
    };
    assert!(eventually(LONG, is_connected));
    f.take_urgent_requests();
    let (sent, _submitted) = f.send("a");
    assert!(sent.is_none());
    assert_eq!(f.take_urgent_requests(), 1);
}

#[test]
fn a_sender_writes_behind_few_releases_only() {
    let f = fixture();
    let release_of = |name: &str| f.release(name, f.acquire(name));
    let (first, second) = (release_of("a"), release_of("b"));
    f.pipeline.send_release(first);
    let (sent, submitted) = f.send_now("c");
    receive(sent);
    assert!(is_granted(&submitted));
    for _ in 0..MAX_UNANSWERED {
        f.pipeline.send_release(second.clone());
    }
    assert!(f.unanswered() >= MAX_UNANSWERED);
    let (sent, submitted) = f.send("d");
    assert!(
        sent.is_none(),
        "its reply would come behind too many others"
    );
    f.pipeline.run_maintenance();
    assert!(is_granted(&submitted));
}

#[test]
fn a_sender_that_stops_after_the_client_ends_its_request() {
    let f = connected();
    f.server.stop();
    let (sent, submitted) = f.send_now("a");
    f.pipeline.end();
    assert!(submitted.outcomes()[0].is_none(), "its sender may read on");
    drop(sent);
    assert!(is_refused(&submitted));
}

#[test]
fn a_client_that_ends_ends_requests_in_flight() {
    let f = connected();
    f.server.stop();
    let (sent, submitted) = f.send_now("a");
    drop(sent);
    f.pipeline.end();
    assert!(is_refused(&submitted));
}
