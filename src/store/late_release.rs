//! What is told of a guard's release that could not be done at once: that it is late, and how it ended,
//! each once, whatever becomes of it. Sees to neither.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::util::key::Key;

/// News of a release that could not be done at once.
#[derive(Debug)]
pub(crate) enum Delay {
    /// It is tracked up in the background.
    Began(Error),
    /// Redis has answered after all; or it was given up.
    Ended { confirmed: bool },
    /// It went to a pipeline's queue. Until it leaves that queue, the pipeline reports its end.
    Queued,
    /// It left that queue to be written.
    Taken,
}

/// Told the news, with the key and the fencing token. Quick; never blocks; takes no lock that is held
/// while a store is asked for something: it may be called under a pipeline's.
pub(crate) type DelayHook = Arc<dyn Fn(&Key, u64, Delay) + Send + Sync>;

/// Tells the hook what becomes of a release while it is written and read. Dropping an unconfirmed one tells the
/// hook that the release was given up, unless it went to a pipeline's queue (`suspend`).
pub(crate) struct ReleaseTracker {
    hook: DelayHook,
    key: Key,
    token: u64,
    began: bool,
    confirmed: bool,
    suspended: bool,
}

impl ReleaseTracker {
    pub(crate) fn new(hook: &DelayHook, key: &Key, token: u64) -> Self {
        Self {
            hook: Arc::clone(hook),
            key: key.clone(),
            token,
            began: false,
            confirmed: false,
            suspended: false,
        }
    }

    /// For a release out of a pipeline's queue. `began`: the hook knows that it is late.
    pub(crate) fn resumed(hook: &DelayHook, key: &Key, token: u64, began: bool) -> Self {
        if began {
            hook(key, token, Delay::Taken);
        }
        let mut tracker = Self::new(hook, key, token);
        tracker.began = began;
        tracker
    }

    /// Ends this because its release goes to a pipeline's queue. True if the hook knows that the release is late.
    pub(crate) fn suspend(mut self) -> bool {
        if self.began {
            (self.hook)(&self.key, self.token, Delay::Queued);
        }
        self.suspended = true;
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

impl Drop for ReleaseTracker {
    fn drop(&mut self) {
        if self.suspended {
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
