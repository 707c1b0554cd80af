//! One of hundreds of clients that want one key at the same time, each with a thread of its own.

use std::thread;
use std::time::Instant;

use leasehold::Client;

use super::{END, Operation, Thread, What};
use crate::messages::{contended_key, key_name};

impl Thread<'_> {
    /// Locks the key again and again until `until`, and ends the client.
    pub fn contend(mut self, client: &Client, until: Instant) {
        let key = contended_key();
        let mutex = client.mutex(key_name(key));
        self.holder = Some(client.holder_id().clone());
        while !self.shared.is_ending() && Instant::now() < until {
            self.records.write(What::Began(Operation::Contend));
            let then = match self.random.one_in(2) {
                true => Self::stay_and_drop,
                false => Self::stay_and_unlock,
            };
            self.lock(&mutex, key, then);
        }
        self.shut_down(client);
    }

    fn stay_and_drop(&mut self, guard: leasehold::MutexGuard, key: usize) {
        self.stay_shortly(&guard);
        self.release(guard, key);
    }

    fn stay_and_unlock(&mut self, guard: leasehold::MutexGuard, key: usize) {
        self.stay_shortly(&guard);
        self.unlock_now(guard, key);
    }

    /// Holds the lock for so short a time that hundreds of clients get it within seconds.
    fn stay_shortly(&mut self, guard: &leasehold::MutexGuard) {
        thread::sleep(self.random.millis(0, 3));
        self.look(guard);
    }

    /// Shuts the client down. Ignores an error, which is in the records: a release that Redis does not confirm in time
    /// does not matter here.
    fn shut_down(&mut self, client: &Client) {
        let doing = crate::records::Doing::Shutdown;
        let _ = self.call(doing, None, Some(END), || client.shutdown(END));
    }
}
