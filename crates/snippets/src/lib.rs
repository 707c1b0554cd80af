//! The Rust in README.md and docs/, run as tests: see build.rs.

#![cfg(test)]
#![allow(unused)]

use std::sync::LazyLock;

use leasehold::Client;
use leasehold_testbed::Server;

/// One server for all tests.
static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start().unwrap());

fn url() -> &'static str {
    static URL: LazyLock<String> = LazyLock::new(|| SERVER.url());
    &URL
}

/// The client of snippets that make none, under a prefix of its own.
fn client() -> Client {
    let prefix = format!("{:?}:", std::thread::current().id());
    Client::builder(url()).prefix(&prefix).build().unwrap()
}

include!(concat!(env!("OUT_DIR"), "/tests.rs"));
