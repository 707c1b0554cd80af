//! Traffic over connections with TLS: notifications, transactions, long values, many threads.

use std::sync::Arc;
use std::thread;

use leasehold::redis::Commands;
use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::{Server, eventually};

use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, Witness, ask, connections, connections_made, in_redis,
    lock, lost_within, notified_clients, wait_for_queue,
};

use super::TlsServer;
use super::certificates::{Authority, Validity};

#[test]
fn a_waiter_is_notified_of_its_grant() {
    assert_waiters_are_notified(&TlsServer::start());
}

#[track_caller]
fn assert_waiters_are_notified(tls: &TlsServer) {
    let (holder, waiting) = (tls.client(), tls.client());
    let guard = lock(&holder, "k");
    let waiter = Task::start(move || waiting.mutex("k").lock().map(drop));
    wait_for_queue(&tls.server, "k", 1);
    assert!(eventually(SOON, || notified_clients(&tls.server) > 0));
    guard.unlock().unwrap();
    waiter.within(SOON, "the grant").unwrap();
}

#[test]
fn a_server_with_only_tls_1_2_works() {
    let authority = Authority::new();
    let certificate = authority.of_server("127.0.0.1", Validity::Now);
    let server = Server::builder().tls(authority.files(certificate, false));
    let server = server.arg("tls-protocols", "TLSv1.2").start().unwrap();
    let tls = TlsServer { server, authority };
    assert_waiters_are_notified(&tls);
    let guard = lock(&tls.client(), "k");
    guard.transaction(|_, _| Ok(())).unwrap();
    assert!(guard.unlock().unwrap().is_confirmed());
}

#[test]
fn a_holder_is_notified_of_a_deleted_key() {
    let tls = TlsServer::start();
    // The next renewal is due in 20 s, so it does not find the loss.
    let client = tls.steady().ttl(LONG_TTL).build().unwrap();
    let guard = lock(&client, "k");
    let lost = guard.lost_signal();
    ask(&tls.server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
}

#[test]
fn threads_share_connections_without_a_mix_up() {
    const THREADS: usize = 16;
    const ENTRIES: usize = 50;
    let tls = TlsServer::start();
    let client = tls.client();
    let witness = Arc::new(Witness::default());
    thread::scope(|scope| {
        for n in 0..THREADS {
            let (client, witness) = (client.clone(), Arc::clone(&witness));
            scope.spawn(move || {
                for _ in 0..ENTRIES {
                    let guard = client.mutex("shared").lock().unwrap();
                    drop(witness.enter(&guard));
                    drop(guard);
                    client.with_lock(format!("own {n}"), || ()).unwrap();
                }
            });
        }
    });
    assert_eq!(witness.entries(), THREADS * ENTRIES);
}

#[test]
fn long_values_of_a_transaction_go_both_ways() {
    let tls = TlsServer::start();
    let client = tls.client();
    let guard = lock(&client, "k");
    let long = "x".repeat(3 << 20);
    let written = guard.transaction(|_, pipe| {
        pipe.set("data", &long);
        Ok(())
    });
    written.unwrap();
    let read = guard.transaction(|connection, _| connection.get::<_, String>("data"));
    assert!(read.unwrap().value == long);
}

#[test]
fn a_reply_beyond_the_limit_costs_no_connection() {
    let tls = TlsServer::start();
    let builder = tls.steady().max_reply_bytes(256 * 1024).max_transactions(1);
    let client = builder.build().unwrap();
    let guard = lock(&client, "k");
    ask(&tls.server, &["SETRANGE", "data", "1000000", "x"]);
    // The connection for notifications is made meanwhile.
    assert!(eventually(SOON, || notified_clients(&tls.server) == 1));
    let made = connections_made(&tls.server, || {
        let read = guard.transaction(|connection, _| connection.get::<_, Vec<u8>>("data"));
        assert_eq!(read.unwrap_err().kind(), ErrorKind::TooLarge);
        let read = guard.transaction(|connection, _| connection.strlen::<_, usize>("data"));
        assert_eq!(read.unwrap().value, 1_000_001);
    });
    assert!(made <= 1, "{made} connections");
}

#[test]
fn shutdown_ends_all_threads() {
    let tls = TlsServer::start();
    let recorder = Recorder::new();
    let builder = tls.steady().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = lock(&client, "k");
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    recorder.wait_for(1, What::Contended, "k");
    client.shutdown(SOON).unwrap();
    let error = waiter.within(SOON, "the shutdown").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    drop((guard, client));
    let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
    assert!(ended, "a thread of the client still runs");
    assert!(eventually(SOON, || connections(&tls.server) == 0));
}
