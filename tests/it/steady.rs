//! Clients of tests without faults: a busy machine does not reach their time-outs.

use leasehold::{Builder, Client};
use leasehold_testbed::Server;

use crate::support::{LONG_TTL, SOON, builder, secs};

/// As [`builder`], with time-outs that are reached only if something hangs.
pub fn steady(url: &str) -> Builder {
    builder(url)
        .connect_timeout(secs(8))
        .command_timeout(secs(8))
}

/// A client whose threads hand locks off to each other without limits that a test could reach.
pub fn handing_off(server: &Server) -> Client {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    let builder = builder.max_hand_offs(1023).hand_off_time(10 * SOON);
    builder.build().unwrap()
}
