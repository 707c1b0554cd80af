//! Tickets, and locks of others, while a minority of the nodes is stopped.

use leasehold::Client;
use leasehold_testbed::{Server, eventually};

use super::nodes::Nodes;
use crate::support::{LONG_TTL, SOON, Task, held_keys, lock, secs};

#[test]
fn a_minority_is_not_needed_for_a_transfer() {
    let nodes = Nodes::start(5);
    let two = nodes.client();
    // The transfer takes less, on a busy machine, too.
    let ttl = secs(15);
    let one = nodes.builder().ttl(ttl).build().unwrap();
    nodes.0[3..].iter().for_each(Server::stop);
    let guard = lock(&one, "k");
    let token = guard.fencing_token();
    let ticket = guard.into_ticket().unwrap();
    let adopted = two.adopt(&ticket).unwrap();
    assert!(adopted.fencing_token() > token);
    adopted.extend(LONG_TTL).unwrap();
    let found = one.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(found.holder(), two.holder_id());
    assert!(one.mutex("k").force_unlock().unwrap().is_some());
    assert!(one.mutex("k").inspect().unwrap().is_none());
    drop(adopted);
    nodes.0[3..].iter().for_each(Server::resume);
    // A resumed node may run the requests of `two` first. Then it grants the ticket's lease, which nobody releases.
    let are_free = || nodes.0.iter().all(|node| held_keys(node).is_empty());
    assert!(eventually(ttl + SOON, are_free), "a key outlives its ttl");
}

/// Adopters that split the votes give them back, and ask again.
#[test]
fn one_of_many_adopters_wins() {
    let nodes = Nodes::start(5);
    let clients: Vec<Client> = (0..4).map(|_| nodes.client()).collect();
    for _ in 0..10 {
        let ticket = lock(&clients[0], "k").into_ticket().unwrap();
        let adopt = |client: &Client| {
            let (client, ticket) = (client.clone(), ticket.clone());
            Task::start(move || client.adopt(&ticket))
        };
        let tasks: Vec<_> = clients.iter().map(adopt).collect();
        let outcomes = tasks
            .into_iter()
            .map(|task| task.within(3 * SOON, "adopting"));
        let won: Vec<_> = outcomes.filter_map(Result::ok).collect();
        assert_eq!(won.len(), 1);
        won[0].check().unwrap();
        drop(won);
        nodes.assert_all_become_free();
    }
}
