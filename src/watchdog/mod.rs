//! How a grant lives on: one timer thread over a wheel, a small pool that renews, for all leases of
//! a client. No lease costs a thread.

mod agenda;
mod service;
mod wheel;

pub(crate) use agenda::Agenda;
pub(crate) use service::Watchdog;
