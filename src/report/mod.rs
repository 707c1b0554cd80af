//! Types and functions that inform users: errors, events, losses, the state of servers, spans and metrics.

pub mod environment;
pub mod error;
pub mod event;
pub mod loss;
pub mod node_state;
pub mod observe;
pub mod released;
