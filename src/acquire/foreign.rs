//! The holders of other libraries that this client has reported, so that each holder is one event. Data that stays
//! under a lock's key by mistake looks like a held lock. The event is then the only sign of the mistake.

use std::sync::atomic::AtomicUsize;

use crate::command::Foreign;
use crate::config::key::{Key, KeyMap};
use crate::util::sync::{Mutex, Ordering};

/// The client remembers the holders of at most this many keys. With one more key, it forgets all of them, and reports
/// those that it finds again.
const MOST_KEYS: usize = 1024;

/// The last holder of another library that was reported, for each key.
#[derive(Default)]
pub struct ForeignHolders {
    reported: Mutex<KeyMap<(&'static str, u32)>>,
    /// The number of entries in `reported`, so that `forget` needs no mutex in the usual case.
    count: AtomicUsize,
}

impl ForeignHolders {
    /// Records that `found` holds `key`. Returns whether this holder is new. The holders of strings and of Redisson's
    /// locks have different marks. Two other holders of the same type look the same, so the next one is new only after
    /// this client has had the key.
    pub fn record(&self, key: &Key, found: Foreign) -> bool {
        let mut reported = self.reported.lock();
        if reported.len() >= MOST_KEYS && !reported.contains_key(key) {
            reported.clear();
        }
        let holder = (found.redis_type, found.mark);
        let before = reported.insert(key.clone(), holder);
        self.count.store(reported.len(), Ordering::Relaxed);
        before != Some(holder)
    }

    /// Forgets the holder of `key`, which this client was granted: the next holder of another library is a new one.
    pub fn forget(&self, key: &Key) {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut reported = self.reported.lock();
            reported.remove(key);
            self.count.store(reported.len(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn found(redis_type: &'static str, mark: u32) -> Foreign {
        Foreign {
            redis_type,
            expires_in: None,
            mark,
        }
    }

    #[test]
    fn each_holder_is_news_once() {
        let holders = ForeignHolders::default();
        let [a, b] = ["a", "b"].map(|name| Key::new("", name, 16).unwrap());
        assert!(holders.record(&a, found("string", 1)));
        assert!(!holders.record(&a, found("string", 1)));
        assert!(holders.record(&a, found("string", 2)), "the next holder");
        assert!(holders.record(&b, found("string", 2)), "another key");
        assert!(holders.record(&a, found("zset", 0)));
        holders.forget(&a);
        assert!(holders.record(&a, found("zset", 0)));
    }

    #[test]
    fn holders_of_many_keys_are_forgotten_together() {
        let holders = ForeignHolders::default();
        let key = |n: usize| Key::new("", &n.to_string(), 16).unwrap();
        for n in 0..MOST_KEYS {
            assert!(holders.record(&key(n), found("string", 1)));
        }
        assert!(!holders.record(&key(0), found("string", 1)));
        assert!(holders.record(&key(MOST_KEYS), found("string", 1)));
        assert!(holders.record(&key(0), found("string", 1)), "forgotten");
        assert_eq!(holders.reported.lock().len(), 2);
    }
}
