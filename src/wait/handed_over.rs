//! The leases of this client whose grants are on their way to another one. What is heard of them late is
//! not this client's to give back.

use std::collections::HashMap;

use crate::clock::Moment;
use crate::id::LeaseId;

/// With fewer entries none is removed.
const FEW: usize = 64;

/// Bounded by the keys: expired entries are removed whenever the number of entries has doubled.
#[derive(Default)]
pub(super) struct HandedOver {
    /// Each with the end of its key.
    until: HashMap<LeaseId, Moment>,
    /// How many were left when expired ones were last removed.
    kept: usize,
}

impl HandedOver {
    pub(super) fn insert(&mut self, lease: LeaseId, until: Moment, now: Moment) {
        // Not at each call: with very many entries that would take longer than all the rest.
        if self.until.len() >= FEW.max(2 * self.kept) {
            self.until.retain(|_, until| *until > now);
            self.kept = self.until.len();
        }
        self.until.insert(lease, until);
    }

    pub(super) fn contains(&self, lease: LeaseId) -> bool {
        self.until.contains_key(&lease)
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_handed_over_is_known_until_the_end_of_its_key() {
        let mut handed_over = HandedOver::default();
        let [first, second] = [(); 2].map(|()| LeaseId::random());
        let now = Moment::now();
        let later = now.after(Duration::from_secs(1));
        handed_over.insert(first, later, now);
        handed_over.insert(second, later.after(Duration::from_secs(1)), now);
        assert!(handed_over.contains(first) && handed_over.contains(second));
        for _ in 0..FEW {
            handed_over.insert(LeaseId::random(), later, later);
        }
        assert!(!handed_over.contains(first) && handed_over.contains(second));
    }

    #[test]
    fn twice_as_many_as_there_are_keys_are_kept() {
        let mut handed_over = HandedOver::default();
        let start = Moment::now();
        let keys = 1000;
        for n in 0..20 * keys {
            let now = start.after(Duration::from_millis(n));
            let until = now.after(Duration::from_millis(keys));
            handed_over.insert(LeaseId::random(), until, now);
            let most = 2 * keys as usize + 2;
            assert!(handed_over.until.len() <= most);
        }
    }
}
