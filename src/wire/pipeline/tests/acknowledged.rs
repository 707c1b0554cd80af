//! Tests of requests that a replica has to acknowledge. Tests that need a missing acknowledgement stop the replica.

use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;
use crate::command::{Mode, Renew};
use crate::config::Replicas;
use crate::wire::fake_server;

const SHORT: Duration = Duration::from_millis(100);

/// A replica of the pipeline's server, in step with it.
fn replica_of(primary: &Server) -> Server {
    let at_once = ["CONFIG", "SET", "repl-diskless-sync-delay", "0"];
    primary.command(&at_once).unwrap();
    let replica = Server::start().unwrap();
    let port = primary.port().to_string();
    replica.command(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
    let is_linked = || primary.command(&["WAIT", "1", "100"]).unwrap().as_int() == Some(1);
    assert!(eventually(LONG, is_linked));
    replica
}

fn within(timeout: Duration) -> Option<Replicas> {
    Replicas::new(1, timeout)
}

fn acquire_within(timeout: Duration, name: &str) -> Command {
    let mut command = acquire_of(name);
    if let Command::Acquire(Acquire { replicas, .. }) = &mut command {
        *replicas = within(timeout);
    }
    command
}

fn renew_within(timeout: Duration, name: &str, lease: LeaseId, ttl: Duration) -> Command {
    Command::Renew(Renew {
        mode: Mode::Exclusive,
        key: key(name),
        lease,
        token: 0,
        ttl,
        replicas: within(timeout),
    })
}

impl Fixture {
    fn finish(&self) {
        while self.pipeline.run_maintenance() {}
        assert!(self.is_idle() && self.unanswered() == 0);
    }
}

#[test]
fn one_wait_serves_a_batch() {
    let f = fixture();
    let _replica = replica_of(&f.server);
    let before = f.server.calls("wait").unwrap();
    let acquires = (0..2 * MAX_BATCH).map(|n| acquire_within(LONG / 4, &n.to_string()));
    for outcome in f.execute(acquires) {
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
    }
    assert_eq!(f.server.calls("wait").unwrap() - before, 2);
    f.acquire("another");
    assert_eq!(f.server.calls("wait").unwrap() - before, 2, "not asked for");
}

#[test]
fn an_unacknowledged_grant_is_undone() {
    let f = fixture();
    let replica = replica_of(&f.server);
    f.warm_up("warm-up");
    let before = f.connection();
    replica.stop();
    let error = f.ask(acquire_within(SHORT, "a"), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let address = f.pipeline.shared.endpoint.address();
    let wanted = format!("{address}: 0 of 1 replicas acknowledged within 100ms");
    assert!(error.to_string().contains(&wanted), "{error}");
    f.finish();
    assert!(!f.exists("a"));
    assert_eq!(f.connection(), before, "it costs no connection");
    replica.resume();
    let outcome = f.ask(acquire_within(LONG / 4, "a"), LONG);
    assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
}

#[test]
fn an_unacknowledged_renewal_fails_and_keeps_the_key() {
    let f = fixture();
    let replica = replica_of(&f.server);
    let lease = f.acquire("a");
    replica.stop();
    let error = f
        .ask(renew_within(SHORT, "a", lease, 2 * LONG), LONG)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    f.finish();
    assert!(f.exists("a"));
}

/// The renewal finds the ttl long enough. It still needs acknowledgements of the earlier write, which came on another
/// connection.
#[test]
fn a_renewal_needs_earlier_writes_acknowledged() {
    let f = fixture();
    let replica = replica_of(&f.server);
    replica.stop();
    let lease = f.acquire("a");
    f.cut();
    f.acquire_within("b", LONG).1.unwrap_err();
    let short = Duration::from_secs(1);
    let renewed = f.ask(renew_within(SHORT, "a", lease, short), LONG);
    assert_eq!(renewed.unwrap_err().kind(), ErrorKind::Unavailable);
    replica.resume();
    let renewed = f.ask(renew_within(LONG / 4, "a", lease, short), LONG);
    assert_eq!(renewed.unwrap(), Reply::Done);
}

#[test]
fn replies_that_need_no_acknowledgement_do_not_wait() {
    let f = fixture();
    let replica = replica_of(&f.server);
    let lease = f.acquire("taken");
    replica.stop();
    let outcome = f.ask(acquire_within(LONG / 4, "taken"), LONG);
    assert!(
        matches!(outcome, Ok(Reply::Contended { .. })),
        "{outcome:?}"
    );
    let lost = renew_within(SHORT, "taken", LeaseId::random(), LONG);
    let outcome = f.ask(lost, LONG);
    assert!(matches!(outcome, Ok(Reply::Taken { .. })), "{outcome:?}");
    let unlocked = f.ask(Command::Release(f.release("taken", lease)), LONG);
    assert_eq!(unlocked.unwrap(), Reply::Done);
}

#[test]
fn a_leader_leaves_at_its_deadline_during_the_wait() {
    let f = fixture();
    let replica = replica_of(&f.server);
    f.warm_up("warm-up");
    replica.stop();
    let follower = Caller::new(1);
    let completion = Completion::new(&follower, 0);
    let request = PendingRequest::new(acquire_within(LONG / 4, "follower"), Some(completion));
    f.pipeline.state.lock().enqueue([request]);
    let outcome = f.ask(acquire_within(LONG / 4, "leader"), SHORT);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
    assert!(f.exists("leader") && f.exists("follower"));
    assert_eq!(f.unanswered(), 3, "two grants and WAIT");
    replica.resume();
    // A caller that waits for an acknowledgement can lead.
    let deadline = MonotonicTime::now().after(LONG);
    f.pipeline.wait_or_lead(&follower, deadline, None);
    let outcome = follower.take_outcomes().next().unwrap();
    assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
    f.finish();
    assert!(f.exists("follower") && !f.exists("leader"));
}

#[test]
fn a_connection_lost_during_the_wait_undoes_the_grant() {
    let f = fixture();
    let replica = replica_of(&f.server);
    replica.stop();
    thread::scope(|scope| {
        let caller = scope.spawn(|| f.ask(acquire_within(LONG / 4, "a"), LONG));
        assert!(eventually(LONG, || f.exists("a")));
        f.cut();
        let error = caller.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    });
    f.finish();
    assert!(!f.exists("a"));
}

#[test]
fn a_script_that_is_loaded_late_is_acknowledged() {
    let f = fixture();
    let replica = replica_of(&f.server);
    f.warm_up("warm-up");
    for (name, is_acknowledged) in [("a", true), ("b", false)] {
        if !is_acknowledged {
            replica.stop();
        }
        f.server.command(&["SCRIPT", "FLUSH"]).unwrap();
        let timeout = if is_acknowledged { LONG / 4 } else { SHORT };
        let outcome = f.ask(acquire_within(timeout, name), LONG);
        assert_eq!(outcome.is_ok(), is_acknowledged, "{outcome:?}");
    }
}

#[test]
fn replies_to_wait_are_read_strictly() {
    let good = [(":7\r\n", None), (":4294967296\r\n", None)];
    let refused = [
        ("-NOPERM no permissions\r\n", Some(ErrorKind::Denied)),
        ("-ERR unknown command\r\n", Some(ErrorKind::Unsupported)),
        (
            "-ERR WAIT cannot be used with replica instances.\r\n",
            Some(ErrorKind::Unavailable),
        ),
        ("-UNBLOCKED changed\r\n", Some(ErrorKind::Unavailable)),
    ];
    let misshapen = [
        ":-1\r\n",
        "+OK\r\n",
        "$1\r\n1\r\n",
        "*1\r\n:1\r\n",
        "*0\r\n",
        "$-1\r\n",
        "hello\r\n",
    ]
    .map(|said| (said, Some(ErrorKind::Protocol)));
    let keeps_connection = good.len() + refused.len();
    let all = good.into_iter().chain(refused).chain(misshapen);
    for (n, (said, error)) in all.enumerate() {
        let server = Server::start().unwrap();
        // No replica acknowledges, so `WAIT` replies 0. After the warm-up, no other reply ends with a 0.
        let is_warm = Arc::new(AtomicBool::new(false));
        let port = fake_server::proxy(server.port(), {
            let is_warm = Arc::clone(&is_warm);
            move |reply| match reply.strip_suffix(b":0\r\n") {
                Some(others) if is_warm.load(Ordering::SeqCst) => {
                    [others, said.as_bytes()].concat()
                }
                _ => reply.to_vec(),
            }
        });
        let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
        f.warm_up("warm-up");
        is_warm.store(true, Ordering::SeqCst);
        let before = f.connection();
        let outcome = f.ask(acquire_within(SHORT, "a"), LONG);
        let kind = outcome.as_ref().err().map(Error::kind);
        assert_eq!(kind, error, "{said:?}: {outcome:?}");
        if let (Err(error), true) = (&outcome, n < keeps_connection) {
            let named = error.to_string();
            assert!(named.contains("WAIT, which `replicas` needs"), "{named}");
        }
        f.acquire("b");
        let is_undone = || {
            f.pipeline.run_maintenance();
            !f.exists("a")
        };
        assert!(error.is_none() == f.exists("a") || eventually(LONG / 2, is_undone));
        assert_eq!(f.connection() == before, n < keeps_connection, "{said:?}");
    }
}
