//! A wait for one of two channels.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use crate::sync::Either;

/// Waits for a message of one of them, or the end of its senders; nothing after `timeout`. Where both are
/// ready either may be taken.
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

/// Sends if there is room.
pub(crate) fn try_send(to: &Sender<()>) {
    let _ = to.try_send(());
}
