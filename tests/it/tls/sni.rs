//! The name of the server that a client sends in the first message of a handshake (SNI).

use std::net::TcpListener;

use leasehold::TlsConfig;
use rustls::server::Acceptor;

use super::certificates::Authority;
use crate::steady::steady;
use crate::support::{SOON, Task};

/// The name that a client of a URL with this host sends. The server closes the connection behind the first message.
fn sent_name(host: &str, tls: &TlsConfig) -> Option<String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://{host}:{}", listener.local_addr().unwrap().port());
    let name = Task::start(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut acceptor = Acceptor::default();
        loop {
            acceptor.read_tls(&mut stream).unwrap();
            if let Some(accepted) = acceptor.accept().map_err(|(error, _)| error).unwrap() {
                return accepted.client_hello().server_name().map(str::to_owned);
            }
        }
    });
    steady(&url).tls(tls.clone()).build().unwrap_err();
    name.within(SOON, "the first message of a handshake")
}

#[test]
fn only_a_dns_name_is_sent() {
    let tls = TlsConfig::new().ca_pem(Authority::new().pem);
    let named = |name: &str| tls.clone().server_name(name);
    assert_eq!(sent_name("localhost", &tls).as_deref(), Some("localhost"));
    assert_eq!(sent_name("127.0.0.1", &tls), None);
    for host in ["127.0.0.1", "localhost"] {
        let name = sent_name(host, &named("redis.internal"));
        assert_eq!(name.as_deref(), Some("redis.internal"));
        assert_eq!(sent_name(host, &named("10.0.0.1")), None);
    }
}
