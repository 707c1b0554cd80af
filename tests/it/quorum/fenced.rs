//! Fenced values on a quorum, while nodes are stopped, flushed and restarted.

use std::time::Instant;

use leasehold::{Client, ErrorKind, FencedValue};
use leasehold_testbed::{Server, eventually};

use super::nodes::{Nodes, end_quarantine, impatient};
use crate::support::{SOON, ask, in_redis, lock, secs};

/// The copy of the value "v" on a node.
fn copy(server: &Server) -> Option<String> {
    let copy = ask(server, &["GET", &in_redis("~value:v")]);
    copy.as_text().map(str::to_owned)
}

fn token(client: &Client) -> u64 {
    let guard = lock(client, "k");
    let token = guard.fencing_token();
    guard.unlock().unwrap();
    token
}

#[track_caller]
fn assert_reads(value: &FencedValue, wanted: &str) {
    assert_eq!(value.read().unwrap().as_deref(), Some(wanted.as_bytes()));
}

/// Reads the value until these nodes have the same copy. A node that was slower than a majority gets its copy by a
/// read.
#[track_caller]
fn assert_spreads(nodes: &[Server], value: &FencedValue, wanted: &str) {
    assert!(eventually(SOON, || {
        assert_reads(value, wanted);
        let copies: Vec<Option<String>> = nodes.iter().map(copy).collect();
        copies[0].is_some() && copies.iter().all(|copy| *copy == copies[0])
    }));
}

#[track_caller]
fn assert_stale(value: &FencedValue, token: u64) {
    let refused = value.write(token, "late").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StaleToken, "{refused}");
}

/// Acts as if the node had restarted without its data a long time ago.
fn forget(server: &Server) {
    ask(server, &["FLUSHALL"]);
    end_quarantine(server);
}

#[test]
fn stopped_nodes_delay_no_read_or_write() {
    let nodes = Nodes::start(5);
    let (one, two) = (nodes.client(), nodes.client());
    let (value, same) = (one.fenced_value("v"), two.fenced_value("v"));
    let late = token(&one);
    value.write(late, "first").unwrap();
    assert_spreads(&nodes.0, &value, "first");
    nodes.0[3..].iter().for_each(Server::stop);
    let started = Instant::now();
    for round in 0..20 {
        let text = round.to_string();
        value.write(token(&two), &text).unwrap();
        assert_reads(&same, &text);
        assert_stale(&same, late);
    }
    // The time-outs are 8 s.
    assert!(started.elapsed() < secs(6), "{:?}", started.elapsed());
    // The nodes that were stopped have the oldest values.
    nodes.0[3..].iter().for_each(Server::resume);
    nodes.0[..2].iter().for_each(Server::stop);
    assert_reads(&value, "19");
    assert_stale(&value, late);
    nodes.0[..2].iter().for_each(Server::resume);
}

#[test]
fn a_stopped_majority_is_no_quorum_for_values() {
    let nodes = Nodes::start(3);
    let client = impatient(nodes.urls(), secs(2)).build().unwrap();
    let value = client.fenced_value("v");
    let token = token(&client);
    value.write(token, "1").unwrap();
    nodes.0[1..].iter().for_each(Server::stop);
    for error in [
        value.read().map(drop).unwrap_err(),
        value.write(token, "2").unwrap_err(),
        value.delete(token).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
        let text = error.to_string();
        assert!(text.contains("2 of 3 are needed: "), "{text}");
        for server in &nodes.0 {
            let name = format!("127.0.0.1:{}", server.port());
            assert!(text.contains(&name), "{text:?} lacks {name}");
        }
    }
    nodes.0[1..].iter().for_each(Server::resume);
    // Each write that failed may have been carried out, but none was.
    assert!(eventually(SOON, || value.read().is_ok()));
    assert_reads(&value, "1");
}

/// One node after another loses its data. Each gets the value back from the others, by a read.
#[test]
fn a_value_outlives_the_loss_of_each_node() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let value = client.fenced_value("v");
    let (late, last) = (token(&client), token(&client));
    value.write(last, "1").unwrap();
    assert_spreads(&nodes.0, &value, "1");
    for node in &nodes.0 {
        forget(node);
        let is_back = || {
            assert_reads(&value, "1");
            copy(node).is_some()
        };
        assert!(eventually(SOON, is_back));
    }
    assert_stale(&value, late);
    value.delete(last).unwrap();
    for node in &nodes.0 {
        forget(node);
        let is_back = || {
            assert_eq!(value.read().unwrap(), None);
            copy(node).is_some_and(|copy| copy.ends_with('-'))
        };
        assert!(eventually(SOON, is_back));
    }
    assert_stale(&value, late);
}

/// A majority without the value is not enough, since the node that is away has it.
#[test]
fn a_lost_copy_is_not_taken_for_an_absent_value() {
    let nodes = Nodes::start(3);
    let client = impatient(nodes.urls(), secs(2)).build().unwrap();
    let value = client.fenced_value("v");
    let token = token(&client);
    nodes.0[0].stop();
    value.write(token, "1").unwrap();
    nodes.0[0].resume();
    nodes.0[2].stop();
    forget(&nodes.0[1]);
    let error = value.read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoQuorum, "{error}");
    assert!(
        error.to_string().contains("has lost a later one"),
        "{error}"
    );
    assert_eq!(
        value.write(7, "late").unwrap_err().kind(),
        ErrorKind::NoQuorum
    );
    nodes.0[2].resume();
    assert!(eventually(SOON, || value.read().is_ok()));
    assert_reads(&value, "1");
    assert_stale(&value, 7);
}

/// Its token is later than all tokens that the two nodes can have lost.
#[test]
fn a_new_value_is_written_while_a_node_is_away() {
    let nodes = Nodes::start(3);
    let client = impatient(nodes.urls(), secs(2)).build().unwrap();
    let value = client.fenced_value("v");
    nodes.0[0].stop();
    let token = token(&client);
    value.write(token, "1").unwrap();
    assert_reads(&value, "1");
    nodes.0[0].resume();
}

#[test]
fn a_token_from_the_future_is_refused_and_not_stored() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let value = client.fenced_value("v");
    for token in [u64::MAX, token(&client) * 2] {
        let error = value.write(token, "1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(
            error.to_string().contains("later than the clock"),
            "{error}"
        );
    }
    assert!(nodes.0.iter().all(|node| copy(node).is_none()));
    assert_eq!(value.read().unwrap(), None);
}

#[test]
fn foreign_and_long_values_on_a_majority_are_errors() {
    let nodes = Nodes::start(3);
    let client = nodes.builder().max_reply_bytes(256 * 1024).build().unwrap();
    let value = client.fenced_value("v");
    let token = token(&client);
    for foreign in [
        &["SET", "", "lh1 something else"][..],
        &["SET", "", ""],
        &["HSET", "", "token", "00000000000000000017"],
    ] {
        for (n, node) in nodes.0.iter().enumerate() {
            let mut command = foreign.to_vec();
            let key = in_redis("~value:v");
            command[1] = &key;
            ask(node, &["DEL", &key]);
            ask(node, &command);
            let is_minority = n == 0;
            if is_minority {
                nodes.0[1..]
                    .iter()
                    .for_each(|node| drop(ask(node, &["DEL", &key])));
                value.write(token, "1").unwrap();
                assert_spreads(&nodes.0[1..], &value, "1");
            }
        }
        for error in [
            value.read().map(drop).unwrap_err(),
            value.write(token, "1").unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
            let says = "no fenced value of this library";
            assert!(error.to_string().contains(says), "{error}");
        }
    }
    // A copy has its version before the value, and a reply has more than the copy.
    let longest = "1".repeat(256 * 1024 - 512 - 82);
    let value = client.fenced_value("long");
    value.write(token, &longest).unwrap();
    assert_reads(&value, &longest);
    value.write(token, longest + "1").unwrap();
    assert_eq!(value.read().unwrap_err().kind(), ErrorKind::TooLarge);
    value.write(token, "short").unwrap();
    assert_reads(&value, "short");
}

/// The rest of a ttl goes to a node that gets the value back.
#[test]
fn a_returned_copy_keeps_the_ttl() {
    let nodes = Nodes::start(3);
    let client = nodes.client();
    let value = client.fenced_value("v").ttl(secs(600));
    let token = token(&client);
    value.write(token, "1").unwrap();
    client.fenced_value("v").write(token, "2").unwrap();
    assert_spreads(&nodes.0, &value, "2");
    forget(&nodes.0[1]);
    assert_spreads(&nodes.0, &value, "2");
    for node in &nodes.0 {
        let left = ask(node, &["PTTL", &in_redis("~value:v")]);
        let left = left.as_int().unwrap();
        assert!((1..=600_000).contains(&left), "{left}");
    }
}
