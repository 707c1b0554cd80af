//! In a process where `SIGPIPE` has its default action, a connection that Redis closes does not end the process.

use std::process::Command;

use leasehold_testbed::Server;

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{SOON, ask};

/// How often the server closes all connections.
const ROUNDS: usize = 20;

/// Writes on connections that the server has closed. For each lock, the release is the first write and the next acquire
/// the second one: over TCP, only a second write can cause the signal.
pub fn write_on_closed_connections(parent: &Parent) {
    // The `main` of Rust has let this process ignore the signal.
    sigpipe::reset();
    let client = steady(&parent.url).build().unwrap();
    for _ in 0..ROUNDS {
        let guard = client.mutex("k").lock().unwrap();
        parent.tell("held");
        parent.wait_to_proceed();
        drop(guard);
        for _ in 0..3 {
            // An error is allowed: the connection is closed.
            let _ = client.mutex("k").try_lock();
            let _ = client.ping();
        }
    }
}

#[track_caller]
fn assert_survives(command: Command, server: &Server, url: &str) {
    let mut child = Child::start_by(command, write_on_closed_connections, url);
    for _ in 0..ROUNDS {
        child.receive::<String>(6 * SOON);
        for kind in ["normal", "pubsub"] {
            ask(server, &["CLIENT", "KILL", "TYPE", kind]);
        }
        child.proceed();
    }
    child.finish(6 * SOON);
}

fn this_program() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

#[test]
fn closed_connections_over_tcp_send_no_sigpipe() {
    let server = crate::support::server();
    assert_survives(this_program(), &server, &server.url());
}

#[test]
fn closed_connections_over_unix_sockets_send_no_sigpipe() {
    let server = Server::builder().unix_socket().start().unwrap();
    assert_survives(this_program(), &server, &server.unix_url().unwrap());
}

#[test]
#[cfg(feature = "tls")]
fn closed_connections_over_tls_send_no_sigpipe() {
    let tls = crate::tls::TlsServer::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("authorities.pem");
    std::fs::write(&file, tls.authority()).unwrap();
    let mut command = this_program();
    command
        .env("SSL_CERT_FILE", file)
        .env_remove("SSL_CERT_DIR");
    assert_survives(command, &tls.server, &tls.url());
}
