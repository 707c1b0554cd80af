//! Locks on a quorum of independent servers.

pub mod nodes;

mod addresses;
mod failures;
mod health;
mod unsupported;
mod waiting;
