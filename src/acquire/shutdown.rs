//! That the client is shut down, for those who wait for nothing else.

use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::util::sync::{AtomicBool, Condvar, Mutex, Ordering};

#[derive(Default)]
pub(super) struct Shutdown {
    closed: AtomicBool,
    /// Held while that changes, so that nobody falls asleep just then.
    changing: Mutex<()>,
    changed: Condvar,
}

impl Shutdown {
    pub(super) fn close(&self) {
        let changing = self.changing.lock();
        self.closed.store(true, Ordering::Release);
        drop(changing);
        self.changed.notify_all();
    }

    /// An error once the client is shut down.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(())
    }

    /// Sleeps for `pause`, or until the client is shut down.
    pub(super) fn rest(&self, pause: Duration) -> Result<(), Error> {
        let mut changing = self.changing.lock();
        if self.check().is_ok() {
            self.changed.wait_for(&mut changing, pause);
        }
        self.check()
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_rest_ends_with_its_time_or_with_the_client() {
        let shutdown = Shutdown::default();
        shutdown.rest(Duration::from_millis(1)).unwrap();
        let started = Instant::now();
        std::thread::scope(|scope| {
            let resting = scope.spawn(|| shutdown.rest(LONG));
            shutdown.close();
            let error = resting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Shutdown);
        });
        shutdown.rest(LONG).unwrap_err();
        assert!(started.elapsed() < LONG);
    }
}
