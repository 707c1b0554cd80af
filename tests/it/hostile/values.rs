//! Long values that another user writes: a value costs its writer more than it costs the clients.

use leasehold::{LossReason, redis};
use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, connections_made, in_redis, lost_within, server, tracked};

/// The length of a value, in bytes. It exceeds the output limit of Redis for a subscribed client (32 MB by default).
const LONG: usize = 40_000_000;

#[test]
fn a_long_foreign_value_costs_no_connection() {
    let server = server();
    let client = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    let guards = ["k", "other"].map(|key| client.mutex(key).lock().unwrap());
    assert!(eventually(SOON, || tracked(&server) == 2));
    // Opens the connection on which the loss will be confirmed, so that it is not counted below.
    guards[1].extend(LONG_TTL).unwrap();
    let lost = guards[0].lost_signal();
    let other = redis::Client::open(server.url()).unwrap();
    let mut other = other.get_connection_with_timeout(SOON).unwrap();
    let made = connections_made(&server, || {
        let mut write = redis::cmd("SET");
        let write = write.arg(in_redis("k")).arg(vec![b'z'; LONG]);
        write.exec(&mut other).unwrap();
        assert_eq!(lost_within(SOON, &lost), LossReason::TakenOver { by: None });
    });
    assert_eq!(made, 0);
    guards[1].check().unwrap();
}
