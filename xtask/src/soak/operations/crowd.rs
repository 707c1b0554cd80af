//! One of hundreds of clients that want one key at the same time, each with a thread of its own.

use std::thread;
use std::time::Instant;

use leasehold::Client;

use super::{END, Operation, Thread, What};
use crate::soak::messages::{crowd_key, key_name};

impl Thread<'_> {
    /// Takes the key again and again until `until`, and ends the client.
    pub fn stand_in_crowd(mut self, client: &Client, until: Instant) {
        let key = crowd_key();
        let mutex = client.mutex(key_name(key));
        while !self.place.is_ending() && Instant::now() < until {
            self.records.write(What::Began(Operation::Crowd));
            let then = match self.chance.one_in(2) {
                true => Self::stay_and_drop,
                false => Self::stay_and_unlock,
            };
            self.lock(&mutex, key, then);
        }
        self.shut_down(client);
    }

    fn stay_and_drop(&mut self, guard: leasehold::MutexGuard, key: usize) {
        self.stay_shortly(&guard);
        self.let_go(guard, key);
    }

    fn stay_and_unlock(&mut self, guard: leasehold::MutexGuard, key: usize) {
        self.stay_shortly(&guard);
        self.unlock_now(guard, key);
    }

    /// So shortly that hundreds have their turns within seconds.
    fn stay_shortly(&mut self, guard: &leasehold::MutexGuard) {
        thread::sleep(self.chance.millis(0, 3));
        self.look(guard);
    }

    /// What cannot be confirmed in time says so, and is no matter here.
    fn shut_down(&mut self, client: &Client) {
        let doing = crate::soak::records::Doing::Shutdown;
        let _ = self.call(doing, None, Some(END), || client.shutdown(END));
    }
}
