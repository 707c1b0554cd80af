//! The requests that begin a connection. None of them sends a script that the server already has.

use std::time::Duration;

use leasehold_testbed::{Proxy, Server};

use crate::support::{LONG_TTL, SOON, ask, builder, bytes_received, lock, server};

/// The scripts in lua/ that clients of one server call. The other files are scripts of a quorum, or parts of scripts.
const SCRIPTS: u64 = 9;

/// How many SCRIPT commands the server has carried out.
pub fn script_commands(server: &Server) -> u64 {
    // Redis 6.2 counts all SCRIPT commands as one.
    ["script", "script|exists", "script|load"]
        .iter()
        .map(|command| server.calls(command).unwrap())
        .sum()
}

/// How many SCRIPT commands the server carries out during `work`.
fn script_commands_during(server: &Server, work: impl FnOnce()) -> u64 {
    let before = script_commands(server);
    work();
    script_commands(server) - before
}

fn connect(server: &Server) {
    drop(builder(&server.url()).build().unwrap());
}

#[test]
fn only_the_first_connection_sends_the_scripts() {
    const CONNECTIONS: u64 = 20;
    let server = server();
    let first = script_commands_during(&server, || connect(&server));
    assert_eq!(first, 1 + SCRIPTS);
    let before = bytes_received(&server);
    let others = script_commands_during(&server, || {
        (0..CONNECTIONS).for_each(|_| connect(&server));
    });
    assert_eq!(others, CONNECTIONS);
    // This includes the test's own requests.
    let bytes = (bytes_received(&server) - before) / CONNECTIONS;
    assert!(bytes < 800, "{bytes} for each connection");
}

#[test]
fn a_connection_loads_only_missing_scripts() {
    let server = server();
    let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let guard = lock(&client, "k");
    ask(&server, &["SCRIPT", "FLUSH"]);
    // The client sends each missing script with its text, so the server has one script again.
    guard.unlock().unwrap();
    let commands = script_commands_during(&server, || connect(&server));
    assert_eq!(commands, 1 + SCRIPTS - 1);
}

#[test]
fn a_restarted_server_gets_no_unknown_hash() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    lock(&client, "k").unlock().unwrap();
    server.restart().unwrap();
    lock(&client, "k").unlock().unwrap();
    drop(lock(&client, "k"));
    client.shutdown(SOON).unwrap();
    let errors = ask(&server, &["INFO", "errorstats"]);
    let errors = errors.as_text().expect("INFO answers with text");
    assert!(!errors.contains("NOSCRIPT"), "{errors}");
}

/// A wait for a connection may ask the pool several times. Each time, the pool could begin one more connection.
#[test]
fn a_slow_network_causes_no_more_connections() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    proxy.delay(Duration::from_millis(50));
    let client = builder(&proxy.url()).build().unwrap();
    let guard = lock(&client, "k");
    // One for requests. On a busy machine, the one for notifications may have been opened, too.
    let connections = proxy.connections();
    assert!(connections <= 2, "{connections}");
    drop(guard);
}
