//! The leases of this client whose grants are on their way to another one. What is heard of them late is
//! not this client's to give back.

use std::collections::HashMap;

use crate::clock::Moment;
use crate::id::LeaseId;

/// Each with the end of its key, after which it is forgotten.
#[derive(Default)]
pub(super) struct HandedOver(HashMap<LeaseId, Moment>);

impl HandedOver {
    pub(super) fn insert(&mut self, lease: LeaseId, until: Moment, now: Moment) {
        self.0.retain(|_, until| *until > now);
        self.0.insert(lease, until);
    }

    pub(super) fn contains(&self, lease: LeaseId) -> bool {
        self.0.contains_key(&lease)
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
        handed_over.insert(LeaseId::random(), later, later);
        assert!(!handed_over.contains(first) && handed_over.contains(second));
    }
}
