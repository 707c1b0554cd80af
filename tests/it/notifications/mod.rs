//! Notifications: a waiter is notified at once when its turn has come, whatever caused it; what that costs;
//! and what clients do where a server sends none.

mod cost;
mod isolation;
mod refused;
mod wake_up;
