//! Notifications: a waiter is notified at once when its turn has come, whatever the cause. What notifications cost, and
//! what clients do if a server sends none.

mod cost;
mod isolation;
mod refused;
mod wake_up;
