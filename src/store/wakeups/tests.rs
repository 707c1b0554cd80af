use std::io::Write;
use std::net::TcpListener;

use leasehold_testbed::{Server, eventually};

use super::*;

const LONG: Duration = Duration::from_secs(20);

/// Hears nothing.
struct Deaf;

impl Listener for Deaf {
    fn near(&self, _: &Key, _: LeaseStart) {}
    fn granted(&self, _: &Key, _: LeaseId, _: Grant) {}
    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}
    fn changed(&self, _: &Key) -> Option<Watched> {
        None
    }
    fn all_changed(&self) {}
    fn seen(&self, _: &Watched, _: Option<&[u8]>) {}
    fn clock_moved(&self) {}
    fn refused(&self, _: &Error) {}
}

/// Wants to look at each key that changes.
struct Curious;

impl Listener for Curious {
    fn changed(&self, key: &Key) -> Option<Watched> {
        let (key, lease) = (key.clone(), None);
        Some(Watched { key, lease })
    }
    fn granted(&self, _: &Key, _: LeaseId, _: Grant) {}
    fn near(&self, _: &Key, _: LeaseStart) {}
    fn forced(&self, _: &Key, _: LeaseStart, _: HolderId) {}
    fn all_changed(&self) {}
    fn seen(&self, _: &Watched, _: Option<&[u8]>) {}
    fn clock_moved(&self) {}
    fn refused(&self, _: &Error) {}
}

#[test]
fn a_server_that_reports_one_key_without_end_is_given_up() {
    let endpoint = Arc::new(Endpoint::new("redis://127.0.0.1:1", LONG).unwrap());
    let wakeups = Wakeups::new(endpoint, &HolderId::of_this_process(), "p:", LONG);
    let keys = vec![Value::BulkString(b"p:k".to_vec()); 1000];
    let push = || Value::Push {
        kind: PushKind::Invalidate,
        data: vec![Value::Array(keys.clone())],
    };
    let heard = std::iter::repeat_with(|| wakeups.hear(push(), &Curious));
    let heard = heard
        .take(MOST_KEYS)
        .take_while(|is_heard| *is_heard)
        .count();
    assert_eq!(heard, MOST_KEYS / keys.len());
    assert_eq!(wakeups.state.lock().to_look_at.len(), MOST_KEYS + 1);
}

#[test]
fn a_connection_with_too_many_unanswered_commands_is_given_up() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG).unwrap());
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

#[test]
fn connections_that_break_at_once_are_remade_less_and_less_often() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG).unwrap());
    let holder = HolderId::of_this_process();
    let wakeups = Arc::new(Wakeups::new(endpoint, &holder, "p:", LONG));
    wakeups.start(&Crew::new(), Arc::new(Deaf)).unwrap();
    wakeups.want();
    assert!(eventually(LONG, || wakeups.hearing() == 1));
    let start = Moment::now();
    for broken in 1..10 {
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || wakeups.hearing() > broken));
    }
    // 5 ms, 10 ms, 20 ms and so on until 500 ms.
    assert!(Moment::now().since(start) > Duration::from_secs(1));
    // After a connection that lasts, the pause is short again: it would take 500 ms each time.
    let is_remade_soon = || {
        std::thread::sleep(SHORTEST_LIFE);
        let (start, opened) = (Moment::now(), wakeups.hearing());
        server
            .command(&["CLIENT", "KILL", "TYPE", "pubsub"])
            .unwrap();
        assert!(eventually(LONG, || wakeups.hearing() > opened));
        Moment::now().since(start) < LONGEST_PAUSE
    };
    assert!((0..8).any(|_| is_remade_soon()));
    wakeups.stop();
}

#[test]
fn answered_reads_make_room_for_others() {
    let mut state = State::default();
    let key = Key::new("p:", "k", 16).unwrap();
    let watched = Watched { key, lease: None };
    state
        .asked
        .push_back((Moment::now(), Asked::Look(vec![watched; 3])));
    state.keys_asked = 3;
    assert!(state.answered().is_some());
    assert_eq!(state.keys_asked, 0);
}

#[test]
fn stop_closes_open_connections_and_later_ones() {
    let server = Server::start().unwrap();
    let endpoint = Arc::new(Endpoint::new(&server.url(), LONG).unwrap());
    let holder = HolderId::of_this_process();
    let wakeups = Wakeups::new(Arc::clone(&endpoint), &holder, "p:", LONG);
    let by = Moment::now().after(LONG);
    let connect = || crate::store::stream::connect(endpoint.info().addr(), by).unwrap();
    let limit = crate::store::connect::LONGEST_REPLY;
    for _ in 0..3 {
        // It is dropped at once.
        wakeups.connected(connect().0.closer());
    }
    let (open, later) = (connect(), connect());
    wakeups.connected(open.0.closer());
    assert_eq!(wakeups.sockets.lock().closers.len(), 1);
    wakeups.stop();
    wakeups.connected(later.0.closer());
    for mut halves in [open, later] {
        let error = halves.1.receive(by, limit).unwrap_err();
        assert!(!error.is_timeout(), "{error}");
    }
}

#[test]
fn a_refusal_that_repeats_the_login_is_not_quoted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let endpoint = Endpoint::new(&format!("redis://:hunter2@{address}"), LONG).unwrap();
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
