//! A wait for one of two channels.

use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use crate::util::sync::Either;

/// Waits until one of two channels has a message, which it takes, or has no sender any more. Nothing after
/// `timeout`. If both are ready, it takes from any of them.
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
