//! Waits for one of two channels.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use crate::util::sync::Either;

/// Waits until one of two channels is disconnected or has a message, and receives the message; `None` after `timeout`.
/// If both channels are ready, receives from either of them.
pub fn either(first: &Receiver<()>, second: &Receiver<()>, timeout: Duration) -> Option<Either> {
    select! {
        recv(first) -> _ => Some(Either::First),
        recv(second) -> _ => Some(Either::Second),
        default(timeout) => None,
    }
}

/// Sends a message, unless the channel is full.
pub fn try_send(to: &Sender<()>) {
    let _ = to.try_send(());
}
