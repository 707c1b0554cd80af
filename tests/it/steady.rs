//! Clients of tests that inject no fault: no stall of a busy machine uses up their time-outs.

use leasehold::Builder;

use crate::support::{builder, secs};

/// As [`builder`], with time-outs that are never met unless something hangs.
pub fn steady(url: &str) -> Builder {
    builder(url)
        .connect_timeout(secs(8))
        .command_timeout(secs(8))
}
