//! Money is moved by a read and then a write, so two movers at once would lose some. Meanwhile locks are taken from
//! their holders. The sum stays right only because Redis refuses the writes of a former holder.

use std::time::Duration;

use leasehold::Client;
use leasehold::crossbeam_channel::{RecvTimeoutError, bounded};
use leasehold::redis::Commands;
use leasehold_testbed::Server;

use super::client;
use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{LONG_TTL, Task, ask, in_redis, millis, server};

const WORK: Duration = Duration::from_secs(120);

/// Moves one from `a` to `b`, `times` times; returns how often the lock was lost.
fn move_money(client: &Client, times: usize) -> usize {
    let (mut moved, mut losses) = (0, 0);
    while moved < times {
        let guard = client.mutex("accounts").lock().unwrap();
        let result = guard.transaction(|conn, pipe| {
            let (a, b): (i64, i64) = (conn.get("a")?, conn.get("b")?);
            pipe.set("a", a - 1).set("b", b + 1);
            Ok(())
        });
        match result {
            Ok(_) => moved += 1,
            Err(error) if error.is_lease_lost() => losses += 1,
            Err(error) => panic!("{error}"),
        }
    }
    losses
}

fn balances(server: &Server) -> (i64, i64) {
    let balance = |name| ask(server, &["GET", name]).as_text().unwrap().parse();
    (balance("a").unwrap(), balance("b").unwrap())
}

/// Deletes the key of the lock again and again while `work` runs.
fn delete_lock_during(server: &Server, work: impl FnOnce()) {
    let (done, is_done) = bounded::<()>(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while is_done.recv_timeout(millis(1)) == Err(RecvTimeoutError::Timeout) {
                ask(server, &["DEL", &in_redis("accounts")]);
            }
        });
        // Dropped even if the work fails.
        let _done = done;
        work();
    });
}

#[test]
fn deleted_locks_lose_no_money() {
    let server = server();
    ask(&server, &["MSET", "a", "1000", "b", "0"]);
    let clients = [client(&server), client(&server)];
    delete_lock_during(&server, || {
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let client = clients[n % 2].clone();
                Task::start(move || move_money(&client, 50))
            })
            .collect();
        let losses = tasks
            .into_iter()
            .map(|task| task.within(WORK, "moving money"));
        assert!(losses.sum::<usize>() > 0, "no lock was lost in time");
    });
    assert_eq!(balances(&server), (1000 - 8 * 50, 8 * 50));
}

#[test]
fn processes_lose_no_money() {
    let server = server();
    ask(&server, &["MSET", "a", "1000", "b", "0"]);
    delete_lock_during(&server, || {
        let children =
            [(); 3].map(|()| Child::start(move_money_in_a_process_of_its_own, &server.url()));
        children.into_iter().for_each(|child| child.finish(WORK));
    });
    assert_eq!(balances(&server), (1000 - 3 * 4 * 25, 3 * 4 * 25));
}

pub fn move_money_in_a_process_of_its_own(parent: &Parent) {
    let client = steady(&parent.url).ttl(LONG_TTL).build().unwrap();
    let tasks = [(); 4].map(|()| {
        let client = client.clone();
        Task::start(move || move_money(&client, 25))
    });
    for task in tasks {
        task.within(WORK, "moving money");
    }
}

#[test]
fn reruns_move_money_once() {
    let server = server();
    ask(&server, &["MSET", "a", "1000", "b", "0"]);
    let client = client(&server);
    let guard = client.mutex("accounts").lock().unwrap();
    let mut runs = 0;
    let rest = guard
        .transaction(|conn, pipe| {
            runs += 1;
            redis::cmd("WATCH").arg(&["a", "b"]).exec(conn)?;
            let a: i64 = conn.get("a")?;
            pipe.decr("a", 10).incr("b", 10);
            if runs <= 3 {
                ask(&server, &["INCR", "a"]);
            }
            Ok(a - 10)
        })
        .unwrap();
    assert_eq!((runs, rest.value), (4, 993));
    assert_eq!(balances(&server), (993, 10));
}
