//! What a lane makes of what is owed: who takes it along, what a flush says of it, who keeps waiting
//! for a connection.

use super::*;

fn acquire_of(name: &str) -> Command {
    Command::Acquire {
        key: key(name),
        lease: LeaseId::random(),
        ttl: LONG,
        standing: crate::store::Standing::None,
    }
}

#[test]
fn who_lets_go_while_another_leads_leaves_the_release_to_the_leader_and_rings_for_nobody() {
    let f = fixture();
    f.lane.state.lock().led = true;
    f.lane.post(f.release("a", LeaseId::random()));
    let mut state = f.lane.state.lock();
    assert_eq!(state.queue.iter().len(), 1);
    assert_eq!(f.rings.load(Ordering::SeqCst), 0);
    state.led = false;
}

#[test]
fn who_steps_down_writes_one_batch_and_leaves_the_rest_to_the_background() {
    let f = fixture();
    f.acquire("a");
    let leadership = f.lane.claim(&mut f.lane.state.lock()).unwrap();
    for _ in 0..3 * MAX_BATCH {
        f.lane.post(f.release("b", LeaseId::random()));
    }
    drop(leadership);
    assert_eq!(f.owed(), 1);
    let queued = f.lane.state.lock().queue.iter().len();
    assert_eq!(queued, 2 * MAX_BATCH);
    assert_eq!(f.rings.load(Ordering::SeqCst), 1);
    f.lane.post(f.release("b", LeaseId::random()));
    assert_eq!(f.owed(), 1, "nor does the next one that lets go");
    assert_eq!(f.rings.load(Ordering::SeqCst), 2);
}

#[test]
fn what_is_repeated_in_case_goes_along_with_a_flush_and_with_nothing_else() {
    let cut = Error::new(ErrorKind::Unavailable, "");
    let unanswered = Pending::new(acquire_of("a"), None).unanswered(&cut, false);
    let Next::Owed(undo) = unanswered else {
        panic!("it may have been granted");
    };
    let Next::Owed(repeated) = undo.unanswered(&cut, false) else {
        panic!("it may still arrive");
    };
    let next = |state: &mut State| {
        let mut batch = Vec::new();
        state.next_batch(MAX_BATCH, &mut batch);
        batch.len()
    };
    let mut state = State::default();
    state.settle(Next::Owed(repeated));
    state.queue.push_back(Pending::new(acquire_of("b"), None));
    assert_eq!(next(&mut state), 1, "it is not due");
    let (flush, call) = (Command::Flush { lane: 0 }, Call::new(1));
    let ticket = Ticket::new(&call, 0);
    state.queue.push_back(Pending::new(flush, Some(ticket)));
    assert_eq!(next(&mut state), 2);
}

#[test]
fn a_flush_says_so_while_releases_are_refused() {
    let f = fixture();
    let lease = f.acquire("a");
    let may_delete = |may: &str| {
        let command = ["ACL", "SETUSER", "default", may];
        f.server.command(&command).unwrap();
    };
    may_delete("-del");
    f.lane.post(f.release("a", lease));
    let error = f.ask(Command::Flush { lane: 0 }, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(f.exists("a"));
    may_delete("+del");
    let flushed = f.ask(Command::Flush { lane: 0 }, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert!(!f.exists("a"));
}

#[test]
fn a_flush_on_a_connection_that_was_cut_is_answered_on_another() {
    let f = fixture();
    let lease = f.acquire("a");
    f.cut();
    f.lane.post(f.release("a", lease));
    let flushed = f.ask(Command::Flush { lane: 0 }, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert!(f.is_idle() && !f.exists("a"));
}

/// Whether somebody patient is still in the queue, of a server that stands still, when a leader has
/// left that had `of_eight` eighths of the time that a connection may take.
fn waits_on(of_eight: u32) -> bool {
    let timeout = Duration::from_secs(2);
    let f = with_timeout(timeout);
    f.server.stop();
    let patient = Call::new(1);
    let ticket = Ticket::new(&patient, 0);
    let waiting = Pending::new(acquire_of("patient"), Some(ticket));
    f.lane.state.lock().queue.push_back(waiting);
    let (_, outcome) = f.acquire_within("leader", timeout * of_eight / 8);
    outcome.unwrap_err();
    let state = f.lane.state.lock();
    let mut tickets = state.queue.iter().filter_map(|p| p.ticket.as_ref());
    tickets.any(|ticket| Arc::ptr_eq(ticket.call(), &patient))
}

#[test]
fn a_leader_in_a_hurry_says_nothing_of_the_connection_to_who_can_wait_for_it() {
    assert!(waits_on(1));
    assert!(!waits_on(7), "it had time enough to know");
}
