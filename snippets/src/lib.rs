//! The Rust in README.md and docs/, run as tests: see build.rs.

#![cfg(test)]
#![allow(unused)]

use std::sync::LazyLock;

use leasehold::Client;
use leasehold_testbed::Server;

/// One server for all of them.
static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start().unwrap());

fn url() -> &'static str {
    static URL: LazyLock<String> = LazyLock::new(|| SERVER.url());
    &URL
}

/// What a snippet without a client of its own uses: under a prefix that is nobody else's.
fn client() -> Client {
    let prefix = format!("{:?}:", std::thread::current().id());
    Client::builder(url()).prefix(&prefix).build().unwrap()
}

include!(concat!(env!("OUT_DIR"), "/tests.rs"));
