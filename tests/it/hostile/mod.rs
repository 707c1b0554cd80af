//! Attacks by a server that replies in the place of Redis, and by other users of the same Redis.

mod delays;
mod errors;
mod messages;
pub mod server;
mod values;
