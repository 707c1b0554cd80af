//! The methods of a guard, its signals and its callbacks; extending and releasing.

mod callbacks;
mod extend;
mod queries;
mod release;
pub mod signals;

use leasehold_testbed::Server;

use crate::support::{ask, in_redis};

const OTHER_HOLDER: &str = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 other/1/0";

/// Puts another holder's value under the key, with this ttl in ms.
fn overwrite(server: &Server, key: &str, ttl: &str) {
    ask(server, &["SET", &in_redis(key), OTHER_HOLDER, "PX", ttl]);
}
