//! What a lock is renewed for: a caller's closure that says whether to go on. Runs it, and decides
//! neither when nor on which thread.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Asked before each renewal.
#[derive(Clone)]
pub(crate) struct Check(Arc<dyn Fn() -> bool + Send + Sync>);

impl Check {
    pub(crate) fn new(check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }

    /// A panic is a no, also that of what it owns when it goes with this.
    pub(super) fn into_answer(self) -> bool {
        catch_unwind(AssertUnwindSafe(move || (self.0)())).unwrap_or(false)
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Check")
    }
}
