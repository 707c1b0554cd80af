//! The leases that this client asked for and gave up without having held them. A grant of one of these may still
//! come, and is released then. Grants of other leases are not: anybody may publish a message of one.

use std::collections::VecDeque;

use crate::util::id::LeaseId;

/// How many are known; the oldest is forgotten first.
const MOST: usize = 64;

#[derive(Default)]
pub(super) struct Abandoned(VecDeque<LeaseId>);

impl Abandoned {
    pub(super) fn insert(&mut self, lease: LeaseId) {
        if self.0.contains(&lease) {
            return;
        }
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(lease);
    }

    /// Forgets `lease`: one release is enough. False if it is not known.
    pub(super) fn take(&mut self, lease: LeaseId) -> bool {
        let place = self.0.iter().position(|known| *known == lease);
        place.and_then(|place| self.0.remove(place)).is_some()
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn an_abandoned_lease_is_taken_once() {
        let mut abandoned = Abandoned::default();
        let [first, second] = [(); 2].map(|()| LeaseId::random());
        for lease in [first, second, first] {
            abandoned.insert(lease);
        }
        assert!(abandoned.take(first) && !abandoned.take(first));
        assert!(abandoned.take(second));
    }

    #[test]
    fn of_many_abandoned_leases_the_newest_are_known() {
        let mut abandoned = Abandoned::default();
        let leases: Vec<LeaseId> = (0..=MOST).map(|_| LeaseId::random()).collect();
        leases.iter().for_each(|lease| abandoned.insert(*lease));
        assert_eq!(abandoned.0.len(), MOST);
        assert!(!abandoned.take(leases[0]));
        assert!(leases[1..].iter().all(|lease| abandoned.take(*lease)));
    }
}
