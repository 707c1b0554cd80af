//! What goes through which pipeline, on a real Redis.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use leasehold_testbed::{Proxy, Server, eventually};

use super::*;
use crate::config::DEFAULT_MAX_REPLY;
use crate::store::redis::pipeline::MAX_BATCH;
use crate::util::id::LeaseId;
use crate::util::key::Key;

const LONG: Duration = Duration::from_secs(20);

fn renewals(count: usize) -> Vec<Request> {
    let renewal = |n: usize| Command::Renew {
        key: Key::new("p:", &n.to_string(), 100).unwrap(),
        lease: LeaseId::random(),
        ttl: LONG,
    };
    let deadline = MonotonicTime::now().after(LONG);
    let commands = (0..count).map(renewal);
    commands
        .map(|command| Request::new(command, deadline))
        .collect()
}

fn node(url: &str) -> Node {
    let endpoint = Arc::new(Endpoint::new(url, LONG, DEFAULT_MAX_REPLY).unwrap());
    let config = Config {
        command_timeout: LONG,
        ..Config::default()
    };
    let holder = HolderId::of_this_process();
    Node::new(endpoint, &config, holder, Box::new(|_| {}), None)
}

#[test]
fn renewals_that_come_together_are_written_together() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    node.execute(&mut renewals(1));
    let calls = || server.calls("evalsha").unwrap();
    let before = calls();
    proxy.hold_replies(true);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut requests = renewals(3 * MAX_BATCH);
            node.execute(&mut requests);
            requests
        });
        // Callers' would wait for the answer to the first call.
        let written = eventually(LONG / 2, || calls() == before + 3);
        proxy.hold_replies(false);
        let answered = asking.join().unwrap().into_iter();
        assert!(answered.map(Request::into_outcome).all(|one| one.is_ok()));
        assert!(written, "the whole of it, before the first answer");
    });
}

#[test]
fn renewals_do_not_wait_for_the_answers_to_others() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    let renew = |count| node.execute(&mut renewals(count));
    let calls = || server.calls("evalsha").unwrap();
    // Each makes its connection when it is needed, for which answers are needed.
    for pipeline in node.pipelines.iter().rev().take(RENEWAL_PIPELINES) {
        let mut one = renewals(1);
        pipeline.execute(&mut one.iter_mut().collect::<Vec<_>>());
    }
    for (one, other) in [(1, 1), (1, 2), (2, 2)] {
        let before = calls();
        proxy.hold_replies(true);
        thread::scope(|scope| {
            scope.spawn(|| renew(one));
            let first = eventually(LONG / 4, || calls() == before + 1);
            scope.spawn(|| renew(other));
            let second = eventually(LONG / 4, || calls() == before + 2);
            proxy.hold_replies(false);
            assert!(first && second, "{one} and {other}");
        });
    }
    let before = calls();
    renew(4);
    assert_eq!(calls(), before + 1, "those that come together go together");
}

#[test]
fn what_is_no_renewal_stays_off_the_lanes_for_those_and_uses_all_others() {
    let node = node("redis://127.0.0.1:1");
    let pipeline_of = |n: usize| {
        let key = Key::new("p:", &n.to_string(), 100).unwrap();
        node.pipeline_of(&Command::Inspect { key }, || panic!("it is none"))
    };
    let used: BTreeSet<usize> = (0..100).map(pipeline_of).collect();
    assert!(used.into_iter().eq(0..Config::default().pipelines));
}

#[test]
fn connections_for_renewals_are_all_in_use_once_they_are_needed() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let node = node(&proxy.url());
    let renew = || node.execute(&mut renewals(1));
    let used = |times| {
        let pipelines = (0..times).map(|_| node.pipeline_for_renewals());
        pipelines.collect::<BTreeSet<usize>>().len()
    };
    assert_eq!(used(4), RENEWAL_PIPELINES, "whichever connects");
    renew();
    assert_eq!(used(4), 1, "the one that is there is enough");
    proxy.delay(Duration::from_millis(2));
    let both = eventually(LONG, || {
        thread::scope(|scope| [scope.spawn(renew), scope.spawn(renew)].map(|one| one.join()))
            .into_iter()
            .for_each(Result::unwrap);
        proxy.connections() == RENEWAL_PIPELINES
    });
    assert!(both, "one is not enough for two at a time");
    assert_eq!(used(4), RENEWAL_PIPELINES, "none is left to rest");
    proxy.cut_all();
    renew();
    assert_eq!(used(4), 1, "the other died with it, as a rule");
}
