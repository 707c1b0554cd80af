//! Models of a ticket that passes a grant to another client.

use super::*;
use crate::command::GrantMessage;

/// Returns a lease of `client` that was granted while it was queued. The client has not received the message yet.
fn queued_grant(client: &Client, server: &Server) -> Arc<Lease> {
    let (key, first) = (request().key, LeaseId::random());
    server.give(&key, first, MonotonicTime::now().after(OPTIONS.ttl));
    thread::scope(|scope| {
        scope.spawn(|| {
            server.take_back(&key, first);
            // Makes the first waiter ask again, as a lost connection does.
            client.queues.wake_first(&|_| true);
        });
        let lease = client.acquirer.acquire(&request(), Until::Forever);
        lease.unwrap().unwrap()
    })
}

#[test]
fn model_late_grant_beside_release_is_not_released() {
    check(RUNS, || {
        let server = Server::new();
        let client = Client::new(&server, QueueMode::Notified);
        let lease = client.acquirer.acquire(&request(), Until::Forever);
        let lease = lease.unwrap().unwrap();
        let (grant, message) = (lease.grant(), GrantMessage::USUAL);
        thread::scope(|scope| {
            scope.spawn(|| client.queues.remove_holder(&lease));
            assert_eq!(
                client.queues.granted(&grant.key, grant.id, message),
                GrantOf::OtherLease
            );
        });
        assert_eq!(
            client.queues.granted(&grant.key, grant.id, message),
            GrantOf::OtherLease
        );
    });
}

#[test]
fn model_transferred_lock_is_adopted() {
    check(4 * RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let [from, to] = &clients;
        let lease = queued_grant(from, &server);
        let transfers = || {
            let ticket = from.acquirer.transfer_out(&lease).unwrap();
            let adopted = to.acquirer.adopt(&ticket).unwrap();
            assert!(adopted.grant().token > lease.grant().token);
            to.release(&adopted, true);
        };
        run(&server, &clients, &[&transfers]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_waiters_of_both_clients_follow_a_transfer() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let [from, to] = &clients;
        let lease = from.acquirer.acquire(&request(), Until::Forever);
        let lease = lease.unwrap().unwrap();
        let work = Work::new();
        let waits = || assert!(work.run(from, Until::Forever));
        let also_waits = || assert!(work.run(to, Until::Forever));
        let transfers = || {
            let ticket = from.acquirer.transfer_out(&lease).unwrap();
            let adopted = to.acquirer.adopt(&ticket).unwrap();
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
