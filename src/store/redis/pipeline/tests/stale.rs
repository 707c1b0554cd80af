//! Tests of stale and suspect connections, which are replaced before the next write.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;

impl Fixture {
    /// Makes the connection stale, as if another connection had broken.
    fn make_stale(&self) {
        self.pipeline.shared.endpoint.epoch().note_break();
    }

    fn ask_server(&self, args: &[&str]) -> String {
        let reply = self.server.command(args).unwrap();
        reply.as_text().unwrap_or_default().to_owned()
    }
}

#[test]
fn replies_on_a_stale_connection_are_read() {
    let f = fixture();
    let lease = f.acquire("k");
    // The reply to the release is NOSCRIPT. The release is repeated, and so carried out, only after this reply is read.
    f.ask_server(&["SCRIPT", "FLUSH"]);
    let before = f.connection();
    f.pipeline.send_release(f.release("k", lease));
    assert_eq!(f.unanswered(), 1);
    f.make_stale();
    f.acquire("k");
    assert_ne!(f.connection(), before);
}

#[test]
fn a_release_is_not_written_on_a_stale_connection() {
    let f = fixture();
    let lease = f.acquire("k");
    let (before, hook_calls) = (f.connection(), f.hook_calls.load(Ordering::SeqCst));
    f.make_stale();
    f.pipeline.send_release(f.release("k", lease));
    assert_eq!(f.unanswered(), 0);
    assert!(f.exists("k"));
    assert!(
        f.hook_calls.load(Ordering::SeqCst) > hook_calls,
        "left to the background"
    );
    f.pipeline.run_maintenance();
    assert!(!f.exists("k"));
    assert_ne!(f.connection(), before);
}

#[test]
fn waiting_for_replies_on_a_stale_connection_takes_a_request_its_time() {
    let f = fixture();
    let release = f.release("a", f.acquire("a"));
    f.make_stale();
    // Another connection, which is not stale, is in the pool.
    drop(f.pipeline.shared.pool.get().unwrap());
    f.server.stop();
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    let written = leadership.write(
        vec![PendingRequest::new(release, None)],
        None,
        MonotonicTime::now().after(LONG),
    );
    written.unwrap();
    drop(leadership);
    let (_, outcome) = f.acquire_within("b", Duration::from_millis(50));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(f.unanswered(), 1, "the release only");
    f.server.resume();
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("a") && !f.exists("b"));
}

/// A proxy to the server that replaces one reply once `armed` is set.
fn proxy_with_one_bad_reply(server: &Server, armed: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, to) = (listener.local_addr().unwrap().port(), server.port());
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut into));
            let (armed, mut client, mut server) = (Arc::clone(&armed), client, server);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = server.read(&mut bytes) {
                    let reply = match armed.swap(false, Ordering::SeqCst) {
                        true => b"+unexpected\r\n",
                        false => &bytes[..count],
                    };
                    if client.write_all(reply).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[test]
fn an_unexpected_reply_makes_all_connections_suspect() {
    let armed = Arc::new(AtomicBool::new(false));
    let server = Server::start().unwrap();
    let port = proxy_with_one_bad_reply(&server, Arc::clone(&armed));
    let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
    let lease = f.acquire("k");
    let epoch = f.pipeline.shared.endpoint.epoch();
    let made_in = epoch.now();
    armed.store(true, Ordering::SeqCst);
    let error = f.ask(f.release("k", lease), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(epoch.replace_at(&made_in).is_some());
}
