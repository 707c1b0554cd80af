use std::io::Write;
use std::net::TcpListener;

use leasehold_testbed::{Server, eventually};

use super::*;
use crate::config::DEFAULT_MAX_REPLY;

const LONG: Duration = Duration::from_secs(20);

/// Ignores all notifications.
struct IgnoreAll;

impl Listener for IgnoreAll {
    fn near(&self, _: &Key, _: LeaseStart) {}
    fn granted(&self, _: &Key, _: LeaseId, _: GrantMessage) {}
    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}
    fn changed(&self, _: &Key) -> Option<TrackedKey> {
        None
    }
    fn all_changed(&self) {}
    fn seen(&self, _: &TrackedKey, _: Option<&[u8]>) {}
    fn clock_moved(&self) {}
    fn refused(&self, _: &Error) {}
}

/// Has each changed key read.
struct ReadAll;

impl Listener for ReadAll {
    fn changed(&self, key: &Key) -> Option<TrackedKey> {
        let (key, lease) = (key.clone(), None);
        Some(TrackedKey { key, lease })
    }
    fn granted(&self, _: &Key, _: LeaseId, _: GrantMessage) {}
    fn near(&self, _: &Key, _: LeaseStart) {}
    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}
    fn all_changed(&self) {}
    fn seen(&self, _: &TrackedKey, _: Option<&[u8]>) {}
    fn clock_moved(&self) {}
    fn refused(&self, _: &Error) {}
}

#[test]
fn endless_changes_of_one_key_close_the_connection() {
    let endpoint = Arc::new(Endpoint::new("redis://127.0.0.1:1", LONG, DEFAULT_MAX_REPLY).unwrap());
    let notifications = Notifications::new(endpoint, &HolderId::of_this_process(), "p:", LONG);
    let keys = vec![Value::BulkString(b"p:k".to_vec()); 1000];
    let push = || Value::Push {
        kind: PushKind::Invalidate,
        data: vec![Value::Array(keys.clone())],
    };
    let handled = std::iter::repeat_with(|| notifications.handle(push(), &ReadAll));
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
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    let holder = HolderId::of_this_process();
    let notifications = Arc::new(Notifications::new(endpoint, &holder, "p:", LONG));
    let threads = ThreadGroup::new();
    notifications.start(&threads, Arc::new(IgnoreAll)).unwrap();
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
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    let holder = HolderId::of_this_process();
    let notifications = Arc::new(Notifications::new(endpoint, &holder, "p:", LONG));
    notifications
        .start(&ThreadGroup::new(), Arc::new(IgnoreAll))
        .unwrap();
    notifications.request_connection();
    assert!(eventually(LONG, || notifications.notification_epoch() == 1));
    let start = MonotonicTime::now();
    for broken in 1..10 {
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || notifications.notification_epoch() > broken));
    }
    // 5 ms, 10 ms, 20 ms and so on until 500 ms.
    assert!(MonotonicTime::now().since(start) > Duration::from_secs(1));
    // After a connection that lasts, the pause is short again: it would take 500 ms each time.
    let is_remade_soon = || {
        std::thread::sleep(SHORTEST_LIFE);
        let (start, opened) = (MonotonicTime::now(), notifications.notification_epoch());
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || notifications.notification_epoch() > opened));
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
    state
        .unanswered
        .push_back((MonotonicTime::now(), SentCommand::Read(vec![tracked; 3])));
    state.keys_unanswered = 3;
    assert!(state.take_answered().is_some());
    assert_eq!(state.keys_unanswered, 0);
}

#[test]
fn stop_closes_open_connections_and_later_ones() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG, DEFAULT_MAX_REPLY).unwrap());
    let holder = HolderId::of_this_process();
    let notifications = Notifications::new(Arc::clone(&endpoint), &holder, "p:", LONG);
    let by = MonotonicTime::now().after(LONG);
    let connect = || crate::store::redis::socket::connect(endpoint.info().addr(), by).unwrap();
    let limit = crate::store::redis::connection::LONGEST_REPLY;
    for _ in 0..3 {
        // The connection is dropped at once.
        notifications.register_socket(connect().0.closer());
    }
    let (open, later) = (connect(), connect());
    notifications.register_socket(open.0.closer());
    assert_eq!(notifications.sockets.lock().closers.len(), 1);
    notifications.stop();
    notifications.register_socket(later.0.closer());
    for mut halves in [open, later] {
        let error = halves.1.receive(by, limit).unwrap_err();
        assert!(!error.is_timeout(), "{error}");
    }
}

#[test]
fn a_refusal_that_repeats_the_login_is_not_quoted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let endpoint = Endpoint::new(
        &format!("redis://:hunter2@{address}"),
        LONG,
        DEFAULT_MAX_REPLY,
    )
    .unwrap();
    let peer = std::thread::spawn(move || {
        let mut peer = listener.accept().unwrap().0;
        peer.write_all(b"-ERR hunter2\r\n").unwrap();
        peer
    });
    let opened = Subscription::open(endpoint.info(), "channel", "key", LONG, |_| {});
    let error = opened.err().unwrap();
    peer.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}
