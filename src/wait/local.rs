//! The queues of one client's own threads, one for each key that somebody waits for, first in first
//! out. Only the first in line talks to Redis.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::clock::Moment;
use crate::key::{Key, KeyMap};

const SHARDS: usize = 64;

type Line = VecDeque<Arc<Waiter>>;

pub(crate) struct LocalQueues {
    shards: Box<[Mutex<KeyMap<Line>>]>,
}

/// Somebody's place in line; left when dropped.
pub(crate) struct Place<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    has_the_lock: bool,
}

#[derive(Default)]
struct Waiter {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    in_front: bool,
    /// Latched: a wake-up that comes before the sleep is not lost.
    woken: bool,
}

impl LocalQueues {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { shards }
    }

    pub(crate) fn join<'a>(&'a self, key: &'a Key) -> Place<'a> {
        let mut shard = self.shard(key).lock();
        let line = shard.entry(key.clone()).or_default();
        let waiter = Arc::new(Waiter::default());
        waiter.state.lock().in_front = line.is_empty();
        line.push_back(Arc::clone(&waiter));
        self.place(key, waiter)
    }

    pub(crate) fn join_if_empty<'a>(&'a self, key: &'a Key) -> Option<Place<'a>> {
        let mut shard = self.shard(key).lock();
        if shard.contains_key(key) {
            return None;
        }
        let waiter = Arc::new(Waiter::default());
        waiter.state.lock().in_front = true;
        shard.insert(key.clone(), VecDeque::from([Arc::clone(&waiter)]));
        Some(self.place(key, waiter))
    }

    /// Wakes the first in line for `key`.
    pub(crate) fn wake(&self, key: &Key) {
        let first = self
            .shard(key)
            .lock()
            .get(key)
            .and_then(|line| line.front().cloned());
        if let Some(waiter) = first {
            waiter.wake();
        }
    }

    /// Wakes everybody.
    pub(crate) fn wake_all(&self) {
        for shard in &self.shards {
            for line in shard.lock().values() {
                line.iter().for_each(|waiter| waiter.wake());
            }
        }
    }

    fn shard(&self, key: &Key) -> &Mutex<KeyMap<Line>> {
        &self.shards[key.part(SHARDS)]
    }

    fn place<'a>(&'a self, key: &'a Key, waiter: Arc<Waiter>) -> Place<'a> {
        Place {
            queues: self,
            key,
            waiter,
            has_the_lock: false,
        }
    }
}

impl Place<'_> {
    pub(crate) fn is_in_front(&self) -> bool {
        self.waiter.state.lock().in_front
    }

    /// Sleeps until woken, but not past `until`, and once in front of the line for no longer than
    /// `pause`. True if woken.
    pub(crate) fn wait(&self, until: Moment, pause: Duration) -> bool {
        let mut state = self.waiter.state.lock();
        let mut until = until;
        let mut bounded = false;
        loop {
            if std::mem::take(&mut state.woken) {
                return true;
            }
            let now = Moment::now();
            if state.in_front && !bounded {
                until = until.min(now.after(pause));
                bounded = true;
            }
            let left = until.since(now);
            if left.is_zero() {
                return false;
            }
            self.waiter.changed.wait_for(&mut state, left);
        }
    }

    /// Leaves the line as the lock's new holder: the next in line has no need to try at once.
    pub(crate) fn leave_with_the_lock(mut self) {
        self.has_the_lock = true;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut shard = self.queues.shard(self.key).lock();
        let Some(line) = shard.get_mut(self.key) else {
            return;
        };
        let Some(position) = line.iter().position(|w| Arc::ptr_eq(w, &self.waiter)) else {
            return;
        };
        line.remove(position);
        match line.front() {
            None => {
                shard.remove(self.key);
            }
            Some(next) if position == 0 => {
                let mut state = next.state.lock();
                state.in_front = true;
                // A wake-up that came for whoever leaves without the lock is for the next.
                state.woken |= !self.has_the_lock;
                next.changed.notify_one();
            }
            Some(_) => {}
        }
    }
}

impl Waiter {
    fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("", name, 16).unwrap()
    }

    fn soon() -> Moment {
        Moment::now().after(Duration::from_millis(1))
    }

    #[test]
    fn the_line_is_first_in_first_out() {
        let (queues, key) = (LocalQueues::new(), key("a"));
        let (one, two, three) = (queues.join(&key), queues.join(&key), queues.join(&key));
        assert!(one.is_in_front() && !two.is_in_front() && !three.is_in_front());
        drop(one);
        assert!(two.is_in_front() && !three.is_in_front());
        drop(three);
        drop(two);
        assert!(queues.join_if_empty(&key).is_some());
    }

    #[test]
    fn nobody_joins_a_line_only_to_look() {
        let (queues, key) = (LocalQueues::new(), key("a"));
        let one = queues.join(&key);
        assert!(queues.join_if_empty(&key).is_none());
        drop(one);
        assert!(queues.join_if_empty(&key).is_some());
    }

    #[test]
    fn a_wake_up_before_the_sleep_is_kept() {
        let (queues, key) = (LocalQueues::new(), key("a"));
        let one = queues.join(&key);
        queues.wake(&key);
        assert!(one.wait(
            Moment::now().after(Duration::from_secs(60)),
            Duration::from_secs(60)
        ));
        assert!(!one.wait(soon(), Duration::from_secs(60)), "used up");
    }

    #[test]
    fn whoever_gives_up_passes_its_wake_up_on() {
        let (queues, key) = (LocalQueues::new(), key("a"));
        let (one, two) = (queues.join(&key), queues.join(&key));
        queues.wake(&key);
        drop(one);
        assert!(two.wait(soon(), Duration::from_secs(60)));
    }

    #[test]
    fn the_next_of_a_new_holder_waits_for_its_pause_only() {
        let (queues, key) = (LocalQueues::new(), key("a"));
        let (one, two) = (queues.join(&key), queues.join(&key));
        one.leave_with_the_lock();
        let far = Moment::now().after(Duration::from_secs(600));
        assert!(!two.wait(far, Duration::from_millis(1)));
        assert!(two.is_in_front());
    }
}
