//! Models of a grant that passes to another client.

use super::*;
use crate::store::Grant;

/// A lease that `client` was granted while it was queued, and whose notification it has not heard yet.
fn queued_grant(client: &Client, server: &Server) -> Arc<Lease> {
    let (key, first) = (wanted().key, LeaseId::random());
    server.give(&key, first, Moment::now().after(OPTIONS.ttl));
    thread::scope(|scope| {
        scope.spawn(|| {
            server.take_back(&key, first);
            // As after a lost connection: the first waiter asks again.
            client.queues.wake_first();
        });
        let lease = client.waits.acquire(&wanted(), Until::Forever);
        lease.unwrap().unwrap()
    })
}

#[test]
fn model_late_grant_beside_hand_over_is_not_released() {
    check(RUNS, || {
        let server = Server::new();
        let client = Client::new(&server, Standing::Told);
        let lease = client.waits.acquire(&wanted(), Until::Forever);
        let lease = lease.unwrap().unwrap();
        let (terms, grant) = (lease.terms(), Grant::USUAL);
        thread::scope(|scope| {
            scope.spawn(|| client.queues.let_go(&lease));
            assert_eq!(
                client.queues.granted(&terms.key, terms.id, grant),
                GrantOf::OtherLease
            );
        });
        assert_eq!(
            client.queues.granted(&terms.key, terms.id, grant),
            GrantOf::OtherLease
        );
    });
}

#[test]
fn model_transferred_lock_is_adopted_whatever_comes_late() {
    check(4 * RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, Standing::Told));
        let [from, to] = &clients;
        let lease = queued_grant(from, &server);
        let transfers = || {
            let ticket = from.waits.hand_over(&lease).unwrap();
            let adopted = to.waits.adopt(&ticket).unwrap();
            assert_eq!(adopted.terms().token, lease.terms().token);
            to.let_go(&adopted, true);
        };
        run(&server, &clients, &[&transfers]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_waiters_of_both_clients_follow_a_transfer() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, Standing::Told));
        let [from, to] = &clients;
        let lease = from.waits.acquire(&wanted(), Until::Forever);
        let lease = lease.unwrap().unwrap();
        let work = Work::new();
        let waits = || assert!(work.run(from, Until::Forever));
        let also_waits = || assert!(work.run(to, Until::Forever));
        let transfers = || {
            let ticket = from.waits.hand_over(&lease).unwrap();
            let adopted = to.waits.adopt(&ticket).unwrap();
            work.hold(to, &adopted);
        };
        run(
            &server,
            &clients,
            &[&waits, &also_waits, &also_waits, &transfers],
        );
        assert_nothing_is_left(&server, &clients);
    });
}
