//! What is drawn, from a seed: the same draws for the same seed and the same place. Knows nothing of
//! what they are for. (When things happen is up to the machine, so no run is another's exact copy.)

use std::time::Duration;

/// A generator of its own for each thread (SplitMix64).
pub struct Chance(u64);

impl Chance {
    /// `place` tells the generators of one run apart: round, process, thread.
    pub fn new(seed: u64, place: &[u64]) -> Self {
        let start = Self(seed);
        place.iter().fold(start, |mut chance, part| {
            let mixed = chance.next() ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
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

    /// Less than `end`, which is not 0.
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

    /// One of `choices`, each as often as its weight says.
    pub fn weighted<T: Copy>(&mut self, choices: &[(usize, T)]) -> T {
        let total = choices.iter().map(|(weight, _)| weight).sum();
        let mut drawn = self.below(total);
        for (weight, choice) in choices {
            match drawn.checked_sub(*weight) {
                None => return *choice,
                Some(rest) => drawn = rest,
            }
        }
        unreachable!("less was drawn than all weights together")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(seed: u64, place: &[u64]) -> Vec<usize> {
        let mut chance = Chance::new(seed, place);
        (0..20).map(|_| chance.below(1000)).collect()
    }

    #[test]
    fn the_same_seed_and_place_draw_the_same() {
        assert_eq!(draws(7, &[1, 2]), draws(7, &[1, 2]));
        assert_ne!(draws(7, &[1, 2]), draws(7, &[2, 1]));
        assert_ne!(draws(7, &[1, 2]), draws(8, &[1, 2]));
    }

    #[test]
    fn what_weighs_nothing_is_never_drawn() {
        let mut chance = Chance::new(1, &[]);
        let drawn = (0..200).map(|_| chance.weighted(&[(1, 'a'), (0, 'b'), (3, 'c')]));
        let drawn: Vec<char> = drawn.collect();
        assert!(drawn.contains(&'a') && drawn.contains(&'c') && !drawn.contains(&'b'));
    }
}
