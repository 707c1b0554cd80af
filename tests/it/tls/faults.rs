//! Servers and networks that fail during the handshake, a request, a reply, a hold or a wait.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{Builder, ErrorKind};
use leasehold_testbed::eventually;

use crate::faults_hold::assert_closed_connections_end_no_hold_or_wait;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, assert_all_become_free, lock, millis, queued, secs, value_of,
    within,
};

use super::TlsServer;

/// The connect time-out. A dripping handshake takes many times as long.
const BRIEF: Duration = Duration::from_millis(600);

/// A relay to a server's TLS port. While it drips, it passes on the server's bytes one at a time, with a pause after
/// each.
struct Relay {
    port: u16,
    drips: Arc<AtomicBool>,
}

impl Relay {
    const PAUSE: Duration = Duration::from_millis(200);

    fn start(tls: &TlsServer, drips: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (drips, upstream) = (Arc::new(AtomicBool::new(drips)), tls.server.tls_port());
        let dripping = Arc::clone(&drips);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(("127.0.0.1", upstream)).unwrap();
                let (mut to_server, mut from_client) =
                    (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
                let drips = Arc::clone(&dripping);
                thread::spawn(move || pass_on(server, client, &drips));
            }
        });
        Self { port, drips }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, drips: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        let size = if drips.load(Ordering::Acquire) { 1 } else { n };
        for piece in bytes[..n].chunks(size) {
            if to.write_all(piece).is_err() {
                return;
            }
            if size < n {
                thread::sleep(Relay::PAUSE);
            }
        }
    }
}

fn through(tls: &TlsServer, port: u16) -> Builder {
    crate::support::builder(&format!("rediss://127.0.0.1:{port}")).tls(tls.trusted())
}

#[track_caller]
fn assert_unavailable_in_time(builder: Builder, reason: &str) {
    let started = Instant::now();
    let error = builder.connect_timeout(BRIEF).build().unwrap_err();
    let took = started.elapsed();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    assert!(took >= BRIEF / 2 && took < BRIEF + SOON / 2, "{took:?}");
}

#[test]
fn a_dripping_handshake_times_out() {
    let tls = TlsServer::start();
    let relay = Relay::start(&tls, true);
    assert_unavailable_in_time(through(&tls, relay.port), "did not end the TLS handshake");
}

#[test]
fn a_silent_handshake_times_out() {
    let tls = TlsServer::start();
    let (proxy, _) = tls.proxy();
    proxy.black_hole(true);
    let builder = through(&tls, proxy.port());
    assert_unavailable_in_time(builder, "did not answer the TLS handshake");
}

#[test]
fn a_handshake_with_a_stopped_server_times_out() {
    let tls = TlsServer::start();
    tls.server.stop();
    assert_unavailable_in_time(tls.builder(), "did not answer the TLS handshake");
    tls.server.resume();
}

#[test]
fn shutdown_ends_handshakes() {
    let tls = TlsServer::start();
    let (proxy, _) = tls.proxy();
    proxy.black_hole(true);
    let recorder = Recorder::new();
    let builder = through(&tls, proxy.port()).connect_timeout(secs(60));
    let builder = builder.event_handler(Arc::clone(&recorder));
    let client = builder.build_lazy().unwrap();
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    assert!(eventually(SOON, || proxy.held_bytes() > 0));
    // No request was sent, so the client has no release to confirm.
    let _ = client.shutdown(millis(100));
    let error = waiter.within(SOON, "the shutdown").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    drop(client);
    let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
    assert!(ended, "a thread still waits for the handshake");
}

#[test]
fn a_dripping_reply_times_out() {
    let tls = TlsServer::start();
    let relay = Relay::start(&tls, false);
    let client = through(&tls, relay.port).outage_timeout(millis(1));
    let client = client.build().unwrap();
    assert!(eventually(SOON, || client.with_lock("k", || ()).is_ok()));
    // A TLS record has 22 bytes more than its content, so at 200 ms per byte a reply takes longer than the time-out.
    relay.drips.store(true, Ordering::Release);
    let error = within(SOON, "a try", move || {
        client.mutex("k").try_lock().map(drop).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
}

#[test]
fn a_connection_cut_during_the_handshake_is_replaced() {
    let tls = TlsServer::start();
    let (proxy, url) = tls.proxy();
    // The client sends some 600 bytes for the handshake and the login, and as many for the lock.
    for bytes in (0..1500).step_by(30) {
        let builder = crate::support::builder(&url).tls(tls.trusted());
        let client = builder.ttl(LONG_TTL).build_lazy().unwrap();
        proxy.cut_after(Some(bytes));
        let guard = lock(&client, "k");
        guard.unlock().unwrap();
        proxy.cut_after(None);
    }
    assert_all_become_free(&tls.server);
}

#[test]
fn a_lost_reply_leaves_no_lock() {
    let tls = TlsServer::start();
    let (proxy, url) = tls.proxy();
    let builder = crate::support::builder(&url).tls(tls.trusted());
    let client = builder.ttl(LONG_TTL).build().unwrap();
    for _ in 0..5 {
        // Makes a new connection, since the handshake needs replies.
        client.with_lock("k", || ()).unwrap();
        proxy.hold_replies(true);
        let mutex = client.mutex("k");
        let waiter = Task::start(move || mutex.lock().map(drop));
        assert!(eventually(SOON, || value_of(&tls.server, "k").is_some()));
        proxy.cut_all();
        proxy.hold_replies(false);
        waiter.within(SOON, "the next attempt").unwrap();
    }
    assert_all_become_free(&tls.server);
}

#[test]
fn a_client_reconnects_to_a_restarted_server() {
    let mut tls = TlsServer::start();
    let client = tls.builder().build().unwrap();
    client.with_lock("k", || ()).unwrap();
    tls.server.kill();
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    tls.server.restart().unwrap();
    waiter.within(2 * SOON, "the server's restart").unwrap();
}

#[test]
fn a_stopped_server_leaves_no_lock_behind() {
    let tls = TlsServer::start();
    let client = tls.builder().ttl(LONG_TTL).outage_timeout(millis(1));
    let client = client.build().unwrap();
    assert!(eventually(SOON, || client.with_lock("k", || ()).is_ok()));
    tls.server.stop();
    let mutex = client.mutex("k");
    let error = within(SOON, "a try", move || {
        mutex.try_lock().map(drop).unwrap_err()
    });
    assert!(error.is_unavailable(), "{error}");
    tls.server.resume();
    assert_all_become_free(&tls.server);
}

#[test]
fn closed_connections_end_no_hold_or_wait() {
    let tls = TlsServer::start();
    let is_queued = || queued(&tls.server, "k") == 1;
    assert_closed_connections_end_no_hold_or_wait(&tls.server, &|| tls.steady(), &is_queued);
}
