//! Peers that are slow, silent or endless, on real sockets.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;

use socket2::Domain;

use super::*;

const SOON: Duration = Duration::from_millis(100);
/// A busy machine may be late by that.
const MARGIN: Duration = Duration::from_secs(5);
const FAR: Duration = Duration::from_secs(60);
const LIMIT: Limit = Limit::Fixed(64 * 1024);

fn soon() -> MonotonicTime {
    MonotonicTime::now().after(SOON)
}

/// Both halves of a connection to a peer that does `be_peer`.
fn connected_to(be_peer: impl FnOnce(TcpStream) + Send + 'static) -> (Sender, Receiver) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || be_peer(listener.accept().unwrap().0));
    let address = ConnectionAddr::Tcp("127.0.0.1".to_owned(), port);
    connect(&address, MonotonicTime::now().after(MARGIN)).unwrap()
}

/// Reads nothing until the process ends.
fn stay_open(peer: TcpStream) {
    std::mem::forget(peer);
}

/// Sends `piece` each millisecond until the other side has closed the connection.
fn trickle(mut peer: TcpStream, piece: &[u8]) {
    while peer.write_all(piece).is_ok() {
        thread::park_timeout(Duration::from_millis(1));
    }
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
fn a_connection_attempt_ends_with_its_deadline() {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let port = listener.local_addr().unwrap().as_socket().unwrap().port();
    let address = ConnectionAddr::Tcp("127.0.0.1".to_owned(), port);
    // The system accepts the first ones. Others are not answered.
    let mut made = Vec::new();
    let error = loop {
        let started = MonotonicTime::now();
        let attempt = connect(&address, started.after(SOON));
        assert!(MonotonicTime::now().since(started) < SOON + MARGIN);
        match attempt {
            Ok(halves) => made.push(halves),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn a_reply_in_pieces_ends_with_its_deadline() {
    let (_sender, mut receiver) = connected_to(|mut peer| {
        peer.write_all(b"$60000\r\n").unwrap();
        trickle(peer, b"x");
    });
    assert_ends_soon(|| receiver.receive_reply(soon(), LIMIT));
}

#[test]
fn messages_without_end_delay_no_reply() {
    let (_sender, mut receiver) = connected_to(|peer| trickle(peer, b">1\r\n+message\r\n"));
    assert_ends_soon(|| receiver.receive_reply(soon(), LIMIT));
}

#[test]
fn many_replies_share_one_deadline() {
    const REPLIES: usize = 2000;
    // No more than eight of them fit into the buffer.
    let reply = format!("$1000\r\n{}\r\n", "x".repeat(1000));
    let (_sender, mut receiver) = connected_to(move |peer| trickle(peer, reply.as_bytes()));
    let deadline = soon();
    let received = (0..REPLIES)
        .take_while(|_| receiver.receive_reply(deadline, LIMIT).is_ok())
        .count();
    assert!(received < REPLIES / 2, "{received} in {SOON:?}");
}

#[test]
fn a_reply_that_came_in_time_is_read_late() {
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
fn a_time_out_is_set_again_when_less_is_left() {
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
fn a_write_to_a_slow_reader_ends_with_its_deadline() {
    let (mut sender, _receiver) = connected_to(|mut peer| {
        let mut some = vec![0; 64 * 1024];
        while peer.read(&mut some).is_ok_and(|n| n > 0) {
            thread::park_timeout(Duration::from_millis(10));
        }
    });
    let much = vec![b'x'; 256 << 20];
    assert_ends_soon(|| Ok(sender.send(&much, soon()).map(|()| Value::Okay)?));
}
