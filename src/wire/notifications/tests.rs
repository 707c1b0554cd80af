use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use leasehold_testbed::{Server, eventually};

use super::*;
use crate::command::GrantMessage;
use crate::config::DEFAULT_MAX_REPLY;
use crate::util::id::{LeaseId, LeaseStart};
use crate::wire::fake_server;
use crate::wire::fake_server::{Stall, stay_open, trickle};

const LONG: Duration = Duration::from_secs(20);
/// Longer than a login takes on a busy machine.
const SHORT: Duration = Duration::from_secs(3);
/// The replies to all commands of `Subscription::open` but the last one.
const LOGIN: &[u8] = b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n+OK\r\n";
const SUBSCRIBED: &[u8] = b"+OK\r\n";
const CHANGE: &[u8] = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$3\r\np:k\r\n";

fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::new(&format!("redis://{address}"), LONG, DEFAULT_MAX_REPLY).unwrap()
}

fn subscribe(address: SocketAddr, timeout: Duration) -> Result<Subscription, Error> {
    let endpoint = endpoint(address);
    open(&endpoint, timeout).map(|(subscription, ..)| subscription)
}

fn open(
    endpoint: &Endpoint,
    timeout: Duration,
) -> Result<(Subscription, Sender, ConnectionEpoch), Error> {
    let queries = Sockets::default();
    let opened = Subscription::open(endpoint, "channel", "key", timeout, &queries, |_, _| Ok(()));
    let opened = opened.map_err(|failure| failure.error)?;
    Ok((opened.subscription, opened.sender, opened.made_in))
}

fn notifications(endpoint: Endpoint) -> Arc<NotificationConnection> {
    let holder = HolderId::of_this_process();
    let endpoint = Arc::new(endpoint);
    let notifications = NotificationConnection::new(ServerId::ONLY, endpoint, &holder, "p:", LONG);
    Arc::new(notifications)
}

/// Counts the changes of keys, and asks for a read of each changed key if `reads` is set.
#[derive(Default)]
struct ChangeCounter {
    changes: AtomicUsize,
    reads: bool,
}

impl Listener for ChangeCounter {
    fn changed(&self, _: ServerId, key: &Key) -> Option<TrackedKey> {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let (key, lease) = (key.clone(), None);
        self.reads.then_some(TrackedKey { key, lease })
    }
    fn granted(&self, _: ServerId, _: &Key, _: LeaseId, _: GrantMessage) {}
    fn near(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn called(&self, _: ServerId, _: &Key, _: LeaseStart) {}
    fn forced(&self, _: ServerId, _: &Key, _: LeaseStart, _: HolderId) {}
    fn all_changed(&self, _: ServerId) {}
    fn moved(&self, _: &dyn Fn(&Key) -> bool) {}
    fn seen(&self, _: ServerId, _: &TrackedKey, _: KeyState<'_>) {}
    fn clock_moved(&self) {}
}

#[test]
fn endless_changes_of_one_key_close_the_connection() {
    let notifications =
        notifications(Endpoint::new("redis://127.0.0.1:1", LONG, DEFAULT_MAX_REPLY).unwrap());
    let keys = vec![Value::BulkString(b"p:k".to_vec()); 1000];
    let push = || Value::Push {
        kind: PushKind::Invalidate,
        data: vec![Value::Array(keys.clone())],
    };
    let reading = ChangeCounter {
        reads: true,
        ..ChangeCounter::default()
    };
    let handled = std::iter::repeat_with(|| notifications.handle(push(), &reading));
    let handled = handled
        .take(MAX_KEYS_UNANSWERED)
        .take_while(|is_ok| *is_ok)
        .count();
    assert_eq!(handled, MAX_KEYS_UNANSWERED / keys.len());
    assert_eq!(
        notifications.state.lock().to_read.len(),
        MAX_KEYS_UNANSWERED + 1
    );
}

#[test]
fn too_many_unanswered_commands_close_the_connection() {
    let server = Server::start().unwrap();
    let notifications =
        notifications(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    let threads = ThreadGroup::new();
    notifications
        .start(&threads, Arc::new(ChangeCounter::default()))
        .unwrap();
    let key = Key::new("p:", "k", 16).unwrap();
    let watch = || {
        notifications.track(vec![TrackedKey {
            key: key.clone(),
            lease: None,
        }])
    };
    assert!(eventually(LONG, watch));
    assert!(eventually(LONG, || notifications
        .state
        .lock()
        .unanswered
        .is_empty()));
    server.stop();
    let unanswered = std::iter::repeat_with(watch).take_while(|is_ok| *is_ok);
    assert_eq!(unanswered.take(MAX_UNANSWERED + 1).count(), MAX_UNANSWERED);
    assert_eq!(notifications.queue_mode(), QueueMode::Polling);
    server.resume();
    assert!(eventually(LONG, || notifications.queue_mode() == QueueMode::Notified));
    notifications.stop();
}

#[test]
fn reconnects_back_off_while_connections_break_at_once() {
    let server = Server::start().unwrap();
    let notifications =
        notifications(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    notifications
        .start(&ThreadGroup::new(), Arc::new(ChangeCounter::default()))
        .unwrap();
    notifications.request_connection();
    assert!(eventually(LONG, || notifications.epoch() == 1));
    let start = MonotonicTime::now();
    for broken in 1..10 {
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || notifications.epoch() > broken));
    }
    // The pauses are 5 ms, 10 ms, 20 ms and so on, up to 500 ms.
    assert!(MonotonicTime::now().since(start) > Duration::from_secs(1));
    // After a connection that lasts, the pause is short again, not 500 ms.
    let is_remade_soon = || {
        let mut state = notifications.state.lock();
        state.opened_at = state.opened_at.map(|at| at.before(SHORTEST_LIFE));
        drop(state);
        let (start, opened) = (MonotonicTime::now(), notifications.epoch());
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || notifications.epoch() > opened));
        MonotonicTime::now().since(start) < LONGEST_PAUSE
    };
    assert!((0..8).any(|_| is_remade_soon()));
    notifications.stop();
}

#[test]
fn answered_reads_make_room_for_others() {
    let mut state = ConnectionState::default();
    let key = Key::new("p:", "k", 16).unwrap();
    let tracked = TrackedKey { key, lease: None };
    let now = MonotonicTime::now();
    state
        .unanswered
        .push_back((now, SentCommand::Read(vec![tracked; 3].into())));
    state.unanswered.push_back((now, SentCommand::Ping));
    state.keys_unanswered = 3;
    for left in [2, 1, 0] {
        assert!(matches!(
            state.take_answered(),
            Some(ExpectedReply::Read(_))
        ));
        assert_eq!(state.keys_unanswered, left);
    }
    assert!(matches!(state.take_answered(), Some(ExpectedReply::Ping)));
    assert!(state.take_answered().is_none());
}

#[test]
fn stop_and_a_switch_close_connections() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    let holder = HolderId::of_this_process();
    let notifications =
        NotificationConnection::new(ServerId::ONLY, Arc::clone(&endpoint), &holder, "p:", LONG);
    let by = MonotonicTime::now().after(LONG);
    let connect = || crate::wire::net::socket::connect(endpoint.info.addr(), by, |_| ()).unwrap();
    let limit = crate::wire::connect::connection::LONGEST_REPLY;
    let register = |halves: &(Sender, _), made_in| {
        let registered = notifications.register_socket(halves.0.closer(), &made_in);
        registered.is_ok()
    };
    let now = || endpoint.epoch().now();
    for _ in 0..3 {
        // This registers a connection and drops it at once.
        assert!(register(&connect(), now()));
    }
    let [outdated, late, open, later] = [(); 4].map(|()| connect());
    let before = now();
    assert!(register(&outdated, before));
    endpoint.epoch().count_switch();
    assert!(register(&open, now()));
    assert_eq!(notifications.sockets.lock().open.len(), 2);
    notifications.suspect();
    assert!(!register(&late, before));
    let is_closed = |mut halves: (_, crate::wire::net::socket::Receiver), by| {
        let error = halves.1.receive(by, limit).unwrap_err();
        !error.is_timeout()
    };
    assert!(is_closed(outdated, by) && is_closed(late, by));
    assert!(
        register(&open, now()),
        "a switch closes old connections only"
    );
    notifications.stop();
    assert!(!register(&later, now()));
    assert!(is_closed(open, by) && is_closed(later, by));
}

#[test]
fn a_refusal_that_repeats_the_login_is_not_quoted() {
    let address = fake_server::start(|mut connection| {
        connection
            .write_all(&b"-ERR hunter2\r\n".repeat(16))
            .unwrap();
        stay_open(connection);
    });
    let endpoint = Endpoint::new(
        &format!("redis://:hunter2@{address}"),
        LONG,
        DEFAULT_MAX_REPLY,
    )
    .unwrap();
    let error = open(&endpoint, LONG).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}

#[test]
fn a_login_ends_with_the_time_out() {
    for answers in [b"", LOGIN] {
        for stall in Stall::ALL {
            let address = fake_server::stalling(answers, stall);
            let started = MonotonicTime::now();
            let error = subscribe(address, SHORT / 4).err().unwrap();
            assert!(error.is_unavailable(), "{error}");
            let took = MonotonicTime::now().since(started);
            assert!(took < LONG / 2, "{took:?}");
        }
    }
}

#[test]
fn a_notification_comes_within_the_time_out_or_ends_the_connection() {
    for stall in Stall::ALL {
        let begins = b">2\r\n$10\r\ninvalidate\r\n";
        let address = fake_server::stalling(&[LOGIN, SUBSCRIBED, begins].concat(), stall);
        let mut subscription = subscribe(address, SHORT).unwrap();
        let started = MonotonicTime::now();
        let mut next = || {
            subscription.next(|| {
                let took = MonotonicTime::now().since(started);
                assert!(took < LONG / 2, "{took:?}");
                LONG
            })
        };
        let error = loop {
            match next() {
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                other => break other.unwrap_err(),
            }
        };
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

#[test]
fn each_notification_has_the_whole_time_out() {
    let (accepted, accepts) = mpsc::channel();
    let address = fake_server::start(move |mut connection| {
        connection.write_all(&[LOGIN, SUBSCRIBED].concat()).unwrap();
        accepted.send(connection).unwrap();
    });
    let mut subscription = subscribe(address, SHORT).unwrap();
    let mut connection = accepts.recv_timeout(LONG).unwrap();
    let (begin, rest) = CHANGE.split_at(20);
    for _ in 0..2 {
        connection.write_all(begin).unwrap();
        // The first wait ends when the first part comes, and the second one with a time-out.
        let mut waits = [LONG, Duration::from_millis(1)].into_iter();
        let error = subscription.next(|| waits.next().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        connection.write_all(rest).unwrap();
        let value = subscription.next(|| LONG).unwrap();
        assert!(matches!(value, Value::Push { .. }), "{value:?}");
        if let Some(begun) = &mut subscription.begun {
            *begun = begun.before(SHORT);
        }
    }
}

#[test]
fn a_server_that_sends_changes_but_no_answers_is_given_up() {
    let (gone, is_gone) = mpsc::channel();
    let address = fake_server::start(move |mut connection| {
        connection.write_all(&[LOGIN, SUBSCRIBED].concat()).unwrap();
        trickle(connection, CHANGE);
        gone.send(()).unwrap();
    });
    let holder = HolderId::of_this_process();
    let notifications = Arc::new(NotificationConnection::new(
        ServerId::ONLY,
        Arc::new(endpoint(address)),
        &holder,
        "p:",
        LONG,
    ));
    let (threads, counting) = (ThreadGroup::new(), Arc::new(ChangeCounter::default()));
    notifications
        .start(&threads, Arc::<ChangeCounter>::clone(&counting))
        .unwrap();
    notifications.request_connection();
    assert!(eventually(LONG, || notifications.queue_mode() == QueueMode::Notified));
    let asked_before = |time| {
        let mut state = notifications.state.lock();
        state.unanswered.clear();
        state
            .unanswered
            .push_back((MonotonicTime::now().before(time), SentCommand::Ping));
        counting.changes.load(Ordering::SeqCst)
    };
    // The connection stays open for three heartbeats.
    let counted = asked_before(2 * HEARTBEAT);
    assert!(eventually(LONG, || counting.changes.load(Ordering::SeqCst)
        > counted + 10));
    assert_eq!(notifications.queue_mode(), QueueMode::Notified);
    asked_before(4 * HEARTBEAT);
    is_gone.recv_timeout(LONG).unwrap();
    notifications.stop();
}

/// A server that has been stopped, and an open notification connection to it.
fn notified_by_a_stopped_server() -> (Server, Arc<NotificationConnection>) {
    let server = Server::start().unwrap();
    let endpoint = Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap();
    let notifications = notifications(endpoint);
    let listener = Arc::new(ChangeCounter::default());
    notifications.start(&ThreadGroup::new(), listener).unwrap();
    notifications.request_connection();
    assert!(eventually(LONG, || notifications.queue_mode() == QueueMode::Notified));
    server.stop();
    (server, notifications)
}

#[test]
fn a_server_that_stops_answering_is_given_up() {
    let (_server, notifications) = notified_by_a_stopped_server();
    // The stopped server has left this command unanswered for longer than the connection waits.
    let sent_at = MonotonicTime::now().before(4 * HEARTBEAT);
    let mut state = notifications.lock_state();
    state.unanswered.push_back((sent_at, SentCommand::Ping));
    drop(state);
    assert!(eventually(LONG, || notifications.queue_mode() != QueueMode::Notified));
    notifications.stop();
}

#[test]
fn a_suspicion_does_not_wait_for_a_writer() {
    let (_server, notifications) = notified_by_a_stopped_server();
    let writing = notifications.lock_state();
    let suspecting = Arc::clone(&notifications);
    let suspicion = std::thread::spawn(move || suspecting.suspect());
    assert!(eventually(LONG, || suspicion.is_finished()));
    assert_eq!(notifications.queue_mode(), QueueMode::Polling);
    assert!(writing.unanswered.is_empty());
    drop(writing);
    // The writer has written the PING.
    let state = notifications.lock_state();
    assert!(matches!(
        state.unanswered.back(),
        Some((_, SentCommand::Ping))
    ));
    drop(state);
    notifications.stop();
}

#[test]
fn a_switch_ends_a_blocked_write() {
    let (_server, notifications) = notified_by_a_stopped_server();
    let key = Key::new("p:", &"k".repeat(1000), 1000).unwrap();
    let tracked = TrackedKey { key, lease: None };
    let writing = Arc::clone(&notifications);
    // 30 MB do not fit into the buffers of the sockets, so the write blocks.
    let write = std::thread::spawn(move || writing.track(vec![tracked; 30_000]));
    assert!(eventually(LONG, || notifications.state.is_locked()));
    let switched_at = MonotonicTime::now();
    notifications.endpoint.epoch().count_switch();
    notifications.suspect();
    assert!(!write.join().unwrap());
    let took = MonotonicTime::now().since(switched_at);
    assert!(took < LONG / 2, "{took:?}");
    notifications.stop();
}

#[test]
fn some_closed_logins_do_not_stop_notifications() {
    // The server closes the first logins after a reply, as Redis does during a flood of messages.
    let closed = usize::try_from(MOST_CLOSED_LATE).unwrap() + 2;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (subscribed, is_subscribed) = mpsc::channel();
    std::thread::spawn(move || {
        for (count, connection) in listener.incoming().map_while(Result::ok).enumerate() {
            let mut connection = connection;
            connection.write_all(b"+OK\r\n").unwrap();
            if count == closed {
                subscribed.send(()).unwrap();
                stay_open(connection);
            }
        }
    });
    let notifications = notifications(endpoint(address));
    let threads = ThreadGroup::new();
    let listener = Arc::new(ChangeCounter::default());
    notifications.start(&threads, listener).unwrap();
    notifications.request_connection();
    // After a refusal, the next attempt would come only after `REFUSED_PAUSE`.
    is_subscribed.recv_timeout(REFUSED_PAUSE / 2).unwrap();
    notifications.stop();
}
