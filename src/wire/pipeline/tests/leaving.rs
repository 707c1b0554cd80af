//! Tests of a leader that leaves at its own deadline, with a batch in flight.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::*;
use crate::command::{Mode, Write};

const SHORT: Duration = Duration::from_millis(50);

impl Fixture {
    /// Queues an acquire. Returns its caller, which does not lead.
    fn queue(&self, name: &str) -> Arc<Caller> {
        let caller = Caller::new(1);
        let acquire = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key(name),
            lease: LeaseId::random(),
            ttl: LONG,
            queue_mode: crate::command::QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        let request = PendingRequest::new(acquire, Some(Completion::new(&caller, 0)));
        self.pipeline.state.lock().enqueue([request]);
        caller
    }

    fn leaves(&self, name: &str) {
        let (_, outcome) = self.acquire_within(name, SHORT);
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout, "{name}");
    }

    fn queued(&self) -> usize {
        self.pipeline.state.lock().awaited.iter().count()
    }
}

#[test]
fn a_leader_leaves_at_its_deadline_and_keeps_the_connection() {
    let f = fixture();
    f.warm_up("warm-up");
    let before = f.connection();
    f.server.stop();
    f.leaves("late");
    assert_eq!(f.unanswered(), 1);
    assert_eq!(
        f.hook_calls.load(Ordering::SeqCst),
        1,
        "the background has to read its reply"
    );
    f.server.resume();
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("late"), "its grant is released");
    assert_eq!(f.connection(), before);
    assert!(f.is_idle() && f.unanswered() == 0);
}

#[test]
fn a_caller_in_flight_leads_once_the_leader_has_left() {
    let f = fixture();
    f.warm_up("warm-up");
    f.server.stop();
    let follower = f.queue("follower");
    f.leaves("leader");
    assert_eq!((f.unanswered(), f.queued()), (2, 0));
    assert_eq!(
        f.hook_calls.load(Ordering::SeqCst),
        0,
        "not left to the background"
    );
    f.server.resume();
    let deadline = MonotonicTime::now().after(LONG);
    f.pipeline.wait_or_lead(&follower, deadline, None);
    let outcome = follower.take_outcomes().next().unwrap();
    assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
}

#[test]
fn nothing_awaited_is_written_behind_a_batch_in_flight() {
    let f = fixture();
    let lease = f.warm_up("warm-up");
    f.server.stop();
    for name in ["first", "second", "third"] {
        f.leaves(name);
        assert_eq!(f.unanswered(), 1, "{name}");
    }
    f.pipeline.send_release(f.release("warm-up", lease));
    assert_eq!(f.unanswered(), 1, "other requests are queued before it");
    f.server.resume();
    f.acquire("fourth");
    while f.pipeline.run_maintenance() {}
    for name in ["first", "second", "third", "warm-up"] {
        assert!(!f.exists(name), "{name}");
    }
}

#[test]
fn a_release_is_written_behind_a_batch_in_flight() {
    let f = fixture();
    let lease = f.warm_up("warm-up");
    f.server.stop();
    f.leaves("first");
    f.pipeline.send_release(f.release("warm-up", lease));
    assert_eq!(f.unanswered(), 2);
    f.server.resume();
    f.acquire("second");
    assert_eq!(f.unanswered(), 0);
    assert!(!f.exists("warm-up"));
}

/// A value that no socket takes while the server does not read.
fn long_write() -> Command {
    Command::Write(Write {
        key: key("value"),
        token: 1,
        value: Some(vec![b'x'; 32 << 20].into()),
        ttl: None,
    })
}

/// The leader's own deadline does not end the write. The time-out of the batch does, later.
#[test]
fn a_write_to_a_full_socket_ends_with_the_command_timeout() {
    let timeout = Duration::from_secs(3);
    let f = with_timeout(timeout);
    f.warm_up("warm-up");
    f.server.stop();
    let writer = Caller::new(1);
    let write = PendingRequest::new(long_write(), Some(Completion::new(&writer, 0)));
    f.pipeline.state.lock().enqueue([write]);
    let started = Instant::now();
    f.leaves("first");
    assert!((timeout..LONG / 2).contains(&started.elapsed()));
    let deadline = MonotonicTime::now().after(LONG);
    assert_eq!(writer.wait(deadline), WaitEnd::Complete);
    let outcome = writer.take_outcomes().next().unwrap();
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
    let is_closed = f.pipeline.state.lock().connection.is_none();
    assert!(is_closed, "a command may be cut in the middle");
    f.server.resume();
    f.acquire("second");
}

#[test]
fn a_batch_in_flight_is_due_one_command_timeout_after_it_was_written() {
    let timeout = Duration::from_secs(2);
    let f = with_timeout(timeout);
    f.warm_up("warm-up");
    f.server.stop();
    let before = Instant::now();
    f.leaves("first");
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    leadership.read_before_write(None);
    assert!(
        before.elapsed() >= timeout,
        "it returned before the replies were due"
    );
    assert!(leadership.connection.is_none());
    drop(leadership);
    f.server.resume();
    f.acquire("second");
    f.server.stop();
    f.leaves("third");
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    let reply_by = &mut leadership.connection.as_mut().unwrap().reply_by;
    *reply_by = reply_by.map(|by| by.before(timeout));
    let before = Instant::now();
    leadership.read_before_write(None);
    assert!(before.elapsed() < timeout, "the replies were overdue");
    assert!(leadership.connection.is_none());
}

#[test]
fn a_pipeline_with_a_batch_in_flight_is_busy() {
    let f = fixture();
    f.warm_up("warm-up");
    assert_eq!(f.pipeline.readiness_after_dropping_stale(), Readiness::Idle);
    f.server.stop();
    f.leaves("first");
    assert_eq!(f.pipeline.readiness_after_dropping_stale(), Readiness::Busy);
    f.server.resume();
}

#[test]
fn a_flush_whose_leader_leaves_early_is_not_answered() {
    let f = fixture();
    f.warm_up("warm-up");
    f.server.stop();
    let flush = Caller::new(1);
    let completion = Completion::new(&flush, 0);
    let request = PendingRequest::new(Command::Flush, Some(completion));
    f.pipeline.state.lock().enqueue([request]);
    let lease = LeaseId::random();
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    f.pipeline.send_release(f.release("k", lease));
    let caller = Caller::new(1);
    leadership.lead(&caller, MonotonicTime::now().after(SHORT));
    drop(leadership);
    assert_eq!(
        flush.wait(MonotonicTime::now().after(LONG)),
        WaitEnd::Appointed
    );
    assert_eq!((f.unanswered(), f.queued()), (1, 1));
    f.server.resume();
}

/// Starts a proxy to the server. After a message of the returned sender, the proxy passes on only the first byte of the
/// next reply, and the rest after the next message. If that message is `true`, the proxy also splits the next reply.
fn halves_replies(server: &Server) -> (u16, Sender<bool>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, to) = (listener.local_addr().unwrap().port(), server.port());
    let (hold, held): (Sender<bool>, Receiver<bool>) = channel();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
        let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut from, &mut into));
        let (mut bytes, mut holds_next) = ([0; 4096], false);
        while let Ok(count @ 1..) = server.read(&mut bytes) {
            let mut sent = 0;
            if holds_next || held.try_recv().is_ok() {
                client.write_all(&bytes[..1]).unwrap();
                sent = 1;
                holds_next = held.recv().unwrap();
            }
            if client.write_all(&bytes[sent..count]).is_err() {
                return;
            }
        }
    });
    (port, hold)
}

#[test]
fn half_a_reply_is_completed_by_the_next_leader() {
    let server = Server::start().unwrap();
    let (port, hold) = halves_replies(&server);
    let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
    f.warm_up("warm-up");
    hold.send(false).unwrap();
    f.leaves("first");
    assert_eq!(f.unanswered(), 1);
    hold.send(false).unwrap();
    // This uses the same connection, since the proxy accepts no other.
    f.acquire("second");
    while f.pipeline.run_maintenance() {}
    assert!(f.exists("second") && !f.exists("first"));
}

#[test]
fn a_release_behind_a_half_read_batch_has_its_own_time() {
    let server = Server::start().unwrap();
    let (port, hold) = halves_replies(&server);
    let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
    let reply_by = || {
        let state = f.pipeline.state.lock();
        state.connection.as_ref().unwrap().reply_by.unwrap()
    };
    let lease = f.warm_up("warm-up");
    hold.send(false).unwrap();
    f.leaves("first");
    f.pipeline.send_release(f.release("warm-up", lease));
    let before = reply_by();
    f.leaves("second");
    assert!(reply_by() == before, "only the first byte has come");
    // Passes the rest of the first reply, and the first byte of the reply to the release.
    hold.send(true).unwrap();
    let is_later = || {
        f.leaves("third");
        reply_by() > before
    };
    assert!(eventually(LONG / 2, is_later));
    hold.send(false).unwrap();
}

#[test]
fn a_stale_connection_is_read_to_the_end_before_it_is_replaced() {
    let f = fixture();
    f.warm_up("warm-up");
    let before = f.connection();
    f.server.stop();
    f.leaves("first");
    f.pipeline.shared.endpoint.epoch().count_break();
    f.leaves("second");
    assert_eq!(f.unanswered(), 1);
    f.server.resume();
    f.acquire("third");
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("first"));
    assert_ne!(f.connection(), before);
}

/// An acquire of the key in another pipeline comes after these releases.
#[test]
fn settle_reads_the_replies_to_the_releases_of_its_key() {
    let f = fixture();
    let lease = LeaseId::random();
    f.ask(acquire_under(lease, "k"), LONG).unwrap();
    f.server.stop();
    f.pipeline.send_release(f.release("k", lease));
    assert!(!f.pipeline.is_idle(), "the release has no reply");
    f.server.resume();
    let deadline = MonotonicTime::now().after(LONG);
    f.pipeline.settle(&[&key("k")], deadline);
    assert!(f.pipeline.is_idle());
    f.pipeline.settle(&[&key("k")], deadline);
    assert!(matches!(
        f.ask(acquire_of("k"), LONG),
        Ok(Reply::Granted { .. })
    ));
}
