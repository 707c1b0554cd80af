//! Locks on a quorum of independent servers.

pub mod nodes;

mod addresses;
mod failures;
mod fenced;
mod health;
mod transfer;
mod unsupported;
mod waiting;
