//! Tests on real sockets, with peers that are slow or silent, or that send without end.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::wire::fake_server;
use crate::wire::fake_server::{Stall, stay_open, trickle};

const SOON: Duration = Duration::from_millis(100);
/// The delay allowed for a busy machine.
const MARGIN: Duration = Duration::from_secs(5);
const FAR: Duration = Duration::from_secs(60);
const LIMIT: Limit = Limit::Fixed(64 * 1024);

fn soon() -> MonotonicTime {
    MonotonicTime::now().after(SOON)
}

fn connect_tcp(address: SocketAddr, deadline: MonotonicTime) -> io::Result<(Sender, Receiver)> {
    let address = ConnectionAddr::Tcp(address.ip().to_string(), address.port());
    connect(&address, deadline, |_| ()).map_err(|error| match error {
        ConnectError::SlowLookup(_) => io::ErrorKind::TimedOut.into(),
        ConnectError::Resolve(error) | ConnectError::Connect(error) => error,
    })
}

/// Both halves of a connection to a peer that runs `be_peer`.
fn connected_to(be_peer: impl FnOnce(TcpStream) + Send + 'static) -> (Sender, Receiver) {
    connect_tcp(
        fake_server::start(be_peer),
        MonotonicTime::now().after(MARGIN),
    )
    .unwrap()
}

#[track_caller]
fn assert_ends_soon(work: impl FnOnce() -> RedisResult<Value>) {
    let started = MonotonicTime::now();
    let error = work().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let took = MonotonicTime::now().since(started);
    assert!(took >= SOON && took < SOON + MARGIN, "{took:?}");
}

#[test]
fn connections_have_keepalive() {
    let (_sender, receiver) = connected_to(stay_open);
    let socket = receiver.socket();
    assert!(socket.keepalive().unwrap());
    assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE_TIME);
    assert_eq!(socket.tcp_keepalive_interval().unwrap(), KEEPALIVE_INTERVAL);
    assert_eq!(socket.tcp_keepalive_retries().unwrap(), KEEPALIVE_PROBES);
}

#[test]
fn a_socket_connected_to_itself_is_refused() {
    let socket = Socket::new(socket2::Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(&any.into()).unwrap();
    let own = socket.local_addr().unwrap();
    let error = connect_socket(&socket, &own, MonotonicTime::now().after(MARGIN)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_connection_attempt_ends_with_its_deadline() {
    let (_listener, address) = fake_server::accepts_nothing();
    let mut made = Vec::new();
    let error = loop {
        let started = MonotonicTime::now();
        let attempt = connect_tcp(address, started.after(SOON));
        assert!(MonotonicTime::now().since(started) < SOON + MARGIN);
        match attempt {
            Ok(halves) => made.push(halves),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_silent_address_leaves_time_for_the_next() {
    let (_silent, silent) = fake_server::accepts_nothing();
    // The system accepts the first connections for the silent socket.
    let mut accepted = Vec::new();
    while let Ok(socket) = connect_to(&silent.into(), soon()) {
        accepted.push(socket);
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let good = listener.local_addr().unwrap();
    for addresses in [vec![silent, good], vec![silent, silent, good]] {
        let deadline = MonotonicTime::now().after(MARGIN / 2);
        let socket = connect_to_any(&addresses, deadline).unwrap();
        let peer = socket.peer_addr().unwrap().as_socket();
        assert_eq!(peer, Some(good));
    }
    // The last address has all the time that is left.
    let deadline = soon();
    let error = connect_to_any(&[silent, silent], deadline).unwrap_err();
    let ConnectError::Connect(error) = error else {
        panic!("{error:?}");
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    // The system counts whole milliseconds.
    assert!(deadline.since(MonotonicTime::now()) < SOON / 8);
    // The silent server may be starting, so the client tries again, although the other address refuses.
    drop(listener);
    let error = connect_to_any(&[silent, good], MonotonicTime::now().after(MARGIN / 8));
    let error = error.unwrap_err();
    assert!(error.is_timeout() && !error.nothing_listens(), "{error:?}");
}

#[test]
fn a_reply_in_pieces_ends_with_its_deadline() {
    let address = fake_server::stalling(b"", Stall::Drip);
    let (_sender, mut receiver) = connect_tcp(address, MonotonicTime::now().after(MARGIN)).unwrap();
    assert_ends_soon(|| receiver.receive_reply(soon(), LIMIT));
}

#[test]
fn endless_messages_do_not_extend_the_deadline() {
    let (_sender, mut receiver) = connected_to(|peer| trickle(peer, b">1\r\n+message\r\n"));
    assert_ends_soon(|| receiver.receive_reply(soon(), LIMIT));
}

#[test]
fn many_replies_share_one_deadline() {
    const REPLIES: usize = 2000;
    // The buffer has room for eight replies at most.
    let reply = format!("$1000\r\n{}\r\n", "x".repeat(1000));
    let (_sender, mut receiver) = connected_to(move |peer| trickle(peer, reply.as_bytes()));
    let deadline = soon();
    let received = (0..REPLIES)
        .take_while(|_| receiver.receive_reply(deadline, LIMIT).is_ok())
        .count();
    assert!(received < REPLIES / 2, "{received} in {SOON:?}");
}

#[test]
fn a_punctual_reply_is_read_after_its_deadline() {
    let (_sender, mut receiver) = connected_to(|mut peer| {
        peer.write_all(b"+OK\r\n").unwrap();
        stay_open(peer);
    });
    let mut byte = [std::mem::MaybeUninit::uninit()];
    receiver.socket.peek(&mut byte).unwrap();
    let past = MonotonicTime::now();
    assert_eq!(receiver.receive_reply(past, LIMIT), Ok(Value::Okay));
}

#[test]
fn a_shorter_deadline_sets_a_new_time_out() {
    let (_sender, mut receiver) = connected_to(|mut peer| {
        peer.write_all(b"+OK\r\n").unwrap();
        stay_open(peer);
    });
    let far = MonotonicTime::now().after(FAR);
    assert_eq!(receiver.receive_reply(far, LIMIT), Ok(Value::Okay));
    assert_ends_soon(|| receiver.receive_reply(soon(), LIMIT));
}

#[test]
fn no_wait_ends_before_its_deadline() {
    let (_sender, mut receiver) = connected_to(stay_open);
    for wait in [SOON, SOON + SLACK / 2] {
        let deadline = MonotonicTime::now().after(wait);
        let error = receiver.receive_reply(deadline, LIMIT).unwrap_err();
        assert!(error.is_timeout(), "{error}");
        assert!(MonotonicTime::now() >= deadline);
    }
}

#[test]
fn a_write_ends_with_its_deadline() {
    let (mut sender, _receiver) = connected_to(stay_open);
    let much = vec![b'x'; 64 << 20];
    assert_ends_soon(|| Ok(sender.send(&much, soon()).map(|()| Value::Okay)?));
}

#[test]
fn writes_to_slow_readers_end_with_their_deadline() {
    let (mut sender, _receiver) = connected_to(|mut peer| {
        let mut buffer = vec![0; 64 * 1024];
        while peer.read(&mut buffer).is_ok_and(|n| n > 0) {
            thread::park_timeout(Duration::from_millis(10));
        }
    });
    let much = vec![b'x'; 256 << 20];
    assert_ends_soon(|| Ok(sender.send(&much, soon()).map(|()| Value::Okay)?));
}

#[test]
fn a_write_is_tried_once_after_its_deadline() {
    let (arrived, arrives) = mpsc::channel();
    let (mut sender, _receiver) = connected_to(move |mut peer| {
        let mut bytes = [0; 4];
        peer.read_exact(&mut bytes).unwrap();
        arrived.send(bytes).unwrap();
    });
    // A pipeline writes the releases of unanswered acquires in this way before it abandons a connection.
    sender.send(b"late", MonotonicTime::now()).unwrap();
    assert_eq!(arrives.recv_timeout(MARGIN), Ok(*b"late"));
}
