//! The shutdown flag of a client, and a sleep that shutdown ends.

use std::time::Duration;

use crate::report::error::{Error, ErrorKind};
use crate::util::mailbox::Mailbox;
use crate::util::sync::{AtomicBool, Ordering};

#[derive(Default)]
pub struct Shutdown {
    /// Each acquire reads this flag, without a mutex.
    is_shut_down: AtomicBool,
    mailbox: Mailbox<()>,
}

impl Shutdown {
    pub fn close(&self) {
        self.is_shut_down.store(true, Ordering::Release);
        self.mailbox.stop(|()| ());
    }

    /// Returns an error once the client is shut down.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_shut_down.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(())
    }

    /// Sleeps for `pause`, or until the client is shut down.
    pub fn rest(&self, pause: Duration) -> Result<(), Error> {
        self.mailbox.sleep(pause);
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
    fn sleep_ends_after_its_time_or_at_shutdown() {
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
