//! A transaction whose connection leads to the old primary writes nothing there, and the next transaction
//! gets another connection.

use leasehold::ErrorKind;
use leasehold_testbed::eventually;

use super::Servers;
use crate::support::{SOON, ask, assert_all_become_free, lock};

#[test]
fn each_transaction_is_done_once_or_refused() {
    const DONE: i64 = 20;
    let servers = Servers::start();
    let client = servers.client();
    let guard = lock(&client, "k");
    let add = || {
        guard.transaction(|_, pipe| {
            pipe.incr("money", 1);
            Ok(())
        })
    };
    add().unwrap();
    servers.switch_over();
    let mut done = 1;
    let all_done = eventually(SOON, || {
        match add() {
            Ok(_) => done += 1,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
        done == DONE
    });
    assert!(all_done, "{done} of {DONE}");
    let money = ask(&servers.new, &["GET", "money"]);
    assert_eq!(money.as_text(), Some(&*DONE.to_string()));
    drop(guard);
    assert_all_become_free(&servers.new);
}

/// The transaction's connection sees the lock deleted on the old primary; the new primary still has it.
#[test]
fn an_old_primary_without_the_lock_is_no_loss() {
    let servers = Servers::start();
    let client = servers.client();
    let guard = lock(&client, "k");
    let mut runs = 0;
    let result = guard.transaction(|_, pipe| {
        runs += 1;
        if runs == 1 {
            servers.switch_over();
            servers.drop_from_the_old("k");
        }
        // The closure only reads: a write would be refused before the lock is checked again.
        pipe.get("data");
        Ok(())
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    guard.check().unwrap();
    drop(guard);
    assert_all_become_free(&servers.new);
}
