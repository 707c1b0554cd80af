//! Fencing tokens: each grant has a greater token than all grants before, and a fenced value refuses late
//! writes.

use leasehold::{ErrorKind, MutexGuard};

use crate::conformance::backend::Backend;
use crate::support::Task;

pub fn tokens_rise_with_every_grant(backend: &dyn Backend) {
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let mut last = 0;
    let mut rises = |guard: &MutexGuard, after: &str| {
        let token = guard.fencing_token();
        assert!(token > last, "{token} after {last}, {after}");
        last = token;
    };
    for client in clients.iter().cycle().take(9) {
        let guard = client.mutex("k").lock().unwrap();
        rises(&guard, "a release");
        guard.unlock().unwrap();
    }
    let ttl = backend.ttl();
    let expired = clients[0].mutex("k").fixed_ttl(ttl).lock().unwrap();
    rises(&expired, "a release");
    backend.pass(ttl + ttl / 10);
    let forced = clients[1].mutex("k").lock().unwrap();
    rises(&forced, "an expiry");
    clients[2].mutex("k").force_unlock().unwrap();
    let held = clients[2].mutex("k").lock().unwrap();
    rises(&held, "a release by force");
    let mutex = clients[2].mutex("k");
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    drop(held);
    let handed = waiter.within(crate::support::SOON, "the grant");
    rises(&handed, "a hand-off");
    backend.forget();
    let guard = clients[0].mutex("k").lock().unwrap();
    rises(&guard, "a loss of all data");
}

pub fn a_deleted_value_refuses_late_holders(backend: &dyn Backend) {
    let client = backend.client();
    let token = || {
        client
            .mutex("k")
            .with(|guard| guard.fencing_token())
            .unwrap()
    };
    let (late, next) = (token(), token());
    let value = client.fenced_value("k");
    value.write(late, "early").unwrap();
    value.delete(next).unwrap();
    assert_eq!(value.read().unwrap(), None);
    for refused in [value.write(late, "late"), value.delete(late)] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::StaleToken);
    }
    assert_eq!(value.read().unwrap(), None);
    value.write(next, "").unwrap();
    assert_eq!(value.read().unwrap().as_deref(), Some(&b""[..]));
}

pub fn a_value_with_a_ttl_expires(backend: &dyn Backend) {
    let client = backend.client();
    let ttl = backend.ttl();
    let value = client.fenced_value("k").ttl(ttl);
    value.write(7, "a").unwrap();
    backend.pass(ttl * 11 / 20);
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"a"[..]));
    // Each write with a ttl sets the ttl anew. A write without one keeps the old ttl.
    value.write(8, "b").unwrap();
    client.fenced_value("k").write(9, "c").unwrap();
    backend.pass(ttl * 11 / 20);
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"c"[..]));
    backend.pass(ttl * 7 / 10);
    assert_eq!(value.read().unwrap(), None);
    client.fenced_value("k").write(1, "any token").unwrap();
}

pub fn a_late_holders_write_is_refused(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let ttl = backend.ttl();
    let late = one.mutex("k").fixed_ttl(ttl).lock().unwrap();
    let value = one.fenced_value("k");
    assert_eq!(value.read().unwrap(), None);
    value.write(late.fencing_token(), "early").unwrap();
    backend.pass(ttl + ttl / 10);
    let next = two.mutex("k").lock().unwrap();
    let of_next = two.fenced_value("k");
    of_next.write(next.fencing_token(), "next").unwrap();
    let refused = value.write(late.fencing_token(), "late").unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StaleToken);
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"next"[..]));
    of_next.write(next.fencing_token(), "again").unwrap();
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"again"[..]));
}
