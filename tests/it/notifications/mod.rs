//! A waiter is notified at once when its turn has come, whatever the cause. These tests also count the requests for
//! notifications, and run clients on servers that send none.

mod cost;
mod isolation;
mod refused;
mod wake_up;
