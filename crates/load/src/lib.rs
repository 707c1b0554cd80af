//! Puts locks of any kind under load and measures their cost. The same loop drives each kind. This crate itself has
//! only one lock, that of the raw commands.

mod busy_loops;
mod drive;
mod fair_queue;
mod machine;
mod messages;
mod raw;
mod raw_share;
mod serve;
mod server_stats;
mod turns;
mod waits;

pub use busy_loops::BusyLoops;
pub use drive::{Locker, drive, hold};
pub use fair_queue::FairQueue;
pub use machine::{
    cores_by_preference, described, description, field, info, nanoseconds, own_cpu, pin, server_cpu,
};
pub use messages::{Assignment, Keys, Pace, Round, Tally, Way};
pub use raw::{PipedRaw, Raw};
pub use raw_share::{RawShare, Share};
pub use serve::{RunRound, serve, sum, threads};
pub use server_stats::ServerStats;
pub use turns::{Turns, serve_turns};
pub use waits::Waits;
