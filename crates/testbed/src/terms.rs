//! A log of the holders of a key and their times, and checks of such a log: which holders may hold the key together, in
//! which order waiters enter, and how many holders may start in a window of time.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// How a holder holds the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Share {
    /// As the only holder: with a mutex, or as a writer.
    Alone,
    /// Together with other readers.
    Reader,
    /// Together with other permits.
    Permits {
        /// The number of permits.
        weight: u32,
        /// The limit of the semaphore that the holder used.
        limit: u32,
    },
}

/// A time in which a holder certainly held the key. All times of a log are on one clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// How the holder held the key.
    pub share: Share,
    /// The time before the call.
    pub asked: u64,
    /// A time at which the caller was known to be in the queue.
    pub queued: Option<u64>,
    /// The time after the call, at which the holder knew that it held the key.
    pub from: u64,
    /// The end: the time before the release, or the end of the last validity that the holder knew.
    pub to: u64,
}

/// Holders that held the key together, although they may not. The numbers are indexes of terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crowd {
    /// The last of these holders to enter.
    pub newest: usize,
    /// The holders that held the key when `newest` entered.
    pub others: Vec<usize>,
}

/// Two holders that entered in the wrong order: the other was in the queue before the first asked. The numbers are
/// indexes of terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaking {
    /// The holder that entered first.
    pub first: usize,
    /// The holder that had been in the queue.
    pub overtaken: usize,
}

/// Whether holders with these shares may hold a key together: one holder alone, or any number of readers, or permits up
/// to the greatest of their limits.
pub fn admits(shares: impl IntoIterator<Item = Share>) -> bool {
    let (mut alone, mut readers, mut weights, mut greatest) = (0, 0, 0_u64, 0_u64);
    for share in shares {
        match share {
            Share::Alone => alone += 1,
            Share::Reader => readers += 1,
            Share::Permits { weight, limit } => {
                weights += u64::from(weight);
                greatest = greatest.max(u64::from(limit));
            }
        }
    }
    let kinds = usize::from(alone > 0) + usize::from(readers > 0) + usize::from(weights > 0);
    kinds <= 1 && alone <= 1 && weights <= greatest
}

/// Finds the terms of one key that overlap, although they may not.
pub fn crowds(terms: &[Term]) -> Vec<Crowd> {
    let mut by_start: Vec<usize> = (0..terms.len()).collect();
    by_start.sort_by_key(|&index| terms[index].from);
    let (mut held, mut found): (Vec<usize>, _) = (Vec::new(), Vec::new());
    for newest in by_start {
        let Term { from, to, .. } = terms[newest];
        if to <= from {
            continue;
        }
        held.retain(|&other| terms[other].to > from);
        let shares = held
            .iter()
            .chain([&newest])
            .map(|&index| terms[index].share);
        if !admits(shares) {
            let others = held.clone();
            found.push(Crowd { newest, others });
        }
        held.push(newest);
    }
    found
}

/// Finds the terms of one key whose holder was certainly overtaken. A holder may have got the key before its term
/// begins. So it counts as overtaken only if its share does not fit beside those of all holders of the moment at which
/// the first holder entered.
pub fn overtakings(terms: &[Term]) -> Vec<Overtaking> {
    let mut found = Vec::new();
    for (first, early) in terms.iter().enumerate() {
        let now = early.from;
        let inside = || {
            terms
                .iter()
                .filter(|term| term.from <= now && term.to > now)
        };
        for (overtaken, late) in terms.iter().enumerate() {
            let waited = late.queued.is_some_and(|queued| queued < early.asked) && late.from > now;
            if waited && !admits(inside().map(|term| term.share).chain([late.share])) {
                found.push(Overtaking { first, overtaken });
            }
        }
    }
    found
}

/// Finds terms of one key that together have more permits than `limit`, and that were certainly granted within less
/// than `window`: each was requested and granted between two moments that are less than `window` apart.
pub fn bursts(terms: &[Term], limit: u32, window: u64) -> Vec<Vec<usize>> {
    let weight = |share| match share {
        Share::Permits { weight, .. } => weight,
        Share::Alone | Share::Reader => 1,
    };
    let mut found = BTreeSet::new();
    for first in terms {
        let within = |term: &Term| term.asked >= first.asked && term.from < first.asked + window;
        let all = terms.iter().enumerate().filter(|(_, term)| within(term));
        let (indexes, weights): (Vec<usize>, Vec<u32>) =
            all.map(|(index, term)| (index, weight(term.share))).unzip();
        if weights.iter().sum::<u32>() > limit {
            found.insert(indexes);
        }
    }
    found.into_iter().collect()
}

/// A log of the terms of one key, to which the threads of one process add.
pub struct TermLog {
    start: Instant,
    terms: Mutex<Vec<Term>>,
}

impl TermLog {
    /// An empty log.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            terms: Mutex::default(),
        }
    }

    /// The present time, in ns.
    pub fn now(&self) -> u64 {
        let nanos = self.start.elapsed().as_nanos();
        nanos.try_into().expect("a test takes less than centuries")
    }

    /// Adds a term that has ended.
    pub fn add(&self, term: Term) {
        self.lock().push(term);
    }

    /// All terms so far.
    pub fn terms(&self) -> Vec<Term> {
        self.lock().clone()
    }

    /// Describes each crowd and each overtaking among the terms.
    pub fn findings(&self) -> Vec<String> {
        let terms = self.terms();
        let crowds = crowds(&terms).into_iter().map(|Crowd { newest, others }| {
            let others = others.iter().map(|&other| &terms[other]);
            let others: Vec<&Term> = others.collect();
            format!("{:?} beside {others:?}", terms[newest])
        });
        let overtakings = overtakings(&terms)
            .into_iter()
            .map(|one| format!("{:?} before {:?}", terms[one.first], terms[one.overtaken]));
        crowds.chain(overtakings).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Term>> {
        self.terms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Share = Share::Alone;
    const READER: Share = Share::Reader;

    fn permits(weight: u32) -> Share {
        Share::Permits { weight, limit: 3 }
    }

    fn term(share: Share, from: u64, to: u64) -> Term {
        Term {
            share,
            asked: from,
            queued: None,
            from,
            to,
        }
    }

    fn crowd(newest: usize, others: &[usize]) -> Crowd {
        let others = others.to_vec();
        Crowd { newest, others }
    }

    #[test]
    fn terms_that_fit_together_are_no_crowd() {
        let readers = [term(READER, 0, 9), term(READER, 3, 20), term(ALONE, 20, 25)];
        assert_eq!(crowds(&readers), []);
        let permits = [
            term(permits(2), 0, 9),
            term(permits(1), 3, 20),
            term(permits(2), 9, 12),
            term(ALONE, 20, 21),
        ];
        assert_eq!(crowds(&permits), []);
        // The greatest limit in use decides.
        let larger = Share::Permits {
            weight: 2,
            limit: 4,
        };
        assert_eq!(
            crowds(&[term(permits[0].share, 0, 9), term(larger, 1, 9)]),
            []
        );
    }

    #[test]
    fn planted_overlaps_are_found() {
        // A holder beside an exclusive one: in both orders, and after a shorter term.
        let short = term(READER, 2, 3);
        let planted = [
            term(READER, 0, 9),
            short,
            term(ALONE, 8, 20),
            term(READER, 19, 30),
        ];
        assert_eq!(crowds(&planted), [crowd(2, &[0]), crowd(3, &[2])]);
        assert_eq!(
            crowds(&[term(ALONE, 0, 9), term(ALONE, 8, 10)]),
            [crowd(1, &[0])]
        );
        // One permit too many.
        let planted = [
            term(permits(2), 0, 9),
            term(permits(1), 0, 9),
            term(permits(1), 8, 9),
        ];
        assert_eq!(crowds(&planted), [crowd(2, &[0, 1])]);
        // Readers beside permits.
        assert_eq!(
            crowds(&[term(READER, 0, 9), term(permits(1), 8, 9)]),
            [crowd(1, &[0])]
        );
        // Terms that are given in another order.
        assert_eq!(
            crowds(&[term(ALONE, 8, 10), term(ALONE, 0, 9)]),
            [crowd(0, &[1])]
        );
    }

    #[test]
    fn a_waiter_that_was_certainly_overtaken_is_found() {
        let waiter = |share, queued, from| Term {
            asked: 1,
            queued: Some(queued),
            ..term(share, from, from + 5)
        };
        let holder = term(permits(2), 0, 20);
        let later = Term {
            asked: 6,
            ..term(permits(1), 10, 30)
        };
        let big = || waiter(permits(3), 5, 40);
        let found = [Overtaking {
            first: 1,
            overtaken: 2,
        }];
        assert_eq!(overtakings(&[holder.clone(), later.clone(), big()]), found);
        // The other holder may not have been queued in time, or may have been granted the key in time.
        assert_eq!(
            overtakings(&[holder.clone(), later.clone(), waiter(permits(3), 6, 40)]),
            []
        );
        assert_eq!(overtakings(&[later, waiter(permits(1), 5, 40)]), []);
        let in_order = Term {
            asked: 6,
            ..term(permits(1), 46, 50)
        };
        assert_eq!(overtakings(&[holder, in_order, big()]), []);
    }

    #[test]
    fn a_burst_of_starts_is_found() {
        let starts = |last| {
            let start = |asked, from| Term {
                asked,
                ..term(permits(1), from, from + 1)
            };
            [start(0, 10), start(5, 20), start(5, 25), start(5, last)]
        };
        assert_eq!(bursts(&starts(99), 3, 100), [[0, 1, 2, 3].to_vec()]);
        assert_eq!(bursts(&starts(100), 3, 100), [[0; 0]; 0]);
        assert_eq!(bursts(&starts(99), 4, 100), [[0; 0]; 0]);
    }

    #[test]
    fn a_log_names_what_its_terms_show() {
        let log = TermLog::start();
        let from = log.now();
        for share in [READER, READER] {
            log.add(term(share, from, from + 10));
        }
        assert_eq!(log.findings(), [""; 0]);
        log.add(term(ALONE, from + 5, from + 6));
        assert_eq!(log.findings().len(), 1);
    }
}
