//! Waits for one of two channels.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use crate::util::sync::Either;

/// Waits until one of two channels is disconnected or has a message, which it receives; `None` after `timeout`. If both
/// are ready, it receives from either of them.
pub(crate) fn either(
    first: &Receiver<()>,
    second: &Receiver<()>,
    timeout: Duration,
) -> Option<Either> {
    select! {
        recv(first) -> _ => Some(Either::First),
        recv(second) -> _ => Some(Either::Second),
        default(timeout) => None,
    }
}

/// Sends, unless the channel is full.
pub(crate) fn try_send(to: &Sender<()>) {
    let _ = to.try_send(());
}
