//! The number of threads of a client: as many as README.md, ARCHITECTURE.md and the API docs say.

use leasehold::{Client, MemoryStore};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::support::{SOON, secs, server};

#[test]
fn a_client_has_nine_threads_and_one_more_for_checks() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    Child::start(count_threads_of_clients, &server.url()).finish(secs(120));
}

pub fn count_threads_of_clients(parent: &Parent) {
    let before = child::threads().unwrap();
    let assert_more = |more: usize, what: &str| {
        let is_so = || child::threads().unwrap() == before + more;
        let seen = eventually(SOON, is_so);
        let found = child::threads().unwrap() - before;
        assert!(seen, "{what}: {found} threads, not {more}");
    };
    let client = Client::open(&parent.url).unwrap();
    assert_more(9, "a client");
    let guards: Vec<_> = (0..100)
        .map(|n| client.mutex(format!("k{n}")).lock().unwrap())
        .collect();
    guards[0].transaction(|_, _| Ok(())).unwrap();
    assert_more(9, "a client with locks");
    let checked = client.mutex("checked").renew_while(|| true);
    let guard = checked.lock().unwrap();
    assert_more(10, "a client with checks");
    drop((guards, guard, checked, client));
    assert_more(0, "no client");
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    assert_more(5, "a client of a memory store");
    drop(client);
    assert_more(0, "no client of a memory store");
}
