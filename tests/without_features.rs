//! The behaviour of leasehold without its cargo features. Most other tests run with all features.
#![cfg(not(any(feature = "tls", feature = "tracing", feature = "metrics")))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Client, EnvironmentFinding, EventHandler};
use leasehold_testbed::{Server, eventually};
use redis::{ConnectionAddr, IntoConnectionInfo};

const SOON: Duration = Duration::from_secs(20);

/// One test, since it counts the threads of the process.
#[test]
fn clients_without_features_do_without_their_work() {
    urls_with_tls_name_the_feature();
    a_check_needs_a_receiver_and_the_setting();
    the_callback_thread_starts_with_the_first_callback();
}

fn urls_with_tls_name_the_feature() {
    for url in [
        "rediss://127.0.0.1",
        "rediss+cluster://127.0.0.1",
        "rediss+sentinel://127.0.0.1/main",
    ] {
        let error = Client::open(url).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid configuration: url: asks for TLS, which needs leasehold's cargo feature `tls`; \
             enable it in Cargo.toml"
        );
    }
    let address = ConnectionAddr::TcpTls {
        host: "127.0.0.1".to_owned(),
        port: 1,
        insecure: false,
        tls_params: None,
    };
    let error = Client::open(address.into_connection_info().unwrap()).unwrap_err();
    assert!(error.to_string().contains("cargo feature `tls`"), "{error}");
}

#[derive(Default)]
struct CountedFindings(AtomicUsize);

impl EventHandler for CountedFindings {
    fn environment_warning(&self, _finding: &EnvironmentFinding) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The server's settings would be reported, since they let it delete locks.
fn a_check_needs_a_receiver_and_the_setting() {
    let server = Server::builder().arg("maxmemory-policy", "allkeys-lru");
    let server = server.arg("maxmemory", "100mb").start().unwrap();
    // Valkey 9 reads two settings when it starts.
    let calls = |name| server.calls(name).unwrap();
    let checks = || calls("config") + calls("config|get");
    let before = checks();
    let receiver = Arc::new(CountedFindings::default());
    let silent = Client::builder(server.url()).environment_check(true);
    let switched_off = Client::builder(server.url())
        .event_handler(Arc::clone(&receiver))
        .environment_check(false);
    for builder in [silent, switched_off] {
        let client = builder.build().unwrap();
        client.with_lock("k", || ()).unwrap();
        client.shutdown(SOON).unwrap();
    }
    assert_eq!(receiver.0.load(Ordering::Relaxed), 0);
    assert_eq!(checks(), before);
}

/// With `tracing` or `metrics`, it starts with the client.
fn the_callback_thread_starts_with_the_first_callback() {
    let Some(before) = threads() else { return };
    let server = Server::start().unwrap();
    let client = Client::open(server.url()).unwrap();
    let guard = client.mutex("k").lock().unwrap();
    assert!(eventually(SOON, || threads() == Some(before + 4)));
    guard.on_lost(drop);
    assert_eq!(threads(), Some(before + 5));
    drop((guard, client));
    assert!(eventually(SOON, || threads() == Some(before)));
}

/// The threads of this process; `None` where the system does not show them.
fn threads() -> Option<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    Some(tasks.count())
}
