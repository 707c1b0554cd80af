//! Every fault of the proxy, against a server of raw bytes or a real one.

#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{Proxy, Reply, Server, eventually};

/// The limit for what takes milliseconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(20);

/// A proxy, and the listener behind it.
fn proxy() -> (Proxy, TcpListener) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap().port()).unwrap();
    (proxy, listener)
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
    bounded(stream)
}

fn accept(listener: &TcpListener) -> TcpStream {
    bounded(listener.accept().unwrap().0)
}

fn bounded(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

fn receive(mut stream: &TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// All bytes until the connection is closed, gracefully or not.
fn receive_until_closed(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) => assert_eq!(
            error.kind(),
            ErrorKind::ConnectionReset,
            "not closed in time"
        ),
    }
    bytes
}

/// Whether nothing has arrived so far. Does not wait, since the test knows which bytes the proxy holds back.
fn is_silent(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let outcome = stream.peek(&mut [0]);
    stream.set_nonblocking(false).unwrap();
    outcome.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn holds(proxy: &Proxy, bytes: usize) -> bool {
    eventually(LIMIT, || proxy.held_bytes() == bytes)
}

#[test]
fn bytes_pass_unchanged_in_both_directions() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    assert_eq!(proxy.connections(), 1);
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    thread::scope(|scope| {
        scope.spawn(|| (&client).write_all(&bytes).unwrap());
        scope.spawn(|| (&server).write_all(&bytes).unwrap());
        let replies = scope.spawn(|| receive(&client, bytes.len()));
        assert!(receive(&server, bytes.len()) == bytes);
        assert!(replies.join().unwrap() == bytes);
    });
    assert_eq!(proxy.held_bytes(), 0);
}

#[test]
fn the_end_of_a_direction_is_passed_on() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    (&client).write_all(b"last").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(receive_until_closed(&server), b"last");
    (&server).write_all(b"answer").unwrap();
    drop(server);
    assert_eq!(receive_until_closed(&client), b"answer");
    assert!(eventually(LIMIT, || proxy.connections() == 0));
}

#[test]
fn real_commands_pass() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}", proxy.port()));
    let client = connect(&proxy);
    (&client).write_all(b"INCR n\r\nGET n\r\n").unwrap();
    assert_eq!(receive(&client, 11), b":1\r\n$1\r\n1\r\n");
    server
        .command(&["CLIENT", "KILL", "TYPE", "normal"])
        .unwrap();
    assert_eq!(receive_until_closed(&client), b"");
}

#[test]
fn delay_is_added_each_way_and_can_be_switched_off() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    let each_way = Duration::from_millis(40);
    proxy.delay(each_way);
    let start = Instant::now();
    (&client).write_all(b"ask").unwrap();
    assert_eq!(receive(&server, 3), b"ask");
    assert!(start.elapsed() >= each_way);
    let back = Instant::now();
    (&server).write_all(b"tell").unwrap();
    assert_eq!(receive(&client, 4), b"tell");
    assert!(back.elapsed() >= each_way);

    proxy.delay(Duration::from_secs(3600));
    (&client).write_all(b"ask").unwrap();
    assert!(holds(&proxy, 3));
    assert!(is_silent(&server));
    proxy.delay(Duration::ZERO);
    assert_eq!(receive(&server, 3), b"ask");
}

#[test]
fn a_held_request_survives_its_client() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = connect(&proxy);
    (&client).write_all(b"PING\r\n").unwrap();
    assert_eq!(receive(&client, 7), b"+PONG\r\n");

    proxy.hold_requests(true);
    let requests = b"SET late yes\r\nINCR n\r\n";
    (&client).write_all(requests).unwrap();
    drop(client);
    assert!(holds(&proxy, requests.len()));
    assert_eq!(server.command(&["GET", "late"]).unwrap(), Reply::Nil);
    assert_eq!(proxy.connections(), 1);
    proxy.hold_requests(false);
    assert!(eventually(LIMIT, || proxy.connections() == 0));
    assert_eq!(
        server.command(&["GET", "late"]).unwrap().as_text(),
        Some("yes")
    );
    assert_eq!(server.command(&["GET", "n"]).unwrap().as_int(), Some(1));
}

#[test]
fn held_requests_survive_clients_with_unread_replies() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = connect(&proxy);
    (&client).write_all(b"PING\r\n").unwrap();
    // The client has not read the bytes that have arrived. So closing its socket resets the connection instead of
    // ending it.
    assert_eq!(client.peek(&mut [0; 7]).unwrap(), 7);
    proxy.hold_requests(true);
    (&client).write_all(b"SET late yes\r\n").unwrap();
    assert!(holds(&proxy, 14));
    drop(client);
    proxy.hold_requests(false);
    assert!(eventually(LIMIT, || proxy.connections() == 0));
    assert_eq!(
        server.command(&["GET", "late"]).unwrap().as_text(),
        Some("yes")
    );
}

#[test]
fn held_replies_leave_requests_alone() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = connect(&proxy);
    proxy.hold_replies(true);
    (&client).write_all(b"SET k v\r\n").unwrap();
    assert!(holds(&proxy, 5));
    assert_eq!(server.command(&["GET", "k"]).unwrap().as_text(), Some("v"));
    assert!(is_silent(&client));
    proxy.hold_replies(false);
    assert_eq!(receive(&client, 5), b"+OK\r\n");
}

#[test]
fn a_black_hole_delivers_everything_in_order_afterwards() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    proxy.black_hole(true);
    for part in [b"one", b"two"] {
        (&client).write_all(part).unwrap();
        (&server).write_all(part).unwrap();
    }
    assert!(holds(&proxy, 12));
    let late_client = connect(&proxy);
    let late_server = accept(&listener);
    (&late_client).write_all(b"new").unwrap();
    assert!(holds(&proxy, 15));
    drop(late_server);
    assert!([&client, &server, &late_client].into_iter().all(is_silent));

    proxy.black_hole(false);
    assert_eq!(receive(&client, 6), b"onetwo");
    assert_eq!(receive(&server, 6), b"onetwo");
    assert_eq!(receive_until_closed(&late_client), b"");
    (&client).write_all(b"more").unwrap();
    assert_eq!(receive(&server, 4), b"more");
}

#[test]
fn much_more_than_the_kernel_buffers_can_be_held() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    proxy.hold_requests(true);
    let bytes = vec![7; 16 << 20];
    (&client).write_all(&bytes).unwrap();
    assert!(holds(&proxy, bytes.len()));
    proxy.hold_requests(false);
    assert!(receive(&server, bytes.len()) == bytes);
}

#[test]
fn a_cut_happens_once_after_the_given_bytes() {
    let (proxy, listener) = proxy();
    for count in [1, 5, 9] {
        let client = connect(&proxy);
        let server = accept(&listener);
        (&client).write_all(b"before").unwrap();
        assert_eq!(receive(&server, 6), b"before");
        proxy.cut_after(Some(count));
        (&client).write_all(&b"123456789"[..4]).unwrap();
        // An error means that the connection was already cut.
        let _ = (&client).write_all(&b"123456789"[4..]);
        assert_eq!(receive_until_closed(&server), &b"123456789"[..count]);
        assert_eq!(receive_until_closed(&client), b"");
        assert_eq!(proxy.connections(), 0);
    }
    let client = connect(&proxy);
    let server = accept(&listener);
    (&client).write_all(b"after").unwrap();
    assert_eq!(receive(&server, 5), b"after");
}

#[test]
fn a_cut_after_zero_bytes_can_be_cancelled() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    proxy.cut_after(Some(0));
    (&server).write_all(b"reply").unwrap();
    assert_eq!(receive(&client, 5), b"reply");
    proxy.cut_after(None);
    (&client).write_all(b"request").unwrap();
    assert_eq!(receive(&server, 7), b"request");
    proxy.cut_after(Some(0));
    (&client).write_all(b"lost").unwrap();
    assert_eq!(receive_until_closed(&server), b"");
    assert_eq!(receive_until_closed(&client), b"");
}

#[test]
fn cut_all_closes_both_ends_of_every_connection() {
    let (proxy, listener) = proxy();
    let clients = [connect(&proxy), connect(&proxy)];
    let servers = [accept(&listener), accept(&listener)];
    proxy.hold_requests(true);
    (&clients[0]).write_all(b"held").unwrap();
    assert!(holds(&proxy, 4));
    proxy.cut_all();
    assert_eq!((proxy.connections(), proxy.held_bytes()), (0, 0));
    for stream in clients.iter().chain(&servers) {
        assert_eq!(receive_until_closed(stream), b"");
    }
}

#[test]
fn refused_connections_are_closed_and_the_others_stay() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    proxy.refuse(true);
    assert_eq!(receive_until_closed(&connect(&proxy)), b"");
    (&client).write_all(b"on").unwrap();
    assert_eq!(receive(&server, 2), b"on");
    proxy.refuse(false);
    (&connect(&proxy)).write_all(b"in").unwrap();
    assert_eq!(receive(&accept(&listener), 2), b"in");
}

#[test]
fn connections_are_accepted_again_when_the_server_returns() {
    let mut server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    server.kill();
    assert_eq!(receive_until_closed(&connect(&proxy)), b"");
    server.restart().unwrap();
    let client = connect(&proxy);
    (&client).write_all(b"PING\r\n").unwrap();
    assert_eq!(receive(&client, 7), b"+PONG\r\n");
}

#[test]
fn a_killed_server_closes_its_proxied_connections() {
    let mut server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = connect(&proxy);
    assert!(eventually(LIMIT, || proxy.connections() == 1));
    (&client).write_all(b"PING\r\n").unwrap();
    assert_eq!(receive(&client, 7), b"+PONG\r\n");
    server.kill();
    assert_eq!(receive_until_closed(&client), b"");
    assert!(eventually(LIMIT, || proxy.connections() == 0));
}

#[test]
fn many_connections_share_one_proxy() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let clients: Vec<TcpStream> = (0..200).map(|_| connect(&proxy)).collect();
    for client in &clients {
        (&*client).write_all(b"INCR n\r\n").unwrap();
    }
    for client in &clients {
        assert_eq!(receive(client, 1), b":");
    }
    assert_eq!(proxy.connections(), 200);
    assert_eq!(server.command(&["GET", "n"]).unwrap().as_int(), Some(200));
}

#[test]
fn a_dropped_proxy_closes_everything() {
    let (proxy, listener) = proxy();
    let client = connect(&proxy);
    let server = accept(&listener);
    let port = proxy.port();
    drop(proxy);
    assert_eq!(receive_until_closed(&client), b"");
    assert_eq!(receive_until_closed(&server), b"");
    let refused = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err();
    assert!(eventually(LIMIT, refused));
}

#[test]
fn redirected_proxies_keep_old_connections_on_their_server() {
    let (proxy, first) = proxy();
    let before = connect(&proxy);
    let mut from_before = accept(&first);
    let second = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    proxy.redirect(second.local_addr().unwrap().port());
    let after = connect(&proxy);
    let mut from_after = accept(&second);
    from_before.write_all(b"1").unwrap();
    from_after.write_all(b"2").unwrap();
    assert_eq!(receive(&before, 1), b"1");
    assert_eq!(receive(&after, 1), b"2");
}

#[test]
fn silent_connections_are_forgotten() {
    let (proxy, listener) = proxy();
    let silent = connect(&proxy);
    let silent_server = accept(&listener);
    let busy = connect(&proxy);
    let busy_server = accept(&listener);
    let stop = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        let talk = scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                (&busy).write_all(b"x").unwrap();
                receive(&busy_server, 1);
            }
        });
        // The busy connection must not stand still for that time.
        let forgotten = proxy.forget_silent(Duration::from_secs(3));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        talk.join().unwrap();
        assert_eq!(forgotten, 1);
    });
    (&silent).write_all(b"x").unwrap();
    (&silent_server).write_all(b"x").unwrap();
    assert!(eventually(LIMIT, || proxy.held_bytes() == 2));
    assert!(is_silent(&silent) && is_silent(&silent_server));
    // Connections that are opened later work.
    let next = connect(&proxy);
    let next_server = accept(&listener);
    (&next).write_all(b"x").unwrap();
    assert_eq!(receive(&next_server, 1), b"x");
}
