//! Addresses without a Redis that replies.

use leasehold::ErrorKind;

use crate::fakes::{Fake, Manner, closed_port};

use super::assert_all_fail;

#[test]
fn a_closed_port_is_unavailable() {
    let url = format!("redis://127.0.0.1:{}", closed_port());
    assert_all_fail(ErrorKind::Unavailable, &url);
}

#[test]
fn a_missing_socket_is_unavailable() {
    assert_all_fail(ErrorKind::Unavailable, "unix:///nowhere/at/all.sock");
}

#[test]
fn a_server_that_never_replies_is_unavailable() {
    let fake = Fake::start(Manner::Mute);
    assert_all_fail(ErrorKind::Unavailable, &fake.url());
    assert!(fake.connections() > 0);
}

#[test]
fn a_server_that_accepts_nothing_is_unavailable() {
    let fake = Fake::start(Manner::BacklogOnly);
    assert_all_fail(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_server_that_closes_at_once_is_unavailable() {
    let fake = Fake::start(Manner::Closing);
    assert_all_fail(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_server_with_an_endless_reply_is_unavailable() {
    let fake = Fake::start(Manner::Unending);
    assert_all_fail(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_web_server_is_refused() {
    let fake = Fake::start(Manner::Http);
    assert_all_fail(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_mail_server_is_refused() {
    let fake = Fake::start(Manner::Greeting);
    assert_all_fail(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_that_sends_garbage_is_refused() {
    let fake = Fake::start(Manner::Garbage);
    assert_all_fail(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_with_unfitting_replies_is_refused() {
    let fake = Fake::start(Manner::Parrot);
    assert_all_fail(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_with_other_script_hashes_is_refused() {
    let fake = Fake::start(Manner::OtherHashes);
    assert_all_fail(ErrorKind::Protocol, &fake.url());
}
