//! Locks of any kind under load, and what they cost: one loop for all of them, so that none is measured
//! in another way than the rest. Knows no lock but the raw commands, and judges nothing.

mod drive;
mod machine;
mod messages;
mod raw;
mod serve;
mod served;
mod waits;

pub use drive::{Locker, drive};
pub use machine::{
    cores_by_preference, described, description, field, info, nanoseconds, own_cpu, pin, server_cpu,
};
pub use messages::{Assignment, Keys, Pace, Round, Tally, Way};
pub use raw::Raw;
pub use serve::{Crew, serve, sum, threads};
pub use served::Served;
pub use waits::Waits;
