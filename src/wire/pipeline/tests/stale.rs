//! Tests of stale and suspect connections, which are replaced before the next write.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::wire::fake_server;

impl Fixture {
    /// Makes the connection stale, as if another connection had broken.
    fn make_stale(&self) {
        self.pipeline.shared.endpoint.epoch().count_break();
    }

    /// Leads the pipeline, and writes a command for `caller`.
    fn lead_and_write(&self, command: Command, caller: &Arc<Caller>) -> Leadership<'_> {
        let request = PendingRequest::new(command, Some(Completion::new(caller, 0)));
        let mut leadership = self.pipeline.try_lead(&mut self.pipeline.state.lock());
        leadership.as_mut().unwrap().write(vec![request]);
        leadership.unwrap()
    }

    fn ask_server(&self, args: &[&str]) -> String {
        let reply = self.server.command(args).unwrap();
        reply.as_text().unwrap_or_default().to_owned()
    }
}

impl Leadership<'_> {
    fn write(&mut self, batch: Vec<PendingRequest>) {
        let (context, due) = (&self.pipeline.shared.context, self.reply_deadline());
        let connection = self.connection.as_mut().unwrap();
        connection.write(context, batch, due).unwrap();
    }
}

fn after(time: Duration) -> MonotonicTime {
    MonotonicTime::now().after(time)
}

#[test]
fn replies_on_a_stale_connection_are_read() {
    let f = fixture();
    let lease = f.acquire("k");
    // The reply to the release is NOSCRIPT. After this reply is read, the release is sent again.
    f.ask_server(&["SCRIPT", "FLUSH"]);
    let before = f.connection();
    f.pipeline.send_release(f.release("k", lease));
    assert_eq!(f.unanswered(), 1);
    f.make_stale();
    f.acquire("k");
    assert_ne!(f.connection(), before);
}

#[test]
fn a_release_is_not_written_on_a_stale_connection() {
    let f = fixture();
    let lease = f.acquire("k");
    let (before, hook_calls) = (f.connection(), f.hook_calls.load(Ordering::SeqCst));
    f.make_stale();
    f.pipeline.send_release(f.release("k", lease));
    assert_eq!(f.unanswered(), 0);
    assert!(f.exists("k"));
    assert!(
        f.hook_calls.load(Ordering::SeqCst) > hook_calls,
        "left to the background"
    );
    f.pipeline.run_maintenance();
    assert!(!f.exists("k"));
    assert_ne!(f.connection(), before);
}

#[test]
fn waiting_for_replies_on_a_stale_connection_takes_a_request_its_time() {
    let f = fixture();
    let release = f.release("a", f.acquire("a"));
    f.make_stale();
    // Another connection, which is not stale, is idle.
    drop(
        f.pipeline
            .shared
            .connector
            .exclusive_connection(LONG)
            .unwrap(),
    );
    f.server.stop();
    let mut leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    leadership.write(vec![PendingRequest::new(Command::Release(release), None)]);
    drop(leadership);
    let (_, outcome) = f.acquire_within("b", Duration::from_millis(50));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(f.unanswered(), 1, "the release only");
    f.server.resume();
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("a") && !f.exists("b"));
}

#[test]
fn a_young_connection_to_an_old_primary_is_replaced() {
    let f = fixture();
    f.acquire("a");
    let before = f.connection();
    f.pipeline.shared.endpoint.epoch().count_switch();
    f.acquire("b");
    assert_ne!(f.connection(), before);
}

/// The old primary grants a lock, and its reply is read after the switch.
#[test]
fn a_grant_of_an_old_primary_does_not_count() {
    let f = fixture();
    f.acquire("a");
    let caller = Caller::new(1);
    let mut leadership = f.lead_and_write(acquire_of("k"), &caller);
    assert!(eventually(LONG, || f.exists("k")));
    f.pipeline.shared.endpoint.epoch().count_switch();
    let error = leadership.read(None, after(LONG)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    leadership.lose_connection(&error);
    let outcome = caller.take_outcomes().next().unwrap();
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
    // The release was written behind the acquire.
    assert!(eventually(LONG, || !f.exists("k")));
    // The client still repeats the release, in case that a copy of the acquire arrives late.
    assert!(f.pipeline.state.lock().has_work());
}

/// The reply to the acquire is that of a replica, so the leader calls the hook for suspicions. The hook counts a switch
/// while the leader still reads the reply.
#[test]
fn a_reply_that_comes_after_a_switch_does_not_count() {
    let f = fixture();
    f.acquire("a");
    f.ask_server(&["REPLICAOF", "127.0.0.1", "1"]);
    let caller = Caller::new(1);
    let mut leadership = f.lead_and_write(acquire_of("k"), &caller);
    let endpoint = Arc::clone(&f.pipeline.shared.endpoint);
    let hook_calls = AtomicUsize::new(0);
    f.pipeline.shared.endpoint.epoch().on_suspicion(move || {
        // A switch also raises a suspicion.
        if hook_calls.fetch_add(1, Ordering::SeqCst) == 0 {
            endpoint.epoch().count_switch();
        }
    });
    let error = leadership.read(None, after(LONG)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let reason = "the sentinels name another primary";
    assert!(error.to_string().contains(reason), "{error}");
    leadership.lose_connection(&error);
    let outcome = caller.take_outcomes().next().unwrap();
    let error = outcome.unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn an_unexpected_reply_makes_all_connections_suspect() {
    let armed = Arc::new(AtomicBool::new(false));
    let server = Server::start().unwrap();
    let replaces_one = Arc::clone(&armed);
    let port = fake_server::proxy(server.port(), move |reply| {
        match replaces_one.swap(false, Ordering::SeqCst) {
            true => b"+unexpected\r\n".to_vec(),
            false => reply.to_vec(),
        }
    });
    let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
    let lease = f.acquire("k");
    let epoch = f.pipeline.shared.endpoint.epoch();
    let made_in = epoch.now();
    armed.store(true, Ordering::SeqCst);
    let error = f
        .ask(Command::Release(f.release("k", lease)), LONG)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(epoch.replace_at(&made_in).is_some());
}

/// The server behind a proxy is away. The proxy reports this to each request, and its connection stays open.
#[test]
fn a_release_that_a_proxy_refuses_is_repeated_later() {
    let refuses = Arc::new(AtomicBool::new(false));
    let server = Server::start().unwrap();
    let is_refused = Arc::clone(&refuses);
    let port = fake_server::proxy(server.port(), move |reply| {
        match is_refused.load(Ordering::SeqCst) {
            true => b"-upstream failure\r\n".to_vec(),
            false => reply.to_vec(),
        }
    });
    let f = at(server, &format!("redis://127.0.0.1:{port}"), LONG);
    let lease = f.acquire("k");
    refuses.store(true, Ordering::SeqCst);
    let before = f.calls();
    let error = f
        .ask(Command::Release(f.release("k", lease)), LONG)
        .unwrap_err();
    let proxy = format!("127.0.0.1:{port}");
    assert!(error.to_string().contains(&proxy), "{error}");
    // The pause has not ended, so the background has no work.
    f.pipeline.run_maintenance();
    let sent: u64 = f
        .calls()
        .iter()
        .zip(before)
        .map(|(now, before)| now - before)
        .sum();
    assert!(sent <= 2, "{sent} requests");
    let soon = MonotonicTime::now().after(Duration::from_millis(200));
    f.pipeline.flush(soon).unwrap_err();
    refuses.store(false, Ordering::SeqCst);
    assert!(eventually(LONG, || {
        f.pipeline.run_maintenance();
        f.is_idle()
    }));
    assert!(!f.exists("k"));
}
