//! What goes through which lane, on a real Redis.

use std::thread;
use std::time::Duration;

use leasehold_testbed::{Proxy, Server, eventually};

use super::*;
use crate::id::LeaseId;
use crate::key::Key;
use crate::store::MAX_BATCH;

const LONG: Duration = Duration::from_secs(20);

fn renewals(count: usize) -> Vec<Request> {
    let renewal = |n: usize| Command::Renew {
        key: Key::new("p:", &n.to_string(), 100).unwrap(),
        lease: LeaseId::random(),
        ttl: LONG,
    };
    let deadline = Moment::now().after(LONG);
    let commands = (0..count).map(renewal);
    commands
        .map(|command| Request::new(command, deadline))
        .collect()
}

#[test]
fn renewals_that_come_together_are_written_together() {
    let server = Server::start().unwrap();
    let proxy = Proxy::start(server.port()).unwrap();
    let endpoint = Arc::new(Endpoint::new(&proxy.url(), LONG, LONG).unwrap());
    let config = Config {
        command_timeout: LONG,
        ..Config::default()
    };
    let holder = HolderId::of_this_process();
    let node = Node::new(endpoint, &config, holder, Box::new(|_| {}), None);
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
