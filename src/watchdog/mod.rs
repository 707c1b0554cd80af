//! How a grant lives on: one timer thread over a wheel, two workers that renew and one that sees to
//! releases, for all leases of a client; and one that asks callers' checks, once there is a lease with
//! one. No lease costs a thread.

mod renewals;
mod scheduler;
mod service;
mod tracked;
mod wheel;

pub(crate) use scheduler::Scheduler;
pub(crate) use service::Watchdog;
#[cfg(leasehold_internals)]
pub(crate) use wheel::Wheel;
