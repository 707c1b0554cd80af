//! Puts locks of any kind under load, and measures their cost: one loop for all of them, so that all are
//! measured in the same way. Contains no lock but the raw commands, and judges nothing.

mod drive;
mod machine;
mod messages;
mod raw;
mod serve;
mod server_stats;
mod waits;

pub use drive::{Locker, drive};
pub use machine::{
    cores_by_preference, described, description, field, info, nanoseconds, own_cpu, pin, server_cpu,
};
pub use messages::{Assignment, Keys, Pace, Round, Tally, Way};
pub use raw::Raw;
pub use serve::{RunRound, serve, sum, threads};
pub use server_stats::ServerStats;
pub use waits::Waits;
