//! Medians and quartiles of the rounds of a run. Knows nothing of locks.

use serde::Serialize;

/// The median of some figures, and the middle half of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

impl Spread {
    /// Needs at least one figure.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Self {
        let mut figures: Vec<_> = figures.into_iter().collect();
        assert!(!figures.is_empty(), "at least one figure");
        figures.sort_by(f64::total_cmp);
        let at = |part| between(&figures, part);
        Self {
            low: at(0.25),
            median: at(0.5),
            high: at(0.75),
        }
    }
}

/// The value at this share of the way through sorted figures, interpolated between two of them if necessary.
fn between(sorted: &[f64], part: f64) -> f64 {
    let place = part * (sorted.len() - 1) as f64;
    let (below, above) = (
        sorted[place.floor() as usize],
        sorted[place.ceil() as usize],
    );
    below + (above - below) * place.fract()
}

/// The spread of the [`ratios`] of all rounds. `None` if no round has a baseline.
pub fn compare(figures: &[f64], to: &[f64]) -> Option<Spread> {
    let ratios: Vec<_> = ratios(figures, to).collect();
    (!ratios.is_empty()).then(|| Spread::of(ratios))
}

/// Divides each figure by the figure of the same round in the baseline `to`: other load in a round affects both
/// figures. A round is left out if its baseline is zero or if one of the figures is not a number (the machine did
/// something else).
fn ratios<'a>(figures: &'a [f64], to: &'a [f64]) -> impl Iterator<Item = f64> + 'a {
    assert_eq!(figures.len(), to.len(), "every round has both");
    let pairs = figures.iter().zip(to);
    let ratios = pairs.map(|(figure, floor)| figure / floor);
    ratios.filter(|ratio| ratio.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_half_is_found_in_any_order() {
        let spread = Spread::of([5.0, 1.0, 4.0, 2.0, 3.0]);
        let wanted = Spread {
            low: 2.0,
            median: 3.0,
            high: 4.0,
        };
        assert_eq!(spread, wanted);
    }

    #[test]
    fn values_between_two_figures_are_interpolated() {
        let spread = Spread::of([10.0, 20.0]);
        assert_eq!((spread.low, spread.median, spread.high), (12.5, 15.0, 17.5));
        let alone = Spread::of([7.0]);
        assert_eq!((alone.low, alone.median, alone.high), (7.0, 7.0, 7.0));
    }

    #[test]
    fn rounds_are_compared_one_by_one() {
        // In the second round, the machine was half as fast, and the ratio stays the same.
        let (floor, figures) = ([100.0, 50.0, 100.0], [200.0, 100.0, 300.0]);
        let spread = compare(&figures, &floor).expect("every round has a baseline");
        assert_eq!((spread.low, spread.median, spread.high), (2.0, 2.0, 2.5));
    }

    #[test]
    fn a_round_with_an_empty_baseline_is_skipped() {
        let figures = [1.0, 0.0, 6.0, f64::NAN, 0.0];
        let ratios: Vec<_> = ratios(&figures, &[0.0, 2.0, 2.0, 2.0, 0.0]).collect();
        assert_eq!(ratios, [0.0, 3.0]);
        assert_eq!(compare(&[1.0], &[0.0]), None);
    }

    #[test]
    #[should_panic(expected = "every round has both")]
    fn a_round_without_its_baseline_is_not_compared() {
        let _ = ratios(&[1.0], &[]);
    }
}
