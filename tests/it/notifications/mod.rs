//! Notifications: who waits is told at once when its turn has come, whoever brought that about; what that
//! costs; and what becomes of it where a server does not tell.

mod apart;
mod cost;
mod refused;
mod woken;
