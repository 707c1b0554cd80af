//! Tests of queued releases and retries: their batches, flushes, and the attempts to connect.

use super::*;

#[test]
fn a_release_is_left_to_the_leader() {
    let f = fixture();
    f.pipeline.state.lock().is_led = true;
    f.pipeline.send_release(f.release("a", LeaseId::random()));
    let mut state = f.pipeline.state.lock();
    assert!(state.has_unawaited());
    assert_eq!(f.hook_calls.load(Ordering::SeqCst), 0);
    state.is_led = false;
}

#[test]
fn an_ending_leader_writes_one_batch() {
    let f = fixture();
    f.acquire("a");
    let leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    for _ in 0..3 * MAX_BATCH {
        f.pipeline.send_release(f.release("b", LeaseId::random()));
    }
    drop(leadership);
    assert_eq!(f.unanswered(), MAX_BATCH);
    assert_eq!(f.hook_calls.load(Ordering::SeqCst), 1);
    f.pipeline.send_release(f.release("b", LeaseId::random()));
    assert_eq!(
        f.unanswered(),
        MAX_BATCH,
        "the next release is left to the background, too"
    );
    assert_eq!(f.hook_calls.load(Ordering::SeqCst), 2);
    let mut queued = Vec::new();
    while f.pipeline.state.lock().has_unawaited() {
        f.pipeline.state.lock().next_batch(MAX_BATCH, &mut queued);
    }
    assert_eq!(queued.len(), 2 * MAX_BATCH + 1);
}

fn next(state: &mut PipelineState) -> Vec<PendingRequest> {
    let mut batch = Vec::new();
    state.next_batch(MAX_BATCH, &mut batch);
    batch
}

fn awaited(command: Command) -> (Arc<Caller>, PendingRequest) {
    let caller = Caller::new(1);
    let completion = Completion::new(&caller, 0);
    (caller, PendingRequest::new(command, Some(completion)))
}

/// The state of a pipeline with `count` queued releases.
fn with_unawaited(count: usize) -> PipelineState {
    let mut state = PipelineState::new(Reports::default());
    for n in 0..count {
        let release = held(&n.to_string()).into_release(None);
        state.enqueue_release(release.unwrap());
    }
    state
}

#[test]
fn an_awaited_request_is_in_the_next_batch() {
    let mut state = with_unawaited(100 * MAX_BATCH);
    let (_caller, acquire) = awaited(acquire_of("x"));
    state.enqueue([acquire]);
    let batch = next(&mut state);
    let acquires = batch.iter().filter(|one| one.completion.is_some());
    assert_eq!((acquires.count(), batch.len()), (1, 1 + MAX_BATCH));
}

#[test]
fn awaited_requests_leave_room_for_releases() {
    let mut state = with_unawaited(MAX_BATCH);
    let (_callers, acquires): (Vec<_>, Vec<_>) = (0..2 * MAX_BATCH)
        .map(|n| awaited(acquire_of(&format!("x{n}"))))
        .unzip();
    state.enqueue(acquires);
    assert_eq!(next(&mut state).len(), 2 * MAX_BATCH);
    assert!(!state.has_unawaited());
}

#[test]
fn releases_of_a_key_precede_its_acquire() {
    let last = 100 * MAX_BATCH - 1;
    let mut state = with_unawaited(last + 1);
    let again = held(&last.to_string()).into_release(None);
    state.enqueue_release(again.unwrap());
    let refused = held(&last.to_string()).on_reply(Err(Error::new(ErrorKind::Denied, "")));
    state.apply(refused);
    let (_caller, acquire) = awaited(acquire_of(&last.to_string()));
    state.enqueue([acquire]);
    let batch = next(&mut state);
    let of_key = |one: &&PendingRequest| one.command.key() == Some(&key(&last.to_string()));
    assert_eq!(batch.iter().filter(of_key).count(), 4);
    assert!(!state.has_refused_releases());
    let mut left = 0;
    while state.has_unawaited() {
        let batch = next(&mut state);
        assert_eq!(batch.iter().filter(of_key).count(), 0);
        left += batch.len();
    }
    assert_eq!(left, last - (MAX_BATCH - 3));
}

#[test]
fn refused_releases_are_written_in_bounded_batches() {
    let mut state = PipelineState::new(Reports::default());
    for n in 0..10 * MAX_BATCH {
        let refused = held(&n.to_string()).on_reply(Err(Error::new(ErrorKind::Denied, "")));
        state.apply(refused);
    }
    let (_caller, flush) = awaited(Command::Flush);
    state.enqueue([flush]);
    let mut batches = Vec::new();
    loop {
        let batch = next(&mut state);
        batches.push(batch.iter().filter(|one| !one.is_flush()).count());
        if batch.iter().any(PendingRequest::is_flush) {
            break;
        }
    }
    assert_eq!(batches, [MAX_BATCH; 10], "the flush goes last");
}

#[test]
fn expired_releases_are_given_up_in_an_outage() {
    let mut state = with_unawaited(2);
    let mut over = held("over").into_release(None).unwrap();
    over.release.until = MonotonicTime::now();
    state.enqueue_release(over);
    let error = Error::new(ErrorKind::Unavailable, "");
    state.report_all_late(&error, MonotonicTime::now());
    assert_eq!(state.failed(), 2);
    state.report_all_late(&error, MonotonicTime::now().after(LONG / 2));
    assert_eq!((state.failed(), next(&mut state).len()), (2, 2));
}

#[test]
fn only_a_flush_repeats_undos_early() {
    let cut = Error::new(ErrorKind::Unavailable, "");
    let unanswered = PendingRequest::new(acquire_of("a"), None).on_connection_lost(&cut, false);
    let Next::RetryNow(undo) = unanswered else {
        panic!("it may have been granted");
    };
    let later = undo.on_reply(Ok(Reply::Missing));
    assert!(
        matches!(later, Next::RetryLater(_)),
        "the acquire may still arrive"
    );
    let mut state = PipelineState::new(Reports::default());
    state.apply(later);
    let (_caller, acquire) = awaited(acquire_of("a"));
    state.enqueue([acquire]);
    assert_eq!(next(&mut state).len(), 1, "it is not due");
    let (_caller, flush) = awaited(Command::Flush);
    state.enqueue([flush]);
    assert_eq!(next(&mut state).len(), 2);
}

#[test]
fn a_flush_fails_while_releases_are_refused() {
    let f = fixture();
    let lease = f.acquire("a");
    let may_delete = |may: &str| {
        let command = ["ACL", "SETUSER", "default", may];
        f.server.command(&command).unwrap();
    };
    may_delete("-del");
    f.pipeline.send_release(f.release("a", lease));
    let error = f.ask(Command::Flush, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(f.exists("a"));
    may_delete("+del");
    let flushed = f.ask(Command::Flush, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert!(!f.exists("a"));
}

#[test]
fn an_appointed_flush_ends_with_its_deadline() {
    let f = &with_timeout(LONG);
    let lease = f.acquire("a");
    f.server.stop();
    f.pipeline.send_release(f.release("a", lease));
    assert_eq!(f.unanswered(), 1, "its reply is read by the next leader");
    let leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    std::thread::scope(|scope| {
        let deadline = MonotonicTime::now().after(Duration::from_secs(1));
        let flush = scope.spawn(move || {
            let outcome = f.pipeline.flush(deadline);
            (outcome, MonotonicTime::now().since(deadline))
        });
        f.wait_for_queue(1);
        drop(leadership);
        let (outcome, late) = flush.join().unwrap();
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
        assert!(late < LONG / 2, "the command time-out is longer");
    });
}

#[test]
fn a_flush_moves_to_another_connection_after_a_cut() {
    let f = fixture();
    let lease = f.acquire("a");
    f.cut();
    f.pipeline.send_release(f.release("a", lease));
    let flushed = f.ask(Command::Flush, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert!(f.is_idle() && !f.exists("a"));
}

/// A leader fails to connect to a stopped server, with a deadline of `eighths` eighths of the connect time-out. Returns
/// whether another caller, which has more time, is then still queued.
fn caller_still_waits(eighths: u32) -> bool {
    let timeout = Duration::from_secs(2);
    let f = with_timeout(timeout);
    f.server.stop();
    let patient = Caller::new(1);
    let completion = Completion::new(&patient, 0);
    let waiting = PendingRequest::new(acquire_of("patient"), Some(completion));
    f.pipeline.state.lock().enqueue([waiting]);
    let (_, outcome) = f.acquire_within("leader", timeout * eighths / 8);
    outcome.unwrap_err();
    let state = f.pipeline.state.lock();
    let mut completion = state.awaited.iter().filter_map(|p| p.completion.as_ref());
    completion.any(|completion| completion.is_of(&patient))
}

#[test]
fn a_leader_without_time_fails_alone() {
    assert!(caller_still_waits(1));
    assert!(!caller_still_waits(7), "the leader had enough time");
}

#[test]
fn attempts_to_connect_back_off_to_500_ms() {
    let mut state = with_unawaited(1);
    let now = MonotonicTime::now();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        state.back_off(now);
        let waits = |ms: &u64| !state.is_due(now.after(Duration::from_millis(*ms)));
        pauses.push(
            [0, 99, 199, 399, 499, 500]
                .iter()
                .filter(|ms| waits(ms))
                .count(),
        );
    }
    assert_eq!(pauses, [0, 2, 3, 4, 5, 5, 5, 5]);
    state.reset_connect_pauses();
    assert!(state.is_due(now), "a connection resets the pause");
}

#[test]
fn a_queued_release_is_reported_late_once() {
    let (reports, texts) = recorded_reports();
    let mut state = PipelineState::new(reports);
    state.enqueue_release(held("a").into_release(None).unwrap());
    let error = Error::new(ErrorKind::Unavailable, "");
    let now = MonotonicTime::now();
    state.report_all_late(&error, now);
    state.report_all_late(&error, now.after(Duration::from_secs(1)));
    for release in next(&mut state) {
        release.on_reply(Ok(Reply::Done));
    }
    assert_eq!(*texts.lock(), ["a 7 Unavailable"]);
}

#[test]
fn an_unwritten_request_has_a_known_outcome() {
    // No server listens at this port.
    let server = Server::start().unwrap();
    let f = at(server, "redis://127.0.0.1:1", Duration::from_millis(200));
    let (_, failed) = f.acquire_within("k", LONG);
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Unavailable);
    // The caller's deadline has passed before the pipeline connects.
    let (_, unsent) = f.acquire_within("k", Duration::ZERO);
    assert_eq!(unsent.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(f.pipeline.state.lock().awaited.is_empty());
}
