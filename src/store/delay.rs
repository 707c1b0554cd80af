//! What is told of a guard's release that could not be done at once: that it is late, and how it ended,
//! each once, whatever becomes of it. Sees to neither.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::key::Key;

/// News of a release that could not be done at once.
#[derive(Debug)]
pub(crate) enum Delay {
    /// It is followed up in the background.
    Began(Error),
    /// Redis has answered after all; or it was given up.
    Ended { confirmed: bool },
    /// It went to a lane's queue. Until it leaves that queue, the lane reports its end.
    Queued,
    /// It left that queue to be written.
    Taken,
}

/// Told the news, with the key and the fencing token. Quick; never blocks; takes no lock that is held
/// while a store is asked for something: it may be called under a lane's.
pub(crate) type DelayHook = Arc<dyn Fn(&Key, u64, Delay) + Send + Sync>;

/// Tells the hook what becomes of a release while it is written and read. Dropping an unconfirmed one tells the
/// hook that the release was given up, unless it went to a lane's queue (`lay_down`).
pub(crate) struct Follower {
    hook: DelayHook,
    key: Key,
    token: u64,
    began: bool,
    confirmed: bool,
    laid_down: bool,
}

impl Follower {
    pub(crate) fn new(hook: &DelayHook, key: &Key, token: u64) -> Self {
        Self {
            hook: Arc::clone(hook),
            key: key.clone(),
            token,
            began: false,
            confirmed: false,
            laid_down: false,
        }
    }

    /// For a release out of a lane's queue. `began`: the hook knows that it is late.
    pub(crate) fn taken_up(hook: &DelayHook, key: &Key, token: u64, began: bool) -> Self {
        if began {
            hook(key, token, Delay::Taken);
        }
        let mut follower = Self::new(hook, key, token);
        follower.began = began;
        follower
    }

    /// Ends this because its release goes to a lane's queue. True if the hook knows that the release is late.
    pub(crate) fn lay_down(mut self) -> bool {
        if self.began {
            (self.hook)(&self.key, self.token, Delay::Queued);
        }
        self.laid_down = true;
        self.began
    }

    /// It could not be done at once.
    pub(crate) fn delay(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.began, true) {
            (self.hook)(&self.key, self.token, Delay::Began(error.clone()));
        }
    }

    /// Redis has answered: the key is not this lease's any more.
    pub(crate) fn confirm(mut self) {
        self.confirmed = true;
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if self.laid_down {
            return;
        }
        let confirmed = self.confirmed;
        if !confirmed {
            self.delay(&Error::new(ErrorKind::Timeout, "the release was given up"));
        }
        if self.began {
            (self.hook)(&self.key, self.token, Delay::Ended { confirmed });
        }
    }
}
