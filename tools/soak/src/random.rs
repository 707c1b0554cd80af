//! Random numbers from a seed: the same seed and the same place give the same numbers. (The times of events depend on
//! the machine, so no two runs are exact copies.)

use std::time::Duration;

/// A generator for one thread (SplitMix64).
pub struct Random(u64);

impl Random {
    /// `place` distinguishes the generators of one run: round, process, thread.
    pub fn new(seed: u64, place: &[u64]) -> Self {
        let start = Self(seed);
        place.iter().fold(start, |mut random, part| {
            let mixed = random.next() ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            Self(mixed)
        })
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        let drawn = self.next() % end as u64;
        drawn as usize
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// A time of at least `from` and less than `to`, in ms.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.next() % (to - from))
    }

    /// One of `choices`, drawn according to their weights.
    pub fn weighted<T: Copy>(&mut self, choices: &[(usize, T)]) -> T {
        let total = choices.iter().map(|(weight, _)| weight).sum();
        let mut drawn = self.below(total);
        for (weight, choice) in choices {
            match drawn.checked_sub(*weight) {
                None => return *choice,
                Some(rest) => drawn = rest,
            }
        }
        unreachable!("the number is below the sum of all weights")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(seed: u64, place: &[u64]) -> Vec<usize> {
        let mut random = Random::new(seed, place);
        (0..20).map(|_| random.below(1000)).collect()
    }

    #[test]
    fn the_same_seed_and_stream_repeat() {
        assert_eq!(draws(7, &[1, 2]), draws(7, &[1, 2]));
        assert_ne!(draws(7, &[1, 2]), draws(7, &[2, 1]));
        assert_ne!(draws(7, &[1, 2]), draws(8, &[1, 2]));
    }

    #[test]
    fn weight_zero_is_never_drawn() {
        let mut random = Random::new(1, &[]);
        let drawn = (0..200).map(|_| random.weighted(&[(1, 'a'), (0, 'b'), (3, 'c')]));
        let drawn: Vec<char> = drawn.collect();
        assert!(drawn.contains(&'a') && drawn.contains(&'c') && !drawn.contains(&'b'));
    }
}
