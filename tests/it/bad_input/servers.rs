//! What stands at the address is not a Redis that answers.

use leasehold::ErrorKind;

use crate::fakes::{Fake, Manner, closed_port};

use super::assert_all_say;

#[test]
fn a_closed_port_is_unavailable() {
    let url = format!("redis://127.0.0.1:{}", closed_port());
    assert_all_say(ErrorKind::Unavailable, &url);
}

#[test]
fn a_socket_that_is_not_there_is_unavailable() {
    assert_all_say(ErrorKind::Unavailable, "unix:///nowhere/at/all.sock");
}

#[test]
fn a_server_that_accepts_and_never_answers_is_unavailable() {
    let fake = Fake::start(Manner::Mute);
    assert_all_say(ErrorKind::Unavailable, &fake.url());
    assert!(fake.connections() > 0);
}

#[test]
fn a_server_whose_backlog_alone_accepts_is_unavailable() {
    let fake = Fake::start(Manner::BacklogOnly);
    assert_all_say(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_server_that_closes_at_once_is_unavailable() {
    let fake = Fake::start(Manner::Closing);
    assert_all_say(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_server_that_never_ends_its_answer_is_unavailable() {
    let fake = Fake::start(Manner::Unending);
    assert_all_say(ErrorKind::Unavailable, &fake.url());
}

#[test]
fn a_web_server_is_not_taken_for_redis() {
    let fake = Fake::start(Manner::Http);
    assert_all_say(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_mail_server_is_not_taken_for_redis() {
    let fake = Fake::start(Manner::Greeting);
    assert_all_say(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_that_sends_garbage_is_not_taken_for_redis() {
    let fake = Fake::start(Manner::Garbage);
    assert_all_say(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_that_answers_what_was_not_asked_is_not_taken_for_redis() {
    let fake = Fake::start(Manner::Parrot);
    assert_all_say(ErrorKind::Protocol, &fake.url());
}

#[test]
fn a_server_that_gives_other_hashes_is_refused() {
    let fake = Fake::start(Manner::OtherHashes);
    assert_all_say(ErrorKind::Protocol, &fake.url());
}
