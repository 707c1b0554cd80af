//! Models of a wait that is cancelled.

use crossbeam_channel::unbounded;

use super::*;
use crate::util::sync::try_send;

/// Waits until the lock is granted or the wait is cancelled. `may` says whether the wait may be cancelled.
fn wait(work: &Work, client: &Client, cancel: &Receiver<()>, may: bool) {
    let request = LockRequest {
        cancel: Some(cancel.clone()),
        ..request()
    };
    match client.acquirer.acquire(&request, Until::Forever) {
        Ok(lease) => work.hold(client, &lease.unwrap()),
        Err(error) => assert!(may && error.kind() == ErrorKind::Cancelled, "{error}"),
    }
}

#[test]
fn model_cancelled_wait_leaves_nothing_behind() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let work = Work::new();
        let (stop, stopped) = unbounded();
        let may = chance(2);
        let cancelled = || wait(&work, &clients[0], &stopped, may);
        let stays = || assert!(work.run(&clients[0], Until::Forever));
        let other = || assert!(work.run(&clients[1], Until::Forever));
        let cancels = || may.then(|| try_send(&stop)).unwrap_or(());
        run(&server, &clients, &[&other, &cancelled, &stays, &cancels]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_cancellation_ends_a_wait_behind_a_holder() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        // While the other thread waits, this thread may hold the lock.
        let own = chance(2).then(|| {
            let lease = client.acquirer.acquire(&request(), Until::Forever);
            lease.unwrap().unwrap()
        });
        let other = LeaseId::random();
        if own.is_none() {
            server.give(
                &request().key,
                other,
                MonotonicTime::now().after(OPTIONS.ttl),
            );
        }
        let (stop, stopped) = unbounded();
        let waits = || {
            let request = LockRequest {
                cancel: Some(stopped.clone()),
                ..request()
            };
            let cancelled = client.acquirer.acquire(&request, Until::Forever);
            let error = cancelled.map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
        };
        // Wake-ups for other reasons do not end the wait.
        let wakes = || client.queues.wake_all();
        let cancels = || try_send(&stop);
        run(&server, &clients, &[&waits, &wakes, &cancels]);
        match own {
            Some(lease) => client.release(&lease, true),
            None => server.take_back(&request().key, other),
        }
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_hand_off_to_a_cancelled_wait_goes_on() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        let work = Work::new();
        let lease = client.acquirer.acquire(&work.request, Until::Forever);
        let lease = lease.unwrap().unwrap();
        let (stop, stopped) = unbounded();
        let may = chance(2);
        let cancelled = || wait(&work, client, &stopped, may);
        let stays = || assert!(work.run(client, Until::Forever));
        let releases = || {
            client.acquirer.release(&lease, ONLY_GUARD);
        };
        let cancels = || may.then(|| try_send(&stop)).unwrap_or(());
        run(
            &server,
            &clients,
            &[&cancelled, &stays, &releases, &cancels],
        );
        assert_nothing_is_left(&server, &clients);
    });
}
