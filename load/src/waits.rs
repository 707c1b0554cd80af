//! How long locks were waited for, as a histogram that travels between processes. Never clamps: a wait
//! too long to be recorded is an error, not a shorter wait.

use std::time::Duration;

use anyhow::anyhow;
use hdrhistogram::Histogram;

use crate::messages::Tally;

/// Significant digits kept.
const PRECISION: u8 = 3;

/// In ns, to three digits.
pub struct Waits(Histogram<u64>);

impl Waits {
    /// None yet.
    ///
    /// # Errors
    /// None in practice.
    pub fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new(PRECISION).map_err(|error| anyhow!("{error}"))?;
        Ok(Self(histogram))
    }

    /// Adds one, in ns.
    ///
    /// # Errors
    /// The histogram cannot grow that far.
    pub fn record(&mut self, nanoseconds: u64) -> anyhow::Result<()> {
        // Not `saturating_record`: that clamps instead of growing the histogram's range.
        Ok(self.0.record(nanoseconds)?)
    }

    /// Adds all that a tally tells.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn add(&mut self, tally: &Tally) -> anyhow::Result<()> {
        for &(wait, times) in &tally.waits {
            self.0.record_n(wait, times)?;
        }
        Ok(())
    }

    /// Adds all of another.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn merge(&mut self, other: &Self) -> anyhow::Result<()> {
        Ok(self.0.add(&other.0)?)
    }

    /// How many there are.
    pub fn times(&self) -> u64 {
        self.0.len()
    }

    /// Nothing when nothing was waited for.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let wait = Duration::from_nanos(self.0.value_at_quantile(quantile));
        (!self.0.is_empty()).then_some(wait)
    }

    /// As a message holds it.
    pub fn to_steps(&self) -> Vec<(u64, u64)> {
        let steps = self.0.iter_recorded();
        steps
            .map(|step| (step.value_iterated_to(), step.count_at_value()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_kept_at_their_length_on_the_way_to_another_process() -> anyhow::Result<()> {
        let (short, long) = (90_000, 7_000_000_000);
        let mut thread = Waits::new()?;
        (0..98).try_for_each(|_| thread.record(short))?;
        (0..2).try_for_each(|_| thread.record(long))?;
        let told = Tally {
            waits: thread.to_steps(),
            ..Tally::default()
        };
        let mut parent = Waits::new()?;
        parent.add(&told)?;

        assert_eq!(parent.times(), 100);
        for (quantile, wanted) in [(0.5, short), (0.99, long), (1.0, long)] {
            let found = parent.quantile(quantile);
            let wanted = Duration::from_nanos(wanted);
            let close = |found: Duration| found.abs_diff(wanted) <= wanted / 500;
            assert!(found.is_some_and(close), "{quantile}: {found:?}");
        }
        Ok(())
    }

    #[test]
    fn without_a_wait_there_is_no_quantile() -> anyhow::Result<()> {
        assert_eq!(Waits::new()?.quantile(0.5), None);
        Ok(())
    }
}
